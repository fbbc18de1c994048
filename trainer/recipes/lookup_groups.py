"""Small experiments on the made-up corpus (trainer/data/lookup.py), from random weights. They show
whether training works at all on a new machine, cluster or recipe. Imports no torch.

The experiments of a group build on each other: with one passage a model learns to copy the answer,
with two and more it learns to choose the right passage.
"""

from __future__ import annotations

from trainer.config.groups import Values, vary

TOKENIZER: Values = {"vocab_size": 768, "corpus": "lookup"}
T5: Values = {
    "config": {
        "model_type": "t5",
        "vocab_size": 768,
        "d_model": 128,
        "d_kv": 32,
        "d_ff": 256,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "pad_token_id": 1,
        "decoder_start_token_id": 1,
        "eos_token_id": 0,
    }
}

# Fusion-in-Decoder learns in four steps: to copy the answer (one passage), to choose the passage by
# its relation (two passages about one person) and by its person (five), and to find it among
# twenty.
FID_COPIES: Values = {
    "task": "fid",
    "base": T5,
    "tokenizer": TOKENIZER,
    "train": {
        "steps": 800,
        "global_batch": 64,
        "micro_batch": 64,
        "eval_batch": 64,
        "precision": "fp32",
        "log_every": 50,
        "eval_every": 100,
        "save_every": 100,
        "answers": 100,
        "best": "valid/em",
        "best_is": "max",
    },
    "optim": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.01, "decay": "all"},
    "schedule": {"shape": "constant", "warmup_steps": 50},
    "data": {
        "source": "lookup",
        "contexts": 1,
        "passage_tokens": 32,
        "answer_tokens": 8,
        "clean_up_spaces": False,
    },
    "deepspeed": "zero2",
}
FID_CHOOSES = vary(
    FID_COPIES,
    base={"experiment": FID_COPIES},
    tokenizer=None,
    train={"steps": 300},
    data={"contexts": 2},
)
FID_READS_5 = vary(
    FID_CHOOSES,
    base={"experiment": FID_CHOOSES},
    train={"steps": 1500},
    schedule={"shape": "linear"},
    data={"contexts": 5},
)
FID_READS_20 = vary(
    FID_READS_5,
    base={"experiment": FID_READS_5},
    train={"steps": 400, "micro_batch": 32, "eval_batch": 25},
    optim={"lr": 5e-4},
    data={"contexts": 20},
)

# The second and third steps of benchmarks/chain.py, which writes their files. The reader of twenty
# passages is trained on with the five passages that a retriever returns; they are about people with
# similar names. Then a verifier, initialised from the reader's encoder, learns to judge whether a
# passage supports an answer.
FID_RETRIEVED = vary(
    FID_READS_20,
    base={"experiment": FID_READS_20},
    train={"steps": 600, "micro_batch": 64, "eval_batch": 64},
    data={"source": "fid", "contexts": 5},
)

# `make demo`, which writes the files of questions(); each row is read once. Its base, which is part
# of the package, finds the passage that a fragment is taken from (trainer/demo/make_base.py). What
# is left to learn is to read a question, and to answer with the place alone.
FID_DEMO = vary(
    FID_COPIES,
    base="package:trainer/demo/base",
    tokenizer=None,
    train={
        "steps": 600,
        "global_batch": 32,
        "micro_batch": 32,
        "log_every": 20,
        "eval_every": 200,
        "save_every": 100,
        "answers": 50,
    },
    schedule={"shape": "linear", "warmup_steps": 20},
    data={"source": "files", "contexts": 5},
)

# The verifier judges statements about sums, orders and members; each holds all that is needed to
# judge it. The statements of a group differ only in what makes them false, and the model learns
# from that. The contrastive term is off: it would push apart groups that differ in names only.
VERA_LOOKUP: Values = {
    "task": "vera",
    "base": {"config": T5["config"] | {"num_layers": 4}},
    "tokenizer": TOKENIZER,
    "train": {
        **{key: FID_COPIES["train"][key] for key in ("global_batch", "micro_batch", "eval_batch")},
        "steps": 2400,
        "precision": "fp32",
        "log_every": 50,
        "eval_every": 300,
        "save_every": 300,
        "best": "valid/auroc/all",
        "best_is": "max",
    },
    "optim": {"lr": 1e-3, "betas": [0.9, 0.95]},
    "schedule": {"shape": "linear", "warmup_steps": 50},
    "loss": {"contrastive": 0},
    "data": {
        "source": "lookup",
        "train_tasks": ["arithmetic", "order", "membership"],
        "valid_tasks": ["arithmetic", "order", "membership"],
        "max_tokens": 40,
    },
    "deepspeed": "zero2",
}
VERA_ANSWERS = vary(
    VERA_LOOKUP,
    base={"experiment": FID_RETRIEVED},
    tokenizer=None,
    train={"steps": 900, "eval_every": 300, "save_every": 300},
    data={
        "source": "files",
        "train_tasks": ["answers"],
        "valid_tasks": ["answers"],
        "max_tokens": 64,
    },
)

# The sizes of the language models below.
DECODER: Values = {
    "vocab_size": 768,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "initializer_range": 0.05,
}

# Cross-attention: a small language model learns to answer from a text in front of the question.
# Then it is frozen, and the new layers alone give it the text. To find a fact, the model must first
# gather it in one token. Therefore the first two blocks see a window of eight tokens, the length of
# a fact, with fast rotations, so that near positions differ; the last block sees the whole text
# with slow rotations, and looks the fact up.
GEMMA: Values = {
    "config": {
        "model_type": "gemma3_text",
        **DECODER,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 8,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    }
}
LM_LOOKUP: Values = {
    "task": "causal_lm",
    "base": GEMMA,
    "tokenizer": TOKENIZER,
    "train": {
        "steps": 700,
        "global_batch": 64,
        "micro_batch": 64,
        "eval_batch": 50,
        "precision": "fp32",
        "log_every": 50,
        "eval_every": 100,
        "save_every": 100,
    },
    "optim": {"lr": 3e-3, "betas": [0.9, 0.98], "weight_decay": 0.01},
    "schedule": {"shape": "linear", "warmup_steps": 80},
    "data": {"source": "lookup", "max_tokens": 192, "loss_on": "answer"},
    "deepspeed": "zero2",
}
# With a loss on answers only, nothing trains what the last block writes at the other tokens, and it
# overwrites most of what the facts' states held (docs/log.md), which cross-attention reads. A few
# steps with a loss on all tokens restore it.
LM_ALL_TOKENS = vary(
    LM_LOOKUP,
    base={"experiment": LM_LOOKUP},
    tokenizer=None,
    train={"steps": 150, "eval_every": 75, "save_every": 75},
    optim={"lr": 1e-3},
    schedule={"warmup_steps": 10},
    data={"loss_on": "all"},
)
CROSSATTN_LOOKUP = vary(
    LM_LOOKUP,
    task="cross_attention",
    base={"experiment": LM_ALL_TOKENS},
    tokenizer=None,
    train={
        "steps": 4500,
        "eval_every": 500,
        "save_every": 500,
        "answers": 100,
        "best": "valid/em",
        "best_is": "max",
    },
    optim={"lr": 2e-3},
    schedule={"warmup_steps": 100},
    layers={"count": 3, "stride": 1, "heads": 4},
)
CROSSATTN_LOOKUP["data"] = {
    "source": "lookup",
    "template": "bare",
    "decoder_tokens": 32,
    "context_tokens": 96,
    "loss_on": "answer",
    "answer_tokens": 8,
}

# The summariser: encoder and decoder both start from the language model, which already knows what a
# fact is and whom it is about. Halves with separate random weights learn to copy facts, but never
# those of the right person (docs/log.md).
SUMMARISE_LOOKUP = vary(
    LM_LOOKUP,
    task="summariser",
    base={"experiment": LM_LOOKUP, "adapted": {"window": 12}},
    tokenizer=None,
    train={
        "steps": 1500,
        "global_batch": 32,
        "micro_batch": 32,
        "eval_every": 250,
        "save_every": 250,
        "answers": 100,
        "best": "valid/rougel",
        "best_is": "max",
    },
    optim={"lr": 2e-3},
    generation={"max_tokens": 24},
)
SUMMARISE_LOOKUP["data"] = {
    "source": "lookup",
    "prefix": "",
    "source_tokens": 128,
    "target_tokens": 32,
}

# The same experiments with fewer facts and kinds of statements. They take a few minutes.
TWO_FACTS = {"facts": 2}
FID_TWO = vary(FID_CHOOSES, train={"steps": 600}, schedule={"shape": "linear"})
# With two facts the relation alone decides, so any base can learn it.
LLAMA: Values = {"config": {"model_type": "llama", **DECODER}}
SLOWER: Values = {"optim": {"lr": 1e-3}, "schedule": {"warmup_steps": 50}}
LM_TWO = vary(
    LM_LOOKUP,
    base=LLAMA,
    train={"steps": 2500, "eval_every": 250, "save_every": 250},
    data=TWO_FACTS,
    **SLOWER,
)
CROSSATTN_TWO = vary(
    CROSSATTN_LOOKUP,
    base={"experiment": LM_TWO},
    train={"steps": 2500, "eval_every": 250, "save_every": 250},
    data=TWO_FACTS,
    **SLOWER,
)
# Starts from the reader that copies. With two facts the summary holds both.
SUMMARISE_TWO = vary(
    FID_COPIES,
    task="summariser",
    base={"experiment": FID_COPIES},
    tokenizer=None,
    train={
        "steps": 600,
        "eval_batch": 50,
        "eval_every": 250,
        "save_every": 250,
        "best": "valid/rougel",
    },
    schedule={"shape": "linear"},
    generation={"max_tokens": 24},
)
SUMMARISE_TWO["data"] = SUMMARISE_LOOKUP["data"] | TWO_FACTS
EASY_STATEMENTS = ["arithmetic", "membership"]
VERA_TWO = vary(
    VERA_LOOKUP,
    train={"steps": 450, "eval_every": 150, "save_every": 150},
    data={"train_tasks": EASY_STATEMENTS, "valid_tasks": EASY_STATEMENTS},
)

GROUPS: dict[str, list[Values]] = {
    "demo": [FID_DEMO],
    "fid_lookup_cpu": [FID_COPIES, FID_CHOOSES, FID_READS_5, FID_READS_20],
    "crossattn_lookup_cpu": [LM_LOOKUP, LM_ALL_TOKENS, CROSSATTN_LOOKUP],
    "vera_lookup_cpu": [VERA_LOOKUP],
    "summarise_lookup_cpu": [LM_LOOKUP, SUMMARISE_LOOKUP],
    "fid_lookup_retrieved": [FID_RETRIEVED],
    "vera_lookup_answers": [VERA_ANSWERS],
    "fid_lookup_tiny": [FID_COPIES, FID_TWO],
    "crossattn_lookup_tiny": [LM_TWO, CROSSATTN_TWO],
    "vera_lookup_tiny": [VERA_TWO],
    "summarise_lookup_tiny": [FID_COPIES, SUMMARISE_TWO],
}
