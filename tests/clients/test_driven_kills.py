"""A loop of the unmodified SDK whose server, worker, ranks and client are killed: its bits are those
of an undisturbed one, and every operation stands once in the log.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.driven_kills import VICTIMS, compare, drawn
from trainer.proof.operations import examine

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="tinker wants Python 3.11")
SEED, KILLS, STEPS = 9, 6, 30


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_loop_under_kills_has_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    assert compare(tmp_path / "loops", seed=SEED, kills=KILLS, steps=STEPS) == []
    for folder in (tmp_path / "loops").glob("*/base/*/exp_dict.json"):
        assert examine(folder.parent).problems == []


def test_kills_are_drawn_from_the_seed_in_order() -> None:
    points = drawn(SEED, 40, 500)
    assert points == drawn(SEED, 40, 500) != drawn(SEED + 1, 40, 500)
    assert {point.victim for point in points} == {*VICTIMS}
    numbers = [point.operation for point in points]
    assert numbers == sorted(numbers)
    assert 0 < numbers[0] < numbers[-1] < 499
