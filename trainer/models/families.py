"""The families of bases that are supported, as transformers calls them (model_type), and the
refusal of any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.errors import ConfigError

# Decoders with a list of blocks whose positions are rotations, and all of them: GPTBigCode's
# positions are learnt.
ROTARY = ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "gemma2", "gemma3_text")
DECODERS = ("gpt_bigcode", *ROTARY)
# Others that packed/stock.py reads as streams. What is in none of these lists is padded.
STOCK = ("bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "granite", "cohere")
# Those with T5's encoder, which packed/t5_encoder.py runs on streams. T5 v1.1, flan-T5 and ByT5 are
# of the first one.
T5 = ("t5", "mt5", "umt5")


def check_family(config: Any, families: Sequence[str], *, advice: str) -> None:
    """ConfigError when a transformers config is of none of these families.

    advice: sentences that say why, and what to choose.
    """
    if config.model_type in families:
        return
    supported = ", ".join(map(repr, families))
    raise ConfigError(
        f"base model: got model_type {config.model_type!r}, want one of {supported}. {advice}"
    )
