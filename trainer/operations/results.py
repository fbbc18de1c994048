"""What became of each operation of a driven run: written by rank 0, read by the server.

`RUN/operations/results-000001.bin`, ... (records.py). The header of a record holds the operation's
number `seq`, the `time` when it was written, the result's own `fields`, `digest` = sha256 of seq,
fields and payload, in hex, and `work`: what was run, and when (work_of). The work of a replay takes
another time, so it is no part of the digest.

A result with the field "error" failed: it changed nothing. "category" says whose fault it was:
"user" or "server". The header of a pass over rows that several runs shared also holds `layout`, how
they were packed (trainer/driven/together/rounds.py), so that it can be run again to the same bits.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import ReplayDiffers
from trainer.operations.operation_log import Operation, OperationGap
from trainer.operations.records import (
    SEGMENT,
    LogRecord,
    RecordFiles,
    RecordPlace,
    RecordWriter,
    altered,
    encode_header,
)

RESULTS = "results"
LAYOUTS = "layouts.json"  # of a copy to be computed again, which has no results: {"NUMBER": layout}


@dataclass(frozen=True)
class OperationResult:
    """What one operation gave."""

    seq: int
    fields: Mapping[str, Any]
    payload: bytes
    time: float  # seconds since 1970
    digest: str
    work: Mapping[str, Any] = field(default_factory=dict[str, Any])  # {}: it is not known
    layout: Mapping[str, Any] | None = None

    @property
    def error(self) -> str | None:
        """Why it failed; None if it did not."""
        return self.fields.get("error")


def result_digest(seq: int, fields: Mapping[str, Any], payload: bytes) -> str:
    """What a result says, without when: 64 hex characters."""
    return hashlib.sha256(encode_header({"seq": seq, "fields": fields}) + payload).hexdigest()


def work_of(operation: Operation, began: float) -> dict[str, Any]:
    """What a result tells of its operation: the `kind`, the `rows` and their `tokens` (None where
    it has none), and when it was acknowledged (`sent`) and `began`, in seconds since 1970.
    """
    numbers = {name: operation.fields.get(name) for name in ("rows", "tokens")}
    return {"kind": operation.kind, **numbers, "sent": operation.time, "began": began}


def _result(record: LogRecord) -> OperationResult:
    return OperationResult(**record.header, payload=record.payload)


class OperationResults:
    """The results of a run, for a reader; `follow` brings it up to date."""

    def __init__(self, folder: Path) -> None:
        """folder: the run's `operations/`, which need not be there yet."""
        self._files = RecordFiles(folder, RESULTS)
        self._places: dict[int, RecordPlace] = {}
        self._end: RecordPlace | None = None
        self.last_seq = -1

    def follow(self) -> list[int]:
        """Read what was written since the last call; its numbers. It costs the reading of one
        header if nothing was. CheckpointError when a file was altered.
        """
        new: list[int] = []
        while True:
            if self._end is None:
                segments = self._files.segments()
                if not segments:
                    return new
                self._end = RecordPlace(segments[0], 0)
            record = self._files.following(self._end)
            if record is None:
                return new
            self._end = RecordPlace(record.place.segment, record.end)
            self._add(int(record.header["seq"]), record.place)
            new.append(self.last_seq)

    def _add(self, seq: int, place: RecordPlace) -> None:
        self._places[seq] = place
        self.last_seq = seq

    def get(self, seq: int) -> OperationResult | None:
        """The result of an operation; None while there is none, or none any more."""
        place = self._places.get(seq)
        try:
            record = place and self._files.read(place)
        except FileNotFoundError:
            return None  # dropped
        if place is not None and record is None:
            raise altered(self._files.path(place.segment), place)
        return _result(record) if record else None

    def size_bytes(self) -> int:
        """Bytes of the results on the disk."""
        return self._files.size_bytes()


class ResultWriter(OperationResults):
    """The writer of the results of a run: rank 0."""

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT) -> None:
        """Open the results, or begin them: a torn tail is cut. ResumeError when another process
        writes them; CheckpointError when they were altered.
        """
        super().__init__(folder)
        self._writer = RecordWriter(self._files, segment_bytes=segment_bytes)
        try:
            self.follow()
            segments = self._files.segments()
            self._writer.begin(self._end or RecordPlace(segments[-1] if segments else 1, 0))
        except BaseException:
            self._writer.close()
            raise

    def append(
        self,
        seq: int,
        fields: Mapping[str, Any],
        payload: bytes = b"",
        *,
        work: Mapping[str, Any] | None = None,
        layout: Mapping[str, Any] | None = None,
    ) -> OperationResult:
        """Write the result of an operation durably. If it has one, nothing is written.
        work: see work_of; None: it is not known. layout: of a pass that several runs shared.

        ReplayDiffers when the present one is another; OperationGap when the operation before has
        no result; StorageError when the disk refuses: then nothing was written.
        """
        digest = result_digest(seq, fields, payload)
        if seq <= self.last_seq:
            old = self.get(seq)
            if old is not None and old.digest != digest:
                raise _differs(old, OperationResult(seq, fields, payload, 0.0, digest))
            return old or OperationResult(seq, fields, payload, 0.0, digest)
        if self._places and seq != self.last_seq + 1:
            raise OperationGap(
                f"the result of operation {seq} does not follow that of {self.last_seq}. This is a "
                "fault of the worker: please report it."
            )
        result = OperationResult(seq, fields, payload, time.time(), digest, work or {}, layout)
        header = {key: one for key, one in result.__dict__.items() if key != "payload"}
        if layout is None:
            del header["layout"]
        place = self._writer.append(header, payload)
        self._add(seq, place)
        self._end = self._writer.end
        return result

    def close(self) -> None:
        self._writer.close()


def _differs(old: OperationResult, new: OperationResult) -> ReplayDiffers:
    was, now = dict(old.fields), dict(new.fields)
    keys = [key for key in {**was, **now} if was.get(key) != now.get(key)]
    differences = [f"{key}: {was.get(key)} then, {now.get(key)} now" for key in keys]
    where = "; ".join(differences) or "its tensors"
    return ReplayDiffers(
        f"operation {old.seq} was run again and gave another result than before ({where}). What "
        "the client knows is not what this run computes: the worker must run on the same kind of "
        "device with the same versions, or the client goes on from a state that it saved."
    )
