"""Rankings of passages: run files and relevance judgements in the field's formats, and trec_eval's
measures of them.

A run maps a question to its hits, best first. Judgements (qrels) map a question to the relevance of
passages, an integer; above 0 is relevant.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from trainer.data.readers.rankings import Hit, Qrels, Run
from trainer.errors import ConfigError, DataError
from trainer.files.atomic import refusals

logger = logging.getLogger(__name__)

RunFormat = Literal["trec", "tevatron", "msmarco"]


# Files
# --------------------------------------------------------------------------------------------------


def write_run(
    path: Path, run: Mapping[str, Iterable[Hit]], *, format: RunFormat = "trec", tag: str = "dense"
) -> None:
    """The run as a file, whole or as it was before.

    trec: question, Q0, passage, rank from 1, score, tag, with blanks. tevatron: question, passage,
    score, with tabs. msmarco: question, passage, rank from 1, with tabs. Scores are written so that
    float32 reads back the same.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with refusals(path):
        with temporary.open("w", encoding="utf-8") as file:
            for question, hits in run.items():
                for rank, hit in enumerate(hits, start=1):
                    file.write(_line(question, hit, rank, format, tag))
        temporary.replace(path)


def _line(question: str, hit: Hit, rank: int, format: RunFormat, tag: str) -> str:
    if format == "msmarco":
        return f"{question}\t{hit.passage}\t{rank}\n"
    score = str(
        np.float32(hit.score)
    )  # the shortest text that is the same float32, and never without a point
    if format == "tevatron":
        return f"{question}\t{hit.passage}\t{score}\n"
    return f"{question} Q0 {hit.passage} {rank} {score} {tag}\n"


def run_of(
    queries: Sequence[str],
    passages: Sequence[str],
    *,
    rows: np.ndarray,
    scores: np.ndarray,
    is_without_query: bool = False,
    depth: int | None = None,
) -> Run:
    """The run of a search: (Q, K) positions among `passages`, -1 for none, and their scores.

    is_without_query: leaves out the passage that has the question's own id (ArguAna, Quora). depth:
    hits kept.
    """
    run: Run = {}
    for query, of_rows, of_scores in zip(queries, rows.tolist(), scores.tolist(), strict=True):
        found = (
            Hit(passages[int(row)], score)
            for row, score in zip(of_rows, of_scores, strict=True)
            if row >= 0
        )
        run[query] = [hit for hit in found if not (is_without_query and hit.passage == query)][
            :depth
        ]
    return run


def without_query(run: Run) -> Run:
    """The run without hits that have the question's own id."""
    return {
        question: [hit for hit in hits if hit.passage != question] for question, hits in run.items()
    }


# Measures
# --------------------------------------------------------------------------------------------------


def judged(run: Run, qrels: Qrels, *, at: Sequence[int]) -> dict[str, float]:
    """recall@k, mrr@k, ndcg@k and success@k for each k of `at`, and map, mrr and ndcg of whole
    rankings: their means.

    The mean is over the questions with a relevant passage; one that the run lacks counts 0
    (trec_eval -c). DataError when the run has none of them. As in trec_eval, equal scores are
    ordered by passage id, the last one first.
    """
    wanted = [question for question, judgements in qrels.items() if max(judgements.values()) > 0]
    missing = sum(question not in run for question in wanted)
    if missing == len(wanted):
        raise DataError(
            f"the run ranks passages for none of the {len(wanted)} questions that have a "
            "relevant one: its ids are "
            f"like {next(iter(run), None)!r}, theirs like {next(iter(wanted), None)!r}. Give "
            "these questions' run."
        )
    if missing:
        logger.warning(
            "%d of %d judged questions are not in the run and count 0", missing, len(wanted)
        )
    totals: dict[str, float] = {}
    for question in wanted:
        for name, value in judged_question(run.get(question, []), qrels[question], at=at).items():
            totals[name] = totals.get(name, 0.0) + value
    return {name: value / len(wanted) for name, value in totals.items()}


def judged_question(
    hits: Sequence[Hit], judgements: Mapping[str, int], *, at: Sequence[int]
) -> dict[str, float]:
    """The same of one question, which must have a relevant passage."""
    ordered = sorted(hits, key=lambda hit: (np.float32(hit.score), hit.passage), reverse=True)
    gains = [max(0, judgements.get(hit.passage, 0)) for hit in ordered]
    ideal = sorted((gain for gain in judgements.values() if gain > 0), reverse=True)
    found = {
        "map": average_precision(gains, len(ideal)),
        "mrr": reciprocal_rank(gains),
        "ndcg": ndcg(gains, ideal),
    }
    for k in at:
        found[f"recall@{k}"] = sum(gain > 0 for gain in gains[:k]) / len(ideal)
        found[f"success@{k}"] = float(any(gains[:k]))
        found[f"mrr@{k}"] = reciprocal_rank(gains[:k])
        found[f"ndcg@{k}"] = ndcg(gains[:k], ideal[:k])
    return found


def average_precision(gains: Sequence[int], num_relevant: int) -> float:
    """The precision at each relevant hit, averaged over all relevant passages, found or not."""
    ranks = [rank for rank, gain in enumerate(gains, start=1) if gain > 0]
    return sum(number / rank for number, rank in enumerate(ranks, start=1)) / num_relevant


def reciprocal_rank(gains: Sequence[int]) -> float:
    """1 / rank of the first relevant hit; 0 without one."""
    return next((1 / rank for rank, gain in enumerate(gains, start=1) if gain > 0), 0.0)


def ndcg(gains: Sequence[int], ideal: Sequence[int]) -> float:
    """Discounted gain over that of the ideal ranking. The gain is the relevance itself, the
    discount log2(rank + 1).
    """
    return _discounted(gains) / _discounted(ideal)


def _discounted(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, start=1))


# What a reader makes of a ranking
# ---------------------------------------------------------------------------------


def agreement(places: Sequence[int], *, at: Sequence[int]) -> dict[str, float]:
    """How far one question's ranking is from its reader's. places: by rank, the passage's place in
    the reader's order.

    inversions: pairs in the wrong order. overlap@k: the share of the first k that are the reader's
    first k. reach@k: how deep one must go to have all of the reader's first k. Source: FiD's
    evaluation of retrievers.
    """
    found = {"inversions": float(_inversions(places))}
    for k in at:
        if k <= len(places):
            found[f"overlap@{k}"] = sum(place < k for place in places[:k]) / k
            found[f"reach@{k}"] = float(
                max(rank for rank, place in enumerate(places, start=1) if place < k)
            )
    return found


def reader_places(scores: Sequence[float]) -> list[int]:
    """By rank, each passage's place when a reader's `scores` order them; ties keep the ranking's
    order.
    """
    order = sorted(range(len(scores)), key=lambda rank: -scores[rank])
    places = [0] * len(scores)
    for place, rank in enumerate(order):
        places[rank] = place
    return places


def agreed(rankings: Iterable[Sequence[float]], *, at: Sequence[int]) -> dict[str, float]:
    """The means of `agreement` over questions; each gives its passages' reader scores by rank.

    ConfigError when no question has passages.
    """
    values: dict[str, list[float]] = {}
    for scores in rankings:
        for name, value in agreement(reader_places(scores), at=at).items() if scores else ():
            values.setdefault(name, []).append(value)
    if not values:
        raise ConfigError(
            "no question has passages with scores. Give the file of `evaluate --write_scores`."
        )
    return {name: sum(of_name) / len(of_name) for name, of_name in values.items()}


def _inversions(places: Sequence[int]) -> int:
    """Pairs in the wrong order, by insertion into a sorted list."""
    return sum(earlier > later for earlier, later in _pairs(places))


def _pairs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((places[i], places[j]) for j in range(len(places)) for i in range(j))
