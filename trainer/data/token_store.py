"""Encoded rows on disk, memory-mapped: every row is tokenised once, and any process can read any
row directly.

A store is a folder. It has, for each field, a flat int32 array of ids and the int64 offsets of the
rows; the length of every row; and meta.json, which is written last. A store is built in a temporary
folder that is then renamed, so a store is complete or not there.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from trainer.config.mix import labels_of
from trainer.data import left_out
from trainer.data.content import (
    Content,
    RowHasher,
    content_of,
    content_of_rows,
    reader_of,
    rows_of,
)
from trainer.data.control_tokens import ControlTokens, controls_of, reason
from trainer.data.encoding import (
    EncodeRows,
    encode_noting,
    encoded_rows,
    usable_processes,
    with_progress,
)
from trainer.data.mixed.store import MixedStore
from trainer.data.mixed.task import named
from trainer.errors import DataError
from trainer.files.build_once import build_once
from trainer.protocol import cut_counts
from trainer.protocol.abilities import EncodesRows, Mixes

if TYPE_CHECKING:
    from trainer.protocol.task import Encoded, Row, Task

log = logging.getLogger(__name__)

_FORMAT = 1  # raised when the format changes, so that folders of the old format are not read
_META = "meta.json"
_LENGTHS = "lengths.npy"
_ROW_HASHES = "row_hashes.npy"  # stores of older versions have none
_PERCENTILES = (50, 90, 99, 100)
_ROWS_AT_ONCE = 64  # rows that are encoded by one call, where the task can
_HASHED_ROWS = 8192  # rows whose tokens are in memory at once
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # Knuth's golden ratio: an odd number of 64 bits


def _mix(values: np.ndarray) -> np.ndarray:
    """Mix the bits of each 64-bit number. Source: Steele et al. 2014, SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class TokenStore:
    """The rows of one split.

    `store[i]` is row i by field; `store.lengths` holds the length of each row (`Task.length`).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta: dict[str, Any] = json.loads((folder / _META).read_text(encoding="utf-8"))
        fields = self.meta["fields"]
        self._ids = {field: _map(folder / f"ids.{field}.npy") for field in fields}
        self._offsets = {field: _map(folder / f"offsets.{field}.npy") for field in fields}
        self.lengths = _map(folder / _LENGTHS)  # (rows,) int64

    @property
    def digest(self) -> str:
        """sha256 of the raw rows and the encoding id, 64 hex characters.

        Stores of equal digests hold equal rows.
        """
        return self.meta["digest"]

    def __len__(self) -> int:
        return self.meta["rows"]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Row `index` by field, (tokens,) int32 each.

        The arrays are copies: writing to them does not change the file.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = {}
        for field, ids in self._ids.items():
            start, stop = self._offsets[field][index : index + 2]
            row[field] = ids[start:stop].copy()
        return row

    def close(self) -> None:
        """Nothing to end: every row is there."""

    def summary(self) -> dict[str, Any]:
        """rows, tokens by field, percentiles of the length and the number of truncated rows.

        All are plain JSON values.
        """
        percentiles = np.percentile(self.lengths, _PERCENTILES, method="higher")
        return {
            "rows": len(self),
            "tokens": {field: len(ids) for field, ids in self._ids.items()},
            "length": {
                f"p{p}": int(value) for p, value in zip(_PERCENTILES, percentiles, strict=True)
            },
            "truncated_rows": self.meta["truncated_rows"],
        }

    def lost_labels(self) -> tuple[int, int]:
        """(label tokens that limits cut off, label tokens before the cut).

        (0, 0) when the task's encoding does not count them.
        """
        lost, of = self.meta.get("lost_labels", (0, 0))  # stores of older versions have none
        return lost, of

    def row_hashes(self, fields: Sequence[str]) -> np.ndarray:
        """(rows,) uint64: a hash of each row's ids in these fields. Equal rows have equal hashes;
        two different rows have equal hashes with a probability of 2^-64.
        """
        hashes = np.zeros(len(self), np.uint64)
        for field in fields:
            ids, offsets = self._ids[field], self._offsets[field]
            for start in range(0, len(self), _HASHED_ROWS):
                stop = min(start + _HASHED_ROWS, len(self))
                ends = np.asarray(offsets[start : stop + 1])
                first, sizes = int(ends[0]), np.diff(ends)
                tokens = np.asarray(ids[first : int(ends[-1])]).astype(np.uint64) + np.uint64(1)
                places = np.arange(len(tokens)) - np.repeat(ends[:-1] - first, sizes)
                mixed = _mix(tokens * _FACTOR + places.astype(np.uint64))
                sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
                ends = ends - first
                own = _mix(sums[ends[1:]] - sums[ends[:-1]] + sizes.astype(np.uint64))
                hashes[start:stop] = hashes[start:stop] * _FACTOR + own
        return hashes

    def raw_hashes(self) -> np.ndarray | None:
        """(rows,) uint64: a hash of each raw row, equal for rows that say the same (`row_hash` in
        normal_form.py); None for a store of an older version.
        """
        path = self.folder / _ROW_HASHES
        return _map(path) if path.exists() else None

    def cuts(self) -> dict[str, dict[str, Any]]:
        """For each kind of text that a limit cuts: setting, limit, texts, texts_cut, tokens,
        tokens_cut.

        {} when the task's encoding does not count them, or an older version made the store.
        """
        return self.meta.get("cuts", {})

    def notes(self) -> left_out.Notes:
        """The rows with control tokens in their texts; none when an older version made the
        store.
        """
        record = self.meta.get("notes")
        return left_out.Notes() if record is None else left_out.Notes.of(record)

    def axes(self, fields: Sequence[str] = ()) -> np.ndarray:
        """(rows, axes) int64: the sizes of each row in these fields; without any, its length."""
        if not fields:
            return np.asarray(self.lengths, dtype=np.int64)[:, None]
        return np.stack([self.sizes(field) for field in fields], axis=1)

    def sizes(self, field: str) -> np.ndarray:
        """(rows,) int64: the number of ids of each row in `field`."""
        return np.diff(self._offsets[field])

    def texts(self, field: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all rows in `field`, (ids,) int32, and (rows + 1,) where those of each row
        begin in them.
        """
        return self._ids[field], np.asarray(self._offsets[field])

    def numbers(self, field: str) -> np.ndarray:
        """(rows,) int32: the value of a field that has one number per row; zeros when the rows do
        not have the field.
        """
        return self._ids.get(field, np.zeros(len(self), np.int32))


def store_of(
    task: Task,
    split: str,
    cache_dir: Path,
    *,
    num_proc: int | None = None,
    content: Content | None = None,
) -> TokenStore:
    """The encoded rows of a task's split, from the cache or built (`open_store`).

    content: the result of content_of() for these rows; None: it is called. Each source of a mix has
    a store of its own, under its own content.
    """
    reader, _ = reader_of(task, split)
    if isinstance(reader, Mixes):
        stores: dict[str, TokenStore] = {}
        for name, source in reader.sources(split).items():
            with named(name), left_out.gathering_of_source(split, name):
                stores[name] = store_of(source, split, cache_dir, num_proc=num_proc)
        labels = labels_of(reader.cfg.data.mix)
        return cast("TokenStore", MixedStore(stores, split, labels))
    return open_store(
        rows_of(task, split),
        task.encode,
        encoding_id=task.encoding_id(),
        split=split,
        cache_dir=cache_dir,
        length=task.length,
        controls=controls_of(task),
        num_proc=num_proc,
        content=content or content_of(task, split, cache_dir),
        encode_rows=task.encode_rows if isinstance(task, EncodesRows) else None,
    )


def open_store(
    rows: Callable[[], Iterable[Row]],
    encode: Callable[[Row], Encoded],
    *,
    encoding_id: str,
    split: str,
    cache_dir: Path,
    length: Callable[[Mapping[str, Any]], int],
    controls: ControlTokens | None = None,
    num_proc: int | None = None,
    content: Content | None = None,
    encode_rows: EncodeRows | None = None,
) -> TokenStore:
    """The store of `rows()` under `encode`, from `cache_dir` when it is there, else built.

    Several processes may call it at the same time: the first builds the store, the others wait and
    then map it. The key is a sha256 over the raw rows and `encoding_id`, so changed data gives
    another folder, and a stale store is never used. Rows are encoded only while a store is built.
    content: the key and the number of rows, if the caller knows them (content_of); None: the rows
    are read to compute them. num_proc: the number of processes that encode, which does not change
    the result; None: chosen by the number of rows (`usable_processes`). encode_rows: encodes many
    rows by one call, with the results of `encode`; None: `encode` is called. Memory stays bounded.
    controls: those in the texts of rows are noted with the store, and gathered.
    Raises DataError when there are no rows, when the rows change between two readings, or when an
    encoding is not lists of ids; StorageError when the disk refuses.
    """
    digest, num_rows = content or content_of_rows(rows, encoding_id, split)
    many = encode_rows or (lambda chunk: [encode(row) for row in chunk])
    encode_chunk = functools.partial(encode_noting, many, controls)

    def build(temporary: Path) -> None:
        processes = num_proc or usable_processes(num_rows)
        with _Writer(temporary) as writer:
            hasher = RowHasher(encoding_id)
            raw = hasher.pass_through(rows())
            results = encoded_rows(
                raw, encode_chunk, num_proc=processes, at_once=_ROWS_AT_ONCE if encode_rows else 1
            )
            for index, encoded in enumerate(with_progress(results, split, num_rows, processes)):
                writer.add(index, encoded, length)
        if hasher.hexdigest() != digest:
            raise DataError(
                f"the {split} rows changed while they were read. Start again when nothing "
                "writes to the data."
            )
        writer.write_meta(digest=digest, encoding_id=encoding_id, split=split)

    folder = cache_dir / "tokens" / f"{split}-{digest[:32]}-v{_FORMAT}"
    store = TokenStore(build_once(folder, build, is_whole=_is_whole))
    left_out.gather(split, store.notes())
    return store


class _Array:
    """A one-dimensional .npy file that rows are appended to, so that no array is kept in memory."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._file = path.open("wb", buffering=1 << 20)
        self._dtype = np.dtype(dtype)
        self.size = 0
        self._write_header()
        self._data_starts = self._file.tell()

    def append(self, values: Sequence[int] | np.ndarray) -> None:
        self._file.write(np.asarray(values, dtype=self._dtype).tobytes())
        self.size += len(values)

    def finish(self) -> None:
        """Write the true length into the header.

        numpy pads the header, so that the data behind it stays in place.
        """
        self._file.seek(0)
        self._write_header()
        assert self._file.tell() == self._data_starts
        self._file.close()

    def abandon(self) -> None:
        """Close the file, whatever its content; does nothing after finish().

        On a full disk even the last flush may fail.
        """
        try:
            self._file.close()
        except OSError as error:
            log.debug("closing an abandoned file: %s", error)

    def _write_header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.size,)}
        np.lib.format.write_array_header_1_0(self._file, header)


class _Writer:
    """Appends encoded rows to the arrays of a store's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ids: dict[str, _Array] = {}
        self._offsets: dict[str, _Array] = {}
        self._lengths = _Array(folder / _LENGTHS, "<i8")
        self._row_hashes = _Array(folder / _ROW_HASHES, "<u8")
        self._truncated_rows = 0
        self._lost_labels = np.zeros(2, dtype=np.int64)
        self._cuts: cut_counts.CutCounts = {}
        self._notes = left_out.Notes()

    def add(self, index: int, encoded: Encoded, length: Callable[[Mapping[str, Any]], int]) -> None:
        """Append one row; DataError when its fields are not those of the first row, or not lists of
        32-bit integers.
        """
        tokens = {field: as_ids(values, field, index) for field, values in encoded.items()}
        if index == 0:
            self._open(tokens)
        if tokens.keys() != self._ids.keys():
            raise DataError(
                f"row {index} is encoded as {sorted(tokens)}, the first row as {sorted(self._ids)}."
            )
        self._truncated_rows += int(encoded.is_truncated)
        self._lost_labels += encoded.lost_labels
        cut_counts.add(self._cuts, encoded.cuts)
        for control in encoded.controls:
            note = left_out.Note(f"row {index + 1}", reason(control), control[0])
            self._notes.add(note)
        self._lengths.append([length(encoded)])
        self._row_hashes.append(np.array([encoded.row_hash], dtype=np.uint64))
        for field, ids in tokens.items():
            self._ids[field].append(ids)
            self._offsets[field].append([self._ids[field].size])

    def write_meta(self, **facts: Any) -> None:
        """Write meta.json, the file that makes the folder a store; the arrays are closed by now."""
        names = {path.name: path.stat().st_size for path in sorted(self._folder.iterdir())}
        meta = {
            "format": _FORMAT,
            "rows": self._lengths.size,
            "fields": list(self._ids),
            "truncated_rows": self._truncated_rows,
            "lost_labels": self._lost_labels.tolist(),
            "cuts": self._cuts,
            "notes": self._notes.record(),
            "bytes": names,
            **facts,
        }
        (self._folder / _META).write_text(json.dumps(meta, indent=1), encoding="utf-8")

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        arrays = (self._lengths, self._row_hashes, *self._ids.values(), *self._offsets.values())
        try:
            for array in arrays if kind is None else ():
                array.finish()
        finally:
            for array in arrays:
                array.abandon()

    def _open(self, fields: Iterable[str]) -> None:
        for field in fields:
            self._ids[field] = _Array(self._folder / f"ids.{field}.npy", "<i4")
            self._offsets[field] = _Array(self._folder / f"offsets.{field}.npy", "<i8")
            self._offsets[field].append([0])


def as_ids(values: Any, field: str, index: int) -> np.ndarray:
    """The ids of a row's field, (tokens,). DataError for what is no list of 32-bit integers."""
    try:
        ids = np.asarray(values, dtype=np.int64 if len(values) == 0 else None)
    except (TypeError, ValueError):
        ids = np.zeros((0, 0))
    limits = np.iinfo(np.int32)
    if (
        ids.ndim != 1
        or ids.dtype.kind not in "iu"
        or (ids.size and not limits.min <= ids.min() <= ids.max() <= limits.max)
    ):
        raise DataError(
            f"row {index}: field {field!r} is encoded as {values!r:.80}, want a flat list of "
            "32-bit integers."
        )
    return ids


def _is_whole(folder: Path) -> bool:
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in meta["bytes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # something is missing or malformed, so the store is built again


def _map(path: Path) -> np.ndarray:
    return np.asarray(np.load(path, mmap_mode="r"))
