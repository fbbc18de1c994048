"""Raw rows come in order; whatever is wrong with a file is said with its line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.wording import Fault, fault, refused
from trainer.data.readers import jsonl, passages, questions

_ROOT = Path(__file__).resolve().parents[2]
_DATA = _ROOT / os.environ.get("LATHE_DATA", "../shared/data")

_GOOD = {"question": "q", "answer": "a", "context": "c"}


def _write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def _small_nq(
    folder: Path, *, gold: Any = 7, corpus: str = 'id\ttext\ttitle\n7\tsaid "hi"\tT\n8\tother\tU\n'
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.tsv").write_text(corpus, encoding="utf-8")
    _write(
        folder / "queries.jsonl",
        {"split": "val", "question": "q", "answers": ["a", "b"], "gold": gold},
    )
    return folder


@pytest.fixture
def nq() -> Path:
    if not (_DATA / "nq" / "corpus.tsv").is_file():
        pytest.skip(f"no nq at {_DATA}; set LATHE_DATA")
    return _DATA / "nq"


# JSON lines


def test_json_lines_come_in_order_and_blank_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"n": 1}\r\n\n{"n": "\xe2\x80\xa8"}'
    )  # BOM, CRLF, blank line, U+2028, no last newline
    assert list(jsonl.numbered_jsonl(path)) == [(1, {"n": 1}), (3, {"n": "\u2028"})]
    assert list(jsonl.read_jsonl(path)) == [{"n": 1}, {"n": "\u2028"}]


def test_reading_is_lazy(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\nnot json\n')
    assert next(iter(jsonl.read_jsonl(path))) == {"n": 1}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1}\n{"a": \n', fault("json_malformed", at="a.jsonl, line 2")),
        (b'{"a": 1}\n\n[1]\n', fault("json_no_object", at="a.jsonl, line 3", kind="list")),
        (b'{"a": "\xff"}\n', fault("not_utf8", at="a.jsonl, line 1", byte=7)),
        (b"", fault("file_empty", at="a.jsonl")),
        (b"\n  \n", fault("file_empty", at="a.jsonl")),
    ],
)
def test_a_malformed_file_is_refused_by_its_line(
    tmp_path: Path, content: bytes, said: Fault
) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with refused(said):
        list(jsonl.read_jsonl(tmp_path / "a.jsonl"))


def test_a_missing_file_says_where_it_should_be(tmp_path: Path) -> None:
    with refused("file_unreadable", at="gone.jsonl", reason="No such file or directory"):
        list(jsonl.read_jsonl(tmp_path / "gone.jsonl"))


# Questions


@pytest.mark.parametrize(
    ("raw", "row"),
    [
        (_GOOD, {"question": "q", "answers": ["a"], "context": "c"}),
        (
            {**_GOOD, "title": "t", "id": 3},
            {"question": "q", "answers": ["a"], "context": "c", "title": "t"},
        ),
        (
            {"question": "q", "answers": ["a", "b"], "contexts": ["c", "d"], "titles": ["t", "u"]},
            {"question": "q", "answers": ["a", "b"], "contexts": ["c", "d"], "titles": ["t", "u"]},
        ),
    ],
)
def test_a_question_row_holds_answers_and_what_was_given_of_contexts(
    tmp_path: Path, raw: Any, row: Any
) -> None:
    _write(tmp_path / "train.jsonl", raw)
    assert list(questions.qa_rows(tmp_path, "train")) == [row]


@pytest.mark.parametrize("name", ["valid.jsonl", "val.jsonl", "dev.jsonl"])
def test_the_valid_split_has_three_legal_file_names(tmp_path: Path, name: str) -> None:
    _write(tmp_path / name, _GOOD)
    assert len(list(questions.qa_rows(tmp_path, "valid"))) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"question": None}, fault("text_blank", key="question", value=None)),
        ({"question": "  "}, fault("text_blank", key="question", value="  ")),
        ({"question": ...}, fault("field_missing", key="question", keys="answer, context")),
        (
            {"answer": ...},
            fault("one_of_two_wanted", key="answer", other="answers", which="neither is"),
        ),
        (
            {"answers": ["a"]},
            fault("one_of_two_wanted", key="answer", other="answers", which="both are"),
        ),
        ({"answer": ..., "answers": []}, fault("texts_wanted", key="answers", value=[])),
        ({"answer": ..., "answers": ["a", ""]}, fault("text_blank", key="answers[1]", value="")),
        ({"answer": 3}, fault("text_blank", key="answer", value=3)),
        (
            {"context": ...},
            fault("one_of_two_wanted", key="context", other="contexts", which="neither is"),
        ),
        (
            {"context": ..., "contexts": {"c": 1}},
            fault("texts_wanted", key="contexts", value={"c": 1}),
        ),
        (
            {"context": ..., "contexts": ["c"], "titles": ["t", "u"]},
            fault("titles_for_contexts", titles=2, contexts=1),
        ),
        ({"title": ["t"]}, fault("text_blank", key="title", value=["t"])),
    ],
)
def test_a_wrong_question_row_is_refused_with_file_and_line(
    tmp_path: Path, changes: dict[str, Any], said: Fault
) -> None:
    bad = {key: value for key, value in {**_GOOD, **changes}.items() if value is not ...}
    _write(tmp_path / "train.jsonl", _GOOD, bad)
    with refused(said, at="train.jsonl, line 2"):
        list(questions.qa_rows(tmp_path, "train"))


def test_a_folder_without_the_split_names_the_files_it_wants(tmp_path: Path) -> None:
    with refused(
        "split_file_absent",
        split="valid",
        names="valid.jsonl, val.jsonl, dev.jsonl, validation.jsonl",
    ):
        list(questions.qa_rows(tmp_path, "valid"))


@pytest.mark.parametrize("read", [questions.qa_rows, questions.nq_rows])
def test_an_unknown_split_is_refused(tmp_path: Path, read: Any) -> None:
    with refused("split_unknown", split="validation", choices="train, valid, test"):
        list(read(tmp_path, "validation"))


@pytest.mark.parametrize("read", [questions.qa_rows, questions.nq_rows])
def test_no_data_path_is_refused_with_what_it_should_hold(read: Any) -> None:
    with refused("data_path_missing"):
        list(read(None, "train"))


# Texts


def test_texts_are_read_from_json_lines(tmp_path: Path) -> None:
    _write(tmp_path / "test.jsonl", {"text": "one", "id": 1}, {"text": "two"})
    assert list(questions.texts(tmp_path, "test", "files")) == [{"text": "one"}, {"text": "two"}]


def test_a_blank_text_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "train.jsonl", {"text": "\t"})
    with refused("text_blank", at="line 1", key="text", value="\t"):
        list(questions.texts(tmp_path, "train", "files"))


def test_passages_have_no_test_split(tmp_path: Path) -> None:
    with refused("split_unknown", split="test", choices="train or valid"):
        list(questions.texts(_small_nq(tmp_path), "test", "nq"))


# NaturalQuestions


def test_a_question_is_joined_with_its_gold_passage_and_quotes_stay(tmp_path: Path) -> None:
    assert list(questions.nq_rows(_small_nq(tmp_path), "valid")) == [
        {
            "question": "q",
            "answers": ["a", "b"],
            "context": 'said "hi"',
            "title": "T",
            "passage_id": "7",
        }
    ]


def test_a_folder_above_nq_will_do(tmp_path: Path) -> None:
    _small_nq(tmp_path / "nq")
    assert len(list(questions.nq_rows(tmp_path, "valid"))) == 1


def test_a_gold_passage_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with refused("gold_unknown", at="queries.jsonl, line 1", gold=99):
        list(questions.nq_rows(_small_nq(tmp_path, gold=99), "valid"))


def test_a_split_without_questions_is_refused(tmp_path: Path) -> None:
    with refused("split_has_no_line", split="train"):
        list(questions.nq_rows(_small_nq(tmp_path), "train"))


@pytest.mark.parametrize(
    ("corpus", "said"),
    [
        ("7\tx\tT\n", fault("corpus_header", at="corpus.tsv, line 1", header=["7", "x", "T"])),
        ("id\ttext\ttitle\n7\tx\n", fault("corpus_fields", at="corpus.tsv, line 2", count=2)),
        ("id\ttext\ttitle\n7\tx\tT\n8\t \tU\n", fault("corpus_blank", at="corpus.tsv, line 3")),
        ("id\ttext\ttitle\n", fault("corpus_empty", at="corpus.tsv")),
    ],
)
def test_a_malformed_corpus_is_refused_by_its_line(
    tmp_path: Path, corpus: str, said: Fault
) -> None:
    with refused(said):
        list(passages.nq_passages(_small_nq(tmp_path, corpus=corpus)))


def test_the_real_questions_have_their_published_numbers(nq: Path) -> None:
    counts = {
        split: len(list(questions.nq_rows(nq, split))) for split in ("train", "valid", "test")
    }
    assert counts == {"train": 2000, "valid": 300, "test": 355}


def test_real_questions_can_be_answered_from_their_context(nq: Path) -> None:
    rows = list(questions.nq_rows(nq, "train"))
    found = sum(
        any(answer.lower() in row["context"].lower() for answer in row["answers"]) for row in rows
    )
    assert found > 0.98 * len(rows)


def test_two_percent_of_the_real_passages_are_held_out_and_none_is_lost(nq: Path) -> None:
    train, valid = (
        [row["text"] for row in questions.texts(nq, split, "nq")] for split in ("train", "valid")
    )
    assert len(train) + len(valid) == 2600
    assert not set(train) & set(valid)
    assert 0.01 < len(valid) / 2600 < 0.03
    assert train[0].startswith("List of Nobel laureates in Physics\nThe first Nobel Prize")
