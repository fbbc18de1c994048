"""Chosen -> the loop of a driven run (trainer/driven/), on the engine of any other run."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import tasks
from trainer.driven.account import Account
from trainer.driven.loop import DrivenLoop
from trainer.driven.model import DrivenModel
from trainer.driven.passes import Layout
from trainer.driven.states import AFTER, DRIVEN, States
from trainer.errors import ConfigError
from trainer.launch import doctor, memory, preflight, run_folder
from trainer.launch.prepare import PreparedRun, newest_state
from trainer.launch.start import engine_of, snapshot
from trainer.operations.operation_log import FOLDER
from trainer.operations.results import Results
from trainer.runtime import distributed, rng
from trainer.runtime.distributed import on_main
from trainer.runtime.preemption import Stopped

if TYPE_CHECKING:
    from trainer.files.held_lock import HeldLock
    from trainer.launch.choose import Chosen
    from trainer.runtime.preemption import Preemption
    from trainer.telemetry.run_record import RunRecord
    from trainer.training.options import Options
    from trainer.training.run import End
    from trainer.training.session import Progress

logger = logging.getLogger(__name__)

STEPS_OF_STATE = 50  # optim_steps between two states, unless train.save_every says


def drive(
    choice: Chosen, options: Options, record: RunRecord, preemption: Preemption, lock: HeldLock
) -> End:
    """Follow the log of a driven run from its newest good state on, until it ends ("succeeded"),
    is put aside ("paused") or is asked to stop ("preempted"). A collective.
    """
    flags = {"survive": options.memory, "test": options.test, "until": options.until}
    foreign = [f"--{flag}" for flag, value in flags.items() if value]
    if foreign:
        raise ConfigError(
            f'data.source="client" with {", ".join(foreign)}: a client says what the run does, '
            "and the run goes on from its log. Leave it out."
        )
    try:
        with preemption.nothing_to_save():
            run, loop = _begin(choice, options, record, preemption, lock)
    except Stopped:
        # do not wait for the other ranks: each has its own signal, or fails
        distributed.leave_alone()
        return "preempted"
    saves = loop.account.model.states.saves
    try:
        with memory.enforce_plan(None, loop.account.model.engine, run):
            record.goodput.begin_steps()
            ended = loop.follow()
        saves.wait()
        return ended
    except BaseException as error:
        saves.leave(error)
        raise
    finally:
        loop.account.model.engine.destroy()


def _begin(
    choice: Chosen, options: Options, record: RunRecord, preemption: Preemption, lock: HeldLock
) -> tuple[PreparedRun, DrivenLoop]:
    plan, cfg = choice.plan, choice.plan.cfg
    record.startup.lap("imports")
    rng.seed_everything(cfg.train.seed, distributed.rank())
    task: Any = tasks.load(cfg, options.places)
    on_main(lambda: preflight.refuse_early(plan, options, task))
    newest = newest_state(plan, options)
    identity = run_folder.check_identity(plan, task, {}, newest, places=options.places)
    run = PreparedRun(plan, task, {}, options.places, identity=identity, newest=newest)
    distributed.make_side_group()
    memory.plan_before_start(run, options)
    doctor.before_first_use(run.zero_stage, options.cache_dir)
    record.startup.lap("checks")
    live, progress = engine_of(run, record.startup.lap)
    after = -1 if newest is None else int(newest.state()[DRIVEN][AFTER])
    record.resume(progress.step)
    record.use_data(identity, options.data_path)
    record.status("running", step=progress.step)

    def write(progress: Progress, more: Mapping[str, Any], root: Path) -> Callable[[], Path]:
        on_main(lock.check)
        return snapshot(plan, live, progress, identity, root=root, more={DRIVEN: dict(more)})

    def export(name: str) -> None:
        on_main(lock.check)
        run_folder.export(plan, task, live, name)

    base: Any = live.model.module.get_submodule(task.base_name)
    assert cfg.lora is not None, "the schema has looked"
    data: Any = getattr(cfg, "data")  # noqa: B009 (of the task)
    budget = cfg.train.micro_tokens or cfg.train.micro_batch * data.max_tokens
    model = DrivenModel(
        engine=live,
        layout=Layout(budget, task.is_packed, task.pad),
        states=States(plan.folder, write, identity["base"]),
        progress=progress,
        lora=cfg.lora,
        vocabulary=base.config.vocab_size,
        most_tokens=data.max_tokens,
        most_steps=cfg.train.steps,
        seed=cfg.train.seed,
        export=export,
        log=functools.partial(_log, record),
        is_created=on_main(lambda: after >= 0 and _is_created(plan.folder)),
    )
    every = cfg.train.save_every
    account = Account(
        model=model,
        folder=plan.folder,
        after=after,
        every=every if isinstance(every, int) else STEPS_OF_STATE,
    )
    loop = DrivenLoop(
        account=account,
        preemption=preemption,
        put_aside_s=data.put_aside_s,
        beat=lambda: record.status("running"),
    )
    logger.info("operations are run from number %d on", after + 1)
    return run, loop


def _is_created(folder: Path) -> bool:
    results = Results(folder / FOLDER)
    results.follow()
    first = results.get(0)
    return first is None or first.error is None


def _log(record: RunRecord, step: int, scalars: dict[str, float]) -> None:
    record.log(step, **scalars)
    record.move(step)
