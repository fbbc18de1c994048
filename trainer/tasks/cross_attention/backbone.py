"""What is particular to the family of the base model: how its blocks are called and what its config calls things."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.masking_utils import create_causal_mask

from trainer.errors import ConfigError

# B batch, T tokens, S tokens seen so far (T + cached), D width, V vocabulary

SUPPORTED = ("gpt_bigcode",)


class GPTBigCodeBackbone:
    """A stock GPTBigCodeForCausalLM, one block at a time. Holds no parameter of its own.

    Source: transformers 5.23, models/gpt_bigcode; that version no longer derives positions from the attention mask,
    so they are always given.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        model_type = base.config.model_type
        if model_type not in SUPPORTED:
            raise ConfigError(
                f"base model: got model_type {model_type!r}, want one of {', '.join(map(repr, SUPPORTED))}. "
                "Cross-attention layers fit no other family yet; choose a base such as bigcode/starcoderbase-1b."
            )
        config: Any = base.config
        self.config = config
        self.num_blocks: int = config.n_layer
        self.width: int = config.n_embd
        self.heads: int = config.n_head
        self.max_positions: int = config.n_positions
        self.activation: str = config.activation_function
        self.norm_eps: float = config.layer_norm_epsilon
        self.attention_dropout: float = config.attn_pdrop
        self.residual_dropout: float = config.resid_pdrop
        self.initial_std: float = config.initializer_range
        self._transformer: Any = base.transformer
        self._lm_head: nn.Module = base.lm_head

    def embed(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """(B, T) token ids and positions -> (B, T, D)."""
        return self._transformer.wte(ids_BT) + self._transformer.wpe(positions_BT)

    def causal_mask(self, hidden_BTD: Tensor, attention_mask_BS: Tensor, cache: Cache | None) -> Any:
        """Whatever the base's attention kernel wants as a mask: causal, and blind to pads."""
        return create_causal_mask(
            config=self.config, inputs_embeds=hidden_BTD, attention_mask=attention_mask_BS, past_key_values=cache
        )

    def block(self, index: int, hidden_BTD: Tensor, mask: Any, cache: Cache | None) -> Tensor:
        """(B, T, D) -> (B, T, D): base block `index`."""
        block = self._transformer.h[index]
        return block(hidden_BTD, layer_past=cache, attention_mask=mask, use_cache=cache is not None)

    def final_norm(self, hidden_BTD: Tensor) -> Tensor:
        """(..., D) -> (..., D): the norm between the last block and the head."""
        return self._transformer.ln_f(hidden_BTD)

    def head(self, hidden_BTD: Tensor) -> Tensor:
        """(..., D) output of the last block -> (..., V) logits."""
        return self._lm_head(self.final_norm(hidden_BTD))
