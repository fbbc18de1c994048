"""Runs one experiment, from its checked dictionary to exported weights, on every rank or alone.

RunPlan (training/run_plan.py) -> Chosen (choose.py) -> PreparedRun (prepare.py) -> ReadyRun
(start.py), which holds the Session (training/session.py) of the loop (training/loop.py).
"""

from __future__ import annotations

import contextlib
import logging
import math
from typing import TYPE_CHECKING, Any

from trainer.data import left_out
from trainer.errors import EXIT_OK, EXIT_PAUSED, EXIT_PREEMPTED, DataError, StorageError
from trainer.evaluation.test_split import run_test
from trainer.exports import record as export_record
from trainer.files.atomic import read_json
from trainer.judging.end_of_run import judge_at_end
from trainer.launch import preflight
from trainer.launch.choose import Chosen, choose
from trainer.launch.driving.drive import drive
from trainer.launch.prepare import is_in_memory, prepare
from trainer.launch.run_folder import claim_folder, kernels_of, open_record, push
from trainer.launch.start import ReadyRun, start
from trainer.metrics.judge_record import CANDIDATE, is_judged
from trainer.metrics.test_record import is_tested
from trainer.runtime import device_defaults, distributed
from trainer.runtime.distributed import on_main
from trainer.runtime.preemption import Preemption, Stopped
from trainer.telemetry.metrics_file import MetricsFile
from trainer.telemetry.run_record import METRICS, STATUS
from trainer.training.bad_steps import RolledBack
from trainer.training.loop import to_end
from trainer.training.run import End
from trainer.training.run import run as run_session

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping
    from pathlib import Path

    from trainer.data.order import StepBatches
    from trainer.files.held_lock import HeldLock
    from trainer.telemetry.run_record import RunRecord
    from trainer.training.options import Options
    from trainer.training.run_plan import RunPlan

logger = logging.getLogger(__name__)

EXIT_CODES: dict[End, int] = {
    "succeeded": EXIT_OK,
    "paused": EXIT_PAUSED,
    "preempted": EXIT_PREEMPTED,
}
SENTENCES: dict[End, str] = {
    "succeeded": "finished",
    "paused": "stopped by --until or put aside, to go on later",
    "preempted": "stopped, to be run again",
}


def run(plan: RunPlan, options: Options, preemption: Preemption) -> int:
    """Train one experiment to its end, from its newest good checkpoint. Returns its EXIT_CODES.

    Every rank calls it. Raises LatheError (and records it in status.json) when the run cannot go
    on, and PeerLost when another rank of a run with --survive is lost.
    """
    logger.info("experiment %s", f"{plan.name}, {plan.id}" if plan.name else plan.id)
    kernels, cfg = kernels_of([plan], options), plan.cfg
    with kernels, left_out.gathering() as notes, refused_row(plan.folder, notes):
        how: Any = {"optimizer": cfg.optim.name, "compiles": cfg.train.compile}
        device_defaults.settle(cfg.train.precision, **how)
        choice = choose(plan, options)  # may read rows, too
        preflight.try_own_metrics(plan, options)  # before the folder of the run is made
        with (
            claim_folder(choice.plan, options) as lock,
            open_record(choice.plan, options) as record,
        ):
            train = drive if plan.cfg.is_driven else _train_or_stop
            ended = train(choice, options, record, preemption, lock)
            if ended == "succeeded":
                ended = _look_at_end(choice.plan, options, record, preemption)
            record.status(ended)
            logger.info("%s: %s", SENTENCES[ended], plan.folder)
    return EXIT_CODES[ended]


def exported_at_end(plan: RunPlan) -> str | None:
    """The name of the export that the end of training writes: "final"; under a gate "candidate",
    and none where best/ is what the gate looks at, or where an earlier start has let the model
    through.
    """
    if plan.cfg.judge is None or not plan.cfg.judge.gate:
        return "final"
    folder = plan.folder
    is_there = on_main(lambda: (folder / "best").is_dir() or is_judged(folder, "final"))
    return None if is_there else CANDIDATE


def _look_at_end(plan: RunPlan, options: Options, record: RunRecord, preemption: Preemption) -> End:
    """Compare the trained model with another one, score the test split, and give the model away,
    as far as that is asked for. "preempted" when a signal ended it.
    """

    def log(step: int, scalars: Mapping[str, float]) -> None:
        record.log(step, **scalars)

    how: dict[str, Any] = {"step": record.step, "log": log}
    if plan.cfg.judge is not None and not judge_at_end(plan, options, preemption, **how):
        return "preempted"
    if on_main(lambda: (plan.folder / "final").is_dir()):
        record.log_model(plan.folder / "final", export_record.NAME)
        if options.push_to_hub:
            on_main(lambda: push(plan))
    if options.test and not run_test(plan, options, preemption, **how):
        return "preempted"
    return "succeeded"


def test_finished(plan: RunPlan, options: Options, preemption: Preemption) -> int:
    """Score the test split of a run that has finished before, where that was not done. Its status
    stays as it is. Returns the exit code: 0, or 75 if preempted. A collective.
    """
    if on_main(lambda: is_tested(plan.folder)):
        return EXIT_OK
    with kernels_of([plan], options):
        return _tested(plan, options, preemption)


def _tested(plan: RunPlan, options: Options, preemption: Preemption) -> int:
    whole_plan = choose(plan, options).plan
    status: dict[str, Any] = on_main(lambda: read_json(plan.folder / STATUS) or {})

    def log(step: int, scalars: Mapping[str, float]) -> None:
        if distributed.is_main():
            lines = MetricsFile(plan.folder / METRICS)
            lines.cut(step)  # a full disk may have torn the last line
            lines.log(step, {key: one for key, one in scalars.items() if math.isfinite(one)})
            lines.close(EXIT_OK)

    with claim_folder(whole_plan, options):
        is_done = run_test(whole_plan, options, preemption, step=int(status["step"]), log=log)
    return EXIT_PREEMPTED if not is_done else EXIT_OK


@contextlib.contextmanager
def refused_row(folder: Path, notes: left_out.Gathered) -> Iterator[None]:
    """Write the row that the run refused into the file of what was left out."""
    try:
        yield
    except DataError as error:
        if distributed.is_main() and error.place is not None:  # not a refusal of --strict
            with contextlib.suppress(StorageError):  # the row is what went wrong
                left_out.write(folder / left_out.FILE, notes, error=error)
        raise


def _train_or_stop(
    choice: Chosen, options: Options, record: RunRecord, preemption: Preemption, lock: HeldLock
) -> End:
    """How the run ended; "preempted" also when a signal came before the first step."""
    while True:
        is_kept = is_in_memory(choice.plan, options)
        try:
            # state that is only in memory is saved after the next step, so a signal must wait for
            # it
            with contextlib.nullcontext() if is_kept else preemption.nothing_to_save():
                prepared = prepare(choice, options, record.startup.lap)
                ready = start(prepared, options, record, preemption, lock)
        except Stopped:
            # do not wait for the other ranks: each has its own signal, or fails
            distributed.leave_alone()
            return "preempted"
        with contextlib.suppress(RolledBack):  # then the run is prepared again, as for a resume
            return to_end(trained(choice.plan, ready))
        choice = Chosen(choice.plan)  # reads the rows again, to notice changes


def trained(plan: RunPlan, ready: ReadyRun) -> Generator[StepBatches, StepBatches, End]:
    """Train the remaining steps (loop.steps), and export once all are done."""
    session = ready.session
    try:
        ended = yield from run_session(session, ready.progress, inside=ready.around_steps)
        ready.tell_costs()
        if ended == "succeeded":
            name = exported_at_end(plan)
            if name is not None:
                ready.export(name)
        with session.meter.pause("saving"):
            ready.saves.wait()
        if ended == "succeeded":
            on_main(ready.tidy)
        return ended
    except BaseException as error:
        ready.saves.leave(error)
        raise
    finally:
        session.train.close()
        session.engine.destroy()
