"""Epochs that are trained whole: every row once, at any batch, world size and bucket, from any step
on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wording import refused
from trainer.config.block import validate
from trainer.config.schema import Train, steps_between
from trainer.data.epochs import Epochs
from trainer.data.order import Sharding, bucketed_step_rows, window_rows
from trainer.training.session import Cadence

SEEDS = st.one_of(st.none(), st.integers(0, 2**31))
ROWS = st.integers(1, 60)


@st.composite
def whole_epochs(draw: st.DrawFn) -> Epochs:
    num_rows = draw(ROWS)
    return Epochs(num_rows, draw(st.integers(1, num_rows)), draw(SEEDS), is_whole=True)


def steps_of(epochs: Epochs, count: int) -> range:
    return range(math.ceil(epochs.count(count)))


def rows_by_epoch(epochs: Epochs, step: int, rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """(epoch, row) of each row of a step."""
    epoch, later = epochs.epoch(step), epochs.next_epoch_rows(step)
    return ((epoch + (row in later), row) for row in rows.tolist())


def once(num_rows: int, epochs: int) -> Counter[tuple[int, int]]:
    return Counter((epoch, row) for epoch in range(epochs) for row in range(num_rows))


@given(epochs=whole_epochs(), count=st.integers(1, 7))
def test_every_row_of_an_epoch_is_trained_on_once_and_none_twice_in_a_step(
    epochs: Epochs, count: int
) -> None:
    taken: Counter[tuple[int, int]] = Counter()
    for step in steps_of(epochs, count):
        rows = epochs.rows(step)
        assert len(set(rows.tolist())) == len(rows) == epochs.global_batch
        taken.update(rows_by_epoch(epochs, step, rows))
    filled = {name: times for name, times in taken.items() if name[0] == count}
    assert taken - Counter(filled) == once(epochs.num_rows, count)
    assert set(filled.values()) <= {1}
    assert len(filled) == -count * epochs.num_rows % epochs.global_batch


@given(epochs=whole_epochs(), step=st.integers(0, 300), others=st.lists(st.integers(0, 300)))
def test_a_step_depends_on_no_earlier_one(epochs: Epochs, step: int, others: list[int]) -> None:
    wanted = epochs.rows(step).tolist()
    for other in others:
        epochs.rows(other)
    assert epochs.rows(step).tolist() == wanted


@given(epochs=whole_epochs(), bucket=st.integers(2, 5), count=st.integers(1, 5))
def test_buckets_change_no_epoch(epochs: Epochs, bucket: int, count: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 9, epochs.num_rows)
    plain: Counter[tuple[int, int]] = Counter()
    sorted_ones: Counter[tuple[int, int]] = Counter()
    for step in range(math.floor(epochs.count(count))):
        rows = bucketed_step_rows(step, lengths, epochs=epochs, bucket_steps=bucket)
        assert len(set(rows.tolist())) == epochs.global_batch
        sorted_ones.update(rows_by_epoch(epochs, step, rows))
        plain.update(rows_by_epoch(epochs, step, epochs.rows(step)))
    assert sorted_ones == plain


@pytest.mark.parametrize("num_rows", [13, 127, 1000])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("micro_tokens", [None, 40])
def test_ranks_together_have_the_rows_of_one(
    num_rows: int, world: int, micro_tokens: int | None
) -> None:
    lengths = np.random.default_rng(2).integers(1, 20, num_rows)
    alone = Sharding(12, 2, 1, 0, micro_tokens=micro_tokens, bucket_steps=2, is_whole=True)
    epochs = alone.epochs(num_rows, 7)
    for step in steps_of(epochs, 3):
        windows = [
            window_rows(step, lengths=lengths, sharding=one, seed=7)
            for one in (alone, *(replace(alone, world=world, rank=rank) for rank in range(world)))
        ]
        first, *rest = (sorted(np.concatenate(window).tolist()) for window in windows)
        assert sorted(row for of_rank in rest for row in of_rank) == first


def test_as_given_the_last_row_is_trained_on() -> None:
    epochs = Epochs(13, 4, None, is_whole=True)
    assert [epochs.rows(step).tolist() for step in range(4)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 0, 1, 2],
    ]
    assert epochs.next_epoch_rows(3) == {0, 1, 2}


def test_an_epoch_counted_in_steps_is_what_it_was() -> None:
    counted = Epochs(13, 4, 42)
    assert counted.steps == 3
    assert [counted.epoch(step) for step in (0, 2, 3, 5, 6)] == [0, 0, 1, 1, 2]
    assert counted.rows(3).tolist() == Epochs(13, 4, 42)._permutation(1)[:4].tolist()


def train(**changes: object) -> Train:
    return validate(Train, {"epochs": 2, "global_batch": 4, "micro_batch": 2} | changes)


def test_intervals_in_epochs_end_at_the_first_step_behind_them() -> None:
    epoch = Epochs(13, 4, 0, is_whole=True).steps
    assert steps_between("0.5 epoch", epoch) == Fraction(13, 8)
    cadence = Cadence.of(
        train(steps=7, eval_every="1 epoch", save_every="0.5 epoch"), epoch, otherwise=None
    )
    due = [cadence.due(step, 7) for step in range(1, 8)]
    assert [number for number, one in enumerate(due, 1) if one.evaluation] == [4, 7]
    assert [number for number, one in enumerate(due, 1) if one.save] == [2, 4, 5, 7]


@pytest.mark.parametrize(
    "value", ["0 epochs", "half an epoch", "1.5", 0, -1, 2.5, True, "1e1 epoch"]
)
def test_what_is_no_interval_is_refused(value: object) -> None:
    wanted = 'an integer above 0, or a text such as "0.5 epoch"'
    with refused("value_wanted", key="eval_every", wanted=wanted, value=value):
        train(eval_every=value)


def test_a_run_has_an_end() -> None:
    with refused("no_end"):
        validate(Train, {"global_batch": 4, "micro_batch": 2})
