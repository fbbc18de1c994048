"""Which bases read rows as one stream of real tokens, and how each is made to: T5's encoders,
decoders block by block, other stock models as a whole. Any other base reads rows with pads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from trainer.errors import ConfigError
from trainer.models import recomputation
from trainer.models.decoder.backbone import Backbone, backbone_of
from trainer.models.families import DECODERS, family_of
from trainer.models.packed import stock, t5_encoder

# M tokens, D width

Read = Callable[[Mapping[str, Tensor]], Tensor]  # a packed batch (layout.pack) -> (M, D) states


def why_not(config: Any) -> str | None:
    """Why a base of this configuration, as its folder or the experiment gives it, reads no streams,
    as the end of a sentence; None: it does.
    """
    if family_of(config).reader is None:
        return f"a {config.model_type} is not among the models whose attention is replaced"
    if getattr(config, "use_bidirectional_attention", False):
        return "its config says use_bidirectional_attention"
    if config._attn_implementation not in stock.REPLACED:
        return f"its attention is {config._attn_implementation!r}, not 'sdpa'"
    return None


def reader_of(body: Any, *, recompute_every: int | None = None) -> Read:
    """How a body without a head reads a packed batch, each row by itself.

    body: of a configuration that why_not() has nothing against. recompute_every: in training, every
    so many blocks are computed again in backward instead of kept.
    """
    config = body.config
    if family_of(config).reader == "t5_encoder":
        return lambda batch: t5_encoder.encode(body.encoder, batch, recompute_every=recompute_every)
    if config.model_type in DECODERS:
        try:
            backbone = backbone_of(body, advice="")
        except ConfigError:  # rotations that change with the length of a text
            pass
        else:
            return lambda batch: encode(
                backbone, batch, recompute_every=recompute_every if body.training else None
            )

    def contexts() -> Any:  # blocks are computed again when the forward's settings are gone
        return nullcontext(), stock.on_streams(config)

    recomputation.of_stock(body, every=recompute_every, context_fn=contexts)
    return lambda batch: stock.encode(body, batch)


def encode(
    backbone: Backbone, batch: Mapping[str, Tensor], *, recompute_every: int | None = None
) -> Tensor:
    """(M, D) states of the tokens of a packed batch (layout.pack), each row read causally by
    itself, after the final norm.

    recompute_every: every so many blocks are computed again in backward instead of kept.
    """
    positions_1M = batch["position"][None]
    hidden_1MD = backbone.embed(batch["tokens"][None], positions_1M)
    surroundings = backbone.surroundings(hidden_1MD, stock.Rows.of(batch), positions_1M, None)
    for index in range(len(backbone.blocks)):
        arguments = (index, hidden_1MD, surroundings)
        hidden_1MD = recomputation.run(
            backbone.block, *arguments, number=index, every=recompute_every
        )
    return backbone.final_norm(hidden_1MD)[0]
