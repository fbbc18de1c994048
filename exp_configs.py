"""EXP_GROUPS: group -> the experiments that it trains, each one plain dictionary. Imports no torch.

A group states what differs from a named parent (`vary`); trainer/config.py and the config.py of a task say what each
key means. Dictionaries hold JSON values only, for their hash names the run folder: another number is another run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer import groups
from trainer.groups import cartesian_exp_group, vary

Values = dict[str, Any]

__all__ = ["EXP_GROUPS", "cartesian_exp_group", "experiments_of", "read_groups", "vary"]

# Cross-attention layers in a frozen decoder, as published: ServiceNow/xc-cache, Apache-2.0, scripts/cross_attn at its
# last commit, and its first public ancestor (2023-11) for the group named "early". The published keys are micro-batch
# and accumulation per device; the paper's 256 = 1 x 32 x 8 says 8 devices, so global_batch = micro x accumulation x 8.
# Not in the schema yet: include_context_ids (half of the samples are the contexts themselves, as a language-modelling
# target) and data subsets ("nq" alone for starcoderbase-1b). Both come with the cache of encoder states.

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
    "data": {"source": "jsonl", "template": "chat", "decoder_tokens": 2048, "context_tokens": 2048, "loss_on": "all"},
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
    data={"decoder_tokens": 128, "context_tokens": 128},
)
# The published trainer ran this schedule without its warm-up: transformers ignores warmup_ratio on a plateau.
STARCODERBASE_1B_EARLY = vary(
    STARCODERBASE_1B,
    train={"micro_batch": 2, "global_batch": 2 * 1 * DEVICES, "gradient_checkpointing": True},
    optim={"lr": 2e-4},
    # transformers' plateau schedule has no warm-up, so the published warmup_ratio never acted on this group
    schedule={"shape": "reduce_on_plateau", "warmup_ratio": None},
    layers={"shared_weights": True},
    data={"decoder_tokens": 2048, "context_tokens": 2048, "template": "plain"},
)
WIDE: Values = {"after": True, "width": 1024}
STARCODERBASE_3B = vary(
    PUBLISHED,
    base="bigcode/starcoderbase-3b",
    train={"micro_batch": 4, "global_batch": 4 * 32 * DEVICES},
    optim={"lr": 5e-4, "weight_decay": 1e-3},
    schedule={"shape": "cosine"},
    layers={**WIDE, "count": 6, "stride": 6, "shared_weights": False, "heads": 16, "key_dropout": 0.4},
    data={"decoder_tokens": 4096, "context_tokens": 4096},
)
STARCODERBASE_7B = vary(
    PUBLISHED,
    base="bigcode/starcoderbase-7b",
    train={"micro_batch": 1, "global_batch": 1 * 32 * DEVICES},
    optim={"lr": 1e-4, "weight_decay": 1e-2},
    schedule={"shape": "cosine"},
    layers={**WIDE, "count": 8, "stride": 4, "shared_projections": True, "heads": 8, "key_dropout": 0.4},
)
STARCHAT_ALPHA = vary(
    PUBLISHED,
    base="HuggingFaceH4/starchat-alpha",
    train={"micro_batch": 1, "global_batch": 1 * 32 * DEVICES, "precision": "bf16", "gradient_checkpointing": True},
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
    train={"micro_batch": 1, "global_batch": 1 * 32 * DEVICES, "precision": "bf16", "gradient_checkpointing": True},
    optim={"lr": 2e-4, "weight_decay": 0.0},
    layers={**WIDE, "count": 4, "stride": 6, "shared_weights": False, "heads": 32, "key_dropout": 0.1},
    data={"decoder_tokens": 6144, "context_tokens": 6144},
)
TULU_7B_ABLATION = vary(
    TULU_7B, optim={"weight_decay": 1e-3}, schedule={"shape": "cosine"}, layers={"key_dropout": 0.2}
)

# Groups that run on a laptop: a random base of 1.0M parameters and the corpus that every Python carries with it.

TINY_BASE: Values = {
    "config": {
        "model_type": "gpt_bigcode",
        "vocab_size": 2048,
        "n_positions": 512,
        "n_embd": 128,
        "n_layer": 4,
        "n_head": 4,
        "n_inner": 512,
        "multi_query": True,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
}
CAUSAL_LM_TINY: Values = {
    "task": "causal_lm",
    "base": TINY_BASE,
    "tokenizer": {"vocab_size": 2048},
    "train": {
        "steps": 60,
        "global_batch": 32,
        "micro_batch": 8,
        "precision": "fp32",
        "log_every": 10,
        "eval_every": 30,
        "save_every": 30,
    },
    "optim": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.01},
    "schedule": {"shape": "cosine", "warmup_steps": 10},
    "data": {"source": "stdlib_docs", "max_tokens": 128},
    "deepspeed": "zero2",
}
CROSSATTN_SMALL = vary(
    CAUSAL_LM_TINY, task="cross_attention", layers={"count": 2, "stride": 2, "width": 128, "heads": 4}
)
CROSSATTN_SMALL["data"] = {
    "source": "stdlib_docs",
    "template": "chat",
    "decoder_tokens": 64,
    "context_tokens": 160,
    "loss_on": "answer",
    "shuffled_context": True,
}
CROSSATTN_TINY = vary(
    CROSSATTN_SMALL,
    # A frozen random base limits its logits to about |state| x |embedding|: at the usual 0.02 no loss can fall below 5.
    base={"config": TINY_BASE["config"] | {"initializer_range": 0.1}},
    train={"steps": 200, "eval_every": 100, "save_every": 100},
    # Calm enough that ZeRO stages and ranks agree to 1e-5 at the end; at 6e-3 rounding grows to 1e-2 in 230 steps.
    optim={"lr": 4e-3, "eps": 1e-6},
    schedule={"warmup_steps": 20},
)

# Natural Questions on a CPU: a small language model of the passages first, then cross-attention layers in it, frozen.

LM_NQ_CPU = vary(
    CAUSAL_LM_TINY,
    base={
        "config": TINY_BASE["config"] | {"vocab_size": 49152, "n_embd": 320, "n_layer": 8, "n_head": 5, "n_inner": 1280}
    },
    tokenizer="../tokenizers/starcoder",
    # bf16: the head is two thirds of the work, and a CPU with avx512_bf16 multiplies three times as fast as in fp32
    train={"steps": 400, "global_batch": 16, "precision": "bf16", "eval_every": 100, "save_every": 100},
    optim={"lr": 2e-3},
    schedule={"warmup_steps": 40},
    data={"source": "nq", "max_tokens": 256},
    deepspeed="zero1",  # accumulates gradients in fp32; stage 0 would in bf16
)
CROSSATTN_NQ_CPU = vary(
    CROSSATTN_SMALL,
    base={"experiment": LM_NQ_CPU},
    tokenizer=None,
    train={"steps": 1000, "global_batch": 16, "precision": "bf16", "eval_every": 200, "save_every": 200},
    optim={"lr": 2e-3},
    schedule={"warmup_steps": 30},
    layers={"count": 4, "width": 320, "heads": 5},
    data={"source": "nq", "context_tokens": 256},
    deepspeed="zero1",
)

# Fusion-in-Decoder. The published recipe counts optimizer updates (facebookresearch/FiD's total_steps counts
# micro-batches: its 15000 with accumulation 4 are 3750 updates), decays norms and biases too, and keeps the reader with
# the best exact match. It ran in fp32; bf16 keeps fp32 master weights, and fp16 overflows in T5.

FILES_OF = {  # as FiD's get-data.sh lays them out, below --data_path open_domain_data
    name: {"train": f"{name}/train.json", "valid": f"{name}/dev.json", "test": f"{name}/test.json"}
    for name in ("NQ", "TQA")
}
FID_NQ_BASE: Values = {
    "task": "fid",
    "base": "google-t5/t5-base",
    "train": {
        "steps": 15_000,
        "global_batch": 64,
        "micro_batch": 1,
        "eval_batch": 4,
        "precision": "bf16",
        "eval_every": 500,
        "save_every": 500,
        "answers": "all",
        "best": "valid/em",
        "best_is": "max",
    },
    "optim": {"lr": 1e-4, "weight_decay": 0.01, "decay": "all", "clip": 1.0},
    "schedule": {"shape": "linear", "warmup_steps": 1000},
    "data": {"source": "fid", "files": FILES_OF["NQ"], "contexts": 100, "passage_tokens": 250},
    "deepspeed": "zero2",
}
FID_NQ_LARGE = vary(FID_NQ_BASE, base="google-t5/t5-large", train={"gradient_checkpointing": True}, optim={"lr": 5e-5})
FID_TQA_BASE = vary(FID_NQ_BASE, data={"files": FILES_OF["TQA"]})
FID_TQA_LARGE = vary(FID_NQ_LARGE, data={"files": FILES_OF["TQA"]})
# The paper's cheaper recipe (section 4, table 4): 46.0 instead of 46.5 EM for a third of the GPU hours.
FID_NQ_BASE_25 = vary(
    FID_NQ_BASE, train={"steps": 10_000, "micro_batch": 4}, schedule={"shape": "constant"}, data={"contexts": 25}
)
FID_NQ_BASE_TO_100 = vary(
    FID_NQ_BASE_25,
    base={"experiment": FID_NQ_BASE_25},
    train={"steps": 1000, "micro_batch": 1},
    schedule={"warmup_steps": None},
    data={"contexts": 100},
)

TINY_T5: Values = {
    "config": {
        "model_type": "t5",
        "vocab_size": 2048,
        "d_model": 128,
        "d_kv": 32,
        "d_ff": 512,
        "num_layers": 3,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "pad_token_id": 1,
        "decoder_start_token_id": 1,
        "eos_token_id": 0,
    }
}
FID_TINY = vary(
    CAUSAL_LM_TINY,
    task="fid",
    base=TINY_T5,
    train={"steps": 120, "eval_every": 60, "save_every": 60, "answers": 40, "best": "valid/em", "best_is": "max"},
    optim={"lr": 3e-3, "decay": "all"},
    schedule={"shape": "linear", "warmup_steps": 20},
)
FID_TINY["data"] = {"source": "stdlib_docs", "contexts": 3, "passage_tokens": 160, "answer_tokens": 32}
# minFiD's toy run: three questions with three passages each, and an exact match of 3 of 3 at the end.
FID_TOY = vary(
    FID_TINY,
    base={"config": {**TINY_T5["config"], "vocab_size": 32128, "d_model": 64, "d_kv": 16, "d_ff": 128}},
    tokenizer="../tokenizers/t5",
    train={"steps": 60, "global_batch": 2, "micro_batch": 1, "eval_every": 20, "save_every": 60, "answers": "all"},
    optim={"lr": 1e-3, "betas": [0.9, 0.999]},
    schedule={"warmup_steps": 2},
)
FID_TOY["base"]["config"] |= {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
FID_TOY["data"] = {
    "source": "fid",
    "files": {"train": "train3.json", "valid": "train3.json"},
    "contexts": 3,
    "passage_tokens": 30,
}
EVERY_100: Values = {"eval_every": 100, "save_every": 100}
# NaturalQuestions on a CPU: real questions with the passages that BM25 ranks first, and a small T5 from nothing.
FID_NQ_CPU = vary(
    FID_TOY,
    base={"config": {**FID_TOY["base"]["config"], "d_model": 256, "d_kv": 64, "d_ff": 1024, "dropout_rate": 0.1}},
    train={**EVERY_100, "steps": 500, "global_batch": 16, "micro_batch": 8, "eval_batch": 8, "precision": "bf16"},
    optim={"lr": 1e-3},
    schedule={"warmup_steps": 50},
    deepspeed="zero1",
)
FID_NQ_CPU["data"] = {"source": "nq", "corpus": "corpus.tsv", "contexts": 3, "passage_tokens": 250}

# The plausibility verifier, as published (Liu et al. 2023): 64 groups of up to 4 statements a step, 50,000 steps.
# Data are converted first: python -m trainer convert TASK --in RAW --out DIR; then --data_path DIR.

STAGE_B_TASKS = [
    *("openbookqa", "arc_easy", "arc_hard", "ai2_science_elementary", "ai2_science_middle", "commonsenseqa", "qasc"),
    *("physical_iqa", "social_iqa", "winogrande_xl", "com2sense_paired", "sciq", "quarel", "quartz", "cycic_mc"),
    *("comve_a", "csqa2", "symkd_anno", "gengen_anno"),
]
UNSEEN1_TASKS = ["wsc273", "copa", "numersense", "prost", "spatial_cs", "rainier_anno"]
UNSEEN2_TASKS = ["swag", "hellaswag", "codah", "story_cloze_test", "alphanli", "strategyqa", "creak"]
VERA_STAGE_A_XXL: Values = {
    "task": "vera",
    "base": "google/t5-v1_1-xxl",
    "train": {
        "steps": 50_000,
        "global_batch": 64,
        "micro_batch": 8,
        "eval_batch": 8,
        "precision": "bf16",
        "gradient_checkpointing": True,
        "seed": 19260817,
        "eval_every": 1000,
        "save_every": 1000,
        "best": "valid/accuracy/seen",
        "best_is": "max",
    },
    "optim": {"lr": 1e-5, "weight_decay": 0.0, "clip": 0.0},
    "schedule": {"shape": "constant"},
    "data": {
        "source": "groups",
        "train_tasks": ["atomic2020_3d", "genericskb_3d"],
        "valid_tasks": STAGE_B_TASKS,
        "test_tasks": [*STAGE_B_TASKS, *UNSEEN1_TASKS, *UNSEEN2_TASKS],
        "unseen1": UNSEEN1_TASKS,
        "unseen2": UNSEEN2_TASKS,
        "max_tokens": 128,
        "statements": 4,
    },
    "deepspeed": "zero2",
}
VERA_STAGE_A = {
    size: vary(VERA_STAGE_A_XXL, base=f"google/t5-v1_1-{size}", train={"gradient_checkpointing": size in ("xl", "xxl")})
    for size in ("small", "base", "large", "xl", "xxl")
}
VERA_STAGE_B = {
    size: vary(stage_a, base={"experiment": stage_a}, data={"train_tasks": STAGE_B_TASKS})
    for size, stage_a in VERA_STAGE_A.items()
}
VERA_TINY = vary(
    FID_TINY,
    task="vera",
    train={"answers": None, "eval_batch": 16, "best": "valid/accuracy/mean"},
    optim={"lr": 1e-3, "decay": "matrices", "weight_decay": 0.0},
)
VERA_TINY["data"] = {
    "source": "stdlib_docs",
    "train_tasks": ["docs_choice", "docs_boolean"],
    "valid_tasks": ["docs_choice", "docs_boolean"],
    "max_tokens": 48,
    "valid_limit": 100,
}
T5_V11: Values = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
# Both stages on a CPU: which of two statements makes sense (ComVE), then whether one statement is true (CREAK).
VERA_CPU_A = vary(
    VERA_TINY,
    base={"config": {**FID_NQ_CPU["base"]["config"], "d_ff": 512, **T5_V11}},
    tokenizer="../shared/data/tokenizers/t5",
    train={"steps": 400, "global_batch": 64, "micro_batch": 32, "eval_batch": 64, "eval_every": 100, "save_every": 100},
    optim={"lr": 5e-4},
    schedule={"shape": "constant", "warmup_steps": 50},
)
VERA_CPU_A["data"] = {
    "source": "groups",
    "train_tasks": ["comve_a"],
    "valid_tasks": ["comve_a"],
    "test_tasks": ["comve_a", "creak", "codah", "numersense", "wsc273", "copa", "strategyqa"],
    "unseen1": ["numersense", "wsc273", "copa"],
    "unseen2": ["codah", "strategyqa"],
    "max_tokens": 64,
}
VERA_CPU_B = vary(
    VERA_CPU_A,
    base={"experiment": VERA_CPU_A},
    train={"best": "valid/weighted_accuracy/creak"},
    optim={"lr": 1e-4},
    data={"train_tasks": ["creak"], "valid_tasks": ["creak", "comve_a"]},
)

EXP_GROUPS: dict[str, list[Values]] = {
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
    "crossattn_mistral-7b": [vary(TULU_7B, base="mistralai/Mistral-7B-Instruct-v0.2", data={"template": "mistral"})],
    "causal_lm_tiny": [CAUSAL_LM_TINY],
    "crossattn_tiny": [CROSSATTN_TINY],
    "lm_nq_cpu": [LM_NQ_CPU],
    "crossattn_nq_cpu": [CROSSATTN_NQ_CPU],
    "fid_nq_base": [FID_NQ_BASE],
    "fid_nq_large": [FID_NQ_LARGE],
    "fid_tqa_base": [FID_TQA_BASE],
    "fid_tqa_large": [FID_TQA_LARGE],
    "fid_nq_base_25to100": [FID_NQ_BASE_25, FID_NQ_BASE_TO_100],
    "fid_tiny": [FID_TINY],
    "fid_toy": [FID_TOY],
    "fid_nq_cpu": [FID_NQ_CPU],
    **{f"vera_stage_a_{size}": [values] for size, values in VERA_STAGE_A.items()},
    **{f"vera_stage_b_{size}": [values] for size, values in VERA_STAGE_B.items()},
    "vera_tiny": [VERA_TINY],
    "vera_cpu": [VERA_CPU_A, VERA_CPU_B],
}


def experiments_of(group: str, path: Path | None, steps: int | None) -> list[Values]:
    """The dictionaries of one group, with `steps` written in where it is given; see groups.chosen."""
    return groups.chosen(read_groups(path), group, steps)


def read_groups(path: Path | None) -> dict[str, list[Values]]:
    """EXP_GROUPS of the Python file at `path`, or of this file when it is None."""
    return EXP_GROUPS if path is None else groups.read(path)
