"""Where a retriever's rows come from: every layout, splits, and errors that name the place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.wording import Fault, fault, refused
from trainer.config.block import validate
from trainer.data import left_out
from trainer.tasks.retriever import rows, selection
from trainer.tasks.retriever.config import Data

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def data(source: str, **changes: Any) -> Data:
    return validate(Data, {"source": source, **changes})


def read(found: Data, split: str, folder: Path | None) -> list[dict[str, Any]]:
    return list(rows.rows(found, split, folder))


def write_lines(path: Path, lines: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


CORPUS = [{"docid": str(n), "title": f"t{n}", "text": f"text {n}"} for n in range(6)]


def test_tevatron_rows_hold_passages_or_ids_of_a_corpus(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "train.jsonl",
        [
            {
                "query_id": 7,
                "query": "who?",
                "positive_passages": [CORPUS[1]],
                "negative_passages": [CORPUS[2]],
            },
            {
                "query_id": "b",
                "query_text": "what?",
                "positive_docids": ["3"],
                "negative_docids": [4, "5"],
            },
        ],
    )
    with gzip.open(tmp_path / "corpus.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(passage) + "\n" for passage in CORPUS)
    first, second = read(data("tevatron", corpus="corpus.jsonl"), "train", tmp_path)
    assert first == {
        "id": "7",
        "query": "who?",
        "positives": [{"id": "1", "title": "t1", "text": "text 1"}],
        "negatives": [{"id": "2", "title": "t2", "text": "text 2"}],
    }
    assert [passage["text"] for passage in (*second["positives"], *second["negatives"])] == [
        "text 3",
        "text 4",
        "text 5",
    ]


def test_an_id_without_a_corpus_is_refused_with_its_line(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{"query": "what?", "positive_docids": ["3"]}])
    with refused("corpus_not_named", at="train.jsonl, line 1", passage="3"):
        read(data("tevatron"), "train", tmp_path)
    write_lines(tmp_path / "corpus.jsonl", CORPUS[:2])
    with refused("corpus_unknown_passage", passage="3"):
        read(data("tevatron", corpus="corpus.jsonl"), "train", tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"query": " ", "positive_passages": []}, fault("text_blank", key="query", value=" ")),
        ({"query": "q"}, fault("field_missing", key="positive_passages")),
        (
            {"query": "q", "positive_passages": {"p": 1}},
            fault("passages_wanted", key="positive_passages", value={"p": 1}),
        ),
        (
            {"query": "q", "positive_passages": [{"docid": 1}]},
            fault("corpus_not_named", passage="1"),
        ),
    ],
)
def test_a_malformed_row_is_refused_with_its_line(
    line: dict[str, Any], words: Fault, tmp_path: Path
) -> None:
    write_lines(tmp_path / "train.jsonl", [line])
    with refused(words, at="line 1"):
        read(data("tevatron"), "train", tmp_path)


def test_token_ids_are_rows_too_and_text_among_them_is_refused(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "train.jsonl",
        [{"query": [5, 6], "positives": [[7]], "negatives": [[8], [9, 10]]}],
    )
    (row,) = read(data("pretokenised"), "train", tmp_path)
    assert (row["query"], row["positives"], row["negatives"]) == ([5, 6], [[7]], [[8], [9, 10]])
    write_lines(tmp_path / "train.jsonl", [{"query": "text", "positives": [[7]], "negatives": []}])
    with refused("token_ids_wanted", at="line 1", key="query", value="text"):
        read(data("pretokenised"), "train", tmp_path)


def write_beir(folder: Path, splits: dict[str, list[tuple[str, str, int]]]) -> None:
    write_lines(
        folder / "corpus.jsonl",
        [{"_id": p["docid"], "title": p["title"], "text": p["text"]} for p in CORPUS],
    )
    write_lines(
        folder / "queries.jsonl", [{"_id": f"q{n}", "text": f"query {n}"} for n in range(200)]
    )
    (folder / "qrels").mkdir()
    for name, judged in splits.items():
        lines = "".join(f"{query}\t{document}\t{score}\n" for query, document, score in judged)
        (folder / "qrels" / f"{name}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{lines}")


def test_beir_qrels_give_positives_and_another_file_negatives(tmp_path: Path) -> None:
    write_beir(
        tmp_path,
        {"train": [("q1", "1", 1), ("q1", "2", 2), ("q3", "4", 0)], "dev": [("q2", "3", 1)]},
    )
    write_lines(tmp_path / "hard.jsonl", [{"query_id": "q1", "negative_docids": ["2", "5"]}])
    (row,) = read(data("beir", negatives="hard.jsonl"), "train", tmp_path)
    assert [passage["id"] for passage in row["positives"]] == ["1", "2"]
    assert [passage["id"] for passage in row["negatives"]] == ["5"]  # 2 is relevant
    (row,) = read(data("beir"), "valid", tmp_path)
    assert (row["id"], row["query"]) == ("q2", "query 2")


def test_a_beir_set_without_a_validation_split_lends_training_queries_by_their_documents(
    tmp_path: Path,
) -> None:
    write_beir(
        tmp_path,
        {"train": [(f"q{n}", str(n % 6), 1) for n in range(200)], "test": [("q1", "1", 1)]},
    )
    write_lines(
        tmp_path / "corpus.jsonl", [{"_id": str(n), "text": f"text {n}"} for n in range(200)]
    )
    (tmp_path / "qrels" / "train.tsv").write_text(
        "".join(f"q{n}\t{n // 2}\t1\n" for n in range(200))
    )
    train, valid = (read(data("beir"), split, tmp_path) for split in ("train", "valid"))
    assert len(train) + len(valid) == 200
    assert 4 <= len(valid) <= 40
    documents = [{row["positives"][0]["id"] for row in found} for found in (train, valid)]
    assert not documents[0] & documents[1], "queries about one document stay on one side"
    assert [row["id"] for row in read(data("beir"), "test", tmp_path)] == ["q1"]


def test_dprs_hard_negatives_come_before_easy_ones_and_questions_without_positives_go(
    tmp_path: Path,
) -> None:
    def passage(name: str) -> dict[str, str]:
        return {"title": "", "text": name, "psg_id": name}

    lists = [
        {
            "question": "a",
            "answers": [],
            "positive_ctxs": [passage("p")],
            "hard_negative_ctxs": [passage("h")],
        },
        {"question": "b", "answers": [], "positive_ctxs": [], "hard_negative_ctxs": [passage("h")]},
        {
            "question": "c",
            "answers": [],
            "positive_ctxs": [passage("p")],
            "negative_ctxs": [passage("e")],
        },
    ]
    (tmp_path / "train.json").write_text(json.dumps(lists))
    found = read(data("dpr"), "train", tmp_path)
    assert [(row["query"], row["negatives"][0]["text"]) for row in found] == [
        ("a", "h"),
        ("c", "e"),
    ]


def test_the_passage_that_a_reader_read_most_is_the_positive(tmp_path: Path) -> None:
    ctxs = [
        {"title": "t", "text": f"text {n}", "score": score}
        for n, score in enumerate((0.5, -1.0, 2.5))
    ]
    (tmp_path / "train.json").write_text(
        json.dumps([{"question": "q", "answers": ["a"], "ctxs": ctxs}])
    )
    (row,) = read(data("fid"), "train", tmp_path)
    assert row["positives"][0] == {"title": "t", "text": "text 2", "score": 2.5}
    assert [passage["score"] for passage in row["negatives"]] == [0.5, -1.0]


def test_a_folder_is_read_by_the_datasets_library(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the optional package datasets is not installed")
    row = {
        "query_id": "1",
        "query": "q",
        "positive_passages": [CORPUS[0]],
        "negative_passages": [CORPUS[1]],
    }
    write_lines(tmp_path / "set" / "train.jsonl", [row, {**row, "query_id": "2"}])
    found = read(data("hub", dataset=str(tmp_path / "set")), "train", None)
    assert [one["id"] for one in found] == ["1", "2"]
    assert found[0]["positives"] == [{"id": "0", "title": "t0", "text": "text 0"}]
    with refused("set_unreadable", split="dev"):
        read(data("hub", dataset=str(tmp_path / "set")), "valid", None)


def test_the_embedded_corpus_never_shows_the_query_in_its_passage() -> None:
    found = read(data("stdlib_docs"), "valid", None)
    assert len(found) > 50
    assert all(row["query"] not in row["positives"][0]["text"] for row in found)
    assert all(row["positives"][0] not in row["negatives"] for row in found)


@pytest.mark.skipif(
    not (SHARED / "nq" / "corpus.tsv").is_file(), reason=f"{SHARED / 'nq'} is absent"
)
def test_natural_questions_have_a_gold_passage_and_negatives_without_an_answer() -> None:
    found = {split: read(data("nq"), split, SHARED / "nq") for split in ("train", "valid", "test")}
    assert {split: len(rows) for split, rows in found.items()} == {
        "train": 2000,
        "valid": 300,
        "test": 355,
    }
    assert all(len(row["positives"]) == 1 for row in found["train"])
    assert sum(len(row["negatives"]) for row in found["train"]) / 2000 > 10
    numbers = {passage["id"] for row in found["test"] for passage in row["negatives"]}
    assert numbers <= {str(n) for n in range(2600)}


@pytest.mark.skipif(
    not (SHARED / "retrieval" / "scifact").is_dir(), reason=f"{SHARED / 'retrieval'} is absent"
)
def test_scifact_has_its_published_numbers_of_queries() -> None:
    scifact = data("beir", negatives="train_tevatron_ids.jsonl")
    folder = SHARED / "retrieval" / "scifact"
    found = {split: read(scifact, split, folder) for split in ("train", "valid", "test")}
    assert len(found["test"]) == 300
    assert sum(len(row["positives"]) for row in found["test"]) == 339
    assert len(found["train"]) + len(found["valid"]) == 809
    assert all(row["negatives"] for row in found["train"])


def test_a_query_without_negatives_is_only_refused_where_some_are_wanted() -> None:
    row = {"id": "q", "query": "q", "positives": [CORPUS[0]], "negatives": []}
    assert list(selection.trainable([row], 1)) == [row]
    with refused("no_negative_passage", query="q"):
        list(selection.trainable([row], 2))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"source": "hub"}, fault("dataset_of_hub")),
        (
            {"source": "nq", "dataset": "a/b"},
            fault("source_reads_no_rows", source="nq", keys="dataset"),
        ),
        ({"source": "nq", "negatives": "x"}, fault("negatives_of_beir")),
        ({"source": "pretokenised", "query_prefix": "query: "}, fault("prefix_of_token_ids")),
        ({"source": "nq", "p_max_len": 3}, fault("key_unknown", key="p_max_len")),
    ],
)
def test_a_block_that_would_not_mean_what_it_says_is_refused(
    values: dict[str, Any], words: Fault
) -> None:
    with refused(words):
        validate(Data, values)


def test_a_positive_among_the_negatives_is_noted_and_left_out() -> None:
    gold, other = {"id": "1", "title": "T", "text": "a b"}, {"id": "1", "text": "c"}
    same = {"id": "9", "title": "T", "text": "a  b"}
    given = [
        {"id": "q", "query": "x", "positives": [gold], "negatives": [same, other]},
        {"id": "r", "query": "x", "positives": [[1, 2]], "negatives": [[1, 2], [3]]},
        {"id": "s", "query": "x", "positives": [gold], "negatives": [other]},
    ]
    with left_out.reading() as notes:
        kept = [row["negatives"] for row in rows.without_own_positives(given)]
    assert kept == [[other], [[3]], [other]]
    assert notes.counts == {rows.OWN_POSITIVES: 2}
    assert [note.place for note in notes.first] == ["query 'q'", "query 'r'"]
    with left_out.reading() as notes:
        assert list(rows.without_own_positives(given[2:])) == given[2:]
    assert not notes
