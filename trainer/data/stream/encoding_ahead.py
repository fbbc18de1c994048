"""Processes that encode the chunks of a stream, those first that training asks for first.

Each process claims a chunk by a lock on one byte of a file, which ends with the process. So
processes of several ranks, and of other runs on the same rows, share the work.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import errors
from trainer.data import left_out
from trainer.data.control_tokens import ControlTokens, controls_of
from trainer.data.encoding import EncodeRows, begin_process, encode_noting
from trainer.data.formats import picked
from trainer.data.formats.picked import Placed
from trainer.data.stream.chunk import EncodedRow, write_chunk
from trainer.data.stream.layout import ChunkLayout
from trainer.data.stream.row_index import RowIndex
from trainer.errors import ConfigError, DataError, LatheError
from trainer.files.atomic import read_json, write_json
from trainer.protocol.abilities import EncodesRows

if TYPE_CHECKING:
    from trainer.protocol.task import Encoded, Row, Task

CUT = "texts longer than the limit (the rest is left out: data.stream makes no more rows of them)"
REPLACED = "rows of which nothing can be learnt (the next row stands in their place)"
_FAILED = "failed.json"
_CLAIMS = "claims"
_AT_ONCE = 64  # rows that are encoded by one call
_MOST_UNUSABLE = 1000  # rows without anything to learn, one after the other
_NICENESS = 5  # training goes first where cores are few
_TORN_S = 3600.0
_POLL_S = 0.2  # how soon a process sees that another one's chunk is there


@dataclass(frozen=True)
class ChunkEncoder:
    """Makes the chunks of a stream."""

    task: Task
    index: RowIndex
    layout: ChunkLayout

    def make(self, chunk: int) -> None:
        """Write a chunk. DataError names a row that cannot be encoded."""
        with left_out.reading() as notes:
            numbers = self.layout.rows(chunk).tolist()
            placed = self.index.rows(numbers)
            rows = [self._row(*pair) for pair in zip(numbers, placed, strict=True)]
            encoded = self._encode_blocks([row for _, pieces in rows for row in pieces])
            whole: list[EncodedRow] = []
            for number, texts in rows:
                first, *others = [next(encoded) for _ in texts]
                lost = sum(map(self.task.length, others))  # a row of a stream is one piece
                if lost:
                    first.is_truncated = True
                all_labels = (lost, self.task.length(first) + lost)
                labels = first.lost_labels if first.lost_labels[1] else all_labels
                whole.append(EncodedRow(number, first, labels))
        write_chunk(self.layout.path(chunk), whole, notes, self.task.length)

    def alone(self, number: int) -> dict[str, Any]:
        """A row by field, encoded here and now."""
        with left_out.reading():
            _, rows = self._row(number, self.index.rows([number])[0])
        return dict(next(self._encode_blocks(rows)))

    def check_reader(self) -> None:
        """ConfigError when the first rows, read one by one, are others than in the whole split: the
        task looks at several rows together, or changes their order.
        """
        whole = iter(self.rows_of(0, self.index.first))
        for number, placed in enumerate(self.index.first):
            alone = self.rows_of(number, [placed])
            if not alone:  # the rows behind it are numbered otherwise
                return
            if alone != list(itertools.islice(whole, len(alone))):
                raise ConfigError(
                    f"data.stream: {placed[0]} reads otherwise by itself than among the other "
                    "rows, so the task needs all of them first. Leave stream out."
                )

    def rows_of(self, number: int, placed: Sequence[Placed]) -> list[Row]:
        """What the task makes of raw rows, of which the first has this number: one row each; of a
        text that is too long several, of a row that it leaves out none.
        """
        with picked.reading(self.index.picked(number, placed)):
            return list(self.task.rows("train"))

    def _row(self, number: int, placed: Placed) -> tuple[int, list[Row]]:
        """The rows of a raw row, or of the next one that has any."""
        for step in range(min(_MOST_UNUSABLE, len(self.index))):
            other = (number + step) % len(self.index)
            at = placed if step == 0 else self.index.rows([other])[0]
            rows = self.rows_of(other, [at])
            if rows:
                if step:
                    left_out.note(placed[0], REPLACED)
                if len(rows) > 1:
                    left_out.note(at[0], CUT)
                return other, rows
        raise DataError(
            f"{placed[0]}: nothing can be learnt of this row, nor of the {_MOST_UNUSABLE} behind "
            "it. Take such rows out, or leave data.stream out.",
            place=placed[0],
        )

    def _encode_blocks(self, rows: list[Row]) -> Iterator[Encoded]:
        for start in range(0, len(rows), _AT_ONCE):
            yield from self._encode(rows[start : start + _AT_ONCE])

    @functools.cached_property
    def _encode(self) -> Any:
        task = self.task
        many: EncodeRows = (
            task.encode_rows
            if isinstance(task, EncodesRows)
            else lambda rows: [task.encode(row) for row in rows]
        )
        controls: ControlTokens | None = controls_of(task)
        return functools.partial(encode_noting, many, controls)


class EncoderPool:
    """The processes of this rank that encode the chunks which are missing."""

    def __init__(self, encoder: ChunkEncoder, *, start: int, processes: int) -> None:
        """start: the chunk that training needs first. This process forks: make it before CUDA or
        threads start.
        """
        self._layout = encoder.layout
        self._layout.folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("fork")
        self._processes = [
            context.Process(
                target=_work, args=(encoder, start, os.getpid()), daemon=True, name="encode"
            )
            for _ in range(processes)
        ]
        for process in self._processes:
            process.start()

    @property
    def is_done(self) -> bool:
        """Whether every chunk is there."""
        return all(process.exitcode == 0 for process in self._processes)

    def check(self) -> None:
        """Raise the error of a row that cannot be encoded; LatheError when a process was killed."""
        raise_failure(self._layout.folder)
        codes = [process.exitcode for process in self._processes]
        lost = [code for code in codes if code not in (None, 0)]
        if lost:
            raise LatheError(
                f"a process that encodes rows ended with {lost[0]}, perhaps for memory. Start "
                "again with fewer: --num_proc 1."
            )

    def stop(self) -> None:
        """End the processes; what they have written stays."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()


def raise_failure(folder: Path) -> None:
    """Raise the error that a process has left in the folder of a stream, if any."""
    failed = read_json(folder / _FAILED)
    if failed is not None:
        error: LatheError = getattr(errors, failed["kind"])(failed["text"])
        if isinstance(error, DataError):
            error.place, error.field = failed["place"], failed["field"]
        raise error


def forget_failure(folder: Path) -> None:
    """Remove the error of an earlier start."""
    (folder / _FAILED).unlink(missing_ok=True)


def tidy(folder: Path) -> None:
    """Remove the files that killed processes were writing; nobody writes one for an hour."""
    for torn in folder.glob("*/.*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # another rank tidies as well
            if time.time() - torn.stat().st_mtime > _TORN_S:
                torn.unlink()


def _work(encoder: ChunkEncoder, start: int, parent: int) -> None:
    """Make every chunk that nobody else makes, from `start` on, then those before it."""
    begin_process(parent)
    os.nice(_NICENESS)
    layout = encoder.layout
    order = [*range(start, layout.num_chunks), *range(start)]
    try:
        claims = os.open(layout.folder / _CLAIMS, os.O_RDWR | os.O_CREAT)
        finished = layout.finished()
        missing = [chunk for chunk in order if chunk not in finished]
        while missing:
            missing = [chunk for chunk in missing if not _is_made(encoder, chunk, claims)]
            if missing:
                time.sleep(_POLL_S)
    except LatheError as error:
        _fail(layout.folder, str(error), error)
        os._exit(0)
    except BaseException:
        _fail(layout.folder, traceback.format_exc(), None)
        os._exit(1)


def _is_made(encoder: ChunkEncoder, chunk: int, claims: int) -> bool:
    """Whether a chunk is there; it is made unless another process makes it now."""
    path = encoder.layout.path(chunk)
    if path.exists():
        return True
    with _claim(claims, chunk) as is_ours:
        if not is_ours:
            return False
        if not path.exists():
            encoder.make(chunk)
        return True


@contextlib.contextmanager
def _claim(claims: int, chunk: int) -> Iterator[bool]:
    try:
        fcntl.lockf(claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, chunk)
    except OSError:  # another process has it
        yield False
        return
    try:
        yield True
    finally:
        fcntl.lockf(claims, fcntl.LOCK_UN, 1, chunk)


def _fail(folder: Path, text: str, error: LatheError | None) -> None:
    kind = LatheError if error is None else type(error)
    place = error.place if isinstance(error, DataError) else None
    field = error.field if isinstance(error, DataError) else None
    values = {"text": text, "kind": kind.__name__, "place": place, "field": field}
    write_json(folder / _FAILED, values, is_durable=False)
