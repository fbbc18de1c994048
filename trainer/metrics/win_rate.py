"""How often one of two models is preferred, with Wilson's interval. Imports no torch.

Source: Wilson 1927, Probable Inference, the Law of Succession, and Statistical Inference, J. Am.
Statist. Assoc. 22.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

Side = Literal["before", "after"]  # the model compared with, and the trained one
Preferred = Literal["before", "after", "equal"]

LEVEL = 0.95
_POINTS: dict[Preferred, float] = {"after": 1.0, "equal": 0.5, "before": 0.0}


@dataclass(frozen=True)
class WinRate:
    """How often the trained model's answer is preferred."""

    pairs: int  # of answers that were compared
    wins: int  # pairs of which most preferred the trained model's answer
    losses: int
    equal: int
    rate: float  # the mean over pairs: 1 for the trained model, 0 for the other one, 1/2 for equal
    low: float  # the ends of its interval
    high: float

    @property
    def words(self) -> str:
        """What is shown, as one sentence."""
        ends = f"{100 * self.low:.1f} to {100 * self.high:.1f}"
        counts = f"{self.wins} won, {self.losses} lost, {self.equal} equal"
        return (
            f"{100 * self.rate:.1f}% of {self.pairs} pairs (95%: {ends}; {counts}): {self._result}"
        )

    @property
    def _result(self) -> str:
        if self.low > 0.5:
            return "the trained model is preferred"
        return "the other model is preferred" if self.high < 0.5 else "no preference shown"


def majority(choices: Collection[Preferred]) -> Preferred:
    """What most of several choices of one pair prefer; "equal" where they balance."""
    mean = _mean(choices)
    if mean == 0.5:
        return "equal"
    return "after" if mean > 0.5 else "before"


def win_rate(choices: Mapping[str, Sequence[Preferred]]) -> WinRate | None:
    """The win rate of the trained model. choices: pair -> what people preferred, one or more.

    A pair counts once, however many looked at it, for choices of one pair are not independent. What
    a pair gives is between 0 and 1, so its variance is at most that of a coin with the same mean:
    Wilson's interval is wide enough, also with equal ones. None without pairs.
    """
    if not choices:
        return None
    results = [majority(of_pair) for of_pair in choices.values()]
    rate = sum(map(_mean, choices.values())) / len(choices)
    low, high = wilson(rate, len(choices))
    return WinRate(
        pairs=len(results),
        wins=results.count("after"),
        losses=results.count("before"),
        equal=results.count("equal"),
        rate=rate,
        low=low,
        high=high,
    )


def wilson(share: float, num: int) -> tuple[float, float]:
    """The ends of Wilson's interval of a share of `num` independent cases, at LEVEL."""
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    scale = 1 + z * z / num
    middle = (share + z * z / (2 * num)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return max(0.0, middle - half), min(1.0, middle + half)


def _mean(choices: Collection[Preferred]) -> float:
    return sum(_POINTS[one] for one in choices) / len(choices)
