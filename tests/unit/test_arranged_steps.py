"""Steps whose rows belong together: of one topic or one source, and no two of them with the same
thing. They are a function of the seed and the step, and hold every row that they can.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wording import refused
from trainer.data.arranged import told
from trainer.data.arranged.arrangement import Arrangement, arranged
from trainer.data.arranged.clusters import clusters_of, words_of
from trainer.data.arranged.shared import Shared
from trainer.data.epochs import Epochs
from trainer.data.mixed.mixture import Mix, Mixture
from trainer.data.order import Sharding, Sizes, window_rows


def shared_of(things: list[list[int]]) -> Shared:
    rows = np.repeat(np.arange(len(things)), [len(one) for one in things])
    return Shared(rows, np.array([thing for one in things for thing in one]), num_rows=len(things))


def steps_of(epochs: Any, by: Arrangement, steps: int) -> list[np.ndarray]:
    """The rows of each step, by its number alone."""
    found = []
    for step in range(steps):
        pool, place = epochs.pool(step)
        found.append(arranged(epochs, pool, by).rows_SB[place])
    return found


def clashes(steps: list[np.ndarray], things: list[list[int]]) -> int:
    """How many things two rows of a step hold."""
    counts = [Counter(thing for row in rows for thing in set(things[row])) for rows in steps]
    return sum(count > 1 for of_step in counts for count in of_step.values())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_step_has_two_rows_that_share_something(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 4))
    count = data.draw(st.integers(8 * batch, 60))
    held = st.lists(st.integers(0, 40), max_size=2)
    things = [data.draw(held) for _ in range(count - 6 * batch)] + [[] for _ in range(6 * batch)]
    is_whole = data.draw(st.booleans())
    epochs = Epochs(count, batch, data.draw(st.integers(0, 99)), is_whole)
    by = Arrangement(count, shared=shared_of(things))
    steps = steps_of(epochs, by, 3 * count // batch)
    assert not clashes(steps, things)
    assert all(len({*rows}) == batch for rows in steps), "no row twice in a step"


def test_every_row_is_placed_once_where_that_can_be() -> None:
    things = [[row % 50] for row in range(200)]  # four rows of each; 25 steps of 8
    epochs, by = Epochs(200, 8, 3), Arrangement(200, shared=shared_of(things))
    for epoch in range(3):
        steps = [steps_of(epochs, by, 75)[epoch * 25 + place] for place in range(25)]
        assert sorted(np.concatenate(steps)) == list(range(200))
        assert not clashes(steps, things)
    assert told.facts(epochs, by) == {
        "rows": 200,
        "left_out": 0,
        "mixed": 0,
        "sharing": 200,
        "topics": None,
    }


def test_as_many_rows_as_steps_of_one_thing_are_all_placed() -> None:
    things = [[7] if row < 25 else [] for row in range(200)]
    epochs, by = Epochs(200, 8, 3), Arrangement(200, shared=shared_of(things))
    steps = steps_of(epochs, by, 25)
    assert all(sum(row < 25 for row in rows) == 1 for rows in steps)
    assert sorted(np.concatenate(steps)) == list(range(200))


def test_rows_that_no_step_can_take_are_left_out_and_counted() -> None:
    things = [[7] if row < 40 else [] for row in range(200)]  # 25 steps take 25 of the 40
    epochs, by = Epochs(200, 8, 3), Arrangement(200, shared=shared_of(things))
    steps = steps_of(epochs, by, 25)
    trained = np.concatenate(steps)
    assert len({*trained}) == 185
    assert told.facts(epochs, by)["left_out"] == 15
    assert not clashes(steps, things)
    later = np.concatenate(steps_of(epochs, by, 50)[25:])
    assert {*range(40)} - {*trained} != {*range(40)} - {*later}, "others in the next epoch"


def test_steps_that_cannot_be_filled_are_refused() -> None:
    things = [[row % 3] for row in range(24)]
    epochs, by = Epochs(24, 4, 3), Arrangement(24, shared=shared_of(things))
    with refused("step_of_distinct_rows", want=4, got=3):
        steps_of(epochs, by, 1)


def test_a_step_has_one_topic_and_the_rest_shares_steps() -> None:
    topics = np.array([row % 3 for row in range(60)] + [3, 3, 4, 4])  # 20, 20, 20, 2, 2
    epochs, by = Epochs(64, 8, 5), Arrangement(64, topics)
    steps = steps_of(epochs, by, 8)
    assert sorted(np.concatenate(steps)) == list(range(64)), "no row is lost"
    of_one = [rows for rows in steps if len({*topics[rows]}) == 1]
    assert Counter(int(topics[rows[0]]) for rows in of_one) == {0: 2, 1: 2, 2: 2}
    assert told.facts(epochs, by)["mixed"] == 16
    numbers = [int(topics[rows[0]]) for rows in steps]
    assert numbers != sorted(numbers), "topics come in an order that is drawn"


def test_topics_of_different_sizes_are_never_cut_across() -> None:
    topics = np.repeat([0, 1, 2], [44, 21, 7])
    for seed in range(6):  # each draws another order of the topics
        steps = steps_of(Epochs(72, 8, seed), Arrangement(72, topics), 9)
        of_one = Counter(int(topics[rows[0]]) for rows in steps if len({*topics[rows]}) == 1)
        assert of_one == {0: 5, 1: 2}, seed


def test_topics_and_distinct_rows_go_together() -> None:
    generator = np.random.default_rng(1)
    topics = generator.integers(0, 5, 240)
    things = [[int(thing)] for thing in generator.integers(0, 120, 240)]
    epochs, by = Epochs(240, 8, 5), Arrangement(240, topics, shared_of(things))
    steps = steps_of(epochs, by, 30)
    assert not clashes(steps, things)
    facts = told.facts(epochs, by)
    assert facts["left_out"] == 0
    assert sum(len({*topics[rows]}) > 1 for rows in steps) * 8 == facts["mixed"] < 60


@pytest.mark.parametrize("ends", ["again", "stop"])
def test_a_step_of_one_source_has_rows_of_no_other(ends: str) -> None:
    weights = (Fraction(3, 4), Fraction(1, 4))
    mix = Mix(("a", "b"), ((0, weights),), stops=ends == "stop", is_by_step=True)
    mixture = Mixture(mix, (52, 20), 8, 7)
    steps = [mixture.rows(step) for step in range(24)]
    sources = [{int(row >= 52) for row in rows} for rows in steps]
    assert all(len(one) == 1 for one in sources)
    assert sum(one == {0} for one in sources) == 18, "three of four steps"
    of_a = np.concatenate([rows for rows, one in zip(steps, sources, strict=True) if one == {0}])
    assert sorted(of_a[:52]) == list(range(52)), "an epoch of the source has each row once"
    assert all(len({*rows}) == 8 for rows in steps)
    assert mixture.steps_of(100) == (100 if ends == "again" else 8)


def test_topics_within_one_source_each_at_any_number_of_ranks() -> None:
    mix = Mix(("a", "b"), ((0, (Fraction(1, 2), Fraction(1, 2))),), is_by_step=True)
    topics = np.array([row // 16 for row in range(96)])
    by = Arrangement(96, topics, ends=(64, 96), is_by_step=True)
    sizes = Sizes(np.full((96, 1), 5), np.zeros(96, np.int32), False, (64, 32), by)

    def rows(step: int, world: int) -> list[int]:
        found = []
        for rank in range(world):
            sharding = Sharding(8, 2, world, rank, mix=mix)
            parts = window_rows(step, lengths=sizes, sharding=sharding, seed=4)
            found += np.concatenate(parts).tolist()
        return sorted(found)

    for step in reversed(range(16)):  # no step depends on one before
        alone = rows(step, 1)
        assert alone == rows(step, 2) == rows(step, 4)
        assert len({topics[row] for row in alone}) == 1
    trained = [row for step in range(8) for row in rows(step, 1)]
    assert sorted(row for row in trained if row >= 64) == list(range(64, 96))


def test_a_row_that_stands_twice_is_of_the_source_of_its_step() -> None:
    weights = (Fraction(1, 2), Fraction(1, 2))
    mixture = Mixture(Mix(("a", "b"), ((0, weights),), is_by_step=True), (30, 66), 8, 7)
    things = [[7] if row < 20 else [row] for row in range(96)]  # 20 of 30 rows of a share one
    by = Arrangement(96, shared=shared_of(things), ends=(30, 96), is_by_step=True)
    steps = steps_of(mixture, by, 30)
    assert not clashes(steps, things)
    assert all(len({int(row >= 30) for row in rows}) == 1 for rows in steps)
    assert all(len({*rows}) == 8 for rows in steps)


def test_a_mixed_step_keeps_its_number_of_rows_of_each_source() -> None:
    mix = Mix(("a", "b"), ((0, (Fraction(3, 4), Fraction(1, 4))),))
    things = [[row % 30] for row in range(160)]
    mixture = Mixture(mix, (120, 40), 8, 7)
    by = Arrangement(160, shared=shared_of(things), ends=(120, 160))
    steps = steps_of(mixture, by, 40)
    plain = [mixture.rows(step) for step in range(40)]
    assert clashes(plain, things) > 20
    assert not clashes(steps, things)
    for rows, as_drawn in zip(steps, plain, strict=True):
        assert (rows >= 120).sum() == (as_drawn >= 120).sum() == 2
    for step, rows in enumerate(steps):
        assert {*mixture.epochs_of(step, rows)} <= {0, 1, 2}


def test_steps_in_the_order_of_the_data_stay_as_they_are() -> None:
    by = Arrangement(16, np.arange(16) % 2)
    sizes = Sizes(np.full((16, 1), 5), np.zeros(16, np.int32), arrangement=by)
    (rows,) = window_rows(1, lengths=sizes, sharding=Sharding(4, 4, 1, 0), seed=None)
    assert sorted(rows) == [4, 5, 6, 7]


def test_texts_with_common_words_are_of_one_cluster() -> None:
    generator = np.random.default_rng(3)
    kinds = generator.integers(0, 4, 200)
    # a word that all have, and five of the ten of their kind
    texts = [
        [0, *(1 + 10 * kind + generator.choice(10, 5, replace=False))] for kind in kinds.tolist()
    ]
    starts = np.arange(201) * 6
    vectors = words_of(np.concatenate(texts), starts, seed=0)
    assert torch.allclose(vectors.norm(dim=-1), torch.ones(200))
    found = clusters_of(vectors, 8, seed=0)
    assert all(len({*kinds[found == cluster]}) == 1 for cluster in {*found})
    assert (found == clusters_of(vectors, 8, seed=0)).all()
    assert sorted({*found}) == list(range(found.max() + 1))


def test_products_of_word_vectors_are_those_of_tf_idf() -> None:
    generator = np.random.default_rng(4)
    texts = [generator.integers(0, 30, generator.integers(3, 9)) for _ in range(60)]
    starts = np.cumsum([0, *map(len, texts)])
    vectors = words_of(np.concatenate(texts), starts, seed=0).double().numpy()
    counts = np.stack([np.bincount(text, minlength=30) for text in texts]).astype(float)
    weights = np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0)
    weights *= np.log(60 / np.maximum((counts > 0).sum(0), 1))
    weights /= np.linalg.norm(weights, axis=1, keepdims=True)
    differences = vectors @ vectors.T - weights @ weights.T
    assert np.abs(differences).mean() < 0.06  # a projection on 256 numbers: about 1/16 each
    assert np.corrcoef((vectors @ vectors.T).ravel(), (weights @ weights.T).ravel())[0, 1] > 0.95
