"""A worker of many driven runs: one base in memory, an engine for the adapters of each run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trainer.config import deepspeed_config
from trainer.driven.together.shared_base import SharedBase
from trainer.driven.together.shared_loop import SharedLoop
from trainer.driven.together.shared_run import SharedRun, SharedSaves
from trainer.errors import (
    EXIT_OK,
    EXIT_PAUSED,
    EXIT_PREEMPTED,
    ConfigError,
    HeldError,
    LatheError,
)
from trainer.files.atomic import read_json
from trainer.launch.driving.runs import account_of, layout_of, prepared
from trainer.launch.run_folder import claim_folder
from trainer.launch.start import restore
from trainer.models import base_model
from trainer.models.weights import absent
from trainer.operations.guests import Guests
from trainer.operations.sharing import differences, kernels_differ
from trainer.runtime import distributed, watch
from trainer.runtime.beside import Beside
from trainer.runtime.distributed import on_main
from trainer.telemetry.run_record import RunRecord
from trainer.training import engine
from trainer.training.engine import Engine
from trainer.training.run_plan import plan
from trainer.training.session import Progress

if TYPE_CHECKING:
    from trainer.driven.account import Account
    from trainer.files.held_lock import HeldLock
    from trainer.launch.prepare import PreparedRun
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run import End

logger = logging.getLogger(__name__)

_CODES: dict[End, int] = {
    "succeeded": EXIT_OK,
    "paused": EXIT_PAUSED,
    "preempted": EXIT_PREEMPTED,
}


def shared_loop(
    run: PreparedRun,
    options: Options,
    record: RunRecord,
    preemption: Preemption,
    lock: HeldLock,
) -> tuple[Account, SharedLoop]:
    """The loop of a host: its own run, and those that come to it. A collective. ConfigError where
    rows of several runs cannot share a base.
    """
    if run.zero_stage == 3:
        raise ConfigError(
            "data.together with ZeRO-3: one base serves many runs only where it is whole on every "
            "rank. Use a DeepSpeed file of stage 0, 1 or 2, or leave together out."
        )
    cfg, task = run.plan.cfg, run.task
    data: Any = getattr(cfg, "data")  # noqa: B009 (of the task)
    read: Any = getattr(task, "loaded")  # noqa: B009 (of a TokenTask)
    model = read(cfg.base, None, bits=cfg.train.base_bits)
    absent.refuse(model, is_trained=True)
    base_name: str = getattr(task, "base_name")  # noqa: B009 (of a TokenTask)
    model = model.to(distributed.device(), base_model.DTYPES[cfg.train.precision])  # as an engine
    base = SharedBase(model, base_name, layout_of(run))
    record.startup.lap("model")
    makes = _Members(run, options, base)
    host = makes.member(run, record, lock, leave=lambda ended: None)
    record.startup.lap("engine")
    loop = SharedLoop(
        host=host,
        base=base,
        door=GuestDoor(makes, record),
        preemption=preemption,
        most_tokens=layout_of(run).most_tokens,
        most_runs=data.together,
    )
    return host.account, loop


@dataclass
class _Members:
    """Makes the members of a worker out of runs."""

    host: PreparedRun
    options: Options
    base: SharedBase
    saves: Beside = field(default_factory=Beside)  # of all runs, one after another

    def member(
        self,
        run: PreparedRun,
        record: RunRecord,
        lock: HeldLock,
        *,
        leave: Callable[[End | LatheError], None],
    ) -> SharedRun:
        """A run with its adapters in its newest good state. A collective."""
        cfg, newest = run.plan.cfg, run.newest
        assert cfg.lora is not None, "the schema has looked"
        adapters = self.base.draw(cfg.lora, seed=cfg.train.seed)
        if newest is not None:
            engine.load_weights(adapters, newest.weights(engine.shapes(adapters)))
        ds = deepspeed_config.for_engine(run.plan.ds)
        live = Engine(adapters, ds, cfg.optim, plus=cfg.lora.plus)
        progress = Progress()
        if newest is not None:
            progress = restore(live, newest, seed=cfg.train.seed)
        how: Any = {"vocabulary": self.base.base.config.vocab_size}
        account = account_of(
            run, live, progress, record, lock, saves=SharedSaves(self.saves), **how
        )
        data: Any = getattr(cfg, "data")  # noqa: B009 (of the task)
        return SharedRun(
            name=run.plan.id,
            account=account,
            adapters=adapters,
            put_aside_s=data.put_aside_s,
            beat=functools.partial(record.status, "running"),
            leave=leave,
        )


@dataclass
class GuestDoor:
    """Lets runs in that ask the host (operations/guests.py), and lets them out."""

    makes: _Members
    record: RunRecord  # of the host
    _tokens: dict[str, str] = field(default_factory=dict[str, str])  # by the names of runs

    @property
    def _guests(self) -> Guests:
        return Guests.of(self.makes.host.plan.folder)

    def arrivals(self) -> list[dict[str, Any]]:
        """Those who are not in, each run once."""
        inside = {*self._tokens, self.makes.host.plan.id}
        by_run = {arrival["id"]: arrival for arrival in self._guests.arrivals()}
        return [arrival for name, arrival in by_run.items() if name not in inside]

    def stops(self) -> list[str]:
        """The names of runs that are asked to stop."""
        asked = set(self._guests.stops())
        return [name for name, token in self._tokens.items() if token in asked]

    def admit(self, arrival: Mapping[str, Any]) -> SharedRun | None:
        """The run of an arrival; None, it was sent away. A collective."""
        name, token = arrival["id"], arrival["token"]
        stack = contextlib.ExitStack()
        try:
            member = self._open(name, token, stack)
        except HeldError as error:  # perhaps for a moment, or another worker computes it
            stack.close()
            self._out(token, EXIT_PREEMPTED, error)
            return None
        except LatheError as error:
            stack.close()
            self._out(token, error.exit_code, error)
            return None
        finally:
            watch.record_by(self.record.fail)  # the record of a guest has taken its place
        self._tokens[name] = token
        on_main(lambda: self._guests.let_in(token))
        logger.info("run %s is computed here, too", name)
        return member

    def _open(self, name: str, token: str, stack: contextlib.ExitStack) -> SharedRun:
        host, options = self.makes.host, self.makes.options
        folder = options.savedir_base / name
        values = on_main(lambda: read_json(folder / "exp_dict.json"))
        if values is None:
            raise ConfigError(f"{folder} holds no exp_dict.json: it is no run. Send it again.")
        world, rank = distributed.world(), distributed.rank()
        options = dataclasses.replace(options, names={}, reset=False)
        own = plan(values, options, world=world, rank=rank)
        differing = differences(host.plan.cfg, own.cfg)
        if differing:
            raise ConfigError(
                f"{name} cannot be computed on the base of {host.plan.id}: they differ in "
                f"{', '.join(differing)}. Send it to another host, or let it compute alone."
            )
        lock = stack.enter_context(claim_folder(own, options))
        quiet = Console(file=io.StringIO(), quiet=True)
        record = RunRecord(own.folder, total=own.cfg.train.steps, console=quiet)
        stack.callback(record.close)
        stack.enter_context(_failures(record))
        if on_main(lambda: kernels_differ(host.plan.folder, own.folder)):
            raise HeldError(f"{name} began with other kernels than {host.plan.id} computes by.")
        run = prepared(own, options)
        leave = functools.partial(self._leave, name, token, record, stack)
        member = self.makes.member(run, record, lock, leave=leave)
        record.goodput.begin_steps()
        stack.callback(member.model.engine.destroy)
        return member

    def _leave(
        self,
        name: str,
        token: str,
        record: RunRecord,
        stack: contextlib.ExitStack,
        ended: End | LatheError,
    ) -> None:
        if isinstance(ended, LatheError):
            record.fail(ended)
        else:
            record.status(ended)
        stack.close()
        del self._tokens[name]
        if isinstance(ended, LatheError):
            return self._out(token, ended.exit_code, ended)
        return self._out(token, _CODES[ended], None)

    def _out(self, token: str, code: int, error: LatheError | None) -> None:
        text = error and f"{type(error).__name__}: {error}"
        on_main(lambda: self._guests.let_out(token, code, text))
        logger.info("guest %s has left (%d)%s", token, code, f": {text}" if text else "")


@contextlib.contextmanager
def _failures(record: RunRecord) -> Any:
    """Write down the error with which the block ends."""
    try:
        yield
    except LatheError as error:
        record.fail(error)
        raise
