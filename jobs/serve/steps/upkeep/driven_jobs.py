"""The jobs of driven runs: when one that was put aside is woken, and when one that ended badly is
begun again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.record.state_table import BAD_INPUT
from jobs.record.times import now
from jobs.serve.job_view import FAILED
from jobs.serve.steps.upkeep.hosts import host_for, is_shared
from jobs.serve.tickets import Checked
from trainer.errors import StorageError
from trainer.files.atomic import create_json, read_json
from trainer.operations.operation_log import FOLDER, LOG
from trainer.operations.records import RecordFiles, RecordPlace
from trainer.operations.results import RESULTS, OperationResults

if TYPE_CHECKING:
    from jobs.record.paths import BaseFolder
    from jobs.record.row import Row
    from jobs.serve.keeper import Keeper
    from jobs.serve.tickets import Ticket, TicketFolder

MOST_IN_VAIN = 3  # starts one after another that gave no new result


@dataclass
class _Look:
    """What was last seen of the files of a run."""

    mark: tuple[tuple[str, int, int], ...]
    last_operation: int
    last_result: int


@dataclass
class DrivenJobs:
    """What a keeper remembers of driven runs. Everything is read again by another server."""

    _looks: dict[Path, _Look] = field(default_factory=dict[Path, _Look])
    # run -> the attempt that ended badly, the last result then, and how often it was in vain
    _ends: dict[Path, tuple[int, int, int]] = field(
        default_factory=dict[Path, tuple[int, int, int]]
    )
    _placing: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def place(self, keeper: Keeper, ticket: Ticket) -> Generator[str | None]:
        """The run whose worker is to compute a job; None: a worker of its own. Inside, nobody else
        of this server looks for one, so that what is sent there counts for the next.
        """
        if not is_shared(ticket):
            yield None
            return
        with self._placing:
            yield host_for(keeper, ticket)

    def rest(self, base: BaseFolder, row: Row, *, reserve: int) -> str | None:
        """None when a run goes on; "" while it is put aside, for the next operation wakes it, or
        while the disk that has refused it has no more than `reserve` bytes free; or why it does
        not go on.
        """
        if row.state not in ("paused", *FAILED):
            return None
        run = base.run(row.exp_id)
        if row.state == "paused":
            return None if self.has_work(run.path) else ""
        status = read_json(run.status) or {}
        is_of_disk = StorageError.__name__ in str(status.get("error"))
        if is_of_disk and shutil.disk_usage(base.path).free <= reserve:
            return ""
        return self.why_it_stays(run.path, row, is_of_disk=is_of_disk)

    def has_work(self, run: Path) -> bool:
        """Whether a run has an operation without a result."""
        look = self._look(run / FOLDER)
        return look.last_operation > look.last_result

    def why_it_stays(self, run: Path, row: Row, *, is_of_disk: bool = False) -> str | None:
        """Why a run that ended badly is not begun again; None when it is. is_of_disk: the disk
        refused it, which is over.
        """
        reason = row.reason or f"it ended as {row.state}"
        if reason.startswith(BAD_INPUT) and not is_of_disk:
            return reason
        last = self._look(run / FOLDER).last_result
        attempt, before, in_vain = self._ends.get(run, (0, -2, 0))
        if attempt != row.attempt:
            in_vain = in_vain + 1 if last == before else 1
            self._ends[run] = (row.attempt, last, in_vain)
        if in_vain >= MOST_IN_VAIN:
            return f"{in_vain} starts gave no new result, the last one: {reason}"
        return None

    def forget(self, run: Path) -> None:
        """Forget a run that has ended."""
        self._looks.pop(run / FOLDER, None)
        self._ends.pop(run, None)

    def _look(self, folder: Path) -> _Look:
        mark = _mark(folder)
        look = self._looks.get(folder)
        if look is None or look.mark != mark:
            results = OperationResults(folder)
            results.follow()
            look = _Look(mark, last_operation(folder), results.last_seq)
            self._looks[folder] = look
        return look


def _mark(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes with every operation and every result of a run."""
    marks: list[tuple[str, int, int]] = []
    for stem in (LOG, RESULTS):
        segments = RecordFiles(folder, stem).segments()
        if segments:
            path = RecordFiles(folder, stem).path(segments[-1])
            try:
                facts = os.stat(path)
            except OSError:
                continue
            marks.append((path.name, facts.st_size, facts.st_mtime_ns))
    return tuple(marks)


def last_operation(folder: Path) -> int:
    """The number of the last operation in a log that another process may write; -1 without one."""
    files = RecordFiles(folder, LOG)
    for segment in reversed(files.segments()):
        last, place = -1, RecordPlace(segment, 0)
        while (record := files.read(place, with_payload=False)) is not None:
            last, place = int(record.header["seq"]), RecordPlace(segment, record.end)
        if last >= 0:  # else the disk refused the first record of a new file
            return last
    return -1


def note_checked(folder: TicketFolder, ticket: Ticket) -> bool:
    """Write down that a job has no files to be checked: its rows come with its operations."""
    create_json(folder.check_file, Checked(at=now()).model_dump(mode="json"))
    return True
