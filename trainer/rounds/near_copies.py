"""Texts that are nearly the same: their sets of character n-grams overlap.

The similarity of two texts is the Jaccard index of their n-grams: what both have over what one of
them has. Pairs above a limit are found exactly, without comparing all: two such texts share one of
their rarest n-grams (prefix filtering: Chaudhuri et al. 2006, Bayardo et al. 2007).
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from trainer.data.formats.normal_form import normal_form

GRAM = 4  # characters
_ROUNDING = 1e-9  # a limit such as .7 is no number of float64, and 7 of 10 n-grams reach it


class NearCopy(NamedTuple):
    """A text, and the text of the others that is most like it."""

    text: int  # its place
    other: int
    similarity: float  # from the limit to 1


def grams(text: str) -> frozenset[str]:
    """The n-grams of the words of a text in their normal form, with one blank between two words. A
    shorter text is one n-gram.
    """
    plain = normal_form(text)
    words = " ".join("".join(map(_in_words, plain)).split()) or plain
    return frozenset(words[at : at + GRAM] for at in range(max(1, len(words) - GRAM + 1)))


@lru_cache(maxsize=4096)
def _in_words(character: str) -> str:
    """What words have of a character: itself if it is a letter, a digit or a mark on one, as the
    vowels of Hindi are; nothing of what cannot be seen, such as a soft hyphen; else a blank.
    """
    category = unicodedata.category(character)
    if category == "Cf":
        return ""
    return character if category[0] in "LNM" else " "


def near_copies(texts: Iterable[str], others: Sequence[str], *, least: float) -> list[NearCopy]:
    """Each of `texts` that has a similarity of at least `least`, above 0, with one of `others`; the
    most similar one is named, of equal ones the first.

    The grams of `others` are held in memory, `texts` are read one by one.
    """
    sets = [grams(text) for text in others]
    counts = Counter(gram for own in sets for gram in own)
    holders: dict[str, list[int]] = {}  # by a rare gram, the others that have it
    for place, own in enumerate(sets):
        for gram in _rarest(own, counts, least):
            holders.setdefault(gram, []).append(place)
    found: list[NearCopy] = []
    for number, text in enumerate(texts):
        own = grams(text)
        rare = _rarest(own, counts, least)
        candidates = sorted({place for gram in rare for place in holders.get(gram, ())})
        best = max(
            (NearCopy(number, place, _similarity(own, sets[place])) for place in candidates),
            key=lambda copy: copy.similarity,
            default=None,
        )
        if best is not None and best.similarity >= least - _ROUNDING:
            found.append(best)
    return found


def _rarest(own: frozenset[str], counts: Counter[str], least: float) -> list[str]:
    """The rarest grams of a text, so many that a text of that similarity has at least one of them.

    Two such texts share at least n = ceil(least * len(own)) grams. All but n - 1 are taken of each
    text, in one order for all texts: so those of the two texts have one in common.
    """
    in_order = sorted(own, key=lambda gram: (counts[gram], gram))
    return in_order[: len(own) - math.ceil(least * len(own) - _ROUNDING) + 1]


def _similarity(one: frozenset[str], other: frozenset[str]) -> float:
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)
