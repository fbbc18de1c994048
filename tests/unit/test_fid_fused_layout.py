"""Packing: every token once, where its passage and its question want it, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.models.packed.layout import grids_of
from trainer.protocol.task import Batch
from trainer.tasks.fid.fused_layout import pack

ROOM = 90  # of a passage, where each gets the same
lengths_of_questions = st.lists(
    st.lists(st.integers(1, ROOM), min_size=1, max_size=5), min_size=1, max_size=4
)
layouts = st.tuples(lengths_of_questions, st.booleans())
Questions = list[list[list[int]]]


def numbered(lengths: list[list[int]]) -> Questions:
    """Questions of such passages; every token is another number."""
    count = iter(range(2, 10**6))
    return [[[next(count) for _ in range(length)] for length in question] for question in lengths]


def scattered(tokens: Tensor, places: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64).index_copy(0, places, tokens)


def passages_in_grids(batch: Batch) -> list[list[int]]:
    """What lies under the True cells of every row of every grid."""
    grids = grids_of(batch)
    cells = scattered(batch["tokens"], batch["cells"], sum(grid.numel() for grid in grids))
    parts = cells.split([grid.numel() for grid in grids])
    return [
        row[mask].tolist()
        for part, grid in zip(parts, grids, strict=True)
        for row, mask in zip(part.view_as(grid), grid, strict=True)
    ]


def questions_fused(batch: Batch) -> list[list[int]]:
    """What lies under the True places of every question."""
    mask = batch["fused_mask"]
    places = scattered(batch["tokens"], batch["fused"], mask.numel()).view_as(mask)
    return [row[own].tolist() for row, own in zip(places, mask, strict=True)]


@given(layouts)
def test_the_stream_holds_passage_after_passage_and_says_which(
    layout: tuple[list[list[int]], bool],
) -> None:
    asked = numbered(layout[0])
    passages = [passage for question in asked for passage in question]
    batch = pack(asked, bucketed=layout[1])
    assert batch["tokens"].tolist() == [token for passage in passages for token in passage]
    assert batch["passage"].tolist() == [
        number for number, passage in enumerate(passages) for _ in passage
    ]
    assert batch["position"].tolist() == [
        place for passage in passages for place in range(len(passage))
    ]
    assert batch["question"].tolist() == [
        number for number, question in enumerate(asked) for _ in question
    ]


@given(layouts)
def test_every_passage_fills_one_row_of_one_grid_from_the_left(
    layout: tuple[list[list[int]], bool],
) -> None:
    asked = numbered(layout[0])
    batch = pack(asked, bucketed=layout[1])
    rows = passages_in_grids(batch)
    assert sorted(rows) == [passage for question in asked for passage in question]
    assert len(batch["cells"].unique()) == len(batch["tokens"])
    for grid in grids_of(batch):
        assert torch.equal(grid, grid.sort(dim=1, descending=True).values)


@given(layouts)
def test_grids_are_as_wide_as_their_longest_passage_rounded_up(
    layout: tuple[list[list[int]], bool],
) -> None:
    for grid in grids_of(pack(numbered(layout[0]), bucketed=layout[1])):
        longest = int(grid.sum(1).max())
        assert grid.shape[1] % 8 == 0
        assert 0 <= grid.shape[1] - longest < 8


@given(lengths_of_questions)
def test_a_bucket_holds_lengths_that_round_up_alike_and_their_absence_one_grid(
    lengths: list[list[int]],
) -> None:
    asked = numbered(lengths)
    rounded = [
        {-(-int(length) // 32) for length in grid.sum(1)}
        for grid in grids_of(pack(asked, bucketed=True))
    ]
    assert all(len(bucket) == 1 for bucket in rounded)
    assert len(set.union(*rounded)) == len(rounded)
    assert len(grids_of(pack(asked, bucketed=False))) == 1


@given(layouts)
def test_a_questions_tokens_lie_close_together_in_their_order(
    layout: tuple[list[list[int]], bool],
) -> None:
    asked = numbered(layout[0])
    batch = pack(asked, bucketed=layout[1])
    assert questions_fused(batch) == [
        [token for passage in question for token in passage] for question in asked
    ]
    counts = batch["fused_mask"].sum(1)
    assert torch.equal(
        batch["fused_mask"], torch.arange(batch["fused_mask"].shape[1]) < counts[:, None]
    )
    assert batch["fused_mask"].shape[1] == -(-int(counts.max()) // 8) * 8


@given(layouts)
def test_with_room_for_each_passage_its_tokens_start_where_it_does(
    layout: tuple[list[list[int]], bool],
) -> None:
    asked = numbered(layout[0])
    batch = pack(asked, bucketed=layout[1], cross_width=ROOM)
    mask = batch["fused_mask"]
    assert mask.shape == (len(asked), max(len(question) for question in asked) * ROOM)
    places = scattered(batch["tokens"], batch["fused"], mask.numel()).view_as(mask)
    for row, question in enumerate(asked):
        for place, passage in enumerate(question):
            start = place * ROOM
            assert places[row, start : start + len(passage)].tolist() == passage
    assert int(mask.sum()) == len(batch["tokens"])
    assert questions_fused(batch) == [
        [token for passage in question for token in passage] for question in asked
    ]


@given(layouts)
@settings(max_examples=20)
def test_places_are_int64_and_masks_are_booleans(layout: tuple[list[list[int]], bool]) -> None:
    batch = pack(numbered(layout[0]), bucketed=layout[1])
    masks = {name for name in batch if name.startswith("grid_") or name == "fused_mask"}
    assert {batch[name].dtype for name in masks} == {torch.bool}
    starts = {"starts", "question_starts"}
    assert {batch[name].dtype for name in starts} == {torch.int32}  # as kernels want them
    assert {batch[name].dtype for name in batch.keys() - masks - starts} == {torch.int64}


def test_more_than_ten_grids_keep_their_order() -> None:
    asked = numbered([[32 * bucket + 1 for bucket in range(12)]])
    batch = pack(asked, bucketed=True)
    widths = [grid.shape[1] for grid in grids_of(batch)]
    assert len(widths) == 12
    assert widths == sorted(widths, reverse=True)
    assert sorted(passages_in_grids(batch)) == asked[0]


def test_buckets_waste_less_than_one_rectangle() -> None:
    asked = numbered([[8, 250, 16], [240, 10, 12, 9]])
    cells = {
        how: sum(grid.numel() for grid in grids_of(pack(asked, bucketed=how)))
        for how in (True, False)
    }
    assert cells[True] == 5 * 16 + 2 * 256
    assert cells[False] == 7 * 256


@pytest.mark.parametrize("asked", [[[]], [[[5]], []], [[[5], []]]])
def test_a_question_without_passages_and_an_empty_passage_are_refused(asked: Questions) -> None:
    with pytest.raises(AssertionError):
        pack(asked, bucketed=True)
