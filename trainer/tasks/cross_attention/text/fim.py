"""Fill in the middle: a text is cut into three parts and reordered, so that the model predicts its
middle from both sides.

Source: Bavarian et al. 2022 (PSM, and SPM variant 2). The places of the cuts are those of
ServiceNow/xc-cache (HEAD 0e90cb8), which also moves the beginning- and end-of-text tokens; here
they keep their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_FIRST_CUT = 4  # the least number of tokens before the first cut


@dataclass(frozen=True)
class Sentinels:
    """The tokens that announce each part; several tokens if the tokenizer has no single one."""

    prefix: list[int]
    middle: list[int]
    suffix: list[int]

    @classmethod
    def of(cls, tokenizer: Any) -> Sentinels:
        """StarCoder's sentinels. Other tokenizers cut these texts into ordinary tokens, as
        published.
        """
        texts = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>")
        return cls(*(tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts))

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all three sentinels."""
        return len(self.prefix) + len(self.middle) + len(self.suffix)


def fill_in_the_middle(
    tokens: Sequence[int], sentinels: Sentinels, *, max_tokens: int, random: np.random.RandomState
) -> list[int]:
    """`tokens` in the order prefix, suffix, middle or, with probability one half, with the suffix
    first.

    The sentinels make it longer; if it exceeds max_tokens, the end of the suffix is cut off. A text
    too short for three parts is returned unchanged.
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
