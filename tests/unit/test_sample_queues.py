"""The requests of samplers: a worker that fails costs time, and no answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.serve.answers.workers import GONE, CannotAnswer, ProcessEnded
from jobs.serve.steps import wire
from jobs.serve.steps.bodies import AskSample
from jobs.serve.steps.sampling import queues
from jobs.serve.steps.sampling.queues import SampleQueues
from jobs.serve.steps.sampling.sample_log import SampleLog
from jobs.serve.steps.sessions import SamplerFacts
from trainer.errors import StorageError

SESSION = "sess-" + 24 * "0"
FACTS = SamplerFacts(
    session=SESSION,
    number=0,
    created_at="2026-01-01T00:00:00+00:00",
    owner="anna",
    base_model="tiny-chat",
)
ANSWER = {"sequences": [{"tokens": [7], "logprobs": [-0.5], "finish": "stop", "topk": []}]}


class FailingWorkers:
    """Workers of which the first ones fail. seeds: of the questions that were asked."""

    def __init__(self, *errors: CannotAnswer) -> None:
        self.errors, self.seeds = [*errors], list[int]()

    async def of(self, run: Path, weights: str) -> FailingWorkers:
        return self

    async def ask(self, question: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        self.seeds.append(question["sample"]["seed"])
        if self.errors:
            raise self.errors.pop(0)
        yield ANSWER

    async def stop(self) -> None:
        pass


def answer(folder: Path, workers: FailingWorkers, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a sampler answers to one request without a seed."""
    monkeypatch.setattr(queues, "AGAIN_S", 0.01)
    sessions: Any = SimpleNamespace(
        sampler_folder=lambda _: folder / "sample-0", finished=lambda _: None
    )
    offer = SimpleNamespace(driven=SimpleNamespace(max_tokens=64))
    steps: Any = SimpleNamespace(
        sessions=sessions, offer=lambda _: offer, base_folder=lambda _: folder
    )
    values = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}}
    values |= {"sampling_params": {}, "sampling_session_id": str(FACTS.id), "seq_id": 0}

    async def story() -> Any:
        everything: Any = workers
        samples = SampleQueues(everything, steps)
        await samples.add(FACTS, AskSample.model_validate(values))
        reply = await samples.answer(FACTS, 0, within_s=20)
        await samples.stop()
        return reply

    return asyncio.run(story())


def test_a_sample_is_asked_again_with_its_seed_until_a_worker_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = FailingWorkers(*[ProcessEnded(GONE) for _ in range(5)])
    reply = answer(tmp_path, workers, monkeypatch)
    assert wire.SampleResponse.FromString(reply).sequences[0].tokens == b"\7\0\0\0"
    assert len(workers.seeds) == 6
    assert len(set(workers.seeds)) == 1


def test_a_model_that_cannot_be_loaded_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = FailingWorkers(CannotAnswer("its file is torn"))
    reply = answer(tmp_path, workers, monkeypatch)
    assert reply["category"] == "server"
    assert len(workers.seeds) == 1


def test_an_answer_waits_for_a_disk_that_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was lost, and its client waited for ever."""
    refusals, write = [1, 2], SampleLog.write

    def refuse_first(self: SampleLog, *what: Any) -> None:
        if refusals:
            refusals.pop()
            raise StorageError("no space left on device")
        write(self, *what)

    monkeypatch.setattr(SampleLog, "write", refuse_first)
    assert isinstance(answer(tmp_path, FailingWorkers(), monkeypatch), bytes)
