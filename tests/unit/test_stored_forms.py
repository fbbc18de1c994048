"""Vectors in every stored form: what they become again, what a search finds of them, what is told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.vector_folders import write_vectors
from tests.wording import refused
from trainer.retrieval import embeddings, stored_forms
from trainer.retrieval.exact_search import search


def normal(rows: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def test_int8_is_off_by_half_a_step_at_most() -> None:
    exact = normal(50, 24) * np.float32(7)
    stored = stored_forms.store(exact, "int8")
    steps = np.abs(exact).max(axis=1, keepdims=True) / 127
    assert (np.abs(stored_forms.floats(stored) - exact) <= 0.5001 * steps).all()
    assert np.abs(stored["values"]).max(axis=1).tolist() == [127] * 50


def test_a_binary_vector_has_the_signs_and_its_own_product() -> None:
    exact = normal(50, 24)
    numbers = stored_forms.floats(stored_forms.store(exact, "binary"))
    np.testing.assert_array_equal(numbers > 0, exact > 0)
    np.testing.assert_allclose((numbers * exact).sum(axis=1), (exact**2).sum(axis=1), rtol=1e-5)


@pytest.mark.parametrize("form", stored_forms.SMALL)
def test_a_vector_of_zeros_stays_one(form: stored_forms.Form) -> None:
    numbers = stored_forms.floats(stored_forms.store(np.zeros((3, 8), np.float32), form))
    assert not numbers.any()
    assert numbers.shape == (3, 8)


def test_a_binary_vector_fills_its_bytes() -> None:
    with refused("binary_width", width=12):
        stored_forms.store(normal(2, 12), "binary")


@pytest.mark.parametrize(("form", "bytes_of_a_vector"), [("int8", 36), ("binary", 8)])
def test_a_folder_of_small_vectors_is_searched_and_says_its_recall(
    form: stored_forms.Form, bytes_of_a_vector: int, tmp_path: Path
) -> None:
    exact = normal(600, 32)
    vectors = write_vectors(tmp_path / "v", exact, form=form, shard_rows=250)
    assert {shard.dtype.itemsize for shard in vectors.vectors} == {bytes_of_a_vector}
    embeddings.verify(vectors)
    numbers = np.concatenate([stored_forms.floats(shard) for shard in vectors.vectors])
    hits = search(exact[:5], vectors.vectors, depth=10)
    twin = np.argsort(-(exact[:5] @ numbers.T), axis=1, kind="stable")[:, :10]
    np.testing.assert_array_equal(hits.rows, twin)
    meta = json.loads((tmp_path / "v" / "meta.json").read_text())
    assert meta["recall"] == vectors.recall
    assert set(vectors.recall) == {"10", "100"}
    least = {"int8": 0.95, "binary": 0.3}[form]
    assert least < vectors.recall["10"] < 1


def test_the_recall_is_that_of_a_search_for_each_sampled_vector() -> None:
    exact = normal(64, 16)
    stored = stored_forms.store(exact, "binary")
    numbers, shares = stored_forms.floats(stored), []
    for row, vector in enumerate(exact):
        others = [n for n in range(64) if n != row]
        nearest, seen = (
            sorted(others, key=lambda n: (-float(vector @ every[n]), n))[:10]
            for every in (exact, numbers)
        )
        shares.append(len({*nearest} & {*seen}) / 10)
    assert stored_forms.recalls(exact, stored) == {"10": pytest.approx(np.mean(shares))}


def test_the_mean_counts_vectors_and_not_files() -> None:
    parts = [{"10": 1.0, "100": 0.5}, {"10": 0.5}, {}]
    assert stored_forms.mean_recalls(parts, [300, 100, 5]) == {"10": 0.875, "100": 0.5}


def test_int8_and_floats_are_searched_together(tmp_path: Path) -> None:
    exact = normal(90, 16)
    parts = [
        write_vectors(tmp_path / "a", exact[:40], form="float32"),
        write_vectors(tmp_path / "b", exact[40:], form="int8"),
    ]
    hits = search(exact[:6], [shard for part in parts for shard in part.vectors], depth=3)
    assert hits.rows[:, 0].tolist() == list(range(6))
