"""Chosen -> the loop of a driven run (trainer/driven/), on the engine of any other run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.driven.loop import DrivenLoop
from trainer.errors import ConfigError
from trainer.launch import doctor, memory
from trainer.launch.driving.runs import account_of, prepared
from trainer.launch.driving.shared_worker import shared_loop
from trainer.launch.start import engine_of
from trainer.runtime import distributed
from trainer.runtime.preemption import Stopped

if TYPE_CHECKING:
    from trainer.driven.account import Account
    from trainer.files.held_lock import HeldLock
    from trainer.launch.choose import Chosen
    from trainer.launch.prepare import PreparedRun
    from trainer.runtime.preemption import Preemption
    from trainer.telemetry.run_record import RunRecord
    from trainer.training.options import Options
    from trainer.training.run import End

logger = logging.getLogger(__name__)


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
    data: Any = getattr(choice.plan.cfg, "data")  # noqa: B009 (of the task)
    begin = shared_loop if data.together > 1 else _begin
    try:
        with preemption.nothing_to_save():
            record.startup.lap("imports")
            run = prepared(choice.plan, options)
            memory.plan_before_start(run, options)
            doctor.before_first_use(run.zero_stage, options.cache_dir)
            record.startup.lap("checks")
            account, loop = begin(run, options, record, preemption, lock)
            logger.info("operations are run from number %d on", account.after + 1)
    except Stopped:
        # do not wait for the other ranks: each has its own signal, or fails
        distributed.leave_alone()
        return "preempted"
    with _engine_of(account), memory.enforce_plan(None, account.model.engine, run):
        record.goodput.begin_steps()
        ended = loop.follow()
        account.model.states.saves.wait()
    return ended


def _begin(
    run: PreparedRun,
    options: Options,
    record: RunRecord,
    preemption: Preemption,
    lock: HeldLock,
) -> tuple[Account, DrivenLoop]:
    """The loop of a run that computes alone."""
    live, progress = engine_of(run, record.startup.lap)
    task: Any = run.task
    base: Any = live.model.module.get_submodule(task.base_name)
    vocabulary = base.config.vocab_size
    account = account_of(run, live, progress, record, lock, vocabulary=vocabulary)
    data: Any = getattr(run.plan.cfg, "data")  # noqa: B009 (of the task)
    loop = DrivenLoop(
        account=account,
        preemption=preemption,
        put_aside_s=data.put_aside_s,
        beat=lambda: record.status("running"),
    )
    return account, loop


@contextlib.contextmanager
def _engine_of(account: Account) -> Iterator[None]:
    """Inside, a run computes; afterwards its engine is gone, and no state is being written."""
    try:
        yield
    except BaseException as error:
        account.model.states.saves.leave(error)
        raise
    finally:
        account.model.engine.destroy()
