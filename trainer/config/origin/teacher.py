"""A trained model whose probabilities a smaller one learns. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config.block import Positive, Strict
from trainer.config.schema import Base, Experiment

DivergenceName = Literal["forward", "reverse", "mixed"]


class Teacher(Strict):
    """A trained model, and how it is learnt from."""

    base: Base
    """A Hub id, a folder (also best/ or final/ of a run, whole or adapters) or {"experiment": ...}:
    a model of the same kind and tokenizer, larger as a rule.
    """
    top_k: Positive = 64
    """So many of the teacher's likeliest tokens are stored for each labelled token, with what is
    left for all others together. A number as large as the vocabulary stores all.
    """
    divergence: DivergenceName = "forward"
    """What is made small, by labelled token. forward: KL(teacher || student) (Hinton et al. 2015).
    reverse: KL(student || teacher) (MiniLLM, Gu et al. 2024). mixed: the Jensen-Shannon divergence
    (GKD, Agarwal et al. 2024, with beta 0.5).
    """
    weight: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Of the divergence in the loss; the cross-entropy with the labels has the rest, 1 - weight."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Both models' logits are divided by it before they are compared; the divergence is multiplied
    by its square, so that gradients stay as large (Hinton et al. 2015).
    """
    store: str | None = None
    """A folder for what the teacher says, which is made if need be and which other runs of the same
    teacher and rows read too. None: --cache_dir.
    """


class DistilledExperiment(Experiment):
    """An experiment whose model may learn from a teacher."""

    not_encoded = frozenset({"teacher"})

    teacher: Teacher | None = None
    """A trained model whose probabilities of each labelled token are learnt beside the labels:
    docs/distillation.md. None: the labels alone.
    """

    @model_validator(mode="after")
    def _the_teacher_reads_all_rows(self) -> DistilledExperiment:
        if self.teacher is not None and getattr(self, "data").stream:  # noqa: B009 (of each task)
            raise ValueError(
                "data.stream=true with teacher, which reads every row before the first step: leave "
                "stream out"
            )
        return self

    @model_validator(mode="after")
    def _terms_have_a_loss(self) -> DistilledExperiment:
        train = self.train
        terms = [name for name in ("label_smoothing", "z_loss") if getattr(train, name)]
        if self.teacher is not None and self.teacher.weight == 1.0 and terms:
            raise ValueError(
                f"train.{', train.'.join(terms)} with teacher.weight=1.0, which leaves no "
                f"cross-entropy. Leave {'it' if len(terms) == 1 else 'them'} out, or use a weight "
                "below 1"
            )
        return self
