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
from trainer.config.formats.layouts import QUESTIONS, TEVATRON
from trainer.data import stdlib_docs
from trainer.data.formats.lists import as_list
from trainer.data.left_out import note, watched
from trainer.data.readers import fields, retrieved
from trainer.data.readers.columns import in_our_names
from trainer.data.readers.data_sets import data_set
from trainer.data.readers.fields import QUESTION_IDS, first_given
from trainer.data.readers.folders import (
    CORPUS,
    corpus_file,
    nq_folder,
    required_folder,
    split_file,
    split_names,
)
from trainer.data.readers.jsonl import bad_line, numbered_jsonl, objects, preview
from trainer.data.readers.own_rows import own_rows
from trainer.data.readers.passages import by_id, nq_passages, written_passages
from trainer.data.readers.questions import nq_lines, queries
from trainer.data.readers.rankings import Qrels, read_qrels
from trainer.errors import DataError
from trainer.metrics.mergeable import normalise

if TYPE_CHECKING:
    from trainer.protocol.task import Row
    from trainer.tasks.retriever.config import Data

UNANSWERED = "questions without a positive passage (left out)"
OWN_POSITIVES = "negatives that are positives of their query (left out)"
BLANK = "blank passages (an embedding of nothing)"
_ALL = 1_000_000_000  # a limit on the passages of a question that no file reaches
_VALID_OF_1000 = 100  # queries held out of a BEIR set that has no validation split
_DOCUMENTED_NEGATIVES = 3
_POSITIVES = ("positive_passages", "positive_docids", "positive_document_ids")
_NEGATIVES = ("negative_passages", "negative_docids", "negative_document_ids")


def rows(
    data: Data, split: str, folder: Path | None, *, cache_dir: Path | None = None
) -> Iterator[Row]:
    """The rows of a split, read as config.Data.source says. DataError names the file and line of a
    wrong row.
    """
    if data.source in ("files", "tevatron"):
        layout = TEVATRON if data.source == "tevatron" else QUESTIONS
        first = ".jsonl" if data.source == "tevatron" else None
        how: dict[str, Any] = {"layout": layout, "first": first, "cache_dir": cache_dir}
        placed = own_rows(data, split, folder, **how)
        of_layout = _tevatron_rows if data.source == "tevatron" else _question_rows
        return of_layout(placed, _Corpus(data.corpus, folder))
    if data.source == "pretokenised":
        return _pretokenised_rows(_file(data, split, folder))
    if data.source == "beir":
        return _beir_rows(data, split, folder)
    if data.source == "dpr":
        return _dpr_rows(_file(data, split, folder, suffixes=(".json", ".jsonl")))
    if data.source == "fid":
        return _scored_rows(data, split, folder, cache_dir)
    if data.source == "nq":
        return _nq_rows(data, split, folder)
    if data.source == "hub":
        return _hub_rows(data, split, folder, cache_dir)
    return _documentation_rows(split)


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
                if is_text and not f"{passage.get('title') or ''}{passage['text']}".strip():
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
        yield row


def _pretokenised_rows(path: Path) -> Iterator[Row]:
    for line, given in numbered_jsonl(path):
        raw = watched(given)
        lists = {name: raw.get(name) for name in ("query", "positives", "negatives")}
        for name, value in lists.items():
            texts = [value] if name == "query" else value
            if not isinstance(texts, list) or not all(_are_ids(ids) for ids in texts):
                expected = "token ids" if name == "query" else "a list of lists of token ids"
                raise bad_line(path, line, f"{name!r} is {preview(value)}, want {expected}")
        yield {"id": str(raw.get("query_id", line)).strip(), **lists}


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(number) is int for number in value)


# Benchmarks and other retrievers' files
# -----------------------------------------------------------------------------


def _beir_rows(data: Data, split: str, folder: Path | None) -> Iterator[Row]:
    """The queries of qrels/<split>.tsv, in the order of that file.

    Where there is no validation file, a tenth of the training queries is held out for validation.
    The first relevant document decides, so that queries about one document stay in one split.
    """
    folder = required_folder(folder, "corpus.jsonl, queries.jsonl and qrels/<split>.tsv")
    judged = _relevant(data, split, folder)
    corpus, texts = _Corpus(data.corpus or "corpus.jsonl", folder), _queries(folder)
    negatives = _negative_ids(folder / data.negatives) if data.negatives else {}
    for query, documents in judged.items():
        if query not in texts:
            raise DataError(
                f"{folder / 'qrels'}: query {query!r} of {split} is in no queries*.jsonl. Add it."
            )
        place = f"{folder}, query {query!r}"
        others = [one for one in negatives.get(query, []) if one not in documents]
        yield {
            "id": query,
            "query": texts[query],
            "positives": [corpus.passage(document, place) for document in documents],
            "negatives": [corpus.passage(one, place) for one in others],
        }


def _relevant(data: Data, split: str, folder: Path) -> dict[str, list[str]]:
    """The ids of each query's relevant documents, for the queries of a split."""
    paths = getattr(data.files, split)
    names = [Path(paths).stem] if paths else split_names(split)
    files = [folder / "qrels" / f"{name}.tsv" for name in names]
    has_valid = data.files.valid or any(
        (folder / "qrels" / f"{name}.tsv").is_file() for name in split_names("valid")
    )
    if has_valid or split == "test":
        return _relevant_of(next((path for path in files if path.is_file()), files[0]))
    judged: dict[str, list[str]] = {}
    for query, documents in _relevant_of(folder / "qrels" / "train.tsv").items():
        is_valid = stdlib_docs.is_held_out(min(documents), per_mille=_VALID_OF_1000)
        if is_valid == (split == "valid"):
            judged[query] = documents
    return judged


def _relevant_of(path: Path) -> dict[str, list[str]]:
    qrels: Qrels = read_qrels(path)
    judged = {
        query: [document for document, score in scores.items() if score > 0]
        for query, scores in qrels.items()
    }
    for query in judged:
        if not judged[query]:
            note(f"{path}, query {query!r}", UNANSWERED, field="score")
    return {query: documents for query, documents in judged.items() if documents}


def _queries(folder: Path) -> dict[str, str]:
    """The text of each query by its id, from queries.jsonl or from all queries.<split>.jsonl."""
    files = (
        [folder / "queries.jsonl"]
        if (folder / "queries.jsonl").is_file()
        else sorted(folder.glob("queries.*.jsonl"))
    )
    if not files:
        raise DataError(
            f"{folder} holds no queries.jsonl. Put one JSON object of _id and text on every line."
        )
    return {query.id: query.text for path in files for query in queries(path)}


def _negative_ids(path: Path) -> dict[str, list[str]]:
    negatives: dict[str, list[str]] = {}
    for line, raw in numbered_jsonl(path):
        place = f"{path}, line {line}"
        id_name, number = first_given(raw, QUESTION_IDS)
        name, values = first_given(raw, _NEGATIVES)
        query = fields.identity(number, place, id_name)
        negatives[query] = [one["id"] for one in fields.passages(values or [], place, name)]
    return negatives


def _dpr_rows(path: Path) -> Iterator[Row]:
    """DPR's training files. The negatives are a question's hard ones, or its easy ones if it has
    none. Questions without positives are left out.
    """
    for index, (place, given) in enumerate(objects(path)):
        raw = watched(given)
        positives, hard, easy = (
            fields.passages(raw.get(name) or [], place, name)
            for name in ("positive_ctxs", "hard_negative_ctxs", "negative_ctxs")
        )
        if not positives:
            note(place, UNANSWERED, field="positive_ctxs")
            continue
        yield {
            "id": _id_of(raw, place, str(index)),
            "query": fields.required_text(raw, "question", place),
            "positives": positives,
            "negatives": hard or easy,
        }


def _question_rows(placed: Iterator[tuple[str, Row]], corpus: _Corpus) -> Iterator[Row]:
    """Questions with contexts. The positives are those that useful_contexts marks; without marks, a
    question's only context, or those that hold an answer. Questions without positives are left out.
    """
    for number, (place, raw) in enumerate(placed, start=1):
        name, query = first_given(raw, fields.QUESTIONS, "question")
        passages = fields.contexts(raw, place)
        if passages is None:
            ctxs = fields.passages(raw.get("ctxs"), place, "ctxs")
            passages = [one if "text" in one else corpus.passage(one["id"], place) for one in ctxs]
        is_positive = _marks(raw, passages, place)
        if not any(is_positive):
            note(place, UNANSWERED, field="ctxs")
            continue
        marked = list(zip(passages, is_positive, strict=True))
        yield {
            "id": _id_of(raw, place, str(number)),
            "query": fields.text(query, place, name),
            "positives": [one for one, is_one in marked if is_one],
            "negatives": [one for one, is_one in marked if not is_one],
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
    placed = ((f"{name} ({of_split}), row {index}", raw) for index, raw in enumerate(dataset))
    placed = in_our_names(placed, data.columns, TEVATRON)
    yield from _tevatron_rows(placed, _Corpus(data.corpus, folder))


# Parts
# --------------------------------------------------------------------------------------------------


class _Corpus:
    """Passages by id; the file is read when the first passage is looked up."""

    def __init__(self, name: str | None, folder: Path | None) -> None:
        self.name, self.folder = name, folder
        self._passages: dict[str, Row] | None = None

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
