"""Runs some steps of a run again, beside its folder, and compares them with the run's steps."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from trainer.config.auto import with_micro_batch, with_recomputation, with_steps
from trainer.config.deepspeed_config import sequence_ranks
from trainer.config.schema import steps_between
from trainer.data.mixed.store import sources_in
from trainer.errors import CheckpointError, ConfigError
from trainer.files.held_lock import HeldLock
from trainer.launch.choose import Chosen
from trainer.launch.prepare import prepare
from trainer.launch.run_folder import kernels_of
from trainer.launch.start import start as start_run
from trainer.launch.together import run_together as together
from trainer.runtime import device_defaults
from trainer.runtime.distributed import on_main
from trainer.runtime.preemption import Preemption
from trainer.telemetry.chain import PROOF, damage
from trainer.telemetry.run_record import METRICS, RunRecord
from trainer.training import bad_steps, checkpoint
from trainer.training.loop import fit
from trainer.training.options import Options
from trainer.training.run_plan import RunPlan

NEVER = 2**62  # steps


@dataclass(frozen=True)
class RecordedRun:
    """What metrics.jsonl of a run says, and what is wrong with the file."""

    lines: list[dict[str, Any]]
    problems: list[str]  # one for each damaged line

    @property
    def proofs(self) -> dict[int, str]:
        """{step: proof} of every line that has one."""
        return {line["step"]: line[PROOF] for line in self.lines if PROOF in line}


def read(folder: Path) -> RecordedRun:
    """metrics.jsonl of a run folder. ConfigError when there is none."""
    path = folder / METRICS
    try:
        raw = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}. Give the folder of a run: SAVEDIR_BASE/<exp_id>."
        ) from None
    whole = [line for line in raw if line.endswith(b"\n")]
    problems = [f"line {number} {problem}" for number, problem in damage(whole)]
    lines: list[dict[str, Any]] = []
    for line in whole:
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                lines.append(entry)
    steps = [line["step"] for line in lines if PROOF in line]
    problems += [
        f"step {later} stands behind step {earlier}"
        for earlier, later in itertools.pairwise(steps)
        if later <= earlier
    ]
    return RecordedRun(lines, problems)


@dataclass(frozen=True)
class Replay:
    """How the repeated steps compare with those of the run."""

    start: int  # the steps after this one were repeated
    stop: int
    agreed: list[int]  # steps whose proof is that of the run
    differing: list[list[Any]]  # [step, the run's line, this one's] of the others, in order
    then: dict[str, str]  # what the checkpoint was made with
    now: dict[str, str]


def refuse_together(folder: Path) -> None:
    """ConfigError for a run that was trained with others on one base."""
    if (folder / together.FILE).exists():
        raise ConfigError(
            f"{folder}: it was trained with others on one base (--together), so that its last bits "
            "depend on the lengths of their rows. Got --replay, want its lines checked alone: "
            "leave --replay and --from out."
        )


def starts(folder: Path, *, world: int) -> list[int]:
    """The steps after which a replay on `world` ranks may begin: 0, and those with a checkpoint."""
    steps = [
        step
        for step, path in checkpoint.candidates(folder / "checkpoints")
        if checkpoint.saved_world(path) == world
    ]
    return [0, *steps]


def replay(plan: RunPlan, options: Options, scratch: Path, *, start: int, stop: int) -> Replay:
    """Repeat steps start+1 to stop of the run in plan.folder, in `scratch`, and compare the proofs.

    plan: with the DeepSpeed dictionary of the run. Nothing is written to plan.folder. A collective.
    """
    recorded = read(plan.folder)
    on_main(lambda: _lay_out(plan.folder, scratch, start))
    of_scratch = replace(plan, folder=scratch)
    record = RunRecord(scratch, total=plan.cfg.train.steps)
    lock, preemption = HeldLock(scratch / ".lock", what=str(scratch)), Preemption()
    on_main(lock.acquire)
    try:
        with as_it_computed(plan, options):
            prepared = prepare(Chosen(of_scratch), options, record.startup.lap)
            again = start_run(prepared, options, record, preemption, lock)
            eval_every: int | str = NEVER
            if plan.cfg.schedule.shape == "reduce_on_plateau":  # evaluations change what is trained
                evaluated = [line["step"] for line in recorded.lines if "valid/loss" in line]
                eval_every = plan.cfg.train.eval_every or min(evaluated, default=NEVER)
            rows = again.session.train
            epochs = plan.sharding.epochs(len(rows), plan.cfg.train.seed, sources_in(rows))
            session = replace(
                again.session,
                cadence=replace(
                    again.session.cadence,
                    log=Fraction(1),
                    evaluate=steps_between(eval_every, epochs.steps),
                    save=Fraction(NEVER),
                ),
                save=lambda progress: None,
                export_best=lambda: None,
                questions=(),
                budget=None,
            )
            then = _origin(scratch, start)
            try:
                with again.around_steps:
                    fit(session, again.progress, until=stop)
            finally:
                session.train.close()
                session.engine.destroy()
    finally:
        record.close()
        preemption.close()
        lock.release()
    steps, differing = on_main(lambda: _comparison(recorded, scratch, start, stop))
    return Replay(start, stop, steps, differing, then, checkpoint.made_with())


def _comparison(recorded: RecordedRun, scratch: Path, start: int, stop: int) -> list[Any]:
    """Steps whose proofs agree, and [step, the run's line, this one's] of the others."""
    ours, theirs = (
        {line["step"]: line for line in record.lines if PROOF in line}
        for record in (read(scratch), recorded)
    )
    steps = [step for step in sorted(theirs) if start < step <= stop]
    agreed = [step for step in steps if ours[step][PROOF] == theirs[step][PROOF]]
    return [agreed, [[step, theirs[step], ours[step]] for step in steps if step not in agreed]]


def _lay_out(folder: Path, scratch: Path, start: int) -> None:
    """Put what the replay begins with into `scratch`: data.json, the steps that rollbacks left out,
    and the checkpoint.
    """
    for name in ("data.json", bad_steps.FILE):
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(folder / name, scratch / name)
    if start:
        (scratch / "checkpoints").mkdir()
        name = f"step-{start}"
        os.symlink((folder / "checkpoints" / name).resolve(), scratch / "checkpoints" / name)
        wrong = checkpoint.problems(scratch / "checkpoints" / name)
        if wrong:
            raise CheckpointError(f"{folder / 'checkpoints' / name}: {'; '.join(wrong)}.")


def _origin(scratch: Path, start: int) -> dict[str, str]:
    if not start:
        return {}
    return checkpoint.read_state(scratch / "checkpoints" / f"step-{start}").get("made_with", {})


@contextlib.contextmanager
def as_it_computed(plan: RunPlan, options: Options) -> Iterator[None]:
    """Inside, this process computes by the kernels of the run in plan.folder, unless the
    environment says which, and with a run's settings of its device. A collective.
    """
    with kernels_of([plan], options):
        how: Any = {"optimizer": plan.cfg.optim.name, "compiles": plan.cfg.train.compile}
        device_defaults.settle(plan.cfg.train.precision, **how)
        yield


def as_it_ran(plan: RunPlan) -> RunPlan:
    """The plan with the DeepSpeed dictionary, the micro-batch, the recomputation and the steps that
    the run had, whatever flags it was started with. ConfigError when its folder does not say.
    """
    try:
        ds = json.loads((plan.folder / "ds_config.json").read_text())
        train = json.loads((plan.folder / "resolved.json").read_text())["train"]
        rows, recomputed = train["micro_batch"], train["gradient_checkpointing"]
        steps = int(train["steps"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{plan.folder}: ds_config.json or resolved.json cannot be read ({error}). Put them "
            "back from a copy, or check the lines alone (without --replay)."
        ) from None
    cfg = with_steps(with_recomputation(with_micro_batch(plan.cfg, rows), recomputed), steps)
    world = (
        plan.sharding.world
    )  # the file is that of the last start, which may have had other flags
    sharing = sequence_ranks(ds)
    if world % sharing:
        sharing = ds["sequence_parallel_size"] = 1
    groups = world // sharing
    accumulation = ds["train_batch_size"] // (ds["train_micro_batch_size_per_gpu"] * groups)
    ds["gradient_accumulation_steps"] = accumulation
    sharding = replace(plan.sharding, micro_batch=rows, sharing=sharing)
    return replace(plan, cfg=cfg, ds=ds, sharding=sharding)


def worlds(proofs: dict[int, str]) -> Iterator[tuple[int, int, int]]:
    """(first step, last step, ranks) of each stretch of steps with the same number of ranks."""
    stretch: tuple[int, int, int] | None = None
    for step, proof in sorted(proofs.items()):
        ranks = int(proof.rpartition("/")[2])
        if stretch and stretch[2] == ranks:
            stretch = (stretch[0], step, ranks)
            continue
        if stretch:
            yield stretch
        stretch = (step, step, ranks)
    if stretch:
        yield stretch
