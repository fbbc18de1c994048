"""FiDO: a T5 whose decoder has cross-attention in few of its blocks, with one head of keys and
values.

A decoder reads the keys and values of all passages again for every token that it writes. For 100
passages of 250 tokens they take 1.8 GB in a T5-base, and 26 MB with both switches of this module.
Source: de Jong et al. 2022 (arXiv 2212.08153), section 3; which blocks keep their cross-attention
is taken from the published code (google/flaxformer, fido_architecture.py,
encoder_decoder_attention_period).

The weights that remain keep their names in a T5. Their folder has a model_type of its own: a
program that knows only T5 would otherwise fill the missing weights with random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    T5Config,
    T5ForConditionalGeneration,
)

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.tasks.fid.config import Reader

# B questions, T tokens of the decoder, S tokens of the passages of a question, H heads, C width of
# one head, I width of all heads, D width, Q = H * T queries

MODEL_TYPE = "fido_t5"


class FiDOConfig(T5Config):
    """A T5's config.json with the two switches of a FiDO reader."""

    model_type = MODEL_TYPE

    cross_attention_every: int = 1
    cross_attention_multi_query: bool = False


@dataclass(frozen=True)
class Switches:
    """Which cross-attention a decoder has; an unchanged T5 has (1, False)."""

    every: int
    multi_query: bool

    @classmethod
    def of_config(cls, config: Any) -> Switches:
        is_fido = isinstance(config, FiDOConfig)
        return (
            cls(config.cross_attention_every, config.cross_attention_multi_query)
            if is_fido
            else cls(1, False)
        )

    @classmethod
    def of_reader(cls, reader: Reader) -> Switches:
        return cls(reader.cross_attention_every, reader.cross_attention_multi_query)

    def __str__(self) -> str:
        return f"cross_attention_every={self.every}, cross_attention_multi_query={self.multi_query}"


def switch(t5: Any, reader: Reader) -> None:
    """Change the cross-attention of the decoder of `t5`, in place, to what `reader` states.

    A block without cross-attention drops its weights. A single head of keys and values starts as
    the mean of all heads (Ainslie et al. 2023, arXiv 2305.13245, section 2.1). A base that already
    has these switches is left unchanged. At ZeRO-3 every rank must call it. ConfigError when
    `reader` wants cross-attention that the base no longer has.
    """
    has, wants = Switches.of_config(t5.config), Switches.of_reader(reader)
    _check_depth(t5.config, wants)
    if wants.every % has.every or (has.multi_query and not wants.multi_query):
        raise ConfigError(
            f"base: its decoder was trained with {has}, but reader wants {wants}, which needs "
            "weights that are not there. State the base's own values in reader, or use a base that "
            "has more."
        )
    _remove(t5, wants.every)
    if wants.multi_query and not has.multi_query:
        for layer in cross_layers(t5):
            heads = layer.EncDecAttention
            layer.EncDecAttention = MultiQueryAttention(heads)
            layer.EncDecAttention.start_as_mean_of(heads)


def check_trained(config: Any, reader: Reader, *, folder: object) -> None:
    """ConfigError when `config`, that of the reader in `folder`, states other switches than
    `reader`.
    """
    has, wants = Switches.of_config(config), Switches.of_reader(reader)
    if has != wants:
        raise ConfigError(
            f"{folder}: got a reader that was trained with {has}, want one with {wants}, as the "
            "experiment's reader says. Name the folder of such a run, or the experiment that "
            "trained this one."
        )


def check_base(config: Any, reader: Reader, *, has_adapters: bool) -> None:
    """ConfigError when `reader` sets the switches for a base that is no T5, or when they would
    remove or merge weights that have adapters.
    """
    if has_adapters and Switches.of_config(config) != Switches.of_reader(reader):
        raise ConfigError(
            f"lora: got the switches of {Switches.of_reader(reader)} and a base with "
            f"{Switches.of_config(config)}, want a base that has them: weights under adapters stay "
            'as they are. Train the switches without lora first, and name that as {"experiment"}.'
        )
    if Switches.of_reader(reader) != Switches(1, False) and config.model_type not in (
        "t5",
        MODEL_TYPE,
    ):
        raise ConfigError(
            f"reader.cross_attention_every and reader.cross_attention_multi_query: got a base of "
            f"model_type {config.model_type!r}, want 't5' (v1.0, v1.1, flan, ByT5). Leave both out."
        )


def reader_of(config: Any, reader: Reader) -> Reader:
    """`reader` for a model with this config: its own switches, its own dropout."""
    has = Switches.of_config(config)
    changes = {
        "dropout": None,
        "compat_cross_bias": reader.compat_cross_bias and has == Switches(1, False),
        "cross_attention_every": has.every,
        "cross_attention_multi_query": has.multi_query,
    }
    return reader.model_copy(update=changes)


def reader_config(config: Any, reader: Reader) -> Any:
    """The config.json of a reader that is trained on a base with this config."""
    wants = Switches.of_reader(reader)
    if wants == Switches(1, False):
        return config
    values = config.to_dict()
    del values["model_type"]
    values["cross_attention_every"] = wants.every
    values["cross_attention_multi_query"] = wants.multi_query
    return FiDOConfig.from_dict(values)


def cross_layers(t5: Any) -> list[Any]:
    """The cross-attention layers of the decoder, in the order of its blocks."""
    layers = [block.layer[1] for block in t5.decoder.block]
    return [layer for layer in layers if not isinstance(layer, NoCrossAttention)]


def _check_depth(config: Any, wants: Switches) -> None:
    if wants.every > config.num_decoder_layers:
        raise ConfigError(
            f"reader.cross_attention_every={wants.every}, but the decoder of the base has "
            f"{config.num_decoder_layers} blocks: none would read the passages. Use at most "
            f"{config.num_decoder_layers}."
        )


def _remove(t5: Any, every: int) -> None:
    """Keep cross-attention only in the last of every `every` blocks."""
    for number, block in enumerate(t5.decoder.block, start=1):
        if number % every:
            block.layer[1] = NoCrossAttention()


class NoCrossAttention(nn.Module):
    """Takes the place of a T5Block's cross-attention, so that the feed-forward layer keeps its
    name.
    """

    def forward(
        self, hidden_BTD: Tensor, position_bias: Tensor | None = None, **unused: Any
    ) -> tuple[Tensor, Tensor | None, None]:
        del unused
        return hidden_BTD, position_bias, None


class MultiQueryAttention(nn.Module):
    """Cross-attention of all query heads over one head of keys and values; replaces a T5Attention.

    Source: Shazeer 2019 (arXiv 1911.02150). Its cache holds (B, 1, S, C) keys and values.
    """

    def __init__(self, heads: Any) -> None:
        """heads: the T5Attention whose query and output projections it takes over."""
        super().__init__()
        self.n_heads, self.layer_idx = heads.n_heads, heads.layer_idx
        self.dropout = nn.Dropout(heads.dropout)
        like: dict[str, Any] = {"dtype": heads.q.weight.dtype, "device": heads.q.weight.device}
        shape = (heads.d_model, heads.key_value_proj_dim)
        self.q = heads.q
        self.k = nn.Linear(*shape, bias=False, **like)
        self.v = nn.Linear(*shape, bias=False, **like)
        self.o = heads.o
        for new in (self.k, self.v):  # T5 initialises those of a T5Attention alike
            nn.init.normal_(new.weight, std=heads.config.initializer_factor * shape[0] ** -0.5)

    @torch.no_grad()
    def start_as_mean_of(self, heads: Any) -> None:
        """Set the projections of keys and values to the mean over a T5Attention's heads."""
        for own, theirs in ((self.k, heads.k), (self.v, heads.v)):
            with _whole(theirs.weight) as weight_ID:
                of_heads = weight_ID.float().unflatten(0, (self.n_heads, -1))
                own.weight.copy_(of_heads.mean(0))

    def forward(
        self,
        hidden_BTD: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Returns what T5Attention.forward of transformers 5.23 does; cross-attention has no
        bias.
        """
        del unused
        assert key_value_states is not None, "a decoder without passages needs no cross-attention"
        k_B1SC, v_B1SC = self._keys_and_values(key_value_states, past_key_values)
        # the queries of all heads become queries of the single head
        q_BTI = self.q(hidden_BTD)
        q_B1QC = q_BTI.unflatten(-1, (self.n_heads, -1)).flatten(1, 2).unsqueeze(1)
        mixed_B1QC = F.scaled_dot_product_attention(
            q_B1QC,
            k_B1SC,
            v_B1SC,
            attn_mask=None if mask is None else mask[:, :, :1],  # the same for every query
            dropout_p=self.dropout.p if self.training else 0.0,
            scale=1.0,
        )
        return self.o(mixed_B1QC.reshape(q_BTI.shape)), position_bias, None

    def _keys_and_values(self, states_BSD: Tensor, past: Any) -> tuple[Tensor, Tensor]:
        """(B, 1, S, C) each; from the cache when it holds them."""
        if past is not None and past.is_updated.get(self.layer_idx):
            cached = past.cross_attention_cache.layers[self.layer_idx]
            return cached.keys, cached.values
        k_B1SC, v_B1SC = self.k(states_BSD).unsqueeze(1), self.v(states_BSD).unsqueeze(1)
        if past is not None:
            past.cross_attention_cache.update(k_B1SC, v_B1SC, self.layer_idx)
            past.is_updated[self.layer_idx] = True
        return k_B1SC, v_B1SC


@contextmanager
def _whole(weight: Any) -> Iterator[Tensor]:
    """Gathers a weight that ZeRO-3 partitioned for as long as it is open; every rank takes part.

    Source: GatheredParameters of deepspeed 0.19.8, for weights that nobody changes.
    """
    is_partitioned = hasattr(weight, "ds_id")
    if is_partitioned:
        weight.all_gather()
    try:
        yield weight
    finally:
        if is_partitioned:
            weight.partition()


class FiDOT5(T5ForConditionalGeneration):
    """A T5 that is built with the switches of its config, to load the weights of a FiDO reader."""

    config_class = FiDOConfig

    def __init__(self, config: FiDOConfig) -> None:
        super().__init__(config)
        switches = Switches.of_config(config)
        _check_depth(config, switches)
        _remove(self, switches.every)
        if switches.multi_query:
            for layer in cross_layers(self):
                layer.EncDecAttention = MultiQueryAttention(layer.EncDecAttention)


AutoConfig.register(MODEL_TYPE, FiDOConfig)
AutoModelForSeq2SeqLM.register(FiDOConfig, FiDOT5)
