"""Queries with positive and negative passages, out of every layout that retrievers are trained on.

A row is {"id", "query", "positives", "negatives"}: id is text; query is text, or token ids; a
passage is {"id"?, "title"?, "text", "score"?}, or token ids. Rows come in the order of the file.
Passages that are looked up in a corpus keep that corpus in memory, everything else is read row by
row.
"""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.data import retrieved, sources, stdlib_docs
from trainer.errors import ConfigError, DataError
from trainer.evaluation.mergeable import normalised
from trainer.tasks.protocol import Row
from trainer.tasks.retriever.config import Data

_log = logging.getLogger(__name__)

_ALL = 1_000_000_000  # passages of a question: however many the file has
_VALID_OF_1000 = 100  # queries held out of a BEIR set that has no validation split
_DOCUMENTED_NEGATIVES = 3
_POSITIVES = ("positive_passages", "positive_docids", "positive_document_ids")
_NEGATIVES = ("negative_passages", "negative_docids", "negative_document_ids")


def rows(data: Data, split: str, folder: Path | None) -> Iterator[Row]:
    """The rows of a split; see the module and config.Data.source. DataError names file and line of
    what is wrong.
    """
    if data.source == "tevatron":
        return _tevatron_rows(data, split, folder)
    if data.source == "pretokenised":
        return _pretokenised_rows(_file(data, split, folder))
    if data.source == "beir":
        return _beir_rows(data, split, folder)
    if data.source == "dpr":
        return _dpr_rows(_file(data, split, folder, suffixes=(".json", ".jsonl")))
    if data.source == "fid":
        return _scored_rows(data, split, folder)
    if data.source == "nq":
        return _nq_rows(data, split, folder)
    return _hub_rows(data, split, folder) if data.source == "hub" else _documentation_rows(split)


def trainable(found: Iterable[Row], passages: int) -> Iterator[Row]:
    """The same rows; DataError for one that has no positive, or no negative where some are
    wanted.
    """
    for row in found:
        missing = (
            "positive"
            if not row["positives"]
            else "negative"
            if passages > 1 and not row["negatives"]
            else None
        )
        if missing is not None:
            raise DataError(
                f"query {row['id']!r} has no {missing} passage, and data.passages={passages} of "
                "each are trained on. "
                "Take it out, give it some, or train on one positive alone (data.passages=1)."
            )
        yield row


# Tevatron
# -----------------------------------------------------------------------------------------------------------


def _tevatron_rows(data: Data, split: str, folder: Path | None) -> Iterator[Row]:
    path = _file(data, split, folder)
    corpus = _Corpus(data.corpus, folder)
    for line, raw in _objects(path):
        yield tevatron_row(raw, f"{path}, line {line}", corpus.passage, default_id=str(line))


def tevatron_row(raw: Row, where: str, look_up: Any, *, default_id: str) -> Row:
    """One row of Tevatron's JSON lines (v1, or v2 with ids); look_up: an id -> its passage."""
    query = raw.get("query", raw.get("query_text"))
    if not isinstance(query, str) or not query.strip():
        raise DataError(f"{where}: 'query' is {sources.shown(query)}, want text that is not blank.")
    lists = {}
    for side, names in (("positives", _POSITIVES), ("negatives", _NEGATIVES)):
        name = next((name for name in names if raw.get(name) is not None), None)
        if name is None and side == "positives":
            raise DataError(f"{where}: {names[0]!r} is missing (keys: {', '.join(raw) or 'none'}).")
        found = raw[name] if name else []
        if not isinstance(found, list):
            raise DataError(f"{where}: {name!r} is {sources.shown(found)}, want a list.")
        lists[side] = [
            _passage(one, f"{where}: {name}[{place}]")
            if isinstance(one, dict)
            else look_up(str(one), where)
            for place, one in enumerate(found)
        ]
    return {"id": str(raw.get("query_id", default_id)), "query": query, **lists}


def _pretokenised_rows(path: Path) -> Iterator[Row]:
    for line, raw in _objects(path):
        lists = {name: raw.get(name) for name in ("query", "positives", "negatives")}
        for name, value in lists.items():
            texts = [value] if name == "query" else value
            if not isinstance(texts, list) or not all(_are_ids(ids) for ids in texts):
                wanted = "token ids" if name == "query" else "a list of lists of token ids"
                raise sources.bad_line(
                    path, line, f"{name!r} is {sources.shown(value)}, want {wanted}"
                )
        yield {"id": str(raw.get("query_id", line)), **lists}


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(number) is int for number in value)


# Benchmarks and other retrievers' files
# -----------------------------------------------------------------------------


def _beir_rows(data: Data, split: str, folder: Path | None) -> Iterator[Row]:
    """Queries of qrels/<split>.tsv in its order. A set without a validation split lends it a tenth
    of its training queries, chosen by their first relevant document, so that queries about one
    document stay together.
    """
    folder = sources.given_folder(folder, "corpus.jsonl, queries.jsonl and qrels/<split>.tsv")
    judged, is_lent = _qrels(data, split, folder)
    if is_lent:
        held = {query: _is_held_out(documents) for query, documents in judged.items()}
        judged = {
            query: documents
            for query, documents in judged.items()
            if held[query] == (split == "valid")
        }
    corpus, queries = _Corpus(data.corpus or "corpus.jsonl", folder), _queries(folder)
    negatives = _negative_ids(folder / data.negatives) if data.negatives else {}
    for query, documents in judged.items():
        if query not in queries:
            raise DataError(
                f"{folder / 'qrels'}: query {query!r} of {split} is in no queries*.jsonl. Add it."
            )
        where = f"{folder}, query {query!r}"
        yield {
            "id": query,
            "query": queries[query],
            "positives": [corpus.passage(document, where) for document in documents],
            "negatives": [
                corpus.passage(one, where)
                for one in negatives.get(query, [])
                if one not in documents
            ],
        }


def _is_held_out(documents: Sequence[str]) -> bool:
    """Whether a query with these relevant documents is held out for validation."""
    return stdlib_docs.is_held_out(min(documents), per_mille=_VALID_OF_1000)


def _qrels(data: Data, split: str, folder: Path) -> tuple[dict[str, list[str]], bool]:
    """Relevant documents by query, and whether the split is a part of the training queries."""
    names = sources.split_names(split)
    given = getattr(data.files, split)
    found = [folder / "qrels" / f"{name}.tsv" for name in ([Path(given).stem] if given else names)]
    path = next((path for path in found if path.is_file()), None)
    train = folder / "qrels" / "train.tsv"
    has_valid = data.files.valid or any(
        (folder / "qrels" / f"{name}.tsv").is_file() for name in ("valid", "val", "dev")
    )
    is_lent = not has_valid and split in ("train", "valid")
    path = train if is_lent else path or found[0]
    judged: dict[
        str, dict[str, None]
    ] = {}  # a pair that stands twice is one pair, as in BEIR's SciFact
    for line, text in sources.lines(path):
        columns = text.split("\t")
        if line == 1 and not columns[-1].strip().lstrip("-").isdigit():
            continue  # the header
        if len(columns) not in (3, 4):
            raise sources.bad_line(
                path, line, f"{len(columns)} tab-separated column(s), want query, document, score"
            )
        query, document, score = columns[0], columns[-2], columns[-1]
        if not score.strip().lstrip("-").isdigit():
            raise sources.bad_line(
                path, line, f"the score is {sources.shown(score)}, want an integer"
            )
        if int(score) > 0:
            judged.setdefault(query, {})[document] = None
    return {query: list(documents) for query, documents in judged.items()}, is_lent


def _queries(folder: Path) -> dict[str, str]:
    """Text by id of queries.jsonl, or of queries.<split>.jsonl together; ids under _id (BEIR),
    query_id or id.
    """
    files = (
        [folder / "queries.jsonl"]
        if (folder / "queries.jsonl").is_file()
        else sorted(folder.glob("queries.*.jsonl"))
    )
    if not files:
        raise DataError(
            f"{folder} holds no queries.jsonl. Put one JSON object of _id and text on every line."
        )
    found: dict[str, str] = {}
    for path in files:
        for line, raw in _objects(path):
            name, text = _first(raw, ("_id", "query_id", "id")), _first(raw, ("text", "query"))
            if name is None or not isinstance(text, str):
                raise sources.bad_line(path, line, f"want _id and text (keys: {', '.join(raw)})")
            found[str(name)] = text
    return found


def _negative_ids(path: Path) -> dict[str, list[str]]:
    return {
        str(_first(raw, ("query_id", "_id", "id"))): [
            str(one) for one in _first(raw, _NEGATIVES) or []
        ]
        for _, raw in _objects(path)
    }


def _dpr_rows(path: Path) -> Iterator[Row]:
    """DPR's training files: hard negatives; where a question has none, the easy ones. Rows without
    positives go.
    """
    left_out = 0
    for index, (where, raw) in enumerate(retrieved.objects(path)):
        lists = {
            name: raw.get(name) or []
            for name in ("positive_ctxs", "hard_negative_ctxs", "negative_ctxs")
        }
        passages = {
            name: [_passage(one, f"{where}: {name}[{place}]") for place, one in enumerate(found)]
            for name, found in lists.items()
        }
        if not passages["positive_ctxs"]:
            left_out += 1
            continue
        yield {
            "id": str(raw.get("id", index)),
            "query": _text(raw, "question", where),
            "positives": passages["positive_ctxs"],
            "negatives": passages["hard_negative_ctxs"] or passages["negative_ctxs"],
        }
    if left_out:
        _log.info("%s: left out %d questions without a positive passage", path, left_out)


def _scored_rows(data: Data, split: str, folder: Path | None) -> Iterator[Row]:
    """A reader's file with ctxs[].score: the passage of the highest score is the positive, the
    others negatives.
    """
    corpus = _Corpus(data.corpus, folder)
    file = getattr(data.files, split)
    found = retrieved.rows(
        folder, split, source="fid", file=file, contexts=_ALL, sort_by_score=True
    )
    for row in found:
        ctxs = [
            one
            if "text" in one
            else {**corpus.passage(one["id"], f"question {row['id']!r}"), **one}
            for one in row["ctxs"]
        ]
        yield {
            "id": row["id"],
            "query": row["question"],
            "positives": ctxs[:1],
            "negatives": ctxs[1:],
        }


def _nq_rows(data: Data, split: str, folder: Path | None) -> Iterator[Row]:
    """The gold passage, and those of BM25's ranking that hold no answer."""
    place = sources.nq_folder(folder)
    texts = {passage["id"]: passage for passage in sources.passages(folder)}
    path = place / (getattr(data.files, split) or sources.QUERIES)
    names = sources.split_names(split)
    for line, raw in sources.numbered_jsonl(path):
        if raw.get("split") not in names:
            continue
        gold, ranked = str(raw.get("gold")), [str(one) for one in raw.get("bm25") or []]
        unknown = [one for one in (gold, *ranked) if one not in texts]
        if unknown:
            raise sources.bad_line(path, line, f"passage {unknown[0]!r} is not in corpus.tsv")
        answers = [normalised(answer) for answer in raw["answers"]]
        others = [texts[one] for one in ranked if one != gold]
        yield {
            "id": str(raw.get("qid", line)),
            "query": _text(raw, "question", f"{path}, line {line}"),
            "positives": [texts[gold]],
            "negatives": [one for one in others if not _holds(normalised(one["text"]), answers)],
        }


def _holds(text: str, answers: Sequence[str]) -> bool:
    return any(f" {answer} " in f" {text} " for answer in answers)


def _documentation_rows(split: str) -> Iterator[Row]:
    """The first sentence of a docstring looks for the rest of it, among the rests that follow in
    the library.
    """
    found = stdlib_docs.qa_rows(split)
    bodies = [
        {
            "id": str(index),
            "title": row["title"],
            "text": row["context"].replace(row["answers"][0], "", 1).strip(),
        }
        for index, row in enumerate(found)
    ]
    for index, row in enumerate(found):
        others = [
            bodies[(index + step) % len(bodies)] for step in range(1, _DOCUMENTED_NEGATIVES + 1)
        ]
        yield {
            "id": str(index),
            "query": row["answers"][0],
            "positives": [bodies[index]],
            "negatives": others,
        }


def _hub_rows(data: Data, split: str, folder: Path | None) -> Iterator[Row]:
    """Rows of a data set of the Hub (or a folder that `datasets` reads) in Tevatron's layout."""
    given = getattr(data.files, split, None)
    named = given if given and "/" in given else data.dataset
    assert named is not None, "config.Data demands it"
    name, _, config = named.partition(":")
    parts = name.split("/")
    wanted = {"train": "train", "valid": "dev", "test": "test"}.get(split, split)
    if not Path(name).is_dir() and len(parts) == 3:
        name, wanted = "/".join(parts[:2]), parts[2]
    wanted = given if given and named != given else wanted
    corpus = _Corpus(data.corpus, folder)
    for index, raw in enumerate(_dataset(name, config or None, wanted)):
        yield tevatron_row(
            raw, f"{name} ({wanted}), row {index}", corpus.passage, default_id=str(index)
        )


def _dataset(name: str, config: str | None, split: str) -> Iterable[Any]:
    try:
        import datasets
    except ModuleNotFoundError:
        raise ConfigError(
            'data.source="hub" needs the package datasets. Install it: pip install '
            '"lathe[datasets]".'
        ) from None
    try:
        return datasets.load_dataset(name, config, split=split)  # pyright: ignore[reportReturnType]
    except (
        OSError,
        ValueError,
    ) as error:  # what datasets raises for a name, configuration or split that is not there
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f"data.dataset={name!r}, split {split!r}: {reason} Give a data set that this machine "
            "can reach, or a "
            "folder; data.files names its splits."
        ) from error


# Parts
# --------------------------------------------------------------------------------------------------------------


class _Corpus:
    """Passages by id, read when the first one is asked for."""

    def __init__(self, name: str | None, folder: Path | None) -> None:
        self.name, self.folder = name, folder
        self._passages: dict[str, Row] | None = None

    def passage(self, number: str, where: str) -> Row:
        if self._passages is None:
            if self.name is None:
                raise DataError(
                    f"{where}: passage {number!r} is given by its id alone. Name the corpus in "
                    "data.corpus."
                )
            self._passages = {passage["id"]: passage for passage in corpus(self.folder, self.name)}
        if number not in self._passages:
            raise DataError(f"{where}: passage {number!r} is not in the corpus {self.name}.")
        return self._passages[number]


def corpus(folder: Path | None, name: str) -> Iterator[Row]:
    """{"id", "title"?, "text"} of every passage of a file below `folder`: .jsonl of docid (_id,
    id), title and text, also compressed (.gz, whether or not `name` says so), or .tsv as
    sources.tsv_passages reads it.
    """
    folder = sources.given_folder(folder, name)
    places = [place / f"{name}{end}" for place in (folder, folder / "nq") for end in ("", ".gz")]
    path = next((place for place in places if place.is_file()), places[0])
    if ".jsonl" not in path.suffixes:
        yield from sources.tsv_passages(path)
        return
    for line, raw in _objects(path):
        yield _passage(raw, f"{path}, line {line}", needs_id=True)


def _passage(raw: Row, where: str, *, needs_id: bool = False) -> Row:
    number, text = _first(raw, ("docid", "_id", "id", "passage_id", "psg_id")), raw.get("text")
    if not isinstance(text, str) or (needs_id and number is None):
        raise DataError(f"{where}: want a docid and text (keys: {', '.join(raw) or 'none'}).")
    passage: Row = {"text": text} if number is None else {"id": str(number), "text": text}
    if isinstance(raw.get("title"), str):
        passage["title"] = raw["title"]
    if raw.get("score") is not None:
        passage["score"] = float(raw["score"])
    return passage


def _objects(path: Path) -> Iterator[tuple[int, Row]]:
    """(line, object) of JSON lines, also compressed."""
    if path.suffix != ".gz":
        yield from sources.numbered_jsonl(path)
        return
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line, text in enumerate(file, start=1):
            try:
                raw = json.loads(text)
            except ValueError as error:
                raise sources.bad_line(
                    path, line, f"malformed JSON ({error}); write one object a line"
                ) from None
            if not isinstance(raw, dict):
                raise sources.bad_line(
                    path, line, f"a JSON {type(raw).__name__}, want an object like {{...}}"
                )
            yield line, raw


def _file(
    data: Data,
    split: str,
    folder: Path | None,
    *,
    suffixes: Sequence[str] = (".jsonl", ".jsonl.gz"),
) -> Path:
    """The file that the experiment names for a split, else the one that is called like it."""
    names = [f"{name}{suffix}" for name in sources.split_names(split) for suffix in suffixes]
    given = getattr(data.files, split)
    folder = sources.given_folder(folder, given or names[0])
    if given is not None:
        return folder / given
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise DataError(
            f"{folder} holds none of {', '.join(names)}. Put it there, or name it in "
            f"data.files.{split}."
        )
    return found


def _first(raw: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((raw[name] for name in names if raw.get(name) is not None), None)


def _text(raw: Row, name: str, where: str) -> str:
    if not isinstance(raw.get(name), str) or not raw[name].strip():
        raise DataError(
            f"{where}: {name!r} is {sources.shown(raw.get(name))}, want text that is not blank."
        )
    return raw[name]
