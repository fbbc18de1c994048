"""Weights of words in a folder (trainer/retrieval/embeddings.py).

plan.json        form "sparse"
vectors-<n>.npz  (rows, V) the texts of a shard as a CSR matrix: shape, indptr, indices and data in
                 float16 or float32, under the names that scipy.sparse.save_npz gives them
meta.json        besides how many weights are stored

scipy.sparse.load_npz reads files of float32. Matrices of scipy hold no float16 (1.17), so that
numpy alone reads those.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import nn

from trainer.data.shard_folder import Values
from trainer.files import packages
from trainer.files.safetensors_file import Block
from trainer.protocol.task import Row
from trainer.retrieval import embeddings

if TYPE_CHECKING:
    from trainer.protocol.abilities import EmbedsWords, Side

DTYPES = ("float16", "float32")
_PARTS = ("data", "indices", "indptr")  # of a CSR matrix

# N texts -> their (N, V) float32 weights, a CSR matrix of scipy
WordEncoder = Callable[[Sequence[Row]], Any]


def scipy_sparse() -> Any:
    """The package scipy.sparse; ConfigError when scipy is not installed."""
    packages.require("scipy", "sparse")
    import scipy.sparse

    return scipy.sparse


@dataclass(frozen=True)
class WordPlan(embeddings.EmbeddingsPlan):
    """What a folder of weights of words is to hold."""

    form: Literal["sparse"] = "sparse"


@dataclass(frozen=True)
class _File:
    """A matrix of float32 numbers, and the dtype that they have in their file."""

    matrix: Any
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape


@dataclass(frozen=True)
class WordWeights(embeddings.StoredVectors):
    """A finished folder of weights of words."""

    plan: WordPlan
    stored: int  # weights above 0, of all texts

    @property
    def words(self) -> float:
        """The mean number of words of a text."""
        return self.stored / max(1, self.plan.count)

    @property
    def told(self) -> list[str]:
        """What `encode` says of the folder."""
        return [
            f"{self.plan.count} texts, {self.words:.1f} of {self.dim} words each on average, "
            f"{len(self.shards)} shard(s)"
        ]

    def matrices(self) -> Iterator[Any]:
        """The (rows, V) float32 CSR matrix of each shard, one in memory at a time; DataError when a
        file is not what meta.json says.
        """
        dtype = np.dtype(self.plan.dtype)
        for number in range(len(self.shards)):
            shape = (len(self.plan.rows(number)), self.dim)
            yield self.opened(number, _read, shape=shape, dtype=dtype).matrix


def _read(path: Path) -> _File:
    with np.load(path, allow_pickle=False) as file:
        data, *places = (file[name] for name in _PARTS)
        of_matrix = (data.astype(np.float32), *places)
        return _File(scipy_sparse().csr_matrix(of_matrix, shape=tuple(file["shape"])), data.dtype)


def encoder_of(
    task: EmbedsWords,
    model: nn.Module,
    *,
    side: Side,
    batch: int,
    precision: embeddings.Precision = "fp32",
) -> WordEncoder:
    """A function from N rows to their weights on the CPU, by embeddings.in_batches."""
    how: Any = {"side": side, "batch": batch, "precision": precision}
    sparse = scipy_sparse()

    def embed(ids: list[list[int]]) -> Any:
        return sparse.csr_matrix(task.embed_words(model, ids, side=side).float().cpu().numpy())

    def encode(rows: Sequence[Row]) -> Any:
        order, parts = embeddings.in_batches(embed, task, model, rows, **how)
        return sparse.vstack(parts, format="csr")[np.argsort(order)]

    return encode


def _blocks(matrix: Any, plan: WordPlan, shard: int) -> tuple[list[Block], Values]:
    exact = embeddings.as_stored(matrix.data[:, None], plan.dtype, shard)[:, 0]
    # what float16 rounds to 0 is no word of a text
    kept = matrix.copy()
    kept.data = (exact != 0).astype(np.float32)
    kept.eliminate_zeros()
    parts = (exact[exact != 0], kept.indices, kept.indptr)
    file = io.BytesIO()
    named: Any = dict(zip(_PARTS, parts, strict=True))
    np.savez(file, format=b"csr", shape=matrix.shape, **named)
    return [file.getvalue()], {"dim": matrix.shape[1], "stored": len(parts[0])}


def _stored(folder: Path, plan: WordPlan, records: list[Values]) -> Values:
    return {"stored": sum(record["stored"] for record in records)}


_STORE = embeddings.Store("weights of words", ".npz", WordPlan, WordWeights, _blocks, _stored)
read, write, shard_rows = _STORE.read, _STORE.write, embeddings.shard_rows
