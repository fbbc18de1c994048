"""What answers for a tuned model: its texts as they grow, its processes."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from jobs.serve.answers import workers
from jobs.serve.answers.workers import CannotAnswer, Overloaded, ProcessEnded, Worker, Workers
from tests.wording import says

# A worker that says how often its process was asked; "end" ends it, "mute" says nothing more.
STANDIN = """
import json, os, sys, time

def say(**piece):
    print(json.dumps(piece), flush=True)

say(ready=True)
for number, line in enumerate(sys.stdin):
    texts = [one["text"] for one in json.loads(line)["many"]]
    if "end" in texts:
        sys.exit(1)
    while "mute" in texts or "slow" in texts and not os.path.exists("go"):
        time.sleep(0.01)
    for of, text in enumerate(texts):
        say(of=of, **({"error": "bad"} if text == "bad" else {"text": text}))
    while "long" in texts and not os.path.exists("go"):
        time.sleep(0.01)
    for of, text in enumerate(texts):
        if text != "bad":
            say(of=of, finish="stop", line=number)
    say(done=True)
"""


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `python -m trainer.commands.answer` is a stand-in."""
    folder = tmp_path / "trainer" / "commands"
    folder.mkdir(parents=True)
    (folder / "answer.py").write_text(STANDIN)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()  # or a trainer elsewhere on the path comes first
    monkeypatch.setattr(workers, "PROJECT", tmp_path)
    return tmp_path


async def told(worker: Worker, text: str) -> list[dict[str, Any]]:
    return [piece async for piece in worker.ask({"text": text})]


def test_a_worker_that_ends_or_is_stuck_is_replaced_for_the_next_request(
    standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "ANSWER_S", 0.5)

    async def story() -> list[int]:
        worker = Worker(standin, standin)
        lines = [(await told(worker, "a"))[-1]["line"] for _ in range(2)]
        for text in ("end", "mute"):
            with pytest.raises(CannotAnswer) as caught:
                await told(worker, text)
            says("worker_ended", caught.value)
            lines.append((await told(worker, "a"))[-1]["line"])
        await worker.stop()
        return lines

    assert asyncio.run(story()) == [0, 1, 0, 0]


def test_a_machine_that_is_slow_is_waited_for_longer_each_time(
    standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that takes longer than the limit would be begun anew for ever."""
    monkeypatch.setattr(workers, "ANSWER_S", 0.3)

    async def story() -> list[int]:
        worker, patience = Worker(standin, standin), list[int]()
        for text in ("mute", "mute", "a"):
            with contextlib.suppress(ProcessEnded):
                await told(worker, text)
            while worker._turn.locked():  # the last piece comes before the batch has ended
                await asyncio.sleep(0.01)
            patience.append(worker._patience)
        await worker.stop()
        return patience

    assert asyncio.run(story()) == [2, 4, 1]


def test_a_question_that_ends_the_process_spoils_no_other(standin: Path) -> None:
    async def story() -> None:
        worker = Worker(standin, standin)
        first = asyncio.create_task(told(worker, "slow"))
        while worker._together or not worker._turn.locked():
            await asyncio.sleep(0.01)
        rest = [asyncio.create_task(told(worker, text)) for text in ("a", "end", "b")]
        await asyncio.sleep(0)
        (standin / "go").touch()
        _, one, ended, other = await asyncio.gather(first, *rest, return_exceptions=True)
        assert one == [{"text": "a"}, {"finish": "stop", "line": 0}]
        assert other == [{"text": "b"}, {"finish": "stop", "line": 0}]
        assert isinstance(ended, CannotAnswer)
        says("worker_ended", ended)
        await worker.stop()

    asyncio.run(story())


def test_an_answer_goes_on_until_everybody_has_left(standin: Path) -> None:
    async def story() -> list[int]:
        worker = Worker(standin, standin)
        lines: list[int] = []
        for leavers in (1, 2):
            asked = [worker.ask({"text": text}) for text in ("long", "b")]
            pieces = await asyncio.gather(*map(anext, asked))
            assert [piece["text"] for piece in pieces] == ["long", "b"]
            for leaver in asked[:leavers]:
                await leaver.aclose()
            await asyncio.sleep(0.1)
            (standin / "go").touch()
            lines += [piece["line"] async for piece in asked[1]]
            (standin / "go").unlink()
        lines.append((await told(worker, "c"))[-1]["line"])
        await worker.stop()
        return lines

    assert asyncio.run(story()) == [0, 0]  # the second of another process


def test_what_waits_is_asked_together_and_each_gets_its_own_answer(standin: Path) -> None:
    async def story() -> None:
        worker = Worker(standin, standin)
        first = asyncio.create_task(told(worker, "slow"))
        while worker._together or not worker._turn.locked():
            await asyncio.sleep(0.01)
        texts = ["a", "bad", "b", "left"]
        rest = [asyncio.create_task(told(worker, text)) for text in texts]
        await asyncio.sleep(0)
        rest[3].cancel()  # a client that leaves
        (standin / "go").touch()
        answers = await asyncio.gather(first, *rest, return_exceptions=True)
        assert answers[0] == [{"text": "slow"}, {"finish": "stop", "line": 0}]
        for number, text in ((1, "a"), (3, "b")):
            assert answers[number] == [{"text": text}, {"finish": "stop", "line": 1}]
        assert isinstance(answers[2], CannotAnswer)
        assert isinstance(answers[4], asyncio.CancelledError)
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


def test_the_base_of_a_run_has_a_process_of_its_own(standin: Path) -> None:
    async def story() -> None:
        loaded = Workers(standin, most=2)
        trained, base = await loaded.of(Path("1")), await loaded.of(Path("1"), "base")
        assert (trained.weights, base.weights) == ("final", "base")
        assert await loaded.of(Path("1")) is trained

    asyncio.run(story())


def test_two_who_ask_for_a_model_while_another_makes_room_get_the_same_worker(
    standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "stop", lambda self: asyncio.sleep(0.01))

    async def story() -> None:
        loaded = Workers(standin, most=1)
        await loaded.of(Path("1"))
        first, second, third = await asyncio.gather(
            *(loaded.of(Path(run)) for run in ("2", "2", "3")), return_exceptions=True
        )
        assert first is second
        assert isinstance(third, Overloaded), "the one that makes room is not asked to leave again"
        assert not first.is_busy

    asyncio.run(story())
