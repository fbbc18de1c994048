"""The requests of samplers: logged before they are acknowledged, answered by a worker, and answered
again to the same bytes where a server was killed in between.

<session>/sample-<n>/
    requests-000001.bin, ...   records: the client's number, what is asked, the seed that was drawn
    answers-000001.bin, ...    records: the number, and the protobuf SampleResponse or an error
    clones/<k>                 empty: the numbers that were given to clients of the session
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from starlette.concurrency import run_in_threadpool

from jobs.errors import without_places
from jobs.serve.answers.workers import CannotAnswer, Overloaded, ProcessEnded, Workers
from jobs.serve.requests import Refusal
from jobs.serve.steps.bodies import AskSample
from jobs.serve.steps.names import ClientId, absent
from jobs.serve.steps.sampling.replies import question_of, sample_output
from jobs.serve.steps.sampling.sample_log import SampleLog
from jobs.serve.steps.sessions import SamplerFacts
from trainer.errors import DataError, StorageError

if TYPE_CHECKING:
    from jobs.serve.steps.context import Steps

CLONE = 1_000_000_000  # the numbers of requests of one client of a sampler
AT_ONCE = 16  # questions of one sampler in progress
MOST_WAITING = 4096  # requests of one sampler without an answer
# For so long a request is tried: the SDK gives up after two hours without progress (RetryConfig).
GIVE_UP_S = 7200.0
AGAIN_S = 1.0  # until a busy worker is asked again, or a disk that refused
MOST_AGAIN_S = 120.0  # until a question is asked again that several workers did not answer
MOST_OPEN = 512
SAMPLES = "samples"

log = logging.getLogger(__name__)


@dataclass(eq=False)
class SampleQueue:
    """The requests of one sampler."""

    facts: SamplerFacts
    log: SampleLog
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict[int, "asyncio.Task[None]"])
    num_waiting: int = 0


@dataclass
class SampleQueues:
    """The samplers that requests of this server use. workers: that answer them."""

    workers: Workers
    steps: Steps | None = None  # set when the parts of the dialect are joined
    _open: dict[ClientId, SampleQueue] = field(default_factory=dict[ClientId, SampleQueue])
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def add(self, facts: SamplerFacts, body: AskSample) -> list[str]:
        """Log a request durably, and start to answer it; the ids of its samples. Refusal: 409 for
        another request under a number that was used, 429 when too many wait.
        """
        queue = await self._queue(facts)
        if len(queue.tasks) >= MOST_WAITING and body.seq_id not in queue.log.requests:
            text = f"{facts.id} has {MOST_WAITING} requests that wait. Send this one again."
            raise Refusal(429, text, code="rate_limit_exceeded", retry_after_s=1)
        seed = body.sampling_params.seed
        asked = body.model_dump(mode="json", exclude_none=True)
        drawn = secrets.randbelow(2**63) if seed is None else seed
        is_same = await run_in_threadpool(queue.log.add, body.seq_id, asked, drawn)
        if not is_same:
            text = f"{facts.id}: request {body.seq_id} was sent before with another content. "
            raise Refusal(409, f"{text}Use the next number.", code="operation_conflict")
        self._start(queue, body.seq_id)
        return [f"{facts.id}:{body.seq_id}:{number}" for number in range(body.num_samples)]

    async def answer(
        self, facts: SamplerFacts, seq: int, *, within_s: float
    ) -> dict[str, Any] | bytes | None:
        """The answer of a request as soon as it is there; None when it is not within a time.
        Refusal (404) for a request that was never sent.
        """
        queue = await self._queue(facts)
        if seq not in queue.log.requests:
            raise absent("request", f"{facts.id}:{seq}")
        with anyio.move_on_after(within_s):
            async with queue.news:
                await queue.news.wait_for(lambda: seq in queue.log.answers)
        if seq not in queue.log.answers:
            return None
        record = await run_in_threadpool(queue.log.answer, seq)
        if seq not in queue.log.answers:  # it is asked again
            return None
        if record is None:  # SDK: the request is sent again, with a number of its own
            raise Refusal(410, f"The answer of {facts.id}:{seq} is kept no more. Ask again.")
        error: Any = record[0].get("error")
        if error is not None:
            return {"error": error, "category": record[0].get("category", "server")}
        return record[1]

    async def completions(
        self, facts: SamplerFacts, clone: int, cursor: int, *, within_s: float
    ) -> tuple[list[dict[str, Any]], int]:
        """What has ended since a cursor, of one client of a sampler, and the next cursor."""
        queue = await self._queue(facts)
        end = time.monotonic() + within_s
        while True:
            order = queue.log.order
            if cursor > len(order):
                cursor = 0  # of another life of this log
            new = [one for one in order[cursor:] if one.seq // CLONE == clone]
            left_s = end - time.monotonic()
            if new or left_s <= 0:
                break
            cursor = len(order)
            async with queue.news:
                with anyio.move_on_after(left_s):
                    await queue.news.wait_for(lambda at=cursor: len(queue.log.order) > at)
        data: list[dict[str, Any]] = []
        for one in new:
            entry: dict[str, Any] = {"request_id": f"{facts.id}:{one.seq}"}
            if one.is_error:
                entry["state"] = "failed"
            else:
                entry |= {"state": "finished", "response_payload_uncompressed_size": one.size}
            data.append(entry)
        return data, len(order)

    async def forget(self, facts: SamplerFacts, ids: Collection[tuple[ClientId, int]]) -> None:
        """Note that answers were received: their bytes may go when the log grows large."""
        mine = [seq for client, seq in ids if client == facts.id]
        if mine:
            queue = await self._queue(facts)
            await run_in_threadpool(queue.log.forget, mine)

    async def cancel(self, facts: SamplerFacts, seq: int) -> None:
        """Give up a request that nobody waits for any more."""
        queue = await self._queue(facts)
        task = queue.tasks.get(seq)
        if task is not None:
            task.cancel()

    async def join(self, facts: SamplerFacts) -> int:
        """A number of its own for one more client of a sampler, from 1 on."""
        queue = await self._queue(facts)
        return await run_in_threadpool(queue.log.next_clone)

    def is_open(self, folder: Path) -> bool:
        """Whether this server answers the sampler of a folder."""
        return any(one.log.folder == folder for one in [*self._open.values()])

    async def stop(self) -> None:
        """End everything; what is not answered is answered by the next server."""
        for queue in self._open.values():
            for task in queue.tasks.values():
                task.cancel()
        tasks = [task for queue in self._open.values() for task in queue.tasks.values()]
        await asyncio.gather(*tasks, return_exceptions=True)
        for queue in self._open.values():
            queue.log.close()
        self._open.clear()
        await self.workers.stop()

    async def _queue(self, facts: SamplerFacts) -> SampleQueue:
        """A sampler as this server has it open; what another one left is answered."""
        assert self.steps is not None, "the parts of the dialect are joined"
        async with self._opening:
            queue = self._open.get(facts.id)
            if queue is None:
                folder = self.steps.sessions.sampler_folder(facts)
                queue = SampleQueue(facts, await run_in_threadpool(SampleLog, folder))
                self._close_idle()
                self._open[facts.id] = queue
                for seq in queue.log.requests.keys() - queue.log.answers.keys():
                    self._start(queue, seq)
        return queue

    def _close_idle(self) -> None:
        idle = [name for name, one in self._open.items() if not one.tasks]
        for name in idle[: max(len(self._open) + 1 - MOST_OPEN, 0)]:
            self._open.pop(name).log.close()

    def _start(self, queue: SampleQueue, seq: int) -> None:
        if seq in queue.log.answers or seq in queue.tasks:
            return
        task = asyncio.create_task(self._answer(queue, seq))
        queue.tasks[seq] = task
        task.add_done_callback(lambda _: queue.tasks.pop(seq, None))

    async def _answer(self, queue: SampleQueue, seq: int) -> None:
        """Answer one request, and write the answer durably."""
        fields: Mapping[str, Any] = {}
        payload = b""
        try:
            async with queue.room:
                body, seed = await run_in_threadpool(queue.log.request, seq)
                payload = await self._sample(queue.facts, body, seed)
        except (DataError, CannotAnswer, Refusal) as error:
            is_ours = isinstance(error, CannotAnswer) and error.param == "model"
            is_ours = is_ours or (isinstance(error, Refusal) and error.status >= 500)
            text = without_places(str(error))
            fields = {"error": text, "category": "server" if is_ours else "user"}
        except asyncio.CancelledError:
            return
        except Exception:
            log.exception("%s:%d", queue.facts.id, seq)
            fields = {"error": "The server failed. Its log says why.", "category": "server"}
        await self._write(queue, seq, fields, payload)
        async with queue.news:
            queue.news.notify_all()

    async def _write(
        self, queue: SampleQueue, seq: int, fields: Mapping[str, Any], payload: bytes
    ) -> None:
        """Write an answer durably, as soon as the disk has room for it."""
        while True:
            try:
                return await run_in_threadpool(queue.log.write, seq, fields, payload)
            except StorageError as error:
                log.warning("%s:%d is not written yet: %s", queue.facts.id, seq, error)
                await asyncio.sleep(AGAIN_S)

    async def _sample(self, facts: SamplerFacts, body: AskSample, seed: int) -> bytes:
        """The answer of a worker, of another one if one does not answer: a client that asked anew
        would get another seed. DataError, CannotAnswer, Refusal.
        """
        assert self.steps is not None, "the parts of the dialect are joined"
        offer = self.steps.offer(facts.base_model)
        most = offer.driven.max_tokens
        question = await run_in_threadpool(question_of, body, seed=seed, max_tokens=most)
        weights = await self._weights(facts)
        place = await run_in_threadpool(self.steps.base_folder, offer)
        pause_s, until = AGAIN_S, time.monotonic() + GIVE_UP_S
        while True:
            try:
                worker = await self.workers.of(place, SAMPLES)
                asked = {"sample": question, "weights": weights}
                async with aclosing(worker.ask(asked)) as pieces:
                    (answer,) = [piece async for piece in pieces]
                return await run_in_threadpool(sample_output, body, answer)
            except Overloaded:
                await asyncio.sleep(AGAIN_S)
            except ProcessEnded as error:
                is_over = self.steps.sessions.finished(facts.session) is not None
                if is_over or time.monotonic() >= until:
                    raise
                log.warning("%s is asked again in %.0f s: %s", facts.id, pause_s, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MOST_AGAIN_S)

    async def _weights(self, facts: SamplerFacts) -> str:
        """The folder of a sampler's weights, once they are saved; "" for the base. Refusal."""
        if facts.folder is None:
            return ""
        folder = await self._saved_folder(facts, facts.folder)
        if not await run_in_threadpool(Path(folder).is_dir):
            text = f"The weights of {facts.id} were deleted. Begin another sampler."
            raise Refusal(410, text, code="weights_deleted")
        return folder

    async def _saved_folder(self, facts: SamplerFacts, folder: str) -> str:
        """The whole path of a sampler's weights, once the operation that saves them is done."""
        assert self.steps is not None, "the parts of the dialect are joined"
        if facts.of_run is None or facts.of_operation is None:
            return folder  # a copy
        run = self.steps.sessions.run_by_name(facts.of_run)
        if run is None:
            raise Refusal(404, f"The run {facts.of_run} is not there any more.")
        result = await self.steps.runs.result(run, facts.of_operation, within_s=GIVE_UP_S)
        if result is None:
            raise Refusal(503, f"The weights of {facts.id} were not saved within {GIVE_UP_S} s.")
        if result.error is not None:
            raise Refusal(400, f"The weights of {facts.id} were not saved: {result.error}")
        return str(self.steps.runs.folder(run) / folder)
