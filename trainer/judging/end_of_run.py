"""The comparison at the end of a run ("judge" in its dictionary), and the gate before final/."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.config.scores.judged import KEPT_LOSS
from trainer.errors import ConfigError, LatheError
from trainer.files.atomic import refusals
from trainer.judging import sides
from trainer.judging.compare import ComparedModels, run_judge, shared_with_training
from trainer.judging.general_texts import is_language_model, store_of_texts
from trainer.metrics import judge_record
from trainer.metrics.judge_record import is_judged, judged_model, refusals_of
from trainer.runtime import distributed
from trainer.runtime.distributed import on_main
from trainer.runtime.preemption import Stopped
from trainer.telemetry.metrics_file import has_line
from trainer.telemetry.run_record import METRICS
from trainer.training.validation import refuse_few_rows
from trainer.verdict.judgement import Judgement

if TYPE_CHECKING:
    from trainer.config.scores.judged import Judging
    from trainer.data.token_store import TokenStore
    from trainer.protocol.task import Task
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import RunPlan

logger = logging.getLogger(__name__)

_WORSE_SLICES = "judge/worse_slices"  # in every line of a comparison

Log = Callable[[int, Mapping[str, float]], None]


def check_early(plan: RunPlan, options: Options, task: Task, train: TokenStore) -> None:
    """Refuse before the first step what the comparison at the end would refuse: rows that are
    training rows, another run that is not there, texts that cannot be read. A collective.
    """
    how: Judging = plan.cfg.judge  # pyright: ignore[reportAssignmentType] (the caller has looked)
    _refuse_loss_on_texts(plan)
    other = sides.other_side(options.savedir_base, plan.values, how, None)
    comparison = ComparedModels(other, sides.Side([plan.values], "final", plan.id), how)
    shared_with_training(comparison, options, ours=(task, train))
    texts = None if how.keep is None else store_of_texts(plan.values, how.keep, options)
    if texts is not None and KEPT_LOSS in how.gate and how.gate[KEPT_LOSS].gain is not None:
        refuse_few_rows(KEPT_LOSS, len(texts[2]))


def early_problems(
    plan: RunPlan, options: Options, earlier: Collection[str]
) -> tuple[list[str], list[str]]:
    """What a dry run says of the gate and of the other model: what a run would be refused for, and
    what will be there by then, for an experiment of the same group is trained before (its id is in
    `earlier`), by whatever beginning of the id it is named.
    """
    how: Judging = plan.cfg.judge  # pyright: ignore[reportAssignmentType] (the caller has looked)
    problems, warnings = list[str](), list[str]()
    try:
        _refuse_loss_on_texts(plan)
    except LatheError as error:
        problems.append(str(error))
    for name in how.against.split(","):
        alone = how.model_copy(update={"against": name})
        try:
            sides.other_side(options.savedir_base, plan.values, alone, None)
        except LatheError as error:
            beginning = name.strip()
            is_awaited = bool(beginning) and any(one.startswith(beginning) for one in earlier)
            (warnings if is_awaited else problems).append(str(error))
    return problems, warnings


def _refuse_loss_on_texts(plan: RunPlan) -> None:
    """ConfigError for a gate on the loss of texts where the task trains no language model."""
    how: Judging = plan.cfg.judge  # pyright: ignore[reportAssignmentType] (the caller has looked)
    if KEPT_LOSS in how.gate and not is_language_model(plan.values):
        raise ConfigError(
            f"judge.gate={KEPT_LOSS!r}: task {plan.cfg.task!r} trains no language model, whose "
            "loss on texts could be measured. Leave it out."
        )


def judge_at_end(
    plan: RunPlan, options: Options, preemption: Preemption, *, step: int, log: Log
) -> bool:
    """Compare the trained model as the dictionary says, write judge.json and judge.md, and let the
    model become final/ if its gate holds. False when a signal ended it; the same command then
    begins it again.

    step: the last one of the run. A collective. What is judged already is left as it is.
    """
    how: Judging = plan.cfg.judge  # pyright: ignore[reportAssignmentType] (the caller has looked)
    is_gated = bool(how.gate)
    name = on_main(lambda: judged_model(plan.folder, is_gated=is_gated))
    if not on_main(lambda: is_judged(plan.folder, name)):
        train = plan.cfg.train
        comparison = ComparedModels(
            sides.other_side(options.savedir_base, plan.values, how, None),
            sides.Side([plan.values], name, f"{name} of {plan.id}"),
            how,
            batch=train.eval_batch or train.micro_batch,
        )

        def stop() -> None:
            if int(distributed.total(torch.tensor(int(preemption.requested)))):
                raise Stopped

        logger.info("%s/ is compared with %s", name, comparison.before.name)
        try:
            judgement = run_judge(comparison, options, plan.folder, stop=stop)
        except Stopped:
            return False
        if not on_main(lambda: has_line(plan.folder / METRICS, step, _WORSE_SLICES)):
            log(step, _scalars(judgement))
        logger.info("%s", judgement.words)
        on_main(lambda: judge_record.record(plan.folder, name, judgement.refusals))
    reasons = on_main(lambda: refusals_of(plan.folder))
    if reasons:
        logger.warning("no final/: %s. %s/ stays", "; ".join(reasons), name)
    elif is_gated:
        on_main(lambda: _promote(plan.folder, name))
    return True


def _scalars(judgement: Judgement) -> dict[str, float]:
    """The line of the log: what changed."""
    scalars: dict[str, float] = {}
    for name, score in judgement.scores.items():
        one = score.outcome
        scalars |= {f"judge/{name}_before": one.before, f"judge/{name}": one.after}
        scalars |= {f"judge/{name}_change_low": one.low, f"judge/{name}_change_high": one.high}
    if judgement.general is not None:
        outcome = judgement.general.outcome
        scalars |= {"judge/keep_loss_before": outcome.before, "judge/keep_loss": outcome.after}
    return {**scalars, _WORSE_SLICES: len(judgement.slices)}


def _promote(run_folder: Path, name: str) -> None:
    """Make final/ of the export that was judged: candidate/ moves there, and best/ stays and is
    linked.
    """
    source, final = run_folder / name, run_folder / "final"
    if final.is_dir():
        return
    with refusals(final):
        if name != "best":
            os.replace(source, final)
            return
        temporary = run_folder / ".final.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(source, temporary, copy_function=_link)
        os.replace(temporary, final)


def _link(source: Any, target: Any) -> None:
    """A second name for a file; a copy where the disk has no such names."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
