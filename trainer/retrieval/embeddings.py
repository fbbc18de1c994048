"""A folder of vectors: written shard by shard over ranks, restartable, read through memory maps.

plan.json        what is being written, stated before the first vector: model, side, dtype, rows,
                 rows per shard
ids.txt          one id a line, in the order of the vectors
vectors-<n>.npy  (rows, D) float16 or float32; every shard but the last has the plan's rows
vectors-<n>.json its rows, size and SHA-256: written when the shard is whole
meta.json        the plan with D and every shard's record: written last, so a folder without it is
                 not finished
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from trainer.errors import ConfigError, DataError, DivergedError, LatheError
from trainer.files.atomic import refusals, replace_file, sha256_of, write_json
from trainer.files.safetensors_file import WrittenFile, checksum_problem
from trainer.protocol.task import Row
from trainer.runtime import distributed

if TYPE_CHECKING:
    from trainer.protocol.abilities import Embeds, Side

logger = logging.getLogger(__name__)

FORMAT = 1
MAX_SHARD_ROWS = 65_536  # what a kill costs a rank at most; 96 MiB of 768 fp16 numbers each
_IDS, _META, _PLAN = "ids.txt", "meta.json", "plan.json"

Encoder = Callable[[Sequence[Row]], Tensor]  # N texts -> (N, D) on any device


@dataclass(frozen=True)
class EmbeddingsPlan:
    """What an embedding folder is to hold; a folder that was begun with another plan is not
    continued.
    """

    model: str  # names the weights that made the vectors, see `fingerprint`
    texts: str  # digest of ids and texts
    side: Side
    dtype: Literal["float16", "float32"]
    count: int  # vectors
    shard_rows: int

    @property
    def num_shards(self) -> int:
        return -(-self.count // self.shard_rows)

    def rows(self, shard: int) -> range:
        """The vectors of one shard."""
        return range(self.count)[shard * self.shard_rows : (shard + 1) * self.shard_rows]


@dataclass(frozen=True)
class Embeddings:
    """A finished folder. Vectors stay on the disk until they are read."""

    folder: Path
    plan: EmbeddingsPlan
    dim: int
    shards: list[WrittenFile]

    @cached_property
    def ids(self) -> list[str]:
        """The id of every vector."""
        with refusals(self.folder / _IDS):
            ids = (self.folder / _IDS).read_text(encoding="utf-8").split("\n")[:-1]
        if len(ids) != self.plan.count:
            raise DataError(
                f"{self.folder / _IDS} has {len(ids)} ids for {self.plan.count} vectors. Encode "
                "anew."
            )
        return ids

    @cached_property
    def vectors(self) -> list[np.ndarray]:
        """(rows, D) of every shard, memory-mapped; DataError when a file is not what meta.json
        says.
        """
        return [self._map(number, record) for number, record in enumerate(self.shards)]

    def _map(self, number: int, record: WrittenFile) -> np.ndarray:
        path, shape = self.folder / record.name, (len(self.plan.rows(number)), self.dim)
        try:
            vectors = np.load(
                path, mmap_mode="c", allow_pickle=False
            )  # torch takes no read-only memory
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"{path} cannot be read ({error}). Delete {path.parent} and encode anew."
            ) from error
        if vectors.shape != shape or vectors.dtype != np.dtype(self.plan.dtype):
            raise DataError(
                f"{path} holds {vectors.shape} {vectors.dtype}, want {shape} {self.plan.dtype}. "
                "Encode anew."
            )
        return vectors


def read(folder: Path) -> Embeddings:
    """A finished folder; ConfigError when there is none, or it is not finished."""
    path = folder / _META
    if not path.is_file():
        state = (
            "is not finished: run the same encode command again"
            if (folder / _PLAN).is_file()
            else "is not there"
        )
        raise ConfigError(f"{folder}: {path.name} is missing. This folder of vectors {state}.")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        if meta.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        shards = [WrittenFile(**record) for record in meta.pop("shards")]
        dim = meta.pop("dim")
        return Embeddings(folder, EmbeddingsPlan(**meta), dim, shards)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} cannot be read ({error}). Delete {folder} and encode anew."
        ) from error


def verify(embeddings: Embeddings) -> None:
    """DataError when a shard's bytes are not those that were written."""
    problems = [
        problem
        for record in embeddings.shards
        if (problem := checksum_problem(embeddings.folder, record))
    ]
    if problems:
        raise DataError(
            f"{embeddings.folder}: {'; '.join(problems)}. Delete these shards' .npy and .json and "
            "encode again."
        )


def fingerprint(folder: Path, frozen: str = "") -> str:
    """A digest of an exported model: of every file in its folder, and of what it stands on
    (Task.fingerprint).
    """
    digest = hashlib.sha256(frozen.encode())
    with refusals(folder):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                digest.update(f"{path.relative_to(folder)}:{path.stat().st_size}:".encode())
                digest.update(sha256_of(path).encode())
    return digest.hexdigest()


def digest_of(rows: Iterable[Row]) -> tuple[str, int]:
    """(digest of ids and texts, number) of rows."""
    digest, count = hashlib.sha256(), 0
    for row in rows:
        digest.update(json.dumps([row["id"], row.get("title", ""), row["text"]]).encode())
        count += 1
    return digest.hexdigest(), count


def encoder_of(
    task: Embeds,
    model: nn.Module,
    *,
    side: Side,
    batch: int,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> Encoder:
    """A function from N rows to their (N, D) fp32 vectors on the CPU, `batch` rows of like length
    at a time.

    model: in evaluation mode, on the device to be used. precision: bf16 runs it under autocast.
    """
    device = next(model.parameters()).device

    @torch.no_grad()
    def encode(rows: Sequence[Row]) -> Tensor:
        names = ("title", "text") if side == "passage" else ("text",)
        ids = task.ids(
            [{name: row[name] for name in names if name in row} for row in rows], side=side
        )
        order = sorted(
            range(len(ids)), key=lambda row: len(ids[row]), reverse=True
        )  # what needs most memory first
        parts: list[Tensor] = []
        for start in range(0, len(order), batch):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                vectors = task.embed(
                    model, [ids[row] for row in order[start : start + batch]], side=side
                )
            parts.append(vectors.float().cpu())
        vectors = torch.cat(parts)
        return vectors.new_empty(vectors.shape).index_copy_(0, torch.tensor(order), vectors)

    return encode


# Writing
# --------------------------------------------------------------------------------------------------


def write(
    folder: Path, rows: Callable[[], Iterable[Row]], encoder: Encoder, *, plan: EmbeddingsPlan
) -> Embeddings:
    """Every row of `rows()`, which must have an "id", as a vector in `folder`; what is there
    already is kept.

    A collective: shard n is the work of rank n modulo the ranks, and each reads the rows for
    itself. A folder that was begun is continued, on any number of ranks, with the shards it was
    begun with. ConfigError when it was begun with another model, other texts, another side or
    dtype.
    """
    plan = _begun(folder, plan)
    if not (folder / _META).is_file():
        own_shards = range(plan.num_shards)[distributed.rank() :: distributed.world()]
        missing = {shard for shard in own_shards if _record(folder, shard) is None}
        for shard, of_shard in _of_shards(rows(), plan, missing):
            _write_shard(folder, shard, encoder(of_shard), plan)
        distributed.barrier()
        if distributed.is_main():
            _finish(folder, rows(), plan)
        distributed.barrier()
    return read(folder)


def shard_rows(count: int, world: int) -> int:
    """Rows of a shard so that every rank has some, and a kill costs little."""
    return max(1, min(MAX_SHARD_ROWS, -(-count // world)))


def _begun(folder: Path, plan: EmbeddingsPlan) -> EmbeddingsPlan:
    """The plan that the folder was begun with, which is `plan` for a new one. A collective."""
    path = folder / _PLAN
    outcome: dict[str, Any] = {}
    if distributed.is_main():
        try:
            with refusals(folder):
                folder.mkdir(parents=True, exist_ok=True)
                has_strangers = not path.is_file() and any(folder.iterdir())
            if has_strangers:
                raise ConfigError(
                    f"{folder} holds other files and no vectors of ours. Name a new folder."
                )
            if not path.is_file():
                write_json(path, asdict(plan))
            outcome = {"plan": json.loads(path.read_text(encoding="utf-8"))}
        except (LatheError, ValueError) as error:
            outcome = {"error": str(error)}
    outcome = distributed.broadcast(outcome)
    if "error" in outcome:
        raise ConfigError(outcome["error"])
    begun, expected = outcome["plan"], asdict(plan)
    differing = [
        name for name in expected if name != "shard_rows" and begun.get(name) != expected[name]
    ]
    if differing:
        differences = "; ".join(
            f"{name} was {begun.get(name)!r}, is {expected[name]!r}" for name in differing
        )
        raise ConfigError(
            f"{folder} was begun with something else ({differences}). Name a new folder, or delete "
            "this one."
        )
    return EmbeddingsPlan(**begun)


def _of_shards(
    rows: Iterable[Row], plan: EmbeddingsPlan, shards: set[int]
) -> Iterator[tuple[int, list[Row]]]:
    """(shard, its rows) of the wanted shards, one in memory at a time."""
    rows_of_shard: list[Row] = []
    for index, row in enumerate(rows):
        shard, place = divmod(index, plan.shard_rows)
        if shard not in shards:
            continue
        rows_of_shard.append(row)
        if place + 1 == len(plan.rows(shard)):
            yield shard, rows_of_shard
            rows_of_shard = []


def _write_shard(folder: Path, shard: int, vectors: Tensor, plan: EmbeddingsPlan) -> None:
    """The .npy, then its record; a shard without a record is made again."""
    exact = vectors.detach().float().cpu().numpy()
    if not np.isfinite(exact).all():
        raise DivergedError(
            f"shard {shard}: a vector holds NaN or infinity. Use another model, or fp32."
        )
    with np.errstate(over="ignore"):
        array = exact.astype(plan.dtype)
    if not np.isfinite(array).all():
        raise ConfigError(
            f"--dtype float16: a vector reaches {np.abs(exact).max():.3g}, float16 65504. Use "
            "float32."
        )
    path = folder / f"vectors-{shard:05d}.npy"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with refusals(path):
        mapped = np.lib.format.open_memmap(
            temporary, mode="w+", dtype=array.dtype, shape=array.shape
        )
        mapped[:] = array
        mapped.flush()
        del mapped
        digest = sha256_of(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    record = WrittenFile(path.name, path.stat().st_size, digest)
    write_json(
        path.with_suffix(".json"), {**asdict(record), "rows": len(array), "dim": array.shape[1]}
    )
    logger.info("%s: shard %d of %d, %d vectors", folder, shard + 1, plan.num_shards, len(array))


def _record(folder: Path, shard: int) -> dict[str, Any] | None:
    """What a finished shard's record says; None when it is not whole."""
    path = folder / f"vectors-{shard:05d}.npy"
    try:
        record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        return record if path.stat().st_size == record["size"] else None
    except (OSError, ValueError, KeyError):
        return None


def _finish(folder: Path, rows: Iterable[Row], plan: EmbeddingsPlan) -> None:
    records = [_record(folder, shard) for shard in range(plan.num_shards)]
    lost = [shard for shard, record in enumerate(records) if record is None]
    if lost:
        raise LatheError(f"{folder}: shards {lost} are not whole. Run the same command again.")
    whole = [record for record in records if record is not None]
    dims = {record["dim"] for record in whole}
    if len(dims) != 1:
        raise LatheError(
            f"{folder}: shards hold vectors of {sorted(dims)} numbers. Delete it and encode anew."
        )
    for torn in folder.glob(".*.tmp"):  # of processes that were killed
        torn.unlink(missing_ok=True)
    replace_file(folder / _IDS, "".join(f"{row['id']}\n" for row in rows).encode())
    shards = [{name: record[name] for name in ("name", "size", "sha256")} for record in whole]
    write_json(
        folder / _META, {"format": FORMAT, **asdict(plan), "dim": dims.pop(), "shards": shards}
    )
