"""One table of the families of bases: a row says everything that our code must know about a
model_type of transformers 5.23. docs/add-a-family.md adds a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is particular to one model_type. The defaults are true of any model of transformers: it
    trains as it is, and its rows are padded.
    """

    model_type: str
    name: str  # as people write it
    # Which code reads rows as one stream of tokens without pads; None: nothing does, and rows are
    # padded.
    # - "t5_encoder": packed/t5_encoder.py, and packed/t5_decoder.py for the other half.
    # - "rotary_decoder": decoder/backbone.py, one block after the other; every position is a
    #   rotation of queries and keys.
    # - "gpt_bigcode": the same for learnt positions.
    # - "stock": packed/stock.py, which replaces the attention alone.
    reader: Literal["t5_encoder", "rotary_decoder", "gpt_bigcode", "stock"] | None = None
    # The class of its RMS norms, if they multiply by `weight`, which one kernel of torch does. Not
    # Gemma's, which multiply by 1 + weight.
    rms_norm: str | None = None
    # The class of its RMS norms, if they multiply by weight + norm_offset in fp32 and round once.
    upcast_norm: str | None = None
    norm_offset: float = 0.0
    # Its apply_rotary_pos_emb turns the first half of a head with its second; Cohere's turns
    # neighbours.
    turns_halves: bool = False
    # The class of its feed-forward layers if they are T5's: wo(dropout(act(wi(states)))).
    feed_forward: str | None = None
    # The class of its feed-forward layers if they are gated: down(act(gate) * up).
    gated: str | None = None
    # Its rotations are applied in fp32, whatever the dtype of queries and keys.
    rotates_in_fp32: bool = False
    # Its first position is pad_token_id + 1 instead of 0.
    positions_follow_pad: bool = False
    # Its relative position biases read the number of buckets from the config, not from arguments.
    reads_buckets_from_config: bool = False
    # Of an encoder-decoder: the config key of the token that a decoder's text starts with. The
    # task summariser trains the families that have one.
    start_key: str | None = None
    # Of T5's decoder: the config key that says whether its states are multiplied by d_model**-0.5
    # before the head; None: they never are.
    scale_key: str | None = None
    # A part of its weights reads pictures. It stays frozen, because every row here is a text.
    reads_pictures: bool = False
    # Of a decoder-only model: the encoder-decoder whose halves may both begin with its weights
    # (decoder/halves.py).
    becomes_halves_of: str | None = None


_TABLE = (
    Family(
        model_type="gpt_bigcode",
        name="GPTBigCode",
        reader="gpt_bigcode",
    ),
    Family(
        model_type="llama",
        name="Llama",
        reader="rotary_decoder",
        rms_norm="LlamaRMSNorm",
        gated="LlamaMLP",
        turns_halves=True,
    ),
    Family(
        model_type="mistral",
        name="Mistral",
        reader="rotary_decoder",
        rms_norm="MistralRMSNorm",
        gated="MistralMLP",
        turns_halves=True,
    ),
    Family(
        model_type="qwen2",
        name="Qwen2",
        reader="rotary_decoder",
        rms_norm="Qwen2RMSNorm",
        gated="Qwen2MLP",
        turns_halves=True,
    ),
    Family(
        model_type="qwen3",
        name="Qwen3",
        reader="rotary_decoder",
        rms_norm="Qwen3RMSNorm",
        gated="Qwen3MLP",
        turns_halves=True,
    ),
    Family(
        model_type="phi3",
        name="Phi-3",
        reader="rotary_decoder",
        rms_norm="Phi3RMSNorm",
        gated="Phi3MLP",
        turns_halves=True,
    ),
    Family(
        model_type="olmo2",
        name="OLMo 2",
        reader="rotary_decoder",
        gated="Olmo2MLP",
        upcast_norm="Olmo2RMSNorm",
        turns_halves=True,
        rotates_in_fp32=True,
    ),
    Family(
        model_type="gemma2",
        name="Gemma 2",
        reader="rotary_decoder",
        gated="Gemma2MLP",
        upcast_norm="Gemma2RMSNorm",
        norm_offset=1.0,
        turns_halves=True,
    ),
    Family(
        model_type="gemma3_text",
        name="Gemma 3",
        reader="rotary_decoder",
        gated="Gemma3MLP",
        upcast_norm="Gemma3RMSNorm",
        norm_offset=1.0,
        turns_halves=True,
        becomes_halves_of="t5gemma2",
    ),
    # T5 v1.1, flan-T5 and ByT5 have this model_type, too.
    Family(
        model_type="t5",
        name="T5",
        reader="t5_encoder",
        rms_norm="T5LayerNorm",
        feed_forward="T5DenseActDense",
        gated="T5DenseGatedActDense",
        start_key="decoder_start_token_id",
        scale_key="scale_decoder_outputs",
    ),
    Family(
        model_type="mt5",
        name="mT5",
        reader="t5_encoder",
        rms_norm="MT5LayerNorm",
        feed_forward="MT5DenseActDense",
        gated="MT5DenseGatedActDense",
        start_key="decoder_start_token_id",
    ),
    Family(
        model_type="umt5",
        name="umT5",
        reader="t5_encoder",
        rms_norm="UMT5LayerNorm",
        feed_forward="UMT5DenseActDense",
        gated="UMT5DenseGatedActDense",
        reads_buckets_from_config=True,
        start_key="decoder_start_token_id",
        scale_key="tie_word_embeddings",
    ),
    Family(
        model_type="longt5",
        name="LongT5",
        gated="LongT5DenseGatedActDense",
        start_key="decoder_start_token_id",
        scale_key="scale_decoder_outputs",
    ),
    Family(
        model_type="t5gemma",
        name="T5Gemma",
        gated="T5GemmaMLP",
        upcast_norm="T5GemmaRMSNorm",
        norm_offset=1.0,
        start_key="decoder.bos_token_id",
    ),
    Family(
        model_type="t5gemma2",
        name="T5Gemma 2",
        gated="T5Gemma2MLP",
        upcast_norm="T5Gemma2RMSNorm",
        norm_offset=1.0,
        start_key="decoder.bos_token_id",
        reads_pictures=True,
    ),
    Family(
        model_type="bert",
        name="BERT",
        reader="stock",
    ),
    Family(
        model_type="roberta",
        name="RoBERTa",
        reader="stock",
        positions_follow_pad=True,
    ),
    Family(
        model_type="xlm-roberta",
        name="XLM-R",
        reader="stock",
        positions_follow_pad=True,
    ),
    Family(
        model_type="distilbert",
        name="DistilBERT",
        reader="stock",
    ),
    Family(
        model_type="modernbert",
        name="ModernBERT",
        reader="stock",
        gated="ModernBertMLP",
    ),
    Family(
        model_type="granite",
        name="Granite",
        reader="stock",
        gated="GraniteMLP",
        turns_halves=True,
    ),
    Family(
        model_type="cohere",
        name="Cohere",
        reader="stock",
        gated="CohereMLP",
    ),
)
FAMILIES = {row.model_type: row for row in _TABLE}
T5 = tuple(row.model_type for row in _TABLE if row.reader == "t5_encoder")
DECODERS = tuple(
    row.model_type for row in _TABLE if row.reader in ("rotary_decoder", "gpt_bigcode")
)
HALVES = tuple(row.model_type for row in _TABLE if row.becomes_halves_of)
SUMMARISERS = tuple(row.model_type for row in _TABLE if row.start_key)


def family_of(config: Any) -> Family:
    """The row of a transformers config; for a model_type that has none, a row of defaults."""
    model_type: str = config.model_type
    return FAMILIES.get(model_type) or Family(model_type=model_type, name=model_type)


def start_of(config: Any) -> int | None:
    """The token that a decoder's text starts with in training; None if a model is no
    encoder-decoder of the table, or its config names none.
    """
    key = family_of(config).start_key
    try:
        return None if key is None else attrgetter(key)(config)
    except AttributeError:  # a T5's config that names none has no such attribute
        return None


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
