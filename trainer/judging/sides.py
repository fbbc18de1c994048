"""The two models of a comparison, by the names that people give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import tasks
from trainer.config.block import validate
from trainer.config.identity import base_label, exp_id
from trainer.config.scores.judged import Judging
from trainer.errors import ConfigError
from trainer.evaluation.named_run import dictionary_of
from trainer.evaluation.run import Question
from trainer.judging.by_row import START
from trainer.metrics.judge_record import CANDIDATE

Values = dict[str, Any]

BASE = "base"
_EXPORTS = ("best", "final", CANDIDATE)


@dataclass(frozen=True)
class Side:
    """One of the two models that are compared."""

    experiments: Sequence[Values]  # several: seeds of one recipe
    model: str  # an export of the run folder, or START, what the run begins with
    name: str  # for people

    def questions(self, how: Judging, limit: int | None, batch: int | None) -> Iterator[Question]:
        """What each model is evaluated on."""
        for values in self.experiments:
            yield Question(values, model=self.model, split=how.split, limit=limit, batch=batch)


@dataclass(frozen=True)
class ComparedModels:
    """What is compared, and how."""

    before: Side
    after: Side
    how: Judging
    limit: int | None = None  # the first rows only
    batch: int | None = None  # rows of one forward; None: train.eval_batch


def compared(
    savedir_base: Path,
    experiments: Sequence[Values],
    stated: Mapping[str, Any],
    *,
    model: str | None = None,
    limit: int | None = None,
    batch: int | None = None,
) -> ComparedModels:
    """The trained models of some runs, which are seeds of one recipe, and what they are compared
    with. ConfigError for runs that are not there, and for wrong values.

    stated: values of the block `judge`, in place of those in the dictionary of the first run. The
    gate of a dictionary is for the comparison that stands there, and not for one against another
    model or on another split.
    """
    for values in experiments:
        tasks.parse(values, source=f"run {exp_id(values)}")
    own: dict[str, Any] = dict(experiments[0].get("judge") or {})
    of_run = validate(Judging, own, source="judge")
    usual = {"against": of_run.against, "split": of_run.split}
    if any(stated.get(name, value) != value for name, value in usual.items()):
        own.pop("gate", None)
    how = validate(Judging, {**own, **stated}, source="judge")
    after = of_runs(savedir_base, experiments, model)
    before = other_side(savedir_base, experiments[0], how, model)
    if before.model != START:
        _refuse_itself(before, after)
    return ComparedModels(before, after, how, limit=limit, batch=batch)


def of_runs(savedir_base: Path, experiments: Sequence[Values], model: str | None) -> Side:
    """Trained models. model: best or final; None: the first of them that every run has. ConfigError
    for a run that has none.
    """
    folders = [savedir_base / exp_id(values) for values in experiments]
    if twice := sorted({one.name for one in folders if folders.count(one) > 1}):
        raise ConfigError(
            f"judge: got run {twice[0]} twice, want different runs: several are seeds of one "
            "recipe, and the same one again would say that seeds make no difference. Name it once."
        )
    for name in _EXPORTS if model is None else (model,):
        if all((folder / name).is_dir() for folder in folders):
            label = ", ".join(folder.name for folder in folders)
            return Side(experiments, name, f"{name} of {label}")
    lacking = next(folder for folder in folders if model is None or not (folder / model).is_dir())
    raise ConfigError(
        f"judge: {lacking} holds no {model or 'best, nor a final'}/ folder. Train it to its end, "
        "or name another run."
    )


def _refuse_itself(before: Side, after: Side) -> None:
    ids = {exp_id(values) for values in after.experiments}
    both = [one for one in map(exp_id, before.experiments) if one in ids]
    if both:
        raise ConfigError(
            f"judge: run {both[0]} would be compared with itself, which shows nothing. Give "
            "--against another run, or base."
        )


def other_side(savedir_base: Path, values: Values, how: Judging, model: str | None) -> Side:
    """What a trained model is compared with: what its run began with, or other runs."""
    if how.against == BASE:
        return Side([values], START, f"what it began with ({base_label(values)})")
    experiments = [dictionary_of(savedir_base, one) for one in how.against.split(",")]
    return of_runs(savedir_base, experiments, model)
