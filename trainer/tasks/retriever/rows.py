"""Reads queries with their positive and negative passages from every layout of retriever data.

A row is {"id", "query", "positives", "negatives"}. The id is text; the query is text or token ids;
a passage is {"id"?, "title"?, "text", "score"?} or token ids. Rows keep the order of their file.
They are read one by one; only a corpus, where passages are looked up by id, is held in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import userfile
from trainer.config.formats.layouts import QUERIES, TEVATRON
from trainer.data import stdlib_docs
from trainer.data.formats.lists import as_list
from trainer.data.formats.normal_form import is_blank
from trainer.data.left_out import note, watched
from trainer.data.readers import fields, retrieved
from trainer.data.readers.columns import in_our_names
from trainer.data.readers.data_sets import data_set, row_of_arrow
from trainer.data.readers.fields import QUESTION_IDS, first_given
from trainer.data.readers.folders import (
    CORPUS,
    corpus_file,
    nq_folder,
    required_folder,
    split_file,
)
from trainer.data.readers.jsonl import bad_line, numbered_jsonl, objects, preview
from trainer.data.readers.own_rows import own_rows
from trainer.data.readers.passages import by_id, nq_passages, written_passages
from trainer.data.readers.questions import nq_lines
from trainer.data.usual.beir import beir
from trainer.data.usual.msmarco import msmarco
from trainer.data.usual.placed import Around
from trainer.data.usual.questions import WITHOUT_POSITIVE as UNANSWERED
from trainer.data.usual.questions import dpr_queries
from trainer.data.usual.rows import counted
from trainer.data.usual.signs import format_of_folder
from trainer.errors import DataError
from trainer.metrics.mergeable import normalise
from trainer.tasks.retriever.batching.config import TOPIC
from trainer.tasks.retriever.loss import teacher_scores

if TYPE_CHECKING:
    from trainer.protocol.task import Row
    from trainer.tasks.retriever.config import Data

OWN_POSITIVES = "negatives that are positives of their query (left out)"
BLANK = "blank passages (an embedding of nothing)"
_ALL = 1_000_000_000  # a limit on the passages of a question that no file reaches
_DOCUMENTED_NEGATIVES = 3
_POSITIVES = ("positive_passages", "positive_docids", "positive_document_ids")
_NEGATIVES = ("negative_passages", "negative_docids", "negative_document_ids")


def rows(
    data: Data, split: str, folder: Path | None, *, cache_dir: Path | None = None
) -> Iterator[Row]:
    """The rows of a split, read as config.Data's source and format say, or as the files of the
    folder show, with the scores of data.scores. DataError names the file and line of a wrong row.
    """
    of_split = _rows(data, split, folder, cache_dir)
    if data.scores is None:
        return of_split
    return teacher_scores.of_file(of_split, data.scores, folder)


def _rows(data: Data, split: str, folder: Path | None, cache_dir: Path | None) -> Iterator[Row]:
    corpus = _corpus_of(data, folder)
    if data.source == "stdlib_docs":
        return _documentation_rows(split)
    if data.source == "hub":
        return _hub_rows(data, split, folder, cache_dir)
    if data.source == "tevatron":
        how: dict[str, Any] = {"layout": TEVATRON, "first": ".jsonl", "cache_dir": cache_dir}
        return _tevatron_rows(own_rows(data, split, folder, **how), corpus)
    if data.source == "dpr":
        placed = objects(_file(data, split, folder, suffixes=(".json", ".jsonl")))
        placed = ((place, watched(raw)) for place, raw in placed)
        return _tevatron_rows(dpr_queries(placed, Around(folder)), corpus)
    format_name = format_of_folder(data, folder) if data.source == "files" else None
    reads = format_name or data.reads
    if reads in ("beir", "msmarco", "nq", "pretokenised"):
        what, of_files = _rows_of_files(data, split, folder, str(reads))
        return of_files if data.source != "files" else counted(of_files, what, reads)  # pyright: ignore
    if reads == "fid":
        return _scored_rows(data, split, folder, cache_dir)
    placed = own_rows(data, split, folder, layout=QUERIES, cache_dir=cache_dir)
    return _own_rows(placed, corpus)


def _rows_of_files(
    data: Data, split: str, folder: Path | None, reads: str
) -> tuple[str, Iterator[Row]]:
    """A name for what is read, and the rows of a format whose files have names of their own."""
    if reads == "pretokenised":
        path = _file(data, split, folder)
        return path.name, _pretokenised_rows(path)
    if reads == "nq":
        return nq_folder(folder).name, _nq_rows(data, split, folder)
    if reads == "beir":
        placed = beir(folder, split, files=data.files, negatives=data.negatives)
        corpus = _Corpus(data.corpus or "corpus.jsonl", folder)
        return required_folder(folder, "").name, _tevatron_rows(placed, corpus)
    how: dict[str, Any] = {"corpus": data.corpus, "negatives": data.negatives}
    path, placed = msmarco(folder, split, file=getattr(data.files, split), **how)
    return path.name, _tevatron_rows(placed, _Corpus(None, folder))


def without_own_positives(rows: Iterable[Row]) -> Iterator[Row]:
    """The same rows without negatives that are positives of their row, which are noted."""
    for row in rows:
        positives = {_identity_of_content(one) for one in row["positives"]}
        negatives = [one for one in row["negatives"] if _identity_of_content(one) not in positives]
        num_left_out = len(row["negatives"]) - len(negatives)
        if num_left_out:
            note(f"query {row['id']!r}", OWN_POSITIVES, field="negatives", count=num_left_out)
            row = {**row, "negatives": negatives}
        for side in ("positives", "negatives"):
            for passage in row[side]:
                is_text = isinstance(passage, dict) and passage.get("text") is not None
                if is_text and is_blank(f"{passage.get('title') or ''}{passage['text']}"):
                    note(f"query {row['id']!r}", BLANK, field=side)
        yield row


def _identity_of_content(passage: Any) -> tuple[Any, ...]:
    """What makes two passages of a row the same: title and text, but for white space, or token ids,
    or an id alone.
    """
    if not isinstance(passage, dict):
        return ("ids", *passage)
    if passage.get("text") is None:
        return ("id", passage.get("id"))
    title, text = passage.get("title") or "", passage["text"]
    return ("text", " ".join(title.split()), " ".join(text.split()))


# Tevatron
# --------------------------------------------------------------------------------------------------


def _tevatron_rows(placed: Iterator[tuple[str, Row]], corpus: _Corpus) -> Iterator[Row]:
    """Rows in Tevatron's layout, of which version 2 gives passages by their ids in the corpus.

    A row without an id is named by the number at the end of its place, or else by its own number.
    """
    for number, (place, raw) in enumerate(placed, start=1):
        yield _tevatron_row(raw, place, number, corpus)


def _tevatron_row(raw: Row, place: str, number: int, corpus: _Corpus) -> Row:
    line = place.rpartition(" ")[2]
    default_id = line if line.isdecimal() else str(number)
    name, query = first_given(raw, fields.QUESTIONS)
    row: Row = {"id": _id_of(raw, place, default_id), "query": fields.text(query, place, name)}
    for side, names in (("positives", _POSITIVES), ("negatives", _NEGATIVES)):
        name, values = first_given(raw, names)
        if values is None and side == "positives":
            raise DataError(
                f"{place}: {name!r} is missing (keys: {fields.keys(raw)}).",
                place=place,
                field=name,
            )
        row[side] = [
            one if "text" in one else corpus.passage(one["id"], place)
            for one in fields.passages(values or [], place, name)
        ]
    row |= corpus.topic(raw)
    return teacher_scores.of_row(row, raw.get(teacher_scores.SCORES), place)


def _pretokenised_rows(path: Path) -> Iterator[Row]:
    for line, values in numbered_jsonl(path):
        raw = watched(values)
        lists = {name: raw.get(name) for name in ("query", "positives", "negatives")}
        for name, value in lists.items():
            texts = [value] if name == "query" else value
            are_ids = isinstance(texts, list) and all(
                isinstance(ids, list) and ids and all(type(number) is int for number in ids)
                for ids in texts
            )
            if not are_ids:
                expected = "token ids" if name == "query" else "a list of lists of token ids"
                raise bad_line(path, line, f"{name!r} is {preview(value)}, want {expected}")
        yield {"id": str(raw.get("query_id", line)).strip(), **lists}


# Rows of a person's own, and other retrievers' files
# --------------------------------------------------------------------------------------------------


def _own_rows(placed: Iterator[tuple[str, Row]], corpus: _Corpus) -> Iterator[Row]:
    """Questions with contexts. The positives are those that useful_contexts marks; without marks, a
    question's only context, or those that hold an answer. Questions without positives are left out.
    Rows of a format of other people come with their positives and negatives.
    """
    for number, (place, raw) in enumerate(placed, start=1):
        if not raw.keys() & {"contexts", "context", "ctxs"} and raw.keys() & {*_POSITIVES}:
            row = _tevatron_row(raw, place, number, corpus)
        else:
            row = _question_row(raw, place, number, corpus)
        if row is None or not row["positives"]:
            note(place, UNANSWERED, field="ctxs")
        else:
            yield row


def _question_row(raw: Row, place: str, number: int, corpus: _Corpus) -> Row | None:
    """The row of a question with contexts; None where none of them is a positive."""
    name, query = first_given(raw, fields.QUESTIONS, "question")
    passages = fields.contexts(raw, place)
    if passages is None:
        ctxs = fields.passages(raw.get("ctxs"), place, "ctxs")
        passages = [one if "text" in one else corpus.passage(one["id"], place) for one in ctxs]
    is_positive = _marks(raw, passages, place)
    if not any(is_positive):
        return None
    marked = list(zip(passages, is_positive, strict=True))
    return {
        "id": _id_of(raw, place, str(number)),
        "query": fields.text(query, place, name),
        "positives": [one for one, is_one in marked if is_one],
        "negatives": [one for one, is_one in marked if not is_one],
        **corpus.topic(raw),
    }


def _marks(raw: Row, passages: Sequence[Row], place: str) -> list[bool]:
    """Whether each passage of a question is a positive."""
    if raw.get("useful_contexts") is not None:
        return [bool(one) for one in fields.useful_contexts(raw, place, len(passages))]
    if len(passages) == 1:
        return [True]
    answers = [normalise(answer) for answer in fields.answers(raw, place)]
    return [_holds(normalise(one["text"]), answers) for one in passages]


def _scored_rows(
    data: Data, split: str, folder: Path | None, cache_dir: Path | None
) -> Iterator[Row]:
    """The rows of a reader's file with ctxs[].score: the passage with the highest score is the
    positive, the others are negatives.
    """
    corpus = _Corpus(data.corpus, folder)
    how: dict[str, Any] = {"contexts": _ALL, "sort_by_score": True, "cache_dir": cache_dir}
    questions = retrieved.rows(folder, split, source="fid", own=data, **how)
    for row in questions:
        place = f"question {row['id']!r}"
        ctxs = [
            one if "text" in one else {**corpus.passage(one["id"], place), **one}
            for one in row["ctxs"]
        ]
        yield {
            "id": row["id"],
            "query": row["question"],
            "positives": ctxs[:1],
            "negatives": ctxs[1:],
        }


def _nq_rows(data: Data, split: str, folder: Path | None) -> Iterator[Row]:
    """Questions of NaturalQuestions: the gold passage is the positive, the negatives are passages
    of BM25's ranking that hold no answer.
    """
    texts = by_id(nq_passages(folder), nq_folder(folder) / CORPUS)
    for index, place, raw in nq_lines(folder, split, getattr(data.files, split)):
        ranked = [str(one).strip() for one in as_list(raw.get("bm25"), place, "bm25") or ()]
        gold = str(raw.get("gold")).strip()
        unknown = [one for one in (gold, *ranked) if one not in texts]
        if unknown:
            raise DataError(f"{place}: passage {unknown[0]!r} is not in corpus.tsv.", place=place)
        answers = [normalise(answer) for answer in fields.answers(raw, place)]
        others = [texts[one] for one in ranked if one != gold]
        yield {
            "id": _id_of(raw, place, str(index + 1)),
            "query": fields.required_text(raw, "question", place),
            "positives": [texts[gold]],
            "negatives": [one for one in others if not _holds(normalise(one["text"]), answers)],
        }


def _holds(text: str, answers: Sequence[str]) -> bool:
    return any(f" {answer} " in f" {text} " for answer in answers)


def _documentation_rows(split: str) -> Iterator[Row]:
    """Rows of the embedded corpus: the query is the first sentence of a docstring, the positive is
    the rest of that docstring, and the negatives are the rests of the docstrings that follow it.
    """
    documented = stdlib_docs.qa_rows(split)
    bodies = [
        {
            "id": str(index),
            "title": row["title"],
            "text": row["context"].replace(row["answers"][0], "", 1).strip(),
        }
        for index, row in enumerate(documented)
    ]
    for index, row in enumerate(documented):
        others = [
            bodies[(index + step) % len(bodies)] for step in range(1, _DOCUMENTED_NEGATIVES + 1)
        ]
        yield {
            "id": str(index),
            "query": row["answers"][0],
            "positives": [bodies[index]],
            "negatives": others,
        }


def _hub_rows(data: Data, split: str, folder: Path | None, cache_dir: Path | None) -> Iterator[Row]:
    """The rows of a data set on the Hub, or of a folder that `datasets` reads, in Tevatron's
    layout.
    """
    files = getattr(data.files, split, None)
    source = files if files and "/" in files else data.dataset
    assert source is not None, "config.Data demands it"
    name, _, config = source.partition(":")
    parts = name.split("/")
    of_split = {"train": "train", "valid": "dev", "test": "test"}.get(split, split)
    if not Path(userfile.placed(name)).is_dir() and len(parts) == 3:
        name, of_split = "/".join(parts[:2]), parts[2]
    of_split = getattr(data.splits, split, None) or of_split
    of_split = files if files and source != files else of_split
    config = config or data.subset
    how: dict[str, Any] = {"subset": config, "revision": data.revision, "cache_dir": cache_dir}
    dataset = data_set(name, of_split, folder=folder, **how)
    placed = (
        (f"{name} ({of_split}), row {index}", row_of_arrow(raw))
        for index, raw in enumerate(dataset)
    )
    placed = in_our_names(placed, data.columns, TEVATRON)
    yield from _tevatron_rows(placed, _corpus_of(data, folder))


# Parts
# --------------------------------------------------------------------------------------------------


def _corpus_of(data: Data, folder: Path | None) -> _Corpus:
    batches = data.batches
    return _Corpus(data.corpus, folder, has_topics=batches is not None and batches.reads_topics)


class _Corpus:
    """Passages by id; the file is read when the first passage is looked up. Besides, whether a row
    says its topic.
    """

    def __init__(self, name: str | None, folder: Path | None, *, has_topics: bool = False) -> None:
        self.name, self.folder, self.has_topics = name, folder, has_topics
        self._passages: dict[str, Row] | None = None

    def topic(self, raw: Row) -> Row:
        """{"topic"} of a raw row where data.batches reads it, else {}."""
        return {TOPIC: raw.get(TOPIC)} if self.has_topics else {}

    def passage(self, number: str, place: str) -> Row:
        """{"id", "title"?, "text"}; DataError names `place` when the corpus lacks the id."""
        if self._passages is None:
            if self.name is None:
                raise DataError(
                    f"{place}: passage {number!r} is given by its id alone. Name the corpus in "
                    "data.corpus.",
                    place=place,
                )
            path = corpus_file(self.folder, self.name)
            self._passages = by_id(written_passages(path), path)
        if number not in self._passages:
            raise DataError(
                f"{place}: passage {number!r} is not in the corpus {self.name}.", place=place
            )
        return self._passages[number]


def _file(
    data: Data, split: str, folder: Path | None, *, suffixes: Sequence[str] = (".jsonl",)
) -> Path:
    """The file that the experiment names for a split, else the file that bears the split's name."""
    name = getattr(data.files, split)
    return split_file(folder, split, suffixes, name=name, key="data.files")


def _id_of(raw: Row, place: str, default: str) -> str:
    name, number = first_given(raw, QUESTION_IDS)
    return default if number is None else fields.identity(number, place, name)
