"""Whom benchmarks/best_of_hf.py races: every way of packing and padding, of every task, computes the
loss of ours on the same rows; and its search takes the fastest choice.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.facts import write_facts
from tests.ranks import run_alone

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))

from opponents import rows
from opponents.contest import SETUPS, Contest
from opponents.knobs import FIRST, SPACES, Knobs, search
from opponents.losses import Opponent

STEPS = (0, 1)


def _losses_of_all(name: str, folder: Path) -> dict[str, list[float]]:
    """Two steps' losses of ours and of every choice, on short rows of mixed lengths."""
    for kinds in rows.TEXTS.values():
        median, spread = kinds["mixed"]
        kinds["mixed"] = (max(6, median / 8), spread)
    contest = Contest(name, "mixed", write_facts(folder), size="tiny")
    contest.num_rows = contest.micro_batch = min(4, contest.num_rows)
    step, _ = contest.ours()
    found = {"ours": [step(number) for number in STEPS]}
    for side, spaces in SPACES.items():
        space: dict[str, tuple[Any, ...]] = spaces[name]
        for knobs in {replace(FIRST[side], **{k: v}) for k, vs in space.items() for v in vs}:
            one = Opponent(name, contest.task, contest.model(), knobs)
            found[f"{side}: {knobs}"] = [one.step(*contest.rows(number)) for number in STEPS]
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", list(SETUPS))
def test_every_choice_of_an_opponent_has_the_losses_of_ours(name: str, tmp_path: Path) -> None:
    found = run_alone(_losses_of_all, name, tmp_path)
    assert len(found) > 10
    for choice, losses in found.items():
        assert losses == pytest.approx(found["ours"], rel=1e-5), choice


def test_the_search_combines_the_fastest_values() -> None:
    """Chunks of 4 are fastest only without padding to a multiple of 8."""

    def seconds(knobs: Knobs) -> float | str:
        if knobs.attention == "eager":
            return "it has no such attention"
        return 2.0 + (knobs.multiple == 8) + (0.0 if knobs.chunk == 4 else 0.5)

    space = {"multiple": (8, 1), "chunk": (2, 4, 8), "attention": ("sdpa", "eager")}
    (first, best), *others = search(Knobs(multiple=8), space, seconds)
    assert (first, best) == (2.0, Knobs(chunk=4))
    assert all(knobs.attention == "sdpa" for _, knobs in others)
    assert str(best) == "chunk 4"


def test_lengths_of_a_kind_are_what_they_say() -> None:
    """Uniform rows are equally long, and mixed ones are not."""
    import numpy as np

    drawn = {}
    for kind in ("uniform", "short", "long", "mixed"):
        lengths, random = rows.Lengths("causal_lm", kind, None), np.random.default_rng(1)
        drawn[kind] = [lengths.drawn(random)[0] for _ in range(50)]
    assert set(drawn["uniform"]) == {192}
    assert max(drawn["short"]) < min(drawn["long"]), "they do not overlap"
    assert max(drawn["mixed"]) > 4 * min(drawn["mixed"])
