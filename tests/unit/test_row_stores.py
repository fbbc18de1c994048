"""What a frozen model says of rows is written by one run, however many are started at once, and is
never written again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import run_on_ranks
from trainer.data.readings import likely_tokens
from trainer.data.readings.likely_tokens import LikelyTokens, Row, RowsToRead, TeacherStore


class Rows:
    """Encoded rows in place of a token store: five, of 2 to 6 labels."""

    digest = "these rows"
    lengths = np.arange(2, 7)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Row:
        return {"ids": np.arange(1, 3 + index)}


READING = RowsToRead(
    Rows(),
    every=lambda row: [row],
    num_labels=lambda row: len(row["ids"]),
    draws=False,
)


def store_in(folder: Path) -> TeacherStore:
    return TeacherStore(folder, True, {"teacher": "a"}, 2, torch.float32)


def likeliest(rows: Sequence[Row]) -> list[LikelyTokens]:
    """Of each row's labels two tokens and what is left for all others."""
    counts = [len(row["ids"]) for row in rows]
    return [
        (torch.zeros(n, 2, dtype=torch.int32), torch.full((n, 2), -1.5), torch.full((n,), -0.6))
        for n in counts
    ]


def nobody(rows: Any) -> Any:
    pytest.fail(f"{len(rows)} rows are read a second time")


def test_of_two_runs_that_are_started_at_once_one_computes_and_the_other_waits(
    tmp_path: Path,
) -> None:
    begun = Event()

    def slow(rows: Sequence[Row]) -> list[LikelyTokens]:
        begun.set()
        time.sleep(0.3)
        return likeliest(rows)

    how: dict[str, Any] = {"args": ("train", READING, slow), "kwargs": {"batch": 2}}
    first = Thread(target=store_in(tmp_path).fill, **how)
    first.start()
    assert begun.wait(60)
    second = store_in(tmp_path)
    second.fill("train", READING, nobody, batch=2)
    first.join()
    values = second.read({"train": READING}).of(READING.rows[3])
    assert values is not None
    assert values[1].shape == (5, 2)


def test_a_folder_that_is_whole_is_not_written_again(tmp_path: Path) -> None:
    """It may lie on a disk that is read-only, and another run may read it."""
    store_in(tmp_path).fill("train", READING, likeliest, batch=2)
    (tmp_path / "train.lock").unlink(missing_ok=True)
    before = {path: path.stat() for path in tmp_path.rglob("*") if path.is_file()}
    store_in(tmp_path).fill("train", READING, nobody, batch=2)
    assert {path: path.stat() for path in tmp_path.rglob("*") if path.is_file()} == before


def _filled(folder: Path) -> tuple[int, int]:
    """The rows that this rank computes, and those that are on the disk afterwards."""
    likely_tokens.MIN_SHARDS, likely_tokens.MIN_SHARD_ROWS = 3, 2
    rows_read: list[Row] = []

    def counting(rows: Sequence[Row]) -> list[LikelyTokens]:
        rows_read.extend(rows)
        return likeliest(rows)

    store = store_in(folder)
    store.fill("train", READING, counting, batch=2)
    values = store.read({"train": READING})
    return len(rows_read), sum(values.of(READING.rows[number]) is not None for number in range(5))


def test_ranks_share_the_parts_that_are_missing(tmp_path: Path) -> None:
    counts = run_on_ranks(2, _filled, tmp_path)
    assert counts == [(3, 5), (2, 5)], "rank 0 has the first and the third part of 2, 2 and 1 rows"
