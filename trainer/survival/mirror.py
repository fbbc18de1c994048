"""Keeps the training state of every rank in memory that outlives the rank.

Every rank of `--survive` copies its own part of masters and moments, its random state and its
progress into two memory files in turn, so that one is complete at any moment. The agent holds the
files (agent.py). When a rank is lost, all ranks resume from the files of all ranks, as from a
checkpoint, at any world size.

A file holds: step + 1 (0: not complete), the offset and the length of the JSON; the tensors; the
JSON.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.errors import DoesNotFitError
from trainer.files.atomic import size_of
from trainer.runtime import distributed, rng
from trainer.training.engine import shapes
from trainer.training.optimizer_state import MASTER

if TYPE_CHECKING:
    from trainer.telemetry.chain import StepChain
    from trainer.telemetry.source_losses import SourceSums
    from trainer.training.engine import Engine
    from trainer.training.session import Progress

BYTES = 12  # for each trained parameter: an fp32 master and two moments
AVERAGE = "average"  # of a run with train.ema: an average beside them
_HEAD, _WHOLE, _ALIGNED = struct.Struct("<qqq"), struct.Struct("<q"), 64


@dataclass
class Mirror:
    """The two memory files of this rank, and how much was copied into them."""

    files: list[str]
    run: str  # the id of the experiment
    every: int = 1  # steps
    bytes: int = 0
    cpu_s: float = 0.0  # CPU time of this thread
    count: int = 0
    _maps: dict[int, mmap.mmap] = field(default_factory=dict[int, mmap.mmap])

    def keep(self, live: Engine, progress: Progress, chain: StepChain, sums: SourceSums) -> None:
        """Copy the present state if it is the turn of this step. No collective."""
        if progress.step % self.every or not live.optimizer.inner().state:
            return  # the optimizer has no state before its first step
        cpu = time.thread_time()
        pieces = {f"{name}|{key}": (at, part) for name, key, at, part in live.optimizer.pieces()}
        if live.average is not None:
            averages = live.average.pieces()
            pieces |= {f"{name}|{AVERAGE}": (at, part) for name, at, part in averages}
        random = {f"rng|{name}": (0, state) for name, state in rng.capture().items()}
        table, end = _table({**pieces, **random})
        header = {
            "run": self.run,
            "world": distributed.world(),
            "step": progress.step,
            "tensors": table,
            "progress": progress.state(),
            "link": chain.present(),
            "by_source": sums.own(),
            "engine": live.optimizer.scalars(),
        }
        text = json.dumps(header).encode()
        slot = progress.step // self.every % 2
        memory = self._open(slot, end + len(text))
        _HEAD.pack_into(memory, 0, 0, 0, 0)
        for row, (_, part) in zip(table, [*pieces.values(), *random.values()], strict=True):
            _view(memory, row).copy_(part.detach().flatten())
        memory[end : end + len(text)] = text
        _HEAD.pack_into(memory, 0, 0, end, len(text))
        _WHOLE.pack_into(memory, 0, progress.step + 1)  # last: a kill may come between any two
        self.bytes += end + len(text)
        self.count += 1
        self.cpu_s += time.thread_time() - cpu

    def forget_after(self, step: int) -> None:
        """Invalidate copies of later steps than `step`. Not every rank has them, and steps that are
        trained again may have other bits on some devices.
        """
        for file in map(Path, self.files):
            header = _header(file)
            if header is not None and header["step"] > step:
                with file.open("r+b") as memory:
                    memory.write(_WHOLE.pack(0))

    def told(self) -> str:
        """The cost of the copies on this rank so far, as a sentence."""
        count, cpu_s = max(self.count, 1), time.process_time()
        return (
            f"mirrored {self.count} steps in host memory: {size_of(self.bytes // count)} and "
            f"{1000 * self.cpu_s / count:.2f} ms of CPU each, {100 * self.cpu_s / cpu_s:.2f}% of "
            "the CPU seconds of this rank"
        )

    def _open(self, slot: int, size: int) -> mmap.mmap:
        memory = self._maps.get(slot)
        if memory is None or len(memory) < size:
            with open(self.files[slot], "r+b") as file:
                size = math.ceil(size / mmap.PAGESIZE + 1) * mmap.PAGESIZE  # JSON may grow
                os.ftruncate(file.fileno(), max(size, os.fstat(file.fileno()).st_size))
                memory = self._maps[slot] = mmap.mmap(file.fileno(), size)
        return memory


def _table(tensors: Mapping[str, tuple[int, Tensor]]) -> tuple[list[list[Any]], int]:
    """([name, start of the piece in the flat tensor, elements, dtype, offset in the file] of every
    tensor, the offset where the tensors end).
    """
    rows, end = list[list[Any]](), _ALIGNED
    for name, (start, tensor) in tensors.items():
        rows.append([name, start, tensor.numel(), str(tensor.dtype).removeprefix("torch."), end])
        end += math.ceil(tensor.nbytes / _ALIGNED) * _ALIGNED
    return rows, end


def _view(memory: mmap.mmap | memoryview, row: list[Any]) -> Tensor:
    _, _, count, dtype, offset = row
    if not count:
        return torch.empty(0, dtype=getattr(torch, dtype))
    return torch.frombuffer(memory, dtype=getattr(torch, dtype), count=count, offset=offset)


@dataclass
class MirroredState:
    """The state of all ranks at one step, read back; a SavedState (training/checkpoint.py)."""

    step: int
    headers: list[dict[str, Any]]  # by rank
    maps: list[mmap.mmap]

    def __post_init__(self) -> None:
        self._rows = [{row[0]: row for row in header["tensors"]} for header in self.headers]

    def __str__(self) -> str:
        return "memory"

    @property
    def world(self) -> int:
        """How many ranks copied it."""
        return len(self.headers)

    def state(self) -> dict[str, Any]:
        """The content of a checkpoint's state.json: from rank 0, with the links of all ranks, and
        what they have summed up by source.
        """
        first, of_ranks = self.headers[0], [header["by_source"] for header in self.headers]
        own = {
            "links": [header["link"] for header in self.headers],
            "by_source": torch.tensor(of_ranks, dtype=torch.float64).sum(0).tolist(),
        }
        return {"progress": {**first["progress"], **own}, "engine": first["engine"]}

    def random_state(self, rank: int) -> dict[str, Tensor]:
        """The random state of one rank."""
        return {
            name.removeprefix("rng|"): _view(self.maps[rank], row).clone()
            for name, row in self._rows[rank].items()
            if name.startswith("rng|")
        }

    def weights(self, shapes: Mapping[str, torch.Size]) -> Whole:
        """Full trainable weights in fp32, by name."""
        return Whole(self, {name: (f"{name}|{MASTER}", shape) for name, shape in shapes.items()})

    def optimizer(self, shapes: Mapping[str, torch.Size]) -> Whole:
        """Full optimizer tensors of these names."""
        return Whole(self, {name: (name, shape) for name, shape in shapes.items()})

    def average(self, shapes: Mapping[str, torch.Size]) -> Whole:
        """Full averages of the weights, by name."""
        return Whole(self, {name: (f"{name}|{AVERAGE}", shape) for name, shape in shapes.items()})

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(start, values) of every piece of a flat tensor."""
        for rows, memory in zip(self._rows, self.maps, strict=True):
            if name in rows:
                yield rows[name][1], _view(memory, rows[name])


@dataclass
class Whole(Mapping[str, Tensor]):
    """Full tensors by name. Each is assembled from the ranks' pieces when it is read."""

    saved: MirroredState
    names: dict[str, tuple[str, torch.Size]]

    def __getitem__(self, name: str) -> Tensor:
        own_name, shape = self.names[name]
        whole = torch.zeros(shape, dtype=torch.float32)
        for start, part in self.saved.pieces(own_name):
            whole.view(-1)[start : start + part.numel()].copy_(part)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def of_this_rank(
    memory: list[list[str]], run: str, live: Engine, *, step: int, every: int
) -> Mirror | None:
    """The mirror of this rank; None for a run without --survive.

    memory: the two files of each rank. step: the step to resume from. every: steps between two
    copies. DoesNotFitError, before the first step, if the host has no memory for all copies.
    """
    if not memory:
        return None
    import psutil

    own = sum(os.stat(file).st_size for files in memory for file in files)
    each = BYTES if live.average is None else BYTES + 4
    size = 2 * each * sum(shape.numel() for shape in shapes(live.model.module).values())
    free = psutil.virtual_memory().available + own
    if size > free:
        raise DoesNotFitError(
            f"--survive: got {size_of(free)} of free host memory, want {size_of(size)} for what "
            f"ranks go on from: {each} bytes a trained parameter, twice. Use a machine with more, "
            "train fewer parameters, or train without --survive."
        )
    mirror = Mirror(memory[distributed.rank()], run, every)
    mirror.forget_after(step)
    return mirror


def newest(memory: list[list[str]], run: str) -> MirroredState | None:
    """The last state of `run` of which all ranks of a world have a copy; None if there is none."""
    copies: dict[tuple[int, int], dict[int, Path]] = {}
    for rank, files in enumerate(memory):
        for file in files:
            header = _header(Path(file))
            if header is not None and header["run"] == run and rank < header["world"]:
                copies.setdefault((header["step"], header["world"]), {})[rank] = Path(file)
    whole = [key for key, ranks in copies.items() if len(ranks) == key[1]]
    if not whole:
        return None
    step, world = max(whole)
    files = [copies[step, world][rank] for rank in range(world)]
    headers = [header for file in files if (header := _header(file)) is not None]
    assert len(headers) == world, "nobody writes while ranks are being placed"
    return MirroredState(step, headers, [_map(file) for file in files])


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _header(path: Path) -> dict[str, Any] | None:
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        step, start, length = _HEAD.unpack(head)
        if not step:
            return None
        file.seek(start)
        return json.loads(file.read(length))
