"""What is particular to the family of the base model: calls of its blocks, names of its config."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from trainer.errors import ConfigError
from trainer.tasks.cross_attention.decoder.packed_blocks import Rows, attending
from trainer.tasks.cross_attention.decoder.rotary import rotation

# B batch, T tokens, S tokens seen so far (T + cached), D width, V vocabulary

GPT_BIGCODE = ("gpt_bigcode",)
ROTARY = ("llama", "mistral")
# Those whose frequencies depend on nothing but the config; "dynamic" and "longrope" change them
# with the length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class Backbone(Protocol):
    """A stock transformers model, one block at a time. Holds no parameter of its own."""

    config: Any
    num_blocks: int
    width: int
    heads: int
    key_value_heads: int
    max_positions: int
    activation: str
    norm_eps: float
    attention_dropout: float
    residual_dropout: float
    initial_std: float
    rope_theta: float | None  # base of the rotation frequencies; None: the positions are not rotary
    window: int | None  # tokens that each sees at most, itself among them; None: all before it

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
        """What every block is called with besides the states: its causal mask, blind to pads, and
        its positions.

        Rows in the place of a mask: the states are a stream of such rows, (1, M, D).
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


def backbone_of(base: PreTrainedModel) -> Backbone:
    """The adapter of a base's family. ConfigError for a family that the layers do not fit."""
    model_type = base.config.model_type
    if model_type in GPT_BIGCODE:
        return GPTBigCodeBackbone(base)
    if model_type in ROTARY:
        return RotaryBackbone(base)
    supported = ", ".join(map(repr, (*GPT_BIGCODE, *ROTARY)))
    raise ConfigError(
        f"base model: got model_type {model_type!r}, want one of {supported}. Cross-attention "
        "layers fit no other family yet; choose a base such as bigcode/starcoderbase-1b."
    )


class GPTBigCodeBackbone:
    """A GPTBigCodeForCausalLM: learned positions, pre-norm, multi-query.

    Source: transformers 5.23, models/gpt_bigcode; that version no longer derives positions from the
    attention mask, so they are always given.
    """

    rope_theta: float | None = None
    window: int | None = None

    def __init__(self, base: PreTrainedModel) -> None:
        config: Any = base.config
        self.config = config
        self.num_blocks: int = config.n_layer
        self.width: int = config.n_embd
        self.heads: int = config.n_head
        self.key_value_heads: int = config.n_head
        self.max_positions: int = config.n_positions
        self.activation: str = config.activation_function
        self.norm_eps: float = config.layer_norm_epsilon
        self.attention_dropout: float = config.attn_pdrop
        self.residual_dropout: float = config.resid_pdrop
        self.initial_std: float = config.initializer_range
        self._transformer: Any = base.transformer
        self._lm_head: nn.Module = base.lm_head

    def embed(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        return self._transformer.wte(ids_BT) + self._transformer.wpe(positions_BT)

    def surroundings(
        self,
        hidden_BTD: Tensor,
        attention_mask_BS: Tensor | Rows,
        positions_BT: Tensor,
        cache: Cache | None,
    ) -> dict[str, Any]:
        mask = _causal_mask(self.config, hidden_BTD, attention_mask_BS, cache)
        return {"attention_mask": mask, "layer_past": cache, "use_cache": cache is not None}

    def block(self, index: int, hidden_BTD: Tensor, surroundings: dict[str, Any]) -> Tensor:
        with attending(self.config, surroundings["attention_mask"]):
            return self._transformer.h[index](hidden_BTD, **surroundings)

    def final_norm(self, hidden_BTD: Tensor) -> Tensor:
        return self._transformer.ln_f(hidden_BTD)

    def head(self, hidden_BTD: Tensor) -> Tensor:
        return self._lm_head(self.final_norm(hidden_BTD))


class RotaryBackbone:
    """A LlamaForCausalLM (Tulu too) or MistralForCausalLM: rotary positions, RMSNorm, gated MLP.

    It rotates by frequencies of its own in fp32: the base keeps them in a buffer, which an engine
    casts to bf16 with the weights, and then position 4000 is off by whole turns. Source:
    transformers 5.23, models/llama and mistral.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        config: Any = base.config
        self.config = config
        self.num_blocks: int = config.num_hidden_layers
        self.width: int = config.hidden_size
        self.heads: int = config.num_attention_heads
        self.key_value_heads: int = config.num_key_value_heads
        self.max_positions: int = config.max_position_embeddings
        self.activation: str = config.hidden_act
        self.norm_eps: float = config.rms_norm_eps
        self.attention_dropout: float = config.attention_dropout
        self.residual_dropout = 0.0
        self.initial_std: float = config.initializer_range
        self.rope_theta: float | None = config.rope_parameters["rope_theta"]
        # getattr: a Llama config has none
        self.window: int | None = getattr(config, "sliding_window", None)
        rope_type = config.rope_parameters["rope_type"]
        if rope_type not in ROPE_TYPES:
            raise ConfigError(
                f"base model: got rope_type {rope_type!r}, want one of {', '.join(ROPE_TYPES)}. "
                "Choose another base, or set rope_parameters of its config."
            )
        self._model: Any = base.model
        self._lm_head: Any = base.lm_head
        self._frequencies: Tensor = self._model.rotary_emb.inv_freq.detach().float().clone()
        self._rope_scale: float = self._model.rotary_emb.attention_scaling

    def embed(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        return self._model.embed_tokens(ids_BT)

    def surroundings(
        self,
        hidden_BTD: Tensor,
        attention_mask_BS: Tensor | Rows,
        positions_BT: Tensor,
        cache: Cache | None,
    ) -> dict[str, Any]:
        mask = _causal_mask(self.config, hidden_BTD, attention_mask_BS, cache)
        self._frequencies = self._frequencies.to(positions_BT.device)
        cos_B1TK, sin_B1TK = rotation(positions_BT, self._frequencies, scale=self._rope_scale)
        return {
            "attention_mask": mask,
            "position_ids": positions_BT,
            "position_embeddings": (
                cos_B1TK[:, 0].to(hidden_BTD.dtype),
                sin_B1TK[:, 0].to(hidden_BTD.dtype),
            ),
            "past_key_values": cache,
            "use_cache": cache is not None,
        }

    def block(self, index: int, hidden_BTD: Tensor, surroundings: dict[str, Any]) -> Tensor:
        with attending(self.config, surroundings["attention_mask"]):
            return self._model.layers[index](hidden_BTD, **surroundings)

    def final_norm(self, hidden_BTD: Tensor) -> Tensor:
        return self._model.norm(hidden_BTD)

    def head(self, hidden_BTD: Tensor) -> Tensor:
        return self._lm_head(self.final_norm(hidden_BTD))


def _causal_mask(
    config: Any, hidden_BTD: Tensor, mask_BS: Tensor | Rows, cache: Cache | None
) -> Any:
    if isinstance(mask_BS, Rows):
        return mask_BS
    # getattr: only a Mistral config has a sliding_window
    is_sliding = getattr(config, "sliding_window", None) is not None
    return (create_sliding_window_causal_mask if is_sliding else create_causal_mask)(
        config=config, inputs_embeds=hidden_BTD, attention_mask=mask_BS, past_key_values=cache
    )
