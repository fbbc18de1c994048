"""Vectors of tokens on the disk, pooled, and searched exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import forked
from tests.forked import TRAINER
from tests.ranks import run_on_ranks
from tests.vector_folders import write_vectors
from tests.wording import fault, refused, says
from trainer.data.readers.rankings import read_run
from trainer.protocol.abilities import Side
from trainer.retrieval import embeddings
from trainer.retrieval.late import token_embeddings, token_search
from trainer.retrieval.late.pooling import pooled
from trainer.retrieval.late.token_search import SearchBudget

WIDTH = 8


def texts(count: int, seed: int, longest: int = 7) -> list[np.ndarray]:
    """The vectors of so many texts, of length 1."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        own = random.standard_normal((random.integers(1, longest + 1), WIDTH)).astype(np.float32)
        found.append(own / np.linalg.norm(own, axis=1, keepdims=True))
    return found


def written(
    folder: Path, of_texts: list[np.ndarray], *, side: Side = "passage", **changes: Any
) -> token_embeddings.TokenEmbeddings:
    """A folder of texts p0, p1, ... with these vectors."""
    rows = [{"id": f"p{n}", "text": str(one.tolist())} for n, one in enumerate(of_texts)]
    digest, count = embeddings.digest_of(rows)
    said: dict[str, Any] = {"model": "m", "texts": digest, "side": side, "dtype": "float32"}
    said |= {"count": count, "shard_rows": 16, "mean": False, "pool_factor": 1.0}
    plan = token_embeddings.TokenPlan(**{**said, **changes})

    def encode(of_shard: Any) -> tuple[np.ndarray, np.ndarray]:
        own = [of_texts[int(row["id"][1:])] for row in of_shard]
        return np.concatenate(own), np.array([len(one) for one in own])

    return token_embeddings.write(folder, lambda: iter(rows), encode, plan=plan)


def by_hand(queries: list[np.ndarray], passages: list[np.ndarray]) -> np.ndarray:
    return np.array([[(q @ p.T).max(axis=1).sum() for p in passages] for q in queries])


def test_a_folder_gives_back_every_vector_and_its_text(tmp_path: Path) -> None:
    own = texts(40, 1)
    found = written(tmp_path / "p", own)
    assert found.ids == [f"p{n}" for n in range(40)]
    assert len(found.shards) == 3
    stored = np.concatenate(found.vectors)
    for n, vectors in enumerate(own):
        assert np.array_equal(stored[found.offsets[n] : found.offsets[n + 1]], vectors)
    halves = written(tmp_path / "half", own, dtype="float16")
    assert halves.vectors[0].dtype == np.float16
    assert f"{len(stored)} vectors of {WIDTH} numbers" in found.told[0]


@pytest.mark.parametrize(
    "budget", [None, SearchBudget(vectors=20, products=64, questions=4), SearchBudget(1, 1, 1)]
)
def test_a_search_is_exact_within_any_budget(budget: SearchBudget | None, tmp_path: Path) -> None:
    questions, passages = texts(9, 2, longest=5), texts(50, 3)
    passages[31] = passages[12]  # equal scores stand in the order of the passages
    found = token_search.search(
        written(tmp_path / "q", questions, side="query"),
        [written(tmp_path / "p", passages[:20]), written(tmp_path / "more", passages[20:])],
        depth=10,
        budget=budget,
    )
    scores = by_hand(questions, passages)
    scores[:, 31] = scores[:, 12]
    wanted = np.argsort(-scores, axis=1, kind="stable")[:, :10]
    assert np.array_equal(found.rows, wanted)
    assert np.allclose(found.scores, np.take_along_axis(scores, wanted, 1), atol=1e-5)


def test_no_array_of_a_search_is_larger_than_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    real = token_search.maxsim

    def spy(queries: Any, lengths: Any, passages: Any, of_passages: Any, *, budget: int) -> Any:
        seen.append((len(passages), len(lengths)))
        return real(queries, lengths, passages, of_passages, budget=budget)

    monkeypatch.setattr(token_search, "maxsim", spy)
    questions = written(tmp_path / "q", texts(9, 2), side="query")
    corpus = written(tmp_path / "p", texts(50, 3), shard_rows=50)
    token_search.search(questions, [corpus], depth=3, budget=SearchBudget(30, 100, 4))
    assert max(vectors for vectors, _ in seen) <= 30
    assert max(count for _, count in seen) == 4
    assert sum(vectors for vectors, _ in seen) == 3 * int(corpus.offsets[-1]), "each is read once"


def _searched(folder: Path) -> Any:
    both = [token_embeddings.read(folder / name) for name in ("q", "p")]
    return token_search.search(both[0], both[1:], depth=5, budget=SearchBudget(30, 100, 4))


@pytest.mark.long
def test_ranks_share_a_search_and_the_writing(tmp_path: Path) -> None:
    written(tmp_path / "q", texts(6, 4), side="query")
    run_on_ranks(2, written, tmp_path / "p", texts(40, 5))
    alone = _searched(tmp_path)
    for found in run_on_ranks(2, _searched, tmp_path):
        assert np.array_equal(found.rows, alone.rows)
        assert np.array_equal(found.scores, alone.scores)


def test_scores_of_a_mean_are_divided_by_the_vectors_of_the_question(tmp_path: Path) -> None:
    questions, passages = texts(3, 6), texts(5, 7)
    found = token_search.search(
        written(tmp_path / "q", questions, side="query", mean=True),
        [written(tmp_path / "p", passages, mean=True)],
        depth=5,
    )
    wanted = by_hand(questions, passages) / [[len(one)] for one in questions]
    assert np.allclose(found.scores, -np.sort(-wanted, axis=1), atol=1e-6)


def test_a_killed_encoding_goes_on_and_another_one_is_refused(tmp_path: Path) -> None:
    own = texts(40, 1)
    whole = written(tmp_path / "p", own)
    digest = [shard.sha256 for shard in whole.shards]
    for name in ("meta.json", "ids.txt", "offsets.npy", "vectors-00001.json"):
        (tmp_path / "p" / name).unlink()
    assert [shard.sha256 for shard in written(tmp_path / "p", own).shards] == digest
    with refused("vectors_of_others", key="pool_factor", now=2.0):
        written(tmp_path / "p", own, pool_factor=2.0)
    (tmp_path / "p" / "meta.json").unlink()
    with refused("vectors_unfinished"):
        token_embeddings.read(tmp_path / "p")


def test_what_is_damaged_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "p", texts(20, 1))
    offsets = np.load(tmp_path / "p" / "offsets.npy")
    np.save(tmp_path / "p" / "offsets.npy", offsets + 1)
    with refused("offsets_of_others", folder=tmp_path / "p"):
        _ = token_embeddings.read(tmp_path / "p").vectors
    np.save(tmp_path / "p" / "offsets.npy", offsets)
    vectors = np.load(tmp_path / "p" / "vectors-00000.npy")
    np.save(tmp_path / "p" / "vectors-00000.npy", vectors.reshape(1, -1))
    with refused("vectors_of_another_shape", file=tmp_path / "p" / "vectors-00000.npy"):
        _ = token_embeddings.read(tmp_path / "p").vectors
    bad = texts(3, 1)
    bad[1][0, 0] = np.nan
    with refused("not_finite"):
        written(tmp_path / "bad", bad)


def test_a_search_compares_vectors_of_one_form_and_model(tmp_path: Path) -> None:
    written(tmp_path / "q", texts(3, 1), side="query")
    written(tmp_path / "p", texts(5, 2))
    written(tmp_path / "other", texts(5, 2), model="another")
    write_vectors(tmp_path / "bi", np.concatenate(texts(5, 3)))

    def run(passages: str, *flags: str) -> Any:
        folders = ["--queries", str(tmp_path / "q"), "--passages", str(tmp_path / passages)]
        out = ["--out", str(tmp_path / "run.trec")]
        return forked.run(*TRAINER, "search", *folders, *out, *flags)

    # no more hits than there are passages are kept in memory
    for depth in (2, 10**12):
        done = run("p", "--depth", str(depth))
        assert done.returncode == 0, done.stdout + done.stderr
        hits = read_run(tmp_path / "run.trec")
        assert [len(hits[f"p{n}"]) for n in range(3)] == [min(depth, 5)] * 3
    scores = by_hand(texts(3, 1), texts(5, 2))
    hits = read_run(tmp_path / "run.trec")
    assert [hits[f"p{n}"][0].passage for n in range(3)] == [f"p{n}" for n in scores.argmax(axis=1)]
    for passages, flags, wanted in (
        ("bi", (), fault("vectors_of_two_forms")),
        ("other", (), fault("vectors_of_two_models")),
        ("p", ("--faiss", "Flat"), fault("index_of_token_vectors")),
    ):
        done = run(passages, *flags)
        assert done.returncode == 2, done.stdout + done.stderr
        says(wanted, done.stderr)


# Pooling
# --------------------------------------------------------------------------------------------------


def test_similar_vectors_become_their_mean() -> None:
    one, other = np.eye(WIDTH, dtype=np.float32)[:2]
    near = (one + 0.01 * other) / np.linalg.norm(one + 0.01 * other)
    mean = (one + near) / np.linalg.norm(one + near)
    found = pooled(np.stack([other, one, other, near]), 1.5)
    assert np.allclose(found, [other, mean, other], atol=1e-6), "the first vector stays"
    own = texts(1, 1)[0]
    assert pooled(own, 1) is own


@pytest.mark.long
def test_pooling_is_that_of_sentence_transformers() -> None:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

    for factor in (1.5, 2, 3, 6):
        theirs = HierarchicalTokenPooling(factor)
        for seed in range(8):
            own = texts(1, seed, longest=40)[0]
            found = pooled(own, factor)
            wanted = theirs.pool([torch.from_numpy(own)])[0].numpy()
            assert found.shape == wanted.shape
            assert np.allclose(found[0], wanted[0])
            order = [np.lexsort(one[1:].round(4).T) for one in (found, wanted)]
            assert np.allclose(found[1:][order[0]], wanted[1:][order[1]], atol=1e-5)
