"""The published Fusion-in-Decoder experiments, as plain dictionaries.

Imports no torch. exp_configs.py takes these groups over as they are.
"""

from __future__ import annotations

from trainer.config.groups import Values, vary

# Fusion-in-Decoder. The published recipe counts optimizer updates (facebookresearch/FiD's
# total_steps counts micro-batches: its 15000 with accumulation 4 are 3750 updates), decays norms
# and biases too, and keeps the reader with the best exact match. It ran in fp32; bf16 keeps fp32
# master weights, and fp16 overflows in T5.

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
FID_NQ_LARGE = vary(
    FID_NQ_BASE,
    base="google-t5/t5-large",
    train={"gradient_checkpointing": True},
    optim={"lr": 5e-5},
)
# FiD's recipe on a decoder with FiDO's switches (arXiv 2212.08153); 6 is the example in the code
# that its authors published. Of T5-base's 12 blocks the 6th and the 12th look at the passages.
FIDO_NQ_BASE = vary(
    FID_NQ_BASE, reader={"cross_attention_every": 6, "cross_attention_multi_query": True}
)
FID_TQA_BASE = vary(FID_NQ_BASE, data={"files": FILES_OF["TQA"]})
FID_TQA_LARGE = vary(FID_NQ_LARGE, data={"files": FILES_OF["TQA"]})
# The paper's cheaper recipe (section 4, table 4): 46.0 instead of 46.5 EM for a third of the GPU
# hours.
FID_NQ_BASE_25 = vary(
    FID_NQ_BASE,
    train={"steps": 10_000, "micro_batch": 4},
    schedule={"shape": "constant"},
    data={"contexts": 25},
)
FID_NQ_BASE_TO_100 = vary(
    FID_NQ_BASE_25,
    base={"experiment": FID_NQ_BASE_25},
    train={"steps": 1000, "micro_batch": 1},
    schedule={"warmup_steps": None},
    data={"contexts": 100},
)

GROUPS: dict[str, list[Values]] = {
    "fid_nq_base": [FID_NQ_BASE],
    "fid_nq_large": [FID_NQ_LARGE],
    "fid_tqa_base": [FID_TQA_BASE],
    "fid_tqa_large": [FID_TQA_LARGE],
    "fido_nq_base": [FIDO_NQ_BASE],
    "fid_nq_base_25to100": [FID_NQ_BASE_25, FID_NQ_BASE_TO_100],
}
