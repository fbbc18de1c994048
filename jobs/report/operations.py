"""What became of the operations of a driven run: how many, how long they waited and worked.

All of it stands in the run's files (the log, and the results with their `work`), so it is the same
after every restart. Files of the log that were compacted are not needed: a result tells when its
operation was acknowledged.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from rich.table import Table
from rich.text import Text

from jobs.report.text import duration, visible
from trainer.errors import CheckpointError
from trainer.operations.operation_log import FOLDER, LOG
from trainer.operations.records import RecordFiles, RecordPlace
from trainer.operations.results import RESULTS

MOST_LINES, MOST_FAILURES = 50, 20  # that are shown of one run
LONGEST_ERROR, LONGEST_KIND = 2000, 40  # letters
MOST_RUNS = 64  # whose files one process does not read anew


@dataclass(frozen=True)
class OperationLine:
    """One operation. Times in seconds since 1970; None: not known, or not yet."""

    seq: int
    kind: str
    rows: int | None
    tokens: int | None
    sent: float | None  # acknowledged
    began: float | None = None
    ended: float | None = None
    error: str | None = None  # why it failed
    category: str | None = None  # whose fault that was: "user" or "server"

    @property
    def waited_s(self) -> float | None:
        """How long it waited between its acknowledgement and its start."""
        return _between(self.sent, self.began)

    @property
    def worked_s(self) -> float | None:
        """How long the ranks worked on it."""
        return _between(self.began, self.ended)

    def shown(self) -> dict[str, Any]:
        """Its facts as JSON."""
        return {**asdict(self), "waited_s": self.waited_s, "worked_s": self.worked_s}


@dataclass(frozen=True)
class OperationTotals:
    """Sums over the results that the files have. The three times are parts of the time between
    the first acknowledgement and the last result: a rank worked; an operation was there and none
    worked; no operation was there.
    """

    by_kind: dict[str, int]
    failed: int
    pending: int  # without a result
    working_s: float
    waiting_s: float
    idle_s: float

    @property
    def num_results(self) -> int:
        """The operations with a result."""
        return sum(self.by_kind.values())

    @property
    def shares(self) -> tuple[float, float, float] | None:
        """The parts of the time: working, waiting, idle; None while there was none."""
        total = self.working_s + self.waiting_s + self.idle_s
        if total <= 0:
            return None
        return self.working_s / total, self.waiting_s / total, self.idle_s / total

    def shown(self) -> dict[str, Any]:
        """The sums as JSON."""
        shares = self.shares and dict(zip(("working", "waiting", "idle"), self.shares, strict=True))
        return {**asdict(self), "results": self.num_results, "shares": shares}


@dataclass
class RunOperations:
    """The operations of one run; `follow` brings them up to date. Any thread may call it."""

    folder: Path  # of the operations
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._log, self._results = (RecordFiles(self.folder, stem) for stem in (LOG, RESULTS))
        self._places: dict[str, RecordPlace] = {}
        self._pending: dict[int, OperationLine] = {}
        self._lines: deque[OperationLine] = deque(maxlen=MOST_LINES)
        self._failures: deque[OperationLine] = deque(maxlen=MOST_FAILURES)
        self._by_kind: Counter[str] = Counter()
        self._last, self._failed = -1, 0
        self._first_sent: float | None = None
        self._until = 0.0  # the end of the last operation
        self._busy_s = self._working_s = 0.0

    def follow(self) -> None:
        """Read what is new. OSError; CheckpointError when a file was altered."""
        with self._guard:
            try:
                self._read()
            except CheckpointError:  # a crash may have cut what was read before: look once more
                self._begin()
                self._read()

    def _read(self) -> None:
        for header in self._new(self._log):
            line = _log_line(header)
            if line is not None and line.seq > self._last:
                self._pending[line.seq] = line
        for header in self._new(self._results):
            line = _result_line(header, self._pending)
            if line is not None:
                self._add(line)

    def _new(self, files: RecordFiles) -> Iterator[dict[str, Any]]:
        place = self._places.get(files.stem)
        if place is not None and _is_cut(files, place):
            raise CheckpointError(f"{files.path(place.segment)}: it is shorter than it was.")
        if place is None:
            segments = files.segments()
            place = RecordPlace(segments[0], 0) if segments else None
        while place is not None:
            record = files.following(place, with_payload=False)
            if record is None:
                return
            place = self._places[files.stem] = RecordPlace(record.place.segment, record.end)
            yield record.header

    def _add(self, line: OperationLine) -> None:
        self._pending.pop(line.seq, None)
        self._last = max(self._last, line.seq)
        self._lines.append(line)
        self._by_kind[line.kind] += 1
        if line.error is not None:
            self._failed += 1
            self._failures.append(line)
        if line.sent is None or line.ended is None:
            return
        if self._first_sent is None:
            self._first_sent = self._until = line.sent
        busy_s = max(line.ended - max(line.sent, self._until), 0.0)
        self._busy_s += busy_s
        self._working_s += min(line.worked_s or 0.0, busy_s)
        self._until = max(self._until, line.ended)

    @property
    def totals(self) -> OperationTotals:
        """The sums of what was read."""
        span_s = 0.0 if self._first_sent is None else self._until - self._first_sent
        return OperationTotals(
            dict(sorted(self._by_kind.items())),
            self._failed,
            len(self._pending),
            self._working_s,
            self._busy_s - self._working_s,
            max(span_s - self._busy_s, 0.0),
        )

    def shown(self) -> dict[str, Any]:
        """The sums, the last operations, those that failed, and those that wait, as JSON; the
        newest first.
        """
        with self._guard:
            pending = sorted(self._pending.values(), key=lambda line: line.seq)[:MOST_LINES]
            now = time.time()
            waiting = [{**line.shown(), "waited_s": _between(line.sent, now)} for line in pending]
            return {
                "totals": self.totals.shown(),
                "last": [line.shown() for line in reversed(self._lines)],
                "failures": [line.shown() for line in reversed(self._failures)],
                "waiting": waiting,
            }


_recent: OrderedDict[Path, RunOperations] = OrderedDict()
_recent_guard = threading.Lock()


def operations_of(run: Path) -> RunOperations | None:
    """The operations of a run folder as they are now; None of a run that is not driven. OSError;
    CheckpointError when a file was altered.
    """
    folder = run / FOLDER
    if not folder.is_dir():
        with _recent_guard:
            _recent.pop(folder, None)
        return None
    with _recent_guard:
        operations = _recent.pop(folder, None) or RunOperations(folder)
        _recent[folder] = operations
        while len(_recent) > MOST_RUNS:
            _recent.popitem(last=False)
    operations.follow()
    return operations


def _log_line(header: Mapping[str, Any]) -> OperationLine | None:
    """The line of a record of the log; None of what is none."""
    seq, kind, values = header.get("seq"), header.get("kind"), _mapping(header.get("fields"))
    if type(seq) is not int or values is None:
        return None
    rows, tokens = _count(values.get("rows")), _count(values.get("tokens"))
    return OperationLine(seq, _kind(kind), rows, tokens, _moment(header.get("time")))


def _result_line(
    header: Mapping[str, Any], pending: Mapping[int, OperationLine]
) -> OperationLine | None:
    """The line of a record of the results; None of what is none. pending: what the log says."""
    seq, values = header.get("seq"), _mapping(header.get("fields"))
    if type(seq) is not int or values is None:
        return None
    work = _mapping(header.get("work")) or {}
    before = pending.get(seq)
    error = values.get("error")
    return OperationLine(
        seq,
        before.kind if before is not None else _kind(work.get("kind")),
        before.rows if before is not None else _count(work.get("rows")),
        before.tokens if before is not None else _count(work.get("tokens")),
        before.sent if before is not None else _moment(work.get("sent")),
        _moment(work.get("began")),
        _moment(header.get("time")),
        None if error is None else str(error)[:LONGEST_ERROR],
        None if error is None else str(values.get("category", "server"))[:LONGEST_KIND],
    )


def _is_cut(files: RecordFiles, place: RecordPlace) -> bool:
    with suppress(FileNotFoundError):  # it was dropped: the next file goes on
        return os.stat(files.path(place.segment)).st_size < place.offset
    return False


def _mapping(value: Any) -> dict[str, Any] | None:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _kind(value: Any) -> str:
    return value[:LONGEST_KIND] if isinstance(value, str) else "unknown"


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def _moment(value: Any) -> float | None:
    is_number = type(value) in (int, float) and math.isfinite(value)
    return float(value) if is_number and 0 <= value < 1e11 else None


def _between(begin: float | None, end: float | None) -> float | None:
    """Seconds; 0 where the clocks of two machines say that the end came first."""
    return None if begin is None or end is None else max(end - begin, 0.0)


# For a terminal
# --------------------------------------------------------------------------------------------------


def as_operations_table(totals: Sequence[tuple[str, OperationTotals | None]]) -> Table | None:
    """A line for each driven run; None without any. totals: with the ids of their runs, None for
    runs that are not driven.
    """
    driven = [(exp_id, one) for exp_id, one in totals if one is not None]
    if not driven:
        return None
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("driven run", no_wrap=True)
    for head in ("operations", "failed", "wait now", "working", "waiting", "idle"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("by kind", overflow="fold")
    for exp_id, one in driven:
        times, shares = (one.working_s, one.waiting_s, one.idle_s), one.shares or (0.0, 0.0, 0.0)
        cells = [_time_cell(s, share) for s, share in zip(times, shares, strict=True)]
        kinds = ", ".join(f"{count} {kind}" for kind, count in one.by_kind.items())
        counts = (str(one.num_results), str(one.failed), str(one.pending))
        table.add_row(exp_id[:8], *counts, *cells, Text(visible(kinds)))
    return table


def totals_or_none(run: Path) -> OperationTotals | None:
    """The sums of a run folder; None where they cannot be read, or there is nothing to be read."""
    with suppress(OSError, CheckpointError):
        operations = operations_of(run)
        return operations and operations.totals
    return None


def _time_cell(seconds: float, share: float) -> Text:
    return Text(f"{duration(seconds)} ({share:.0%})")
