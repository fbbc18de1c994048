"""Small made-up facts to learn and look up: the same on every machine and Python, unlike the
embedded corpus.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from exp_configs import vary

PEOPLE = ["Ada", "Bruno", "Chidi", "Dana", "Emil", "Farah", "Goran", "Hana"]
THINGS = ["key", "map", "lamp", "coin", "book", "drum"]
COLOURS = ["red", "blue", "green", "white", "black"]
PLACES = ["cellar", "attic", "garden", "tower", "harbour", "kitchen", "library"]
LLAMA: dict[str, Any] = {  # a base with the tokenizer of write_facts
    "config": {
        "model_type": "llama",
        "vocab_size": 384,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
    },
    "seed": 1,
}

# A recovery as the agent of --survive writes it down.
EVENT = {
    "at": "2026-11-23T18:00:00+00:00",
    "lost": [{"rank": 1, "why": "ended by SIGKILL"}],
    "reached": 6,
    "from": 5,
    "source": "memory",
    "world": 3,
    "steps_lost": 1,
    "recovery_s": 0.8,
}


def facts(start: int, stop: int) -> list[dict[str, Any]]:
    """Rows `start` to `stop` of a fixed sequence, with every field that any task reads, also the
    one of docs/add-a-task.md. A new task adds its own fields here.
    """
    rows = []
    for n in range(start, stop):
        who, what = PEOPLE[n % 8], f"{COLOURS[n % 5]} {THINGS[n % 6]}"
        place, other = PLACES[n * 3 % 7], PLACES[(n * 5 + 1) % 7]
        context = f"{who} keeps the {what} in the {place}. " + "It has been there for years. " * (
            n % 4
        )
        context += f"The {other} is empty."
        question, answer = f"Where does {who} keep the {what}?", f"in the {place}"
        passages = [
            {"title": who, "text": context},
            {"title": place, "text": f"The {other} is far from the {place}."},
        ]
        row = {
            "question": question,
            "answer": answer,
            "context": context,
            "text": f"{context} {question}",
        }
        row |= {"prompt": question, "chosen": answer, "rejected": answer.upper()}
        rows.append(row | {"ctxs": passages[: n % 3] if n % 2 else passages[::-1]})
    return rows


def write_facts(folder: Path, *, train: int = 64, valid: int = 22) -> Path:
    """train.jsonl and valid.jsonl of disjoint facts, and tokenizer/: a byte-level BPE of 384 ids
    trained on them.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", facts(0, train)), ("valid", facts(train, train + valid))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, start, stop in (("train", 0, train), ("dev", train, train + valid)):
        _write_groups(folder, name, facts(start, stop))
        _write_queries(folder, name, facts(start, stop))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((row["text"] for row in facts(0, train)), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        pad_token="<|pad|>",
    ).save_pretrained(folder / "tokenizer")
    return folder


def _write_groups(folder: Path, split: str, rows: list[dict[str, Any]]) -> None:
    """Half of the facts as statement groups: choices/ of one true place and others, judged/ of one
    true or false.
    """
    statements = [
        f"{row['question'].removeprefix('Where does ').rstrip('?')} {row['answer']}."
        for row in rows
    ]
    other = [
        f"{row['question'].removeprefix('Where does ').rstrip('?')} in the {PLACES[n % 7]}."
        for n, row in enumerate(rows)
    ]
    choices = [
        {"golds": [s], "distractors": [o, s.upper(), o.upper(), o[::-1]][: 1 + n % 4]}
        for n, (s, o) in enumerate(zip(statements, other, strict=True))
    ]
    judged = [
        {"golds": [s], "distractors": []} if n % 3 else {"golds": [], "distractors": [o]}
        for n, (s, o) in enumerate(zip(statements, other, strict=True))
    ]
    for task, groups in (("choices", choices[::2]), ("judged", judged[1::2])):
        (folder / task).mkdir(exist_ok=True)
        (folder / task / f"{split}.json").write_text(json.dumps(groups))


def _write_queries(folder: Path, split: str, rows: list[dict[str, Any]]) -> None:
    """queries/<split>.jsonl: questions with one or two passages that answer them, and some that do
    not.
    """
    (folder / "queries").mkdir(exist_ok=True)
    passages = [
        {"docid": str(n), "title": row["answer"], "text": row["context"]}
        for n, row in enumerate(rows)
    ]
    lines = [
        {
            "query_id": f"q{n}",
            "query": row["question"],
            "positive_passages": [
                passages[n],
                {**passages[n], "text": passages[n]["text"].upper()},
            ][: 1 + n % 2],
            "negative_passages": [passages[(n + step) % len(rows)] for step in range(1, 3 + n % 3)],
        }
        for n, row in enumerate(rows)
    ]
    (folder / "queries" / f"{split}.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )


TINY_BASE = {
    "config": {
        "model_type": "gpt_bigcode",
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 2,
        "n_inner": 64,
        "n_positions": 128,
        "vocab_size": 384,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    "seed": 1,
}
TINY_T5 = {
    "config": {
        "model_type": "t5",
        "vocab_size": 384,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 3,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "pad_token_id": 1,
        "decoder_start_token_id": 1,
        "eos_token_id": 0,
    },
    "seed": 1,
}
TINY_BERT = {
    "config": {
        "model_type": "bert",
        "vocab_size": 384,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 1,
    },
    "seed": 1,
}
_DROPOUTS = ("attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout_rate")
_DROPOUTS += ("hidden_dropout_prob", "attention_probs_dropout_prob")
_TRAIN = {"steps": 6, "global_batch": 8, "micro_batch": 2, "precision": "fp32", "log_every": 1}
_TRAIN |= {"eval_every": 3, "save_every": 3, "eval_batch": 4, "seed": 5}
OF_TASK = {
    "cross_attention": {
        "layers": {"count": 2, "stride": 2, "width": 16, "heads": 2, "initialisation": "published"},
        "data": {
            "source": "jsonl",
            "decoder_tokens": 48,
            "context_tokens": 64,
            "shuffled_context": True,
        },
    },
    "causal_lm": {"data": {"source": "jsonl", "max_tokens": 64}},
    "preference": {"data": {"source": "files", "max_tokens": 64}},
    "fid": {
        "base": TINY_T5,
        "data": {"source": "fid", "contexts": 2, "passage_tokens": 64, "answer_tokens": 12},
    },
    "summariser": {
        "base": TINY_T5,
        "data": {
            "source": "files",
            "document": "context",
            "summaries": ["answer"],
            "source_tokens": 64,
            "target_tokens": 12,
        },
        "generation": {"max_tokens": 12},
    },
    "vera": {
        "base": TINY_T5,
        "data": {
            "source": "groups",
            "train_tasks": ["choices", "judged"],
            "valid_tasks": ["choices", "judged"],
            "boolean": ["judged"],
            "max_tokens": 48,
        },
    },
    "retriever": {
        "base": TINY_BERT,
        "data": {
            "source": "tevatron",
            "files": {"train": "queries/train.jsonl", "valid": "queries/dev.jsonl"},
            "query_tokens": 16,
            "passage_tokens": 48,
            "passages": 2,
        },
        "encoder": {
            "pooling": "mean",
            "projection": {"width": 16},
            "normalize": True,
            "temperature": 0.1,
        },
        "loss": {"query_chunk": 2, "passage_chunk": 3},
    },
}
# Forms of tasks that have a loss or a model of their own, by "task, form".
_OF_PREFERENCE = OF_TASK["preference"]
_OF_T5 = {**_OF_PREFERENCE, "base": TINY_T5}
FORMS: dict[str, dict[str, Any]] = {
    "preference, kto": {**_OF_PREFERENCE, "preference": {"loss": "kto"}},
    "preference, orpo": {**_OF_PREFERENCE, "preference": {"loss": "orpo"}},
    "preference, reward": {**_OF_PREFERENCE, "preference": {"loss": "reward"}},
    "preference, t5": _OF_T5,
    "preference, t5 kto": {**_OF_T5, "preference": {"loss": "kto"}},
    "preference, t5 orpo": {**_OF_T5, "preference": {"loss": "orpo"}},
    "preference, t5 reward": {**_OF_T5, "preference": {"loss": "reward"}},
    "retriever, cross": {
        "base": TINY_BERT,
        "data": OF_TASK["retriever"]["data"],
        "form": "cross",
    },
    "retriever, sparse": {
        "base": TINY_BERT,
        "data": OF_TASK["retriever"]["data"],
        "form": "sparse",
        "sparse": {"warmup_steps": 4, "query_weight": 0.01, "passage_weight": 0.01},
        "loss": {"query_chunk": 2, "passage_chunk": 3},
    },
    "retriever, late": {
        "base": TINY_BERT,
        "data": OF_TASK["retriever"]["data"],
        "form": "late",
        "late": {"width": 16, "temperature": 0.5},
        "loss": {"query_chunk": 2, "passage_chunk": 3},
    },
}
EVERY_BLOCK: Any = {**OF_TASK["cross_attention"]["layers"], "stride": 1}  # of a base of two blocks


def experiment(task: str, folder: Path, **changes: object) -> dict[str, object]:
    """A six-step experiment of `task`, or of one of FORMS, on the facts in `folder`; blocks in
    `changes` are merged one level deep.
    """
    values: dict[str, object] = {
        "task": task.partition(", ")[0],
        "base": TINY_BASE,
        "tokenizer": str(folder / "tokenizer"),
        "train": _TRAIN,
        "optim": {"lr": 0.01, "weight_decay": 0.1},
        "schedule": {"shape": "cosine", "warmup_steps": 1},
        "deepspeed": "zero0",
        **(OF_TASK | FORMS)[task],
    }
    return vary(values, **changes)


def with_dropout(values: dict[str, object]) -> dict[str, object]:
    """The same experiment with every dropout of its base (and so of its added layers)
    switched on.
    """
    config: dict[str, Any] = values["base"]["config"]  # type: ignore[index]
    changed = {
        **values,
        "base": {"config": config | {key: 0.1 for key in _DROPOUTS if key in config}, "seed": 1},
    }
    if values["task"] == "cross_attention":
        changed["layers"] = {**values["layers"], "key_dropout": 0.3}  # type: ignore[dict-item]
    return changed
