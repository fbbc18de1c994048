"""How much a model used each passage of a row, and files of rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.data.order import evaluation_batches
from trainer.files.atomic import aside
from trainer.runtime import distributed

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore
    from trainer.protocol.abilities import ScoresPassages
    from trainer.protocol.task import Row
    from trainer.training.scoring import Frozen

logger = logging.getLogger(__name__)


@torch.no_grad()
def passage_scores(
    model: Frozen, task: ScoresPassages, store: TokenStore, num_rows: int, *, batch: int
) -> list[list[float]]:
    """The scores of each of the first `num_rows` rows of `store`, on all ranks."""
    lengths, world, rank = store.lengths[:num_rows], distributed.world(), distributed.rank()
    own: dict[int, list[float]] = {}
    for rows, counted in evaluation_batches(num_rows, lengths, batch=batch, world=world, rank=rank):
        scores = task.passage_scores(model.model, [store[int(row)] for row in rows])
        if counted:
            own.update(zip(rows.tolist(), scores, strict=True))
    by_row = {row: of_row for part in distributed.gather(list(own.items())) for row, of_row in part}
    return [by_row[row] for row in range(num_rows)]


def with_scores(rows: Iterable[Row], scores: Sequence[Sequence[float]]) -> Iterator[Row]:
    for row, of_row in zip(rows, scores, strict=True):
        ctxs: list[Mapping[str, Any]] = row["ctxs"]
        yield {
            **row,
            "ctxs": [{**ctx, "score": score} for ctx, score in zip(ctxs, of_row, strict=True)],
        }


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object a line, or (.json) a list of them. An error leaves an older file as it
    was.
    """
    with aside(path, is_durable=False) as part, part.open("w", encoding="utf-8") as file:
        if path.suffix == ".json":
            file.write("[")
            for number, row in enumerate(rows):
                file.write(("," if number else "") + "\n" + json.dumps(row, ensure_ascii=False))
            file.write("\n]\n")
        else:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    logger.info("wrote %s", path)
