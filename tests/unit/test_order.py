"""Which rows a step trains on depends on seed and step alone: not on the world size, not on where
the run began.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wording import refused
from trainer.data.epochs import Epochs, epoch_order
from trainer.data.order import (
    Sharding,
    Sizes,
    bucketed_step_rows,
    evaluation_batches,
    padding_share,
    sizes_of,
    window_rows,
    windows,
    windows_of_ranks,
)
from trainer.data.token_store import TokenStore, open_store
from trainer.errors import DataError
from trainer.protocol.abilities import RankPlace
from trainer.protocol.task import DRAW, EPOCH, STEP, Batch, Encoded, Task

_ROOT = Path(__file__).resolve().parents[2]


class _Lines:
    """The two methods of a task that windows need: rows are padded, units are their tokens."""

    def __init__(self, fails_on: int | None = None) -> None:
        self.fails_on = fails_on
        self.collated = 0

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        if self.fails_on is not None and any(self.fails_on in row["ids"] for row in rows):
            raise DataError(f"row {self.fails_on} cannot be collated")
        self.collated += 1
        lengths = torch.tensor([len(row["ids"]) for row in rows])
        first = torch.tensor([int(row["ids"][0]) for row in rows])
        return {"first": first, "lengths": lengths}

    def units(self, batch: Batch) -> torch.Tensor:
        return batch["lengths"].sum()

    def as_task(self) -> Task:
        return cast(Task, self)


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    """40 rows; row n holds n, then up to 8 more ids."""
    rows = [{"ids": [n] * (1 + (n * 7) % 9)} for n in range(40)]
    return open_store(
        lambda: rows,
        Encoded,
        encoding_id="e",
        split="train",
        cache_dir=tmp_path,
        length=lambda row: len(row["ids"]),
    )


_SHARDINGS = st.builds(
    lambda micro, world, accumulation: Sharding(micro * world * accumulation, micro, world, 0),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
)
_SEEDS = st.integers(0, 2**32)


def _ranks(sharding: Sharding) -> list[Sharding]:
    return [replace(sharding, rank=rank) for rank in range(sharding.world)]


def _windows(lengths: np.ndarray | Sizes, sharding: Sharding, seed: int) -> list[list[np.ndarray]]:
    """Of the first step, by rank and micro-batch."""
    ranks = _ranks(sharding)
    return [window_rows(0, lengths=lengths, sharding=rank, seed=seed) for rank in ranks]


def _packed(lengths: np.ndarray) -> Sizes:
    return Sizes(lengths[:, None], np.zeros(len(lengths), np.int32), is_packed=True)


def _lengths(num_rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 20, num_rows)


# The order of the rows


@given(num_rows=st.integers(1, 300), seed=_SEEDS, epoch=st.integers(0, 1000))
def test_an_epoch_visits_every_row_once(num_rows: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(num_rows, seed=seed, epoch=epoch)) == list(range(num_rows))


def test_the_order_is_the_one_that_was_published_with_the_first_version() -> None:
    assert epoch_order(10, seed=42, epoch=0).tolist() == [4, 8, 1, 9, 3, 6, 0, 7, 2, 5]
    assert epoch_order(10, seed=42, epoch=1).tolist() == [1, 2, 8, 5, 3, 9, 6, 0, 4, 7]


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_order(50, seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


def test_a_shared_order_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(5, seed=0, epoch=0)[0] = 1


@given(
    num_rows=st.integers(1, 100),
    global_batch=st.integers(1, 100),
    seed=_SEEDS,
    epoch=st.integers(0, 3),
)
def test_no_row_is_repeated_inside_an_epoch(
    num_rows: int, global_batch: int, seed: int, epoch: int
) -> None:
    steps = num_rows // global_batch
    if steps == 0:
        with refused("batch_above_rows", global_batch=global_batch):
            Epochs(num_rows, global_batch, seed).rows(0)
        return
    taken = [Epochs(num_rows, global_batch, seed).rows(epoch * steps + i) for i in range(steps)]
    assert all(len(rows) == global_batch for rows in taken)
    assert len(set(np.concatenate(taken).tolist())) == steps * global_batch


# Ranks and micro-batches


@given(sharding=_SHARDINGS, seed=_SEEDS, step=st.integers(0, 20))
def test_the_ranks_together_hold_exactly_the_global_batch(
    sharding: Sharding, seed: int, step: int
) -> None:
    lengths = _lengths(sharding.global_batch + 7, seed)
    windows_of = [
        window_rows(step, lengths=lengths, sharding=rank, seed=seed) for rank in _ranks(sharding)
    ]
    assert all(
        [len(rows) for rows in window] == [sharding.micro_batch] * sharding.accumulation
        for window in windows_of
    )
    together = sorted(int(row) for window in windows_of for rows in window for row in rows)
    wanted = Epochs(len(lengths), sharding.global_batch, seed).rows(step)
    assert together == sorted(wanted.tolist())


@given(seed=_SEEDS, step=st.integers(0, 20))
def test_the_global_batch_is_the_same_for_any_world_size(seed: int, step: int) -> None:
    lengths = _lengths(50, seed)
    seen = set()
    for world, micro in [(1, 12), (1, 1), (2, 3), (3, 2), (4, 3), (12, 1)]:
        ranks = _ranks(Sharding(12, micro, world, 0))
        found = [
            rows
            for rank in ranks
            for rows in window_rows(step, lengths=lengths, sharding=rank, seed=seed)
        ]
        seen.add(tuple(sorted(np.concatenate(found).tolist())))
    assert len(seen) == 1


@given(sharding=_SHARDINGS, seed=_SEEDS)
def test_ranks_get_rows_of_like_length_at_the_same_time_and_the_longest_first(
    sharding: Sharding, seed: int
) -> None:
    lengths = _lengths(sharding.global_batch, seed)
    per_rank = _windows(lengths, sharding, seed)
    dealt = [lengths[rows] for micro in zip(*per_rank, strict=True) for rows in micro]
    assert np.all(np.diff(np.concatenate(dealt)) <= 0)


@given(sharding=_SHARDINGS, seed=_SEEDS)
def test_of_packed_rows_every_rank_gets_as_many_and_micro_batches_are_of_like_length(
    sharding: Sharding, seed: int
) -> None:
    lengths = _lengths(sharding.global_batch, seed)
    dealt = _windows(_packed(lengths), sharding, seed)
    together = [np.concatenate(micro) for micro in zip(*dealt, strict=True)]
    assert sorted(np.concatenate(together).tolist()) == list(range(sharding.global_batch))
    for longer, shorter in pairwise(together):
        assert lengths[longer].min() >= lengths[shorter].max()
    for rows in [rows for window in dealt for rows in window]:
        assert len(rows) == sharding.micro_batch
        assert np.all(np.diff(lengths[rows]) <= 0)


def test_of_packed_rows_every_rank_gets_about_as_many_tokens() -> None:
    """Of 8 rows each, as lengths of texts are: no rank waits for another."""
    lengths = np.random.default_rng(0).lognormal(5, 0.7, 8 * 8 * 50).astype(np.int64)
    sharding = Sharding(64, 8, 8, 0)
    slowest = {"padded": 0, "packed": 0}
    for step in range(50):
        for name, sizes in (("padded", lengths), ("packed", _packed(lengths))):
            (of_ranks,) = windows_of_ranks(step, lengths=sizes, sharding=sharding, seed=1)
            slowest[name] += max(int(lengths[rows].sum()) for rows in of_ranks)
    assert slowest["packed"] * 8 < 1.04 * lengths.sum()
    assert slowest["padded"] * 8 > 2 * lengths.sum()  # whoever has the longest row takes longest


def test_one_rank_has_the_same_micro_batches_packed_or_not() -> None:
    lengths, sharding = _lengths(96, 3), Sharding(24, 6, 1, 0)
    for step in range(4):
        found = [
            window_rows(step, lengths=sizes, sharding=sharding, seed=1)
            for sizes in (lengths, _packed(lengths))
        ]
        assert np.array_equal(found[0], found[1])


def test_the_accumulation_follows_from_the_other_numbers() -> None:
    assert Sharding(64, 4, 8, 0).accumulation == 2


@pytest.mark.parametrize(
    ("global_batch", "fix"), [(30, "32 or 64"), (70, "64 or 96"), (33, "32 or 64")]
)
def test_a_global_batch_that_cannot_be_dealt_names_the_nearest_that_can(
    global_batch: int, fix: str
) -> None:
    numbers = {"global_batch": global_batch, "micro_batch": 4, "world": 8, "rows": 32}
    with refused("batch_not_dealt", fix=f"{fix}, or another micro_batch", **numbers):
        Sharding(global_batch, 4, 8, 0)


@pytest.mark.parametrize("numbers", [(8, 1, 2, 2), (8, 1, 2, -1), (8, 0, 1, 0), (8, 1, 0, 0)])
def test_a_rank_outside_the_world_is_refused(numbers: tuple[int, int, int, int]) -> None:
    with refused("rank_outside_world"):
        Sharding(*numbers)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_neighbours_that_share_rows_get_the_rows_of_one_rank(
    micro: int, groups: int, sharing: int, by_tokens: bool
) -> None:
    """And other groups get other rows: those that as many ranks would get by themselves."""
    lengths = _packed(_lengths(48, 5))
    tokens = 60 if by_tokens else None
    alone = [Sharding(4 * micro * groups, micro, groups, rank) for rank in range(groups)]
    world = groups * sharing
    for rank in range(world):
        one = alone[rank // sharing]
        shared = replace(one, world=world, rank=rank, sharing=sharing)
        assert (shared.accumulation, shared.place) == (
            one.accumulation,
            RankPlace(rank % sharing, sharing),
        )
        own, want = (
            window_rows(1, lengths=lengths, sharding=replace(each, micro_tokens=tokens), seed=3)
            for each in (shared, one)
        )
        assert all(map(np.array_equal, own, want))


def test_a_world_that_is_no_multiple_of_the_ranks_of_a_row_is_refused() -> None:
    with refused("rank_outside_world"):
        Sharding(8, 1, 3, 0, sharing=2)


# Token budgets and buckets

_BY_TOKENS = st.builds(
    lambda sharding, tokens, bucket: replace(sharding, micro_tokens=tokens, bucket_steps=bucket),
    _SHARDINGS,
    st.integers(1, 80),
    st.integers(1, 4),
)


@given(sharding=_BY_TOKENS, seed=_SEEDS, step=st.integers(0, 20))
def test_micro_batches_keep_to_their_tokens_and_rows_and_all_ranks_get_equally_many(
    sharding: Sharding, seed: int, step: int
) -> None:
    lengths = _lengths(5 * sharding.global_batch + 3, seed)
    of_ranks = [
        window_rows(step, lengths=lengths, sharding=rank, seed=seed) for rank in _ranks(sharding)
    ]
    assert len({len(window) for window in of_ranks}) == 1
    for rows in (rows for window in of_ranks for rows in window):
        assert 1 <= len(rows) <= sharding.micro_batch
        assert len(rows) == 1 or len(rows) * lengths[rows].max() <= (sharding.micro_tokens or 0)


@given(sharding=_BY_TOKENS, seed=_SEEDS, step=st.integers(0, 20))
def test_a_step_holds_the_same_rows_for_any_world_size_and_budget(
    sharding: Sharding, seed: int, step: int
) -> None:
    lengths = _lengths(5 * sharding.global_batch + 3, seed)
    one = replace(sharding, world=1, micro_batch=1, micro_tokens=None)
    found = [
        sorted(
            int(row)
            for rank in _ranks(dealt)
            for rows in window_rows(step, lengths=lengths, sharding=rank, seed=seed)
            for row in rows
        )
        for dealt in (sharding, one)
    ]
    assert found[0] == found[1]


@given(seed=_SEEDS, epoch=st.integers(0, 3), bucket=st.integers(1, 5))
def test_an_epoch_in_buckets_has_the_rows_of_one_without(
    seed: int, epoch: int, bucket: int
) -> None:
    lengths = _lengths(43, seed)
    steps = range(epoch * 10, epoch * 10 + 10)
    plain = [Epochs(43, 4, seed).rows(step) for step in steps]
    sorted_ones = [
        bucketed_step_rows(step, lengths, epochs=Epochs(len(lengths), 4, seed), bucket_steps=bucket)
        for step in steps
    ]
    assert sorted(np.concatenate(plain)) == sorted(np.concatenate(sorted_ones))


def test_buckets_hold_rows_of_like_length_in_a_drawn_order() -> None:
    lengths = np.random.default_rng(0).permutation(400)
    steps = [
        bucketed_step_rows(step, lengths, epochs=Epochs(len(lengths), 10, 3), bucket_steps=40)
        for step in range(40)
    ]
    assert all(np.ptp(lengths[rows]) == 9 for rows in steps)
    firsts = [int(lengths[rows].max()) for rows in steps]
    assert firsts != sorted(firsts) != firsts[::-1]
    again = [
        bucketed_step_rows(step, lengths, epochs=Epochs(len(lengths), 10, 3), bucket_steps=40)
        for step in range(40, 80)
    ]
    assert [int(lengths[rows].max()) for rows in again] != firsts


def test_rows_in_their_given_order_are_never_bucketed() -> None:
    lengths = _lengths(40, 1)
    assert bucketed_step_rows(
        2, lengths, epochs=Epochs(len(lengths), 4, None), bucket_steps=5
    ).tolist() == [
        8,
        9,
        10,
        11,
    ]


def test_packed_rows_fill_a_budget_of_tokens_by_their_own_lengths_and_pad_nothing() -> None:
    lengths = np.array([[40], [10], [10], [10], [10], [10]])
    padded, packed = (
        Sizes(lengths, np.zeros(6, np.int32), is_packed=packed) for packed in (False, True)
    )
    sharding = Sharding(6, 6, 1, 0, micro_tokens=60)
    cut = [
        [len(rows) for rows in window_rows(0, lengths=sizes, sharding=sharding, seed=1)]
        for sizes in (padded, packed)
    ]
    assert cut == [[1, 5], [3, 3]]
    whole = replace(sharding, micro_tokens=None)
    assert padding_share(padded, whole, seed=1, steps=1) == pytest.approx(1 - 90 / 240)
    assert padding_share(packed, whole, seed=1, steps=1) == 0.0


def test_the_padding_share_is_what_is_padded_of_what_is_computed() -> None:
    lengths = np.array([4, 2, 3, 3])
    assert padding_share(lengths, Sharding(4, 4, 1, 0), seed=None, steps=1) == 1 - 12 / 16
    assert padding_share(lengths, Sharding(4, 2, 1, 0), seed=None, steps=1) == 1 - 12 / (
        2 * 4 + 2 * 3
    )
    assert padding_share(lengths, Sharding(4, 2, 2, 0), seed=None, steps=1) == 1 - 12 / (
        2 * 4 + 2 * 3
    )


def test_buckets_and_token_budgets_pad_less() -> None:
    lengths = np.random.default_rng(0).lognormal(4, 1, 2000).astype(int) + 1
    rows = Sharding(32, 8, 2, 0)
    tokens = replace(rows, micro_batch=16, micro_tokens=2048, bucket_steps=16)
    assert padding_share(lengths, tokens, seed=1, steps=32) < 0.35 * padding_share(
        lengths, rows, seed=1, steps=32
    )


# Kinds, and fields that are padded by themselves


def _questions_and_contexts(num_rows: int, seed: int) -> Sizes:
    """Short questions on long contexts, and contexts that are predicted: as long on both sides."""
    random = np.random.default_rng(seed)
    kinds = random.integers(0, 2, num_rows)
    contexts = random.integers(20, 90, num_rows)
    return Sizes(
        np.stack([np.where(kinds, contexts, random.integers(5, 12, num_rows)), contexts], axis=1),
        kinds,
    )


@given(sharding=_BY_TOKENS, seed=_SEEDS, step=st.integers(0, 20))
def test_kinds_share_no_micro_batch_and_every_axis_counts_with_its_longest_row(
    sharding: Sharding, seed: int, step: int
) -> None:
    sharding = replace(sharding, micro_tokens=10 * (sharding.micro_tokens or 1))
    sizes = _questions_and_contexts(5 * sharding.global_batch + 3, seed)
    of_ranks = [
        window_rows(step, lengths=sizes, sharding=rank, seed=seed) for rank in _ranks(sharding)
    ]
    assert len({len(window) for window in of_ranks}) == 1
    for rows in (rows for window in of_ranks for rows in window):
        assert len(set(sizes.kinds_N[rows])) == 1
        computed = len(rows) * sizes.axes_NA[rows].max(axis=0).sum()
        assert len(rows) == 1 or (
            computed <= (sharding.micro_tokens or 0) and len(rows) <= sharding.micro_batch
        )
    taken = sorted(int(row) for window in of_ranks for rows in window for row in rows)
    one = replace(sharding, world=1, rank=0)
    assert taken == sorted(
        np.concatenate(window_rows(step, lengths=sizes, sharding=one, seed=seed)).tolist()
    )


def test_a_row_is_padded_on_each_axis_by_itself() -> None:
    sizes = Sizes(np.array([[1, 9], [8, 2]]), np.zeros(2, dtype=int))
    assert padding_share(sizes, Sharding(2, 2, 1, 0), seed=None, steps=1) == 1 - 20 / (2 * (8 + 9))
    assert padding_share(np.array([10, 10]), Sharding(2, 2, 1, 0), seed=None, steps=1) == 0


def test_keeping_kinds_apart_and_budgets_pad_little() -> None:
    sizes = _questions_and_contexts(4000, 1)
    mixed = Sizes(sizes.axes_NA, np.zeros(4000, dtype=int))
    sharding = Sharding(512, 64, 2, 0, micro_tokens=2048)
    apart = padding_share(sizes, sharding, seed=1, steps=10)
    assert apart < 0.1
    assert apart < 0.5 * padding_share(mixed, sharding, seed=1, steps=10)


def test_the_sizes_of_a_store_are_those_of_the_fields_that_its_task_pads(tmp_path: Path) -> None:
    rows = [{"a": [1] * n, "b": [2] * (n % 3), "kind": [n % 2]} for n in range(1, 7)]
    store = open_store(
        lambda: rows,
        Encoded,
        encoding_id="e",
        split="train",
        cache_dir=tmp_path,
        length=lambda row: len(row["a"]) + len(row["b"]),
    )

    class Padded:
        kind: str | None = "kind"

        def padded_fields(self) -> Sequence[str]:
            return "a", "b"

        def kind_field(self) -> str | None:
            return self.kind

    found, task = sizes_of(store, Padded()), Padded()
    assert found.axes_NA.tolist() == [[1, 1], [2, 2], [3, 0], [4, 1], [5, 2], [6, 0]]
    assert found.kinds_N.tolist() == [1, 0, 1, 0, 1, 0]
    assert found.lengths_N.tolist() == store.lengths.tolist()
    task.kind = None
    assert sizes_of(store, task).kinds_N.tolist() == [0] * 6
    assert sizes_of(store, object()).axes_NA.tolist() == [[int(length)] for length in store.lengths]


# Windows


@settings(max_examples=20)
@given(start=st.integers(0, 12))
def test_starting_at_a_step_equals_iterating_to_it(start: int) -> None:
    lengths = _lengths(40, 3)
    sharding = Sharding(8, 2, 2, 1)
    whole = [window_rows(step, lengths=lengths, sharding=sharding, seed=1) for step in range(13)]
    later = [
        window_rows(step, lengths=lengths, sharding=sharding, seed=1) for step in range(start, 13)
    ]
    np.testing.assert_array_equal(whole[start:], later)


def test_windows_from_a_later_step_equal_the_rest_of_the_whole_run(store: TokenStore) -> None:
    task, sharding = _Lines().as_task(), Sharding(8, 2, 2, 1)
    whole = list(windows(store, task, sharding, seed=1, start_step=0, stop_step=13))
    later = list(windows(store, task, sharding, seed=1, start_step=7, stop_step=13))
    assert [window.step for window in whole] == list(range(13))
    for ours, theirs in zip(whole[7:], later, strict=True):
        assert ours.step == theirs.step
        assert [batch["first"].tolist() for batch in ours.batches] == [
            batch["first"].tolist() for batch in theirs.batches
        ]


def test_a_window_holds_its_rows_in_batches_and_counts_their_units(store: TokenStore) -> None:
    (window,) = windows(
        store, _Lines().as_task(), Sharding(8, 2, 1, 0), seed=1, start_step=4, stop_step=5
    )
    assert [batch["first"].tolist() for batch in window.batches] == [
        rows.tolist() for rows in window.rows
    ]
    assert len(window.batches) == 4
    assert window.units.dtype == torch.int64
    assert window.units.shape == ()
    assert int(window.units) == int(store.lengths[np.concatenate(window.rows)].sum())


def test_no_window_is_given_when_nothing_is_left(store: TokenStore) -> None:
    assert (
        list(
            windows(
                store, _Lines().as_task(), Sharding(8, 2, 1, 0), seed=1, start_step=5, stop_step=5
            )
        )
        == []
    )


def test_too_few_rows_are_refused_before_the_first_window(store: TokenStore) -> None:
    with refused("batch_above_rows", rows=40, global_batch=64, most=40):
        windows(store, _Lines().as_task(), Sharding(64, 2, 1, 0), seed=1, start_step=0, stop_step=5)


def test_an_error_while_collating_is_raised_where_the_window_is_asked_for(
    store: TokenStore,
) -> None:
    wanted = int(Epochs(40, 8, 1).rows(2)[0])
    source = windows(
        store,
        _Lines(fails_on=wanted).as_task(),
        Sharding(8, 2, 1, 0),
        seed=1,
        start_step=0,
        stop_step=5,
    )
    assert [next(source).step, next(source).step] == [0, 1]
    with pytest.raises(DataError) as caught:
        next(source)
    assert str(caught.value) == f"row {wanted} cannot be collated"
    assert _no_thread_is_left()


class _Draws(_Lines):
    """Keeps what each collated row was given to draw with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, list[int]] = {}

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        for row in rows:
            assert row[DRAW].shape == (1,)
            self.seen.setdefault(int(row["ids"][0]), []).append(int(row[DRAW][0]))
        return super().collate(rows)


def _draws(store: TokenStore, world: int, epoch: int, *, seed: int = 1) -> dict[int, list[int]]:
    """What each row drew in one of the epochs of five steps."""
    together: dict[int, list[int]] = {}
    for rank in range(world):
        task = _Draws()
        sharding = Sharding(global_batch=8, micro_batch=2, world=world, rank=rank)
        list(
            windows(
                store,
                task.as_task(),
                sharding,
                seed=seed,
                start_step=epoch * 5,
                stop_step=epoch * 5 + 5,
            )
        )
        together |= task.seen
    return together


def test_a_row_draws_the_same_on_any_ranks_and_after_a_resume_but_anew_in_every_epoch(
    store: TokenStore,
) -> None:
    first, second = _draws(store, 1, 0), _draws(store, 1, 1)
    assert len(first) == 40
    assert all(len(draws) == 1 and draws[0] >= 0 for draws in first.values())
    assert _draws(store, 2, 0) == first
    assert _draws(store, 2, 1) == second
    assert len({draw for draws in [*first.values(), *second.values()] for draw in draws}) == 80
    assert _draws(store, 1, 0, seed=2) != first


def test_the_epoch_of_each_row_is_told_where_an_epoch_ends_within_a_step(
    store: TokenStore,
) -> None:
    seen: dict[int, list[int]] = {}

    class Epochs(_Lines):
        def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
            for row in rows:
                seen.setdefault(int(row["ids"][0]), []).append(int(row[EPOCH][0]))
            return super().collate(rows)

    sharding = Sharding(12, 3, 1, 0, is_whole=True)  # 40 rows: an epoch ends within the fourth step
    list(windows(store, Epochs().as_task(), sharding, seed=1, start_step=0, stop_step=10))
    assert {row: sorted(epochs) for row, epochs in seen.items()} == {
        n: [0, 1, 2] for n in range(40)
    }


def test_the_number_of_its_step_is_told_to_each_row_from_1_and_after_a_resume(
    store: TokenStore,
) -> None:
    seen: list[list[int]] = []

    class Steps(_Lines):
        def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
            seen.append([int(row[STEP][0]) for row in rows])
            return super().collate(rows)

    sharding = Sharding(8, 4, 1, 0)
    list(windows(store, Steps().as_task(), sharding, seed=1, start_step=0, stop_step=2))
    list(windows(store, Steps().as_task(), sharding, seed=1, start_step=6, stop_step=7))
    assert seen == [[1] * 4, [1] * 4, [2] * 4, [2] * 4, [7] * 4, [7] * 4]


def test_closing_early_ends_the_thread_which_was_never_far_ahead(store: TokenStore) -> None:
    lines = _Lines()
    source = windows(
        store, lines.as_task(), Sharding(8, 8, 1, 0), seed=1, start_step=0, stop_step=10**9
    )
    next(source)
    time.sleep(0.2)
    source.close()
    assert _no_thread_is_left()
    assert lines.collated <= 4  # one taken, two ready, one in hand


def test_no_global_random_number_is_drawn(store: TokenStore) -> None:
    before = _global_random_state()
    list(
        windows(store, _Lines().as_task(), Sharding(8, 2, 1, 0), seed=1, start_step=0, stop_step=9)
    )
    assert _global_random_state() == before


def _global_random_state() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()


@pytest.mark.long
def test_a_script_that_dies_in_mid_epoch_still_ends(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from tests.unit.test_order import _Lines, Encoded, Sharding, open_store, windows
rows = [{{"ids": [n]}} for n in range(8)]
store = open_store(lambda: rows, Encoded, encoding_id="e", split="train", cache_dir=Path({str(tmp_path)!r}), length=len)
source = windows(store, _Lines(), Sharding(4, 2, 1, 0), seed=1, start_step=0, stop_step=10**9)
for window in source:
    raise SystemError("on purpose")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=_ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1
    assert "SystemError: on purpose" in done.stderr


def _no_thread_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "collate"]


# Evaluation


@given(num_rows=st.integers(1, 60), batch=st.integers(1, 9), world=st.integers(1, 9), seed=_SEEDS)
def test_evaluation_counts_every_row_once_in_equally_many_batches(
    num_rows: int, batch: int, world: int, seed: int
) -> None:
    lengths = _lengths(num_rows, seed)
    ranks = [
        evaluation_batches(num_rows, lengths, batch=batch, world=world, rank=rank)
        for rank in range(world)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(1 <= len(rows) <= batch for batches in ranks for rows, _ in batches)
    counted = [
        int(row) for batches in ranks for rows, is_counted in batches if is_counted for row in rows
    ]
    assert sorted(counted) == list(range(num_rows))


def test_evaluation_batches_are_the_same_for_any_world_size_and_begin_with_the_longest() -> None:
    lengths = np.array([3, 9, 1, 7, 5])
    found = set()
    for world in (1, 2, 3):
        ranks = [
            evaluation_batches(5, lengths, batch=2, world=world, rank=rank) for rank in range(world)
        ]
        found.add(
            frozenset(
                tuple(rows.tolist()) for batches in ranks for rows, counted in batches if counted
            )
        )
    assert found == {frozenset({(1, 3), (4, 0), (2,)})}


def test_evaluation_of_nothing_is_refused() -> None:
    with refused("split_without_rows", split="valid"):
        evaluation_batches(0, np.zeros(0), batch=2, world=1, rank=0)
