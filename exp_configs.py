"""EXP_GROUPS: group -> the experiments that it trains, each one plain dictionary. Imports no torch.

Here are the groups that a laptop trains, and room for your own. The published ones stand as
dictionaries of the same form in trainer/tasks/<task>/published.py.

A group states what differs from a named parent (`vary`); trainer/config/schema.py and the config.py
of a task say what each key means. Dictionaries hold JSON values only, for their hash names the run
folder: another number is another run.
"""

from __future__ import annotations

from pathlib import Path

from trainer import tasks
from trainer.config import groups, userfile
from trainer.config.groups import Values, cartesian_exp_group, vary
from trainer.config.sweeps.sweep import SweepGroup
from trainer.recipes import lookup_groups
from trainer.tasks.cross_attention import published as cross_attention
from trainer.tasks.fid import published as fid
from trainer.tasks.retriever import published as retriever
from trainer.tasks.summariser import published as summariser
from trainer.tasks.vera import published as vera

__all__ = ["EXP_GROUPS", "cartesian_exp_group", "experiments_of", "read_groups", "vary"]

# Groups that run on a laptop: a random base of 1.0M parameters and the corpus that every Python
# carries with it.

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
PREFERENCE_TINY = vary(
    CAUSAL_LM_TINY,
    task="preference",
    base={"config": TINY_BASE["config"] | {"vocab_size": 768}},
    tokenizer={"vocab_size": 768, "corpus": "lookup"},
    train={
        "steps": 150,
        "global_batch": 32,
        "micro_batch": 16,
        "eval_every": 50,
        "save_every": 50,
        "best": "valid/accuracy",
        "best_is": "max",
    },
    optim={"lr": 1e-3},
)
PREFERENCE_TINY["data"] = {"source": "lookup", "max_tokens": 96}
CROSSATTN_SMALL = vary(
    CAUSAL_LM_TINY,
    task="cross_attention",
    layers={"count": 2, "stride": 2, "width": 128, "heads": 4},
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
    # A frozen random base limits its logits to about |state| x |embedding|: at the usual 0.02 no
    # loss can fall below 5.
    base={"config": TINY_BASE["config"] | {"initializer_range": 0.1}},
    train={"steps": 200, "eval_every": 100, "save_every": 100},
    # Calm enough that ZeRO stages and ranks agree to 1e-5 at the end; at 6e-3 rounding grows to
    # 1e-2 in 230 steps.
    optim={"lr": 4e-3, "eps": 1e-6},
    schedule={"warmup_steps": 20},
)

# Natural Questions on a CPU: a small language model of the passages first, then cross-attention
# layers in it, frozen.

LM_NQ_CPU = vary(
    CAUSAL_LM_TINY,
    base={
        "config": TINY_BASE["config"]
        | {"vocab_size": 49152, "n_embd": 320, "n_layer": 8, "n_head": 5, "n_inner": 1280}
    },
    tokenizer="../tokenizers/starcoder",
    # bf16: the head is two thirds of the work, and a CPU with avx512_bf16 multiplies three times as
    # fast as in fp32
    train={
        "steps": 400,
        "global_batch": 16,
        "precision": "bf16",
        "eval_every": 100,
        "save_every": 100,
    },
    optim={"lr": 2e-3},
    schedule={"warmup_steps": 40},
    data={"source": "nq", "max_tokens": 256},
    deepspeed="zero1",  # accumulates gradients in fp32; stage 0 would in bf16
)
CROSSATTN_NQ_CPU = vary(
    CROSSATTN_SMALL,
    base={"experiment": LM_NQ_CPU},
    tokenizer=None,
    train={
        "steps": 1000,
        "global_batch": 16,
        "precision": "bf16",
        "eval_every": 200,
        "save_every": 200,
    },
    optim={"lr": 2e-3},
    schedule={"warmup_steps": 30},
    layers={"count": 4, "width": 320, "heads": 5},
    data={"source": "nq", "context_tokens": 256},
    deepspeed="zero1",
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
    train={
        "steps": 120,
        "eval_every": 60,
        "save_every": 60,
        "answers": 40,
        "best": "valid/em",
        "best_is": "max",
    },
    optim={"lr": 3e-3, "decay": "all"},
    schedule={"shape": "linear", "warmup_steps": 20},
)
FID_TINY["data"] = {
    "source": "stdlib_docs",
    "contexts": 3,
    "passage_tokens": 160,
    "answer_tokens": 32,
}
# minFiD's toy run: three questions with three passages each, and an exact match of 3 of 3 at the
# end.
FID_TOY = vary(
    FID_TINY,
    base={
        "config": {**TINY_T5["config"], "vocab_size": 32128, "d_model": 64, "d_kv": 16, "d_ff": 128}
    },
    tokenizer="../tokenizers/t5",
    train={
        "steps": 60,
        "global_batch": 2,
        "micro_batch": 1,
        "eval_every": 20,
        "save_every": 60,
        "answers": "all",
    },
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
# NaturalQuestions on a CPU: real questions with the passages that BM25 ranks first, and a small T5
# from nothing.
FID_NQ_CPU = vary(
    FID_TOY,
    base={
        "config": {
            **FID_TOY["base"]["config"],
            "d_model": 256,
            "d_kv": 64,
            "d_ff": 1024,
            "dropout_rate": 0.1,
        }
    },
    train={
        **EVERY_100,
        "steps": 500,
        "global_batch": 16,
        "micro_batch": 8,
        "eval_batch": 8,
        "precision": "bf16",
    },
    optim={"lr": 1e-3},
    schedule={"warmup_steps": 50},
    deepspeed="zero1",
)
FID_NQ_CPU["data"] = {"source": "nq", "corpus": "corpus.tsv", "contexts": 3, "passage_tokens": 250}

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
# Both stages on a CPU: which of two statements makes sense (ComVE), then whether one statement is
# true (CREAK).
VERA_CPU_A = vary(
    VERA_TINY,
    base={"config": {**FID_NQ_CPU["base"]["config"], "d_ff": 512, **T5_V11}},
    tokenizer="../shared/data/tokenizers/t5",
    train={
        "steps": 400,
        "global_batch": 64,
        "micro_batch": 32,
        "eval_batch": 64,
        "eval_every": 100,
        "save_every": 100,
    },
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

RETRIEVER_TINY = vary(
    CAUSAL_LM_TINY,
    task="retriever",
    base={
        "config": {
            "model_type": "bert",
            "vocab_size": 2048,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 512,
            "max_position_embeddings": 128,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "pad_token_id": 1,
        }
    },
    train={"steps": 120, "micro_batch": 16, "eval_batch": 32, "eval_every": 60, "save_every": 60},
    optim={"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0},
    schedule={"shape": "linear"},
    encoder={"pooling": "mean", "normalize": True, "temperature": 0.05},
)
RETRIEVER_TINY["train"] |= {"best": "valid/mrr@10", "best_is": "max"}
RETRIEVER_TINY["data"] = {
    "source": "stdlib_docs",
    "query_tokens": 32,
    "passage_tokens": 96,
    "passages": 2,
}
LATE_TINY = vary(
    RETRIEVER_TINY,
    form="late",
    late={"width": 32},
    train={"steps": 60, "eval_every": 30, "save_every": 30},
)
del LATE_TINY["encoder"]
# Its rows are made up by a script of docs/tasks/reranker.md: matching words are no answer.
RERANKER_TINY = vary(
    RETRIEVER_TINY,
    form="cross",
    train={
        "steps": 40,
        "global_batch": 16,
        "micro_batch": 16,
        "log_every": 5,
        "eval_every": 20,
        "save_every": 20,
    },
    schedule={"warmup_steps": 4},
)
del RERANKER_TINY["encoder"]
RERANKER_TINY["data"] = {
    "source": "tevatron",
    "query_tokens": 24,
    "passage_tokens": 32,
    "passages": 3,
}
# A sparse retriever, docs/tasks/sparse.md: from random weights it learns which words a docstring
# and the name of its function share.
SPARSE_TINY = vary(
    RETRIEVER_TINY,
    form="sparse",
    train={"steps": 60, "eval_every": 30, "save_every": 30},
    sparse={
        "query_weight": 1e-3,
        "passage_weight": 1e-3,
        "warmup_steps": 30,
        "temperature": 1.0,
    },
)
del SPARSE_TINY["encoder"]
# Questions and passages of Natural Questions on a CPU: a small BERT from nothing, BM25's other hits
# as negatives.
RETRIEVER_NQ_CPU = vary(
    RETRIEVER_TINY,
    base={
        "config": {
            **RETRIEVER_TINY["base"]["config"],
            "vocab_size": 30522,
            "max_position_embeddings": 512,
        }
    },
    tokenizer="../tokenizers/bert-uncased",
    train={
        "steps": 400,
        "global_batch": 64,
        "micro_batch": 32,
        "eval_every": 100,
        "save_every": 100,
    },
    optim={"lr": 5e-4},
    schedule={"warmup_steps": 40},
)
RETRIEVER_NQ_CPU["base"]["config"] |= {"pad_token_id": 0}
RETRIEVER_NQ_CPU["data"] = {
    "source": "nq",
    "query_tokens": 24,
    "passage_tokens": 160,
    "passages": 2,
}
# SciFact: claims and abstracts; of its test claims, 196 share an abstract with a training claim.
RETRIEVER_SCIFACT_CPU = vary(
    RETRIEVER_NQ_CPU,
    tokenizer="../../tokenizers/bert-uncased",
    train={"steps": 150, "global_batch": 32, "micro_batch": 16, "eval_every": 50, "save_every": 50},
    schedule={"warmup_steps": 15},
)
RETRIEVER_SCIFACT_CPU["data"] = {
    "source": "beir",
    "negatives": "train_tevatron_ids.jsonl",
    "query_tokens": 64,
    "passage_tokens": 256,
    "passages": 2,
}

SUMMARISE_TINY = vary(
    FID_TINY,
    task="summariser",
    train={"steps": 120, "answers": 40, "best": "valid/loss", "best_is": "min", "eval_batch": 20},
    generation={"max_tokens": 24},
)
SUMMARISE_TINY["data"] = {
    "source": "stdlib_docs",
    "prefix": "",
    "source_tokens": 128,
    "target_tokens": 32,
}
# Scientific abstracts and their one-sentence summaries (SciTLDR) on a CPU: real text, T5's
# vocabulary, random weights.
SUMMARISE_SCITLDR_CPU = vary(
    SUMMARISE_TINY,
    base={"config": {**FID_NQ_CPU["base"]["config"], "d_ff": 512, "dropout_rate": 0.1}},
    tokenizer="../shared/data/tokenizers/t5",
    train={
        **EVERY_100,
        "steps": 600,
        "global_batch": 16,
        "micro_batch": 8,
        "micro_tokens": 2048,
        "bucket_steps": 20,
        "eval_batch": 32,
        "precision": "bf16",
        "answers": 64,
    },
    optim={"lr": 1e-3, "betas": [0.9, 0.999], "decay": "matrices"},
    schedule={"warmup_steps": 50},
    generation={"max_tokens": 48, "num_beams": 2, "no_repeat_ngram": 3},
    rouge={"best": "rouge1"},  # as SciTLDR's authors score
    deepspeed="zero1",
)
SUMMARISE_SCITLDR_CPU["data"] = {
    "source": "files",
    "document": "source",
    "summaries": ["target"],
    "id": "paper_id",
    "prefix": "",
    "source_tokens": 256,
    "target_tokens": 64,
}

EXP_GROUPS: dict[str, list[Values]] = {
    **cross_attention.GROUPS,
    **fid.GROUPS,
    **summariser.GROUPS,
    **retriever.GROUPS,
    **vera.GROUPS,
    **lookup_groups.GROUPS,
    "causal_lm_tiny": [CAUSAL_LM_TINY],
    "preference_tiny": [PREFERENCE_TINY],
    "crossattn_tiny": [CROSSATTN_TINY],
    "lm_nq_cpu": [LM_NQ_CPU],
    "crossattn_nq_cpu": [CROSSATTN_NQ_CPU],
    "fid_tiny": [FID_TINY],
    "fid_toy": [FID_TOY],
    "fid_nq_cpu": [FID_NQ_CPU],
    "summarise_tiny": [SUMMARISE_TINY],
    "summarise_scitldr_cpu": [SUMMARISE_SCITLDR_CPU],
    "vera_tiny": [VERA_TINY],
    "vera_cpu": [VERA_CPU_A, VERA_CPU_B],
    "retriever_tiny": [RETRIEVER_TINY],
    "reranker_tiny": [RERANKER_TINY],
    "late_tiny": [LATE_TINY],
    "sparse_tiny": [SPARSE_TINY],
    "retriever_nq_cpu": [RETRIEVER_NQ_CPU],
    "retriever_scifact_cpu": [RETRIEVER_SCIFACT_CPU],
}


def experiments_of(group: str, path: Path | None, steps: int | None) -> list[Values]:
    """The dictionaries of one group, with `steps` written in where it is given; see
    groups.experiments_of_group.
    """
    known = read_groups(path)
    experiments = groups.experiments_of_group(known, group, steps)
    if isinstance(known[group], SweepGroup):  # one error instead of one for each trial
        tasks.parse(experiments[0], source=f"-e {group}: the first trial of its sweep")
    return experiments


def read_groups(path: Path | None) -> dict[str, list[Values]]:
    """EXP_GROUPS of the Python file at `path`, or of this file when it is None."""
    return (
        groups.expanded(EXP_GROUPS, source="exp_configs.py") if path is None else groups.read(path)
    )


if __name__ == "__main__":
    userfile.leave("Train a group: lathe train -e GROUP. List them: lathe groups.")
