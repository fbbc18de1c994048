"""The parent of the ranks of `--survive`: it starts them, holds the memory that they go on from,
and puts another process in the place of one that dies or hangs. Imports no torch.

A process is warming (importing), a spare, running as a rank, or stranded: its peers are gone, and
it waits for its next place. One generation is one process group; when a rank is lost, those that
live let go of everything, and the next generation begins with the same world if there is a spare,
else with a smaller one. What ranks go on from lies in memory files of this process, which
outlive any of them (trainer/survival/mirror.py).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

from trainer.errors import EXIT_OK, EXIT_PREEMPTED, LatheError
from trainer.files import survival_events as events
from trainer.files.atomic import read_json, write_json
from trainer.files.survive import Survival
from trainer.runtime.process import PARENT, birth, facts
from trainer.survival.member import Break, Member
from trainer.survival.stragglers import Stragglers

POLL_S = 0.2
STEPS_OF_PATIENCE = 10  # a rank may be silent for so many steps, if that is more than hang_s
JOIN_S = 20.0  # how long a process that joins a group may go on after another one has died
FREE_S = 10.0  # how long one that was told to let go may wait for the others
LEAVE_S = 30.0  # how long ranks may stay once the first one has left
VERDICT_S = 5.0  # how long after an error a death can still be the cause of it
MOST_IN_VAIN = 3  # generations in a row that made no step; processes that ended while they imported
WARM_S = 900.0  # how long a process may import: a cold network disk takes minutes
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

log = logging.getLogger(__name__)


class Agent:
    """Runs `become` of a module in every process, until the ranks are done."""

    def __init__(self, survival: Survival, target: str, *args: Any) -> None:
        """target: the module; a process calls become(line, file for stacks, memory files, standard
        outputs, environment, *args). Importing it is what warms a process up.
        """
        self._wanted, self._target, self._args = survival, target, args
        # as torchrun: several ranks share the cores
        self._environment = {"OMP_NUM_THREADS": "1", **os.environ, PARENT: json.dumps(facts())}
        # a fork of a process that has imported everything starts at once; CUDA forbids forks
        kind = "spawn" if Path("/dev/nvidiactl").exists() else "forkserver"
        self._context: Any = multiprocessing.get_context(kind)
        own = f"/proc/{os.getpid()}/fd"
        self._memory = [
            [f"{own}/{os.memfd_create(f'mirror-{rank}-{slot}')}" for slot in range(2)]
            for rank in range(survival.ranks)
        ]
        self._members: list[Member] = []
        self._generation, self._world = 0, survival.ranks
        self._break: Break | None = None
        self._in_vain = self._cold = 0  # in a row: generations without a step, ends in an import
        self._folder, self._begun = "", list[str]()
        self._code: int | None = None
        self._left_at = 0.0
        self._reached = 0  # the last step that any rank has done
        self._stops = 0
        self._stragglers = Stragglers()

    def run(self) -> int:
        """The exit code: that of the ranks, as a launcher gives it on.

        Raises LatheError when ranks are lost again and again without a step in between.
        """
        before = {
            number: signal.signal(number, self._ask)
            for number in STOP_SIGNALS
            if signal.getsignal(number) != signal.SIG_IGN  # nohup
        }
        self._context.set_forkserver_preload([self._target])
        try:
            for _ in range(self._wanted.ranks + self._wanted.spares):
                self._start()
            while self._members:
                self._hear()
                self._look_for_hangs()
                self._give_places()
                if self._code is not None and not self._running():
                    break
            return EXIT_PREEMPTED if self._code is None else self._code
        except LatheError as error:
            self._say_failed(error)
            raise
        finally:
            for member in self._members:
                member.process.kill()
            for member in self._members:
                member.process.join()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _say_failed(self, error: LatheError) -> None:
        """In status.json, for no rank is left to do it."""
        path = Path(self._folder, "status.json")
        with contextlib.suppress(OSError, ValueError, LatheError):
            told = read_json(path) if self._folder else None
            if told is not None and told.get("state") == "running":
                write_json(path, told | {"state": "failed", "error": str(error)})

    # Processes
    # ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        stacks = os.memfd_create("stacks")
        # a connection is what multiprocessing hands open files over as
        outputs = [connection.Connection(os.dup(number), readable=False) for number in (1, 2)]
        place = (theirs, f"/proc/{os.getpid()}/fd/{stacks}", self._memory)
        args = (self._target, *place, outputs, self._environment, *self._args)
        process = self._context.Process(target=_become, args=args)
        process.start()
        for given in (theirs, *outputs):
            given.close()
        now = time.monotonic()
        member = Member(process, ours, stacks, moved_at=now, heard_at=now, began_at=now)
        self._members.append(member)

    def _running(self) -> list[Member]:
        return [one for one in self._members if one.state in ("running", "stranded")]

    def _ask(self, number: int, frame: Any) -> None:
        """A signal: ranks save and stop; a second Ctrl-C leaves without saving."""
        self._stops += 1
        if number == signal.SIGINT and self._stops > 1:
            raise KeyboardInterrupt
        for member in list(self._members):
            if member.has_joined:  # the others are told when they do
                member.send_signal(signal.SIGTERM)

    def _hear(self) -> None:
        ready = connection.wait([member.line for member in self._members], POLL_S)
        for member in list(self._members):
            # asked before the line is read, which a child of a dead process may hold open
            has_ended = birth(member.process.pid) is None
            try:
                while (has_ended or member.line in ready) and member.line.poll():
                    self._take(member, json.loads(member.line.recv_bytes()))
            except (EOFError, OSError):
                has_ended = True
            if has_ended:
                self._bury(member)

    def _take(self, member: Member, message: dict[str, Any]) -> None:
        now, what = time.monotonic(), message.pop("is")
        member.heard_at = now
        if what == "warm":
            member.state, member.batches, self._cold = "spare", message["batches"], 0
        elif what == "joined":
            member.has_joined = True
            if self._stops:
                member.send_signal(signal.SIGTERM)
        elif what == "leaving":
            member.code = message["code"]
        elif what == "stranded":
            member.state, member.stranded_at = "stranded", now
            log.info("rank %d: %s", member.rank, message["error"].partition("\n")[0])
            self._broken()
        elif what == "begun":
            if message["folder"] != self._folder:
                self._folder, self._reached = message["folder"], 0
            self._begun = sorted({*self._begun, message["id"]})
        elif what == "resumed" and self._break is not None:
            self._break.source, self._break.step = message["source"], message["step"]
        elif what == "moved":
            self._move(member, message["step"], message["place"])
        elif what == "beat":
            member.waited_s = message["waited_s"]
            self._stragglers.add(member.rank, message["busy"], message["of"])

    def _move(self, member: Member, step: int, place: str) -> None:
        now = time.monotonic()
        # until a step has been timed the whole start stands for one: nobody knows how long they are
        is_timed = (
            step == member.step + 1 if member.place == "step" else not self._stragglers.step_s()
        )
        if place == "step" and is_timed:
            self._stragglers.step(member.rank, now - member.moved_at)
        is_new = member.state == "running"
        if self._break is not None:
            # what ranks did before they heard of a death is read after it, too
            is_new &= self._generation > self._break.generation and step > self._break.step
        member.step, member.place, member.moved_at = step, place, now
        self._reached = max(self._reached, step)
        if is_new:
            self._in_vain = 0
            self._tell_recovery()
        for line in self._stragglers.lines():
            log.warning("%s", line)

    def _bury(self, member: Member) -> None:
        """A process has ended."""
        member.process.join(5)
        exitcode = member.process.exitcode
        code = exitcode if member.code is None else member.code
        self._members.remove(member)
        member.line.close()
        os.close(member.stacks)
        was_rank = member.state in ("running", "stranded")
        self._cold += member.state == "warming"
        # 255 is what Python says when the fork server is gone, too, and it does not know
        is_error = exitcode is not None and 0 < exitcode < 255
        if member.code is not None or (is_error and (was_rank or not self._generation)):
            # it left by itself: done, preempted, or for an error that another process would meet
            if self._code in (None, EXIT_OK):
                self._code, self._left_at = code, time.monotonic()
                if code == EXIT_OK:
                    self._tell_recovery()  # of one that had no step left to do
            return
        why = f"ended by {signal.Signals(-code).name}" if code and code < 0 else "ended"
        if was_rank and self._code is None:
            self._broken()
            assert self._break is not None, "it was just made"
            log.warning("rank %d (process %d) %s", member.rank, member.process.pid, why)
            lost = {"rank": member.rank, "pid": member.process.pid, "why": member.hung or why}
            self._break.lost.append(lost)
            self._break.is_explained = True
        may_return = self._wanted.spares or not was_rank or not member.is_to_blame
        is_in_vain = member.state == "warming" and self._cold >= MOST_IN_VAIN
        if is_in_vain:
            log.warning("process %d %s while it imported, as others did", member.process.pid, why)
        elif may_return and self._stops == 0 and self._code is None:
            self._start()

    def _broken(self) -> None:
        """This generation is over: whoever belongs to it lets go."""
        now = time.monotonic()
        if self._break is None:
            self._break = Break(now, self._reached)
        if self._break.generation < self._generation:  # a rank may be lost while others recover
            self._break.generation, self._break.ended_at = self._generation, now
            self._break.is_explained = False
        for member in self._running():
            member.send(do="let go")

    # Hangs
    # ---------------------------------------------------------------------------------------

    def _patience_s(self) -> float:
        return max(self._wanted.hang_s, STEPS_OF_PATIENCE * self._stragglers.step_s())

    def _look_for_hangs(self) -> None:
        now, patience_s = time.monotonic(), self._patience_s()
        if self._code is not None:
            for member in self._running() if now - self._left_at > LEAVE_S else []:
                member.process.kill()
            return None
        for member in self._members:
            if member.state == "warming" and now - member.began_at > max(WARM_S, patience_s):
                log.warning("process %d has imported for %.0f s", member.process.pid, WARM_S)
                member.process.kill()
                member.began_at = now
        ranks = [one for one in self._members if one.state == "running"]
        silent = [one for one in ranks if now - one.heard_at > patience_s]
        if silent:
            return self._replace(silent, f"has given no sign of life for {patience_s:.0f} s")
        if self._break is not None and self._break.generation == self._generation:
            since = now - self._break.ended_at
            late = [one for one in ranks if since > _most_s(one, patience_s)]
            for member in late:
                member.is_to_blame = False
            return (
                self._replace(late, "does not let go of a group that is broken") if late else None
            )
        is_stuck = ranks and all(
            one.place == "step" and now - one.moved_at > patience_s for one in ranks
        )
        if is_stuck:
            busy = [one for one in ranks if one.waited_s < patience_s / 2]
            # all wait for each other: new connections are all that can be tried
            self._replace(busy or ranks[-1:], f"has made no progress for {patience_s:.0f} s")
        return None

    def _replace(self, hung: list[Member], why: str) -> None:
        """End processes that hang, after every rank has told where it is."""
        for member in [*hung, *(one for one in self._running() if one not in hung)]:
            text = member.stack_text()
            if member in hung:
                member.process.kill()  # at once: SIGCONT has set it going again
            log.warning("rank %d (process %d) is here:\n%s", member.rank, member.process.pid, text)
        for member in hung:
            host = socket.gethostname()
            log.warning("rank %d on %s %s: it is replaced", member.rank, host, why)
            member.hung = why
            member.process.join()

    # Generations
    # ---------------------------------------------------------------------------------------

    def _give_places(self) -> None:
        """Begin the next generation when everybody who belongs to it is there."""
        if self._stops and not self._running():
            self._code = EXIT_PREEMPTED if self._code is None else self._code
        if self._code is not None:
            # one that saw the last exchange of all is enough: everybody had come to it
            for member in self._members:
                if member.state == "stranded":
                    member.state = "told"
                    member.send(do="leave" if self._code == EXIT_OK else "fail")
            return
        if any(one.state == "running" for one in self._members):
            return
        stranded = sorted(
            (one for one in self._members if one.state == "stranded"), key=lambda one: one.rank
        )
        if self._break is None and self._generation > 0:
            return
        if self._break is not None and not self._break.is_explained:
            if time.monotonic() - self._break.ended_at > VERDICT_S:
                for member in sorted(stranded, key=lambda one: one.stranded_at):
                    member.state = "running"
                    member.send(do="fail")  # nobody was lost: the error is its own
            return
        spares = [one for one in self._members if one.state == "spare"]
        present = [*stranded, *spares]
        if len(present) < self._wanted.ranks and any(
            one.state == "warming" for one in self._members
        ):
            return
        self._begin(stranded, spares)

    def _begin(self, stranded: list[Member], spares: list[Member]) -> None:
        present = [*stranded, *spares]
        if not present:
            raise LatheError(
                "--survive: every rank is lost. Run the same command again: it goes on."
            )
        self._in_vain += self._generation > 0
        if self._in_vain > MOST_IN_VAIN:
            assert self._break is not None, "a generation after the first follows a break"
            raise LatheError(
                f"--survive: {MOST_IN_VAIN} times in a row a rank was lost before the next step "
                f"was done; the last one: {self._break.lost}. Look at what was logged before; the "
                "same command goes on from the last checkpoint."
            )
        world = fitting(min(len(present), self._wanted.ranks), present[0].batches)
        if world < self._world:
            log.warning("the run goes on with %d rank(s) instead of %d", world, self._world)
        self._world, self._generation = world, self._generation + 1
        port = _free_port()
        free = sorted({*range(world)} - {one.rank for one in stranded})
        for member in present[:world]:
            if not 0 <= member.rank < world:
                member.rank = free.pop(0)
            now = time.monotonic()
            member.state, member.moved_at, member.heard_at = "running", now, now
            member.has_joined, member.step, member.place, member.waited_s = False, -1, "start", 0.0
            place = {"rank": member.rank, "world": world, "port": port}
            member.send(do="join", generation=self._generation, begun=self._begun, **place)
        ranks = sorted(present[:world], key=lambda one: one.rank)
        log.info("ranks: processes %s", ", ".join(str(one.process.pid) for one in ranks))
        for member in present[world:]:
            if member.state == "stranded":
                member.state, member.rank = "spare", -1
        self._stragglers.begin()

    def _tell_recovery(self) -> None:
        ended, self._break = self._break, None
        if ended is None:
            return
        seconds = time.monotonic() - ended.at
        event = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
            "generation": self._generation,
            "lost": ended.lost,
            "world": self._world,
            "reached": ended.reached,
            "from": ended.step,
            "source": ended.source,
            "steps_lost": max(ended.reached - ended.step, 0),
            "recovery_s": round(seconds, 3),
        }
        log.warning("%s", events.recovery_sentence(event))
        if not self._folder:
            return  # no run had begun
        try:
            events.add(Path(self._folder), event)
        except OSError as error:
            log.warning("%s: not written: %s", events.FILE, error)


def _most_s(member: Member, patience_s: float) -> float:
    """How long a rank may hold on to a group that is broken."""
    if not member.has_joined:
        return JOIN_S
    # torch 2.13: gloo making a group waits for a rank that is gone, and no closed socket ends that
    return FREE_S if member.waited_s > FREE_S else patience_s


def _become(module: str, *args: Any) -> None:
    importlib.import_module(module).become(*args)


def fitting(ranks: int, batches: list[int]) -> int:
    """The most ranks, at most `ranks`, among which every global batch can be dealt evenly."""
    return next(n for n in range(ranks, 0, -1) if all(batch % n == 0 for batch in batches))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
