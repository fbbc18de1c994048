"""Student's t distribution, for the few numbers that small samples need of it. No scipy."""

from __future__ import annotations

import math

_ALMOST_NORMAL = 1000  # degrees of freedom from which on nothing shows in four digits


def within(t: float, degrees: int) -> float:
    """The probability that a t of so many degrees of freedom (1 or more) lies between -t and t.

    Source: Abramowitz & Stegun 1964, 26.7.3 and 26.7.4.
    """
    degrees = min(degrees, _ALMOST_NORMAL)
    angle = math.atan(t / math.sqrt(degrees))
    square, is_odd = math.cos(angle) ** 2, degrees % 2
    term = total = math.cos(angle) if is_odd else 1.0
    for k in range(2 + is_odd, degrees - 1, 2):
        term *= square * (k - 1) / k
        total += term
    if not is_odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if degrees > 1 else 0.0))


def quantile(share: float, degrees: int) -> float:
    """The t between whose negative and which so large a share of the distribution lies."""
    low, high = 0.0, 1.0
    while within(high, degrees) < share:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, degrees) < share else (low, middle)
    return high
