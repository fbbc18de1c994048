"""What the service holds out for validation: the split that data.valid_share would make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.serve import offers
from jobs.serve.rows import checks as rows
from tests.serve.conftest import Stub, jsonl
from tests.serve.poisoned import JOBS, World, new_world
from tests.serve.test_job_view import OFFER
from tests.wording import refused, says
from trainer import tasks
from trainer.config.own_rows import OwnRows
from trainer.data.chat.rows import chats
from trainer.data.formats.normal_form import normal_form

Row = dict[str, Any]


@pytest.fixture
def world(tmp_path: Path, stub: Stub, queue: Path) -> World:
    return new_world(tmp_path, stub)


def chat(question: str, answer: str) -> Row:
    turns = [("user", question), ("assistant", answer)]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def forms(number: int) -> list[str]:
    """The same question four times, as a split must not part it."""
    return [
        f"What is Straße {number}?",
        f"  what is  STRASSE {number}? ",
        f"What is Stra\u00dfe\u00a0{number}?",
        f"\uff37hat is Stra\u00dfe {number}?",
    ]


def uploaded(world: World, lines: list[Row]) -> str:
    form: dict[str, Any] = {"files": {"file": ("a.jsonl", jsonl(lines))}}
    return world.ask("POST", "/v1/files", "anna", data={"purpose": "fine-tune"}, **form)["id"]


def checked(world: World, lines: list[Row]) -> tuple[Row, Path]:
    """A job whose file was checked, and its folder of data."""
    body = {"model": "tiny-chat", "training_file": uploaded(world, lines)}
    job = world.ask("POST", JOBS, "anna", json=body)
    folder = world.keeper.folder.tickets / job["id"]
    world.turns(lambda: (folder / "checked.json").exists())
    return job, folder / "data"


def experiment_of(world: World, job: Row) -> Row:
    ticket = world.keeper.folder.tickets / job["id"] / "ticket.json"
    return json.loads(ticket.read_text())["experiment"]


def questions(file: Path) -> list[str]:
    lines = map(json.loads, file.read_text().splitlines())
    return [normal_form(line["messages"][0]["content"]) for line in lines]


def test_no_validation_row_has_the_question_of_a_training_row(world: World) -> None:
    lines = [chat(forms(number)[form], f"{number}") for form in range(4) for number in range(50)]
    _, data = checked(world, lines)
    train, valid = questions(data / "train.jsonl"), questions(data / "valid.jsonl")
    assert len(train) + len(valid) == 200
    assert 4 <= len(valid) <= 60
    assert not set(train) & set(valid)


def test_the_split_is_the_one_that_valid_share_makes(world: World, tmp_path: Path) -> None:
    lines = [chat(f"What is {number % 150}?", f"{number}") for number in range(300)]
    job, data = checked(world, lines)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "all.jsonl").write_bytes(jsonl(lines))
    own = OwnRows(valid_share=0.1)
    for split in ("train", "valid"):
        told = [row["messages"][1]["content"] for row in chats(tmp_path / "own", split, own)]
        lines = [json.loads(text) for text in (data / f"{split}.jsonl").read_text().splitlines()]
        assert [line["messages"][1]["content"] for line in lines] == told
    train = experiment_of(world, job)["train"]
    assert (train["epochs"], "steps" in train) == (3, False)  # each row three times


@pytest.mark.parametrize("count", range(2, 12))
def test_few_rows_leave_some_on_both_sides(count: int, world: World) -> None:
    # none of these questions is among the tenth that is held out
    job, data = checked(world, [chat(f"Why is {number}?", "it") for number in range(count)])
    train, valid = questions(data / "train.jsonl"), questions(data / "valid.jsonl")
    assert len(train) + len(valid) == count
    assert train
    assert valid
    assert experiment_of(world, job)["train"]["global_batch"] <= len(train)


def test_where_all_would_be_held_out_one_question_is_left() -> None:
    assert offers.held_out_per_mille(OFFER, {5: 1, 20: 3}) == 20
    assert offers.held_out_per_mille(OFFER, {5: 1, 20: 3, 400: 9}) == 100


@pytest.mark.parametrize("count", [1, 9])
def test_rows_that_all_ask_the_same_need_a_validation_file(count: int, world: World) -> None:
    lines = [chat("Write a tweet.", f"{number}") for number in range(count)]
    body = {"model": "tiny-chat", "training_file": uploaded(world, lines)}
    headers = {"authorization": f"Bearer {world.tokens['anna']}"}
    answer = world.client.post(JOBS, headers=headers, json=body)
    assert answer.status_code == 400
    says("none_held_out", answer.json()["error"]["message"])
    body["validation_file"] = uploaded(world, lines[:1])
    assert world.ask("POST", JOBS, "anna", json=body)["status"] == "validating_files"


def test_a_file_whose_rows_an_earlier_version_has_counted_is_split_alike(world: World) -> None:
    lines = [chat(f"What is {number}?", "it") for number in range(20)]
    _, data = checked(world, lines)
    file_id = uploaded(world, lines)
    facts = world.keeper.folder.uploads / file_id / "file.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "places": None}))
    job = world.ask("POST", JOBS, "anna", json={"model": "tiny-chat", "training_file": file_id})
    folder = world.keeper.folder.tickets / job["id"]
    world.turns(lambda: (folder / "checked.json").exists())
    assert (folder / "data/valid.jsonl").read_bytes() == (data / "valid.jsonl").read_bytes()


@pytest.mark.parametrize("kind", rows.KINDS)
def test_a_kind_of_rows_has_the_names_of_its_tasks(kind: str) -> None:
    for task, keys in rows.KINDS[kind].data.items():
        schema: Any = tasks.config_of(task).model_fields["data"].annotation
        assert schema.model_construct(**keys).layout() is rows.KINDS[kind].layout, task


@pytest.mark.parametrize("held_out", [None, 0.2])
def test_an_offers_own_share_is_what_is_held_out(tmp_path: Path, held_out: float | None) -> None:
    (offer,) = offers.read(_offering(tmp_path, 0.2, held_out)).models.values()
    assert offer.held_out == 0.2
    assert "valid_share" not in offer.experiment["data"], "the service writes both splits"


def test_two_shares_of_one_offer_are_refused(tmp_path: Path) -> None:
    with refused("two_shares_in_offer", share=0.2, held_out=0.1):
        offers.read(_offering(tmp_path, 0.2, 0.1))


def _offering(folder: Path, share: float, held_out: float | None) -> Path:
    experiment = {**OFFER.experiment, "data": {**OFFER.experiment["data"], "valid_share": share}}
    offer = {"experiment": experiment} | ({} if held_out is None else {"held_out": held_out})
    file = folder / "service.py"
    file.write_text(f"SERVICE = {{'models': {{'mine': {offer!r}}}}}\n")
    return file
