"""Vectors in a folder of shards (trainer/data/shard_folder.py), read through memory maps.

plan.json        model, side, dtype, rows, rows per shard
ids.txt          one id a line, in the order of the vectors; written before meta.json
vectors-<n>.npy  (rows, D) float16 or float32, or (rows,) records of int8 or binary
                 (trainer/retrieval/stored_forms.py); every shard but the last has the plan's rows
meta.json        the plan with D, every shard's record, and the recall of int8 or binary

A Store says how the vectors of one form of retriever lie there: this one a vector for each text,
late/token_embeddings.py and sparse/word_weights.py the others.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from trainer.data.shard_folder import META, PLAN, ShardFolder, Values
from trainer.errors import ConfigError, DataError, DivergedError, LatheError
from trainer.files.atomic import refusals, replace_file, sha256_of
from trainer.files.safetensors_file import Block, WrittenFile, checksum_problem
from trainer.protocol.task import Row
from trainer.retrieval import stored_forms
from trainer.runtime import distributed

if TYPE_CHECKING:
    from trainer.protocol.abilities import Embeds, Side

logger = logging.getLogger(__name__)

MAX_SHARD_ROWS = 65_536  # what a kill costs a rank at most; 96 MiB of 768 fp16 numbers each
_IDS = "ids.txt"

T = TypeVar("T")
Precision = Literal["fp32", "bf16"]
Encoder = Callable[[Sequence[Row]], Tensor]  # N texts -> (N, D) on any device


@dataclass(frozen=True)
class EmbeddingsPlan:
    """What a folder of vectors is to hold; a folder that was begun with another plan is not
    continued.
    """

    model: str  # names the weights that made the vectors, see `fingerprint`
    texts: str  # digest of ids and texts
    side: Side
    dtype: stored_forms.Form
    count: int  # texts
    shard_rows: int
    precision: Precision = field(default="fp32", kw_only=True)  # of the model

    @property
    def stated(self) -> Values:
        """What plan.json says: of fp32 nothing, as earlier versions."""
        values = asdict(self)
        if self.precision == "fp32":
            del values["precision"]
        return values

    @property
    def num_shards(self) -> int:
        return -(-self.count // self.shard_rows)

    def rows(self, shard: int) -> range:
        """The texts of one shard."""
        return range(self.count)[shard * self.shard_rows : (shard + 1) * self.shard_rows]


@dataclass(frozen=True)
class StoredVectors:
    """A finished folder of any form. Vectors stay on the disk until they are read."""

    folder: Path
    plan: Any
    dim: int
    shards: list[WrittenFile]
    # None: of an earlier version, which said none
    ids_sha256: str | None = field(default=None, kw_only=True)

    @cached_property
    def ids(self) -> list[str]:
        """The id of every text; DataError when the file is not the one that was written."""
        content = self.content_of(_IDS, self.ids_sha256)
        try:
            ids = content.decode().split("\n")[:-1]
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.folder / _IDS} cannot be read ({error}). {self._anew}"
            ) from error
        if len(ids) != self.plan.count:
            raise DataError(
                f"{self.folder / _IDS} has {len(ids)} ids for {self.plan.count} vectors. "
                f"{self._anew}"
            )
        return ids

    def content_of(self, name: str, sha256: str | None) -> bytes:
        """The bytes of a small file beside the shards; DataError when it is not there, or has
        another digest than `sha256`, if that is known.
        """
        path = self.folder / name
        with refusals(path):
            content = path.read_bytes() if path.is_file() else None
        if content is None or sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise DataError(f"{path} is not the file that was written. {self._anew}")
        return content

    @property
    def _anew(self) -> str:
        """How a file beside the shards is written again. No text is encoded for it."""
        return f"Delete {self.folder / META}, and run the same encode command again."

    def opened(
        self, number: int, read: Callable[[Path], T], *, shape: tuple[int, ...], dtype: np.dtype
    ) -> T:
        """What `read` makes of the file of a shard, which has a shape and a dtype; DataError when
        it cannot be read, or these are others.
        """
        path = self.folder / self.shards[number].name
        again = "Delete it if it is there, and run the same encode command again: it is made anew."
        try:
            found: Any = read(path)
        except LatheError:
            raise
        except Exception as error:  # numpy and zipfile have a dozen errors for a damaged header
            raise DataError(f"{path} cannot be read ({error}). {again}") from error
        if found.shape != shape or found.dtype != dtype:
            raise DataError(
                f"{path} holds {found.shape} {found.dtype}, want {shape} {self.plan.dtype}. {again}"
            )
        return found

    def mapped(self, number: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The memory-mapped array of a shard."""

        def read(path: Path) -> np.ndarray:
            # torch takes no read-only memory
            array: Any = np.load(path, mmap_mode="c", allow_pickle=False)
            if array.offset + array.nbytes != self.shards[number].size:
                raise ValueError("its numbers do not begin where they were written")
            return array

        return self.opened(number, read, shape=shape, dtype=dtype)


@dataclass(frozen=True)
class Embeddings(StoredVectors):
    """A finished folder of one vector for each text."""

    plan: EmbeddingsPlan
    # of int8 or binary by depth (stored_forms.recalls); else empty
    recall: dict[str, float] = field(default_factory=dict[str, float])

    @cached_property
    def vectors(self) -> list[np.ndarray]:
        """The vectors of every shard as they are stored, memory-mapped (stored_forms.floats makes
        them numbers); DataError when a file is not what meta.json says.
        """
        dtype = stored_forms.file_dtype(self.plan.dtype, self.dim)
        width = () if dtype.names else (self.dim,)
        counts = [len(self.plan.rows(number)) for number in range(len(self.shards))]
        return [self.mapped(number, (rows, *width), dtype) for number, rows in enumerate(counts)]

    @cached_property
    def digest(self) -> str:
        """Names these vectors: of what plan.json says and of every shard's content."""
        content = [self.plan.stated, [record.sha256 for record in self.shards]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def told(self) -> list[str]:
        """What `encode` says of the folder: how many vectors, and what their small form loses."""
        written = f"{self.plan.count} vectors of {self.dim} numbers, {len(self.shards)} shard(s)"
        return [written] + [
            f"recall@{depth} {recall:.3f} of the exact vectors' nearest, with passages as questions"
            for depth, recall in self.recall.items()
        ]


def form_of(folder: Path) -> str:
    """Which form of retriever made a folder of vectors: what meta.json says, or plan.json where it
    is not finished, else "bi". DataError when the file cannot be read.
    """
    shards = _folder(folder, ".npy")
    if not (shards.is_finished or shards.is_begun):
        return "bi"  # read() says what is missing
    name = META if shards.is_finished else PLAN
    return shards.read(name, lambda values: str(values.get("form", "bi")))


def verify(embeddings: StoredVectors) -> None:
    """DataError when a shard's bytes are not those that were written."""
    problems = [
        problem
        for record in embeddings.shards
        if (problem := checksum_problem(embeddings.folder, record))
    ]
    if problems:
        raise DataError(
            f"{embeddings.folder}: {'; '.join(problems)}. Delete these files and the .json of "
            "each, and encode again."
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


# Encoding
# --------------------------------------------------------------------------------------------------


def encoder_of(
    task: Embeds, model: nn.Module, *, side: Side, batch: int, precision: Precision = "fp32"
) -> Encoder:
    """A function from N rows to their (N, D) fp32 vectors on the CPU, by in_batches."""
    how: Any = {"side": side, "batch": batch, "precision": precision}

    def embed(ids: list[list[int]]) -> Tensor:
        return task.embed(model, ids, side=side).float().cpu()

    def encode(rows: Sequence[Row]) -> Tensor:
        order, parts = in_batches(embed, task, model, rows, **how)
        vectors = torch.cat(parts)
        return vectors.new_empty(vectors.shape).index_copy_(0, torch.tensor(order), vectors)

    return encode


@torch.no_grad()
def in_batches(
    embed: Callable[[list[list[int]]], T],
    task: Any,
    model: nn.Module,
    rows: Sequence[Row],
    *,
    side: Side,
    batch: int,
    precision: Precision,
) -> tuple[list[int], list[T]]:
    """The places of the rows in the order in which they are encoded, and what `embed` gives for the
    ids of `batch` of them at a time: rows of like length.

    model: in evaluation mode, on the device to be used. precision: bf16 runs it under autocast.
    """
    names = ("title", "text") if side == "passage" else ("text",)
    ids = task.ids([{name: row[name] for name in names if name in row} for row in rows], side=side)
    # what needs most memory first
    order = sorted(range(len(ids)), key=lambda row: len(ids[row]), reverse=True)
    device, parts = next(model.parameters()).device, list[T]()
    for start in range(0, len(order), batch):
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            parts.append(embed([ids[row] for row in order[start : start + batch]]))
    return order, parts


# Folders
# --------------------------------------------------------------------------------------------------

P = TypeVar("P", bound=EmbeddingsPlan)
V = TypeVar("V", bound=StoredVectors)


@dataclass(frozen=True)
class Store(Generic[P, V]):
    """How the vectors of one form of retriever lie in a folder."""

    content: str  # what messages call them
    suffix: str  # of a shard
    plan: type[P]
    stored: type[V]
    # what an encoder gives for a shard, and its number -> what is written, and what its record says
    blocks: Callable[[Any, P, int], tuple[list[Block], Values]]
    # what meta.json says of all records besides the plan, the dim and the shards
    facts: Callable[[Path, P, list[Values]], Values]

    def read(self, folder: Path) -> V:
        """A finished folder; ConfigError when there is none, or it is not finished."""
        shards = _folder(folder, self.suffix)
        if not shards.is_finished:
            state = (
                "is not finished: run the same encode command again"
                if shards.is_begun
                else "is not there"
            )
            raise ConfigError(
                f"{folder}: {META} is missing. This folder of {self.content} {state}."
            )

        def convert(meta: Values) -> V:
            records = [WrittenFile(**record) for record in meta.pop("shards")]
            names = [one.name for one in fields(self.plan) if one.name in meta]
            plan = self.plan(**{name: meta.pop(name) for name in names})
            _refuse_damage(plan, [record.name for record in records], shards)
            return self.stored(folder=folder, plan=plan, shards=records, **meta)

        return shards.read(META, convert)

    def write(
        self,
        folder: Path,
        rows: Callable[[], Iterable[Row]],
        encoder: Callable[[Sequence[Row]], Any],
        *,
        plan: P,
    ) -> V:
        """The vectors of every row of `rows()`, which must have an "id", in `folder`; what is there
        already is kept.

        A collective, in which each rank reads the rows for itself and writes some of the shards. A
        folder that was begun is continued with the shards it was begun with. ConfigError when it
        was begun with another model, other texts, another side or dtype.
        """
        shards = _folder(folder, self.suffix)
        with shards.alone():
            self._write(shards, rows, encoder, plan)
        return self.read(folder)

    def _write(
        self,
        shards: ShardFolder,
        rows: Callable[[], Iterable[Row]],
        encoder: Callable[[Sequence[Row]], Any],
        plan: P,
    ) -> None:
        how: Any = {"choice": "shard_rows", "usual": {"precision": "fp32"}}
        begun, folder = shards.begin(plan.stated, **how), shards.path
        plan = replace(plan, shard_rows=begun.get("shard_rows", plan.shard_rows))
        if distributed.on_main(lambda: shards.is_whole(plan.num_shards)):
            return
        count, own = plan.num_shards, set(shards.own_missing(plan.num_shards))
        for number, of_shard in _of_shards(rows(), plan, own):
            blocks, record = self.blocks(encoder(of_shard), plan, number)
            shards.write_shard(number, blocks, rows=len(of_shard), **record)
            done = (number + 1, count, len(of_shard))
            logger.info("%s: shard %d of %d, %d texts", folder, *done)
        shards.finish(count, lambda records: self._facts(folder, rows(), plan, records))

    def _facts(self, folder: Path, rows: Iterable[Row], plan: P, records: list[Values]) -> Values:
        """What meta.json says besides the shards; ids.txt is written first."""
        dims = {record["dim"] for record in records}
        if len(dims) != 1:
            raise LatheError(
                f"{folder}: shards hold {self.content} of {sorted(dims)} numbers. Delete it and "
                "encode anew."
            )
        ids = "".join(f"{row['id']}\n" for row in rows).encode()
        replace_file(folder / _IDS, ids)
        own = {"dim": dims.pop(), "ids_sha256": hashlib.sha256(ids).hexdigest()}
        return {**plan.stated, **own, **self.facts(folder, plan, records)}


def _refuse_damage(plan: EmbeddingsPlan, names: list[str], shards: ShardFolder) -> None:
    """ValueError for a meta.json in which a number, a dtype or a name has changed, so that it is
    not what was written.
    """
    if plan.dtype not in stored_forms.FORMS:
        raise ValueError(f"no dtype is {plan.dtype!r}")
    if plan.shard_rows < 1:
        raise ValueError(f"shards of {plan.shard_rows} texts")
    wanted = [shards.shard(number).name for number in range(plan.num_shards)]
    if names != wanted:
        raise ValueError(f"it lists {len(names)} shards, want {len(wanted)} in their order")


def shard_rows(count: int, world: int, most: int = MAX_SHARD_ROWS) -> int:
    """Rows of a shard so that every rank has some, and a kill costs little."""
    return max(1, min(most, -(-count // world)))


def _folder(folder: Path, suffix: str) -> ShardFolder:
    how: Any = {"refusal": ConfigError, "notes_kernels": True}
    return ShardFolder(folder, "vectors", suffix, "encode", **how)


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


def as_stored(exact_ND: np.ndarray, form: stored_forms.Form, shard: int) -> np.ndarray:
    """Vectors in the form of their folder. DivergedError for a number that is not finite,
    ConfigError for one that float16 cannot hold.
    """
    if not np.isfinite(exact_ND).all():
        raise DivergedError(
            f"shard {shard}: a vector holds NaN or infinity. Use another model, or fp32."
        )
    array = stored_forms.store(exact_ND, form)
    if not array.dtype.names and not np.isfinite(array).all():
        raise ConfigError(
            f"--dtype float16: a vector reaches {np.abs(exact_ND).max():.3g}, float16 65504. Use "
            "float32."
        )
    return array


def npy_blocks(array: np.ndarray) -> list[Block]:
    """The bytes of an array's .npy file."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    return [header.getvalue(), array.reshape(-1).view(np.uint8).data]


def _blocks(vectors: Tensor, plan: EmbeddingsPlan, shard: int) -> tuple[list[Block], Values]:
    exact = vectors.detach().float().cpu().numpy()
    array = as_stored(exact, plan.dtype, shard)
    record: Values = {"dim": exact.shape[1]}
    if plan.dtype in stored_forms.SMALL:
        record["recall"] = stored_forms.recalls(exact, array)
    return npy_blocks(array), record


def _mean_recall(folder: Path, plan: EmbeddingsPlan, records: list[Values]) -> Values:
    if plan.dtype not in stored_forms.SMALL:
        return {}
    recalls, counts = ([record[name] for record in records] for name in ("recall", "rows"))
    return {"recall": stored_forms.mean_recalls(recalls, counts)}


_STORE = Store("vectors", ".npy", EmbeddingsPlan, Embeddings, _blocks, _mean_recall)
read, write = _STORE.read, _STORE.write
