"""Published T5 shapes, for a plan on a machine that cannot reach the Hub. Imports no torch.

Source: the config.json files of google-t5/t5-* and google/t5-v1_1-* on the Hugging Face Hub.
"""

from __future__ import annotations

from typing import Any


def _t5(d_model: int, d_kv: int, d_ff: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    return {
        "model_type": "t5",
        "vocab_size": 32128,
        "d_model": d_model,
        "d_kv": d_kv,
        "d_ff": d_ff,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


_GATED: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}

T5_SHAPES: dict[str, dict[str, Any]] = {
    "t5-small": _t5(512, 64, 2048, 6, 8),
    "t5-base": _t5(768, 64, 3072, 12, 12),
    "t5-large": _t5(1024, 64, 4096, 24, 16),
    "t5-3b": _t5(1024, 128, 16384, 24, 32),
    "t5-11b": _t5(1024, 128, 65536, 24, 128),
    "t5-v1_1-small": _t5(512, 64, 1024, 8, 6) | _GATED,
    "t5-v1_1-base": _t5(768, 64, 2048, 12, 12) | _GATED,
    "t5-v1_1-large": _t5(1024, 64, 2816, 24, 16) | _GATED,
    "t5-v1_1-xl": _t5(2048, 64, 5120, 24, 32) | _GATED,
    "t5-v1_1-xxl": _t5(4096, 64, 10240, 24, 64) | _GATED,
}
_OWNERS = ("google-t5/", "google/")


def published_shape(name: str) -> dict[str, Any] | None:
    """The config of a published T5 by its Hub id, with or without its owner; flan-T5 has the shapes
    of T5 v1.1.
    """
    for owner in _OWNERS:
        name = name.removeprefix(owner)
    return T5_SHAPES.get(name.replace("flan-t5-", "t5-v1_1-"))
