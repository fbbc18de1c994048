"""Vectors of tokens in a folder of shards (trainer/data/shard_folder.py), read through memory maps.

plan.json        form "late", model, side, dtype, rows, rows per shard, how they are compared
ids.txt          one id a line, in the order of the texts; written before meta.json
offsets.npy      (rows + 1,) int64: where the vectors of each text begin, and where the last ends
vectors-<n>.npy  (K, E) float16 or float32, of the texts of a shard one after the other
meta.json        the plan with E, and every shard's record
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import nn

from trainer.data.shard_folder import META, ShardFolder, Values
from trainer.errors import ConfigError, DataError, DivergedError, LatheError
from trainer.files.atomic import refusals, replace_file, sha256_of
from trainer.files.safetensors_file import WrittenFile
from trainer.protocol.task import Row
from trainer.retrieval import embeddings
from trainer.retrieval.late.pooling import pooled

if TYPE_CHECKING:
    from trainer.protocol.abilities import EmbedsTokens, Side

logger = logging.getLogger(__name__)

MAX_SHARD_ROWS = 4096  # what a kill costs a rank at most; 180 MiB of 180 vectors of 128 fp16 each
DTYPES = ("float16", "float32")
_OFFSETS = "offsets.npy"

# N texts -> (K, E) float32 vectors of one text after the other, and (N,) how many each text has
TokenEncoder = Callable[[Sequence[Row]], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class TokenPlan:
    """What a folder is to hold; one that was begun with another plan is not continued."""

    model: str  # names the weights that made the vectors, see embeddings.fingerprint
    texts: str  # digest of ids and texts
    side: Side
    dtype: Literal["float16", "float32"]
    count: int  # texts
    shard_rows: int
    mean: bool  # whether scores are divided by the number of the query's vectors
    pool_factor: float  # pooling.pooled; 1: the vectors are the model's
    form: Literal["late"] = "late"

    @property
    def num_shards(self) -> int:
        return -(-self.count // self.shard_rows)

    def rows(self, shard: int) -> range:
        """The texts of one shard."""
        return range(self.count)[shard * self.shard_rows : (shard + 1) * self.shard_rows]


@dataclass(frozen=True)
class TokenEmbeddings(embeddings.StoredVectors):
    """A finished folder of vectors of tokens."""

    plan: TokenPlan
    offsets_sha256: str

    @cached_property
    def offsets(self) -> np.ndarray:
        """(rows + 1,) where the vectors of each text begin."""
        path = self.folder / _OFFSETS
        with refusals(path):
            is_own = path.is_file() and sha256_of(path) == self.offsets_sha256
        if not is_own:
            raise DataError(f"{path} is not the file that was written. Encode anew.")
        return np.load(path, allow_pickle=False)

    @cached_property
    def vectors(self) -> list[np.ndarray]:
        """(K, E) of every shard as they are stored, memory-mapped; DataError when a file is not
        what meta.json says.
        """
        return [self._map(number, record) for number, record in enumerate(self.shards)]

    def lengths(self, shard: int) -> np.ndarray:
        """(N,) how many vectors each text of a shard has."""
        rows = self.plan.rows(shard)
        return np.diff(self.offsets[rows.start : rows.stop + 1])

    def _map(self, number: int, record: WrittenFile) -> np.ndarray:
        path = self.folder / record.name
        shape = (int(self.lengths(number).sum()), self.dim)
        try:
            vectors = np.load(path, mmap_mode="c", allow_pickle=False)
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

    @property
    def told(self) -> list[str]:
        """What `encode` says of the folder."""
        return [
            f"{self.plan.count} texts, {self.offsets[-1]} vectors of {self.dim} numbers, "
            f"{len(self.shards)} shard(s)"
        ]


def read(folder: Path) -> TokenEmbeddings:
    """A finished folder; ConfigError when there is none, or it is not finished."""
    shards = _shards(folder)
    if not shards.is_finished:
        raise ConfigError(
            f"{folder}: {META} is missing. This folder of token vectors is not finished: run the "
            "same encode command again."
        )

    def convert(meta: Values) -> TokenEmbeddings:
        records = [WrittenFile(**record) for record in meta.pop("shards")]
        dim, digest = meta.pop("dim"), meta.pop("offsets_sha256")
        return TokenEmbeddings(folder, TokenPlan(**meta), dim, records, digest)

    return shards.read(META, convert)


def encoder_of(
    task: EmbedsTokens,
    model: nn.Module,
    *,
    side: Side,
    batch: int,
    precision: Literal["fp32", "bf16"] = "fp32",
    pool_factor: float = 1.0,
) -> TokenEncoder:
    """A function from N rows to their vectors on the CPU, `batch` rows of like length at a time.

    model: in evaluation mode, on the device to be used. precision: bf16 runs it under autocast.
    pool_factor: pooling.pooled.
    """
    device = next(model.parameters()).device

    @torch.no_grad()
    def encode(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
        names = ("title", "text") if side == "passage" else ("text",)
        ids = task.ids(
            [{name: row[name] for name in names if name in row} for row in rows], side=side
        )
        order = sorted(range(len(ids)), key=lambda row: len(ids[row]), reverse=True)
        texts: list[np.ndarray] = [np.empty(0)] * len(ids)
        for start in range(0, len(order), batch):
            places = order[start : start + batch]
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                found = task.token_vectors(model, [ids[row] for row in places], side=side)
            vectors = found.vectors.float().cpu().numpy()
            cuts = np.cumsum(found.lengths.cpu().numpy())[:-1]
            for place, own in zip(places, np.split(vectors, cuts), strict=True):
                texts[place] = pooled(own, pool_factor)
        return np.concatenate(texts), np.array([len(own) for own in texts])

    return encode


# Writing
# --------------------------------------------------------------------------------------------------


def write(
    folder: Path, rows: Callable[[], Iterable[Row]], encoder: TokenEncoder, *, plan: TokenPlan
) -> TokenEmbeddings:
    """The token vectors of every row of `rows()`, which must have an "id", in `folder`; what is
    there already is kept. A collective, as embeddings.write is.
    """
    shards = _shards(folder)
    plan = TokenPlan(**shards.begin(asdict(plan), choice="shard_rows"))
    if not shards.is_finished:
        own = set(shards.own_missing(plan.num_shards))
        for number, of_shard in embeddings.of_shards(rows(), plan, own):
            _write_shard(shards, number, *encoder(of_shard), plan=plan)
        shards.finish(plan.num_shards, lambda records: _facts(folder, rows(), plan, records))
    return read(folder)


def shard_rows(count: int, world: int) -> int:
    """Texts of a shard so that every rank has some, and a kill costs little."""
    return max(1, min(MAX_SHARD_ROWS, -(-count // world)))


def _shards(folder: Path) -> ShardFolder:
    return ShardFolder(folder, "vectors", ".npy", "encode", refusal=ConfigError)


def _write_shard(
    shards: ShardFolder, number: int, vectors: np.ndarray, lengths: np.ndarray, *, plan: TokenPlan
) -> None:
    if not np.isfinite(vectors).all():
        raise DivergedError(
            f"shard {number}: a token's vector holds NaN or infinity. Use another model, or fp32."
        )
    array = vectors.astype(plan.dtype, order="C")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    blocks = [header.getvalue(), array.reshape(-1).view(np.uint8).data]
    shards.write_shard(number, blocks, lengths=lengths.tolist(), dim=array.shape[1])
    logger.info(
        "%s: shard %d of %d, %d vectors", shards.path, number + 1, plan.num_shards, len(array)
    )


def _facts(folder: Path, rows: Iterable[Row], plan: TokenPlan, records: list[Values]) -> Values:
    """What meta.json says besides the shards; ids.txt and offsets.npy are written first."""
    dims = {record["dim"] for record in records}
    if len(dims) != 1:
        raise LatheError(
            f"{folder}: shards hold token vectors of {sorted(dims)} numbers. Delete it and encode "
            "anew."
        )
    embeddings.write_ids(folder, rows)
    lengths = [length for record in records for length in record["lengths"]]
    written = io.BytesIO()
    np.save(written, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    replace_file(folder / _OFFSETS, written.getvalue())
    return {**asdict(plan), "dim": dims.pop(), "offsets_sha256": sha256_of(folder / _OFFSETS)}
