"""The published cross-attention experiments, as plain dictionaries.

Imports no torch. exp_configs.py takes these groups over as they are.
"""

from __future__ import annotations

from trainer.config.groups import Values, vary

# Cross-attention layers in a frozen decoder, as published: ServiceNow/xc-cache, Apache-2.0,
# scripts/cross_attn at its last commit, and its first public ancestor (2023-11) for the group named
# "early". The published keys are micro-batch and accumulation per device; the paper's 256 = 1 x 32
# x 8 says 8 devices, so global_batch = micro x accumulation x 8. The published code hid no keys on
# Llama and Mistral bases: there cross_attn_dropout_prob was the dropout of attention probabilities.
# Its Mistral also ignored width and heads of the attention (base_attention).

DEVICES = 8

PUBLISHED: Values = {
    "task": "cross_attention",
    "base": "TabbyML/SantaCoder-1B",
    "train": {
        "steps": 500_000,
        "micro_batch": 16,
        "global_batch": 16 * 1 * DEVICES,
        "precision": "fp16",
        "gradient_checkpointing": False,
    },
    "optim": {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 5e-2, "clip": 1.0},
    "schedule": {"shape": "linear", "warmup_ratio": 0.05},
    "layers": {
        "count": 4,
        "stride": 2,
        "shared_weights": True,
        "shared_projections": False,
        "after": False,
        "width": None,
        "heads": None,
        "key_dropout": 0.3,
        "initialisation": "published",
    },
    "data": {
        "source": "jsonl",
        "template": "chat",
        "decoder_tokens": 2048,
        "context_tokens": 2048,
        "loss_on": "all",
        "include_context_ids": True,
    },
    "deepspeed": "zero2",
}

SANTACODER = vary(
    PUBLISHED,
    train={"micro_batch": 5, "global_batch": 5 * 8 * DEVICES},
    optim={"lr": 3e-4, "weight_decay": 5e-4},
    schedule={"shape": "cosine"},
    layers={"count": 6},
)
STARCODER = vary(
    PUBLISHED,
    base="bigcode/starcoder",
    train={"micro_batch": 1, "global_batch": 1 * 16 * DEVICES},
    layers={"count": 8, "stride": 4},
)
STARCODERBASE_1B = vary(
    PUBLISHED,
    base="bigcode/starcoderbase-1b",
    train={"micro_batch": 1, "global_batch": 1 * 1 * DEVICES},
    optim={"lr": 3e-4, "weight_decay": 5e-1},
    schedule={"shape": "cosine"},
    layers={"count": 6, "stride": 3, "shared_weights": False},
    data={"decoder_tokens": 128, "context_tokens": 128, "training_data_subset": "nq"},
)
# The published trainer ran this schedule without its warm-up: transformers ignores warmup_ratio on
# a plateau.
STARCODERBASE_1B_EARLY = vary(
    STARCODERBASE_1B,
    train={"micro_batch": 2, "global_batch": 2 * 1 * DEVICES, "gradient_checkpointing": True},
    optim={"lr": 2e-4},
    # transformers' plateau schedule has no warm-up, so the published warmup_ratio never acted on
    # this group
    schedule={"shape": "reduce_on_plateau", "warmup_ratio": None},
    layers={"shared_weights": True},
    data={
        "decoder_tokens": 2048,
        "context_tokens": 2048,
        "template": "plain",
        "training_data_subset": "all",
    },
)
WIDE: Values = {"after": True, "width": 1024}
STARCODERBASE_3B = vary(
    PUBLISHED,
    base="bigcode/starcoderbase-3b",
    train={"micro_batch": 4, "global_batch": 4 * 32 * DEVICES},
    optim={"lr": 5e-4, "weight_decay": 1e-3},
    schedule={"shape": "cosine"},
    layers={
        **WIDE,
        "count": 6,
        "stride": 6,
        "shared_weights": False,
        "heads": 16,
        "key_dropout": 0.4,
    },
    data={"decoder_tokens": 4096, "context_tokens": 4096},
)
STARCODERBASE_7B = vary(
    PUBLISHED,
    base="bigcode/starcoderbase-7b",
    train={"micro_batch": 1, "global_batch": 1 * 32 * DEVICES},
    optim={"lr": 1e-4, "weight_decay": 1e-2},
    schedule={"shape": "cosine"},
    layers={
        **WIDE,
        "count": 8,
        "stride": 4,
        "shared_projections": True,
        "heads": 8,
        "key_dropout": 0.4,
    },
)
STARCHAT_ALPHA = vary(
    PUBLISHED,
    base="HuggingFaceH4/starchat-alpha",
    train={
        "micro_batch": 1,
        "global_batch": 1 * 32 * DEVICES,
        "precision": "bf16",
        "gradient_checkpointing": True,
    },
    optim={"lr": 2e-4, "weight_decay": 1e-2},
    schedule={"shape": "cosine"},
    layers={
        "count": 4,
        "stride": 8,
        "shared_weights": False,
        "after": True,
        "shared_projections": True,
        "width": 2048,
        "heads": 32,
        "key_dropout": 0.25,
    },
    data={"decoder_tokens": 4096, "context_tokens": 4096},
)
TULU_7B = vary(
    PUBLISHED,
    base="allenai/tulu-2-dpo-7b",
    train={
        "micro_batch": 1,
        "global_batch": 1 * 32 * DEVICES,
        "precision": "bf16",
        "gradient_checkpointing": True,
    },
    optim={"lr": 2e-4, "weight_decay": 0.0},
    layers={
        **WIDE,
        "count": 4,
        "stride": 6,
        "shared_weights": False,
        "heads": 32,
        "key_dropout": 0.0,
        "attention_dropout": 0.1,
    },
    data={"decoder_tokens": 6144, "context_tokens": 6144},
)
TULU_7B_ABLATION = vary(
    TULU_7B,
    optim={"weight_decay": 1e-3},
    schedule={"shape": "cosine"},
    layers={"attention_dropout": 0.2},
)

MISTRAL_7B = vary(
    TULU_7B,
    base="mistralai/Mistral-7B-Instruct-v0.2",
    layers={"heads": None, "base_attention": True},
    data={"template": "mistral"},
)

GROUPS: dict[str, list[Values]] = {
    "crossattn_santacoder": [SANTACODER],
    "crossattn_starcoder": [STARCODER],
    "crossattn_starcoderbase-1b": [STARCODERBASE_1B],
    "crossattn_starcoderbase-1b-early": [STARCODERBASE_1B_EARLY],
    "crossattn_starcoderbase-3b": [STARCODERBASE_3B],
    "crossattn_starcoderbase-7b": [STARCODERBASE_7B],
    "crossattn_starchat-alpha": [STARCHAT_ALPHA],
    "crossattn_tulu-7b": [TULU_7B],
    "crossattn_tulu-13b": [vary(TULU_7B, base="allenai/tulu-2-dpo-13b")],
    "crossattn_tulu-7b_2x8": [vary(TULU_7B_ABLATION, layers={"count": 2, "stride": 8})],
    "crossattn_tulu-7b_8x2": [vary(TULU_7B_ABLATION, layers={"count": 8, "stride": 2})],
    "crossattn_tulu-7b_8x3": [vary(TULU_7B_ABLATION, layers={"count": 8, "stride": 3})],
    "crossattn_llama-7b": [vary(TULU_7B, base="meta-llama/Llama-2-7b-hf")],
    "crossattn_llama-13b": [vary(TULU_7B, base="meta-llama/Llama-2-13b-hf")],
    "crossattn_mistral-7b": [MISTRAL_7B],
}
