"""The operations of a driven run in the order of their numbers: written by the server before it
acknowledges them, read by rank 0.

`RUN/operations/log-000001.bin`, ... (records.py). The header of a record holds the operation's
number `seq`, its `kind`, its `time` (seconds since 1970), the kind's own `fields`, and two digests:

    content = sha256(header without content, chain and time + payload)
    chain   = sha256(chain of the operation before + content), of "" for the first one

Both are over bytes and written as hex. `contents.bin` holds the content digests (32 bytes each, the
one of operation n at byte 32 * n) of operations that were dropped when the log was compacted, so
that the chain can be followed from the first operation on, and a repeated operation is known.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trainer.errors import CheckpointError, UserError
from trainer.files.atomic import read_json, refusals, sync, write_json
from trainer.operations.records import (
    SEGMENT,
    LogRecord,
    RecordFiles,
    RecordPlace,
    RecordWriter,
    altered,
    encode_header,
    write_at,
)

FOLDER, LOG, CONTENTS, STATES = "operations", "log", "contents.bin", "states.json"
Kind = Literal[
    "create",
    "forward",
    "forward_backward",
    "optim_step",
    "save_state",
    "save_for_sampler",
    "load_state",
    "refused",  # its content was wrong: it changes nothing, and its number is used
    "end",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
_DIGEST = hashlib.sha256().digest_size


class OperationConflict(UserError):
    """The number of an operation was used for another content."""


class OperationGap(UserError):
    """An operation does not follow the last one."""


@dataclass(frozen=True)
class Operation:
    """One operation of a driven run."""

    seq: int
    kind: Kind
    fields: Mapping[str, Any]
    payload: bytes
    time: float  # seconds since 1970
    content: str
    chain: str


def content_digest(seq: int, kind: str, fields: Mapping[str, Any], payload: bytes) -> str:
    """What an operation says, without when: 64 hex characters."""
    head = encode_header({"seq": seq, "kind": kind, "fields": fields})
    return hashlib.sha256(head + payload).hexdigest()


def chain_digest(before: str, content: str) -> str:
    """The chain after an operation of this content; before: "" at the first one."""
    return hashlib.sha256(bytes.fromhex(before) + bytes.fromhex(content)).hexdigest()


def _operation(record: LogRecord) -> Operation:
    return Operation(**record.header, payload=record.payload)


class OperationReader:
    """Reads a log that another process may be writing, one operation after another."""

    def __init__(self, folder: Path, *, after: int = -1) -> None:
        """folder: the run's `operations/`. after: the number of the last operation that is not to
        be read.
        """
        self._files = RecordFiles(folder, LOG)
        self._last = after
        self._place: RecordPlace | None = None

    def next(self) -> Operation | None:
        """The next operation, durable; None when there is none yet.

        CheckpointError when the log was altered, or compacted beyond the place of this reader.
        """
        while True:
            place = self._place or self._start()
            record = place and self._files.following(place)
            if not record:
                return None
            seq = int(record.header["seq"])
            self._place = RecordPlace(record.place.segment, record.end)
            if seq <= self._last:
                continue
            if seq != self._last + 1:
                raise CheckpointError(
                    f"{self._files.folder}: operation {seq} follows {self._last}. The log was "
                    "compacted beyond the state that this run starts from, or was altered: start "
                    "from a newer state."
                )
            # the writer may be killed, and the power fail, between its write and its fsync
            sync(self._files.path(record.place.segment))
            self._last = seq
            return _operation(record)

    def _start(self) -> RecordPlace | None:
        """The start of the file that holds the operation after the last one."""
        start: RecordPlace | None = None
        for segment in self._files.segments():
            try:
                first = self._files.read(RecordPlace(segment, 0), with_payload=False)
            except FileNotFoundError:
                continue  # the server has dropped it since the files were listed
            is_behind = first is not None and int(first.header["seq"]) > self._last + 1
            if start is not None and (first is None or is_behind):
                break
            start = RecordPlace(segment, 0)
        return start


class OperationLog:
    """The writer of a log. Any thread may call it."""

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT) -> None:
        """Open the log in a run's `operations/`, or begin it: a torn tail is cut. ResumeError when
        another process writes it; CheckpointError when it was altered.
        """
        self._files = RecordFiles(folder, LOG)
        self._guard = threading.Lock()
        self._writer = RecordWriter(self._files, segment_bytes=segment_bytes)
        try:
            self._places: dict[int, RecordPlace] = {}
            self._chain = ""
            self.last_seq: int = -1
            segments = self._files.segments()
            end = RecordPlace(segments[-1] if segments else 1, 0)
            for record in self._files.scan():
                self._places[int(record.header["seq"])] = record.place
                self._chain = str(record.header["chain"])
                end = RecordPlace(record.place.segment, record.end)
            if self._places:
                self._check_order()
                self.last_seq = max(self._places)
            self._writer.begin(end)
        except BaseException:
            self._writer.close()
            raise

    def _check_order(self) -> None:
        numbers = list(self._places)
        expected = list(range(numbers[0], numbers[0] + len(numbers)))
        is_whole = numbers[0] == 0 or self._dropped() >= numbers[0]
        if numbers != expected or not is_whole:
            first = self._places[numbers[0]]
            raise altered(self._files.path(first.segment), first)

    @property
    def chain(self) -> str:
        """The chain after the last operation; "" before the first."""
        return self._chain

    @property
    def first_seq(self) -> int:
        """The oldest operation whose content is there; earlier ones were dropped."""
        return min(self._places, default=0)

    def append(
        self, kind: Kind, seq: int, fields: Mapping[str, Any], payload: bytes = b""
    ) -> Operation:
        """Write an operation durably, and return it. The same one again returns the first, with
        its time; where the log was compacted, without its payload.

        OperationConflict when `seq` was used for another content; OperationGap when it is not the
        number after the last; StorageError when the disk refuses: then nothing was written.
        """
        content = content_digest(seq, kind, fields, payload)
        with self._guard:
            if 0 <= seq <= self.last_seq:
                return self._repeated(kind, seq, fields, content)
            if seq != self.last_seq + 1:
                raise OperationGap(
                    f"operation {seq} does not follow the last one, {self.last_seq}. Send "
                    f"operation {self.last_seq + 1} first."
                )
            chain = chain_digest(self._chain, content)
            operation = Operation(seq, kind, fields, payload, time.time(), content, chain)
            header = {key: one for key, one in operation.__dict__.items() if key != "payload"}
            self._places[seq] = self._writer.append(header, payload)
            self.last_seq = seq
            self._chain = chain
            return operation

    def _repeated(self, kind: Kind, seq: int, fields: Mapping[str, Any], content: str) -> Operation:
        place = self._places.get(seq)
        record = place and self._files.read(place)
        if record:
            old = _operation(record)
        else:
            with (self._files.folder / CONTENTS).open("rb") as file:
                digest = os.pread(file.fileno(), _DIGEST, _DIGEST * seq).hex()
            old = Operation(seq, kind, fields, b"", 0.0, digest, "")
        if old.content != content:
            raise OperationConflict(
                f"operation {seq} was sent before with another content (sha256 {old.content[:12]}, "
                f"now {content[:12]}). Send the operation that was sent first, or use number "
                f"{self.last_seq + 1}."
            )
        return old

    def read(self, after: int = -1) -> Iterator[Operation]:
        """The operations behind `after` that are there now."""
        reader = OperationReader(self._files.folder, after=max(after, self.first_seq - 1))
        while operation := reader.next():
            yield operation

    def size_bytes(self) -> int:
        """Bytes of the log on the disk."""
        return self._files.size_bytes()

    def compact(self, before_seq: int | None = None) -> int:
        """Drop the files all of whose operations lie before this number, but never the last file.
        Returns the bytes that became free.

        before_seq: without it, what the run's states no longer need (`needless_before`).
        """
        with self._guard:
            if before_seq is None:
                before_seq = needless_before(self._files.folder)
            last_of: dict[int, int] = {}
            for seq, place in self._places.items():
                last_of[place.segment] = seq
            newest = max(last_of, default=0)
            dropped = [s for s, last in last_of.items() if last < before_seq and s != newest]
            gone = [seq for seq, place in self._places.items() if place.segment in dropped]
            if not gone:
                return 0
            self._keep_contents(gone)
            freed = 0
            with refusals(self._files.folder):
                for segment in sorted(dropped):
                    path = self._files.path(segment)
                    freed += path.stat().st_size
                    path.unlink()
            for seq in gone:
                del self._places[seq]
            return freed

    def _keep_contents(self, numbers: list[int]) -> None:
        path = self._files.folder / CONTENTS
        digests: list[bytes] = []
        for seq in numbers:
            record = self._files.read(self._places[seq], with_payload=False)
            if record is None:
                raise altered(self._files.path(self._places[seq].segment), self._places[seq])
            digests.append(bytes.fromhex(record.header["content"]))
        with refusals(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                write_at(descriptor, b"".join(digests), _DIGEST * numbers[0])
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync(path.parent)

    def _dropped(self) -> int:
        """How many operations have their digest in contents.bin."""
        path = self._files.folder / CONTENTS
        return path.stat().st_size // _DIGEST if path.exists() else 0

    def close(self) -> None:
        self._writer.close()


def note_states(folder: Path, after_seqs: list[int]) -> None:
    """Write down behind which operations the run's good states stand, oldest first. Rank 0 calls
    it after a state was written.
    """
    write_json(folder / STATES, {"after_seqs": after_seqs})


def needless_before(folder: Path) -> int:
    """The number of the first operation that a run may still have to run again: the one behind the
    second newest of its good states; 0 while there are fewer than two.
    """
    states = (read_json(folder / STATES) or {}).get("after_seqs", [])
    return sorted(states)[-2] + 1 if len(states) >= 2 else 0
