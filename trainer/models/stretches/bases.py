"""Which bases several ranks can read one stream with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.models.decoder import streams
from trainer.models.decoder.backbone import ROPE_TYPES


def problems(config: Any, ranks: int) -> Iterator[str]:
    """A sentence for each reason why so many ranks cannot share a stream, by the base's config."""
    name = f"sequence_parallel_size={ranks}"
    reason = streams.why_not(config)
    if reason is not None:
        yield (
            f"{name}: the base reads no streams of tokens, for {reason}, and only a stream is "
            "shared among ranks. Take another base, or delete the key."
        )
        return
    heads = config.num_attention_heads
    if heads % ranks:
        fitting = [count for count in range(2, heads + 1) if heads % count == 0]
        yield (
            f"{name} does not divide the {heads} attention heads of the base: each rank takes "
            f"equally many. Use {' or '.join(map(str, fitting)) or 'no such key'}."
        )
    strange = sorted(_rope_types(config) - set(ROPE_TYPES))
    if strange:
        yield (
            f"{name}: the base has rope_type {', '.join(map(repr, strange))}, whose rotations "
            "depend on the longest position, and each rank knows only its own. Take another base, "
            "or delete the key."
        )


def _rope_types(config: Any) -> set[str]:
    """The kinds of rotary positions that a config names, of all its blocks."""
    ropes: Any = getattr(config, "rope_parameters", None) or {}
    blocks = [ropes, *(one for one in ropes.values() if isinstance(one, Mapping))]
    return {str(block["rope_type"]) for block in blocks if block.get("rope_type") is not None}
