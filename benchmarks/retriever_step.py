"""A training step of a dense retriever with GradCache, beside sentence-transformers at its best.

    python benchmarks/retriever_step.py --data_path DIR --tokenizer DIR [--size minilm] [--batch 32]
    [--shapes short mixed long uniform] [--budgets N ...] [--rows N ...] [--rounds 5] [--json]

DIR holds queries.jsonl and corpus.tsv (NaturalQuestions); the tokenizer is BERT's. Both train the
same rows from the same random weights with AdamW, and clip. Ours runs through the engine at ZeRO 0
with `loss.chunk_tokens`, collation on the clock. sentence-transformers runs its
CachedMultipleNegativesRankingLoss on tensors that are made beforehand, with budgets of tokens and
with micro-batches of several sizes, the rows of a step sorted by the length of their positives; it
pads on a processor, for it unpads with flash attention alone. The fastest of its ways is what ours
is held against. Losses of the first steps must agree without dropout, or it exits 1.

Shapes: short, passages of 24 words; mixed, of 8 to 160 words, as many of each doubling; long, of
four passages one behind the other, cut at 384 tokens; uniform, all cut at 128 tokens.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # runs from a checkout that is not installed

import numpy as np
import torch
from races import environment, race_parser, ratio, take_turns
from retriever_contestants import CLIP, LR, SIZES, Ours, Work
from torch import Tensor, nn
from workload import SEED

from trainer.protocol.task import Row
from trainer.runtime import distributed

CHECKED, TOLERANCE = 2, 1e-5  # steps whose losses must agree so far, of the loss
GOAL = 1.15  # times their fastest way
OURS = "ours"


@dataclass(frozen=True)
class Shape:
    """Lengths of a kind of rows, and the chunks that are tried."""

    passage_tokens: int
    words: tuple[int, int] | None  # of a passage, at least and at most; None: all
    joined: int = 1  # passages that are one
    sizes: tuple[int, ...] = (8, 16, 32)  # micro-batches of theirs, in rows
    budgets: tuple[int, ...] = (1024, 2048, 4096)  # of tokens, of theirs and ours


SHAPES = {
    "short": Shape(40, (24, 24)),
    "mixed": Shape(256, (8, 160)),
    "long": Shape(384, None, joined=4, sizes=(4, 8, 16), budgets=(2048, 4096, 8192)),
    "uniform": Shape(128, None),
}


@dataclass(frozen=True, kw_only=True)
class ShapedWork(Work):
    """Queries of NaturalQuestions whose passages are as long as a shape says."""

    shape: Shape

    @cached_property
    def rows(self) -> list[Row]:
        """The queries of all batches, with a positive and negatives, of drawn lengths."""
        drawn = np.random.default_rng(SEED)
        usual = Work.rows.func(self)  # type: ignore[attr-defined]
        longer = [passage for row in usual for passage in row["negatives"]]

        def cut(passage: Row) -> Row:
            texts = [
                passage,
                *(longer[i] for i in drawn.integers(0, len(longer), self.shape.joined - 1)),
            ]
            words = " ".join(one["text"] for one in texts).split()
            if self.shape.words is not None:
                low, high = np.log2(self.shape.words)
                words = words[: round(2 ** drawn.uniform(low, high))]
            return {"text": " ".join(words)}

        return [
            {
                **row,
                **{side: [cut(one) for one in row[side]] for side in ("positives", "negatives")},
            }
            for row in usual
        ]


class Theirs:
    """sentence-transformers' cached loss on padded columns: queries, positives and negatives."""

    def __init__(self, work: ShapedWork, **chunks: int) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer import losses

        self._work, task = work, work.task(work.batch, {})
        folder = work.folder / f"theirs-{id(self)}"
        model = task.model()
        task.export(dict(model.state_dict()), folder)
        self._model = SentenceTransformer(str(folder), device=str(distributed.device()))
        dropout = {
            "hidden_dropout_prob": work.dropout,
            "attention_probs_dropout_prob": work.dropout,
        }
        assert all(getattr(self._model[0].auto_model.config, k) == v for k, v in dropout.items())
        self._loss = losses.CachedMultipleNegativesRankingLoss(
            self._model, scale=1.0, similarity_fct=_dot, **chunks
        )
        weights = list(self._model.parameters())
        # fused as ours is: the default loops over the tensors on a processor
        self._optimizer = torch.optim.AdamW(weights, lr=LR, weight_decay=0.0, fused=True)
        self._batches = [self._columns(number) for number in range(work.num_batches)]

    def _columns(self, number: int) -> list[dict[str, Tensor]]:
        rows = [self._work.rows[row] for row in self._work.span(number)]
        texts = [[row["query"] for row in rows], [row["positives"][0]["text"] for row in rows]]
        texts += [
            [row["negatives"][place]["text"] for row in rows]
            for place in range(self._work.passages - 1)
        ]
        limits = [self._work.query_tokens] + [self._work.passage_tokens] * self._work.passages
        read = self._model.tokenizer
        ids = [
            read(column, truncation=True, max_length=limit)["input_ids"]
            for column, limit in zip(texts, limits, strict=True)
        ]
        order = np.argsort([len(one) for one in ids[1]], kind="stable")[::-1]
        padded = [read.pad({"input_ids": [c[i] for i in order]}, return_tensors="pt") for c in ids]
        return [{name: one[name] for name in ("input_ids", "attention_mask")} for one in padded]

    def step(self, number: int) -> float:
        """Train on batch `number`; its loss."""
        self._model.train()
        columns = [dict(column) for column in self._batches[number % self._work.num_batches]]
        loss = self._loss(columns, torch.empty(0))
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def close(self) -> None:
        """Nothing is open."""


def _dot(queries: Tensor, passages: Tensor) -> Tensor:
    return queries @ passages.T


def contestants(work: ShapedWork) -> dict[str, Any]:
    """By name, what makes each contestant: ours for each budget, and all ways of theirs."""
    makers: dict[str, Any] = {}
    for budget in work.shape.budgets:
        makers[f"{OURS}, {budget} tokens"] = lambda work, tokens=budget: Ours(
            work, work.batch, chunk_tokens=tokens
        )
        makers[f"theirs, {budget} tokens"] = lambda work, tokens=budget: Theirs(
            work, mini_batch_num_tokens=tokens
        )
    for size in work.shape.sizes:
        makers[f"theirs, {size} rows"] = lambda work, rows=size: Theirs(work, mini_batch_size=rows)
    return makers


def check(work: ShapedWork, makers: dict[str, Any]) -> float:
    """By how much the losses of the first steps differ, relatively, without dropout; exits 1 above
    TOLERANCE.
    """
    without = replace(work, dropout=0.0)
    first = [next(name for name in makers if name.startswith(one)) for one in (OURS, "theirs")]
    both = [makers[name](without) for name in first]
    worst = 0.0
    for number in range(CHECKED):
        ours, theirs = (one.step(number) for one in both)
        worst = max(worst, abs(ours - theirs) / theirs)
    for one in both:
        one.close()
    if not worst <= TOLERANCE:
        raise SystemExit(f"losses are {worst:.1e} apart: this is different work")
    return worst


def measure(work: ShapedWork, rounds: int) -> dict[str, Any]:
    """Seconds of a step by contestant, and our fastest way against their fastest."""
    makers = contestants(work)
    difference = check(work, makers)
    everyone = {name: make(work) for name, make in makers.items()}
    seconds = take_turns({name: one.step for name, one in everyone.items()}, rounds)["cpu"]
    for one in everyone.values():
        one.close()
    of_ours, of_theirs = (
        {name: times for name, times in seconds.items() if name.startswith(one)}
        for one in (OURS, "theirs")
    )
    best = [
        min(of, key=lambda name, of=of: statistics.median(of[name])) for of in (of_ours, of_theirs)
    ]
    return {
        "loss_difference": difference,
        "cpu_s": {name: statistics.median(times) for name, times in seconds.items()},
        "best": best,
        "times": ratio(seconds[best[1]], seconds[best[0]]),
    }


def lines(shape: str, found: dict[str, Any]) -> Sequence[str]:
    """What was found of a shape."""
    times, (ours, theirs) = found["times"], found["best"]
    verdict = "met" if times["median"] >= GOAL else "missed"
    return [
        f"{shape}: losses differ by {found['loss_difference']:.1e}",
        *(f"  {name:24s}{seconds:8.3f} CPU s" for name, seconds in found["cpu_s"].items()),
        f"  {ours} is {times['median']:.2f} times as fast as {theirs} "
        f"(quartiles {times['low']:.2f}-{times['high']:.2f}); {GOAL} {verdict}",
    ]


def main() -> None:
    made = race_parser("A retriever's step beside sentence-transformers.")
    made.add_argument("--data_path", type=Path, required=True)
    made.add_argument("--tokenizer", type=Path, required=True)
    made.add_argument("--size", choices=tuple(SIZES), default="minilm")
    made.add_argument("--batch", type=int, default=32, help="queries a step")
    made.add_argument("--passages", type=int, default=2, help="of a query")
    made.add_argument("--shapes", nargs="*", choices=tuple(SHAPES), default=list(SHAPES))
    made.add_argument("--rounds", type=int, default=5, help="timed turns of each")
    made.add_argument("--budgets", type=int, nargs="*", help="of tokens; None: those of the shape")
    made.add_argument("--rows", type=int, nargs="*", help="of their micro-batches; None: as above")
    report(made.parse_args())
    distributed.shutdown()


def report(options: argparse.Namespace) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    found: dict[str, Any] = {"environment": environment("sentence-transformers")}
    if not options.json:
        print(found["environment"])
    names = ("data_path", "tokenizer", "size", "batch", "passages")
    for name in options.shapes:
        shape = SHAPES[name]
        if options.budgets is not None:
            shape = replace(shape, budgets=tuple(options.budgets))
        if options.rows is not None:
            shape = replace(shape, sizes=tuple(options.rows))
        with tempfile.TemporaryDirectory() as folder:
            work = ShapedWork(
                folder=Path(folder),
                num_batches=options.rounds + 1,
                passage_tokens=shape.passage_tokens,
                shape=shape,
                **{key: getattr(options, key) for key in names},
            )
            torch.manual_seed(SEED)
            found[name] = measure(work, options.rounds)
        if not options.json:
            print("\n".join(lines(name, found[name])), flush=True)
    if options.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
