"""What the output layer and its loss take, in chunks and whole: bytes, seconds and the loss itself.

    python benchmarks/head.py [--task NAME ...] [--size N V ...] [--width D] [--precision fp32]
        [--rounds R] [--json]

For each task with a vocabulary: a forward and a backward of its module over a base of one block
with random weights, N labelled positions and a vocabulary of V. "whole" has all logits in
one chunk, as it was before there were chunks. Peak: the most bytes that the CPU's allocator had
handed out at once beside the weights, by torch.profiler. Seconds: of the processor, both sides in
turns, medians. 8 GiB of memory for the larger size. A processor without instructions for bf16
multiplies matrices of it at a thirtieth of its fp32 rate: take bytes there with --width 16, and
seconds with --precision fp32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # runs from a checkout that is not installed

import torch
import transformers
from memory_plan import live_bytes, recorded
from torch import Tensor, nn

from trainer.models import losses
from trainer.models.base_model import DTYPES
from trainer.models.decoder.streams import reader_of
from trainer.models.packed.layout import pack as pack_rows
from trainer.models.packed.layout import pack_labelled, pack_targets
from trainer.tasks.causal_lm.task import CausalLM
from trainer.tasks.cross_attention.config import Layers
from trainer.tasks.cross_attention.decoder.model import CrossAttentionModel
from trainer.tasks.fid.config import Reader
from trainer.tasks.fid.fused_layout import pack
from trainer.tasks.fid.model import FiD
from trainer.tasks.summariser.model import Summariser

ROWS = 8  # of a micro-batch, between which the labelled positions are divided
SIZES = [(2048, 49152), (4096, 151936)]
SIDES = ("whole", "chunks")


@dataclass(frozen=True)
class Size:
    """How large a step is."""

    positions: int
    vocabulary: int
    width: int
    precision: str

    @property
    def of_row(self) -> int:
        return self.positions // ROWS


@dataclass(frozen=True)
class Found:
    """What one side took."""

    peak_gib: float
    cpu_s: float
    loss: float
    gradient_norm: float


def _decoder(size: Size) -> Any:
    shape: dict[str, Any] = {
        "n_embd": size.width,
        "n_layer": 1,
        "n_head": 4,
        "n_positions": size.of_row + 1,
    }
    config = transformers.GPTBigCodeConfig(
        vocab_size=size.vocabulary, **shape, attn_implementation="sdpa"
    )
    return transformers.GPTBigCodeForCausalLM(config)


def _t5(size: Size) -> Any:
    shape: dict[str, Any] = {
        "d_model": size.width,
        "d_kv": 64,
        "num_heads": 4,
        "d_ff": 2 * size.width,
    }
    config = transformers.T5Config(vocab_size=size.vocabulary, num_layers=1, **shape)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


def _ids(size: Size, more: int) -> Tensor:
    return torch.randint(2, size.vocabulary, (ROWS, size.of_row + more))


def causal_lm(size: Size) -> tuple[nn.Module, dict[str, Any]]:
    ids = _ids(size, 1)
    base = _decoder(size)
    rows = ids.tolist()
    streams = pack_labelled(rows, [[1] * len(row) for row in rows])
    return CausalLM(base, reader_of(base.transformer)), streams


def cross_attention(size: Size) -> tuple[nn.Module, dict[str, Any]]:
    ids = _ids(size, 1)
    layers = Layers(count=1, stride=1, width=64, heads=2, after=False)
    states = torch.randn(ROWS, 4, size.width, dtype=DTYPES[size.precision])
    return CrossAttentionModel(_decoder(size), layers), {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids,
        "encoder_hidden_states": states,
    }


def fid(size: Size) -> tuple[nn.Module, dict[str, Any]]:
    passages = [[row] for row in _ids(size, 0)[:, :16].tolist()]
    batch = pack(passages, bucketed=True, cross_width=None)
    return FiD(_t5(size), Reader()), batch | pack_targets(_ids(size, 0).tolist())


def summariser(size: Size) -> tuple[nn.Module, dict[str, Any]]:
    batch = pack_rows(_ids(size, 0)[:, :16].tolist(), bucketed=True)
    targets = pack_targets(_ids(size, 0).tolist())
    return Summariser(_t5(size)), batch | targets


TASKS: dict[str, Callable[[Size], tuple[nn.Module, dict[str, Any]]]] = {
    each.__name__: each for each in (causal_lm, cross_attention, fid, summariser)
}


@contextmanager
def _side(name: str) -> Iterator[None]:
    """Inside, losses are computed as this side does."""
    before = losses.CHUNK_POSITIONS
    losses.CHUNK_POSITIONS = sys.maxsize if name == "whole" else before
    try:
        yield
    finally:
        losses.CHUNK_POSITIONS = before


def _step(model: nn.Module, batch: dict[str, Any]) -> tuple[float, float]:
    """One forward and backward: the loss, and the norm of all gradients."""
    model.zero_grad(set_to_none=True)
    output: Any = model(**batch)
    loss = output["loss"] if isinstance(output, dict) else output.loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return float(loss), float(nn.utils.get_total_norm([g.float() for g in gradients]))


def peak_gib(model: nn.Module, batch: dict[str, Any]) -> float:
    model.zero_grad(set_to_none=True)
    with recorded() as profiler:
        output: Any = model(**batch)
        (output["loss"] if isinstance(output, dict) else output.loss).backward()
        del output
    return max(live for _, live in live_bytes(profiler, {})) / 2**30


def compared(task: str, size: Size, rounds: int) -> dict[str, Found]:
    """What each side takes for the same step."""
    torch.manual_seed(0)
    model, batch = TASKS[task](size)
    model = model.to(DTYPES[size.precision]).eval()  # dropout would draw other numbers on each side
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    results: dict[str, tuple[float, float]] = {}
    for number in range(rounds):
        for side in SIDES if number % 2 else reversed(SIDES):
            with _side(side):
                started = time.process_time()
                results[side] = _step(model, batch)
                seconds[side].append(time.process_time() - started)
    peaks: dict[str, float] = {}
    for side in SIDES:
        with _side(side):
            peaks[side] = peak_gib(model, batch)
    return {
        side: Found(peaks[side], statistics.median(seconds[side]), *results[side]) for side in SIDES
    }


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    for positions, vocabulary in options.size or SIZES:
        for task in options.task or TASKS:
            size = Size(positions, vocabulary, options.width, options.precision)
            found = compared(task, size, options.rounds)
            lines.append(
                {"task": task, **asdict(size)} | {side: asdict(found[side]) for side in SIDES}
            )
            if not options.json:
                print(_line(task, size, found), flush=True)
    if options.json:
        print(json.dumps(lines, indent=1))


def _line(task: str, size: Size, found: dict[str, Found]) -> str:
    whole, chunks = (found[side] for side in SIDES)
    return (
        f"{task:16s} {size.positions} x {size.vocabulary}, width {size.width}, {size.precision}: "
        f"{whole.peak_gib:.3f} -> {chunks.peak_gib:.3f} GiB "
        f"({chunks.peak_gib / whole.peak_gib:.2f}), "
        f"{whole.cpu_s:.2f} -> {chunks.cpu_s:.2f} s, loss {whole.loss:.3f} -> {chunks.loss:.3f} "
        f"({chunks.loss / whole.loss - 1:+.1e}), gradient norm "
        f"{chunks.gradient_norm / whole.gradient_norm - 1:+.1e}"
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description="The output layer and its loss, in chunks and whole."
    )
    made.add_argument("--task", nargs="+", choices=TASKS, help="these tasks only")
    made.add_argument("--size", nargs=2, type=int, action="append", metavar=("N", "V"))
    made.add_argument("--width", type=int, default=256, help="of the states")
    made.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


if __name__ == "__main__":
    main()
