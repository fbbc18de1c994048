"""From files as they are published to the files that our groups read."""

from __future__ import annotations

import csv
import gzip
import json
import random
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.formats.json_text import json_value
from trainer.data.readers.jsonl import read_jsonl
from trainer.data.readers.questions import Query
from trainer.errors import DataError
from trainer.retrieval.negatives import bm25

if TYPE_CHECKING:
    from trainer.recipes.public_sets.catalogue import Layout

# of the questions, in an order drawn under seed 0: train, then dev; the rest is for tests
_NQ_TRAIN, _NQ_DEV = 2000, 300
_NQ_HITS, _SCIFACT_HITS = 20, 30


def lay_out(layout: Layout, folder: Path) -> None:
    """Make the files of a layout of those that were fetched into `folder`."""
    if layout == "natural questions":
        _natural_questions(folder)
    elif layout == "scifact":
        _scifact(folder)


def _natural_questions(folder: Path) -> None:
    """corpus.tsv of the passages, each once, and queries.jsonl with the number of each question's
    passage and the first hits of BM25.
    """
    rows = list(read_jsonl(folder / "nq-open-oracle.jsonl.gz"))
    numbers: dict[tuple[str, str], int] = {}
    for row in rows:
        numbers.setdefault(_passage(row), len(numbers))
    texts = [(_one_line(title), _one_line(text)) for title, text in numbers]
    with (folder / "corpus.tsv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, delimiter="\t")
        table.writerow(["id", "text", "title"])
        table.writerows([number, text, title] for number, (title, text) in enumerate(texts))

    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    split_of = dict.fromkeys(order, "test")
    split_of |= dict.fromkeys(order[:_NQ_TRAIN], "train")
    split_of |= dict.fromkeys(order[_NQ_TRAIN : _NQ_TRAIN + _NQ_DEV], "dev")
    queries = [Query(str(n), row["question"], [], []) for n, row in enumerate(rows)]
    passages = ({"id": n, "title": t, "text": x} for n, (t, x) in enumerate(texts))
    run = bm25(queries, passages, depth=_NQ_HITS)
    _write_lines(
        folder / "queries.jsonl",
        (
            {
                "qid": number,
                "split": split_of[number],
                "question": row["question"],
                "answers": row["answers"],
                "gold": numbers[_passage(row)],
                "bm25": [hit.passage for hit in run[str(number)]],
            }
            for number, row in enumerate(rows)
        ),
    )


def _passage(row: dict[str, Any]) -> tuple[str, str]:
    """Title and text of the passage that answers a question."""
    return row["ctxs"][0]["title"], row["ctxs"][0]["text"]


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def _scifact(folder: Path) -> None:
    """BEIR's zip as corpus.jsonl.gz, queries.<split>.jsonl, qrels/ and training rows in Tevatron's
    form, whose negatives are the first hits of BM25 that are not relevant; and the ids of those
    test claims whose abstracts no training claim names.
    """
    with zipfile.ZipFile(folder / "scifact.zip") as packed:
        corpus = list(_lines(packed, "scifact/corpus.jsonl"))
        texts = {str(row["_id"]): row["text"] for row in _lines(packed, "scifact/queries.jsonl")}
        tables = {
            split: packed.read(f"scifact/qrels/{split}.tsv").decode() for split in ("train", "test")
        }
    passages = [
        {"docid": str(row["_id"]), "title": row["title"], "text": row["text"]} for row in corpus
    ]
    # without a name or a time in its header, so that equal content has equal bytes
    with (folder / "corpus.jsonl.gz").open("wb") as file, gzip.GzipFile("", "wb", 9, file, 0) as to:
        to.writelines((json.dumps(row, ensure_ascii=False) + "\n").encode() for row in passages)
    (folder / "qrels").mkdir()
    # relevant documents by query, in the order of the table, which has a header
    relevant: dict[str, dict[str, list[str]]] = {}
    for split, table in tables.items():
        (folder / "qrels" / f"{split}.tsv").write_text(table, encoding="utf-8")
        relevant[split] = {}
        for line in table.splitlines()[1:]:
            query, document, _ = line.split("\t")
            relevant[split].setdefault(query, []).append(document)
        _write_lines(
            folder / f"queries.{split}.jsonl",
            ({"query_id": query, "query": texts[query]} for query in relevant[split]),
        )
    _write_lines(
        folder / "train_tevatron_ids.jsonl", _training_rows(relevant["train"], texts, passages)
    )
    train_documents = {
        document for documents in relevant["train"].values() for document in documents
    }
    new = [
        query
        for query, documents in relevant["test"].items()
        if not train_documents & set(documents)
    ]
    (folder / "test_no_overlap.txt").write_text("".join(f"{query}\n" for query in new))


def _lines(packed: zipfile.ZipFile, name: str) -> Iterator[dict[str, Any]]:
    with packed.open(name) as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json_value(line.decode("utf-8"))
            except ValueError as error:
                place = f"{packed.filename}, {name}, line {number}"
                raise DataError(f"{place}: {error}. Fetch it again.", place=place) from None


def _training_rows(
    relevant: dict[str, list[str]], texts: dict[str, str], passages: list[dict[str, str]]
) -> Iterator[dict[str, Any]]:
    queries = [Query(query, texts[query], [], documents) for query, documents in relevant.items()]
    rows = ({"id": row["docid"], **row} for row in passages)
    longest = max(len(documents) for documents in relevant.values())
    run = bm25(queries, rows, depth=_SCIFACT_HITS + longest)
    for query in queries:
        others = [hit.passage for hit in run[query.id] if hit.passage not in query.positives]
        yield {
            "query_id": query.id,
            "query": query.text,
            "positive_docids": query.positives,
            "negative_docids": others[:_SCIFACT_HITS],
        }


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
