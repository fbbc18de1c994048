"""The same training of a dense retriever: by our task and engine, in one piece or with GradCache,
and by plain torch as GradCache was published.

All take the same queries and passages in the same order, from the same random weights; a step is
handed out by its number. Ours collates on the clock; the reference's tensors are made beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from one_rank import OneRank, store_of
from torch import Tensor, nn
from workload import Workload

from trainer import tasks
from trainer.data.order import Sharding, sizes_of, window_rows
from trainer.protocol.task import DRAW, EPOCH, Batch, Row
from trainer.runtime import distributed

# Q queries, P passages, L tokens, D width

LR, CLIP = 1e-5, 1.0  # the published learning rate, constant, and clipping; no weight decay
SIZES: dict[str, dict[str, int]] = {  # base as google-bert/bert-base-uncased; tiny to try this out
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "intermediate_size": 512,
    },
    "minilm": {  # as all-MiniLM-L6-v2
        "num_hidden_layers": 6,
        "hidden_size": 384,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
    "small": {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
    "base": {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
}


@dataclass(frozen=True, kw_only=True)
class Work(Workload):
    """Queries of NaturalQuestions."""

    tokenizer: Path
    passages: int = 2  # of a query
    query_tokens: int = 32
    passage_tokens: int = 156

    def experiment(self, micro_batch: int, loss: dict[str, int]) -> dict[str, Any]:
        config = {
            "model_type": "bert",
            "vocab_size": 30522,
            "pad_token_id": 0,
            "hidden_dropout_prob": self.dropout,
            "attention_probs_dropout_prob": self.dropout,
            **SIZES[self.size],
        }
        return self.values(
            "retriever",
            config,
            self.tokenizer,
            train={"micro_batch": micro_batch, "order": "as_given"},
            optim={"lr": LR, "weight_decay": 0.0, "clip": CLIP},
            data={
                "source": "nq",
                "query_tokens": self.query_tokens,
                "passage_tokens": self.passage_tokens,
                "passages": self.passages,
                "select_positive": "first",
                "select_negatives": "first",
            },
            loss=loss,
        )

    def task(self, micro_batch: int, loss: dict[str, int]) -> Any:
        return tasks.load(tasks.parse(self.experiment(micro_batch, loss)), self.places)

    @cached_property
    def rows(self) -> list[Row]:
        """The queries of all batches, each with so many passages as are trained on."""
        wanted = self.batch * self.num_batches
        negatives = self.passages - 1
        found = (
            row
            for row in self.task(self.batch, {}).rows("train")
            if len(row["negatives"]) >= negatives
        )
        cut = [
            {**row, "positives": row["positives"][:1], "negatives": row["negatives"][:negatives]}
            for row in islice(found, wanted)
        ]
        if len(cut) < wanted:
            raise SystemExit(
                f"{self.data_path}: {len(cut)} queries, want {wanted}. Lower --rounds or --batch."
            )
        return cut


class Ours:
    """What a run does at ZeRO 0 on one rank, without its prefetching thread: collation is on the
    clock.
    """

    def __init__(self, work: Work, micro_batch: int, **loss: int) -> None:
        """loss: keys of the experiment's block, such as query_chunk. With micro_batch = work.batch
        and none of them the step is the direct one.
        """
        self._work, self._task = work, work.task(micro_batch, loss)
        store, folder = (
            store_of(self._task, lambda: work.rows, work.folder / "cache"),
            work.folder / f"run-{id(self)}",
        )
        sharding = Sharding(work.batch, micro_batch, 1, 0)
        self._rank = OneRank(self._task, store, sharding=sharding, folder=folder)
        self._sizes = sizes_of(store, self._task)

    def step(self, number: int) -> float:
        """Train on batch `number`; its loss."""
        batches, rows = self._batches(number % self._work.num_batches)
        return float(self._rank.step(number, batches, rows, lr=LR))

    def _batches(self, number: int) -> tuple[list[Batch], list[np.ndarray]]:
        rows = window_rows(
            number, lengths=self._sizes, sharding=self._rank.session.sharding, seed=None
        )
        first = {
            DRAW: np.zeros(1, dtype=np.int64),
            EPOCH: np.zeros(1, dtype=np.int64),
        }  # nothing is drawn
        return [
            self._task.collate([{**self._rank.session.train[int(row)], **first} for row in some])
            for some in rows
        ], rows

    def padding(self) -> float:
        """The share of padding in what is encoded; of packed texts only attention has any."""
        batches = [
            batch for number in range(self._work.num_batches) for batch in self._batches(number)[0]
        ]
        masks = [x for batch in batches for name, x in batch.items() if "_grid_" in name]
        return _padding(masks)

    def close(self) -> None:
        self._rank.close()


@dataclass(frozen=True)
class _Chunk:
    """Some texts of one side, and the random state that they were encoded under."""

    inputs: dict[str, Tensor]
    state: list[Tensor] = field(default_factory=list)


class Reference:
    """Gao et al. 2021 in plain torch, as Tevatron v1 runs it: queries, then passages, each padded
    to the limit of its side and cut into chunks; every chunk is encoded without a graph, and again
    with one.
    """

    def __init__(self, work: Work, query_chunk: int, passage_chunk: int) -> None:
        self._work, self._chunks = work, (query_chunk, passage_chunk)
        task = work.task(work.batch, {})
        self._tokenizer = task.tokenizer
        self._encoder: Any = task.model().query_model.to(distributed.device())
        assert type(self._encoder).__name__ == "BertModel", "stock, of transformers"
        assert self._encoder.config._attn_implementation == "sdpa", "the default of transformers"
        # fused as ours is: the default loops over the tensors on a CPU, which is not what is
        # compared here
        self._optimizer = torch.optim.AdamW(
            self._encoder.parameters(), lr=LR, weight_decay=0.0, fused=True
        )
        self._batches = [self._padded(number) for number in range(work.num_batches)]

    def _padded(self, number: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(Q, L) ids and mask of the queries, and (P, L) of their passages, the positive first."""
        work = self._work
        rows = [work.rows[row] for row in work.span(number)]
        passages = [passage for row in rows for passage in (*row["positives"], *row["negatives"])]
        texts = [
            f"{passage['title']} {passage['text']}" if passage.get("title") else passage["text"]
            for passage in passages
        ]
        queries = [row["query"] for row in rows]
        return self._read(queries, work.query_tokens), self._read(texts, work.passage_tokens)

    def _read(self, texts: list[str], limit: int) -> dict[str, Tensor]:
        read = self._tokenizer(
            texts, padding="max_length", truncation=True, max_length=limit, return_tensors="pt"
        )
        return {"input_ids": read["input_ids"], "attention_mask": read["attention_mask"]}

    def step(self, number: int) -> float:
        """Train on batch `number`; its loss."""
        self._encoder.train()
        sides = [
            self._cut(*side)
            for side in zip(
                self._batches[number % self._work.num_batches], self._chunks, strict=True
            )
        ]
        with torch.no_grad():
            vectors = [
                torch.cat([self._first(chunk) for chunk in chunks]).requires_grad_()
                for chunks in sides
            ]
        queries_QD, passages_PD = vectors
        target_Q = torch.arange(len(queries_QD), device=queries_QD.device) * self._work.passages
        loss = F.cross_entropy(queries_QD @ passages_PD.T, target_Q)
        loss.backward()
        for chunks, found in zip(sides, vectors, strict=True):
            assert found.grad is not None
            gradients = found.grad.split([len(chunk.inputs["input_ids"]) for chunk in chunks])
            for chunk, gradient in zip(chunks, gradients, strict=True):
                (self._again(chunk) * gradient).sum().backward()
        nn.utils.clip_grad_norm_(self._encoder.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def _cut(self, side: dict[str, Tensor], size: int) -> list[_Chunk]:
        ids, mask = (
            side[name].to(distributed.device()).split(size)
            for name in ("input_ids", "attention_mask")
        )
        return [
            _Chunk({"input_ids": i, "attention_mask": m}) for i, m in zip(ids, mask, strict=True)
        ]

    def _first(self, chunk: _Chunk) -> Tensor:
        chunk.state.append(torch.get_rng_state())
        if torch.cuda.is_available():
            chunk.state.append(torch.cuda.get_rng_state())
        return self._vectors(chunk)

    def _again(self, chunk: _Chunk) -> Tensor:
        with torch.random.fork_rng():
            torch.set_rng_state(chunk.state[0])
            if torch.cuda.is_available():
                torch.cuda.set_rng_state(chunk.state[1])
            return self._vectors(chunk)

    def _vectors(self, chunk: _Chunk) -> Tensor:
        return self._encoder(**chunk.inputs).last_hidden_state[:, 0]

    def padding(self) -> float:
        """The share of padding in what is encoded."""
        return _padding([side["attention_mask"] for batch in self._batches for side in batch])

    def close(self) -> None:
        """Nothing is open."""


def _padding(masks: list[Tensor]) -> float:
    return 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


Contestant = Ours | Reference
Maker = Callable[[Work], Contestant]
