"""The published experiments of the plausibility verifier, as plain dictionaries.

Imports no torch. exp_configs.py takes these groups over as they are.
"""

from __future__ import annotations

from trainer.config.groups import Values, vary

# The plausibility verifier, as published (Liu et al. 2023): 64 groups of up to 4 statements a step,
# 50,000 steps. Data are converted first: python -m trainer convert TASK --in RAW --out DIR; then
# --data_path DIR.

STAGE_B_TASKS = [
    *(
        "openbookqa",
        "arc_easy",
        "arc_hard",
        "ai2_science_elementary",
        "ai2_science_middle",
        "commonsenseqa",
        "qasc",
    ),
    *(
        "physical_iqa",
        "social_iqa",
        "winogrande_xl",
        "com2sense_paired",
        "sciq",
        "quarel",
        "quartz",
        "cycic_mc",
    ),
    *("comve_a", "csqa2", "symkd_anno", "gengen_anno"),
]
UNSEEN1_TASKS = ["wsc273", "copa", "numersense", "prost", "spatial_cs", "rainier_anno"]
UNSEEN2_TASKS = [
    "swag",
    "hellaswag",
    "codah",
    "story_cloze_test",
    "alphanli",
    "strategyqa",
    "creak",
]
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
    size: vary(
        VERA_STAGE_A_XXL,
        base=f"google/t5-v1_1-{size}",
        train={"gradient_checkpointing": size in ("xl", "xxl")},
    )
    for size in ("small", "base", "large", "xl", "xxl")
}
VERA_STAGE_B = {
    size: vary(stage_a, base={"experiment": stage_a}, data={"train_tasks": STAGE_B_TASKS})
    for size, stage_a in VERA_STAGE_A.items()
}

GROUPS: dict[str, list[Values]] = {
    **{f"vera_stage_a_{size}": [values] for size, values in VERA_STAGE_A.items()},
    **{f"vera_stage_b_{size}": [values] for size, values in VERA_STAGE_B.items()},
}
