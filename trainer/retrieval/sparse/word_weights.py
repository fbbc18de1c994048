"""Weights of words in a folder of shards (trainer/data/shard_folder.py).

plan.json        form "sparse", model, side, dtype, rows, rows per shard
ids.txt          one id a line, in the order of the texts; written before meta.json
vectors-<n>.npz  (rows, V) the texts of a shard as scipy.sparse.load_npz reads them: a CSR matrix in
                 float16 or float32
meta.json        the plan with V, how many weights are stored, and every shard's record
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from trainer.data.shard_folder import META, ShardFolder, Values
from trainer.errors import ConfigError, DataError, DivergedError, LatheError
from trainer.files import packages
from trainer.files.safetensors_file import WrittenFile
from trainer.protocol.task import Row
from trainer.retrieval import embeddings

if TYPE_CHECKING:
    from trainer.protocol.abilities import EmbedsWords, Side

logger = logging.getLogger(__name__)

DTYPES = ("float16", "float32")

# N texts -> their (N, V) float32 weights, a CSR matrix of scipy
WordEncoder = Callable[[Sequence[Row]], Any]


def scipy_sparse() -> Any:
    """The package scipy.sparse; ConfigError when scipy is not installed."""
    packages.require("scipy", "sparse")
    import scipy.sparse

    return scipy.sparse


@dataclass(frozen=True)
class WordPlan:
    """What a folder is to hold; one that was begun with another plan is not continued."""

    model: str  # names the weights that made the vectors, see embeddings.fingerprint
    texts: str  # digest of ids and texts
    side: Side
    dtype: Literal["float16", "float32"]
    count: int  # texts
    shard_rows: int
    form: Literal["sparse"] = "sparse"

    @property
    def num_shards(self) -> int:
        return -(-self.count // self.shard_rows)

    def rows(self, shard: int) -> range:
        """The texts of one shard."""
        return range(self.count)[shard * self.shard_rows : (shard + 1) * self.shard_rows]


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
        sparse = scipy_sparse()
        for number, record in enumerate(self.shards):
            path = self.folder / record.name
            try:
                matrix = sparse.load_npz(path)
            except Exception as error:  # zipfile, numpy and scipy have their own
                raise DataError(
                    f"{path} cannot be read ({error}). Delete {path.parent} and encode anew."
                ) from error
            shape = (len(self.plan.rows(number)), self.dim)
            if matrix.shape != shape or matrix.dtype != np.dtype(self.plan.dtype):
                raise DataError(
                    f"{path} holds {matrix.shape} {matrix.dtype}, want {shape} {self.plan.dtype}. "
                    "Encode anew."
                )
            yield matrix.tocsr().astype(np.float32)


def read(folder: Path) -> WordWeights:
    """A finished folder; ConfigError when there is none, or it is not finished."""
    shards = _shards(folder)
    if not shards.is_finished:
        raise ConfigError(
            f"{folder}: {META} is missing. This folder of weights of words is not finished: run "
            "the same encode command again."
        )

    def convert(meta: Values) -> WordWeights:
        records = [WrittenFile(**record) for record in meta.pop("shards")]
        dim, stored = meta.pop("dim"), meta.pop("stored")
        return WordWeights(folder, WordPlan(**meta), dim, records, stored)

    return shards.read(META, convert)


def encoder_of(
    task: EmbedsWords,
    model: nn.Module,
    *,
    side: Side,
    batch: int,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> WordEncoder:
    """A function from N rows to their weights on the CPU, `batch` rows of like length at a time.

    model: in evaluation mode, on the device to be used. precision: bf16 runs it under autocast.
    """
    sparse, device = scipy_sparse(), next(model.parameters()).device

    @torch.no_grad()
    def encode(rows: Sequence[Row]) -> Any:
        names = ("title", "text") if side == "passage" else ("text",)
        ids = task.ids(
            [{name: row[name] for name in names if name in row} for row in rows], side=side
        )
        order = sorted(range(len(ids)), key=lambda row: len(ids[row]), reverse=True)
        parts: list[Any] = []
        for start in range(0, len(order), batch):
            some = [ids[row] for row in order[start : start + batch]]
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                weights_NV = task.embed_words(model, some, side=side)
            parts.append(sparse.csr_matrix(weights_NV.float().cpu().numpy()))
        return sparse.vstack(parts, format="csr")[np.argsort(order)]

    return encode


# Writing
# --------------------------------------------------------------------------------------------------


def write(
    folder: Path, rows: Callable[[], Iterable[Row]], encoder: WordEncoder, *, plan: WordPlan
) -> WordWeights:
    """The weights of every row of `rows()`, which must have an "id", in `folder`; what is there
    already is kept. A collective, as embeddings.write is.
    """
    shards = _shards(folder)
    plan = WordPlan(**shards.begin(asdict(plan), choice="shard_rows"))
    if not shards.is_finished:
        own = set(shards.own_missing(plan.num_shards))
        for number, of_shard in embeddings.of_shards(rows(), plan, own):
            _write_shard(shards, number, encoder(of_shard), plan)
        shards.finish(plan.num_shards, lambda records: _facts(folder, rows(), plan, records))
    return read(folder)


shard_rows = embeddings.shard_rows


def _shards(folder: Path) -> ShardFolder:
    return ShardFolder(folder, "vectors", ".npz", "encode", refusal=ConfigError)


def _write_shard(shards: ShardFolder, number: int, matrix: Any, plan: WordPlan) -> None:
    if not np.isfinite(matrix.data).all():
        raise DivergedError(
            f"shard {number}: the weight of a word is NaN or infinite. Use another model, or fp32."
        )
    stored = matrix.astype(plan.dtype)
    stored.eliminate_zeros()  # of what float16 rounds to 0
    file = io.BytesIO()
    scipy_sparse().save_npz(file, stored, compressed=False)
    shards.write_shard(number, [file.getvalue()], dim=stored.shape[1], stored=int(stored.nnz))
    logger.info(
        "%s: shard %d of %d, %d texts", shards.path, number + 1, plan.num_shards, stored.shape[0]
    )


def _facts(folder: Path, rows: Iterable[Row], plan: WordPlan, records: list[Values]) -> Values:
    """What meta.json says besides the shards; ids.txt is written first."""
    dims = {record["dim"] for record in records}
    if len(dims) != 1:
        raise LatheError(
            f"{folder}: shards hold weights of {sorted(dims)} words. Delete it and encode anew."
        )
    embeddings.write_ids(folder, rows)
    stored = sum(record["stored"] for record in records)
    return {**asdict(plan), "dim": dims.pop(), "stored": stored}
