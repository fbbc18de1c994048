"""Rows that are nearly right, texts without end, and how often a dry run says so."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from exp_configs import EXP_GROUPS
from tests.wording import Fault, fault, refused, says
from trainer import tasks
from trainer.config.formats.layouts import Layout
from trainer.data.formats import conversation, problems
from trainer.data.formats.held_out import place_of_row
from trainer.data.formats.problems import RowProblem
from trainer.data.readers import row_files
from trainer.data.readers.folders import only_row_file
from trainer.errors import nearest

TURNS = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]
MESSAGES = Layout((("messages",), ("prompt", "completion")), lists=frozenset({"messages"}))


def first_problem(row: dict[str, Any]) -> str:
    found: list[RowProblem] = []
    conversation.read(row, found.append)
    return str(found[0].at("train.jsonl, line 1"))


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"Messages": TURNS}, '{"messages": "Messages"}'),
        ({"Conversations": TURNS}, '{"messages": "Conversations"}'),
        (
            {"Prompt": "Where?", "COMPLETION": "Here."},
            '{"prompt": "Prompt", "completion": "COMPLETION"}',
        ),
        ({"turns": TURNS}, '{"messages": "turns"}'),
        ({"turns": TURNS, "more": TURNS}, '{"messages": "conversations"}'),
        (
            {"id": "7", "question": "Where?", "answer": "Here."},
            '{"prompt": "question", "completion": "answer"}',
        ),
        ({"a": "1", "b": "2", "c": "3"}, '{"messages": "conversations"}'),
    ],
)
def test_columns_are_proposed_by_their_names_or_by_what_they_hold(
    row: dict[str, Any], columns: str
) -> None:
    text = first_problem(row)
    says("messages_missing", text, keys=", ".join(row))
    assert columns in text


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": "Where?", "chosen": "Here.", "rejected": "No."}, '{"completion": "reply"}'),
        ({"prompt": "Where?", "Completion": "Here."}, '{"completion": "Completion"}'),
    ],
)
def test_of_a_prompt_without_its_completion_only_this_is_missing(
    row: dict[str, Any], columns: str
) -> None:
    text = first_problem(row)
    says("field_missing", text, key="completion", keys=", ".join(row))
    assert columns in text


def test_a_turn_without_a_role_is_refused_with_its_keys() -> None:
    assert "Role, Content" in first_problem({"messages": [{"Role": "user", "Content": "Where?"}]})


@pytest.mark.parametrize(
    "content",
    [
        None,
        {"text": "Where?"},
        [{"type": "image_url", "image_url": {"url": "a.png"}}],
    ],
)
def test_what_is_not_understood_is_on_both_sides_so_that_nothing_else_is_blamed(
    content: Any,
) -> None:
    turn = {"role": "user", "content": content}
    assert place_of_row({"messages": [turn, TURNS[1]]}, MESSAGES) is None
    assert place_of_row({"messages": TURNS}, MESSAGES) is not None
    blank = {"role": "user", "content": ""}
    assert place_of_row({"messages": [blank, TURNS[1]]}, MESSAGES) is not None


def test_the_nearest_name_is_the_one_that_differs_by_case_alone() -> None:
    assert nearest("TEXT", ["next", "text"]) == "Did you mean 'text'?"


ROW = json.dumps({"messages": [TURNS[0], {"role": "assistant", "content": "x" * 200}]})
SECOND = "messages[1].content"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", ROW, fault("text_endless", at="a.jsonl, line 1", key=SECOND, count="200")),
        ("a.json", f"[{ROW}]", fault("text_endless", at="a.json, item 1", key=SECOND, most="100")),
    ],
)
def test_a_text_that_memory_cannot_encode_is_refused_by_its_place(
    name: str, text: str, said: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text(text)
    assert len(list(row_files.placed_rows(tmp_path / name))) == 1
    monkeypatch.setattr(problems, "MAX_TEXT", 100)
    with refused(said):
        list(row_files.placed_rows(tmp_path / name))


def test_a_cell_that_memory_cannot_encode_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_text(f"text\n{'x' * 200}\n")
    monkeypatch.setattr(problems, "MAX_TEXT", 100)
    before = csv.field_size_limit()  # of the whole process
    try:
        with refused("table_row_unreadable", at="a.csv, row 1"):
            list(row_files.placed_rows(tmp_path / "a.csv"))
    finally:
        csv.field_size_limit(before)


@pytest.mark.parametrize("there", [(), ("train.xlsx",)])
def test_a_folder_without_rows_is_told_what_to_put_there(
    there: tuple[str, ...], tmp_path: Path
) -> None:
    for name in there:
        (tmp_path / name).write_bytes(b"PK")
    names = there[0] if there else "nothing"
    with refused("rows_absent", at=tmp_path, names=names) as caught:
        only_row_file(tmp_path, (".jsonl", ".csv"))
    assert "valid_share" not in str(caught.value)


def test_a_plain_file_that_is_named_as_packed_may_lose_its_gz(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_text(ROW)
    with refused("file_unpacked", at="a.jsonl.gz"):
        list(row_files.placed_rows(tmp_path / "a.jsonl.gz"))


def test_a_format_in_the_place_of_a_source_is_called_one() -> None:
    data = {"source": "sharegpt"}
    with refused("value_wanted", key="data.source", value="sharegpt") as caught:
        tasks.parse({**EXP_GROUPS["causal_lm_tiny"][0], "data": data}, source="here")
    assert "\"format\": 'sharegpt'" in str(caught.value)
