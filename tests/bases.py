"""The families of bases that people fine-tune, tiny: one table that every test of families reads.

Each is the smallest that still has what makes its family different: windows that rows reach beyond,
soft caps that bend, positions that are scaled, heads of another width than the states'.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

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
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 130,
    "pad_token_id": 1,
}
# {name: (model_type, the keys of its config)} of what a retriever embeds with.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", _ENCODER),
    "roberta": ("roberta", _ENCODER),
    "xlm-roberta": ("xlm-roberta", _ENCODER),
    "distilbert": (
        "distilbert",
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4},
    ),
    "mpnet": ("mpnet", _ENCODER),
    "modernbert": (
        "modernbert",
        _ENCODER | {"local_attention": 8, "layer_types": [FULL, WINDOW], "eos_token_id": 0},
    ),
    "t5 encoder": (
        "t5",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
        | {"num_heads": 4, "pad_token_id": 1},
    ),
    "llama": DECODERS["llama"],
    "mistral": DECODERS["mistral"],
    "qwen2": DECODERS["qwen2"],
    "qwen3": DECODERS["qwen3"],  # Qwen3-Embedding's family
    "gemma3": DECODERS["gemma3"],
}


def config_of(name: str) -> Any:
    """The transformers config of a decoder of the tables."""
    family, values = (DECODERS | SCALED)[name]
    return AutoConfig.for_model(family, **values)


def decoder(name: str, seed: int = 1) -> PreTrainedModel:
    """A decoder of the tables with random weights; norms are no ones."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(name)).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 1:
                    weight += 0.2 * torch.randn_like(weight)
    return model
