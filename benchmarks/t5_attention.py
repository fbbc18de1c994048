"""T5's attention on a stream of rows: the operation that needs no grid against grids with sdpa.

    python benchmarks/t5_attention.py [--length L ...] [--tokens M] [--dropout P] [--rounds R]

One forward and backward of T5-base's attention (12 heads of 64, 32 buckets), fp32, one thread, on
rows of L tokens each, M tokens in all but one row at least. Seconds of the processor, both sides in
turns, medians, and the most bytes that the CPU's allocator had handed out at once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # runs from a checkout that is not installed

import torch
from memory_plan import live_bytes, recorded
from torch import Tensor
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from trainer.models.packed.attention import in_grids, in_streams
from trainer.models.packed.layout import grids_of, pack

SIDES = ("grids", "stream")


class Side:
    """One way to attend to the rows of one batch."""

    def __init__(self, name: str, table: Any, length: int, tokens: int, dropout: float) -> None:
        batch = pack([[1] * length] * max(1, tokens // length), bucketed=True)
        self.batch, self.table, self.dropout, self.name = batch, table, dropout, name
        generator = torch.Generator().manual_seed(1)
        shape = (3, len(batch["tokens"]), table.inner_dim)
        self.qkv = (torch.randn(shape, generator=generator) / 8).requires_grad_()

    def step(self) -> Tensor:
        """The gradient of queries, keys and values."""
        if self.name == "grids":
            grids, cells = grids_of(self.batch), self.batch["cells"]
            attend = in_grids(self.table, grids, cells, dropout=self.dropout)
        else:
            attend = in_streams(self.table, self.batch, dropout=self.dropout)
        self.qkv.grad = None
        attend(*self.qkv.unbind()).sum().backward()
        assert self.qkv.grad is not None
        return self.qkv.grad


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(1)
    table = T5Attention(T5Config(d_model=768, num_heads=12), has_relative_attention_bias=True)
    for length in options.length:
        given = (table, length, options.tokens, options.dropout)
        sides = {name: Side(name, *given) for name in SIDES}
        seconds: dict[str, list[float]] = {name: [] for name in SIDES}
        for number in range(options.rounds):
            for name in SIDES if number % 2 else reversed(SIDES):
                started = time.process_time()
                sides[name].step()
                seconds[name].append(time.process_time() - started)
        peaks: dict[str, float] = {}
        for name, side in sides.items():
            with recorded() as profiler:
                side.step()
            peaks[name] = max(live for _, live in live_bytes(profiler, {})) / 2**30
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        print(
            f"{length:6d} tokens x {len(sides['grids'].batch['starts']) - 1:3d}: grids "
            f"{medians['grids']:.2f} s, stream {medians['stream']:.2f} s "
            f"({medians['grids'] / medians['stream']:.2f}), {peaks['grids']:.3f} and "
            f"{peaks['stream']:.3f} GiB",
            flush=True,
        )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="T5's attention: a stream against grids.")
    made.add_argument("--length", nargs="+", type=int, default=[250, 512, 1024, 4096])
    made.add_argument("--tokens", type=int, default=4096)
    made.add_argument("--dropout", type=float, default=0.1)
    made.add_argument("--rounds", type=int, default=3)
    return made


if __name__ == "__main__":
    main()
