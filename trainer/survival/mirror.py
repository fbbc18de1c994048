"""What a rank needs to go on from a step's end, in memory that outlives it.

Every rank of `--survive` copies its own part of masters and moments, its random state and its
progress into one of two memory files that its agent holds (agent.py), in turns: one is
whole at any moment. A process that takes a rank's place, and those that live, read what they need
out of the files of all ranks, as they would out of a checkpoint: at any world size.

A file is: step + 1 (0: not whole), where its JSON begins, how long that is; the tensors; the JSON.
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
    from trainer.training.engine import Engine
    from trainer.training.session import Progress

BYTES = 12  # a trained parameter: an fp32 master and two moments
_HEAD, _WHOLE, _ALIGNED = struct.Struct("<qqq"), struct.Struct("<q"), 64


@dataclass
class Mirror:
    """The two memory files of this rank, and how much was copied into them."""

    files: list[str]
    run: str  # the id of the experiment
    every: int = 1  # steps
    bytes: int = 0
    cpu_s: float = 0.0  # of this thread
    count: int = 0
    _maps: dict[int, mmap.mmap] = field(default_factory=dict[int, mmap.mmap])

    def keep(self, live: Engine, progress: Progress, chain: StepChain) -> None:
        """Copy the present state, if this step is one for it. No collective."""
        if progress.step % self.every or not live.optimizer.inner().state:
            return  # an optimizer that has not stepped yet knows nothing
        cpu = time.thread_time()
        pieces = {f"{name}|{key}": (at, part) for name, key, at, part in live.optimizer.pieces()}
        random = {f"rng|{name}": (0, state) for name, state in rng.capture().items()}
        table, end = _table({**pieces, **random})
        header = {
            "run": self.run,
            "world": distributed.world(),
            "step": progress.step,
            "tensors": table,
            "progress": progress.state(),
            "link": chain.present(),
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
        """What this rank kept beyond `step` counts no more: not every rank did, and steps that are
        done again need not have the same bits on every device.
        """
        for file in map(Path, self.files):
            header = _header(file)
            if header is not None and header["step"] > step:
                with file.open("r+b") as memory:
                    memory.write(_WHOLE.pack(0))

    def told(self) -> str:
        """What keeping has cost this rank so far."""
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
    """[name, where its piece begins in the flat tensor, elements, dtype, place in the file] of
    every tensor, and where they end.
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
    """The state of all ranks at one step, as read back: a SavedState (training/checkpoint.py)."""

    step: int
    headers: list[dict[str, Any]]  # by rank
    maps: list[mmap.mmap]

    def __post_init__(self) -> None:
        self._rows = [{row[0]: row for row in header["tensors"]} for header in self.headers]

    def __str__(self) -> str:
        return "memory"

    @property
    def world(self) -> int:
        """How many ranks kept it."""
        return len(self.headers)

    def state(self) -> dict[str, Any]:
        """As state.json of a checkpoint: of rank 0, with the links of all ranks."""
        links = [header["link"] for header in self.headers]
        first = self.headers[0]
        return {"progress": {**first["progress"], "links": links}, "engine": first["engine"]}

    def random_state(self, rank: int) -> dict[str, Tensor]:
        """That of one rank."""
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

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(where it begins, values) of every piece of a flat tensor."""
        for rows, memory in zip(self._rows, self.maps, strict=True):
            if name in rows:
                yield rows[name][1], _view(memory, rows[name])


@dataclass
class Whole(Mapping[str, Tensor]):
    """Full tensors, each put together out of the ranks' pieces when it is asked for."""

    saved: MirroredState
    names: dict[str, tuple[str, torch.Size]]

    def __getitem__(self, name: str) -> Tensor:
        stored, shape = self.names[name]
        whole = torch.zeros(shape, dtype=torch.float32)
        for start, part in self.saved.pieces(stored):
            whole.view(-1)[start : start + part.numel()].copy_(part)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def of_this_rank(
    memory: list[list[str]], run: str, live: Engine, *, step: int, every: int
) -> Mirror | None:
    """The mirror of this rank; None for a run that does not survive its ranks.

    memory: two files of each rank. step: the one that the run goes on from. every: how many steps
    lie between two copies. DoesNotFitError before the first step when the host has no room for what
    all ranks keep.
    """
    if not memory:
        return None
    _refuse_too_large(live, sum(os.stat(file).st_size for files in memory for file in files))
    mirror = Mirror(memory[distributed.rank()], run, every)
    mirror.forget_after(step)
    return mirror


def _refuse_too_large(live: Engine, held: int) -> None:
    import psutil

    size = 2 * BYTES * sum(shape.numel() for shape in shapes(live.model.module).values())
    free = psutil.virtual_memory().available + held
    if size > free:
        raise DoesNotFitError(
            f"--survive: got {size_of(free)} of free host memory, want {size_of(size)} for what "
            f"ranks go on from: {BYTES} bytes a trained parameter, twice. Use a machine with more, "
            "train fewer parameters, or train without --survive."
        )


def newest(memory: list[list[str]], run: str) -> MirroredState | None:
    """What all ranks of some world kept of `run` at the last step that they have in common."""
    kept: dict[tuple[int, int], dict[int, Path]] = {}
    for rank, files in enumerate(memory):
        for file in files:
            header = _header(Path(file))
            if header is not None and header["run"] == run and rank < header["world"]:
                kept.setdefault((header["step"], header["world"]), {})[rank] = Path(file)
    whole = [key for key, ranks in kept.items() if len(ranks) == key[1]]
    if not whole:
        return None
    step, world = max(whole)
    files = [kept[step, world][rank] for rank in range(world)]
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
