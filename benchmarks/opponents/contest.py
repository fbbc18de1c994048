"""A task at one kind of lengths: its settings, the rows of each step, and our step on them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from one_rank import OneRank
from opponents.rows import Draw, Lengths, Row

from tests.facts import experiment
from trainer import tasks
from trainer.data.order import Sharding
from trainer.protocol.task import Places

T5 = {"model_type": "t5", "d_kv": 64, "dropout_rate": 0.0, "pad_token_id": 1}
T5 |= {"decoder_start_token_id": 1, "eos_token_id": 0}
BIGCODE = {"model_type": "gpt_bigcode", "n_positions": 2048}
BIGCODE |= {"bos_token_id": 0, "eos_token_id": 0}
BIGCODE |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
LLAMA = {"model_type": "llama", "max_position_embeddings": 2048}
LLAMA |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "tie_word_embeddings": True}
BERT = {"model_type": "bert", "pad_token_id": 1}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _shapes(width: int, layers: int, words: int) -> dict[str, dict[str, Any]]:
    """The bases by family, with heads of 64. words: of the vocabulary."""
    heads = width // 64
    llama = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    bert = {**llama, "intermediate_size": 4 * width}
    llama |= {"intermediate_size": 11 * width // 4, "num_key_value_heads": max(1, heads // 2)}
    t5 = {"d_model": width, "d_ff": 4 * width, "num_heads": heads, "num_layers": layers}
    code = {"n_embd": width, "n_layer": layers, "n_head": heads}
    found = {"t5": T5 | t5, "code": BIGCODE | code, "llama": LLAMA | llama, "bert": BERT | bert}
    return {family: {**config, "vocab_size": words} for family, config in found.items()}


# Width, blocks, and a vocabulary whose share of the weights is that of larger models.
SIZES = {"tiny": (64, 2, 512), "small": (256, 4, 4096), "medium": (384, 6, 8192)}
SIZES |= {"base": (768, 12, 32128)}
_PLAIN = {"projection": None, "pooling": "mean", "normalize": True, "temperature": 0.05}


@dataclass(frozen=True)
class Setup:
    """A task's base, its settings, and how many rows a step and our micro-batch have. Ours is the
    whole step: nothing of it is chosen by measuring.
    """

    family: str
    rows: int
    micro_batch: int
    more: dict[str, Any]


SETUPS = {
    "causal_lm": Setup("llama", 6, 6, {"data": {"max_tokens": 1024}}),
    "summariser": Setup("t5", 6, 6, {"data": {"source_tokens": 1024, "target_tokens": 96}}),
    "retriever": Setup(
        "bert",
        10,
        10,
        {
            "encoder": _PLAIN,
            "loss": {"query_chunk": None, "passage_chunk": None},
            "data": {"query_tokens": 32, "passage_tokens": 256},
        },
    ),
    "vera": Setup("t5", 16, 16, {"data": {"max_tokens": 96}}),
    "cross_attention": Setup(
        "code",
        6,
        6,
        {
            "layers": {"count": 2, "stride": 1, "width": 256, "heads": 4},
            "data": {"decoder_tokens": 128, "context_tokens": 1024, "shuffled_context": False},
        },
    ),
    "fid": Setup("t5", 2, 2, {"data": {"contexts": 10, "passage_tokens": 250}}),
}
# Rows of a step by kind of lengths, as a multiple: short texts are many, long ones few.
MORE_ROWS = {"short": 2.0, "long": 0.5}


@dataclass
class Contest:
    """A task whose rows have lengths of one kind."""

    name: str
    kind: str
    folder: Path  # made by tests.facts.write_facts; the runs' folders stand in it
    size: str = "small"
    data: Path | None = None
    precision: str = "fp32"
    task: Any = None
    num_rows: int = 0
    micro_batch: int = 0
    _steps: dict[int, tuple[list[Row], int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        setup, more_rows = SETUPS[self.name], MORE_ROWS.get(self.kind, 1.0)
        if self.name == "vera" and self.kind == "real":
            more_rows = 4.0  # a row has one statement there, and four in the other kinds
        self.num_rows = max(1, round(setup.rows * more_rows))
        is_whole = setup.micro_batch == setup.rows
        self.micro_batch = self.num_rows if is_whole else min(setup.micro_batch, self.num_rows)
        base = _shapes(*SIZES[self.size])[setup.family]
        train = {"steps": 1, "global_batch": self.num_rows, "micro_batch": self.micro_batch}
        changes = {**setup.more, "train": {**train, "precision": self.precision}}
        changes["optim"] = {"lr": 1e-4, "weight_decay": 0.0}
        values = experiment(self.name, self.folder, base={"config": base, "seed": 1}, **changes)
        values["optim"] = {"lr": 1e-4, "weight_decay": 0.0, "clip": 1.0}
        places = Places(self.folder, self.folder / "cache", self.folder / "results")
        self.task = tasks.load(tasks.parse(values), places)
        self._vocabulary = int(base["vocab_size"])
        self._lengths = Lengths(self.name, self.kind, self.data)

    def rows(self, step: int) -> tuple[list[Row], int]:
        """The rows of a step, and its units."""
        if step not in self._steps:
            made = list(Draw(self._lengths, self._vocabulary, 100 + step).rows(self.num_rows))
            units = sum(int(self.task.units(batch)) for batch in self.batches(made))
            self._steps[step] = made, units
        return self._steps[step]

    def batches(self, rows: list[Row]) -> list[Any]:
        """Our micro-batches: rows of like length together."""
        in_order = sorted(rows, key=self.task.length, reverse=True)
        size = self.micro_batch
        parts = [in_order[at : at + size] for at in range(0, len(in_order), size)]
        return [self.task.collate(part) for part in parts]

    def ours(self) -> tuple[Callable[[int], float], Any]:
        """A step of ours by its number, collation included, and its model."""
        sharding = Sharding(self.num_rows, self.micro_batch, 1, 0)
        nothing: Any = None  # its batches come from here
        folder = self.folder / f"run-{self.name}-{self.kind}-{os.getpid()}"
        rank = OneRank(self.task, nothing, sharding=sharding, folder=folder)

        def step(number: int) -> float:
            rows, _ = self.rows(number)
            return float(rank.step(number, self.batches(rows), lr=1e-4))

        return step, rank.engine.model.module

    def model(self) -> torch.nn.Module:
        """A new model with the weights that ours starts from."""
        return self.task.model().train()
