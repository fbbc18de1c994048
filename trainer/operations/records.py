"""Append-only files of checksummed records: a record is there whole, or it is not there.

Format of a record: 8 bytes length of the header, 8 bytes length of the payload (little-endian), 32
bytes sha256 of header and payload, the header (a JSON object in UTF-8 with sorted keys), the
payload. The files of one stem, `log-000001.bin`, `log-000002.bin`, ..., are read one after another.
One process writes them; any number reads them while it writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from filelock import FileLock, Timeout

from trainer.errors import CheckpointError, HeldError, StorageError
from trainer.files.atomic import refusals, sync

_LENGTHS = struct.Struct("<QQ")
_PREFIX = _LENGTHS.size + hashlib.sha256().digest_size
MAX_HEADER, MAX_PAYLOAD = 16 << 20, 2 << 30  # bytes; greater lengths are no record
SEGMENT = 16 << 20  # bytes after which the next file begins


def encode_header(header: Mapping[str, Any]) -> bytes:
    """A header as it stands in a record: the same bytes for equal values."""
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def encode_record(header: Mapping[str, Any], payload: bytes) -> bytes:
    """The bytes of one record. StorageError if it is larger than a record may be."""
    head = encode_header(header)
    if len(head) > MAX_HEADER or len(payload) > MAX_PAYLOAD:
        raise StorageError(
            f"a record of {len(head):,} + {len(payload):,} bytes: a header has at most "
            f"{MAX_HEADER:,} and a payload {MAX_PAYLOAD:,}. Send fewer rows in one operation."
        )
    digest = hashlib.sha256(head + payload).digest()
    return _LENGTHS.pack(len(head), len(payload)) + digest + head + payload


@dataclass(frozen=True)
class LogRecord:
    """A record that was read. place: where it begins; end: where the next one begins."""

    header: dict[str, Any]
    payload: bytes
    place: RecordPlace
    end: int


@dataclass(frozen=True, order=True)
class RecordPlace:
    """A position in the files of one stem."""

    segment: int  # the number of the file; the first is 1
    offset: int  # bytes


def read_record(path: Path, place: RecordPlace, *, with_payload: bool = True) -> LogRecord | None:
    """The record at a place; None when no whole record is there (yet).

    with_payload: False reads the header alone, and does not look at the checksum. OSError.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = os.pread(file.fileno(), _PREFIX, place.offset)
        if len(prefix) < _PREFIX:
            return None
        header_size, payload_size = _LENGTHS.unpack_from(prefix)
        start = place.offset + _PREFIX
        end = start + header_size + payload_size
        if header_size > MAX_HEADER or payload_size > MAX_PAYLOAD or end > size:
            return None
        body = _read(file.fileno(), start, end if with_payload else start + header_size)
    if with_payload and hashlib.sha256(body).digest() != prefix[_LENGTHS.size :]:
        return None
    try:
        header: Any = json.loads(body[:header_size])
    except ValueError:
        return None
    if not isinstance(header, dict):
        return None
    return LogRecord(cast("dict[str, Any]", header), body[header_size:], place, end)


def _read(descriptor: int, start: int, end: int) -> bytes:
    """The bytes from start to end; fewer where the file is shorter by now."""
    blocks: list[bytes] = []
    while start < end and (block := os.pread(descriptor, end - start, start)):
        blocks.append(block)
        start += len(block)
    return b"".join(blocks)


class RecordFiles:
    """The files of one stem in a folder, for readers and for the one writer."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.folder, self.stem = folder, stem
        self._name = re.compile(re.escape(stem) + r"-(\d{6,})\.bin")

    def path(self, segment: int) -> Path:
        return self.folder / f"{self.stem}-{segment:06d}.bin"

    def segments(self) -> list[int]:
        """The numbers of the files that are there, ascending."""
        with suppress(FileNotFoundError):
            matches = map(self._name.fullmatch, os.listdir(self.folder))
            return sorted(int(match[1]) for match in matches if match)
        return []

    def size_bytes(self) -> int:
        """Bytes of all files."""
        total = 0
        for segment in self.segments():
            with suppress(FileNotFoundError):  # another process has dropped it
                total += self.path(segment).stat().st_size
        return total

    def read(self, place: RecordPlace, *, with_payload: bool = True) -> LogRecord | None:
        """The record at a place; None when no whole one is there. OSError."""
        return read_record(self.path(place.segment), place, with_payload=with_payload)

    def following(self, place: RecordPlace, *, with_payload: bool = True) -> LogRecord | None:
        """The first record at a place or behind it, in the next file at the end of one; None when
        there is none yet.

        CheckpointError when what stands there is no record although more was written behind it.
        """
        record = self._read_or_none(place, with_payload=with_payload)
        if record is not None:
            return record
        path = self.path(place.segment)
        later: list[int] = []
        if self.path(place.segment + 1).exists() or not path.exists():  # else list no folder
            later = [segment for segment in self.segments() if segment > place.segment]
        if not later:
            if self._is_followed(place) and not self._read_or_none(place, with_payload=True):
                raise altered(path, place)
            return None
        if path.exists():  # else it was dropped
            # it may have grown between the two looks, before the next file began
            record = self._read_or_none(place, with_payload=with_payload)
            if record is not None:
                return record
            with suppress(FileNotFoundError):
                if path.stat().st_size > place.offset:
                    raise altered(path, place)
        return self.following(RecordPlace(later[0], 0), with_payload=with_payload)

    def _is_followed(self, place: RecordPlace) -> bool:
        """Whether a whole record stands where the one at a place ends by its lengths."""
        with suppress(FileNotFoundError), self.path(place.segment).open("rb", buffering=0) as file:
            prefix = os.pread(file.fileno(), _PREFIX, place.offset)
            if len(prefix) == _PREFIX:
                end = place.offset + _PREFIX + sum(_LENGTHS.unpack_from(prefix))
                if end < os.fstat(file.fileno()).st_size:
                    return self.read(RecordPlace(place.segment, end)) is not None
        return False

    def behind(self, place: RecordPlace) -> RecordPlace | None:
        """Where the next whole record of the same file begins behind a place at which there is
        none; None when there is no other: then a crash may have torn what stands there.
        """
        with self.path(place.segment).open("rb") as file:
            file.seek(place.offset)
            content = file.read()
        start = _PREFIX
        while (start := content.find(b'{"', start + 1)) >= 0:
            one = RecordPlace(place.segment, place.offset + start - _PREFIX)
            if self.read(one) is not None:
                return one
        return None

    def _read_or_none(self, place: RecordPlace, *, with_payload: bool) -> LogRecord | None:
        try:
            return self.read(place, with_payload=with_payload)
        except FileNotFoundError:
            return None

    def scan(self) -> Iterator[LogRecord]:
        """Every record, without its payload; the checksums of the last file are looked at, since
        only there a writer can have been killed. CheckpointError as `following`.
        """
        segments = self.segments()
        place = RecordPlace(segments[0], 0) if segments else None
        while place is not None:
            is_last = place.segment == segments[-1]
            record = self.following(place, with_payload=is_last)
            if record is None:
                return
            yield record
            place = RecordPlace(record.place.segment, record.end)


def altered(path: Path, place: RecordPlace) -> CheckpointError:
    """The error of a record that is not what was written."""
    return CheckpointError(
        f"{path}, byte {place.offset}: no whole record, although more was written behind it. The "
        "file was altered, or the disk lost a part of it: restore it from a copy, or begin a new "
        "run from a saved state."
    )


class RecordWriter:
    """Appends records, each on the disk (fsync) before append() returns. One process at a time."""

    def __init__(self, files: RecordFiles, *, segment_bytes: int = SEGMENT) -> None:
        """Take the lock of these files, and make durable what an earlier writer left.
        HeldError when another process writes them. The caller scans, and calls `begin`.
        """
        self.files, self._segment_bytes = files, segment_bytes
        self._descriptor: int | None = None
        self._place = RecordPlace(1, 0)
        with refusals(files.folder):
            files.folder.mkdir(parents=True, exist_ok=True)
        path = files.folder / f".{files.stem}.lock"
        self._lock = FileLock(path, timeout=0, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise HeldError(
                f"{files.folder}: another process writes {files.stem}-*.bin (it holds {path}). "
                "Stop it, or wait for it."
            ) from None

    @property
    def end(self) -> RecordPlace:
        """Where the next record is written, or the next file begins."""
        return self._place

    def begin(self, end: RecordPlace) -> None:
        """Write from `end` on: behind the last whole record. What stands there was torn by a crash
        and is cut. CheckpointError when a whole record stands behind it: no crash leaves that.
        """
        path = self.files.path(end.segment)
        if path.exists() and path.stat().st_size > end.offset and self.files.behind(end):
            raise altered(path, end)
        self._open(end)

    def append(self, header: Mapping[str, Any], payload: bytes) -> RecordPlace:
        """Write one record and wait until the disk has it. Returns its place.

        StorageError when the disk refuses: then nothing was appended.
        """
        content = encode_record(header, payload)
        path = self.files.path(self._place.segment)
        with refusals(path):
            if self._descriptor is None:
                self._open(self._place)  # an earlier append failed: cut what it left
            elif self._place.offset >= self._segment_bytes:
                self._open(RecordPlace(self._place.segment + 1, 0))
            place = self._place
            descriptor = self._descriptor
            assert descriptor is not None, "_open has set it"
            try:
                write_at(descriptor, content, place.offset)
                os.fsync(descriptor)
            except BaseException:
                # pages that an fsync refused may be dropped: open and cut before the next append
                self._close_file()
                with suppress(OSError):
                    os.truncate(self.files.path(place.segment), place.offset)
                raise
        self._place = RecordPlace(place.segment, place.offset + len(content))
        return place

    def close(self) -> None:
        self._close_file()
        self._lock.release()

    def _open(self, place: RecordPlace) -> None:
        path = self.files.path(place.segment)
        self._close_file()
        self._place = place  # where the next append tries again if the disk refuses here
        with refusals(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(descriptor, place.offset)
                os.fsync(descriptor)  # records that an earlier writer could not make durable, too
                sync(self.files.folder)
            except BaseException:
                os.close(descriptor)
                raise
        self._descriptor = descriptor

    def _close_file(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def write_at(descriptor: int, content: bytes, offset: int) -> None:
    """Write all bytes of `content` from a byte of a file on. OSError."""
    view = memoryview(content)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
