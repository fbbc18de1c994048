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
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.submit.prepare import PROJECT

MAX_WAITING = 32  # requests for one model
MAX_TOGETHER = 16  # questions of one answer each that wait and are answered in one go
ANSWER_BYTES = 64 << 20  # of one line of a worker
START_S, ANSWER_S = 300.0, 300.0  # a worker that is silent for so long is ended
GONE = "the model's process has ended, or is stuck"
Waiting = tuple[dict[str, Any], "asyncio.Future[dict[str, Any]]"]


class CannotAnswer(Exception):
    """What a worker says of a request, or of its model, that it cannot do."""


class Overloaded(Exception):
    """So many requests wait for this model that another one would wait for ever."""


@dataclass
class Worker:
    """One model that answers, one request after the other."""

    run: Path
    cache: Path
    _process: Process | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: int = 0
    _together: list[Waiting] = field(default_factory=list["Waiting"])
    _sending: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    @property
    def is_busy(self) -> bool:
        """Whether it answers somebody."""
        return bool(self._waiting)

    async def ask_once(self, question: dict[str, Any]) -> dict[str, Any]:
        """Its one answer, given together with those that wait. CannotAnswer, Overloaded."""
        if self._waiting >= MAX_WAITING:
            raise Overloaded
        self._waiting += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._together.append((question, answer))
        if len(self._together) == 1:
            self._send()
        try:
            return await answer
        finally:
            self._waiting -= 1

    def _send(self) -> None:
        """Have what waits asked as soon as the worker is free, whoever of them leaves."""
        task = asyncio.create_task(self._ask_together())
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _ask_together(self) -> None:
        async with self._turn:
            asked, self._together = self._together[:MAX_TOGETHER], self._together[MAX_TOGETHER:]
            if self._together:
                self._send()
            question = {"many": [one for one, _ in asked]}
            try:
                (answer,) = [one async for one in self._exchange(question, last="many")]
                answers: list[dict[str, Any]] = answer["many"]
            except CannotAnswer as error:
                answers = [{"error": str(error)}] * len(asked)
        for (_, waiting), one in zip(asked, answers, strict=True):
            if waiting.done():
                continue
            if "error" in one:
                waiting.set_exception(CannotAnswer(one["error"]))
            else:
                waiting.set_result(one)

    async def ask(self, question: dict[str, Any], *, last: str) -> AsyncGenerator[dict[str, Any]]:
        """Its answers, up to the one that has the key `last`. CannotAnswer, Overloaded."""
        if self._waiting >= MAX_WAITING:
            raise Overloaded
        self._waiting += 1
        try:
            answers = self._exchange(question, last=last)
            async with self._turn, contextlib.aclosing(answers):
                async for answer in answers:
                    yield answer
        finally:
            self._waiting -= 1

    async def _exchange(
        self, question: dict[str, Any], *, last: str
    ) -> AsyncGenerator[dict[str, Any]]:
        """The answers to one line. Whoever calls has the turn. CannotAnswer."""
        is_whole = False
        try:
            process = await self._started()
            assert process.stdin is not None, "it was made with a pipe"
            process.stdin.write(json.dumps(question).encode() + b"\n")
            await process.stdin.drain()
            while not is_whole:
                answer = await self._line(process, ANSWER_S)
                is_whole = last in answer or "error" in answer
                if "error" in answer:
                    raise CannotAnswer(answer["error"])
                yield answer
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
        while len(self._loaded) >= self.most:
            if not idle:
                raise Overloaded
            await self._loaded.pop(idle.pop(0)).stop()
        self._loaded[run] = worker
        return worker

    async def stop(self) -> None:
        """End them all."""
        for worker in self._loaded.values():
            await worker.stop()
