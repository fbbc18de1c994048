"""The parts that every driven run has, whether it computes alone or with others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import tasks
from trainer.driven.account import Account
from trainer.driven.model import DrivenModel
from trainer.driven.passes import PassLayout
from trainer.driven.states import AFTER, DRIVEN, States
from trainer.launch import preflight, run_folder
from trainer.launch.prepare import PreparedRun, newest_state
from trainer.launch.start import snapshot
from trainer.operations.operation_log import FOLDER
from trainer.operations.results import OperationResults
from trainer.runtime import distributed, rng
from trainer.runtime.beside import Beside
from trainer.runtime.distributed import on_main

if TYPE_CHECKING:
    from trainer.files.held_lock import HeldLock
    from trainer.telemetry.run_record import RunRecord
    from trainer.training.engine import Engine
    from trainer.training.options import Options
    from trainer.training.run_plan import RunPlan
    from trainer.training.session import Progress

STEPS_OF_STATE = 50  # optim_steps between two states, unless train.save_every says


def prepared(plan: RunPlan, options: Options) -> PreparedRun:
    """A driven run before its weights are read. A collective."""
    cfg = plan.cfg
    rng.seed_everything(cfg.train.seed, distributed.rank())
    task: Any = tasks.load(cfg, options.places)
    on_main(lambda: preflight.refuse_early(plan, options, task))
    newest = newest_state(plan, options)
    identity = run_folder.check_identity(plan, task, {}, newest, places=options.places)
    distributed.make_side_group()
    return PreparedRun(plan, task, {}, options.places, identity=identity, newest=newest)


def layout_of(run: PreparedRun) -> PassLayout:
    """How rows of a run become micro-batches."""
    train, task = run.plan.cfg.train, run.task
    data: Any = getattr(run.plan.cfg, "data")  # noqa: B009 (of the task)
    budget = train.micro_tokens or train.micro_batch * data.max_tokens
    return PassLayout(budget, task.is_packed, task.pad)  # pyright: ignore[reportAttributeAccessIssue]


def account_of(
    run: PreparedRun,
    live: Engine,
    progress: Progress,
    record: RunRecord,
    lock: HeldLock,
    *,
    vocabulary: int,
    saves: Beside | None = None,
) -> Account:
    """The model of a run, and what is written down of its operations, from its newest good state
    on. A collective.

    vocabulary: of its base. saves: who writes its states; None: a thread of its own.
    """
    plan, cfg, newest = run.plan, run.plan.cfg, run.newest
    after = -1 if newest is None else int(newest.state()[DRIVEN][AFTER])
    record.resume(progress.step)
    record.use_data(run.identity, run.places.data_path)
    record.status("running", step=progress.step)

    def write(progress: Progress, more: Mapping[str, Any], root: Path) -> Callable[[], Path]:
        on_main(lock.check)
        more = {DRIVEN: dict(more)}
        return snapshot(plan, live, progress, run.identity, root=root, more=more)

    def export(name: str) -> None:
        on_main(lock.check)
        run_folder.export(plan, run.task, live, name)

    assert cfg.lora is not None, "the schema has looked"
    past = on_main(lambda: _past(plan.folder, after))
    data: Any = getattr(cfg, "data")  # noqa: B009 (of the task)
    model = DrivenModel(
        engine=live,
        layout=layout_of(run),
        states=States(plan.folder, write, run.identity["base"], saves or Beside()),
        progress=progress,
        lora=cfg.lora,
        vocabulary=vocabulary,
        most_tokens=data.max_tokens,
        most_steps=cfg.train.steps,
        seed=cfg.train.seed,
        export=export,
        log=functools.partial(_log, record),
        is_created=past["is_created"],
        has_ended=past["has_ended"],
    )
    every = cfg.train.save_every
    return Account(
        model=model,
        folder=plan.folder,
        after=after,
        every=every if isinstance(every, int) else STEPS_OF_STATE,
    )


def _past(folder: Path, after: int) -> dict[str, bool]:
    """Whether a run was created and has ended (the fields of DrivenModel) with operation `after`,
    by the results of its operations. Behind an `end` all others are refused.
    """
    results = OperationResults(folder / FOLDER)
    results.follow()
    first = results.get(0)
    every = (results.get(seq) for seq in range(after, -1, -1))
    newest = next((one for one in every if one is None or one.error is None), None)
    return {
        "is_created": after >= 0 and (first is None or first.error is None),
        "has_ended": newest is not None and newest.work.get("kind") == "end",
    }


def _log(record: RunRecord, step: int, scalars: dict[str, float]) -> None:
    record.log(step, **scalars)
    record.move(step)
