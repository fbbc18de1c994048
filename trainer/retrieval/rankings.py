"""Rankings of passages: they are written as run files, and measured as trec_eval does.

Rankings map a question to its hits, best first. Judgements (qrels) map a question to the relevance
of passages, an integer; above 0 is relevant.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np

from trainer.data.left_out import note
from trainer.data.readers.rankings import Hit, Qrels, Rankings
from trainer.errors import ConfigError, DataError
from trainer.files.atomic import aside

logger = logging.getLogger(__name__)

RunFormat = Literal["trec", "tevatron", "msmarco"]
_LARGEST = float(np.finfo(np.float32).max)


# Files
# --------------------------------------------------------------------------------------------------


def write_run(
    path: Path,
    rankings: Mapping[str, Iterable[Hit]],
    *,
    format: RunFormat = "trec",
    tag: str = "dense",
) -> None:
    """Write rankings as a run file. An error leaves an older file of this name as it was; DataError
    for a score that is NaN, or beyond float32.

    trec: question, Q0, passage, rank from 1, score, tag, with blanks. tevatron: question, passage,
    score, with tabs. msmarco: question, passage, rank from 1, with tabs. Scores are written so that
    float32 reads back the same.
    """
    with aside(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for question, hits in rankings.items():
            for rank, hit in enumerate(hits, start=1):
                file.write(_line(question, hit, rank, format, tag))


def _line(question: str, hit: Hit, rank: int, format: RunFormat, tag: str) -> str:
    if not abs(hit.score) <= _LARGEST:  # nor is NaN
        raise DataError(
            f"question {question!r}, passage {hit.passage!r}: the score is {hit.score}, which no "
            "float32 holds, and a run file has those. Scale the scores or weights that it is of."
        )
    if format == "msmarco":
        return f"{question}\t{hit.passage}\t{rank}\n"
    # numpy writes the shortest text that reads back as the same float32, always with a point
    score = str(np.float32(hit.score))
    if format == "tevatron":
        return f"{question}\t{hit.passage}\t{score}\n"
    return f"{question} Q0 {hit.passage} {rank} {score} {tag}\n"


def of_search(
    queries: Sequence[str],
    passages: Sequence[str],
    *,
    rows: np.ndarray,
    scores: np.ndarray,
    is_without_query: bool = False,
    depth: int | None = None,
) -> Rankings:
    """The rankings of a search: (Q, K) positions among `passages`, -1 for none, and their scores.

    is_without_query: leaves out the passage that has the question's own id (ArguAna, Quora). depth:
    the most hits of a question; None: all.
    """
    rankings: Rankings = {}
    for query, positions, scores_K in zip(queries, rows.tolist(), scores.tolist(), strict=True):
        hits = (
            Hit(passages[int(row)], score)
            for row, score in zip(positions, scores_K, strict=True)
            if row >= 0
        )
        rankings[query] = [hit for hit in hits if not (is_without_query and hit.passage == query)][
            :depth
        ]
    return rankings


def without_query(rankings: Rankings) -> Rankings:
    """The rankings without hits that have the question's own id."""
    return {
        question: [hit for hit in hits if hit.passage != question]
        for question, hits in rankings.items()
    }


# One ranking of several
# --------------------------------------------------------------------------------------------------

Fusion = Literal["scores", "ranks"]
RANK_CONSTANT = 60  # of Cormack et al. 2009


def fused(
    several: Sequence[Rankings],
    weights: Sequence[float],
    *,
    by: Fusion = "scores",
    depth: int | None = None,
) -> Rankings:
    """The passages of several rankings by the sum of what each gives them, times its weight.

    by "scores": the score, so scaled that the best passage of a question has 1 and the last 0
    (CombSUM with min-max, Lee 1997); equal scores have 1. by "ranks": 1 / (60 + rank) (reciprocal
    rank fusion, Cormack et al. 2009). A passage that a ranking lacks gets 0 of it. Equal sums keep
    the order in which the rankings, one after the other, have the passages. A question that a
    ranking lacks is told. depth: the most hits of a question; None: all.
    """
    questions = dict.fromkeys(question for rankings in several for question in rankings)
    of_all: Rankings = {}
    for question in questions:
        sums: dict[str, float] = {}
        for rankings, weight in zip(several, weights, strict=True):
            if question not in rankings:
                note(
                    f"question {question!r}",
                    "questions that a run lacks (they are fused of the others)",
                )
            for passage, value in _shares(rankings.get(question, []), by):
                sums[passage] = sums.get(passage, 0.0) + weight * value
        hits = [Hit(passage, value) for passage, value in sums.items()]
        of_all[question] = sorted(hits, key=lambda hit: hit.score, reverse=True)[:depth]
    return of_all


def _shares(hits: Sequence[Hit], by: Fusion) -> Iterable[tuple[str, float]]:
    """What a ranking of one question gives its passages, from 0 to 1."""
    if not hits:
        return
    best, last = hits[0].score, hits[-1].score
    for rank, hit in enumerate(hits, start=1):
        if by == "ranks":
            yield hit.passage, 1 / (RANK_CONSTANT + rank)
        else:
            yield hit.passage, 1.0 if best == last else (hit.score - last) / (best - last)


# Measures
# --------------------------------------------------------------------------------------------------


def mean_measures(rankings: Rankings, qrels: Qrels, *, at: Sequence[int]) -> dict[str, float]:
    """The means of recall@k, mrr@k, ndcg@k and success@k for each k of `at`, and of map, mrr and
    ndcg over whole rankings.

    The mean is over the questions with a relevant passage; one that was not ranked counts 0
    (trec_eval -c). DataError when none of them was ranked. As in trec_eval, equal scores are
    ordered by passage id, the last one first.
    """
    questions = [question for question, judgements in qrels.items() if max(judgements.values()) > 0]
    missing = [question for question in questions if question not in rankings]
    if len(missing) == len(questions):
        raise DataError(
            f"the run ranks passages for none of the {len(questions)} questions that have a "
            f"relevant one: its ids are like {next(iter(rankings), None)!r}, theirs like "
            f"{next(iter(questions), None)!r}. Give these questions' run."
        )
    for question in missing:
        note(f"question {question!r}", "judged questions that the run lacks (they count 0)")
    for question in rankings.keys() - set(questions):
        note(f"question {question!r}", "ranked questions without a relevant passage (not measured)")
    # Rankings have an end, so that some relevant passages may be in none of them. If no ranking
    # holds any relevant passage, the ids of the two files are probably not the same.
    ranked = {hit.passage for hits in rankings.values() for hit in hits}
    relevant = {
        passage: question
        for question in questions
        for passage, value in qrels[question].items()
        if value > 0
    }
    strangers = [passage for passage in relevant if passage not in ranked]
    if len(strangers) == len(relevant):
        why = "relevant passages, all of them, that no ranking holds (are their ids the run's?)"
        for passage in strangers:
            note(f"question {relevant[passage]!r}, passage {passage!r}", why)
    elif strangers:
        logger.info(
            "%d of %d relevant passages are in no ranking, the first is %r",
            *(len(strangers), len(relevant), strangers[0]),
        )
    totals: dict[str, float] = {}
    for question in questions:
        for name, value in question_measures(
            rankings.get(question, []), qrels[question], at=at
        ).items():
            totals[name] = totals.get(name, 0.0) + value
    return {name: value / len(questions) for name, value in totals.items()}


def question_measures(
    hits: Sequence[Hit], judgements: Mapping[str, int], *, at: Sequence[int]
) -> dict[str, float]:
    """The measures of one question, which must have a relevant passage (`mean_measures`).

    mrr@k is mrr cut at rank k: the order of ties is trec_eval's for all measures. (ir-measures'
    RR@k, after MS MARCO's program, puts the first passage id first among equal scores.)
    """
    ordered = sorted(hits, key=lambda hit: (np.float32(hit.score), hit.passage), reverse=True)
    gains = [max(0, judgements.get(hit.passage, 0)) for hit in ordered]
    ideal = sorted((gain for gain in judgements.values() if gain > 0), reverse=True)
    measures = {
        "map": average_precision(gains, len(ideal)),
        "mrr": reciprocal_rank(gains),
        "ndcg": ndcg(gains, ideal),
    }
    for k in at:
        measures[f"recall@{k}"] = sum(gain > 0 for gain in gains[:k]) / len(ideal)
        measures[f"success@{k}"] = float(any(gains[:k]))
        measures[f"mrr@{k}"] = reciprocal_rank(gains[:k])
        measures[f"ndcg@{k}"] = ndcg(gains[:k], ideal[:k])
    return measures


def average_precision(gains: Sequence[int], num_relevant: int) -> float:
    """The sum of the precisions at every relevant hit, over the number of relevant passages."""
    ranks = [rank for rank, gain in enumerate(gains, start=1) if gain > 0]
    return sum(number / rank for number, rank in enumerate(ranks, start=1)) / num_relevant


def reciprocal_rank(gains: Sequence[int]) -> float:
    """1 / rank of the first relevant hit; 0 without one."""
    return next((1 / rank for rank, gain in enumerate(gains, start=1) if gain > 0), 0.0)


def ndcg(gains: Sequence[int], ideal: Sequence[int]) -> float:
    """Discounted gain over that of the ideal ranking. The gain is the relevance itself, the
    discount log2(rank + 1).
    """
    return _discounted_gain(gains) / _discounted_gain(ideal)


def _discounted_gain(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, start=1))


# Agreement with a reader
# --------------------------------------------------------------------------------------------------


def agreement(places: Sequence[int], *, at: Sequence[int]) -> dict[str, float]:
    """How well one question's ranking agrees with the order in which its reader puts the passages.

    places: by rank, the passage's place in the reader's order. inversions: pairs in the wrong
    order. overlap@k: the share of the first k that are among the reader's first k. reach@k: the
    depth that holds all of the reader's first k. Source: FiD's evaluation of retrievers.
    """
    inversions = sum(earlier > later for earlier, later in combinations(places, 2))
    measures = {"inversions": float(inversions)}
    for k in at:
        if k <= len(places):
            measures[f"overlap@{k}"] = sum(place < k for place in places[:k]) / k
            measures[f"reach@{k}"] = float(
                max(rank for rank, place in enumerate(places, start=1) if place < k)
            )
    return measures


def reader_places(scores: Sequence[float]) -> list[int]:
    """By rank, each passage's place when a reader's `scores` order them; ties keep the ranking's
    order.
    """
    order = sorted(range(len(scores)), key=lambda rank: -scores[rank])
    places = [0] * len(scores)
    for place, rank in enumerate(order):
        places[rank] = place
    return places


def mean_agreement(rankings: Iterable[Sequence[float]], *, at: Sequence[int]) -> dict[str, float]:
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
    return {name: sum(per_question) / len(per_question) for name, per_question in values.items()}
