"""Published fine-tuning recipes of T5 for summaries, as plain dictionaries.

Imports no torch. exp_configs.py takes these groups over as they are.
"""

from __future__ import annotations

from trainer.config.groups import Values, vary

# Raffel et al. 2020 (arXiv 1910.10683, sec. 3.1): Adafactor at a constant 0.001, batches of 128 x
# 512 tokens, "summarize: " in front; dropout 0.1 is the base's own. It ran 2**18 steps on all
# tasks; 9 epochs of CNN/Daily Mail are ours. Generation: task_specific_params.summarization of the
# config.json that google-t5 ships. In bf16 at stage 0 DeepSpeed accumulates gradients in bf16: the
# larger the micro-batch, the better.
SUMMARISE_T5_SMALL: Values = {
    "task": "summariser",
    "base": "google-t5/t5-small",
    "train": {
        "steps": 20_000,
        "global_batch": 128,
        "micro_batch": 16,
        "bucket_steps": 50,
        "eval_batch": 32,
        "precision": "bf16",
        "eval_every": 2000,
        "save_every": 1000,
        "answers": 1000,
        "best": "valid/rouge2",
        "best_is": "max",
    },
    "optim": {"name": "adafactor", "lr": 1e-3, "clip": 0.0},
    "schedule": {"shape": "constant"},
    "data": {
        "source": "datasets",
        "dataset": "abisee/cnn_dailymail",
        "subset": "3.0.0",
        "document": "article",
        "summaries": ["highlights"],
        "source_tokens": 512,
        "target_tokens": 128,
    },
    "generation": {
        "num_beams": 4,
        "length_penalty": 2.0,
        "min_tokens": 30,
        "max_tokens": 200,
        "no_repeat_ngram": 3,
    },
    "deepspeed": "zero0",
}
SUMMARISE_T5_BASE = vary(SUMMARISE_T5_SMALL, base="google-t5/t5-base", train={"eval_batch": 16})
SUMMARISE_T5_LARGE = vary(
    SUMMARISE_T5_SMALL, base="google-t5/t5-large", train={"gradient_checkpointing": True}
)
# 3 billion weights: partitioned over the devices, so AdamW (Adafactor needs whole weights, one
# device's worth of them)
SUMMARISE_T5_XL = vary(
    SUMMARISE_T5_LARGE,
    base="google/t5-v1_1-xl",
    train={"micro_batch": 4, "eval_batch": 8},
    deepspeed="zero3",
)
SUMMARISE_T5_XL["optim"] = {"lr": 5e-5, "weight_decay": 0.0}
SUMMARISE_T5_XL["schedule"] = {"shape": "linear", "warmup_steps": 500}

GROUPS: dict[str, list[Values]] = {
    "summarise_t5_small": [SUMMARISE_T5_SMALL],
    "summarise_t5_base": [SUMMARISE_T5_BASE],
    "summarise_t5_large": [SUMMARISE_T5_LARGE],
    "summarise_t5_xl": [SUMMARISE_T5_XL],
}
