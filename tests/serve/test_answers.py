"""What answers for a tuned model: its texts as they grow, its processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from jobs.answers import workers
from jobs.answers.workers import CannotAnswer, Overloaded, Worker, Workers
from trainer.commands.answer import _unsure

# A worker that says how often its process was asked; "end" ends it, "mute" says nothing more.
STANDIN = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    if "many" in asked:
        while any(one["text"] == "slow" for one in asked["many"]) and not os.path.exists("go"):
            time.sleep(0.01)
        told = [{"error": "bad"} if one["text"] == "bad" else {**one, "line": number} for one in asked["many"]]
        print(json.dumps({"many": told}), flush=True)
        continue
    asked = asked["prompt"]
    if asked == "end":
        sys.exit(1)
    while asked == "mute":
        time.sleep(0.01)
    print(json.dumps({"text": asked}), flush=True)
    print(json.dumps({"finish": "stop", "number": number}), flush=True)
"""


def test_letters_that_may_become_a_stop_text_are_held_back() -> None:
    assert _unsure("It is", ["s over"]) == 1
    assert _unsure("It is", ["is it", "t is i"]) == 4
    assert _unsure("It is", []) == 0
    assert _unsure("It \ufffd\ufffd", ["x"]) == 2


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `python -m trainer.commands.answer` is a stand-in."""
    folder = tmp_path / "trainer" / "commands"
    folder.mkdir(parents=True)
    (folder / "answer.py").write_text(STANDIN)
    monkeypatch.setattr(workers, "PROJECT", tmp_path)
    return tmp_path


async def told(worker: Worker, prompt: str) -> list[dict[str, Any]]:
    return [answer async for answer in worker.ask({"prompt": prompt}, last="finish")]


def test_a_worker_that_ends_or_is_stuck_is_replaced_for_the_next_request(
    standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "ANSWER_S", 0.5)

    async def story() -> list[int]:
        worker = Worker(standin, standin)
        numbers = [(await told(worker, "a"))[-1]["number"] for _ in range(2)]
        for prompt in ("end", "mute"):
            with pytest.raises(CannotAnswer, match="has ended, or is stuck"):
                await told(worker, prompt)
            numbers.append((await told(worker, "a"))[-1]["number"])
        leaver = worker.ask({"prompt": "b"}, last="finish")
        assert (await anext(leaver))["text"] == "b"
        await leaver.aclose()  # a client that leaves in the middle
        numbers.append((await told(worker, "c"))[-1]["number"])
        await worker.stop()
        return numbers

    assert asyncio.run(story()) == [0, 1, 0, 0, 0]


def test_what_waits_is_asked_together_and_each_gets_its_own_answer(standin: Path) -> None:
    async def story() -> None:
        worker = Worker(standin, standin)
        first = asyncio.create_task(worker.ask_once({"text": "slow"}))
        while worker._together or not worker._turn.locked():
            await asyncio.sleep(0.01)
        texts = ["a", "bad", "b", "left"]
        rest = [asyncio.create_task(worker.ask_once({"text": text})) for text in texts]
        await asyncio.sleep(0)
        rest[3].cancel()  # a client that leaves
        (standin / "go").touch()
        found = await asyncio.gather(first, *rest, return_exceptions=True)
        assert found[0] == {"text": "slow", "line": 0}
        assert [found[1], found[3]] == [{"text": text, "line": 1} for text in "ab"]
        assert isinstance(found[2], CannotAnswer)
        assert isinstance(found[4], asyncio.CancelledError)
        assert not worker.is_busy
        await worker.stop()

    asyncio.run(story())


def test_the_least_recently_asked_model_makes_room_and_a_busy_one_does_not(standin: Path) -> None:
    async def story() -> None:
        loaded = Workers(standin, most=2)
        first, second = await loaded.of(Path("1")), await loaded.of(Path("2"))
        assert await loaded.of(Path("1")) is first
        await loaded.of(Path("3"))
        assert await loaded.of(Path("1")) is first
        assert await loaded.of(Path("2")) is not second
        first._waiting = 1
        (await loaded.of(Path("2")))._waiting = 1
        with pytest.raises(Overloaded):
            await loaded.of(Path("4"))

    asyncio.run(story())
