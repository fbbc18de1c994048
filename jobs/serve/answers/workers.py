"""A process for each loaded model: torch lives there, not in the server. The least recently asked
one ends when another is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.submit.prepare import PROJECT

MAX_WAITING = 32  # requests for one model
MAX_TOGETHER = 16  # questions that wait and are answered in one go
ANSWER_BYTES = 64 << 20  # of one line of a worker
START_S, ANSWER_S = 300.0, 300.0  # a worker that is silent for so long is ended
GONE = "the model's process has ended, or is stuck"


class CannotAnswer(Exception):
    """What a worker says of a request, or of its model, that it cannot do."""


class Overloaded(Exception):
    """So many requests wait for this model that another one would wait for ever."""


@dataclass(eq=False)
class Waiting:
    """A question, and the pieces of its answer as they come; None after the last."""

    question: dict[str, Any]
    pieces: asyncio.Queue[dict[str, Any] | None] = field(
        default_factory=asyncio.Queue[dict[str, Any] | None]
    )
    is_answered: bool = False
    has_left: bool = False  # whoever asked: its pieces go nowhere

    def end(self, error: str = "") -> None:
        """No further piece comes."""
        if error:
            self.pieces.put_nowait({"error": error})
        self.is_answered = True
        self.pieces.put_nowait(None)


@dataclass
class Worker:
    """One model that answers; questions that wait while it does are then answered together."""

    run: Path
    cache: Path
    _process: Process | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: int = 0
    _together: list[Waiting] = field(default_factory=list[Waiting])
    _sending: dict[asyncio.Task[None], list[Waiting]] = field(
        default_factory=dict["asyncio.Task[None]", list[Waiting]]
    )

    @property
    def is_busy(self) -> bool:
        """Whether it answers somebody."""
        return bool(self._waiting)

    @contextlib.contextmanager
    def busy(self) -> Generator[None]:
        """Inside, it makes room for no other model."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    async def ask(self, question: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Pieces of its answer, made together with those that wait. CannotAnswer, Overloaded."""
        if self._waiting >= MAX_WAITING:
            raise Overloaded
        one = Waiting(question)
        self._waiting += 1
        self._together.append(one)
        if len(self._together) == 1:
            self._send()
        try:
            while (piece := await one.pieces.get()) is not None:
                if "error" in piece:
                    raise CannotAnswer(piece["error"])
                yield piece
        finally:
            self._waiting -= 1
            one.has_left = True
            self._leave()

    def _send(self) -> None:
        """Have what waits asked as soon as the worker is free."""
        asked: list[Waiting] = []
        task = asyncio.create_task(self._ask_together(asked))
        self._sending[task] = asked
        task.add_done_callback(self._sending.pop)

    def _leave(self) -> None:
        """End an exchange of which nobody waits for what is still to come."""
        for task, asked in self._sending.items():
            is_over = all(one.is_answered for one in asked)
            if not is_over and all(one.has_left for one in asked):
                task.cancel()

    async def _ask_together(self, asked: list[Waiting]) -> None:
        async with self._turn:
            self._together = [one for one in self._together if not one.has_left]
            asked += self._together[:MAX_TOGETHER]
            self._together = self._together[MAX_TOGETHER:]
            if self._together:
                self._send()
            error = GONE
            try:
                if asked:
                    await self._exchange(asked)
            except CannotAnswer as reason:
                error = str(reason)
            finally:
                for one in asked:
                    if not one.is_answered:
                        one.end(error)

    async def _exchange(self, asked: list[Waiting]) -> None:
        """Ask, and hand each piece to who waits for it. The caller has the turn. CannotAnswer."""
        is_whole = False
        try:
            process = await self._started()
            assert process.stdin is not None, "it was made with a pipe"
            line = json.dumps({"many": [one.question for one in asked]})
            process.stdin.write(line.encode() + b"\n")
            await process.stdin.drain()
            while not is_whole:
                piece = await self._line(process, ANSWER_S)
                is_whole = "done" in piece
                if not is_whole:
                    number: int = piece.pop("of")
                    _hand(asked[number], piece)
        except OSError:
            raise CannotAnswer(GONE) from None
        finally:
            if not is_whole:  # its other answers would go to the next one who asks
                await self.stop()

    async def _started(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            words = ["-m", "trainer.commands.answer", str(self.run), str(self.cache)]
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *words,
                cwd=PROJECT,
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                limit=ANSWER_BYTES,
            )
            ready = await self._line(self._process, START_S)
            if "error" in ready:
                raise CannotAnswer(ready["error"])
        return self._process

    async def _line(self, process: Process, within_s: float) -> dict[str, Any]:
        assert process.stdout is not None, "it was made with a pipe"
        try:
            line = await asyncio.wait_for(process.stdout.readline(), within_s)
            return json.loads(line)
        except (asyncio.TimeoutError, ValueError):
            raise CannotAnswer(GONE) from None

    async def stop(self) -> None:
        """End its process; the next request starts another one."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _hand(one: Waiting, piece: dict[str, Any]) -> None:
    """A text grows by pieces of nothing but text; any other piece is the last."""
    one.pieces.put_nowait(piece)
    if piece.keys() != {"text"}:
        one.end()


@dataclass
class Workers:
    """The models that are loaded, at most so many."""

    cache: Path
    most: int
    _loaded: OrderedDict[Path, Worker] = field(default_factory=OrderedDict[Path, Worker])

    async def of(self, run: Path) -> Worker:
        """The worker of a run's model; another one makes room for it. Overloaded."""
        worker = self._loaded.pop(run, None) or Worker(run, self.cache)
        idle = [path for path, one in self._loaded.items() if not one.is_busy]
        surplus = max(len(self._loaded) + 1 - self.most, 0)
        if surplus > len(idle):
            raise Overloaded
        # all in one go, and busy meanwhile: others ask while a process ends
        leaving = [self._loaded.pop(path) for path in idle[:surplus]]
        self._loaded[run] = worker
        with worker.busy():
            for one in leaving:
                await one.stop()
        return worker

    async def stop(self) -> None:
        """End them all."""
        for worker in self._loaded.values():
            await worker.stop()
