"""`lathe new TASK`: a commented file of groups to begin with. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trainer.commands.options import guard
from trainer.config.userfile import kind
from trainer.errors import ConfigError, nearest
from trainer.files.atomic import refusals

# (key, value, what it means), the ten keys that a first run on one's own data needs.
Line = tuple[str, Any, str]
_TABLE = ' "files": train.csv, .tsv, .jsonl, .json or .parquet in --data_path'
_SPLIT: Line = ("data.valid_share", 0.05, "this share of the rows is for validation, not training")
_REST: list[Line] = [
    ("train.steps", 1000, "updates of the weights"),
    ("train.global_batch", 32, "rows an update, on all GPUs together"),
    ("train.micro_batch", 4, "rows on a GPU at once; it changes the memory, not the result"),
    ("train.precision", "bf16", '"fp32" on a CPU'),
]
_TASKS: dict[str, list[Line]] = {
    "causal_lm": [
        ("base", "Qwen/Qwen2.5-7B-Instruct", "a Hub id, or a folder as transformers saves it"),
        ("lora.r", 16, "trains adapters of this rank; without the block all weights train"),
        ("data.source", "chat", "train.jsonl (.csv, .parquet) in --data_path, one talk a row"),
        ("data.columns", {"messages": "messages"}, "our name of a field: your name of the column"),
        _SPLIT,
        *_REST,
        ("optim.lr", 2e-4, "learning rate; 1e-5 where all weights train"),
    ],
    "cross_attention": [
        ("base", "bigcode/starcoderbase-1b", "a decoder, which stays frozen"),
        ("layers.stride", 4, "added layers read the context behind every fourth block"),
        ("data.source", "files", _TABLE.strip()),
        (
            "data.columns",
            {"question": "question", "answers": "answer", "contexts": "context"},
            "our name of a field: your name of the column",
        ),
        _SPLIT,
        *_REST,
        ("optim.lr", 1e-4, "learning rate"),
    ],
    "fid": [
        ("base", "google/t5-v1_1-base", "a T5"),
        ("data.source", "files", _TABLE.strip()),
        (
            "data.columns",
            {"question": "question", "answers": "answers", "contexts": "passages"},
            "our name of a field: your name of the column",
        ),
        ("data.contexts", 10, "passages that are read for a question"),
        _SPLIT,
        *_REST,
        ("optim.lr", 1e-4, "learning rate"),
    ],
    "retriever": [
        ("base", "bert-base-uncased", "an encoder, or a decoder"),
        ("encoder.pooling", "mean", "how a text becomes one vector: mean, cls or last"),
        ("data.source", "files", _TABLE.strip()),
        (
            "data.columns",
            {"question": "question", "answers": "answers", "contexts": "passages"},
            "our name of a field: your name of the column",
        ),
        _SPLIT,
        *_REST,
        ("optim.lr", 2e-5, "learning rate"),
    ],
    "summariser": [
        ("base", "google/flan-t5-base", "a T5"),
        ("data.source", "files", _TABLE.strip()),
        (
            "data.columns",
            {"document": "document", "summary": "summary"},
            "our name of a field: your name of the column",
        ),
        ("data.max_document_tokens", 1024, "longer documents are cut, and counted"),
        _SPLIT,
        *_REST,
        ("optim.lr", 1e-4, "learning rate"),
    ],
    "vera": [
        ("base", "google/t5-v1_1-large", "a T5, or a decoder"),
        ("data.source", "files", _TABLE.strip()),
        (
            "data.columns",
            {"golds": "true_statement", "distractors": "false_statements"},
            "our name of a field: your name of the column",
        ),
        _SPLIT,
        ("data.train_tasks", ["mine"], "what the rows are called in the scores"),
        *_REST,
        ("optim.lr", 1e-5, "learning rate"),
    ],
}
