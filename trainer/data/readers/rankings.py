"""Rankings of passages (run files) and judgements of relevance (qrels), in the field's formats."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trainer.data.readers.fields import finite
from trainer.data.readers.jsonl import bad_line, lines, preview
from trainer.errors import DataError

_MAX_DIGITS = 18  # of a rank or a relevance: 64 bits
_NO_LETTERS = re.compile(r"[^a-z]")
# Names of the columns of judgements, as BEIR, TREC, MTEB and MS MARCO write them, letters alone.
_OF_QUESTIONS = {"queryid", "qid", "query", "topic", "topicid", "questionid", "question"}
_OF_PASSAGES = {"corpusid", "docid", "docno", "pid", "passageid", "documentid", "did", "doc"}


class RankedPassage(NamedTuple):
    """A line of a ranking. score: None where the file has ranks alone."""

    passage: str
    score: float | None


class Hit(NamedTuple):
    """A passage of a run, and its score."""

    passage: str
    score: float


Rankings = dict[str, list[Hit]]  # by question, best first
Qrels = dict[str, dict[str, int]]  # by question and passage; above 0 is relevant


def ranked_passages(path: Path) -> Iterator[tuple[str, RankedPassage]]:
    """(question, passage with its score) of each line. Columns are separated by white space; ids
    have none.

    6 columns are a TREC run: question, Q0, passage, rank, score, tag; as in trec_eval the score
    counts, not the rank. 3 columns are question, passage, and a score (Tevatron) or a rank (MS
    MARCO): if the first line has an integer, all are ranks. The ranks of a question must rise from
    0 or 1. Integer scores do not, and are refused.
    """
    num_columns, has_ranks = 0, False
    ranks: dict[str, int] = {}  # the last one of every question
    for line, text in lines(path):
        columns = text.split()
        if not columns:
            continue
        if not num_columns:
            num_columns = len(columns)
            has_ranks = num_columns == 3 and _is_integer(columns[2])
        _check_columns(columns, num_columns, path, line)
        question, passage, value = (
            columns if num_columns == 3 else (columns[0], columns[2], columns[4])
        )
        if has_ranks:
            ranks[question] = _rank(value, ranks.get(question), path, line)
        score = None if has_ranks else finite(value, f"{path}, line {line}", "the score")
        # One passage is named for many questions: it is held in memory once.
        yield question, RankedPassage(sys.intern(passage), score)
    if not num_columns:
        raise DataError(f"{path} is empty. Put question, passage and score on every line.")


def read_run(path: Path) -> Rankings:
    """A run file of any of the three formats, which the columns tell apart: best first, in the
    order of its scores.

    Ties keep the order of the file. In a file of ranks, the score of a passage is minus its
    position.
    """
    rankings: Rankings = {}
    for question, (passage, score) in ranked_passages(path):
        hits = rankings.setdefault(question, [])
        hits.append(Hit(passage, -float(len(hits) + 1) if score is None else score))
    for question, hits in rankings.items():
        hits.sort(key=lambda hit: hit.score, reverse=True)
        check_distinct([hit.passage for hit in hits], question, path)
    return rankings


def read_qrels(path: Path) -> Qrels:
    """Judgements: TREC's question, iteration, passage, relevance; or BEIR's question, passage,
    score with a header. A pair may occur twice, as in SciFact of BEIR; it counts once. DataError
    for a header of another order, and for a pair that is judged in two ways.

    Columns are separated by any white space, as trec_eval has it; an id with white space in it,
    which tabs would allow, is refused.
    """
    qrels: Qrels = {}
    for line, text in lines(path):
        columns = text.split()
        of_tabs = [column.strip() for column in text.split("\t")]
        is_trec = len(columns) == 4 and columns[1] in ("0", "Q0")
        has_more = len(columns) > len(of_tabs) and not is_trec
        if has_more and len(of_tabs) in (3, 4) and _is_integer(of_tabs[-1]):
            broken = next(column for column in of_tabs if len(column.split()) > 1)
            raise bad_line(
                path,
                line,
                f"the id {broken!r} holds white space, which separates columns; want ids without",
            )
        is_judgement = len(columns) in (3, 4)
        if line == 1 and is_judgement and not _is_number(columns[-1]):
            _check_header(columns, path)
            continue
        if not text.strip():
            continue
        if not is_judgement or not _is_integer(columns[-1]):
            raise bad_line(
                path,
                line,
                f"{preview(text)}, want question, iteration, passage, relevance, or question, "
                "passage, relevance; relevance an integer",
            )
        question, passage, relevance = columns[0], columns[-2], int(columns[-1])
        before = qrels.setdefault(question, {}).setdefault(passage, relevance)
        if before != relevance:
            raise bad_line(
                path,
                line,
                f"the relevance of passage {passage!r} for question {question!r} is {relevance}, "
                f"want {before} as in an earlier line; leave one of the two",
            )
    if not qrels:
        raise DataError(
            f"{path} holds no judgement. Put question, passage and relevance on every line."
        )
    return qrels


def _check_header(columns: list[str], path: Path) -> None:
    """DataError for a header that names passages first, or questions behind them."""
    first, behind = (_NO_LETTERS.sub("", name.lower()) for name in (columns[0], columns[-2]))
    if first in _OF_PASSAGES or behind in _OF_QUESTIONS:
        raise bad_line(
            path,
            1,
            f"the header is {preview(' '.join(columns))}, want the question first, then the "
            "passage, then the relevance",
        )


def check_distinct(passages: list[str], question: str, path: Path) -> None:
    """DataError when a ranking holds a passage of a question twice."""
    if len(set(passages)) < len(passages):
        raise passage_twice(question, path)


def passage_twice(question: str, path: Path) -> DataError:
    """The error of a file that ranks or scores a passage of a question twice."""
    return DataError(
        f"{path}: a passage stands twice for question {question!r}; rank every passage once."
    )


def _check_columns(columns: list[str], num_columns: int, path: Path, line: int) -> None:
    if len(columns) != num_columns or num_columns not in (3, 6):
        raise bad_line(
            path,
            line,
            f"{len(columns)} columns, want 3 (question, passage, score or rank) or 6 (question, "
            "Q0, passage, rank, score, tag), the same on every line",
        )
    if num_columns == 6 and not _is_integer(columns[3]):
        raise bad_line(
            path, line, f"the rank is {preview(columns[3])}, want an integer as 4th of 6"
        )


def _rank(value: str, last: int | None, path: Path, line: int) -> int:
    """The rank; it must be 0 or 1 in the first line of a question, and then higher than `last`."""
    if _is_integer(value) and (int(value) in (0, 1) if last is None else int(value) > last):
        return int(value)
    behind = "first in its question" if last is None else f"behind {last}"
    raise bad_line(
        path,
        line,
        f"the third column is {value!r}, {behind}: is it a rank or a score? Write ranks that "
        "rise from 0 or 1 in every question, or scores, the first of them with a decimal point",
    )


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and len(text) <= _MAX_DIGITS


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
