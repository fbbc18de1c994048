"""Which rows of which runs stand in a pack: fair by tokens, and the same again from its layout."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.wording import refused
from trainer.driven.together.rounds import (
    compose,
    filler,
    layout_of_round,
    packs_of_layout,
    refuse_other_world,
)

Queues = dict[str, list[tuple[int, int]]]


def rounds_of(queues: Queues, *, world: int, most_tokens: int) -> list[Counter[str]]:
    """The tokens of each run in each round, until all is done."""
    served = dict.fromkeys(queues, 0)
    rounds: list[Counter[str]] = []
    while any(queues.values()):
        packs = compose(queues, served, world=world, most_tokens=most_tokens)
        counts: Counter[str] = Counter()
        for pack in packs:
            assert len(pack) == 1 or sum(slot.tokens for slot in pack) <= most_tokens
            for slot in pack:
                counts[str(slot.run)] += slot.tokens
                queues[str(slot.run)].remove((slot.row, slot.tokens))
        for run, tokens in counts.items():
            served[run] += tokens
        rounds.append(counts)
    return rounds


@pytest.mark.parametrize("world", [1, 3])
def test_a_large_operation_keeps_no_other_run_waiting(world: int) -> None:
    large = [(number, 60) for number in range(100)]
    queues: Queues = {"a": large, "b": [(0, 10), (1, 30)], "c": [(0, 20)]}
    rounds = rounds_of(queues, world=world, most_tokens=100)
    assert rounds[0]["c"] == 20
    assert rounds[0]["b"] + rounds[1]["b"] == 40
    assert sum(one["a"] for one in rounds) == 6000


def test_runs_that_wait_are_served_alike_whatever_the_lengths_of_their_rows() -> None:
    long, short = [(n, 90) for n in range(20)], [(n, 9) for n in range(200)]
    served: Counter[str] = Counter()
    for counts in rounds_of({"a": long, "b": short}, world=1, most_tokens=100):
        served += counts
        if served["a"] < 1800 and served["b"] < 1800:
            assert abs(served["a"] - served["b"]) <= 100


def test_a_row_longer_than_a_pack_goes_alone_and_none_is_lost() -> None:
    queues: Queues = {"a": [(0, 300), (1, 5)], "b": [(0, 5)]}
    rounds = rounds_of(queues, world=1, most_tokens=100)
    assert sum(rounds, Counter()) == {"a": 305, "b": 5}


def test_a_round_is_packed_again_from_its_layout_with_nobodys_rows_between() -> None:
    queues: Queues = {"a": [(0, 7), (1, 8)], "b": [(0, 3), (1, 4), (2, 5)]}
    packs = compose(queues, {"a": 0, "b": 0}, world=2, most_tokens=20)
    for run in queues:
        again = packs_of_layout(layout_of_round(packs, run), run)
        assert [[s.tokens for s in pack] for pack in again] == [
            [s.tokens for s in pack] for pack in packs
        ]
        own = [[(s.row, s.tokens) for s in pack if s.run == run] for pack in again]
        assert own == [[(s.row, s.tokens) for s in pack if s.run == run] for pack in packs]
        assert {s.run for pack in again for s in pack} <= {run, None}
    assert len(filler(5).tokens) == 5
    assert filler(5).inputs["target_tokens"].size == 0


def test_a_layout_of_other_ranks_is_refused() -> None:
    with refused("shared_other_world", seq=4, was=2, now=1):
        refuse_other_world({"world": 2, "rounds": []}, world=1, seq=4)
