"""What readers leave out is counted, stands in one file, and is refused under --strict."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.wording import refused
from trainer.config.own_rows import OwnRows
from trainer.data import left_out
from trainer.data.chat.rows import chats
from trainer.data.content import content_of_rows, shared_test_rows
from trainer.data.formats.normal_form import row_hash
from trainer.data.formats.problems import RowProblem
from trainer.data.readers import questions
from trainer.data.readers.row_files import files_in
from trainer.data.token_store import TokenStore, open_store
from trainer.errors import DataError
from trainer.launch import run as launch
from trainer.protocol.task import Encoded
from trainer.retrieval.negatives import write_rows
from trainer.statistics.opening import opening_line
from trainer.statistics.overlap import shared_rows

BLANK = "blank summaries (left out)"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows(count: int) -> Any:
    for number in range(1, count + 1):
        left_out.note(f"train.jsonl, line {number}", BLANK, field="summary")
        yield {"text": str(number)}


def store(name: str, texts: list[str], cache: Path) -> TokenStore:
    return open_store(
        lambda: [{"id": number, "text": text} for number, text in enumerate(texts)],
        lambda row: Encoded({"ids": [*row["text"].encode()]}),
        encoding_id=name,
        split=name,
        cache_dir=cache,
        length=lambda row: len(row["ids"]),
    )


def test_what_is_left_out_is_one_file_with_place_field_and_reason(tmp_path: Path) -> None:
    with left_out.gathering():
        content_of_rows(lambda: rows(2), "e", "train")
        content_of_rows(lambda: [{"text": "whole"}], "e", "valid")
        left_out.settle(tmp_path, strict=False)
    assert lines_of(tmp_path / left_out.FILE) == [
        {"split": "train", "file": "train.jsonl", "line": n, "field": "summary", "why": BLANK}
        for n in (1, 2)
    ]


def test_the_file_names_a_thousand_and_counts_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert left_out.NAMED == 1000
    monkeypatch.setattr(left_out, "NAMED", 3)
    with left_out.gathering():
        content_of_rows(lambda: rows(5), "e", "train")
        assert left_out.of_split("train").line() == f"5 {BLANK}"
        left_out.settle(tmp_path, strict=False)
    *named, rest = lines_of(tmp_path / left_out.FILE)
    assert [line["line"] for line in named] == [1, 2, 3]
    assert rest == {"split": "train", "why": BLANK, "more": 2}


def test_a_file_of_an_earlier_start_goes_when_nothing_is_left_out_any_more(tmp_path: Path) -> None:
    (tmp_path / left_out.FILE).write_text("{}\n")
    with left_out.settling(tmp_path, strict=True):
        content_of_rows(lambda: [{"text": "whole"}], "e", "train")
    assert not (tmp_path / left_out.FILE).exists()


def test_strict_refuses_with_count_and_first_places_and_writes_the_file_first(
    tmp_path: Path,
) -> None:
    first = "train.jsonl, line 1; train.jsonl, line 2; train.jsonl, line 3, ..."
    said = refused("strict_refuses", count=7, why=BLANK, places=first)
    with said, left_out.settling(tmp_path, strict=True):
        content_of_rows(lambda: rows(7), "e", "train")
    assert len(lines_of(tmp_path / left_out.FILE)) == 7


def test_what_nobody_gathers_is_told_at_once_and_a_second_reading_tells_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        content_of_rows(lambda: rows(2), "e", "train")
    (said,) = caplog.messages
    assert f"train: 2 {BLANK}: train.jsonl, line 1; train.jsonl, line 2" in said
    with left_out.gathering() as notes:
        assert len(list(rows(2))) == 2
    assert notes == {}


def test_notes_are_remembered_with_the_content_of_files(tmp_path: Path) -> None:
    notes = left_out.Notes()
    notes.add(left_out.Note("a.jsonl, line 1", BLANK, "summary"), count=2)
    assert left_out.Notes.of(json.loads(json.dumps(notes.record()))) == notes


def test_the_refused_row_stands_in_the_file(tmp_path: Path) -> None:
    place = "/data: mine/train.jsonl, line 3"
    error = RowProblem("messages[0].role", "boss", "another").at(place)
    path = tmp_path / "not yet" / left_out.FILE
    left_out.write(path, {}, error=pickle.loads(pickle.dumps(error)))  # as out of a worker
    (line,) = lines_of(path)
    where = {"file": "/data: mine/train.jsonl", "line": 3, "field": "messages[0].role"}
    assert line == {**where, "why": str(error), "is_refused": True}


@pytest.mark.parametrize("text", ["/data/train.jsonl is empty.", "--strict: got what"])
def test_a_refusal_of_no_row_is_no_refused_row(text: str, tmp_path: Path) -> None:
    left_out.write(tmp_path / left_out.FILE, {}, error=DataError(text))
    assert not (tmp_path / left_out.FILE).exists()


ROW = {"messages": [{"role": "user", "content": 5}]}


@pytest.mark.parametrize(
    ("kind", "rows", "where"),
    [
        ("chats", [ROW], {"line": 1, "field": "messages[0].content"}),
        ("texts", [{"text": "t"}, {"text": 5}], {"line": 2, "field": "text"}),
        ("questions", [{"question": "q", "answers": "['a"}], {"line": 1, "field": "answers"}),
        ("texts", [{"text": "t"}, 5], {"line": 2, "field": None}),
    ],
)
def test_readers_name_the_row_and_its_field(
    kind: str, rows: list[Any], where: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    readers = {
        "chats": lambda: chats(tmp_path, "train", OwnRows()),
        "texts": lambda: questions.text_rows(tmp_path, "train", ["text"]),
        "questions": lambda: questions.qa_rows(tmp_path, "train"),
    }
    with pytest.raises(DataError) as caught:
        list(readers[kind]())
    place = caught.value.place
    assert place == f"{tmp_path}/train.jsonl, line {where['line']}"
    assert caught.value.field == where["field"]


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_row_that_is_refused_while_auto_keys_are_chosen_stands_in_the_file(
    is_strict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {} if is_strict else {"place": "t.jsonl, line 2", "field": "text"}

    def choose(*_: Any) -> Any:
        left_out.gather("train", left_out.Notes({BLANK: 1}, [left_out.Note("q", BLANK)]))
        raise DataError("t.jsonl, line 2: no", **where)

    monkeypatch.setattr(launch, "choose", choose)
    monkeypatch.setattr(launch.device_defaults, "settle", lambda *_, **__: None)
    train = SimpleNamespace(precision="fp32", compile=False)
    cfg = SimpleNamespace(train=train, optim=SimpleNamespace(name="adamw"))
    plan: Any = SimpleNamespace(name="", id="i", cfg=cfg, folder=tmp_path / "i")
    with pytest.raises(DataError):
        launch.run(plan, SimpleNamespace(), SimpleNamespace())  # pyright: ignore[reportArgumentType]
    if is_strict:
        assert not plan.folder.exists()
        return
    lines = lines_of(plan.folder / left_out.FILE)
    assert [(line.get("line"), line["field"]) for line in lines] == [(None, None), (2, "text")]


def test_rows_that_are_refused_while_they_are_written_leave_no_file(tmp_path: Path) -> None:
    with refused("strict_refuses", count=2, why=BLANK):
        write_rows(tmp_path / "out.jsonl", left_out.refusing(rows(2), "run.trec", strict=True))
    assert not (tmp_path / "out.jsonl").exists()


def test_the_opening_line_counts_what_was_left_out_and_names_the_file(tmp_path: Path) -> None:
    notes = left_out.Notes({BLANK: 2})
    line = opening_line(store("train", ["a", "b"], tmp_path), notes)
    assert line.endswith(f"; 2 {BLANK}: left_out.jsonl")
    assert opening_line(store("train", ["a", "b"], tmp_path), left_out.Notes()) in line


def test_a_file_of_rows_with_a_hidden_name_is_named(tmp_path: Path) -> None:
    for name in ("a.jsonl", "_b.jsonl", ".c.csv.gz", "_SUCCESS", "README.md", "._a.jsonl"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "README.jsonl").write_text("{}\n")
    with left_out.reading() as notes:
        assert [path.name for path in files_in(tmp_path)] == ["a.jsonl"]
    assert [Path(one.place).name for one in notes.first] == [
        ".c.csv.gz",
        "README.jsonl",
        "_b.jsonl",
    ]
    assert "README" in notes.first[1].why


# Rows of two splits


def call(arguments: dict[str, Any]) -> dict[str, Any]:
    """A conversation that calls a tool with these arguments."""
    function = {"name": "f", "arguments": arguments}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    return {"messages": [{"role": "user", "content": "q"}, turn]}


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ({"id": 1, "text": "Who  ASKED?"}, {"id": 2, "text": "who asked?"}, True),
        ({"text": "caf\u00e9"}, {"text": "cafe\u0301"}, True),
        ({"ctxs": [{"id": 1, "text": "a", "score": 0.5}]}, {"ctxs": [{"text": "A"}]}, True),
        ({"text": "a", "answers": ["b"]}, {"text": "a", "answers": ["c"]}, False),
        ({"text": "a b"}, {"text": "ab"}, False),
        (call({"id": 5}), call({"id": 6}), False),
        (call({"score": 0.5}), call({"score": 0.25}), False),
        ({**call({"id": 5}), "id": 1}, {**call({"id": 5}), "id": 2}, True),
        ({"ctxs": [{"id": 1}]}, {"ctxs": [{"id": 2}]}, False),  # nothing but its name
    ],
)
def test_rows_that_say_the_same_have_one_hash(one: Any, other: Any, is_same: bool) -> None:
    assert (row_hash(one) == row_hash(other)) == is_same


def test_validation_rows_that_say_what_training_rows_say_are_found(tmp_path: Path) -> None:
    train = store("train", ["only here", "Both  sides", "equal"], tmp_path)
    valid = store("valid", ["equal", "new", "BOTH sides"], tmp_path)
    assert shared_rows(train, valid) == [(0, 2), (2, 1)]
    (train.folder / "row_hashes.npy").unlink()  # as in a store of an older version
    assert shared_rows(train, valid) == [(0, 2)]


class Questions:
    """A task of files whose test split is given."""

    rows_are_of_files = True

    def __init__(self, test: list[Any], folder: Path) -> None:
        self.test = test
        self.places = type("Places", (), {"data_path": folder})
        self.cfg = type("Cfg", (), {"model_dump": lambda self, mode: {}, "data": None})()

    def rows(self, split: str) -> Any:
        if not self.test:
            raise DataError("no test split")
        return self.test


def test_test_rows_that_are_training_rows_are_found_and_no_test_split_is_no_error(
    tmp_path: Path,
) -> None:
    train = store("train", ["a", "b"], tmp_path)
    task: Any = Questions([{"text": "new"}, {"id": 9, "text": "B"}], tmp_path)
    notes = shared_test_rows(task, train, tmp_path)
    assert (notes.counts, notes.first[0].place) == ({left_out.IN_TRAIN: 1}, "row 2")
    assert not shared_test_rows(Questions([], tmp_path), train, tmp_path)  # pyright: ignore[reportArgumentType]
