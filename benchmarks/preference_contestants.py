"""What each side of benchmarks/preference.py does in a step of DPO: ours, and TRL's DPOTrainer,
which is driven micro-batch by micro-batch as its own loop does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one_rank import OneRank
from workload import SEED

from tests.facts import experiment, write_facts
from trainer import tasks
from trainer.config.schema import RandomBase
from trainer.data.order import Sharding
from trainer.models import base_model
from trainer.protocol.task import Places

LR, BETA, CLIP = 1e-4, 0.1, 1.0
LLAMA = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
WORDS = ("key", "map", "lamp", "coin", "book", "drum", "red", "blue", "green", "white", "black")
WORDS += ("cellar", "attic", "garden", "tower", "harbour", "kitchen", "library", "keeps", "the")


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """`num_batches` steps of `batch` pairs of made-up texts, and a model of random weights."""

    folder: Path
    lengths: str  # "uniform": all alike; "mixed": log-normal, as of people's questions and answers
    batch: int
    num_batches: int
    prompt: int = 100  # words, about as many tokens; of mixed lengths the median
    answer: int = 60

    @cached_property
    def texts(self) -> list[dict[str, str]]:
        """All rows."""
        draw = np.random.default_rng(SEED)

        def text(median: int) -> str:
            spread = 0.0 if self.lengths == "uniform" else 0.6
            count = int(np.clip(draw.lognormal(np.log(median), spread), 4, 4 * median))
            return "".join(f" {WORDS[n]}" for n in draw.integers(len(WORDS), size=count))

        return [
            {"prompt": f"Where?{text(self.prompt)}"}
            | {name: text(self.answer) for name in ("chosen", "rejected")}
            for _ in range(self.batch * self.num_batches)
        ]

    def write(self) -> Pairs:
        """The same, with its model, tokenizer and rows in `folder`."""
        write_facts(self.folder)
        model = base_model.load(
            RandomBase(config=LLAMA, seed=SEED), self.places, precision="fp32", kind="causal_lm"
        )
        model.save_pretrained(self.folder / "model")
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder / "tokenizer")
        tokenizer.bos_token = None
        tokenizer.save_pretrained(self.folder / "model")
        lines = "".join(json.dumps(row) + "\n" for row in self.texts)
        (self.folder / "pairs.jsonl").write_text(lines)
        return self

    @property
    def places(self) -> Places:
        return Places(self.folder, self.folder / "cache", self.folder / "runs")

    def span(self, number: int) -> range:
        """The rows of step `number`."""
        first = number % self.num_batches * self.batch
        return range(first, first + self.batch)


def by_length(rows: Sequence[Any], lengths: Sequence[int], micro_batch: int) -> list[list[Any]]:
    """The rows of a step, the longest first, in micro-batches."""
    order = sorted(range(len(rows)), key=lambda number: -lengths[number])
    return [
        [rows[number] for number in order[at : at + micro_batch]]
        for at in range(0, len(rows), micro_batch)
    ]


class Ours:
    """The engine and the loop's step; collation is on the clock, the start was read before."""

    def __init__(self, pairs: Pairs, *, micro_batch: int) -> None:
        self._pairs, self.micro_batch = pairs, micro_batch
        values = experiment(
            "preference",
            pairs.folder,
            data={"source": "files", "max_tokens": 1024, "files": {"train": "pairs.jsonl"}},
            preference={"beta": BETA},
            train={"steps": 1, "global_batch": pairs.batch, "micro_batch": micro_batch},
        )
        model = str(pairs.folder / "model")
        values |= {"base": model, "tokenizer": model}
        values["optim"] = {"lr": LR, "weight_decay": 0.0, "clip": CLIP}
        task: Any = tasks.load(tasks.parse(values), pairs.places)
        rows = task.encode_rows(list(task.rows("train")))
        self.task, self._rows = (
            task,
            [{name: np.asarray(ids, np.int32) for name, ids in row.items()} for row in rows],
        )
        self._lengths = [task.length(row) for row in rows]
        nothing: Any = None  # its batches come from the caller
        sharding = Sharding(pairs.batch, micro_batch, 1, 0)
        self._rank = OneRank(task, nothing, sharding=sharding, folder=pairs.folder / "run")

        class Rows(list[Any]):  # what is read of a token store
            digest = f"{pairs.lengths} {len(rows)}"
            lengths = np.array(self._lengths)

        model_of_engine = self._rank.engine.model
        model_of_engine.eval()
        task.read_start(lambda: model_of_engine, {"train": Rows(self._rows)}, batch=micro_batch)

    def step(self, number: int) -> float:
        span = self._pairs.span(number)
        rows, lengths = [self._rows[n] for n in span], [self._lengths[n] for n in span]
        batches = [self.batch(some) for some in by_length(rows, lengths, self.micro_batch)]
        return float(self._rank.step(number, batches, lr=LR))

    def batch(self, rows: list[Any]) -> Any:
        """What a micro-batch reads."""
        return self.task.collate(rows)

    def close(self) -> None:
        self._rank.close()


class TwoModels(Ours):
    """The same with the start as a second model in memory, which every step asks."""

    def __init__(self, pairs: Pairs, *, micro_batch: int) -> None:
        super().__init__(pairs, micro_batch=micro_batch)
        self._start = self.task.model().eval().requires_grad_(False)

    def batch(self, rows: list[Any]) -> Any:
        values = self.task._log_probabilities(self._start, rows)
        return {**self.task.collate(rows), "start": values.t().flatten()}


class Trl:
    """TRL's trainer: log-probabilities of the reference precomputed, fused AdamW, no recomputation,
    rows of like length together.
    """

    def __init__(self, pairs: Pairs, *, micro_batch: int) -> None:
        from datasets import load_dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import DPOConfig, DPOTrainer  # pyright: ignore[reportMissingImports]

        self._pairs, self.micro_batch = pairs, micro_batch
        train = load_dataset("json", data_files=str(pairs.folder / "pairs.jsonl"), split="train")
        how = DPOConfig(
            output_dir=str(pairs.folder / "trl"),
            per_device_train_batch_size=micro_batch,
            gradient_checkpointing=False,
            precompute_ref_log_probs=True,
            beta=BETA,
            max_length=None,
            learning_rate=LR,
            optim="adamw_torch_fused",
            weight_decay=0.0,
            max_grad_norm=CLIP,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        )
        folder = pairs.folder / "model"
        self._trainer: Any = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            args=how,
            train_dataset=train,
            processing_class=AutoTokenizer.from_pretrained(folder),
        )
        self._rows = list(self._trainer.train_dataset)
        names = ("prompt_ids", "prompt_ids", "chosen_ids", "rejected_ids")
        self._lengths = [sum(len(row[name]) for name in names) for row in self._rows]
        self._trainer.create_optimizer()
        self._trainer.current_gradient_accumulation_steps = pairs.batch // micro_batch
        self._trainer.model.train()

    def step(self, number: int) -> float:
        trainer, span = self._trainer, self._pairs.span(number)
        rows, lengths = [self._rows[n] for n in span], [self._lengths[n] for n in span]
        total = 0.0
        for some in by_length(rows, lengths, self.micro_batch):
            inputs = trainer.data_collator(some)
            total += float(trainer.training_step(trainer.model, inputs))
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), CLIP)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return total

    def share_of_padding(self) -> float:
        """Of the positions that are read."""
        read = real = 0
        for number in range(self._pairs.num_batches):
            span = self._pairs.span(number)
            rows, lengths = [self._rows[n] for n in span], [self._lengths[n] for n in span]
            for some in by_length(rows, lengths, self.micro_batch):
                mask = self._trainer.data_collator(some)["attention_mask"]
                read, real = read + mask.numel(), real + int(mask.sum())
        return 1 - real / read

    def close(self) -> None:
        pass
