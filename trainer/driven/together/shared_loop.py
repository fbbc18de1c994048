"""The loop of a worker with many runs: each has its own log; what waits is computed in one pack."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from trainer import errors
from trainer.driven.packs import TARGETS, inputs_of
from trainer.driven.together.rounds import Pack, compose, filler, runs_of
from trainer.driven.together.shared_base import PackPart, SharedBase
from trainer.driven.together.shared_run import SharedRun
from trainer.driven.turns import BUSY_FOR_S, BUSY_S, IDLE_S, TURN_S
from trainer.errors import CheckpointError, LatheError, StorageError
from trainer.files.atomic import refusals
from trainer.operations.operation_log import Operation
from trainer.runtime import distributed
from trainer.runtime.batch import to_device
from trainer.runtime.distributed import on_main

if TYPE_CHECKING:
    from trainer.operations.rows import DrivenRow
    from trainer.runtime.preemption import Preemption
    from trainer.training.run import End

logger = logging.getLogger(__name__)

BEAT_S = 15.0  # between two status.json of a run


class RunDoor(Protocol):
    """Where other runs come in."""

    def arrivals(self) -> list[dict[str, Any]]:
        """Those who wait, as JSON. On rank 0."""
        ...

    def stops(self) -> list[str]:
        """The names of runs that are asked to stop. On rank 0."""
        ...

    def admit(self, arrival: Mapping[str, Any]) -> SharedRun | None:
        """The run of an arrival; None, it was sent away. A collective."""
        ...


@dataclass
class SharedLoop:
    """The loop of one worker. Every method is a collective."""

    host: SharedRun
    base: SharedBase
    door: RunDoor
    preemption: Preemption
    most_tokens: int  # of a pack
    most_runs: int
    members: dict[str, SharedRun] = field(init=False)

    def __post_init__(self) -> None:
        self.members = {self.host.name: self.host}
        self._clock = 0  # the tokens that a run was served that has always waited

    def follow(self) -> End:
        """Run the operations of all runs until the host's run ends, is put aside, or is asked to
        stop. The other runs are left then, to go on elsewhere.
        """
        beaten_at = time.monotonic()
        try:
            while True:
                is_asked = torch.tensor(int(self.preemption.requested))
                if int(distributed.total(is_asked)):
                    return self._leave_all("preempted")
                idle = self._turn()
                self._round()
                ended = self._ends(idle)
                if ended is not None:
                    return self._leave_all(ended)
                if time.monotonic() - beaten_at > BEAT_S:
                    beaten_at = time.monotonic()
                    for member in self.members.values():
                        member.beat()
        finally:
            for member in [*self.members.values()]:
                member.account.close()

    # What is next
    # ----------------------------------------------------------------------------------------------

    def _turn(self) -> list[str]:
        """Let in who has come, and begin what has come, one operation of each run. The names of the
        runs that have waited for one too long.
        """
        payloads: list[bytes] = []
        news = on_main(lambda: self._look(payloads))
        payload = distributed.broadcast_bytes(b"".join(payloads)) if news["operations"] else b""
        for arrival in news["arrivals"]:
            member = self.door.admit(arrival)
            if member is not None:
                self.members[member.name] = member
        for name in news["stops"]:
            self._leave(self.members[name], "preempted")
        for name, kind, text in news["faults"]:
            if name in self.members:  # else it was asked to stop
                self._leave(self.members[name], getattr(errors, kind)(text))
        start = 0
        for name, header, size in news["operations"]:
            operation = Operation(**header, payload=payload[start : start + size])
            start += size
            member = self.members.get(name)
            if member is None:  # it was asked to stop
                continue
            self._guarded(member, lambda m=member, o=operation: m.begin(o))
            member.served = max(member.served, self._clock)  # idle time is not saved up
        return news["idle"]

    def _look(self, payloads: list[bytes]) -> dict[str, Any]:
        """What there is; what there will be in a moment, where nothing is under way."""
        until = time.monotonic() + TURN_S
        worked_at = max(member.worked_at for member in self.members.values())
        while True:
            news: dict[str, Any] = {"operations": [], "faults": [], "arrivals": [], "stops": []}
            news["stops"] = [name for name in self.door.stops() if name in self.members]
            if len(self.members) < self.most_runs:
                news["arrivals"] = self.door.arrivals()[: self.most_runs - len(self.members)]
            for member in self.members.values():
                if member.current is None and not member.model.has_ended:
                    self._look_at(member, news, payloads)
            now = time.monotonic()
            is_busy = any(member.current for member in self.members.values())
            at_work = {name for name, *_ in news["operations"]}
            news["idle"] = [
                name for name, m in self.members.items() if name not in at_work and m.is_idle(now)
            ]
            if any(news.values()) or is_busy or now > until or self.preemption.requested:
                return news
            time.sleep(BUSY_S if now - worked_at < BUSY_FOR_S else IDLE_S)

    def _look_at(self, member: SharedRun, news: dict[str, Any], payloads: list[bytes]) -> None:
        assert member.reader is not None, "rank 0 has one"
        try:
            with refusals(member.account.folder):
                operation = member.reader.next()
        except (CheckpointError, StorageError) as error:
            if member is self.host:
                raise
            return news["faults"].append([member.name, type(error).__name__, str(error)])
        if operation is not None:
            header = {key: one for key, one in vars(operation).items() if key != "payload"}
            news["operations"].append([member.name, header, len(operation.payload)])
            payloads.append(operation.payload)

    # A round
    # ----------------------------------------------------------------------------------------------

    def _round(self) -> None:
        """Compute one pack on each rank, and finish the passes whose rows are done."""
        running = {name: m.current for name, m in self.members.items() if m.current is not None}
        if not running:
            return
        first = min(running, key=lambda name: (self.members[name].served, name))
        self._clock = max(self._clock, self.members[first].served)
        if running[first].recorded is not None:
            packs = running[first].recorded_packs(first)
        else:
            with_backward = running[first].of.with_backward
            queues = {
                name: one.left
                for name, one in running.items()
                if one.recorded is None and one.of.with_backward == with_backward
            }
            served = {name: self.members[name].served for name in queues}
            how = {"world": distributed.world(), "most_tokens": self.most_tokens}
            packs = compose(queues, served, **how)
        self._compute(packs, with_backward=running[first].of.with_backward)
        for name in runs_of(packs):
            member, current = self.members[name], running[name]
            slots = [slot for pack in packs for slot in pack]
            member.served += sum(s.tokens for s in slots if s.run == name or s.run is None)
            current.end_round(packs, name)
            if current.is_done:
                self._guarded(member, member.finish)

    def _compute(self, packs: Sequence[Pack], *, with_backward: bool) -> None:
        own = packs[distributed.rank()]
        rows = [self._row(slot.run, slot.row, slot.tokens) for slot in own]
        names = runs_of([own])
        parts = [self._part(name, own, with_backward=with_backward) for name in names]
        logps: list[Tensor] = []
        if parts:
            logps = self.base.logps(rows, parts, with_backward=with_backward)
        if parts and with_backward:
            losses = [
                self._loss(name, rows[part.start : part.start + part.count], logps_N)
                for name, part, logps_N in zip(names, parts, logps, strict=True)
            ]
            gradients_of_parts = self.base.gradients(losses, parts)
            for name, gradients in zip(names, gradients_of_parts, strict=True):
                self._current(name).add_gradients(gradients)
        of_rank = torch.cat([one.detach() for one in logps]) if logps else torch.zeros(0)
        gathered = distributed.gather_rows(of_rank.float().cpu())
        for pack, logps_N in zip(packs, gathered, strict=True):
            start = 0
            for name in runs_of([pack]):
                numbers = [slot.row for slot in pack if slot.run == name]
                current = self._current(name)
                size = sum(int(current.row(n).inputs[TARGETS].size) for n in numbers)
                current.take(numbers, logps_N[start : start + size])
                start += size

    def _current(self, name: str) -> Any:
        return self.members[name].current

    def _row(self, run: str | None, number: int, tokens: int) -> DrivenRow:
        return filler(tokens) if run is None else self._current(run).row(number)

    def _part(self, name: str, pack: Pack, *, with_backward: bool) -> PackPart:
        member, current = self.members[name], self._current(name)
        places = [place for place, slot in enumerate(pack) if slot.run == name]
        seed = (member.model.seed, current.operation.seq, len(current.rounds), distributed.rank())
        return PackPart(member.adapters, places[0], len(places), seed if with_backward else None)

    def _loss(self, name: str, rows: Sequence[DrivenRow], logps_N: Tensor) -> Tensor:
        of = self._current(name).of
        return of.loss.tokens(logps_N, to_device(inputs_of(rows)), of.config).sum()

    # Who leaves
    # ----------------------------------------------------------------------------------------------

    def _ends(self, idle: Sequence[str]) -> End | None:
        """Let runs go that have ended or are idle; how the host's run ends, if it does."""
        for name, member in [*self.members.items()]:
            if member is self.host or member.current is not None:
                continue
            if member.model.has_ended:
                self._leave(member, "succeeded")
            elif name in idle:
                self._leave(member, "paused")
        if self.host.model.has_ended:
            return "succeeded"
        return "paused" if idle == [self.host.name] == [*self.members] else None

    def _leave_all(self, ended: End) -> End:
        for member in [*self.members.values()]:
            if member is not self.host:
                self._leave(member, "preempted")
        self.host.account.keep()
        return ended

    def _leave(self, member: SharedRun, ended: End | LatheError) -> None:
        """Save the state of a run, unless it has failed, and let it go."""
        del self.members[member.name]
        try:
            if not isinstance(ended, LatheError):
                member.account.keep()
                member.model.states.saves.wait()
        except LatheError as error:
            ended = error
        finally:
            if isinstance(ended, LatheError):
                member.model.states.saves.leave(ended)  # before its engine and its lock are gone
            member.account.close()
        member.leave(ended)

    def _guarded(self, member: SharedRun, action: Callable[[], None]) -> None:
        """Do what belongs to one run. An error ends that run alone, unless it is the host's."""
        try:
            action()
        except LatheError as error:
            if member is self.host:
                raise
            logger.warning("%s: %s", member.name, error)
            self._leave(member, error)
