"""Vectors in a folder of shards (trainer/data/shard_folder.py), read through memory maps.

plan.json        model, side, dtype, rows, rows per shard
ids.txt          one id a line, in the order of the vectors; written before meta.json
vectors-<n>.npy  (rows, D) float16 or float32, or (rows,) records of int8 or binary
                 (trainer/retrieval/stored_forms.py); every shard but the last has the plan's rows
meta.json        the plan with D, every shard's record, and the recall of int8 or binary
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from trainer.data.shard_folder import META, PLAN, ShardFolder, Values
from trainer.errors import ConfigError, DataError, DivergedError, LatheError
from trainer.files.atomic import refusals, replace_file, sha256_of
from trainer.files.safetensors_file import WrittenFile, checksum_problem
from trainer.protocol.task import Row
from trainer.retrieval import stored_forms

if TYPE_CHECKING:
    from trainer.protocol.abilities import Embeds, Side

logger = logging.getLogger(__name__)

MAX_SHARD_ROWS = 65_536  # what a kill costs a rank at most; 96 MiB of 768 fp16 numbers each
_IDS = "ids.txt"

Encoder = Callable[[Sequence[Row]], Tensor]  # N texts -> (N, D) on any device


class ShardPlan(Protocol):
    """Which rows each shard of a folder holds."""

    @property
    def shard_rows(self) -> int: ...

    def rows(self, shard: int) -> range: ...


@dataclass(frozen=True)
class EmbeddingsPlan:
    """What an embedding folder is to hold; a folder that was begun with another plan is not
    continued.
    """

    model: str  # names the weights that made the vectors, see `fingerprint`
    texts: str  # digest of ids and texts
    side: Side
    dtype: stored_forms.Form
    count: int  # vectors
    shard_rows: int

    @property
    def num_shards(self) -> int:
        return -(-self.count // self.shard_rows)

    def rows(self, shard: int) -> range:
        """The vectors of one shard."""
        return range(self.count)[shard * self.shard_rows : (shard + 1) * self.shard_rows]


@dataclass(frozen=True)
class StoredVectors:
    """A finished folder of any form. Vectors stay on the disk until they are read."""

    folder: Path
    plan: Any
    dim: int
    shards: list[WrittenFile]

    @cached_property
    def ids(self) -> list[str]:
        """The id of every text."""
        with refusals(self.folder / _IDS):
            ids = (self.folder / _IDS).read_text(encoding="utf-8").split("\n")[:-1]
        if len(ids) != self.plan.count:
            raise DataError(
                f"{self.folder / _IDS} has {len(ids)} ids for {self.plan.count} vectors. Encode "
                "anew."
            )
        return ids


@dataclass(frozen=True)
class Embeddings(StoredVectors):
    """A finished folder of one vector for each text."""

    plan: EmbeddingsPlan
    recall: dict[str, float]  # of int8 or binary by depth (stored_forms.recalls); else empty

    @cached_property
    def vectors(self) -> list[np.ndarray]:
        """The vectors of every shard as they are stored, memory-mapped (stored_forms.floats makes
        them numbers); DataError when a file is not what meta.json says.
        """
        return [self._map(number, record) for number, record in enumerate(self.shards)]

    @cached_property
    def digest(self) -> str:
        """Names these vectors: of what plan.json says and of every shard's content."""
        content = [asdict(self.plan), [record.sha256 for record in self.shards]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def told(self) -> list[str]:
        """What `encode` says of the folder: how many vectors, and what their small form loses."""
        written = f"{self.plan.count} vectors of {self.dim} numbers, {len(self.shards)} shard(s)"
        return [written] + [
            f"recall@{depth} {recall:.3f} of the exact vectors' nearest, with passages as questions"
            for depth, recall in self.recall.items()
        ]

    def _map(self, number: int, record: WrittenFile) -> np.ndarray:
        path, rows = self.folder / record.name, len(self.plan.rows(number))
        dtype = stored_forms.file_dtype(self.plan.dtype, self.dim)
        shape = (rows,) if dtype.names else (rows, self.dim)
        try:
            vectors = np.load(
                path, mmap_mode="c", allow_pickle=False
            )  # torch takes no read-only memory
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"{path} cannot be read ({error}). Delete {path.parent} and encode anew."
            ) from error
        if vectors.shape != shape or vectors.dtype != dtype:
            raise DataError(
                f"{path} holds {vectors.shape} {vectors.dtype}, want {shape} {self.plan.dtype}. "
                "Encode anew."
            )
        return vectors


def read(folder: Path) -> Embeddings:
    """A finished folder; ConfigError when there is none, or it is not finished."""
    shards = _shards(folder)
    if not shards.is_finished:
        state = (
            "is not finished: run the same encode command again"
            if shards.is_begun
            else "is not there"
        )
        raise ConfigError(f"{folder}: {META} is missing. This folder of vectors {state}.")

    def convert(meta: Values) -> Embeddings:
        records = [WrittenFile(**record) for record in meta.pop("shards")]
        dim, recall = meta.pop("dim"), meta.pop("recall", {})
        return Embeddings(folder, EmbeddingsPlan(**meta), dim, records, recall)

    return shards.read(META, convert)


def form_of(folder: Path) -> str:
    """Which form of retriever made a folder of vectors: what its plan says, else "bi". DataError
    when the plan cannot be read.
    """
    shards = _shards(folder)
    if not shards.is_begun:
        return "bi"  # read() says what is missing
    return shards.read(PLAN, lambda plan: str(plan.get("form", "bi")))


def verify(embeddings: StoredVectors) -> None:
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


def refuse_ids_twice(corpora: Sequence[StoredVectors]) -> None:
    """DataError for an id of two vectors: a ranking would name one passage twice."""
    names = [name for corpus in corpora for name in corpus.ids]
    # hashes take 8 bytes of an id, a set of millions of texts ten times as much
    hashes, counts = np.unique(np.fromiter(map(hash, names), np.int64), return_counts=True)
    if not (counts > 1).any():
        return
    candidates, places = {*hashes[counts > 1].tolist()}, dict[str, Path]()
    for corpus in corpora:
        for name in corpus.ids:
            if hash(name) not in candidates:
                continue
            if name in places:
                raise DataError(
                    f"two vectors have the id {name!r}: in {places[name] / _IDS} and in "
                    f"{corpus.folder / _IDS}. Give every passage an id of its own, and encode anew "
                    "what has changed."
                )
            places[name] = corpus.folder


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

    A collective, in which each rank reads the rows for itself and writes some of the shards. A
    folder that was begun is continued with the shards it was begun with. ConfigError when it was
    begun with another model, other texts, another side or dtype.
    """
    shards = _shards(folder)
    plan = EmbeddingsPlan(**shards.begin(asdict(plan), choice="shard_rows"))
    if not shards.is_finished:
        own = set(shards.own_missing(plan.num_shards))
        for number, of_shard in of_shards(rows(), plan, own):
            _write_shard(shards, number, encoder(of_shard), plan)
        shards.finish(plan.num_shards, lambda records: _facts(folder, rows(), plan, records))
    return read(folder)


def shard_rows(count: int, world: int) -> int:
    """Rows of a shard so that every rank has some, and a kill costs little."""
    return max(1, min(MAX_SHARD_ROWS, -(-count // world)))


def _shards(folder: Path) -> ShardFolder:
    return ShardFolder(folder, "vectors", ".npy", "encode", refusal=ConfigError)


def of_shards(
    rows: Iterable[Row], plan: ShardPlan, shards: set[int]
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


def _write_shard(shards: ShardFolder, number: int, vectors: Tensor, plan: EmbeddingsPlan) -> None:
    exact = vectors.detach().float().cpu().numpy()
    if not np.isfinite(exact).all():
        raise DivergedError(
            f"shard {number}: a vector holds NaN or infinity. Use another model, or fp32."
        )
    array = stored_forms.store(exact, plan.dtype)
    if not array.dtype.names and not np.isfinite(array).all():
        raise ConfigError(
            f"--dtype float16: a vector reaches {np.abs(exact).max():.3g}, float16 65504. Use "
            "float32."
        )
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    blocks = [header.getvalue(), array.reshape(-1).view(np.uint8).data]
    facts: Values = {"rows": len(array), "dim": exact.shape[1]}
    if plan.dtype in stored_forms.SMALL:
        facts["recall"] = stored_forms.recalls(exact, array)
    shards.write_shard(number, blocks, **facts)
    logger.info(
        "%s: shard %d of %d, %d vectors", shards.path, number + 1, plan.num_shards, len(array)
    )


def write_ids(folder: Path, rows: Iterable[Row]) -> None:
    """Write the ids of a folder's texts, in their order."""
    replace_file(folder / _IDS, "".join(f"{row['id']}\n" for row in rows).encode())


def _facts(
    folder: Path, rows: Iterable[Row], plan: EmbeddingsPlan, records: list[Values]
) -> Values:
    """What meta.json says besides the shards; ids.txt is written first."""
    dims = {record["dim"] for record in records}
    if len(dims) != 1:
        raise LatheError(
            f"{folder}: shards hold vectors of {sorted(dims)} numbers. Delete it and encode anew."
        )
    write_ids(folder, rows)
    facts: Values = {**asdict(plan), "dim": dims.pop()}
    if plan.dtype in stored_forms.SMALL:
        facts["recall"] = stored_forms.mean_recalls(
            [record["recall"] for record in records], [record["rows"] for record in records]
        )
    return facts
