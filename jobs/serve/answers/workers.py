"""One process for each loaded model, because the server imports no torch. When another model is
needed, the least recently used process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.submit.prepare import PROJECT

MAX_WAITING = 32  # requests for one model
MAX_TOGETHER = 16  # waiting questions that are answered in one batch
ANSWER_BYTES = 256 << 20  # of one line of a worker
START_S, ANSWER_S = 300.0, 300.0  # a worker that is silent for so long is ended
MOST_PATIENCE = 8  # times as long may a worker be silent on a machine that is slow
GONE = "the model's process has ended, or is stuck"

log = logging.getLogger(__name__)


class CannotAnswer(Exception):
    """A worker's reason why it cannot answer a request or load its model. param: the parameter of
    the request that is wrong.
    """

    def __init__(self, message: str, param: str = "model") -> None:
        super().__init__(message)
        self.param = param


class ProcessEnded(CannotAnswer):
    """A worker's process ended, or was silent for too long. Another one may answer."""


class NotReady(ProcessEnded):
    """A worker's process ended, or was silent for too long, before it had loaded its model."""


class Overloaded(Exception):
    """Too many requests are waiting for this model."""


@dataclass(eq=False)
class Waiting:
    """A question, and the queue of the pieces of its answer; None follows the last piece."""

    question: dict[str, Any]
    pieces: asyncio.Queue[dict[str, Any] | CannotAnswer | None] = field(
        default_factory=asyncio.Queue["dict[str, Any] | CannotAnswer | None"]
    )
    is_answered: bool = False
    has_left: bool = False  # the client has gone: nobody reads the pieces
    is_begun: bool = False  # whether a piece of its answer came

    def tell(self, piece: dict[str, Any]) -> None:
        """Hand on a piece of the answer. A piece of nothing but text is followed by others, and so
        is the end of an answer if the question has several.
        """
        self.is_begun = True
        self.pieces.put_nowait(piece)
        if piece.keys() - {"choice"} != {"text"} and piece.get("is_last", True):
            self.end()

    def end(self, error: CannotAnswer | None = None) -> None:
        """End the answer, with an error if one is given."""
        if error is not None:
            self.pieces.put_nowait(error)
        self.is_answered = True
        self.pieces.put_nowait(None)


@dataclass
class Worker:
    """The process of one model. Questions that arrive while it answers wait and form the next
    batch.
    """

    run: Path
    cache: Path
    weights: str = "final"  # or base: as they were before the training
    _process: Process | None = None
    _patience: int = 1  # how many times the usual time it may be silent
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: int = 0
    _together: list[Waiting] = field(default_factory=list[Waiting])
    _sending: dict[asyncio.Task[None], list[Waiting]] = field(
        default_factory=dict["asyncio.Task[None]", list[Waiting]]
    )

    @property
    def is_busy(self) -> bool:
        """Whether any request waits for it."""
        return bool(self._waiting)

    @contextlib.contextmanager
    def busy(self) -> Generator[None]:
        """Inside, this worker is not ended to make room for another model."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    async def ask(self, question: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The pieces of the answer; waiting questions are answered in one batch. CannotAnswer
        (ProcessEnded if another process may answer), Overloaded.
        """
        if self._waiting >= MAX_WAITING:
            raise Overloaded
        one = Waiting(question)
        self._waiting += 1
        self._together.append(one)
        if len(self._together) == 1:
            self._send()
        try:
            while (piece := await one.pieces.get()) is not None:
                if isinstance(piece, CannotAnswer):
                    raise piece
                if "error" in piece:
                    raise CannotAnswer(piece["error"], piece.get("param", "model"))
                yield piece
        finally:
            self._waiting -= 1
            one.has_left = True
            # an exchange whose clients have all gone is cancelled
            for task, batch in self._sending.items():
                is_over = all(each.is_answered for each in batch)
                if not is_over and all(each.has_left for each in batch):
                    task.cancel()

    def _send(self) -> None:
        """Start a task that asks the waiting questions as soon as the worker is free."""
        batch: list[Waiting] = []
        task = asyncio.create_task(self._ask_together(batch))
        self._sending[task] = batch
        task.add_done_callback(self._sending.pop)

    async def _ask_together(self, batch: list[Waiting]) -> None:
        async with self._turn:
            self._together = [one for one in self._together if not one.has_left]
            batch += self._together[:MAX_TOGETHER]
            self._together = self._together[MAX_TOGETHER:]
            if self._together:
                self._send()
            if batch:
                await self._answer(batch)

    async def _answer(self, batch: list[Waiting]) -> None:
        """Answer a batch, under the lock. If its process ends, each question of whose answer no
        piece came is asked again alone, since another one may have ended the process.
        """
        error = CannotAnswer(GONE)
        try:
            await self._exchange(batch)
        except NotReady as reason:  # it would end for each question again
            error = reason
        except ProcessEnded as reason:
            error = reason
            for one in batch if len(batch) > 1 else []:
                if not (one.is_begun or one.has_left):
                    await self._answer([one])
        except CannotAnswer as reason:
            error = reason
        finally:
            for one in batch:
                if not one.is_answered:
                    one.end(error)

    async def _exchange(self, batch: list[Waiting]) -> None:
        """Send a batch, and hand each piece to its question. ProcessEnded; CannotAnswer if the
        model cannot be loaded.
        """
        is_whole = False
        try:
            process = await self._ready_process()
            assert process.stdin is not None, "it was made with a pipe"
            line = json.dumps({"many": [one.question for one in batch]})
            process.stdin.write(line.encode() + b"\n")
            await process.stdin.drain()
            while not is_whole:
                piece = await self._line(process, ANSWER_S)
                is_whole = "done" in piece
                if is_whole:
                    self._patience = 1
                    break
                number: int = piece.pop("of")
                batch[number].tell(piece)
        except OSError:
            raise ProcessEnded(GONE) from None
        finally:
            if not is_whole:  # the rest of the answers would go to the next batch
                await self.stop()

    async def _ready_process(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            words = ["-m", "trainer.commands.answer", str(self.run), str(self.cache)]
            words.append(self.weights)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *words,
                cwd=PROJECT,
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                limit=ANSWER_BYTES,
            )
            try:
                ready = await self._line(self._process, START_S)
            except ProcessEnded:
                raise NotReady(GONE) from None
            if "error" in ready:
                raise CannotAnswer(ready["error"])
        return self._process

    async def _line(self, process: Process, within_s: float) -> dict[str, Any]:
        """The next line of a process. ProcessEnded: the next process may be silent twice as long
        if this one was, since the machine may be slow.
        """
        assert process.stdout is not None, "it was made with a pipe"
        within_s *= self._patience
        try:
            line = await asyncio.wait_for(process.stdout.readline(), within_s)
            piece = json.loads(line)
        except asyncio.TimeoutError:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
            log.warning("%s: its process said nothing for %.0f s", self.run, within_s)
            raise ProcessEnded(GONE) from None
        except ValueError:
            log.warning("%s: its process ended, with the code %s", self.run, process.returncode)
            raise ProcessEnded(GONE) from None
        return piece

    async def stop(self) -> None:
        """End its process; the next request starts a new one."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@dataclass
class Workers:
    """The loaded models. most: how many there may be."""

    cache: Path
    most: int
    _loaded: OrderedDict[tuple[Path, str], Worker] = field(
        default_factory=OrderedDict[tuple[Path, str], Worker]
    )

    async def of(self, run: Path, weights: str = "final") -> Worker:
        """The worker of a run's model, trained or not (`weights`: final or base); idle ones end to
        make room for it. Overloaded.
        """
        key = (run, weights)
        worker = self._loaded.pop(key, None) or Worker(run, self.cache, weights)
        idle = [other for other, one in self._loaded.items() if not one.is_busy]
        surplus = max(len(self._loaded) + 1 - self.most, 0)
        if surplus > len(idle):
            raise Overloaded
        # There is no await up to here, and the worker is busy below, because other requests arrive
        # while a process ends.
        leaving = [self._loaded.pop(other) for other in idle[:surplus]]
        self._loaded[key] = worker
        with worker.busy():
            for one in leaving:
                await one.stop()
        return worker

    async def stop(self) -> None:
        """End all workers."""
        for worker in self._loaded.values():
            await worker.stop()
