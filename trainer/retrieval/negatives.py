"""Training files made of rankings: hard negatives for a retriever, passages for a reader; and BM25,
which ranks passages by their words.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.left_out import note
from trainer.data.readers.rankings import Hit, Qrels, Rankings
from trainer.errors import ConfigError, DataError
from trainer.files.atomic import aside
from trainer.files.packages import extra
from trainer.retrieval.answer_recall import AnswerFinder

if TYPE_CHECKING:
    from trainer.data.readers.questions import Query
    from trainer.protocol.task import Row

logger = logging.getLogger(__name__)


UNTRAINABLE = "questions without a positive, or without a hit that may be a negative (left out)"


@dataclass(frozen=True)
class RankRange:
    """Which hits may become negatives, and how many are taken."""

    count: int  # negatives per question, at most
    first: int = 1  # ranks, from 1, both included
    last: int = 200
    seed: int = 42
    may_have_answer: bool = False  # False: a passage with an answer in it is no negative

    def __post_init__(self) -> None:
        if self.count < 1 or not 1 <= self.first <= self.last:
            raise ConfigError(
                f"--count {self.count} --first {self.first} --last {self.last}: want a count of at "
                "least 1, and ranks 1 <= first <= last."
            )


def positives_of(queries: Iterable[Query], qrels: Qrels | None) -> dict[str, list[str]]:
    """Each question's relevant passages: those judged above 0 or, without judgements, those that
    its file names.
    """
    if qrels is None:
        return {query.id: query.positives for query in queries}
    judged = {query.id: qrels.get(query.id, {}) for query in queries}
    return {
        name: [passage for passage, value in of_query.items() if value > 0]
        for name, of_query in judged.items()
    }


def in_turn(runs: Sequence[Rankings], window: RankRange) -> Rankings:
    """The hits in the window of several rankings as one ranking: of each question the first hit of
    every one, then the second of every one, each passage once.
    """
    merged: Rankings = {}
    for question in dict.fromkeys(name for run in runs for name in run):
        in_window = [run.get(question, [])[window.first - 1 : window.last] for run in runs]
        found: dict[str, Hit] = {}
        for hits in zip_longest(*in_window):
            for hit in hits:
                if hit is not None:
                    found.setdefault(hit.passage, hit)
        merged[question] = list(found.values())
    return merged


def noting_strangers(
    rows: Iterable[Row], names: Iterable[str], queries: Sequence[Query]
) -> Iterator[Row]:
    """The same rows. The names of questions that no query has, of a run or of judgements, are
    noted.
    """
    yield from rows
    ids = {query.id for query in queries}
    for name in names:
        if name not in ids:
            note(f"question {name!r}", "ranked or judged questions of no query (left out)")


def training_rows(
    runs: Sequence[Rankings],
    queries: Sequence[Query],
    passages: Mapping[str, Row],
    *,
    positives: Mapping[str, Sequence[str]],
    window: RankRange,
) -> Iterator[Row]:
    """Tevatron's training rows: query_id, query, answers, positive_passages, and negative_passages
    out of the window of every run (in_turn).

    A negative is a hit in a window that is no positive, has no positive's text (or title, where the
    text is blank), and holds no answer (see RankRange). Where there are more than window.count, a
    sample is taken that depends on seed and question alone, in the order of the ranking. Questions
    without a positive or without any negative are left out, and noted. DataError when no question
    remains.
    """
    finder, hits, num_rows = AnswerFinder(passages), in_turn(runs, window), 0
    for query in queries:
        relevant = positives[query.id]
        texts = {_content(passages[name]) for name in relevant}
        ids = [hit.passage for hit in hits.get(query.id, []) if hit.passage not in relevant]
        negatives = [name for name in ids if _content(passages[name]) not in texts]
        if not window.may_have_answer and query.answers:
            answering = finder.having(query.answers, negatives)
            negatives = [name for name in negatives if name not in answering]
        if len(negatives) > window.count:
            draw = random.Random(f"{window.seed} {query.id}")
            sample = draw.sample(range(len(negatives)), window.count)
            negatives = [negatives[place] for place in sorted(sample)]
        if not relevant or not negatives:
            note(f"question {query.id!r}", UNTRAINABLE)
            continue
        num_rows += 1
        yield {
            "query_id": query.id,
            "query": query.text,
            "answers": query.answers,
            "positive_passages": [_tevatron(passages[name]) for name in relevant],
            "negative_passages": [_tevatron(passages[name]) for name in negatives],
        }
    if not num_rows:
        raise DataError(
            "no question has a positive and a negative. Give --qrels, another --first and --last "
            "(of a run that is as deep), or --keep_answers."
        )


def _content(passage: Row) -> str:
    """What tells a passage from its twins: titles differ where a text is copied, but they are all
    that passages without a text have.
    """
    return passage["text"] if passage["text"].strip() else passage["title"]


def _tevatron(passage: Row) -> Row:
    return {"docid": passage["id"], "title": passage["title"], "text": passage["text"]}


def reader_rows(
    rankings: Rankings, queries: Sequence[Query], passages: Mapping[str, Row], *, depth: int
) -> Iterator[Row]:
    """FiD's rows: id, question, answers, and the first `depth` hits as ctxs (id, title, text,
    score, has_answer).
    """
    finder = AnswerFinder(passages)
    for query in queries:
        hits = rankings.get(query.id, [])[:depth]
        if not hits:
            note(f"question {query.id!r}", "questions that the run lacks (no passages)")
        answering = finder.having(query.answers, [hit.passage for hit in hits])
        ctxs = [
            {**passages[hit.passage], "score": hit.score, "has_answer": hit.passage in answering}
            for hit in hits
        ]
        yield {"id": query.id, "question": query.text, "answers": query.answers, "ctxs": ctxs}


def write_rows(path: Path, rows: Iterable[Row]) -> int:
    """Write rows to `path` as JSON lines, or as one list (.json); return their number. An error
    leaves an older file of this name as it was.
    """
    is_list, count = path.suffix == ".json", 0
    with aside(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write("[\n" if is_list else "")
        for count, row in enumerate(rows, start=1):
            file.write(",\n" if is_list and count > 1 else "")
            file.write(json.dumps(row, ensure_ascii=False) + ("" if is_list else "\n"))
        file.write("\n]\n" if is_list else "")
    return count


def bm25(queries: Sequence[Query], passages: Iterable[Row], *, depth: int) -> Rankings:
    """The rankings by BM25 over title and text, with the defaults of bm25s (k1 1.5, b 0.75,
    Lucene's form, English stop words).

    Passages without a word of the question are no hits; equal scores stand in the order of
    `passages`. ConfigError when the extra is not installed, DataError for passages without any
    word.
    """
    bm25s = extra("bm25s", "bm25")
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # after the import, which sets it to DEBUG
    ids, texts = [], []
    for passage in passages:
        ids.append(passage["id"])
        texts.append(f"{passage['title']} {passage['text']}".strip())
    tokens = bm25s.tokenize(texts, show_progress=False)
    if not any(tokens.vocab):
        raise DataError(
            f"the {len(texts)} passages hold no word of two letters or more that is no English "
            "stop word, and BM25 finds by those alone. Search by vectors instead."
        )
    index = bm25s.BM25()
    index.index(tokens, show_progress=False)
    words = bm25s.tokenize([query.text for query in queries], return_ids=False, show_progress=False)
    rankings: Rankings = {}
    for query, of_query in zip(queries, words, strict=True):
        scores_P = index.get_scores_from_ids(index.get_tokens_ids(of_query))
        rankings[query.id] = [
            Hit(ids[place], float(scores_P[place])) for place in _highest(scores_P, depth)
        ]
    return rankings


def _highest(scores_P: np.ndarray, depth: int) -> list[int]:
    """The places of at most `depth` scores above 0, highest first; equal scores keep their order.

    bm25s 0.3 itself takes equal scores in the order in which numpy's partition leaves them, which
    differs from processor to processor.
    """
    least = np.partition(scores_P, -depth)[-depth] if depth < len(scores_P) else 0.0
    places = np.flatnonzero((scores_P >= least) & (scores_P > 0))
    return places[np.argsort(-scores_P[places], kind="stable")][:depth].tolist()
