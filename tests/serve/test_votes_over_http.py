"""Votes over HTTP: who may vote, on what, what a voter is told before and after, and what is stored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from jobs.serve.access import add_token
from tests.serve.conftest import CHAT, Service, Stub, jsonl, own_queue, serving, until_status
from tests.serve.page_world import by_hand
from tests.unit.test_votes import write_answers
from tests.wording import says
from trainer.judging.votes import ANSWERS, OTHERS, VOTES

NAMES = {"anna": "run", "ben": "run", "rita": "read", "adam": "admin"}


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Service, str, dict[str, str]]]:
    """A service with tokens, the id of a run of anna's, and the tokens by name."""
    folder = tmp_path_factory.mktemp("votes")
    stub, path = Stub(folder / "stub"), folder / "tokens.json"
    tokens = {name: add_token(path, name, role, {}) for name, role in NAMES.items()}
    by_hand(folder / "base", "by-hand", 5)
    with (
        own_queue(folder / "queue"),
        serving(folder / "base", python=stub.python, tokens=path) as running,
    ):
        client = running.client(tokens["anna"])
        file = client.files.create(file=("a.jsonl", jsonl(CHAT)), purpose="fine-tune")
        job = client.fine_tuning.jobs.create(model="tiny-chat", training_file=file.id)
        done = until_status(client, job.id, "succeeded")
        yield running, done["lathe"]["exp_id"], tokens


class Voter:
    """One who votes on anna's run."""

    def __init__(self, world: Any, name: str) -> None:
        running, self.run, tokens = world
        headers = {"authorization": f"Bearer {tokens[name]}"}
        self.here = TestClient(running.app, base_url=running.url, headers=headers)
        self.path = f"/lathe/v1/runs/{self.run}/votes"

    def ask(self, query: str = "", code: int = 200) -> Any:
        answer = self.here.get(self.path + query)
        assert answer.status_code == code, answer.text
        return answer.json()

    def vote(self, pair: str, better: str, code: int = 201) -> Any:
        answer = self.here.post(self.path, json={"pair": pair, "better": better})
        assert answer.status_code == code, answer.text
        return answer.json()


@pytest.fixture
def folder(world: Any) -> Path:
    """The run folder with six rows that were answered, without votes."""
    folder = world[0].base / world[1]
    for name in (VOTES, OTHERS):
        (folder / name).unlink(missing_ok=True)
    write_answers(folder)
    return folder


def rows(folder: Path, name: str = VOTES) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_pair_is_shown_without_whose_answers_they_are(world: Any, folder: Path) -> None:
    state = Voter(world, "anna").ask()
    assert {name: state[name] for name in ("pairs", "own", "votes")} == {
        "pairs": 5,
        "own": 0,
        "votes": 0,
    }
    shown = state["next"]
    assert shown.keys() == {"pair", "row", "prompt", "references", "left", "right"}
    number = shown["row"] - 1
    assert {shown["left"], shown["right"]} == {f"no {number}", f"yes {number}"}
    assert shown["prompt"] == [{"role": "", "text": f"{number}?"}]
    text = json.dumps(state)
    assert not [word for word in ("before", "after", "base", "final", "tuned") if word in text]


def test_every_pair_is_voted_on_once_and_the_rate_is_told_afterwards(
    world: Any, folder: Path
) -> None:
    anna = Voter(world, "anna")
    seen: list[str] = []
    while shown := anna.ask()["next"]:
        seen.append(shown["pair"])
        better = "left" if shown["left"].startswith("yes") else "right"
        said = anna.vote(shown["pair"], better)
        assert said == {"pair": shown["pair"], "better": better}
    assert len({*seen}) == len(seen) == 5
    assert all(row["chosen"].startswith("yes") for row in rows(folder))
    assert {row["better"] for row in rows(folder)} == {"after"}
    assert {row["left"] for row in rows(folder)} == {"before", "after"}
    assert {row["voter"] for row in rows(folder)} == {"anna"}
    result = anna.ask("?part=result")
    assert (result["votes"], result["voters"]) == (5, 1)
    assert (result["win_rate"]["rate"], result["win_rate"]["pairs"]) == (1.0, 5)
    assert result["win_rate"]["low"] == pytest.approx(0.5655, abs=1e-3)
    assert "the trained model is preferred" in result["words"]


def test_a_vote_is_changed_an_equal_one_is_kept_apart_and_both_are_counted(
    world: Any, folder: Path
) -> None:
    anna, adam = Voter(world, "anna"), Voter(world, "adam")
    shown = anna.ask()["next"]
    for better in ("left", "right", "right"):
        anna.vote(shown["pair"], better)
    (row,) = rows(folder)
    assert (row["chosen"], row["rejected"]) == (shown["right"], shown["left"])
    adam.vote(shown["pair"], "equal")
    assert len(rows(folder)) == 1
    (equal,) = rows(folder, OTHERS)
    assert (equal["voter"], "chosen" in equal) == ("adam", False)
    result = anna.ask("?part=result")
    assert (result["votes"], result["voters"], result["win_rate"]["pairs"]) == (2, 2, 1)


def test_a_pair_is_passed_over_until_the_others_are_done(world: Any, folder: Path) -> None:
    anna = Voter(world, "anna")
    first = anna.ask()["next"]["pair"]
    shown, seen = first, list[str]()
    for _ in range(5):
        seen.append(shown)
        shown = anna.ask(f"?after={shown}")["next"]["pair"]
    assert (shown, len({*seen})) == (first, 5)
    for pair in seen[1:]:
        anna.vote(pair, "equal")
    assert anna.ask(f"?after={seen[-1]}")["next"]["pair"] == first


def test_who_may_vote_is_who_may_change_the_run(world: Any, folder: Path) -> None:
    pair = Voter(world, "anna").ask()["next"]["pair"]
    assert Voter(world, "rita").ask()["next"] is None
    Voter(world, "rita").vote(pair, "left", code=403)
    Voter(world, "rita").ask("?format=preferences", code=403)
    Voter(world, "ben").ask(code=404)
    Voter(world, "ben").vote(pair, "left", code=404)
    Voter(world, "adam").vote(pair, "left")
    assert Voter(world, "rita").ask()["votes"] == 1
    assert Voter(world, "rita").ask("?part=result")["votes"] == 1


def test_the_preferences_are_those_of_the_file(world: Any, folder: Path) -> None:
    anna = Voter(world, "anna")
    assert anna.here.get(f"{anna.path}?format=preferences").text == ""
    anna.vote(anna.ask()["next"]["pair"], "left")
    anna.vote(anna.ask()["next"]["pair"], "equal")
    answer = anna.here.get(f"{anna.path}?format=preferences")
    assert answer.headers["content-type"] == "application/jsonl"
    assert answer.content == (folder / VOTES).read_bytes()


def test_answers_that_were_made_anew_are_not_voted_on_by_their_old_name(
    world: Any, folder: Path
) -> None:
    anna = Voter(world, "anna")
    old = anna.ask()["next"]
    anna.vote(old["pair"], "left")
    values = [json.loads(line) for line in (folder / ANSWERS).read_text().splitlines()]
    for value in values:
        value["after"] += ", of course"
    (folder / ANSWERS).write_text("".join(json.dumps(value) + "\n" for value in values))
    says("pair_gone", anna.vote(old["pair"], "left", code=409)["error"]["message"])
    state = anna.ask()
    assert (state["votes"], state["own"]) == (0, 0), "a vote is on two texts"
    anna.vote(state["next"]["pair"], "left")
    assert len(rows(folder)) == 2, "what was preferred before stays a preference"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"pair": "x", "better": "left"},
        {"pair": "../../etc/passwd", "better": "left"},
        {"pair": "0" * 16, "better": "after"},
        {"pair": "0" * 16, "better": "left", "voter": "ben"},
    ],
)
def test_a_body_that_is_none_is_refused(world: Any, folder: Path, body: dict[str, Any]) -> None:
    anna = Voter(world, "anna")
    assert anna.here.post(anna.path, json=body).status_code == 400
    assert anna.here.get(f"{anna.path}?part=all").status_code == 400
    assert not (folder / VOTES).exists()


def test_a_run_that_was_not_judged_has_no_pair(world: Any, folder: Path) -> None:
    (folder / ANSWERS).unlink()
    anna = Voter(world, "anna")
    assert anna.ask() == {"pairs": 0, "own": 0, "votes": 0, "next": None}
    anna.vote("0" * 16, "left", code=409)


def test_turns_with_calls_of_tools_are_shown_as_text_and_long_ones_cut(
    world: Any, folder: Path
) -> None:
    turns = [
        {"role": "user", "content": "x" * 30_000},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]},
        {"role": "tool", "content": [{"type": "text", "text": "found"}]},
    ]
    line = {"row": 1, "prompt": turns, "references": [], "before": "a", "after": "b", "tools": [1]}
    (folder / ANSWERS).write_text(json.dumps(line) + "\n")
    anna = Voter(world, "anna")
    shown = anna.ask()["next"]
    assert [turn["role"] for turn in shown["prompt"]] == ["user", "assistant", "tool"]
    assert len(shown["prompt"][0]["text"]) == 20_001
    assert '"look"' in shown["prompt"][1]["text"]
    anna.vote(shown["pair"], "left")
    (row,) = rows(folder)
    assert (row["prompt"], row["tools"]) == (turns, [1])


def test_a_file_of_answers_that_is_damaged_is_a_refusal_with_its_place(
    world: Any, folder: Path
) -> None:
    (folder / ANSWERS).write_text('{"row": 1}\n')
    message = Voter(world, "anna").ask(code=400)["error"]["message"]
    says("answers_malformed", message, at=f"{ANSWERS}, line 1")
    assert str(folder.parent) not in message
