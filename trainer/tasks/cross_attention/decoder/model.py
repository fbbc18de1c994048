"""A frozen causal language model with trainable cross-attention layers between its blocks.

The base is a stock transformers model, run block by block. There is no autograd graph below the
first added layer, so those blocks cost a forward pass only, and gradient checkpointing starts above
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from trainer.errors import ConfigError
from trainer.models import adapters, recomputation
from trainer.models.decoder.backbone import backbone_of
from trainer.models.decoder.rotation import Rotation, rotation
from trainer.models.frozen.freezing import freeze_except
from trainer.models.inputs.neftune import noisy, without_noise
from trainer.models.losses import PLAIN, next_token_loss
from trainer.models.packed.stock import Rows
from trainer.tasks.cross_attention.decoder.attention import (
    KeysValues,
    Pairs,
    Seen,
    context_positions,
    key_mask,
    positions,
)
from trainer.tasks.cross_attention.decoder.context import Context, ContextInputs, Past
from trainer.tasks.cross_attention.decoder.layer import AddedLayer, Record, added_layers
from trainer.tasks.cross_attention.decoder.rotary import frequencies
from trainer.tasks.cross_attention.decoder.shape import added_indices, layer_shape

if TYPE_CHECKING:
    from trainer.tasks.cross_attention.config import Layers

# B batch, T decoder tokens, S tokens so far (T + cached), N context chunks, L context tokens, D
# width, V vocabulary


class Output(NamedTuple):
    """What forward() returns.

    A named tuple, because ZeRO-3 looks for tensors in tuples and not in dataclasses.
    """

    loss: Tensor | None  # () fp32, the SUM over scored tokens; None without labels
    logits: Tensor | None  # (B, T, V), or fewer positions when asked for; None with labels
    past: Past | None = None


@dataclass(frozen=True)
class _Pass:
    """What stays the same over the blocks of one forward."""

    surroundings: dict[str, Any]  # of the base's blocks
    keys_values: dict[int, KeysValues]
    key_masks: dict[int, Seen]
    query_rotation: Rotation | None
    record: Record | None


class CrossAttentionModel(nn.Module):
    """`base` frozen, `cross_attn_layers` trainable, named as published: cross_attn_layers.<block
    index>.<...>.

    With shared weights there is one layer, registered under its lowest index and used at every
    index.
    """

    knows_blocks_by_number = True  # an added layer follows some: a plan counts all (timing/blocks)

    def __init__(self, base: PreTrainedModel, layers: Layers, *, seed: int = 0) -> None:
        """Freeze `base` except for adapters in it, and insert the layers that `layers` states.

        seed: of the initial weights. Equal seeds give equal layers on every rank, whatever random
        numbers were drawn before. Raises ConfigError for an unsupported family, layers that do not
        fit, or heads that do not divide the width.
        """
        super().__init__()
        self.base = base
        self.layers = layers
        self.backbone = backbone_of(
            base,
            advice="Cross-attention layers fit no other family yet; choose a base such as "
            "bigcode/starcoderbase-1b.",
        )
        self.indices = added_indices(layers, len(self.backbone.blocks))
        shape = layer_shape(layers, self.backbone)
        self._frequencies = (
            None
            if shape.rotary is None
            else frequencies(shape.width // shape.heads, shape.rotary.theta)
        )
        self.cross_attn_layers = added_layers(
            layers, shape, self.indices, std=self.backbone.initial_std, seed=seed
        )
        self._adapted = adapters.layers_of(base)
        # the base blocks below the first added layer and the first adapter need no backward pass
        blocks = self.backbone.blocks
        adapted = (i for i, block in enumerate(blocks) if adapters.layers_of(block))
        self.num_blocks_below = min(next(adapted, len(blocks)), self.indices[0] + layers.after)
        self.recompute_every: int | None = None  # of the blocks above, and their added layers
        self.terms = PLAIN  # of the loss in training mode
        freeze_except(
            self,
            lambda name: name.startswith("cross_attn_layers.") or adapters.is_adapter(name),
        )
        self.train(self.training)

    def train(self, mode: bool = True) -> CrossAttentionModel:
        """Switch the added layers and the base's adapters to training or evaluation mode; the
        frozen base is always in evaluation mode.
        """
        super().train(mode)
        self.base.eval()
        for layer in self._adapted:
            layer.train(mode)
        return self

    def check_lengths(self, decoder_tokens: int, context_tokens: int) -> None:
        """ConfigError when sequences or context chunks are longer than the base's positions."""
        limit = self.backbone.max_positions
        lengths = {"decoder_tokens": decoder_tokens, "context_tokens": context_tokens}
        wrong = [f"{name}={length}" for name, length in lengths.items() if length > limit]
        if wrong:
            raise ConfigError(
                f"{' and '.join(wrong)}: the base has {limit} positions, want at most {limit}. "
                "Lower data.decoder_tokens or data.context_tokens, or split the context "
                "(data.chunked)."
            )

    def added_layer(self, index: int) -> AddedLayer:
        """The layer at base block `index`: the one shared layer, or its own."""
        name = str(self.indices[0] if self.layers.shared_weights else index)
        layer = self.cross_attn_layers[name]
        assert isinstance(layer, AddedLayer)
        return layer

    # Contexts
    # ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, L) or (B, N, L) context ids -> states (B, N*L, D) of the frozen base and their bool
        mask (B, N*L).

        Adapters are switched off, so that training does not invalidate prepared states. Each chunk
        is read by itself, causally, with positions from 0. The mask is False for a pad, whose state
        must not be used. Chunks follow one another along the length.
        """
        self.check_lengths(0, ids.shape[-1])
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        flat_ids, flat_mask = ids.flatten(0, -2), mask.flatten(0, -2)
        places = positions(flat_mask)
        hidden = self.backbone.embed(flat_ids, places)
        surroundings = self.backbone.surroundings(hidden, flat_mask, places, None)
        states = self._run_base(hidden, surroundings)
        return states.reshape(len(ids), -1, states.shape[-1]), mask.flatten(1).bool()

    def context(
        self,
        states: Tensor | Sequence[Tensor],
        kept_BL: Tensor | None = None,
        *,
        positions_BL: Tensor | None = None,
    ) -> Context:
        """Context states, (B, L, D) or one such tensor for each added layer from the bottom up,
        projected for every layer.

        When layers share weights and states, they are projected once. kept_BL: bool, False for
        pads; None: every key counts. positions_BL: the positions of the keys, for rotary positions;
        None: kept keys are counted from 0, across chunks.
        """
        by_layer = [states] * len(self.indices) if isinstance(states, Tensor) else list(states)
        if len(by_layer) != len(self.indices):
            raise ConfigError(
                f"encoder_hidden_states: got a list of {len(by_layer)}, want "
                f"{len(self.indices)}, one for each added "
                "layer from the bottom up. Pass one tensor for all layers or one for each."
            )
        turn = self._rotation(
            context_positions(by_layer[0], kept_BL) if positions_BL is None else positions_BL
        )
        if isinstance(states, Tensor) and self.layers.shared_weights:
            once = self.added_layer(self.indices[0]).crossattention.keys_values(
                states.detach(), turn
            )
            return Context((once,) * len(self.indices), kept_BL)
        pairs = zip(self.indices, by_layer, strict=True)
        projected = [
            self.added_layer(index).crossattention.keys_values(own.detach(), turn)
            for index, own in pairs
        ]
        return Context(tuple(projected), kept_BL)

    def _rotation(self, positions_BT: Tensor) -> Rotation | None:
        if self._frequencies is None:
            return None
        self._frequencies = self._frequencies.to(positions_BT.device)
        return rotation(positions_BT, self._frequencies)

    def _key_masks(
        self, context: Context, injected: Mapping[int, Tensor] | None
    ) -> dict[int, Seen]:
        """The keys that each added layer sees: no pads and, in training, no keys that key dropout
        hides from that layer.
        """
        draws = self._draw(context, injected)
        if draws is None:
            return dict.fromkeys(
                self.indices, None if context.kept_BL is None else key_mask(context.kept_BL)
            )
        is_real_BL = context.kept_BL
        return {
            index: key_mask(x_BL if is_real_BL is None else x_BL & is_real_BL)
            for index, x_BL in draws.items()
        }

    def _draw(
        self, context: Context, injected: Mapping[int, Tensor] | None
    ) -> Mapping[int, Tensor] | None:
        """(B, L) bool for each added layer, False for keys that are hidden from it; None when no
        key is hidden.
        """
        if injected is not None:
            return {index: injected[index].bool() for index in self.indices}
        if not (self.training and self.layers.key_dropout):
            return None
        keys = [
            (index, keys_BHLK)
            for index, (keys_BHLK, _) in zip(self.indices, context.keys_values, strict=True)
        ]
        rate = self.layers.key_dropout
        return {
            index: torch.rand(x.shape[0], x.shape[2], device=x.device) >= rate for index, x in keys
        }

    # The decoder
    # ----------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        packed: Mapping[str, Tensor] | None = None,
        labels: Tensor | None = None,
        scored_flat: Tensor | None = None,
        key_masks: Mapping[int, Tensor] | None = None,
        record: Record | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        last_logits_only: bool = False,
        **context: Any,
    ) -> Output:
        """(B, T) tokens and their mask, with a context, -> the summed loss over `labels`, or logits
        without them.

        context: the fields of ContextInputs by their names. When there are fewer contexts than
        rows, each context serves the same number of consecutive rows. With `past`, attention_mask
        is (B, S) over all tokens so far.

        packed: all tensors as streams (packed_batch.py); the only other argument then is key_masks,
        (1, K). labels: (B, T), -100 where nothing is scored; forward() shifts them. scored_flat:
        losses.scored_before(labels). key_masks: block index -> (B, L), True for keys to use; it
        replaces the random draw of key dropout. record: receives `block_out.<i>`,
        `cross_attn_out.<i>` and `cross_block_out.<i>`. position_ids: (B, T); None: computed from
        the mask by `positions`; the published Llama and Mistral count pads in training, too.
        ConfigError for a sequence longer than the base's positions.
        """
        if packed is not None:
            return Output(loss=self._packed_loss(packed, key_masks), logits=None)
        assert input_ids is not None
        assert attention_mask is not None, "the decoder's tokens are given with their mask"
        self.check_lengths(attention_mask.shape[1], 0)
        inputs = ContextInputs(**without_noise(context))
        fresh = DynamicCache(config=self.backbone.config) if use_cache else None
        cache = fresh if inputs.past is None else inputs.past.cache
        projected = self._project(inputs).repeat_rows(len(input_ids))
        if position_ids is None:
            position_ids = positions(attention_mask)[:, -input_ids.shape[1] :]
        with torch.no_grad():  # below the first added layer nothing needs a gradient
            with noisy(self.base.get_input_embeddings(), context):
                embedded_BTD = self.backbone.embed(input_ids, position_ids)
            this = _Pass(
                surroundings=self.backbone.surroundings(
                    embedded_BTD, attention_mask, position_ids, cache
                ),
                keys_values=dict(zip(self.indices, projected.keys_values, strict=True)),
                key_masks=self._key_masks(projected, key_masks),
                query_rotation=self._rotation(position_ids),
                record=record,
            )
        hidden_BTD = self._decode(embedded_BTD, this, is_cached=cache is not None)
        if labels is not None:
            loss = next_token_loss(hidden_BTD, labels, self._loss_of_tokens, scored_N=scored_flat)
            return Output(loss=loss, logits=None)
        logits = self.backbone.head(hidden_BTD[:, -1:] if last_logits_only else hidden_BTD)
        return Output(
            loss=None, logits=logits, past=None if cache is None else Past(cache, projected)
        )

    def _project(self, inputs: ContextInputs) -> Context:
        """The context of a forward, projected for every added layer."""
        if inputs.past is not None:
            return inputs.past.context
        states, mask = inputs.encoder_hidden_states, inputs.encoder_attention_mask
        if inputs.context_input_ids is not None:
            states, mask = self.encode(inputs.context_input_ids, inputs.context_attention_mask)
        assert states is not None
        is_real_BL = None if mask is None else mask.bool()
        return self.context(states, is_real_BL, positions_BL=inputs.context_position_ids)

    def _packed_loss(
        self, batch: Mapping[str, Tensor], key_masks: Mapping[int, Tensor] | None
    ) -> Tensor:
        """() fp32, the sum of the losses of a packed batch's scored tokens. It calls the modules in
        the order of forward().
        """
        if "encoder_hidden_states" in batch:
            states_1KD = batch["encoder_hidden_states"][None]
        else:
            states_1KD = self._encode_packed(batch)
        context = self.context(states_1KD, positions_BL=batch["keys_position"][None])
        positions_1M = batch["position"][None]
        with torch.no_grad():
            with noisy(self.base.get_input_embeddings(), batch):
                embedded_1MD = self.backbone.embed(batch["tokens"][None], positions_1M)
            rows, pairs = Rows.of(batch), Pairs.of(batch)
            draws = self._draw(context, key_masks) or {}
            visible: dict[int, Seen] = {
                i: pairs.showing(draws[i][0]) if i in draws else pairs for i in self.indices
            }
            this = _Pass(
                surroundings=self.backbone.surroundings(embedded_1MD, rows, positions_1M, None),
                keys_values=dict(zip(self.indices, context.keys_values, strict=True)),
                key_masks=visible,
                query_rotation=self._rotation(positions_1M),
                record=None,
            )
        hidden_1MD = self._decode(embedded_1MD, this, is_cached=False)
        scored_N = batch["scored"]
        targets_N = batch["labels"].index_select(0, scored_N + 1)
        return self._loss_of_tokens(hidden_1MD[0].index_select(0, scored_N), targets_N)

    def _loss_of_tokens(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        return self.backbone.loss(hidden_ND, targets_N, self.terms if self.training else PLAIN)

    @torch.no_grad()
    def _encode_packed(self, batch: Mapping[str, Tensor]) -> Tensor:
        """(1, K, D) states of the context tokens of a packed batch."""
        places = batch["context_position"][None]
        hidden = self.backbone.embed(batch["context_input_ids"][None], places)
        rows = Rows.of(batch, "context_")
        return self._run_base(hidden, self.backbone.surroundings(hidden, rows, places, None))

    def _run_base(self, hidden: Tensor, surroundings: dict[str, Any]) -> Tensor:
        """Embedded contexts -> their states, by the base without adapters."""
        with adapters.switched_off(self._adapted):
            for index in range(len(self.backbone.blocks)):
                hidden = self.backbone.block(index, hidden, surroundings)
            return self.backbone.final_norm(hidden)

    def _decode(self, embedded_BTD: Tensor, this: _Pass, *, is_cached: bool) -> Tensor:
        """(B, T, D) embedded tokens -> (B, T, D) output of the last block."""
        hidden = embedded_BTD
        with torch.no_grad():
            for index in range(self.num_blocks_below):
                hidden = self._block(index, hidden, this)
        if self.num_blocks_below > self.indices[0]:  # the layer behind the last of them
            hidden = self._layer(self.indices[0], hidden, this)
        every = self.recompute_every if torch.is_grad_enabled() and not is_cached else None
        for index in range(self.num_blocks_below, len(self.backbone.blocks)):
            number = index - self.num_blocks_below
            hidden = recomputation.run(
                self._block_and_layer, index, hidden, this, number=number, every=every
            )
        return hidden

    def _block_and_layer(self, index: int, hidden: Tensor, this: _Pass) -> Tensor:
        if index not in this.keys_values:
            return self._block(index, hidden, this)
        if self.layers.after:
            return self._layer(index, self._block(index, hidden, this), this)
        return self._block(index, self._layer(index, hidden, this), this)

    def _block(self, index: int, hidden: Tensor, this: _Pass) -> Tensor:
        hidden = self.backbone.block(index, hidden, this.surroundings)
        if this.record is not None:
            this.record[f"block_out.{index}"] = hidden
        return hidden

    def _layer(self, index: int, hidden: Tensor, this: _Pass) -> Tensor:
        record: Record | None = None if this.record is None else {}
        layer, keys_values = self.added_layer(index), this.keys_values[index]
        mask = this.key_masks[index]
        hidden = layer(hidden, keys_values, mask, record, rotation=this.query_rotation)
        if this.record is not None and record is not None:
            this.record.update({f"{name}.{index}": tensor for name, tensor in record.items()})
        return hidden
