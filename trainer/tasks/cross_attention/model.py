"""A frozen causal language model with trainable cross-attention layers between its blocks.

The base is a stock transformers model, run block by block. No autograd graph exists below the first added layer, so
those blocks cost a forward only; gradient checkpointing, when asked for, starts above it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicCache, PreTrainedModel

from trainer.errors import ConfigError
from trainer.losses import next_token_loss
from trainer.surgery import freeze_except
from trainer.tasks.cross_attention.backbone import GPTBigCodeBackbone
from trainer.tasks.cross_attention.config import Layers
from trainer.tasks.cross_attention.layer import AddedLayer, KeyMask, KeysValues, LayerShape, Record, key_mask

# B batch, T decoder tokens, S tokens so far (T + cached), N context chunks, L context tokens, D width, V vocabulary

logger = logging.getLogger(__name__)


class Context(NamedTuple):
    """A context, ready to be attended to: projected once, whatever number of forwards use it."""

    keys_values: tuple[KeysValues, ...]  # by added layer, bottom-up
    kept_BL: Tensor | None  # bool, False for pads; None: every key counts


class Past(NamedTuple):
    """What the next one-token forward needs of the ones before it."""

    cache: Cache
    context: Context


class Output(NamedTuple):
    """What forward() returns. A named tuple, because ZeRO-3 looks for tensors in tuples and not in dataclasses."""

    loss: Tensor | None  # () fp32, the SUM over scored tokens; None without labels
    logits: Tensor | None  # (B, T, V), or fewer positions when asked for; None with labels
    past: Past | None = None


@dataclass(frozen=True)
class _Pass:
    """What stays the same over the blocks of one forward."""

    causal_mask: Any
    cache: Cache | None
    keys_values: dict[int, KeysValues]
    key_masks: dict[int, KeyMask | None]
    record: Record | None


class CrossAttentionModel(nn.Module):
    """`base` frozen, `cross_attn_layers` trainable, named as published: cross_attn_layers.<block index>.<...>.

    With shared weights there is one layer, registered under its lowest index and used at every index.
    """

    def __init__(self, base: PreTrainedModel, layers: Layers, *, seed: int = 0) -> None:
        """Freeze `base` and insert the layers that `layers` states.

        seed: of the initial weights; equal seeds give equal layers on every rank, whatever was drawn before.
        Raises ConfigError for an unsupported family, layers that do not fit, or heads that do not divide the width.
        """
        super().__init__()
        self.base = base
        self.layers = layers
        self.backbone = GPTBigCodeBackbone(base)
        self.indices = added_indices(layers, self.backbone.num_blocks)
        shape = _layer_shape(layers, self.backbone)
        self.cross_attn_layers = _build(layers, shape, self.indices, std=self.backbone.initial_std, seed=seed)
        self.num_blocks_below = self.indices[0] + layers.after  # base blocks that need no backward
        self.gradient_checkpointing = False
        freeze_except(self, [self.cross_attn_layers])
        self.train(self.training)

    def train(self, mode: bool = True) -> CrossAttentionModel:
        """Switch the added layers between training and evaluation; the frozen base always evaluates."""
        super().train(mode)
        self.base.eval()
        return self

    def checkpoint_blocks(self, enabled: bool) -> None:
        """Recompute the blocks above the first added layer, and the layers added to them, in backward."""
        self.gradient_checkpointing = enabled

    def check_lengths(self, decoder_tokens: int, context_tokens: int) -> None:
        """ConfigError when sequences or context chunks of these lengths exceed the base's positions."""
        limit = self.backbone.max_positions
        named = {"decoder_tokens": decoder_tokens, "context_tokens": context_tokens}
        wrong = [f"{name}={length}" for name, length in named.items() if length > limit]
        if wrong:
            raise ConfigError(
                f"{' and '.join(wrong)}: the base has {limit} positions, want at most {limit}. "
                "Lower data.decoder_tokens or data.context_tokens, or split the context (data.chunked)."
            )

    def added_layer(self, index: int) -> AddedLayer:
        """The layer at base block `index`: the one shared layer, or its own."""
        name = str(self.indices[0] if self.layers.shared_weights else index)
        layer = self.cross_attn_layers[name]
        assert isinstance(layer, AddedLayer)
        return layer

    # Contexts ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, L) or (B, N, L) context ids -> states (B, N*L, D) of the frozen base and their bool mask (B, N*L).

        Each chunk is read by itself, causally, positions from 0; a pad is False in the mask, and its state is not
        to be used. Chunks follow one another along the length.
        """
        self.check_lengths(0, ids.shape[-1])
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        flat_ids, flat_mask = ids.flatten(0, -2), mask.flatten(0, -2)
        hidden = self.backbone.embed(flat_ids, positions(flat_mask))
        causal_mask = self.backbone.causal_mask(hidden, flat_mask, None)
        for index in range(self.backbone.num_blocks):
            hidden = self.backbone.block(index, hidden, causal_mask, None)
        states = self.backbone.final_norm(hidden)
        return states.reshape(len(ids), -1, states.shape[-1]), mask.flatten(1).bool()

    def _context(self, states: Tensor | Sequence[Tensor], kept_BL: Tensor | None) -> Context:
        """Project states for every added layer; once in all when weights and states are shared."""
        if isinstance(states, Tensor) and self.layers.shared_weights:
            once = self.added_layer(self.indices[0]).crossattention.keys_values(states.detach())
            return Context((once,) * len(self.indices), kept_BL)
        by_layer = [states] * len(self.indices) if isinstance(states, Tensor) else list(states)
        if len(by_layer) != len(self.indices):
            raise ConfigError(
                f"encoder_hidden_states: got a list of {len(by_layer)}, want {len(self.indices)}, one for each added "
                "layer from the bottom up. Pass one tensor for all layers or one for each."
            )
        pairs = zip(self.indices, by_layer, strict=True)
        projected = [self.added_layer(index).crossattention.keys_values(own.detach()) for index, own in pairs]
        return Context(tuple(projected), kept_BL)

    def _key_masks(self, context: Context, injected: Mapping[int, Tensor] | None) -> dict[int, KeyMask | None]:
        """The keys that each added layer sees: no pads, and in training none that its own draw hides."""
        if injected is None and not (self.training and self.layers.key_dropout):
            return dict.fromkeys(self.indices, None if context.kept_BL is None else key_mask(context.kept_BL))
        masks: dict[int, KeyMask | None] = {}
        for index, (keys, _) in zip(self.indices, context.keys_values, strict=True):
            if injected is None:
                drawn = torch.rand(keys.shape[0], keys.shape[2], device=keys.device) >= self.layers.key_dropout
            else:
                drawn = injected[index].bool()
            masks[index] = key_mask(drawn if context.kept_BL is None else drawn & context.kept_BL)
        return masks

    # The decoder ------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        *,
        context_input_ids: Tensor | None = None,
        context_attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | Sequence[Tensor] | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        key_masks: Mapping[int, Tensor] | None = None,
        record: Record | None = None,
        past: Past | None = None,
        use_cache: bool = False,
        last_logits_only: bool = False,
    ) -> Output:
        """(B, T) tokens and their mask, with a context, -> the summed loss over `labels`, or logits without them.

        The context is exactly one of: context_input_ids, (B, L) or in chunks (B, N, L), with a mask of that shape;
        encoder_hidden_states, (B, L, D) or one such tensor for each added layer bottom-up, with a mask (B, L); past,
        from an earlier forward with use_cache, and then attention_mask is (B, S) over all tokens so far.
        labels: (B, T), -100 where nothing is scored; shifted in here. key_masks: block index -> (B, L), True for keys
        to use, in place of the random draw. record: receives `block_out.<i>`, `cross_attn_out.<i>` and
        `cross_block_out.<i>`. Raises ConfigError for a sequence longer than the base's positions.
        """
        self.check_lengths(attention_mask.shape[1], 0)
        given = [source is not None for source in (context_input_ids, encoder_hidden_states, past)]
        if sum(given) != 1:
            raise ConfigError(f"got {sum(given)} contexts, want one of context_input_ids, encoder_hidden_states, past.")
        if past is not None:
            context, cache = past.context, past.cache
        else:
            cache = DynamicCache(config=self.backbone.config) if use_cache else None
            if context_input_ids is not None:
                context = self._context(*self.encode(context_input_ids, context_attention_mask))
            else:
                assert encoder_hidden_states is not None, "exactly one context is given"
                kept = None if encoder_attention_mask is None else encoder_attention_mask.bool()
                context = self._context(encoder_hidden_states, kept)
        masks = self._key_masks(context, key_masks)
        hidden_BTD = self._decode(input_ids, attention_mask, context, masks, cache, record)
        if labels is not None:
            return Output(loss=next_token_loss(hidden_BTD, labels, self.backbone.head), logits=None)
        logits = self.backbone.head(hidden_BTD[:, -1:] if last_logits_only else hidden_BTD)
        return Output(loss=None, logits=logits, past=None if cache is None else Past(cache, context))

    def _decode(
        self,
        ids_BT: Tensor,
        attention_mask_BS: Tensor,
        context: Context,
        key_masks: dict[int, KeyMask | None],
        cache: Cache | None,
        record: Record | None,
    ) -> Tensor:
        """(B, T) ids -> (B, T, D) output of the last block."""
        with torch.no_grad():  # below the first added layer nothing needs a gradient
            hidden = self.backbone.embed(ids_BT, positions(attention_mask_BS)[:, -ids_BT.shape[1] :])
            causal_mask = self.backbone.causal_mask(hidden, attention_mask_BS, cache)
            by_index = dict(zip(self.indices, context.keys_values, strict=True))
            this = _Pass(causal_mask, cache, by_index, key_masks, record)
            for index in range(self.num_blocks_below):
                hidden = self._block(index, hidden, this)
        if self.layers.after:
            hidden = self._added(self.indices[0], hidden, this)
        recompute = self.gradient_checkpointing and torch.is_grad_enabled() and cache is None
        for index in range(self.num_blocks_below, self.backbone.num_blocks):
            if recompute:  # torch's default also replays the dropout draws
                hidden = checkpoint(self._block_and_added, index, hidden, this, use_reentrant=False)
            else:
                hidden = self._block_and_added(index, hidden, this)
        return hidden

    def _block_and_added(self, index: int, hidden: Tensor, this: _Pass) -> Tensor:
        if index not in this.keys_values:
            return self._block(index, hidden, this)
        if self.layers.after:
            return self._added(index, self._block(index, hidden, this), this)
        return self._block(index, self._added(index, hidden, this), this)

    def _block(self, index: int, hidden: Tensor, this: _Pass) -> Tensor:
        hidden = self.backbone.block(index, hidden, this.causal_mask, this.cache)
        if this.record is not None:
            this.record[f"block_out.{index}"] = hidden
        return hidden

    def _added(self, index: int, hidden: Tensor, this: _Pass) -> Tensor:
        seen: Record | None = None if this.record is None else {}
        hidden = self.added_layer(index)(hidden, this.keys_values[index], this.key_masks[index], seen)
        if this.record is not None and seen is not None:
            this.record.update({f"{name}.{index}": tensor for name, tensor in seen.items()})
        return hidden


def positions(attention_mask_BS: Tensor) -> Tensor:
    """(B, S) mask -> (B, S) positions: tokens count from 0 wherever the pads are; a pad stands at 1, as published."""
    return (attention_mask_BS.long().cumsum(-1) - 1).masked_fill(attention_mask_BS == 0, 1)


def added_indices(layers: Layers, num_blocks: int) -> list[int]:
    """Base block indices n-1, n-1-stride, ... that get an added layer, ascending. ConfigError when they do not fit."""
    count, stride = layers.count, layers.stride
    if num_blocks < stride * count:
        most = num_blocks // stride
        fix = f"Use layers.count <= {most}" if most else f"Use layers.stride <= {num_blocks}"
        raise ConfigError(
            f"layers.count={count} x layers.stride={stride} = {stride * count} blocks: the base has {num_blocks}, "
            f"want count x stride <= {num_blocks}. {fix}, or layers.stride <= {max(num_blocks // count, 1)}."
        )
    return [num_blocks - 1 - k * stride for k in reversed(range(count))]


def _layer_shape(layers: Layers, backbone: GPTBigCodeBackbone) -> LayerShape:
    width, heads = layers.width or backbone.width, layers.heads or backbone.heads
    if width % heads:
        legal = [count for count in range(1, min(width, 128) + 1) if width % count == 0]
        raise ConfigError(
            f"layers.heads={heads} does not divide layers.width={width} (None: the base's {backbone.heads} and "
            f"{backbone.width}), want a divisor. Use one of {', '.join(map(str, legal))}."
        )
    return LayerShape(
        base_width=backbone.width,
        width=width,
        heads=heads,
        shared_projections=layers.shared_projections,
        skip=layers.skip,
        activation=backbone.activation,
        norm_eps=backbone.norm_eps,
        attention_dropout=backbone.attention_dropout,
        residual_dropout=backbone.residual_dropout,
    )


def _build(layers: Layers, shape: LayerShape, indices: list[int], *, std: float, seed: int) -> nn.ModuleDict:
    if layers.skip and layers.initialisation == "zero":
        logger.warning(
            "layers.skip doubles the residual stream, so zero initialisation does not keep the base's logits"
        )
    own = indices[:1] if layers.shared_weights else indices
    with torch.random.fork_rng(devices=[]):  # the caller's random state is none the wiser
        torch.manual_seed(seed)
        built = {str(index): AddedLayer(shape) for index in own}
        for layer in built.values():
            layer.initialise(std=std, zero_output=layers.initialisation == "zero")
    return nn.ModuleDict(built)
