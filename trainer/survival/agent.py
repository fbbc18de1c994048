"""The parent process of `--survive`: it starts the ranks, keeps the memory files that they resume
from, and replaces a rank that dies or hangs. Imports no torch.

A process is in one of the states of `Member`; the run is in one of the phases of `RunPhase`. One
generation is one process group. When a rank is lost, the other ranks abandon their group, and the
next generation begins: with the same world if there is a spare, else with a smaller one. Ranks
resume from memory files that this process holds open, so they outlive any rank
(trainer/survival/mirror.py).

                       all ranks have abandoned the group,
    GATHERING  <------------------------------------------  BROKEN
        |                                                      ^
        | enough processes are ready                           | a rank is lost
        v                                                      |
     RUNNING  -------------------------------------------------+
        |
        | a rank leaves by itself (done, preempted, or failed by its own error)
        v
     ENDING      (from any phase)
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
from dataclasses import dataclass
from enum import Enum
from multiprocessing import connection
from pathlib import Path
from typing import Any

from trainer.errors import EXIT_OK, EXIT_PREEMPTED, LatheError
from trainer.files import survival_events as events
from trainer.files.atomic import read_json, write_json
from trainer.files.survive import Survival
from trainer.runtime.process import PARENT, birth, facts
from trainer.survival import hangs
from trainer.survival.member import Break, Member
from trainer.survival.stragglers import Stragglers

POLL_S = 0.2
STEPS_OF_PATIENCE = 10  # a rank may be silent for so many steps, if that is more than hang_s
LEAVE_S = 30.0  # how long the other ranks may stay after the first one has left
VERDICT_S = 5.0  # a death within this time after an error may have caused it
MOST_IN_VAIN = 3  # in a row: generations that made no step, processes that ended while importing
WARM_S = 900.0  # how long a process may import: a cold network disk takes minutes
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

log = logging.getLogger(__name__)


class RunPhase(Enum):
    """What the run does now. It decides what the agent looks for."""

    GATHERING = "no process runs a generation: the next one begins when enough are ready"
    RUNNING = "the ranks of a generation work"
    BROKEN = "a rank of this generation was lost, and the others have not all let go yet"
    ENDING = "a rank has left by itself, and the others must follow"


@dataclass
class RunEnd:
    """The end of the run: the exit code, and when the first rank left."""

    code: int
    at: float


class Agent:
    """Runs `become` of a module in every process, until the ranks are done."""

    def __init__(self, survival: Survival, target: str, *args: Any) -> None:
        """target: the module; a process calls become(line, file for stacks, memory files, standard
        outputs, environment, *args). Importing it is what warms a process up.
        """
        self._survival, self._target, self._args = survival, target, args
        # one thread, as torchrun sets it, because several ranks share the cores
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
        self._break: Break | None = None  # from the loss of a rank to the next new step
        self._ending: RunEnd | None = None
        self._stops = 0  # signals that ask the run to stop
        # in a row: generations without a new step, processes that ended while they imported
        self._idle_generations = self._failed_imports = 0
        self._folder, self._begun = "", list[str]()
        self._reached = 0  # the last step that any rank has completed
        self._stragglers = Stragglers()

    def run(self) -> int:
        """The exit code of the ranks, which a launcher passes on.

        Raises LatheError when ranks are lost again and again without a step in between.
        """
        before = {
            number: signal.signal(number, self._ask)
            for number in STOP_SIGNALS
            if signal.getsignal(number) != signal.SIG_IGN  # nohup
        }
        self._context.set_forkserver_preload([self._target])
        try:
            for _ in range(self._survival.ranks + self._survival.spares):
                self._start()
            while self._members:
                self._hear()
                self._act()
                if self._ending and not any(member.is_awaited for member in self._members):
                    break
            return EXIT_PREEMPTED if self._ending is None else self._ending.code
        except LatheError as error:
            # no rank remains that could write the error into status.json
            path = Path(self._folder, "status.json")
            with contextlib.suppress(OSError, ValueError, LatheError):
                status = read_json(path) if self._folder else None
                if status is not None and status.get("state") == "running":
                    write_json(path, status | {"state": "failed", "error": str(error)})
            raise
        finally:
            for member in self._members:
                member.process.kill()
            for member in self._members:
                member.process.join()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _phase(self) -> RunPhase:
        if self._ending is not None:
            return RunPhase.ENDING
        if not any(member.state == "running" for member in self._members):
            return RunPhase.GATHERING
        if self._break is not None and self._break.generation == self._generation:
            return RunPhase.BROKEN
        return RunPhase.RUNNING

    def _act(self) -> None:
        """One look at all processes: do what the phase of the run calls for."""
        now = time.monotonic()
        if self._stops and self._ending is None and not self._ranks():
            self._ending = RunEnd(EXIT_PREEMPTED, now)
        phase = self._phase()
        if phase is RunPhase.ENDING:
            # tell stranded ranks how the run ended, and kill the ranks that stay too long
            assert self._ending is not None, "the phase is ENDING"
            if now - self._ending.at > LEAVE_S:
                for member in filter(lambda one: one.is_awaited, self._members):
                    member.process.kill()
            for member in self._members:
                if member.state == "stranded":
                    member.state = "dismissed"
                    # a rank that left with EXIT_OK passed the final barrier, which all reached
                    member.send(do="leave" if self._ending.code == EXIT_OK else "fail")
            return
        for member in self._members:
            limit_s = max(WARM_S, self._patience_s())
            if member.state == "warming" and now - member.began_at > limit_s:
                log.warning("process %d has imported for %.0f s", member.process.pid, WARM_S)
                member.process.kill()
                member.began_at = now
        if phase is RunPhase.GATHERING:
            self._begin_when_ready(now)
        else:
            self._replace_hung(now, phase)

    # Processes
    # ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        stacks = os.memfd_create("stacks")
        # multiprocessing hands open files over as connections
        outputs = [connection.Connection(os.dup(number), readable=False) for number in (1, 2)]
        place = (theirs, f"/proc/{os.getpid()}/fd/{stacks}", self._memory)
        args = (self._target, *place, outputs, self._environment, *self._args)
        process = self._context.Process(target=_become, args=args)
        process.start()
        for file in (theirs, *outputs):
            file.close()
        now = time.monotonic()
        member = Member(process, ours, stacks, moved_at=now, heard_at=now, began_at=now)
        self._members.append(member)

    def _ranks(self) -> list[Member]:
        """The processes that belong to a generation, stranded ones included."""
        return [member for member in self._members if member.is_rank]

    def _ask(self, number: int, frame: Any) -> None:
        """Handle a signal: ranks save and stop; a second Ctrl-C leaves without saving."""
        self._stops += 1
        if number == signal.SIGINT and self._stops > 1:
            raise KeyboardInterrupt
        for member in list(self._members):
            if member.has_joined:  # the others are asked when they have joined
                member.send_signal(signal.SIGTERM)

    def _hear(self) -> None:
        """Read what processes have sent within POLL_S, and bury those that have ended."""
        ready = connection.wait([member.line for member in self._members], POLL_S)
        for member in list(self._members):
            # checked before the line is read: a child of a dead process may keep the line open
            has_ended = birth(member.process.pid) is None
            try:
                while (has_ended or member.line in ready) and member.line.poll():
                    self._take(member, json.loads(member.line.recv_bytes()))
            except (EOFError, OSError):
                has_ended = True
            if has_ended:
                self._bury(member)

    def _take(self, member: Member, message: dict[str, Any]) -> None:
        now = time.monotonic()
        member.heard_at = now
        match message.pop("is"):
            case "warm":
                member.state, member.batches = "spare", message["batches"]
                self._failed_imports = 0
            case "joined":
                member.has_joined = True
                if self._stops:
                    member.send_signal(signal.SIGTERM)
            case "leaving":
                member.code = message["code"]
            case "stranded":
                member.state, member.stranded_at = "stranded", now
                log.info("rank %d: %s", member.rank, message["error"].partition("\n")[0])
                self._break_generation()
            case "begun":
                if message["folder"] != self._folder:
                    self._folder, self._reached = message["folder"], 0
                self._begun = sorted({*self._begun, message["id"]})
            case "resumed" if self._break is not None:
                self._break.source, self._break.step = message["source"], message["step"]
            case "moved":
                self._move(member, message["step"], message["place"])
            case "beat":
                member.waited_s = message["waited_s"]
                self._stragglers.add(member.rank, message["busy"], message["of"])
            case _:
                pass

    def _move(self, member: Member, step: int, place: str) -> None:
        """A rank has completed `step` steps, and now does what `place` says (Member.place)."""
        now = time.monotonic()
        # Until a step has been timed, the time of the whole start stands for it: patience must be
        # longer than a step of unknown length.
        is_timed = (
            step == member.step + 1 if member.place == "step" else not self._stragglers.step_s()
        )
        if place == "step" and is_timed:
            self._stragglers.step(member.rank, now - member.moved_at)
        is_new = member.state == "running"
        if self._break is not None:
            # a message from before the loss may be read after it
            is_new &= self._generation > self._break.generation and step > self._break.step
        member.step, member.place, member.moved_at = step, place, now
        self._reached = max(self._reached, step)
        if is_new:
            self._idle_generations = 0
            self._close_break()
        for line in self._stragglers.lines():
            log.warning("%s", line)

    def _bury(self, member: Member) -> None:
        """A process has ended: decide whether it left by itself, or is lost and replaced."""
        member.process.join(5)
        self._members.remove(member)
        member.line.close()
        os.close(member.stacks)
        exitcode = member.process.exitcode
        # Python gives 255 if the fork server is gone, too, so that it cannot know the code
        is_error = exitcode is not None and 0 < exitcode < 255
        # another process in its place would raise the same error
        is_own_error = is_error and (member.is_rank or not self._generation)
        if member.code is not None or is_own_error:
            if self._ending is None or self._ending.code == EXIT_OK:
                self._ending = RunEnd(member.exit_code or EXIT_OK, time.monotonic())
                if self._ending.code == EXIT_OK:
                    self._close_break()  # a generation that had no step left to do
            return
        if member.is_rank and self._ending is None:
            self._break_generation()
            assert self._break is not None, "it was just made"
            log.warning("rank %d (process %d) %s", member.rank, member.process.pid, member.end)
            why = member.hang or member.end
            self._break.lost.append({"rank": member.rank, "pid": member.process.pid, "why": why})
            self._break.is_explained = True
        if member.state == "warming":
            self._failed_imports += 1
            if self._failed_imports >= MOST_IN_VAIN:
                log.warning(
                    "process %d %s while it imported, as others did", member.process.pid, member.end
                )
                return
        may_return = self._survival.spares or not member.is_rank or not member.is_to_blame
        if may_return and self._stops == 0 and self._ending is None:
            self._start()

    # Hangs
    # ---------------------------------------------------------------------------------------

    def _patience_s(self) -> float:
        return max(self._survival.hang_s, STEPS_OF_PATIENCE * self._stragglers.step_s())

    def _replace_hung(self, now: float, phase: RunPhase) -> None:
        ranks = [member for member in self._members if member.state == "running"]
        patience_s = self._patience_s()
        silent = hangs.silent(ranks, now, patience_s)
        if silent:
            self._replace(silent, f"has given no sign of life for {patience_s:.0f} s")
        elif phase is RunPhase.BROKEN:
            assert self._break is not None, "the phase is BROKEN"
            holders = hangs.holders(ranks, now - self._break.ended_at, patience_s)
            for member in holders:
                member.is_to_blame = False
            self._replace(holders, "does not let go of a group that is broken")
        else:
            stuck = hangs.stuck(ranks, now, patience_s)
            self._replace(stuck, f"has made no progress for {patience_s:.0f} s")

    def _replace(self, hung: list[Member], why: str) -> None:
        """Log the stacks of every rank, then end the processes that hang."""
        if not hung:
            return
        for member in [*hung, *(one for one in self._ranks() if one not in hung)]:
            text = member.stack_text()
            if member in hung:
                member.process.kill()  # at once, because SIGCONT has set it going again
            log.warning("rank %d (process %d) is here:\n%s", member.rank, member.process.pid, text)
        for member in hung:
            host = socket.gethostname()
            log.warning("rank %d on %s %s: it is replaced", member.rank, host, why)
            member.hang = why
            member.process.join()

    # Generations
    # ---------------------------------------------------------------------------------------

    def _break_generation(self) -> None:
        """End this generation: tell its ranks to abandon the process group."""
        now = time.monotonic()
        if self._break is None:
            self._break = Break(now, self._reached)
        if self._break.generation < self._generation:  # a rank may be lost while others recover
            self._break.generation, self._break.ended_at = self._generation, now
            self._break.is_explained = False
        for member in self._ranks():
            member.send(do="let go")

    def _begin_when_ready(self, now: float) -> None:
        """Begin the next generation when every process that belongs to it is ready."""
        if self._break is None and self._generation > 0:
            return
        stranded = [member for member in self._members if member.state == "stranded"]
        if self._break is not None and not self._break.is_explained:
            if now - self._break.ended_at > VERDICT_S:
                for member in sorted(stranded, key=lambda one: one.stranded_at):
                    member.state = "running"
                    member.send(do="fail")  # no rank was lost, so the error is its own
            return
        stranded.sort(key=lambda one: one.rank)
        present = [*stranded, *(one for one in self._members if one.state == "spare")]
        are_more_coming = any(one.state == "warming" for one in self._members)
        if len(present) < self._survival.ranks and are_more_coming:
            return
        self._begin(present)

    def _begin(self, present: list[Member]) -> None:
        """Begin a generation with the first of `present`, the former ranks in their order first."""
        self._refuse_hopeless(present)
        world = fitting(min(len(present), self._survival.ranks), present[0].batches)
        if world < self._world:
            log.warning("the run goes on with %d rank(s) instead of %d", world, self._world)
        self._world, self._generation = world, self._generation + 1
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]  # a free one
        free = sorted({*range(world)} - {one.rank for one in present})
        ranks, others = present[:world], present[world:]
        for member in ranks:
            if not 0 <= member.rank < world:
                member.rank = free.pop(0)
            member.join_generation(time.monotonic())
            place = {"rank": member.rank, "world": world, "port": port}
            member.send(do="join", generation=self._generation, begun=self._begun, **place)
        pids = [str(one.process.pid) for one in sorted(ranks, key=lambda one: one.rank)]
        log.info("ranks: processes %s", ", ".join(pids))
        for member in others:
            if member.state == "stranded":
                member.state, member.rank = "spare", -1
        self._stragglers.begin()

    def _refuse_hopeless(self, present: list[Member]) -> None:
        """LatheError when no process is present, or too many generations ended without a step."""
        if not present:
            raise LatheError(
                "--survive: every rank is lost. Run the same command again: it goes on."
            )
        self._idle_generations += self._generation > 0
        if self._idle_generations > MOST_IN_VAIN:
            assert self._break is not None, "a generation after the first follows a break"
            raise LatheError(
                f"--survive: {self._idle_generations} times in a row a rank was lost before the "
                f"next step was done; the last one: {self._break.lost}. Look at what was logged "
                "before; the same command goes on from the last checkpoint."
            )

    def _close_break(self) -> None:
        """The run goes on after a loss: log the recovery, and add it to survival.jsonl."""
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


def _become(module: str, *args: Any) -> None:
    importlib.import_module(module).become(*args)


def fitting(ranks: int, batches: list[int]) -> int:
    """The most ranks, at most `ranks`, among which every global batch can be dealt evenly."""
    return next(n for n in range(ranks, 0, -1) if all(batch % n == 0 for batch in batches))
