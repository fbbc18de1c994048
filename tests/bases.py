"""The families of bases that people fine-tune, tiny: one table that every test of families reads.

Each is the smallest that still has what makes its family different: windows that rows reach beyond,
soft caps that bend, positions that are scaled, heads of another width than the states'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trainer.models.decoder.halves import NO_PICTURES
from trainer.models.masks import mend_attention

VOCABULARY = 96
SPECIAL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
ROTARY: dict[str, Any] = SPECIAL | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOW, FULL = "sliding_attention", "full_attention"
GEMMA: dict[str, Any] = ROTARY | {
    "head_dim": 16,
    "sliding_window": 4,
    "layer_types": [WINDOW, FULL, WINDOW, FULL],
    "query_pre_attn_scalar": 12,
    "tie_word_embeddings": True,
}
# {name: (model_type, the keys of its config)}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_bigcode": (
        "gpt_bigcode",
        SPECIAL
        | {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "initializer_range": 0.2}
        | dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    ),
    "llama": ("llama", ROTARY | {"tie_word_embeddings": False}),
    "llama 3.2": ("llama", ROTARY | {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", ROTARY | {"sliding_window": 4, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", ROTARY | {"tie_word_embeddings": True}),
    "qwen2 with windows": (
        "qwen2",
        ROTARY | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", ROTARY | {"head_dim": 16, "tie_word_embeddings": True}),
    "phi3": (
        "phi3",
        ROTARY
        | {
            "sliding_window": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "olmo2": ("olmo2", ROTARY),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}),
    "gemma3": (
        "gemma3_text",
        GEMMA
        | {
            "rope_parameters": {
                WINDOW: {"rope_type": "default", "rope_theta": 100.0},
                FULL: {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
            }
        },
    ),
}
# Families that scale their logits behind the head.
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granite", ROTARY | {"logits_scaling": 8.0}),
    "cohere": ("cohere", ROTARY | {"logit_scale": 0.25}),
}
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": 1,
    "decoder_start_token_id": 1,
    "eos_token_id": 0,
}
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_LONG = {"encoder_attention_type": "local", "local_radius": 7}
_SIDE: dict[str, Any] = ROTARY | {
    "num_hidden_layers": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": [WINDOW, FULL],
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 1.5,
}
_TEXT: dict[str, Any] = _SIDE | {"attn_logit_softcapping": None}
_SIDES = ("encoder", "decoder", "text_config")
# {name: (model_type, the keys of its config)} of encoder-decoders.
SEQ2SEQ: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", _T5),
    "t5 v1.1": ("t5", _T5 | _GATED),
    "mt5": ("mt5", _T5 | _GATED),
    "umt5": ("umt5", _T5),
    "byt5": (
        "t5",
        _T5 | _GATED | {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1},
    ),
    "longt5": ("longt5", _T5 | _LONG),
    "longt5, global": (
        "longt5",
        _T5 | _LONG | {"encoder_attention_type": "transient-global", "global_block_size": 4},
    ),
    "t5gemma": (
        "t5gemma",
        {"encoder": _SIDE, "decoder": _SIDE, "vocab_size": VOCABULARY}
        | {"eos_token_id": 0, "pad_token_id": 1},
    ),
    "t5gemma2": (
        "t5gemma2",
        {
            "encoder": {
                "text_config": _TEXT,
                "vision_config": NO_PICTURES,
                "mm_tokens_per_image": 4,
                "eoi_token_index": 2,
            },
            "decoder": _TEXT,
            "image_token_index": 3,
        },
    ),
}
# Those with T5's encoder: a reader of many passages, and a verifier.
T5 = ("t5", "t5 v1.1", "mt5", "umt5", "byt5")
READERS = {name: SEQ2SEQ[name] for name in T5}
VERIFIERS = READERS | DECODERS
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 130,
    "pad_token_id": 1,
}
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_BERT: dict[str, Any] = _ENCODER | dict.fromkeys(_DROPOUTS, 0.0)
# {name: (model_type, the keys of its config)} of what a retriever embeds with.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", _BERT),
    "roberta": ("roberta", _BERT),
    "xlm-roberta": ("xlm-roberta", _BERT),
    "distilbert": (
        "distilbert",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
        | {"dropout": 0.0, "attention_dropout": 0.0},
    ),
    "mpnet": ("mpnet", _BERT),
    "modernbert": (
        "modernbert",
        _ENCODER | {"local_attention": 8, "layer_types": [FULL, WINDOW], "eos_token_id": 0},
    ),
    "t5": SEQ2SEQ["t5"],
    "mt5": SEQ2SEQ["mt5"],
    "umt5": SEQ2SEQ["umt5"],
    "llama": DECODERS["llama"],
    "mistral": DECODERS["mistral"],
    "qwen2": DECODERS["qwen2"],
    "qwen3": DECODERS["qwen3"],  # Qwen3-Embedding's family
    "gemma3": DECODERS["gemma3"],
}


# What each task is tried on.
OF_TASK: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "cross_attention": DECODERS,
    "causal_lm": DECODERS | SCALED,
    "vera": VERIFIERS,
    "retriever": ENCODERS,
    "summariser": SEQ2SEQ,
    "fid": READERS,
}


def base_of(task: str, name: str, *, vocab_size: int = VOCABULARY) -> dict[str, Any]:
    """A random base of the table, as an experiment states it."""
    family, values = OF_TASK[task][name]
    return {"config": {**_of_vocabulary(values, vocab_size), "model_type": family}, "seed": 1}


def _of_vocabulary(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    return {
        key: _of_vocabulary(value, size)
        if key in _SIDES
        else size
        if key == "vocab_size"
        else value
        for key, value in config.items()
    }


_WIDTHS = ("hidden_size", "intermediate_size", "head_dim", "n_embd", "d_model", "d_kv", "d_ff")
_WIDTHS += ("dim", "hidden_dim", "max_position_embeddings", "n_positions")


def config_of(name: str) -> Any:
    """The transformers config of a decoder of the tables."""
    family, values = (DECODERS | SCALED)[name]
    return AutoConfig.for_model(family, **values)


def decoder(name: str, seed: int = 1) -> PreTrainedModel:
    """A decoder of the tables with random weights, mended as a base is that we load; norms are no
    ones.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = with_uneven_norms(AutoModelForCausalLM.from_config(config_of(name)).eval())
    mend_attention(made)
    return made


def with_uneven_norms(model: PreTrainedModel) -> PreTrainedModel:
    """The same model; what has one axis, norms and biases, is shifted at random."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += 0.2 * torch.randn_like(weight)
    return model


def wider(config: Mapping[str, Any], factor: int = 4) -> dict[str, Any]:
    """The same family with states, heads and positions so many times as wide."""
    return {
        key: wider(value, factor) if key in _SIDES else value * factor if key in _WIDTHS else value
        for key, value in config.items()
    }
