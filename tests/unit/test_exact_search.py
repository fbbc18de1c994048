"""Search finds what sorting all scores finds, in the same order, whatever the blocks, the ranks and
the dtype.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks import run_on_ranks
from tests.wording import refused
from trainer import devices
from trainer.retrieval import exact_search as searching
from trainer.retrieval.exact_search import search


def integers(rows: int, width: int, seed: int) -> np.ndarray:
    """Small integers: their dot products are exact in any order of summation, and often equal."""
    return np.random.default_rng(seed).integers(-2, 3, (rows, width)).astype(np.float32)


def sorted_out(
    queries: np.ndarray, passages: np.ndarray, depth: int
) -> tuple[np.ndarray, np.ndarray]:
    """The slow twin: all scores, sorted by score and then by position."""
    scores = queries @ passages.T
    rows = np.lexsort((np.broadcast_to(np.arange(len(passages)), scores.shape), -scores), axis=1)[
        :, :depth
    ]
    return rows, np.take_along_axis(scores, rows, axis=1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 99),
    width=st.integers(1, 4),
    count=st.integers(1, 90),
    depth=st.integers(1, 40),
    blocks=st.tuples(st.integers(1, 9), st.integers(1, 50)),
    cut=st.floats(0, 1),
)
def test_search_is_sorting_all_scores_ties_by_position(
    seed: int, width: int, count: int, depth: int, blocks: tuple[int, int], cut: float
) -> None:
    queries, passages, at = (
        integers(5, width, seed),
        integers(count, width, seed + 1),
        int(cut * count),
    )
    query_block, passage_block = blocks
    found = search(
        queries,
        [passages[:at], passages[at:]],
        depth=depth,
        query_block=query_block,
        passage_block=passage_block,
    )
    rows, scores = sorted_out(queries, passages, depth)
    kept = min(depth, count)
    np.testing.assert_array_equal(found.rows[:, :kept], rows)
    np.testing.assert_array_equal(found.scores[:, :kept], scores)
    assert (found.rows[:, kept:] == -1).all()
    assert np.isneginf(found.scores[:, kept:]).all()


@pytest.mark.parametrize("order", ["rising", "falling", "equal"])
def test_passages_in_the_worst_order_are_found_as_well(order: str) -> None:
    values = {"rising": np.arange(500), "falling": np.arange(500)[::-1], "equal": np.zeros(500)}[
        order
    ]
    passages = values.astype(np.float32)[:, None]
    found = search(np.ones((3, 1), dtype=np.float32), [passages], depth=7, passage_block=64)
    assert (
        found.rows[1].tolist()
        == sorted_out(np.ones((1, 1), dtype=np.float32), passages, 7)[0][0].tolist()
    )


@pytest.mark.parametrize("block", [64, None])
@pytest.mark.parametrize("vendor", ["GenuineIntel", "AuthenticAMD", None])
@pytest.mark.parametrize("questions", [1, 8, 9, 33, 70])
def test_every_library_and_layout_of_the_products_finds_the_same(
    questions: int, vendor: str | None, block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor and the number of questions decide by which library and how the products lie;
    a search that fits into one block makes no keys.
    """
    monkeypatch.setattr(devices, "of_processor", {"vendor_id": vendor}.get)
    queries, passages = integers(questions, 5, 0), integers(300, 5, 1)
    parts = [passages[:130], passages[130:]]
    found = search(queries, parts, depth=7, passage_block=block)
    rows, scores = sorted_out(queries, passages, 7)
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_array_equal(found.scores, scores)


def test_the_processor_is_the_one_that_linux_tells() -> None:
    text = Path("/proc/cpuinfo").read_text()
    assert f": {devices.of_processor('model name')}\n" in text
    assert devices.of_processor("no such field") is None


def test_scores_are_computed_in_fp32_of_vectors_stored_in_fp16() -> None:
    passages = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float16) * np.float16(
        300
    )
    queries = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32) * 300
    found = search(queries, [passages], depth=5)  # in fp16 these would be infinite
    exact = queries.astype(np.float64) @ passages.astype(np.float64).T
    np.testing.assert_allclose(found.scores, -np.sort(-exact, axis=1)[:, :5], rtol=1e-5)
    assert np.abs(found.scores).max() > 65504


@pytest.mark.parametrize("depth", [8, 5])  # all with keys, some without
def test_scores_come_back_to_the_last_bit_and_minus_zero_is_zero(depth: int) -> None:
    values = np.array([-3e38, -1.5, -1e-45, -0.0, 0.0, 1e-45, 2.5, 3e38], dtype=np.float32)
    passages = values[:, None]
    found = search(np.ones((1, 1), dtype=np.float32), [passages], depth=depth)
    assert found.rows[0].tolist() == [7, 6, 5, 3, 4, 2, 1, 0][:depth]
    np.testing.assert_array_equal(found.scores[0], values[found.rows[0]])
    assert not np.signbit(found.scores[0][found.scores[0] == 0]).any()


def searched_on_ranks(depth: int) -> tuple[list[list[int]], list[list[float]]]:
    found = search(
        integers(5, 3, 0), [integers(70, 3, 1), integers(31, 3, 2)], depth=depth, passage_block=8
    )
    return found.rows.tolist(), found.scores.tolist()


def test_ranks_share_the_passages_and_all_have_the_hits_of_one() -> None:
    alone = searched_on_ranks(20)
    assert run_on_ranks(2, searched_on_ranks, 20) == [alone, alone]


def test_memory_does_not_grow_with_the_passages() -> None:
    queries = np.ones((64, 16), dtype=np.float32)
    shard = np.random.default_rng(0).standard_normal((4000, 16)).astype(np.float16)
    peaks = []
    for repeated in (1, 25):
        tracemalloc.start()
        search(queries, [shard] * repeated, depth=10, passage_block=1000)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] + 50_000  # all scores of the 100,000 would be 25 MB


@pytest.mark.parametrize("count", [1, 2, 8, 9])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_number_of_questions_finds_what_sorting_finds(
    count: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    queries, passages = integers(count, 8, 5), integers(13_001, 8, 6)
    hits = search(queries, [passages], depth=20)
    rows, scores = sorted_out(queries, passages, 20)
    np.testing.assert_array_equal(hits.rows, rows)
    np.testing.assert_array_equal(hits.scores, scores)


def test_vectors_of_two_widths_are_refused() -> None:
    with refused("vectors_of_two_widths", width=3, other=4):
        search(integers(2, 4, 0), [integers(5, 3, 1)], depth=2)
    with refused("depth_wanted", depth=0):
        search(integers(2, 4, 0), [integers(5, 4, 1)], depth=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_finds_what_the_processor_finds() -> None:
    queries, passages = integers(300, 32, 0), integers(5000, 32, 1)
    found = search(queries, [passages], depth=50, device=torch.device("cuda"), passage_block=512)
    rows, scores = sorted_out(queries, passages, 50)
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_array_equal(found.scores, scores)


def test_keys_order_as_scores_and_then_as_positions() -> None:
    scores = torch.tensor([1.0, 1.0, 2.0, -1.0])
    keys = searching._keys(scores, torch.tensor([4, 2, 9, 0]))
    assert keys.sort(descending=True).indices.tolist() == [2, 1, 0, 3]
    assert torch.equal(searching._scores(keys), scores)
