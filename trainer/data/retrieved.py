"""Questions with the passages that a retriever found for them, and the corpora those passages come
from.

A row is {"id", "question", "answers", "target"?, "ctxs"}: id is text, answers may be empty but in
the train split, and ctxs are the passages, best first as the file has them: {"id"?, "title"?,
"text"?, "score"?}, where what is missing or null in the file is missing in the row. A passage
without "text" has an id, to be looked up in a corpus. Rows come in the order of the file and one at
a time; only what must be joined (the questions of a ranking, and the ranking) is held in memory.
Errors name the line, or the item of a JSON list; both are counted from 1.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ijson

from trainer.data import sources, stdlib_docs
from trainer.errors import DataError
from trainer.tasks.protocol import Row

_log = logging.getLogger(__name__)

_QUESTION_FILES, _RANKING_FILES = (".json", ".jsonl"), (".trec", ".tsv", ".txt", ".run")
_QUESTION_IDS, _QUESTIONS = ("id", "qid", "query_id"), ("question", "query")
_ANSWERS = ("answers", "answer")
_PASSAGE_IDS = ("id", "passage_id", "psg_id", "docid")  # FiD; DPR, for two of its sets; Tevatron
_PASSAGE_LISTS = (
    ("ctxs",),  # FiD, and what DPR's retriever writes
    ("positive_ctxs", "hard_negative_ctxs", "negative_ctxs"),  # DPR's training files
    ("positive_passages", "negative_passages"),  # Tevatron's training files
)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def rows(
    data_path: Path | None,
    split: str,
    *,
    source: Literal["fid", "ranked", "nq", "stdlib_docs"],
    file: str | None = None,
    ranking: str | None = None,
    contexts: int,
    sort_by_score: bool,
) -> Iterator[Row]:
    """Questions of a split, each with its first `contexts` passages: fewer, or none, where there
    are fewer.

    sort_by_score: where every passage of a question has a score, the highest come first; ties keep
    their order. file, ranking: names below data_path; None: <split>.json or .jsonl, and
    <split>.trec, .tsv, .txt or .run, where the valid split may also be called val or dev. "fid": a
    JSON list or JSON lines of question (or query), answers (or answer; a list or a text), target,
    and ctxs; or in place of ctxs what DPR and Tevatron train on, positives before negatives. A
    passage is an object or an id. "ranked": such questions without passages, and a ranking, see
    `ranking_hits`. "nq": queries.jsonl of `data_path` or its subfolder nq, with ranked ids under
    "bm25". "stdlib_docs": the embedded corpus; a question's own passage stands among those of the
    questions behind it.
    """
    if source == "fid":
        found = _fid_rows(_split_file(data_path, split, file, suffixes=_QUESTION_FILES), split)
    elif source == "nq":
        found = _nq_rows(data_path, split, file)
    elif source == "stdlib_docs":
        found = _documentation_rows(split, contexts)
    else:
        questions = _split_file(data_path, split, file, suffixes=_QUESTION_FILES)
        ranking_path = _split_file(data_path, split, ranking, suffixes=_RANKING_FILES)
        found = _ranked_rows(
            questions, split, ranking_path, contexts=contexts, sort_by_score=sort_by_score
        )
    for row in found:
        yield {**row, "ctxs": _first(row["ctxs"], contexts, sort_by_score)}


def corpus(data_path: Path | None, file: str) -> Iterator[Row]:
    """{"id", "text", "title"} of every passage of a file of `data_path` or its subfolder nq; the
    title may be "".

    .jsonl: objects with docid (or id), text, and perhaps title, as Tevatron has them. Anything
    else: see sources.tsv_passages.
    """
    folder = sources.given_folder(data_path, f"{file} (passages: id, text, title)")
    path = next(
        (place for place in (folder / file, folder / "nq" / file) if place.is_file()), folder / file
    )
    return _jsonl_passages(path) if path.suffix == ".jsonl" else sources.tsv_passages(path)


def _first(ctxs: list[Row], contexts: int, sort_by_score: bool) -> list[Row]:
    if sort_by_score and all("score" in ctx for ctx in ctxs):
        ctxs = sorted(ctxs, key=lambda ctx: ctx["score"], reverse=True)
    return ctxs[:contexts]


# The sources: rows with all passages that the file has, in its order


def _fid_rows(path: Path, split: str) -> Iterator[Row]:
    for index, (where, raw) in enumerate(objects(path)):
        yield {**_question(raw, where, index=index, split=split), "ctxs": _passages(raw, where)}


def _nq_rows(data_path: Path | None, split: str, file: str | None) -> Iterator[Row]:
    names = sources.split_names(split)
    path = sources.nq_folder(data_path) / (file or sources.QUERIES)
    is_empty = True
    for index, (where, raw) in enumerate(objects(path)):
        if raw.get("split") not in names:
            continue
        is_empty = False
        ctxs = [
            _passage(passage, where, f"bm25[{place}]")
            for place, passage in enumerate(_list(raw, "bm25", where))
        ]
        yield {**_question(raw, where, index=index, split=split), "ctxs": ctxs}
    if is_empty:
        raise DataError(
            f"{path} has no line whose split is {' or '.join(names)}, which {split!r} wants."
        )


def _documentation_rows(split: str, contexts: int) -> Iterator[Row]:
    """The own passage of row i is at place i modulo the number of passages, so that the place tells
    nothing.
    """
    found = stdlib_docs.qa_rows(split)
    passages = [
        {"id": str(index), "title": row["title"], "text": row["context"]}
        for index, row in enumerate(found)
    ]
    count = min(contexts, len(found))
    for index, row in enumerate(found):
        ctxs = [passages[(index + step) % len(found)] for step in range(1, count)]
        ctxs.insert(index % count, passages[index])
        yield {
            "id": str(index),
            "question": row["question"],
            "answers": row["answers"],
            "ctxs": ctxs,
        }


def _ranked_rows(
    path: Path, split: str, ranking: Path, *, contexts: int, sort_by_score: bool
) -> Iterator[Row]:
    questions: dict[str, Row] = {}
    for index, (where, raw) in enumerate(objects(path)):
        question = _question(raw, where, index=index, split=split)
        if question["id"] in questions:
            raise DataError(
                f"{where}: the id {question['id']!r} stands twice; give every question its own."
            )
        questions[question["id"]] = question
    hits: dict[str, list[Hit]] = {name: [] for name in questions}
    _read_ranking(ranking, hits, contexts=contexts, sort_by_score=sort_by_score)
    unranked = [name for name, of_question in hits.items() if not of_question]
    if unranked:
        _log.warning(
            "%s ranks no passage for %d of %d questions, the first is %r: they get none",
            *(ranking, len(unranked), len(questions), unranked[0]),
        )
    for name, question in questions.items():
        ctxs = [
            {"id": passage} | ({} if score is None else {"score": score})
            for passage, score in hits.pop(name)
        ]
        if len({ctx["id"] for ctx in ctxs}) < len(ctxs):
            raise DataError(
                f"{ranking}: a passage stands twice for question {name!r}; rank every passage once."
            )
        yield {**question, "ctxs": ctxs}


# Rankings


class Hit(NamedTuple):
    passage: str
    score: float | None


def _read_ranking(
    path: Path, hits: dict[str, list[Hit]], *, contexts: int, sort_by_score: bool
) -> None:
    """Fills `hits`; lines for questions that are not in it are left out, and their number is
    logged.
    """
    unknown: set[str] = set()
    for question, hit in ranking_hits(path):
        kept = hits.get(question)
        if kept is None:
            unknown.add(question)
            continue
        kept.append(hit)
        is_sorted = sort_by_score and hit.score is not None
        if len(kept) > contexts + (1000 if is_sorted else 0):  # a run 1000 deep would be gigabytes
            if is_sorted:
                kept.sort(key=lambda hit: hit.score or 0.0, reverse=True)
            del kept[contexts:]
    if unknown and not any(hits.values()):
        raise DataError(
            f"{path} ranks passages for none of the {len(hits)} questions: its ids are like "
            f"{min(unknown)!r}, theirs "
            f"like {next(iter(hits))!r}. Use the ranking of these questions, or give them its "
            "ids: without one, a "
            "question's id is its place in the file, from 0."
        )
    if unknown:
        _log.info("%s: left out %d questions that are not in this split", path, len(unknown))


def ranking_hits(path: Path) -> Iterator[tuple[str, Hit]]:
    """(question, passage with its score) of a file with white space between its columns, and none
    in an id.

    6 columns are a TREC run: question, Q0, passage, rank, score, tag; as in trec_eval the score
    counts, not the rank. 3 columns are question, passage, and a score (Tevatron) or a rank (MS
    MARCO): ranks if the first line's is an integer. A question's ranks must rise from 0 or 1, which
    integer scores do not: those are refused, not guessed at.
    """
    num_columns, has_ranks = 0, False
    ranks: dict[str, int] = {}  # the last one of every question
    for line, text in sources.lines(path):
        columns = text.split()
        if not columns:
            continue
        if not num_columns:
            num_columns = len(columns)
            has_ranks = num_columns == 3 and _is_integer(columns[2])
        if len(columns) != num_columns or num_columns not in (3, 6):
            wanted = (
                "3 (question, passage, score or rank) or 6 (question, Q0, passage, rank, score, "
                "tag)"
            )
            raise sources.bad_line(
                path, line, f"{len(columns)} columns, want {wanted}, the same on every line"
            )
        question, passage, value = (
            columns if num_columns == 3 else (columns[0], columns[2], columns[4])
        )
        if num_columns == 6 and not _is_integer(columns[3]):
            raise sources.bad_line(
                path, line, f"the rank is {sources.shown(columns[3])}, want an integer as 4th of 6"
            )
        if has_ranks:
            ranks[question] = _rank(value, ranks.get(question), path, line)
        score = None if has_ranks else _finite(value, "the score", f"{path}, line {line}")
        yield (
            question,
            Hit(sys.intern(passage), score),
        )  # interned: one passage is found for many questions
    if not num_columns:
        raise DataError(f"{path} is empty. Put question, passage and score on every line.")


def _rank(value: str, last: int | None, path: Path, line: int) -> int:
    """The rank, which must be 0 or 1 in a question's first line, and else above the `last`."""
    if _is_integer(value) and (int(value) in (0, 1) if last is None else int(value) > last):
        return int(value)
    behind = "first in its question" if last is None else f"behind {last}"
    raise sources.bad_line(
        path,
        line,
        f"the third column is {value!r}, {behind}: is it a rank or a score? Write ranks that "
        "rise from 0 or 1 in every "
        "question, or scores, the first of them with a decimal point",
    )


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


# Objects of JSON lists and JSON lines; `where` is their place, for messages


def objects(path: Path) -> Iterator[tuple[str, Row]]:
    """(place, object) of JSON lines, or of a JSON list, which is read item by item: FiD's have 5
    GB.

    The first character decides, for lists are called .jsonl and lines .json more often than one
    would like.
    """
    if not _is_list(path):
        for line, raw in sources.numbered_jsonl(path):
            yield f"{path}, line {line}", raw
        return
    number = 0
    for number, raw in enumerate(_items(path), start=1):
        where = f"{path}, item {number}"
        if not isinstance(raw, dict):
            raise DataError(f"{where}: a JSON {type(raw).__name__}, want an object like {{...}}.")
        yield where, raw
    if not number:
        raise DataError(f"{path} is an empty list. Put one JSON object for every question into it.")


def _is_list(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError:
        return False  # the reader of lines meets the same error, and says what to do
    return start.removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"[")


def _items(path: Path) -> Iterator[Any]:
    number = 0
    with path.open("rb") as file:
        if file.read(len(_BYTE_ORDER_MARK)) != _BYTE_ORDER_MARK:
            file.seek(0)
        try:
            for item in ijson.items(file, "item", use_float=True):
                number += 1
                yield item
        except (ijson.JSONError, UnicodeDecodeError) as error:
            said = str(error).strip().split("\n", 1)[0].rstrip(".")
            raise DataError(
                f"{path}, item {number + 1}: malformed JSON ({said}); write one list of objects. "
                "NaN is no JSON, and "
                "an integer beyond 64 bits is wanted as text."
            ) from None


# What an object says


def _question(raw: Row, where: str, *, index: int, split: str) -> Row:
    """{"id", "question", "answers", "target"?}; without an id the index in the file, from 0, is the
    id.
    """
    id_name, number = _given(raw, _QUESTION_IDS)
    question_name, question = _given(raw, _QUESTIONS)
    if question is None:
        raise DataError(
            f"{where}: {question_name!r} is missing (keys: {', '.join(raw) or 'none'})."
        )
    row: Row = {
        "id": str(index) if number is None else _identity(number, where, id_name),
        "question": _text(question, where, question_name),
        "answers": _answers(raw, where),
    }
    if raw.get("target") is not None:
        row["target"] = _text(raw["target"], where, "target")
    if split == "train" and not row["answers"] and "target" not in row:
        raise DataError(
            f"{where}: neither 'answers' nor 'target' is there (keys: {', '.join(raw)}), which a "
            "question to train on "
            "needs. Add one, or take the question out."
        )
    return row


def _answers(raw: Row, where: str) -> list[str]:
    name, value = _given(raw, _ANSWERS)
    if value is None:
        return []
    if isinstance(value, str):
        return [_text(value, where, name)]
    if not isinstance(value, list):
        raise DataError(
            f"{where}: {name!r} is {sources.shown(value)}, want a list of texts, or one text."
        )
    return [_text(answer, where, f"{name}[{index}]") for index, answer in enumerate(value)]


def _passages(raw: Row, where: str) -> list[Row]:
    names = next((names for names in _PASSAGE_LISTS if any(name in raw for name in names)), None)
    if names is None:
        raise DataError(
            f"{where}: 'ctxs' is missing (keys: {', '.join(raw)}). Write \"ctxs\": [] where no "
            "passage was found."
        )
    lists = [(name, _list(raw, name, where)) for name in names if raw.get(name) is not None]
    return [
        _passage(value, where, f"{name}[{place}]")
        for name, values in lists
        for place, value in enumerate(values)
    ]


def _passage(raw: Any, where: str, name: str) -> Row:
    if not isinstance(raw, dict):
        return {"id": _identity(raw, where, name)}
    passage: Row = {}
    id_name, number = _given(raw, _PASSAGE_IDS)
    if number is not None:
        passage["id"] = _identity(number, where, f"{name}.{id_name}")
    for key in ("title", "text"):
        if (value := raw.get(key)) is not None:
            if not isinstance(value, str):
                raise DataError(f"{where}: '{name}.{key}' is {sources.shown(value)}, want text.")
            passage[key] = value
    if raw.get("score") is not None:
        passage["score"] = _finite(raw["score"], f"'{name}.score'", where)
    if "id" not in passage and "text" not in passage:
        raise DataError(
            f"{where}: {name!r} has neither text nor id (keys: {', '.join(raw) or 'none'}); give "
            "one."
        )
    return passage


def _given(raw: Row, names: Sequence[str]) -> tuple[str, Any]:
    """The first of `names` that is there and not null, with its value; else the first name and
    None.
    """
    return next(
        ((name, raw[name]) for name in names if raw.get(name) is not None), (names[0], None)
    )


def _list(raw: Row, name: str, where: str) -> list[Any]:
    if not isinstance(raw.get(name), list):
        found = sources.shown(raw[name]) if name in raw else f"missing (keys: {', '.join(raw)})"
        raise DataError(f"{where}: {name!r} is {found}, want a list of passages or of their ids.")
    return raw[name]


def _text(value: Any, where: str, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{where}: {name!r} is {sources.shown(value)}, want text that is not blank."
        )
    return value


def _identity(value: Any, where: str, name: str) -> str:
    is_text = isinstance(value, str) and bool(value.strip())
    if not is_text and (not isinstance(value, int) or isinstance(value, bool)):
        raise DataError(
            f"{where}: {name!r} is {sources.shown(value)}, want an id: a number without "
            "decimals, or text."
        )
    return str(value)


def _finite(value: Any, name: str, where: str) -> float:
    """The number, which DPR writes as text. NaN is refused: it has no place in an order."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{where}: {name} is {sources.shown(value)}, want a finite number.")
    return number


# Corpora


def _jsonl_passages(path: Path) -> Iterator[Row]:
    for line, raw in sources.numbered_jsonl(path):
        where = f"{path}, line {line}"
        passage = _passage(raw, where, "the line")
        if not passage.get("id") or not passage.get("text", "").strip():
            raise DataError(
                f"{where}: the id or the text is missing or blank (keys: {', '.join(raw)}); give "
                "both."
            )
        yield {"id": passage["id"], "text": passage["text"], "title": passage.get("title", "")}


def _split_file(
    data_path: Path | None, split: str, name: str | None, *, suffixes: Sequence[str]
) -> Path:
    """The named file below data_path, else the only one that is called like the split."""
    names = [f"{stem}{suffix}" for stem in sources.split_names(split) for suffix in suffixes]
    folder = sources.given_folder(
        data_path, name or f"{names[0]} (or another of {', '.join(names)})"
    )
    if name is not None:
        return folder / name
    found = [candidate for candidate in names if (folder / candidate).is_file()]
    if len(found) == 1:
        return folder / found[0]
    place = f"data.{'files' if suffixes == _QUESTION_FILES else 'rankings'}.{split}"
    if found:
        raise DataError(
            f"{folder} holds {' and '.join(found)}. Say in {place} which one is the {split} split."
        )
    raise DataError(
        f"{folder} holds none of {', '.join(names)}, which the {split} split is read from. Put "
        "it there, name another "
        f"in {place}, or point --data_path at its folder."
    )
