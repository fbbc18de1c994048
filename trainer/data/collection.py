"""A collection to search: its passages, and the questions asked of it, in the formats retrieval
data comes in.

Everything is read one row at a time, in the file's order. Errors name file and line, counted from
1.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data import sources
from trainer.errors import DataError
from trainer.tasks.protocol import Row

_PASSAGE_IDS = (
    "docid",
    "_id",
    "id",
    "passage_id",
    "psg_id",
)  # Tevatron; BEIR; FiD; DPR, for two of its sets
_QUERY_IDS = (
    "query_id",
    "_id",
    "qid",
    "id",
)  # Tevatron; BEIR; NaturalQuestions as this project has it; FiD
_QUERIES = ("query", "query_text", "question", "text")  # Tevatron 1 and 2; FiD and DPR; BEIR
_ANSWERS = ("answers", "answer")
_POSITIVES = ("positive_passages", "positive_document_ids", "positive_docids", "gold")


@dataclass(frozen=True)
class Query:
    """One question, and what its file knows about it."""

    id: str
    text: str
    answers: list[str]  # may be empty
    positives: list[str]  # ids of passages that answer it; may be empty


def passages(path: Path) -> Iterator[Row]:
    """{"id", "text", "title"} of every passage of a corpus; title and text may be "", as BEIR's
    are, but not both.

    .jsonl and .jsonl.gz: Tevatron's {"docid", "title", "text"} or BEIR's {"_id", "title", "text"}.
    Anything else: a TSV of id, text, title, as DPR and FiD have it. DataError for an id with white
    space, which run files cannot hold.
    """
    if ".jsonl" not in path.suffixes:
        if path.suffix == ".gz":
            raise DataError(f"{path}: a packed TSV is not read. Unpack it with gunzip.")
        for passage in sources.tsv_passages(path):
            yield {**passage, "id": _identity(passage["id"], f"{path}", "id")}
        return
    for line, raw in _objects(path):
        where = f"{path}, line {line}"
        name, number = _given(raw, _PASSAGE_IDS)
        title, text = (_optional_text(raw, key, where) for key in ("title", "text"))
        if not (title + text).strip():
            raise DataError(
                f"{where}: text and title are missing or blank (keys: {', '.join(raw) or 'none'})."
            )
        yield {"id": _identity(number, where, name), "text": text, "title": title}


def chosen_passages(path: Path, ids: Iterable[str]) -> dict[str, Row]:
    """The passages of a corpus with these ids, by id; only they are held in memory. DataError when
    one is not there.
    """
    wanted = set(ids)
    found = {passage["id"]: passage for passage in passages(path) if passage["id"] in wanted}
    missing = wanted - found.keys()
    if missing:
        raise DataError(
            f"{path} has no passage {min(missing)!r} ({len(missing)} of {len(wanted)} are "
            "missing). "
            "Give the corpus that was searched."
        )
    return found


def queries(path: Path, split: str | None = None) -> Iterator[Query]:
    """The questions of a JSON-lines file (perhaps .gz); with `split`, those whose "split" is that
    one.

    Tevatron's {"query_id", "query"} and its training rows, BEIR's {"_id", "text"}, FiD's {"id",
    "question"}. What is known of answers ("answers", a list or a text) and positives
    ("positive_passages", "positive_document_ids", "positive_docids", "gold") is read too. Without
    an id, a question's place in the file, from 0, is its id.
    """
    names = sources.split_names(split) if split is not None else ()
    seen: set[str] = set()
    for index, (line, raw) in enumerate(_objects(path)):
        if split is not None and raw.get("split") not in names:
            continue
        where = f"{path}, line {line}"
        id_name, number = _given(raw, _QUERY_IDS)
        text_name, text = _given(raw, _QUERIES)
        if not isinstance(text, str) or not text.strip():
            raise DataError(
                f"{where}: {text_name!r} is {sources.shown(text)}, want text that is not blank."
            )
        name = str(index) if number is None else _identity(number, where, id_name)
        if name in seen:
            raise DataError(f"{where}: the id {name!r} stands twice; give every question its own.")
        seen.add(name)
        yield Query(name, text, _answers(raw, where), _positives(raw, where))
    if not seen:
        of_split = f" whose split is {' or '.join(names)}" if names else ""
        raise DataError(
            f"{path} has no question{of_split}. Leave --split out, or name another file."
        )


def _objects(path: Path) -> Iterator[tuple[int, Row]]:
    """(line, object) of JSON lines, perhaps packed."""
    if path.suffix != ".gz":
        yield from sources.numbered_jsonl(path)
        return
    line = 0
    try:
        with closing(gzip.open(path, "rt", encoding="utf-8", newline="\n")) as file:
            for line, text in enumerate(file, start=1):
                if text.strip():
                    yield line, _object(text, path, line)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read behind line {line}: {error}. Fetch it again."
        ) from error
    if not line:
        raise DataError(f"{path} is empty. Put one JSON object on every line.")


def _object(text: str, path: Path, line: int) -> Row:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise sources.bad_line(
            path, line, f"malformed JSON ({error.msg}); write one object a line"
        ) from None
    if not isinstance(row, dict):
        raise sources.bad_line(
            path, line, f"a JSON {type(row).__name__}, want an object like {{...}}"
        )
    return row


def _given(raw: Row, names: Sequence[str]) -> tuple[str, Any]:
    """The first of `names` that is there and not null, with its value; else the first name and
    None.
    """
    return next(
        ((name, raw[name]) for name in names if raw.get(name) is not None), (names[0], None)
    )


def _identity(value: Any, where: str, name: str) -> str:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, str) and value.split() == [value]):
        raise DataError(
            f"{where}: {name!r} is {sources.shown(value)}, want an id: an integer, or text "
            "without blanks."
        )
    return str(value)


def _optional_text(raw: Row, name: str, where: str) -> str:
    value = raw.get(name)
    if value is not None and not isinstance(value, str):
        raise DataError(f"{where}: {name!r} is {sources.shown(value)}, want text.")
    return value or ""


def _answers(raw: Row, where: str) -> list[str]:
    name, value = _given(raw, _ANSWERS)
    found = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(answer, str) for answer in found):
        raise DataError(
            f"{where}: {name!r} is {sources.shown(value)}, want a list of texts, or one text."
        )
    return found


def _positives(raw: Row, where: str) -> list[str]:
    name, value = _given(raw, _POSITIVES)
    found = [] if value is None else value if isinstance(value, list) else [value]
    ids = [_given(item, _PASSAGE_IDS)[1] if isinstance(item, dict) else item for item in found]
    return [_identity(number, where, name) for number in ids]
