"""Writes and reads checkpoints. A checkpoint is complete or invisible: it is written to a temporary
folder, gets checksums, is committed by one rename, and is verified before use.

    checkpoints/step-<n>/  weights-<rank>-of-<world>.safetensors     named tensors or pieces of
                           them (files/saved_tensors.py), any rank may hold any
                           optimizer-<rank>-of-<world>.safetensors
                           rng-<rank>-of-<world>.safetensors         the random state of that rank
                           alone
                           average-<rank>-of-<world>.safetensors     of the weights (train.ema)
                           state.json  manifest.json                 the manifest (sizes, sha256) is
                                       written last

A save lives in ".step-<n>.tmp" until its manifest is on the disk. A folder on its way out is
renamed to ".step-<n>.gone" first, and one that is being replaced waits as ".step-<n>.old". Nothing
is ever unpickled.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from trainer.errors import CheckpointError, LatheError, StorageError
from trainer.files.atomic import FULL, refusals, size_of, sync
from trainer.files.safetensors_file import (
    WrittenFile,
    bytes_needed,
    checksum_problem,
    tensors_of,
    write_json,
    write_tensors,
)
from trainer.files.saved_tensors import SavedTensors
from trainer.runtime import distributed
from trainer.switches import CPU_KERNELS_VERSION, uses_cpu_kernels

MANIFEST, STATE = "manifest.json", "state.json"
VERSION = 2  # the version of the layout above
READABLE = (1, 2)  # version 1 has whole tensors only
JSON_ROOM = 2**20  # bytes for state.json, manifest.json and the folder itself
DAMAGED = "%s is damaged and passed over: %s"

T = TypeVar("T")
log = logging.getLogger(__name__)


class SavedState(Protocol):
    """A state to resume from: a checkpoint, or copies in memory (survival/mirror.py)."""

    @property
    def world(self) -> int:
        """How many ranks saved it."""
        ...

    def state(self) -> dict[str, Any]:
        """The content of state.json: at least "progress" and "engine"."""
        ...

    def random_state(self, rank: int) -> dict[str, Tensor]:
        """The random state of one rank."""
        ...

    def weights(self, shapes: Mapping[str, torch.Size]) -> Mapping[str, Tensor]:
        """Full trainable weights by name, for a model with these shapes."""
        ...

    def optimizer(self, shapes: Mapping[str, torch.Size]) -> Mapping[str, Tensor]:
        """Full optimizer tensors by name."""
        ...

    def average(self, shapes: Mapping[str, torch.Size]) -> Mapping[str, Tensor]:
        """Full averages of the weights by name, of a run with train.ema."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk as a SavedState. It knows the shapes itself."""

    folder: Path

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def world(self) -> int:
        return saved_world(self.folder)

    def state(self) -> dict[str, Any]:
        return read_state(self.folder)

    def random_state(self, rank: int) -> dict[str, Tensor]:
        return read_rng(self.folder, rank)

    def weights(self, shapes: Mapping[str, torch.Size]) -> Mapping[str, Tensor]:
        return read_tensors(self.folder, "weights")

    def optimizer(self, shapes: Mapping[str, torch.Size]) -> Mapping[str, Tensor]:
        return read_tensors(self.folder, "optimizer")

    def average(self, shapes: Mapping[str, torch.Size]) -> Mapping[str, Tensor]:
        return read_tensors(self.folder, "average")


# ---------------------------------------------------------------- writing


def save(
    root: Path,
    step: int,
    *,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    rng: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep_last: int,
    keep: Collection[int] = (),
    average: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write and commit step-<step> under `root`, then prune; returns its folder. A collective:
    every rank calls it.

    Each rank passes the tensors that it holds, and its own random state; `state` is rank 0's.
    Whatever fails on any rank, all ranks raise the same error (StorageError for the disk), nothing
    half-written stays visible and earlier checkpoints are untouched.
    """
    start = time.monotonic()
    temporary = _temporary(root, step)
    shards = {"weights": weights, "optimizer": optimizer, "rng": rng}
    if average is not None:
        shards["average"] = average
    try:
        needed = sum(_everywhere(step, lambda: bytes_needed(*shards.values())))
        _everywhere(step, lambda: _prepare(root, step, needed) if distributed.is_main() else None)
        written = _everywhere(step, lambda: _write_shards(temporary, shards))
        records = [WrittenFile(**record) for own in written for record in own]
        _everywhere(
            step, lambda: _conclude(root, step, state, records) if distributed.is_main() else None
        )
    except LatheError:
        if distributed.is_main():
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if distributed.is_main():
        log.info("saved step-%d: %s in %.1f s", step, size_of(needed), time.monotonic() - start)
        tidy(root, step, keep_last, keep)
    distributed.barrier()
    return _visible(root, step)


def _everywhere(step: int, action: Callable[[], T]) -> list[T]:
    """The results of `action` on every rank, by rank.

    When it fails anywhere, every rank raises the first failure.
    """
    cause: Exception | None = None
    try:
        outcome: dict[str, Any] = {"result": action()}
    except Exception as error:
        # any error: if one rank left alone, the others would hang in their next collective
        cause = error
        text = str(error) if isinstance(error, LatheError) else f"{type(error).__name__}: {error}"
        outcome = {"error": text, "is_storage": isinstance(error, (StorageError, OSError))}
    outcomes = distributed.gather(outcome)
    for rank, other in enumerate(outcomes):
        if "error" in other:
            kind = StorageError if other["is_storage"] else CheckpointError
            failure = kind(f"step-{step} was not saved. Rank {rank}: {other['error']}")
            failure.is_of_all_ranks = True
            raise failure from cause
    return [other["result"] for other in outcomes]


def _prepare(root: Path, step: int, needed: int) -> None:
    begin(root, step)
    free = shutil.disk_usage(root).free
    if free < needed + JSON_ROOM:
        raise StorageError(
            f"{root}: {size_of(free)} free, the checkpoint needs {size_of(needed + JSON_ROOM)}. "
            f"{FULL}"
        )


def _write_shards(
    temporary: Path, shards: Mapping[str, Mapping[str, Tensor]]
) -> list[dict[str, Any]]:
    with refusals(temporary):
        # on a network disk this makes rank 0's folder visible here
        temporary.mkdir(parents=True, exist_ok=True)
    own = f"{distributed.rank()}-of-{distributed.world()}.safetensors"
    return [
        asdict(write_tensors(temporary, f"{prefix}-{own}", tensors))
        for prefix, tensors in shards.items()
    ]


def _conclude(root: Path, step: int, state: Mapping[str, Any], records: list[WrittenFile]) -> None:
    temporary = _temporary(root, step)
    commit(temporary, root, step, [*records, write_json(temporary, STATE, state)])


def tidy(root: Path, step: int, keep_last: int, keep: Collection[int]) -> None:
    """Prune after a save. If pruning fails, the save is safe all the same. Rank 0 only.

    At the end of a run it also removes what a killed process was removing.
    """
    try:
        with refusals(root):
            clear(root)
        prune(root, keep_last=keep_last, keep=set(keep), written=step)
    except StorageError as error:  # the new checkpoint is safe, only room is lost
        log.warning("old checkpoints stay: %s", error)


def begin(root: Path, step: int) -> Path:
    """Remove the remains of killed saves, and make the temporary folder of a new one.

    Rank 0 alone calls it.
    """
    with refusals(root):
        root.mkdir(parents=True, exist_ok=True)
        clear(root)
        temporary = _temporary(root, step)
        temporary.mkdir()
    return temporary


def clear(root: Path) -> None:
    """Remove what killed saves and removals left under `root`. No other process may write there.

    A checkpoint that was set aside for a replacement, which never came, is put back. Raises
    OSError.
    """
    for leftover in root.glob(".step-*"):
        visible = root / leftover.stem[1:]
        if leftover.suffix == ".old" and not visible.exists():
            log.warning("%s: a replacement died half-way; the earlier one is back", visible)
            os.replace(leftover, visible)
        else:
            shutil.rmtree(leftover)


def commit(temporary: Path, root: Path, step: int, records: Sequence[WrittenFile]) -> Path:
    """Rename a written temporary folder to step-<step>, and return it. Before the rename no reader
    sees it.

    A step-<step> that is already there is replaced. Raises StorageError when a file is not there in
    full.
    """
    target = _visible(root, step)
    with refusals(target):
        for record in records:
            path = temporary / record.name
            size = path.stat().st_size if path.is_file() else None
            if size != record.size:
                raise StorageError(
                    f"{path}: got {size} bytes, want {record.size}. Do all machines see the same "
                    "folder?"
                )
        files = [asdict(record) for record in sorted(records, key=lambda record: record.name)]
        write_json(temporary, MANIFEST, {"version": VERSION, "step": step, "files": files})
        sync(temporary)
        aside = root / f".step-{step}.old"
        if target.exists():
            os.replace(target, aside)
        os.replace(temporary, target)
        sync(root)
        if aside.exists():
            _remove(aside)
    return target


# ---------------------------------------------------------------- finding and keeping


def problems(folder: Path, *, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with a checkpoint, one line per file: missing, extra, size, checksum. [] if it
    is good.

    part: which of `parts` processes this is. They divide the checksums among them; each checks all
    names and sizes.
    """
    records, wrong = _contents(folder)
    suspects = [
        record
        for record in records[part::parts]
        if not any(line.startswith(f"{record.name}:") for line in wrong)
    ]
    # sha256 releases the interpreter lock
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return wrong + [
            line
            for line in pool.map(lambda record: checksum_problem(folder, record), suspects)
            if line
        ]


def newest_good(root: Path) -> Path | None:
    """The newest checkpoint under `root` without problems; None if there is none.

    A warning names each damaged newer one.
    """
    for _, folder in reversed(candidates(root)):
        wrong = problems(folder)
        if not wrong:
            return folder
        log.warning(DAMAGED, folder, "; ".join(wrong))
    return None


def resume_point(root: Path) -> Path | None:
    """The newest good checkpoint that rank 0 sees. Every rank checks a share. A collective."""
    names = (
        [folder.name for _, folder in reversed(candidates(root))] if distributed.is_main() else 0
    )
    for name in distributed.broadcast(names):
        own = problems(root / name, part=distributed.rank(), parts=distributed.world())
        wrong = [line for lines in distributed.gather(own) for line in lines]
        if not wrong:
            return root / name
        if distributed.is_main():
            log.warning(DAMAGED, root / name, "; ".join(dict.fromkeys(wrong)))
    return None


def prune(
    root: Path, *, keep_last: int, keep: Collection[int] = (), written: int | None = None
) -> list[int]:
    """Remove old checkpoints, and damaged ones; returns the steps removed. Rank 0 alone calls it.

    The newest `keep_last`, the steps in `keep` and the last good one always stay; without a good
    one nothing is removed. written: a step that this process has just committed, so that it need
    not be checked.
    """
    last = _step_of(newest_good(root)) if written is None else written
    if last is None:
        return []
    present = candidates(root)
    whole = [step for step, folder in present if not _contents(folder)[1]]
    recent = [step for step in whole if step <= last][-keep_last:] if keep_last > 0 else []
    survivors = {*recent, *keep, last, *(step for step in whole if step > last)}
    removed = [(step, folder) for step, folder in present if step not in survivors]
    for _, folder in removed:
        with refusals(folder):
            _remove(folder)
    return [step for step, _ in removed]


def _contents(folder: Path) -> tuple[list[WrittenFile], list[str]]:
    """The records of the manifest, and the names and sizes in the folder that contradict them.

    Reads no file but the manifest.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        records = [WrittenFile(**record) for record in manifest["files"]]
        version, step = manifest["version"], manifest["step"]
    except FileNotFoundError:
        return [], [f"{MANIFEST}: missing"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [], [f"{MANIFEST}: not readable ({error})"]
    wrong = [] if version in READABLE else [f"{MANIFEST}: version {version}, want {VERSION}"]
    if step != _step_of(folder):
        wrong.append(f"{MANIFEST}: of step {step}, but the folder is {folder.name}")
    for record in records:
        path = folder / record.name
        if not path.is_file():
            wrong.append(f"{record.name}: missing")
        elif (size := path.stat().st_size) != record.size:
            wrong.append(f"{record.name}: size {size}, want {record.size}")
    names = {MANIFEST, *(record.name for record in records)}
    extra = sorted(path.name for path in folder.iterdir() if path.name not in names)
    return records, wrong + [
        f"{name}: extra, not in {MANIFEST}" for name in extra if not name.startswith(".nfs")
    ]


def candidates(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, oldest first. A checkpoint that was set aside counts if
    its replacement never came.
    """
    folders = {
        int(path.name[5:]): path
        for path in root.glob("step-*")
        if re.fullmatch(r"step-\d+", path.name)
    }
    for path in root.glob(".step-*.old"):
        step = _step_of(path)
        if step is not None:
            folders.setdefault(step, path)
    return sorted(folders.items())


def _step_of(folder: Path | None) -> int | None:
    match = re.fullmatch(r"\.?step-(\d+)(\.old)?", folder.name) if folder else None
    return int(match[1]) if match else None


def _visible(root: Path, step: int) -> Path:
    return root / f"step-{step}"


def _temporary(root: Path, step: int) -> Path:
    return root / f".step-{step}.tmp"


def _remove(folder: Path) -> None:
    """Rename a folder, then delete it.

    So a process that is killed meanwhile leaves no incomplete checkpoint.
    """
    if not folder.is_dir():
        folder.unlink()
        return
    gone = folder.with_name(f".step-{_step_of(folder)}.gone")
    os.replace(folder, gone)
    shutil.rmtree(gone)


# ---------------------------------------------------------------- reading

# In older checkpoints of retrievers with adapters, names contain peft's wrapper of the base, which
# no longer exists.
_WRAPPED = ".base_model.model."


def read_tensors(folder: Path, prefix: str) -> SavedTensors:
    """The tensors of `prefix` ("weights", "optimizer") by name, from the files of all ranks, for
    any world size. A tensor, or a part of one, is read only when it is used.

    Raises CheckpointError when a shard is missing or two hold the same elements.
    """
    return SavedTensors(_shards(folder, prefix), lambda name: name.replace(_WRAPPED, "."))


def read_rng(folder: Path, rank: int) -> dict[str, Tensor]:
    """The random state that `rank` saved.

    Only a run with the same number of ranks (`saved_world`) can use it.
    """
    shards = _shards(folder, "rng")
    if rank >= len(shards):
        raise CheckpointError(
            f"{folder}: {len(shards)} rank(s) saved a random state, there is none of rank {rank}."
        )
    return {name: tensor.clone() for name, tensor in tensors_of(shards[rank])}


def saved_world(folder: Path) -> int:
    """How many ranks wrote this checkpoint."""
    return len(_shards(folder, "rng"))


def read_state(folder: Path) -> dict[str, Any]:
    """The state.json of a checkpoint; CheckpointError when it is missing or not JSON."""
    try:
        return json.loads((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / STATE}: {error}. Use another checkpoint.") from error


def _shards(folder: Path, prefix: str) -> list[Path]:
    """The files of `prefix`, by rank; complete, and all of one world."""
    pattern = re.compile(rf"{re.escape(prefix)}-(\d+)-of-(\d+)\.safetensors")
    shards = {
        (int(match[1]), int(match[2])): path
        for path in folder.glob("*")
        if (match := pattern.fullmatch(path.name))
    }
    worlds = {world for _, world in shards}
    ranks = sorted(rank for rank, _ in shards)
    if len(worlds) != 1 or ranks != list(range(*worlds)):
        got = ", ".join(path.name for path in shards.values()) or "none"
        raise CheckpointError(
            f"{folder}: got {prefix} shards {got}; want one of every rank. Use another checkpoint."
        )
    return [shards[key] for key in sorted(shards)]


def made_with() -> dict[str, str]:
    """The versions and the device, on which the bits of a step depend besides the dictionary."""
    versions = {name: version(name) for name in ("torch", "deepspeed", "transformers")}
    if torch.cuda.is_available():
        return {**versions, "device": torch.cuda.get_device_name()}
    kernels = {"cpu_kernels": str(CPU_KERNELS_VERSION)} if uses_cpu_kernels(os.environ) else {}
    return {**versions, "device": "cpu", "threads": str(torch.get_num_threads()), **kernels}


def made_otherwise(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two answers of `made_with`, in words; [] where `then` is not known."""
    return [
        f"{key} was {then.get(key, 'not noted')}, is {now.get(key, 'not noted')}"
        for key in {**now, **then}
        if then and then.get(key) != now.get(key)
    ]
