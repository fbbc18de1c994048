"""Runs decoders of different families block by block: how each family's blocks are called, and the
names in its config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from trainer.errors import ConfigError
from trainer.models.decoder.rotation import rotation
from trainer.models.families import DECODERS, check_family, family_of
from trainer.models.head import OutputLayer
from trainer.models.losses import PLAIN, Terms
from trainer.models.packed.stock import Rows, attending

# B batch, T tokens, S tokens seen so far (T + cached), D width, V vocabulary

# Rotations whose frequencies depend only on the config; "dynamic" and "longrope" change them with
# the length of a text.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class Backbone(Protocol):
    """A stock transformers model, one block at a time. Holds no parameter of its own."""

    config: Any
    blocks: nn.ModuleList
    width: int
    heads: int
    key_value_heads: int
    attention_width: int  # of all heads together, which need not be `width`
    max_positions: int
    activation: str
    norm_eps: float
    attention_dropout: float
    residual_dropout: float
    initial_std: float
    rope_theta: float | None  # base of the rotation frequencies; None: the positions are not rotary
    # By block: tokens that each sees at most, itself among them; None: all before it.
    windows: tuple[int | None, ...]

    def embed(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """(B, T) token ids and positions -> (B, T, D)."""
        ...

    def surroundings(
        self,
        hidden_BTD: Tensor,
        attention_mask_BS: Tensor | Rows,
        positions_BT: Tensor,
        cache: Cache | None,
    ) -> dict[str, Any]:
        """The arguments of every block besides the states: for each window a causal mask that hides
        pads, and the positions.

        With Rows instead of a mask, the states are a stream of these rows, (1, M, D).
        """
        ...

    def block(self, index: int, hidden_BTD: Tensor, surroundings: dict[str, Any]) -> Tensor:
        """(B, T, D) -> (B, T, D): base block `index`."""
        ...

    def final_norm(self, hidden_BTD: Tensor) -> Tensor:
        """(..., D) -> (..., D): the norm between the last block and the head."""
        ...

    def head(self, hidden_BTD: Tensor) -> Tensor:
        """(..., D) output of the last block -> (..., V) logits."""
        ...

    def loss(self, hidden_ND: Tensor, targets_N: Tensor, terms: Terms = PLAIN) -> Tensor:
        """(N, D) output of the last block -> () fp32, the sum of cross-entropies, with `terms`."""
        ...


def backbone_of(base: PreTrainedModel, *, advice: str) -> Backbone:
    """The adapter of a base's family.

    base: a causal LM, or its body alone, which has no head(). ConfigError for a family that is not
    supported; its last sentences are `advice`.
    """
    check_family(base.config, DECODERS, advice=advice)
    is_rotary = family_of(base.config).reader == "rotary_decoder"
    return RotaryBackbone(base) if is_rotary else GPTBigCodeBackbone(base)


class GPTBigCodeBackbone:
    """A GPTBigCodeForCausalLM: learned positions, pre-norm, multi-query.

    Source: transformers 5.23, models/gpt_bigcode; that version no longer derives positions from the
    attention mask, so they are always given.
    """

    rope_theta: float | None = None

    def __init__(self, base: PreTrainedModel) -> None:
        config: Any = base.config
        self.config = config
        self.windows: tuple[int | None, ...] = (None,) * config.n_layer
        self.width: int = config.n_embd
        self.heads: int = config.n_head
        self.key_value_heads: int = config.n_head
        self.attention_width: int = config.n_embd
        self.max_positions: int = config.n_positions
        self.activation: str = config.activation_function
        self.norm_eps: float = config.layer_norm_epsilon
        self.attention_dropout: float = config.attn_pdrop
        self.residual_dropout: float = config.resid_pdrop
        self.initial_std: float = config.initializer_range
        self._transformer: Any = _body_of(base)
        self.blocks: nn.ModuleList = self._transformer.h
        self._output = OutputLayer(base)

    def embed(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        embedded_BTD = self._transformer.wte(ids_BT) + self._transformer.wpe(positions_BT)
        return self._transformer.drop(embedded_BTD)

    def surroundings(
        self,
        hidden_BTD: Tensor,
        attention_mask_BS: Tensor | Rows,
        positions_BT: Tensor,
        cache: Cache | None,
    ) -> dict[str, Any]:
        masks = _causal_masks(self, hidden_BTD, attention_mask_BS, cache)
        return {"attention_mask": masks, "layer_past": cache, "use_cache": cache is not None}

    def block(self, index: int, hidden_BTD: Tensor, surroundings: dict[str, Any]) -> Tensor:
        mask = surroundings["attention_mask"][None]
        with attending(self.config, mask):
            return self.blocks[index](hidden_BTD, **(surroundings | {"attention_mask": mask}))

    def final_norm(self, hidden_BTD: Tensor) -> Tensor:
        return self._transformer.ln_f(hidden_BTD)

    def head(self, hidden_BTD: Tensor) -> Tensor:
        return self._output(self.final_norm(hidden_BTD))

    def loss(self, hidden_ND: Tensor, targets_N: Tensor, terms: Terms = PLAIN) -> Tensor:
        return self._output.loss(self.final_norm(hidden_ND), targets_N, terms)


class RotaryBackbone:
    """A decoder whose positions are rotations and whose MLP is gated.

    The stock blocks differ in their norms and projections. This class knows the other differences:
    which blocks see a window only, and how fast each block rotates (Gemma 3).

    It keeps the rotation frequencies in fp32. The base holds them in a buffer, which is rounded
    when the model is cast to bf16; position 4000 is then off by whole turns. Source: transformers
    5.23, models/<family>.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        config: Any = base.config
        self.config = config
        self.windows = _windows(config)
        self.width: int = config.hidden_size
        self.heads: int = config.num_attention_heads
        self.key_value_heads: int = config.num_key_value_heads
        # getattr: a Phi-3 config has none
        head_size = getattr(config, "head_dim", None) or self.width // self.heads
        self.attention_width: int = self.heads * head_size
        self.max_positions: int = config.max_position_embeddings
        self.activation: str = getattr(config, "hidden_activation", None) or config.hidden_act
        self.norm_eps: float = config.rms_norm_eps
        self.attention_dropout: float = config.attention_dropout
        self.residual_dropout = 0.0
        self.initial_std: float = config.initializer_range
        self.rope_theta: float | None = _rope_of(config, None)["rope_theta"]
        for window in set(self.windows):
            rope_type = _rope_of(config, window)["rope_type"]
            if rope_type not in ROPE_TYPES:
                raise ConfigError(
                    f"base model: got rope_type {rope_type!r}, want one of "
                    f"{', '.join(ROPE_TYPES)}. Choose another base, or set rope_parameters of its "
                    "config."
                )
        if getattr(config, "use_bidirectional_attention", False):
            raise ConfigError(
                "base model: its config says use_bidirectional_attention, but it is to write from "
                "left to right. Choose another base."
            )
        self._model: Any = _body_of(base)
        self.blocks: nn.ModuleList = self._model.layers
        self._output = OutputLayer(base)
        self._rotates_in_fp32 = family_of(config).rotates_in_fp32
        # for each window, the frequencies of its blocks and the factor of their rotations
        rotary: Any = self._model.rotary_emb
        self._frequencies: dict[int | None, Tensor] = {}
        self._rope_scales: dict[int | None, float] = {}
        for window in set(self.windows):
            of_kind = f"{_kind(window)}_" if _is_by_kind(self.config) else ""
            frequencies: Tensor = getattr(rotary, f"{of_kind}inv_freq")
            self._frequencies[window] = frequencies.detach().float().clone()
            self._rope_scales[window] = getattr(rotary, f"{of_kind}attention_scaling")

    def embed(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        return self._model.embed_tokens(ids_BT)

    def surroundings(
        self,
        hidden_BTD: Tensor,
        attention_mask_BS: Tensor | Rows,
        positions_BT: Tensor,
        cache: Cache | None,
    ) -> dict[str, Any]:
        dtype = torch.float32 if self._rotates_in_fp32 else hidden_BTD.dtype
        turns: dict[int | None, tuple[Tensor, Tensor]] = {}
        for window, frequencies in self._frequencies.items():
            here = self._frequencies[window] = frequencies.to(positions_BT.device)
            cos_B1TK, sin_B1TK = rotation(positions_BT, here, scale=self._rope_scales[window])
            turns[window] = (cos_B1TK[:, 0].to(dtype), sin_B1TK[:, 0].to(dtype))
        return {
            "attention_mask": _causal_masks(self, hidden_BTD, attention_mask_BS, cache),
            "position_ids": positions_BT,
            "position_embeddings": turns,
            "past_key_values": cache,
            "use_cache": cache is not None,
        }

    def block(self, index: int, hidden_BTD: Tensor, surroundings: dict[str, Any]) -> Tensor:
        by_window = ("attention_mask", "position_embeddings")
        own = {name: surroundings[name][self.windows[index]] for name in by_window}
        with attending(self.config, own["attention_mask"]):
            return self.blocks[index](hidden_BTD, **(surroundings | own))

    def final_norm(self, hidden_BTD: Tensor) -> Tensor:
        return self._model.norm(hidden_BTD)

    def head(self, hidden_BTD: Tensor) -> Tensor:
        return self._output(self.final_norm(hidden_BTD))

    def loss(self, hidden_ND: Tensor, targets_N: Tensor, terms: Terms = PLAIN) -> Tensor:
        return self._output.loss(self.final_norm(hidden_ND), targets_N, terms)


def _body_of(base: Any) -> Any:
    """The body of a causal LM, or `base` itself if it has no head."""
    return getattr(base, base.base_model_prefix, base)


def _windows(config: Any) -> tuple[int | None, ...]:
    """The window of every block; None: the block sees all tokens before."""
    window = getattr(config, "sliding_window", None)  # getattr: a Llama config has none
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == _kind(window) else None for kind in kinds)


def _kind(window: int | None) -> str:
    """The name that transformers gives to blocks with this window."""
    return "full_attention" if window is None else "sliding_attention"


def _is_by_kind(config: Any) -> bool:
    """Whether blocks with a window turn by frequencies of their own (Gemma 3)."""
    return "rope_theta" not in config.rope_parameters


def _rope_of(config: Any, window: int | None) -> dict[str, Any]:
    ropes = config.rope_parameters
    return ropes[_kind(window)] if _is_by_kind(config) else ropes


def _causal_masks(
    backbone: Backbone, hidden_BTD: Tensor, mask_BS: Tensor | Rows, cache: Cache | None
) -> Mapping[int | None, Any]:
    """The mask for the blocks of each window."""
    if isinstance(mask_BS, Rows):
        return dict.fromkeys(backbone.windows, mask_BS)
    arguments: dict[str, Any] = {
        "config": backbone.config,
        "inputs_embeds": hidden_BTD,
        "attention_mask": mask_BS,
        "past_key_values": cache,
    }
    return {
        window: (create_causal_mask if window is None else create_sliding_window_causal_mask)(
            **arguments
        )
        for window in set(backbone.windows)
    }
