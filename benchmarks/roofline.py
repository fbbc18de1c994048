"""What a step would take at an H200's rates, by counting: nothing is computed, no GPU needed.

    python benchmarks/roofline.py [--shape NAME ...] [--micro_batch N] [--liger]

Forward and backward of one micro-batch of a published shape on the memory plan's fake device. Every
operator takes the longer of its FLOPs at the peak and its bytes, read and written once, at the
memory's rate; share = FLOPs / (time x peak). The kernels' launches are counted apart: where they
take longer, they decide. What a Triton kernel does is not seen; shapes here attend without.

--liger: with the kernels of liger-kernel. It need not be installed, for on the fake device each of
its kernels is one operator of torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from benchmarks.gpu_shapes import SHAPES, Shape, bigcode
from trainer import switches
from trainer.plan.memory.fake_device import FAKE_GPU, fake_device

# An H200's: dense bf16 of NVIDIA's data sheet, what copies reach of its memory, and what the host
# takes for a kernel with torch's eager mode.
PEAK_FLOPS, BYTES_PER_S, LAUNCH_S = 989.4e12, 4.3e12, 6e-6
FREE = ("detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view")
NAMED = {
    "cross_attention-15b": Shape(
        "cross_attention-15b", "cross_attention", bigcode(6144, 40, 48), SHAPES[1].blocks, 8
    )
} | {shape.name: shape for shape in SHAPES}
DEFAULT = ("vera-xxl-encoder", "cross_attention-3b", "cross_attention-15b")


@dataclass
class Work:
    """What a step does."""

    flops: float = 0.0
    seconds: float = 0.0
    kernels: int = 0
    by_operator: Counter[str] = field(default_factory=Counter)  # seconds

    @property
    def share_of_peak(self) -> float:
        return self.flops / (self.seconds * PEAK_FLOPS)

    def plain(self) -> dict[str, Any]:
        top = {name: 1000 * seconds for name, seconds in self.by_operator.most_common(8)}
        return {
            "tflop": self.flops / 1e12,
            "ms": 1000 * self.seconds,
            "share_of_peak": self.share_of_peak,
            "kernels": self.kernels,
            "launch_ms": 1000 * self.kernels * LAUNCH_S,
            "top_ms": top,
        }


class Counting(TorchDispatchMode):
    """Adds up the operators that compute on the fake device."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def prepare(self, model: Any) -> None:
        """What is to be done to the model first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        computes = space in ("aten", "torch_attn") and not func.is_view and name not in FREE
        if computes and next(iter(_here((out, args))), None) is not None:
            self._add(name, func, args, kwargs or {}, out)
        return out

    def _add(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        count = flop_registry.get(func._overloadpacket)
        flops = 0 if count is None else count(*args, **kwargs, out_val=out)
        nbytes = sum(x.numel() * x.element_size() for x in _here((args, kwargs, out)))
        seconds = max(flops / PEAK_FLOPS, nbytes / BYTES_PER_S)
        self.work.flops += flops
        self.work.seconds += seconds
        self.work.kernels += 1
        self.work.by_operator[name] += seconds


def _here(values: Any) -> Iterable[Tensor]:
    return (x for x in tree_iter(values) if isinstance(x, Tensor) and x.device.type == FAKE_GPU)


def counted(name: str, micro_batch: int | None, counting: Counting | None = None) -> dict[str, Any]:
    """One micro-batch of a shape; in a process of its own."""
    from trainer import tasks
    from trainer.models.base_model import DTYPES
    from trainer.protocol.task import Places

    counting = counting or Counting()
    shape = NAMED[name]
    cfg = tasks.parse(shape.experiment(is_rehearsed=False))
    with tempfile.TemporaryDirectory() as folder:
        task = tasks.load(cfg, Places(None, Path(folder), Path(folder)))
        model: Any = task.skeleton().to(DTYPES[cfg.train.precision])
        batch = batch_of(task, micro_batch or shape.micro_batch)
    model.train()
    counting.prepare(model)
    with fake_device(FAKE_GPU) as device:
        device.place(model)
        window = [device.copy_of(batch)]
        with counting:
            for loss in task.losses(model, window):
                loss.backward()
    return counting.work.plain()


def batch_of(task: Any, rows: int) -> Any:
    """A micro-batch of rows that fill the limits."""
    from trainer.protocol.task import DRAW, EPOCH

    zero = np.zeros(1, dtype=np.int64)
    encoded = {k: np.asarray(v, dtype=np.int64) for k, v in task.encode(task.specimen()).items()}
    return task.collate([{**encoded, DRAW: zero, EPOCH: zero}] * rows)


def _apart(name: str, micro_batch: int | None, *, has_liger: bool) -> dict[str, Any]:
    """counted() in a process of its own, which ends as the plan's do (memory/fake_step.py)."""
    argv = [sys.executable, "-W", "ignore", __file__, "--one", name]
    argv += [] if micro_batch is None else ["--micro_batch", str(micro_batch)]
    argv += ["--liger"] if has_liger else []
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="*", default=list(DEFAULT), choices=list(NAMED))
    parser.add_argument("--micro_batch", type=int)
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        switches.has_liger = lambda: given.liger
        print(json.dumps(counted(given.one, given.micro_batch)), flush=True)
        os._exit(0)
    for name in given.shape:
        found = _apart(name, given.micro_batch, has_liger=given.liger)
        print(
            f"{name}: {found['tflop']:.1f} TFLOP, {found['ms']:.1f} ms, "
            f"{found['share_of_peak']:.1%} of peak, {found['kernels']} kernels "
            f"({found['launch_ms']:.1f} ms of launches)"
        )
        print("  " + ", ".join(f"{op} {ms:.1f} ms" for op, ms in found["top_ms"].items()))


if __name__ == "__main__":
    main()
