"""The saved step of another run that a run goes on with: found, checked, and compared with one long
run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import tasks
from trainer.config.auto import with_micro_batch, with_steps
from trainer.config.differences import differing, flatten
from trainer.config.origin import continues as blocks
from trainer.errors import CheckpointError, ResumeError
from trainer.files.atomic import read_json
from trainer.runtime import distributed
from trainer.runtime.distributed import on_main
from trainer.training import checkpoint
from trainer.training.schedule import factor

if TYPE_CHECKING:
    from trainer.config.origin.continues import Continues
    from trainer.config.schema import Experiment
    from trainer.training.checkpoint import SavedState
    from trainer.training.options import Options
    from trainer.training.run_plan import RunPlan

logger = logging.getLogger(__name__)

# What makes up no step, and yet changes its last bits.
_ROUNDING = ("train.micro_batch", "train.micro_tokens", "train.compile")


def refuse_absent(plan: RunPlan, options: Options) -> None:
    """ConfigError when a run that has saved nothing yet goes on with a saved step that is not
    there, or has changed. On one rank.
    """
    has_begun = bool(checkpoint.candidates(plan.checkpoints)) and not options.resets(plan.id)
    if plan.cfg.continues is not None and not has_begun:
        blocks.refuse_absent(plan.cfg.continues, options.savedir_base)


def saved_state(plan: RunPlan, savedir_base: Path) -> SavedState | None:
    """The saved step that the run goes on with; None when it begins anew. Every rank checks a share
    of its files. A collective.

    ConfigError when it is not there; CheckpointError when it is damaged.
    """
    continues = plan.cfg.continues
    if continues is None:
        return None
    on_main(lambda: blocks.refuse_absent(continues, savedir_base))
    folder = continues.folder(savedir_base)
    own = checkpoint.problems(folder, part=distributed.rank(), parts=distributed.world())
    wrong = [line for lines in distributed.gather(own) for line in lines]
    if wrong:
        raise CheckpointError(
            f"continues: {folder} is damaged: {'; '.join(dict.fromkeys(wrong))}. Go on from "
            "another saved step of that run (--from)."
        )
    on_main(lambda: logger.info("%s", told(plan.cfg, history(plan.cfg, savedir_base))))
    return _SavedStep(folder)


@dataclass(frozen=True)
class _SavedStep(checkpoint.Checkpoint):
    """The step as another run saved it. That run's best/ lies in its own folder, so that the best
    evaluation is looked for anew.
    """

    def state(self) -> dict[str, Any]:
        state = super().state()
        fresh = {"best": None, "tie_breakers": [], "best_step": 0, "best_is": None, "waited": 0}
        fresh |= {"is_out_of_time": False, "by_source": []}
        return {**state, "progress": {**state["progress"], **fresh}}


@dataclass(frozen=True)
class DoneSteps:
    """Steps that are done (from 0), and the experiment that did them."""

    steps: range
    cfg: Experiment


def history(cfg: Experiment, savedir_base: Path) -> list[DoneSteps]:
    """The steps that are done when a run goes on, by the runs that did them, in order."""
    parts: list[DoneSteps] = []
    continues = cfg.continues
    while continues is not None:
        before = tasks.parse(continues.experiment)
        resolved = read_json(savedir_base / continues.id / "resolved.json") or {}
        ran = {**before.train.model_dump(), **resolved.get("train", {})}  # the rows gave its steps
        before = with_micro_batch(with_steps(before, ran["steps"]), ran["micro_batch"])
        start = 0 if before.continues is None else before.continues.step
        parts.insert(0, DoneSteps(range(start, continues.step), before))
        continues = before.continues
    return parts


def told(cfg: Experiment, done: Sequence[DoneSteps]) -> str:
    """What is said of a run that goes on: from where, and whether its bits are those of one long
    run. done: its history.
    """
    assert cfg.continues is not None, "the caller has looked"
    start = f"it goes on with run {cfg.continues.id} at step {cfg.continues.step}"
    for part in done:
        for step in part.steps:
            one, other = _rate(part.cfg, step), _rate(cfg, step)
            if one != other:
                shapes = f"{part.cfg.schedule.shape}, then {cfg.schedule.shape}"
                return (
                    f"{start}. It is not what one run of {cfg.train.steps} steps would be: at step "
                    f"{step + 1} the learning rate was {one:.3g}, and would have been {other:.3g} "
                    f'({shapes}). With "constant", "inverse_sqrt" and the stable part of "wsd" it '
                    "is the same"
                )
    every = [flatten(one.model_dump(mode="json")) for one in (*(p.cfg for p in done), cfg)]
    others = [
        key
        for key in differing(every)
        if key in _ROUNDING or (key.startswith("optim.") and key != "optim.lr")
    ]
    if others:
        return f"{start}, with another {', '.join(others)} than before"
    return f"{start}. Its bits are those of one run of {cfg.train.steps} steps"


def _rate(cfg: Experiment, step: int) -> float:
    return cfg.optim.lr * factor(cfg.schedule, step, cfg.train.steps)


def refuse_other_rows(continues: Continues, now: Mapping[str, str], savedir_base: Path) -> None:
    """ResumeError when the rows or the base of a run are others than those of the run that it goes
    on with. now: their digests.
    """
    then = _SavedStep(continues.folder(savedir_base)).state().get("identity") or {}
    changed = [
        f"{key} (was {then[key]!r}, is {now[key]!r})"
        for key in now
        if key in then and then[key] != now[key]
    ]
    if changed:
        raise ResumeError(
            f"continues: run {continues.id} was trained on other rows, or another base: "
            f"{'; '.join(changed)}.\nPut them back, or begin a new run with the weights of that "
            'one: "base": {"experiment": ...}.'
        )
