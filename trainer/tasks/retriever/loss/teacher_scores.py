"""A teacher's scores of the passages of rows: they stand in the rows, or in a file that a reranker,
a reader or a search wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.own_rows import OwnRows, Splits
from trainer.data.left_out import note
from trainer.data.readers import fields, retrieved
from trainer.data.readers.folders import required_folder
from trainer.data.readers.jsonl import preview
from trainer.data.readers.rankings import passage_twice, ranked_passages
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row

Scores = dict[str, dict[str, float]]  # by question and passage

SCORES = "scores"  # the field of a row
UNTAUGHT = "queries of which a teacher scored no positive, or no passage besides (it says little)"
_OF_READERS = {".json", ".jsonl"}


def of_row(row: Row, scores: Any, place: str) -> Row:
    """The row with "scores" of its file: one for each passage, positives first, or null for none.
    They replace scores of the passages.
    """
    if scores is None:
        return row
    passages = [*row["positives"], *row["negatives"]]
    if not isinstance(scores, list) or len(scores) != len(passages):
        raise DataError(
            f"{place}: {SCORES!r} is {preview(scores)}, want a number for each of the row's "
            f"{len(passages)} passages, positives first (null: none).",
            place=place,
            field=SCORES,
        )
    scored = [
        _with(passage, None if score is None else fields.finite(score, place, f"{SCORES!r}"))
        for passage, score in zip(passages, scores, strict=True)
    ]
    num_positives = len(row["positives"])
    return {**row, "positives": scored[:num_positives], "negatives": scored[num_positives:]}


def of_file(rows: Iterable[Row], name: str, folder: Path | None) -> Iterator[Row]:
    """The same rows with the scores of a file below --data_path, by the ids of queries and
    passages, in place of their own. A passage that the file does not have is left without one.
    """
    scores = _read(required_folder(folder, name) / name)
    for row in rows:
        known = scores.get(row["id"], {})
        sides = {
            side: [_with(passage, known.get(_id_of(passage))) for passage in row[side]]
            for side in ("positives", "negatives")
        }
        yield {**row, **sides}


def required(rows: Iterable[Row]) -> Iterator[Row]:
    """The same rows. Those without the score of a positive and of another passage are noted.
    DataError at their end if none has a passage with a score: there is nothing to learn from.
    """
    is_scored = False
    for row in rows:
        passages = [*row["positives"], *row["negatives"]]
        num_scored = sum(_is_scored(passage) for passage in passages)
        if num_scored < 2 or not any(_is_scored(passage) for passage in row["positives"]):
            note(f"query {row['id']!r}", UNTAUGHT, field=SCORES)
        is_scored = is_scored or num_scored > 0
        yield row
    if not is_scored:
        raise DataError(
            "no passage of the training rows has a score of a teacher, which loss.distillation (or "
            'false_negatives.by) is to learn from. Give rows "scores", passages "score", or name '
            "a file in data.scores whose ids are those of the rows."
        )


def _read(path: Path) -> Scores:
    """A run file (rankings.ranked_passages), or rows of questions with scored passages (ctxs)."""
    scores: Scores = {}
    if Path(path.name.removesuffix(".gz")).suffix in _OF_READERS:
        own = OwnRows(files=Splits(train=path.name))
        how: dict[str, Any] = {"source": "fid", "contexts": 10**9, "sort_by_score": False}
        for row in retrieved.rows(path.parent, "train", own=own, **how):
            known = scores.setdefault(row["id"], {})
            known |= {one["id"]: one["score"] for one in row["ctxs"] if {"id", "score"} <= {*one}}
        return scores
    for question, (passage, score) in ranked_passages(path):
        if score is None:
            raise DataError(
                f"{path} has ranks, and a teacher gives scores. Write it in the format trec or "
                "tevatron."
            )
        known = scores.setdefault(question, {})
        if passage in known:
            raise passage_twice(question, path)
        known[passage] = score
    return scores


def _with(passage: Any, score: float | None) -> Any:
    """The passage with this score alone; token ids have no place for one."""
    if not isinstance(passage, Mapping):
        return passage
    rest = {name: value for name, value in passage.items() if name != "score"}
    return rest if score is None else {**rest, "score": score}


def _id_of(passage: Any) -> Any:
    return passage.get("id") if isinstance(passage, Mapping) else None


def _is_scored(passage: Any) -> bool:
    return isinstance(passage, Mapping) and "score" in passage
