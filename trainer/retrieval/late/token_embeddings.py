"""Vectors of tokens in a folder (trainer/retrieval/embeddings.py), read through memory maps.

plan.json        form "late", and besides how vectors were pooled and scores are compared
offsets.npy      (rows + 1,) int64: where the vectors of each text begin, and where the last ends
vectors-<n>.npy  (K, E) float16 or float32, of the texts of a shard one after the other
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import nn

from trainer.data.shard_folder import Values
from trainer.files.atomic import replace_file, sha256_of
from trainer.files.safetensors_file import Block
from trainer.protocol.task import Row
from trainer.retrieval import embeddings
from trainer.retrieval.late.pooling import pooled

if TYPE_CHECKING:
    from trainer.protocol.abilities import EmbedsTokens, Side

DTYPES = ("float16", "float32")
_OFFSETS = "offsets.npy"

# N texts -> (K, E) float32 vectors of one text after the other, and (N,) how many each text has
TokenEncoder = Callable[[Sequence[Row]], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class TokenPlan(embeddings.EmbeddingsPlan):
    """What a folder of vectors of tokens is to hold."""

    mean: bool  # whether scores are divided by the number of the query's vectors
    pool_factor: float  # pooling.pooled; 1: the vectors are the model's
    form: Literal["late"] = "late"


@dataclass(frozen=True)
class TokenEmbeddings(embeddings.StoredVectors):
    """A finished folder of vectors of tokens."""

    plan: TokenPlan
    offsets_sha256: str

    @cached_property
    def offsets(self) -> np.ndarray:
        """(rows + 1,) where the vectors of each text begin; DataError when the file is not the one
        that was written.
        """
        content = self.content_of(_OFFSETS, self.offsets_sha256)
        return np.load(io.BytesIO(content), allow_pickle=False)

    @cached_property
    def vectors(self) -> list[np.ndarray]:
        """(K, E) of every shard as they are stored, memory-mapped; DataError when a file is not
        what meta.json says.
        """
        counts = [int(self.lengths(number).sum()) for number in range(len(self.shards))]
        dtype = np.dtype(self.plan.dtype)
        return [self.mapped(number, (rows, self.dim), dtype) for number, rows in enumerate(counts)]

    def lengths(self, shard: int) -> np.ndarray:
        """(N,) how many vectors each text of a shard has."""
        rows = self.plan.rows(shard)
        return np.diff(self.offsets[rows.start : rows.stop + 1])

    @property
    def told(self) -> list[str]:
        """What `encode` says of the folder."""
        return [
            f"{self.plan.count} texts, {self.offsets[-1]} vectors of {self.dim} numbers, "
            f"{len(self.shards)} shard(s)"
        ]


def encoder_of(
    task: EmbedsTokens,
    model: nn.Module,
    *,
    side: Side,
    batch: int,
    precision: embeddings.Precision = "fp32",
    pool_factor: float = 1.0,
) -> TokenEncoder:
    """A function from N rows to their vectors on the CPU, by embeddings.in_batches. pool_factor:
    pooling.pooled.
    """
    how: Any = {"side": side, "batch": batch, "precision": precision}

    def embed(ids: list[list[int]]) -> list[np.ndarray]:
        found = task.token_vectors(model, ids, side=side)
        cuts = np.cumsum(found.lengths.cpu().numpy())[:-1]
        texts = np.split(found.vectors.float().cpu().numpy(), cuts)
        return [pooled(own, pool_factor) for own in texts]

    def encode(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
        order, parts = embeddings.in_batches(embed, task, model, rows, **how)
        texts = [own for part in parts for own in part]
        of_rows = [texts[place] for place in np.argsort(order)]
        return np.concatenate(of_rows), np.array([len(own) for own in of_rows])

    return encode


def _blocks(
    found: tuple[np.ndarray, np.ndarray], plan: TokenPlan, shard: int
) -> tuple[list[Block], Values]:
    array = embeddings.as_stored(found[0], plan.dtype, shard)
    return embeddings.npy_blocks(array), {"lengths": found[1].tolist(), "dim": array.shape[1]}


def _write_offsets(folder: Path, plan: TokenPlan, records: list[Values]) -> Values:
    lengths = [length for record in records for length in record["lengths"]]
    written = io.BytesIO()
    np.save(written, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    replace_file(folder / _OFFSETS, written.getvalue())
    return {"offsets_sha256": sha256_of(folder / _OFFSETS)}


_STORE = embeddings.Store(
    "vectors of tokens", ".npy", TokenPlan, TokenEmbeddings, _blocks, _write_offsets
)
read, write = _STORE.read, _STORE.write
# what a kill costs a rank at most; 180 MiB of 180 vectors of 128 fp16 numbers each
shard_rows = partial(embeddings.shard_rows, most=4096)
