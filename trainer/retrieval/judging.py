"""Every measure of rankings: against judgements, against positives, and by answers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trainer.data.left_out import note
from trainer.data.readers.passages import passages_with_ids
from trainer.data.readers.questions import Query
from trainer.data.readers.rankings import Qrels, Rankings, read_qrels
from trainer.errors import ConfigError, DataError
from trainer.retrieval.answer_recall import answer_recall
from trainer.retrieval.rankings import mean_measures

UNKNOWN = "ids of --only that no ranking, judgement or question has (left out)"


def run_measures(
    rankings: Rankings,
    queries: list[Query],
    qrels: Path | None,
    *,
    passages: Path | None,
    only: set[str] | None,
    at: list[int],
) -> dict[str, float]:
    """Every measure of rankings that the files allow, at each cut-off of `at`.

    qrels: None takes the positives of `queries`; passages: the corpus in which answers are looked
    for; only: the ids of the questions that count. ConfigError when nothing says what is relevant.
    """
    all_judged: Qrels = {} if qrels is None else read_qrels(qrels)
    if only is not None:
        every_id = {*rankings, *all_judged, *(query.id for query in queries)}
        for name in sorted(only - every_id):
            note(f"question {name!r}", UNKNOWN)
        if only.isdisjoint(every_id):
            raise ConfigError(
                f"--only: none of its {len(only)} ids{_such_as(only)} is that of a question of "
                f"--run, --qrels or --queries{_such_as(every_id)}. Give a file of these ids."
            )
    names = {query.id for query in queries} or None  # before --only: it adds no question
    queries = [query for query in queries if only is None or query.id in only]
    judgements: Qrels = {
        query.id: dict.fromkeys(query.positives, 1) for query in queries if query.positives
    }
    if qrels is not None:
        judgements = {
            name: of_query
            for name, of_query in all_judged.items()
            if (names is None or name in names) and (only is None or name in only)
        }
        if not any(value > 0 for of_query in judgements.values() for value in of_query.values()):
            of_these = "" if len(judgements) == len(all_judged) else " of these questions"
            raise DataError(
                f"{qrels} judges no passage{of_these} above 0, want some that are relevant"
                f"{_such_as(all_judged)}. Give the judgements of these questions."
            )
    measures = mean_measures(rankings, judgements, at=at) if judgements else {}
    if passages is not None:
        ids = {hit.passage for query in queries for hit in rankings.get(query.id, [])[: max(at)]}
        measures |= answer_recall(rankings, queries, passages_with_ids(passages, ids), at=at)
    if not measures:
        raise ConfigError(
            "nothing says what is relevant. Give --qrels, or --queries with positives or answers."
        )
    return measures


def _such_as(names: Iterable[str]) -> str:
    """An example, for messages."""
    first = next(iter(sorted(names)), None)
    return "" if first is None else f", such as {first!r},"
