"""Fill in the middle: a text is cut in three and reordered, so that its middle is predicted from
both sides.

Source: Bavarian et al. 2022 (PSM, and SPM variant 2); ServiceNow/xc-cache (HEAD 0e90cb8) for where
it cuts. There a beginning- and an end-of-text token were moved about with the rest; here they stay
outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_FIRST_CUT = 4  # at least so many tokens stand before the first cut


@dataclass(frozen=True)
class Sentinels:
    """What announces each part; of several tokens where the tokenizer has no single one."""

    prefix: list[int]
    middle: list[int]
    suffix: list[int]

    @classmethod
    def of(cls, tokenizer: Any) -> Sentinels:
        """Those of StarCoder's tokenizer; for others the texts as ordinary tokens, as published."""
        texts = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>")
        return cls(*(tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts))

    @property
    def num_tokens(self) -> int:
        """Of all three."""
        return len(self.prefix) + len(self.middle) + len(self.suffix)


def fill_in_the_middle(
    tokens: Sequence[int], sentinels: Sentinels, *, max_tokens: int, random: np.random.RandomState
) -> list[int]:
    """`tokens` with their parts reordered: prefix, suffix, middle; or, with probability one half,
    suffix first.

    It is longer by the sentinels; of what exceeds max_tokens, the end of the suffix is cut. Texts
    that are too short to be cut in three are left as they are.
    """
    last_cut = min(max_tokens - sentinels.num_tokens - 1, len(tokens) - 1)
    if last_cut <= _FIRST_CUT:
        return list(tokens)
    first, second = sorted(random.randint(_FIRST_CUT, last_cut, size=2).tolist())
    prefix, middle, suffix = list(tokens[:first]), list(tokens[first:second]), list(tokens[second:])
    surplus = len(tokens) + sentinels.num_tokens - max_tokens
    suffix = suffix[: len(suffix) - max(surplus, 0)]
    if random.binomial(1, 0.5):
        return [*sentinels.prefix, *sentinels.suffix, *suffix, *sentinels.middle, *prefix, *middle]
    return [*sentinels.prefix, *prefix, *sentinels.suffix, *suffix, *sentinels.middle, *middle]
