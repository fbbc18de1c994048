"""One long row through a T5 summariser in bf16: planned memory against what this machine takes.

    python benchmarks/long_rows.py [--tokens N ...] [--every K] [--model t5-base]

Every length is a step of AdamW over a short row, which makes its states, and one over a row of N
tokens with a summary of 128: bf16 weights, fp32 masters, random weights, one thread, in a process
of its own. Up to 4,096 tokens the measured peak is the CPU allocator's own record; beyond, where
that record would not fit, what the process held at most above what it held before. About two CPU
minutes for 4,096 tokens of t5-base, and a quarter of an hour for 16,384.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout

import torch
from memory_plan import Training, live_bytes, recorded
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from trainer.models.fused import fuse
from trainer.models.packed.layout import pack, pack_targets
from trainer.plan.memory.fake_device import FAKE_GPU, fake_device
from trainer.plan.memory.subject import T5_SHAPES
from trainer.tasks.summariser.model import Summariser

RECORDED = 4096  # tokens up to which every allocation is recorded
SHORT, TARGET, BLOCK = 64, 128, 1024  # tokens, and bytes of getrusage's unit


@dataclass(frozen=True)
class LongRow:
    """A training step over one row."""

    model: str
    tokens: int
    every: int | None  # so many blocks, one is computed again
    precision: Literal["fp32", "master", "autocast"] = "master"

    def model_on(self, device: str) -> nn.Module:
        config = T5Config(**T5_SHAPES[self.model], attn_implementation="sdpa")
        with torch.device(device):
            base = T5ForConditionalGeneration(config)
        fuse(base)  # as a run does
        model = Summariser(base, recompute_every=self.every)
        return model.bfloat16().train()

    def rows(self) -> dict[str, Tensor]:
        return self.of(self.tokens)

    def of(self, tokens: int) -> dict[str, Tensor]:
        """A row of so many tokens, and its summary."""
        return pack([[5] * tokens], bucketed=True) | pack_targets([[5] * TARGET])

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch)["loss"] / TARGET


def planned(row: LongRow) -> dict[str, float]:
    """Bytes on the plan's GPU."""
    model = row.model_on("meta")
    with fake_device(FAKE_GPU) as fake:
        fake.place(model)
        resident = sum(fake.tracker.live.values())
        training = Training(row, model, FAKE_GPU)
        training.step(fake.copy_of(row.of(SHORT)))
        fake.tracker.restart()
        training.step(fake.copy_of(row.rows()))
        return {"bytes": resident + max(moment.total for moment in fake.tracker.moments)}


def measured(row: LongRow) -> dict[str, float]:
    """Bytes of a real step, and its seconds."""
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BLOCK
    if row.tokens > RECORDED:
        training = Training(row, row.model_on("cpu"), "cpu")
        training.step(row.of(SHORT))
        seconds = _seconds_of(training, row)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BLOCK - before
        return {"bytes": peak, "seconds": seconds}
    with recorded() as profiler:
        training = Training(row, row.model_on("cpu"), "cpu")
        training.step(row.of(SHORT))
        seconds = _seconds_of(training, row)
    return {"bytes": max(live for _, live in live_bytes(profiler, {})), "seconds": seconds}


def _seconds_of(training: Training, row: LongRow) -> float:
    """Of the processor, that a step takes."""
    started = time.process_time()
    training.step(row.rows())
    return time.process_time() - started


def _apart(what: str, row: LongRow) -> dict[str, float]:
    """planned or measured in a process of its own."""
    argv = [sys.executable, "-W", "ignore", __file__, "--one", what, "--model", row.model]
    argv += ["--tokens", str(row.tokens), "--every", str(row.every or 0)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of one long row, planned and measured.")
    parser.add_argument("--model", choices=list(T5_SHAPES), default="t5-base")
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--every", type=int, default=0, help="compute every k-th block again")
    parser.add_argument("--one", choices=["planned", "measured"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    rows = [LongRow(given.model, tokens, given.every or None) for tokens in given.tokens]
    if given.one:
        print(json.dumps((planned if given.one == "planned" else measured)(rows[0])), flush=True)
        return
    for row in rows:
        plan = _apart("planned", row)["bytes"]
        real = _apart("measured", row)
        print(
            f"{row.model} {row.tokens} tokens, every {row.every}: planned {plan / 2**30:.3f} GiB, "
            f"measured {real['bytes'] / 2**30:.3f} GiB ({plan / real['bytes'] - 1:+.2%}), "
            f"{real['seconds']:.0f} CPU s",
            flush=True,
        )


if __name__ == "__main__":
    main()
