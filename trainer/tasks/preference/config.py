"""What a preference experiment states. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from trainer.config.block import Positive, Strict
from trainer.config.formats.layouts import PREFERENCES, Layout, Purpose
from trainer.config.own_rows import OwnRows
from trainer.config.schema import Experiment

Loss = Literal["dpo", "ipo", "simpo", "orpo", "kto", "reward"]
# Losses that compare with the model that the run begins with.
REFERRED: tuple[Loss, ...] = ("dpo", "ipo", "kto")
_AboveZero = Annotated[float, Field(gt=0)]
# Keys that only some losses read.
_OF_LOSSES: dict[str, tuple[Loss, ...]] = {
    "beta": ("dpo", "ipo", "simpo", "orpo", "kto"),
    "label_smoothing": ("dpo",),
    "length_normalised": ("dpo",),
    "gamma": ("simpo",),
    "desirable": ("kto",),
    "undesirable": ("kto",),
    "margin": ("reward",),
    "centre": ("reward",),
    "reference": REFERRED,
}


class Data(OwnRows):
    """Rows and how they become tokens."""

    encoded = frozenset({"source", "max_tokens", "chat_template"})
    not_encoded = frozenset({"format"})
    purposes: ClassVar[tuple[Purpose, ...]] = ("preference",)
    of_source: ClassVar[frozenset[str]] = OwnRows.of_source | {"chat_template"}
    sources_of_formats: ClassVar[tuple[str, ...]] = ("files", "chat")

    source: Literal["files", "chat", "lookup"]
    """files: rows of your own with "prompt", "chosen" and "rejected", texts that stand behind one
    another as they are. chat: the same as conversations, lists of turns or texts that are turns.
    lookup: made-up facts.
    """
    max_tokens: Positive = 1024
    """Of a prompt with one answer: what is longer loses its end. With an encoder-decoder: of the
    prompt, and of each answer.
    """
    chat_template: str | None = None
    """Of conversations: a file (also below --data_path) or the name of a built-in one, "chatml" or
    "plain"; None: the tokenizer's own.
    """

    def layout(self) -> Layout | None:
        return None if self.source == "lookup" else PREFERENCES

    @model_validator(mode="after")
    def _only_conversations_have_a_template(self) -> Data:
        if self.source != "chat" and self.chat_template is not None:
            raise ValueError(
                f"source={self.source!r} has no conversations: leave chat_template out, or use "
                'source="chat"'
            )
        return self


class Preference(Strict):
    """What is learnt from answers of which some are preferred."""

    encoded = frozenset({"loss"})
    not_encoded = frozenset(_OF_LOSSES)

    loss: Loss = "dpo"
    """dpo (Rafailov et al. 2023), ipo (Azar et al. 2023), simpo (Meng et al. 2024) and orpo (Hong
    et al. 2024) learn from pairs of answers; kto (Ethayarajh et al. 2024) from single ones with a
    label; reward trains a new head that scores answers, from pairs.
    """
    beta: _AboveZero | None = None
    """How closely the model stays at its start: high values hold it there. Of ipo this is tau, of
    orpo the weight of the odds ratio. None: 0.1; of simpo, which scales its rewards by it, 2.0.
    """
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """dpo: the share of pairs that are taken to be the wrong way round (conservative DPO)."""
    length_normalised: bool = False
    """dpo: log-probabilities are means over the tokens of an answer, not sums."""
    gamma: Annotated[float, Field(ge=0.0)] = 0.5
    """simpo: the margin by which the reward of the chosen answer is to be higher."""
    desirable: _AboveZero = 1.0
    """kto: the weight of answers with the label true."""
    undesirable: _AboveZero = 1.0
    """kto: the weight of answers with the label false."""
    margin: bool = False
    """reward: rewards are to differ by the "margin" of a row, or by its score_chosen -
    score_rejected.
    """
    centre: Annotated[float, Field(ge=0.0)] = 0.0
    """reward: so often the square of the sum of both rewards is added to a loss, so that rewards
    lie around 0 (Eisenstein et al. 2023: 0.01).
    """
    reference: str | None = None
    """A folder for the log-probabilities of the start, which is made if need be and which other
    runs of the same base and rows read too. None: --cache_dir.
    """

    @property
    def strength(self) -> float:
        """beta, or what it is of this loss where it is not given."""
        if self.beta is not None:
            return self.beta
        return 2.0 if self.loss == "simpo" else 0.1

    @property
    def is_referred(self) -> bool:
        """Whether the loss compares with the model that the run begins with."""
        return self.loss in REFERRED

    @property
    def has_pairs(self) -> bool:
        """Whether a row is a chosen and a rejected answer; else it is one answer with a label."""
        return self.loss != "kto"

    @model_validator(mode="after")
    def _the_loss_reads_the_keys(self) -> Preference:
        for key, losses in _OF_LOSSES.items():
            if key in self.model_fields_set and self.loss not in losses:
                legal = " or ".join(f'"{one}"' for one in losses)
                raise ValueError(
                    f"{key} with loss={self.loss!r}, which does not read it: leave it out, or use "
                    f"loss={legal}"
                )
        return self


class Config(Experiment):
    """A preference experiment; without `lora` every weight of the base trains."""

    task: Literal["preference"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    """Answers of which some are preferred."""
    data: Data
    """Rows, and how they become tokens."""
    preference: Preference = Preference()
    """The loss, and what it reads."""

    @model_validator(mode="after")
    def _the_start_is_asked_of_all_rows(self) -> Config:
        if self.data.stream and self.preference.is_referred:
            raise ValueError(
                f"data.stream=true with preference.loss={self.preference.loss!r}, for which the "
                "model that the run begins with reads every row before the first step: leave "
                "stream out"
            )
        return self
