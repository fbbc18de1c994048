"""Corpora and questions are read from every usual format; what is wrong is said with file
and line.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.wording import Fault, fault, refused
from trainer.data.readers.passages import (
    numbers_by_id,
    passages,
    passages_with_ids,
    written_passages,
)
from trainer.data.readers.questions import Query, queries

DATA = Path(__file__).resolve().parents[2] / os.environ.get("LATHE_DATA", "../shared/data")
WANTED = [
    {"id": "1", "text": "said\u2028so", "title": "T"},
    {"id": "x:2", "text": "more", "title": ""},
]


def write(path: Path, *rows: Any) -> Path:
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
@pytest.mark.parametrize("key", ["docid", "_id", "id"])
def test_corpora_of_json_lines_are_read_packed_or_not(tmp_path: Path, name: str, key: str) -> None:
    rows = [
        {key: 1, "text": "said\u2028so", "title": "T", "metadata": {}},
        {key: "x:2", "text": "more"},
    ]
    assert list(passages(write(tmp_path / name, *rows))) == WANTED


@pytest.mark.parametrize("name", ["p.tsv", "p.tsv.gz"])
def test_a_tsv_is_read_as_dpr_writes_it(tmp_path: Path, name: str) -> None:
    content = 'id\ttext\ttitle\n1\t"said ""so"""\t"T"\n2\tmore\t\n'
    (tmp_path / name).write_bytes(
        gzip.compress(content.encode()) if name.endswith(".gz") else content.encode()
    )
    found = list(passages(tmp_path / name))
    assert found == [
        {"id": "1", "text": 'said "so"', "title": "T"},
        {"id": "2", "text": "more", "title": ""},
    ]


def test_a_passage_may_have_a_title_alone_but_not_nothing(tmp_path: Path) -> None:
    (passage,) = passages(write(tmp_path / "c.jsonl", {"_id": "1", "title": "T", "text": ""}))
    assert passage == {"id": "1", "title": "T", "text": ""}
    with refused("text_and_title_missing", at="c.jsonl, line 1", keys="_id, text"):
        list(passages(write(tmp_path / "c.jsonl", {"_id": "1", "text": " "})))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "t"}, fault("id_wanted", key="docid", value=None)),
        (
            {"docid": "a b", "text": "t"},
            fault("id_with_blanks", key="id", value="a b"),
        ),
        ({"docid": True, "text": "t"}, fault("id_wanted", key="docid", value=True)),
        ({"docid": "1", "text": 3}, fault("text_wanted", key="text", value=3)),
        ([1], fault("json_no_object", kind="list")),
    ],
)
@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz"])
def test_a_wrong_passage_is_refused_with_its_line(
    tmp_path: Path, row: Any, said: Fault, name: str
) -> None:
    path = write(tmp_path / name, {"docid": "1", "text": "t"}, row)
    with refused(said, at="line 2"):
        list(passages(path))


def test_a_packed_file_that_is_torn_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl.gz", *({"docid": n, "text": str(n) * 50} for n in range(2000)))
    path.write_bytes(path.read_bytes()[:-400])
    with refused("file_torn", place=re.compile(r"line \d+")):
        list(passages(path))
    with refused("file_empty"):
        list(passages(write(tmp_path / "none.jsonl.gz")))


def test_chosen_passages_are_those_with_the_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", *({"docid": n, "text": f"t{n}"} for n in range(9)))
    assert {name: row["text"] for name, row in passages_with_ids(path, ["7", "2"]).items()} == {
        "2": "t2",
        "7": "t7",
    }
    with refused("passage_missing", passage="9", missing=2, count=3):
        passages_with_ids(path, ["1", "9", "99"])


@pytest.mark.parametrize(
    ("raw", "query"),
    [
        ({"query_id": "q1", "query": "who"}, Query("q1", "who", [], [])),
        ({"_id": 7, "text": "who", "metadata": {}}, Query("7", "who", [], [])),
        ({"question": "who", "answers": ["a", "b"]}, Query("0", "who", ["a", "b"], [])),
        (
            {"qid": 3, "question": "who", "answer": "a", "gold": 12},
            Query("3", "who", ["a"], ["12"]),
        ),
        (
            {
                "query_id": "1",
                "query": "who",
                "positive_passages": [{"docid": "d", "text": "t"}, {"docid": 2}],
            },
            Query("1", "who", [], ["d", "2"]),
        ),
        (
            {"query_id": 1, "query_text": "who", "positive_document_ids": ["d"]},
            Query("1", "who", [], ["d"]),
        ),
        (
            {"query_id": 1, "query": "who", "positive_docids": ["d", "e"]},
            Query("1", "who", [], ["d", "e"]),
        ),
    ],
)
def test_a_question_is_read_under_its_usual_names(tmp_path: Path, raw: Any, query: Query) -> None:
    assert list(queries(write(tmp_path / "q.jsonl", raw))) == [query]


def test_a_split_is_chosen_by_its_usual_names(tmp_path: Path) -> None:
    rows = [
        {"split": name, "question": f"q{n}"}
        for n, name in enumerate(["train", "val", "test", "dev"])
    ]
    path = write(tmp_path / "q.jsonl", *rows)
    assert [(query.id, query.text) for query in queries(path, "valid")] == [
        ("1", "q1"),
        ("3", "q3"),
    ]
    assert len(list(queries(path))) == 4
    with refused("split_has_no_question", split="test"):
        list(queries(write(tmp_path / "q.jsonl", {"question": "q"}), "test"))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"query_id": "2"}, fault("text_blank", key="query", value=None)),
        ({"query_id": "1", "query": "again"}, fault("id_twice", id="1")),
        (
            {"query_id": "2", "query": "q", "answers": [1]},
            fault("text_blank", key="answers[0]", value=1),
        ),
        ({"query_id": "2", "query": "q", "gold": 1.5}, fault("id_wanted", key="gold", value=1.5)),
    ],
)
def test_a_wrong_question_is_refused_with_its_line(tmp_path: Path, row: Any, said: Fault) -> None:
    with refused(said, at="line 2"):
        list(queries(write(tmp_path / "q.jsonl", {"query_id": "1", "query": "q"}, row)))


def test_scifact_is_read_as_it_is() -> None:
    folder = DATA / "retrieval" / "scifact"
    if not folder.is_dir():
        pytest.skip(f"no {folder}; set LATHE_DATA")
    assert sum(1 for _ in passages(folder / "corpus.jsonl.gz")) == 5183
    assert sum(1 for _ in queries(folder / "queries.test.jsonl")) == 300
    assert (
        sum(len(query.positives) for query in queries(folder / "train_tevatron_ids.jsonl")) == 919
    )


def test_white_space_around_an_id_is_no_part_of_it(tmp_path: Path) -> None:
    corpus = write(
        tmp_path / "c.jsonl", {"docid": "d1 ", "text": "t"}, {"_id": "\td2", "text": "u"}
    )
    assert [passage["id"] for passage in passages(corpus)] == ["d1", "d2"]
    (tmp_path / "c.tsv").write_text("id\ttext\ttitle\nd1 \tt\tT\n")
    assert [passage["id"] for passage in written_passages(tmp_path / "c.tsv")] == ["d1"]
    asked = write(tmp_path / "q.jsonl", {"_id": "q1 ", "text": "t", "positive_docids": [" d1"]})
    (query,) = queries(asked)
    assert (query.id, query.positives) == ("q1", ["d1"])


def test_an_id_of_two_passages_is_refused_where_passages_are_looked_up(tmp_path: Path) -> None:
    one, same, other = ({"_id": "1", "text": text} for text in ("a", "a", "b"))
    last = {"_id": 2, "text": "c"}
    corpus = write(tmp_path / "corpus.jsonl", one, same, last)
    assert [row["text"] for row in passages_with_ids(corpus, ["1", "2"]).values()] == ["a", "c"]
    assert numbers_by_id(tmp_path, "corpus.jsonl") == {"1": 1, "2": 2}
    write(corpus, one, last, other)
    with refused("id_of_two_texts", what="passages", at="corpus.jsonl", id="1", text="b"):
        passages_with_ids(corpus, ["1"])
    with refused("id_of_two_texts", what="passages", at="corpus.jsonl", id="1", text="b"):
        numbers_by_id(tmp_path, "corpus.jsonl")
