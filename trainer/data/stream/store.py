"""The training rows of a run, which processes encode while the run trains on them.

It stands in the place of a token store, for the loop: whoever looks at a row, or at its length,
waits until its chunk is there. Rows have the numbers that they would have in a whole store, so an
epoch has the same order.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from trainer.config.identity import canonical_json
from trainer.data import left_out
from trainer.data.stream.chunk import LENGTHS, Chunk
from trainer.data.stream.encoding_ahead import (
    ChunkEncoder,
    EncoderPool,
    forget_failure,
    raise_failure,
    tidy,
)
from trainer.data.stream.layout import ChunkLayout
from trainer.data.stream.row_index import RowIndex
from trainer.data.token_store import TokenStore

if TYPE_CHECKING:
    from trainer.protocol.task import Task

log = logging.getLogger(__name__)

_FORMAT = 1
_OPEN_CHUNKS = 32  # chunks that are mapped at a time
_POLL_S = 0.01
_TELL_EVERY_S = 10.0


class Judge(Protocol):
    """Is told of every chunk."""

    def meet(self, chunk: Chunk) -> None:
        """Called when training first needs the chunk. May raise what is wrong with it."""
        ...

    def close(self) -> None:
        """Called when training ends."""
        ...


def is_streamed(task: Any) -> bool:
    """Whether the experiment of a task streams its training rows."""
    return bool(getattr(getattr(task.cfg, "data", None), "stream", False))


class StreamStore(TokenStore):
    """The rows of the training split in the order of an epoch, as chunks."""

    def __init__(self, task: Task, index: RowIndex, cache_dir: Path) -> None:  # pyright: ignore[reportMissingSuperCall]
        self._task, self._index, self._cache = task, index, cache_dir
        data = task.cfg.data.model_dump(mode="json")
        identity = canonical_json([_FORMAT, index.digest, task.encoding_id(), data])
        self.meta: dict[str, Any] = {
            "split": "train",
            "rows": len(index),
            "digest": hashlib.sha256(identity.encode()).hexdigest(),
        }
        self._chunks: OrderedDict[int, Chunk] = OrderedDict()
        self._encoder: EncoderPool | None = None
        self._judge: Judge | None = None
        self._met: set[int] = set()
        self._lock = threading.Lock()
        self._is_told = False

    # Before the first step
    # ----------------------------------------------------------------------------------------------

    def begin(self, *, seed: int | None, epoch: int, place: int, processes: int) -> None:
        """Encode the rows from `place` of `epoch` on, in other processes. seed: None keeps the
        order of the data.

        Chunks in the order of an earlier epoch are used if at least half of them are there.
        """
        self.layout = self._layout(seed, epoch)
        for earlier in range(epoch):
            layout = self._layout(seed, earlier)
            if len(layout.finished()) * 2 >= layout.num_chunks:
                self.layout, place = layout, 0
                break
        self.folder = self.layout.folder
        forget_failure(self.folder)
        tidy(self.folder)
        self.start_chunk = place // self.layout.chunk_rows
        encoder = ChunkEncoder(self._task, self._index, self.layout)
        self._began, self._chunks_before = time.monotonic(), len(self.layout.finished())
        self.layout.places(np.zeros(1, np.int64))  # made once, before other processes share it
        self._encoder = EncoderPool(encoder, start=self.start_chunk, processes=processes)

    def check_reader(self) -> None:
        """ConfigError when the task cannot read a row by itself."""
        ChunkEncoder(self._task, self._index, self._layout(None, 0)).check_reader()

    def alone(self, index: int) -> dict[str, np.ndarray]:
        """A row by field, (tokens,) int32 each, without waiting for its chunk."""
        row = ChunkEncoder(self._task, self._index, self.layout).alone(index)
        return {name: np.asarray(ids, dtype=np.int32) for name, ids in row.items()}

    def first_rows(self, count: int) -> list[dict[str, np.ndarray]]:
        """Up to so many of the rows that are encoded first."""
        chunk = self._chunk(self.start_chunk)
        count = min(count, len(chunk.array(LENGTHS)))
        return [chunk.row(place) for place in range(count)]

    def _layout(self, seed: int | None, epoch: int) -> ChunkLayout:
        name = f"{self.digest[:32]}-{'as-given' if seed is None else seed}-{epoch}-v{_FORMAT}"
        return ChunkLayout(self._cache / "streams" / name, len(self), seed, epoch)

    def judge(self, judge: Judge) -> None:
        """Have `judge` told of every chunk, in the order in which training needs them. Those
        that an earlier start has trained on come first.
        """
        self._judge = judge
        for chunk in range(self.start_chunk):
            if self.layout.path(chunk).exists():
                self._chunk(chunk)

    def close(self) -> None:
        """End the processes that encode, and tell what was met."""
        if self._judge is not None:
            self._judge.close()
            self._judge = None
        if self._encoder is not None:
            self._encoder.stop()
            self._encoder = None

    # The rows
    # ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.meta["rows"]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        chunk, place = self.layout.places(np.array([index]))
        return self._chunk(int(chunk[0])).row(int(place[0]))

    @property
    def lengths(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._column(lambda chunk: chunk.array(LENGTHS))

    def axes(self, fields: Sequence[str] = ()) -> np.ndarray:
        def sizes(chunk: Chunk) -> np.ndarray:
            arrays = [chunk.sizes(name) for name in fields] or [chunk.array(LENGTHS)]
            return np.stack(arrays, axis=1)

        return self._column(sizes)

    def sizes(self, field: str) -> np.ndarray:
        return self._column(lambda chunk: chunk.sizes(field))

    def numbers(self, field: str) -> np.ndarray:
        return self._column(lambda chunk: chunk.numbers(field))

    def _column(self, read: Callable[[Chunk], np.ndarray]) -> np.ndarray:
        return cast("np.ndarray", _Column(self, read))

    def of_rows(self, rows: np.ndarray, read: Callable[[Chunk], np.ndarray]) -> np.ndarray:
        """What `read` gives of each row, in the shape of `rows`."""
        flat = rows.reshape(-1)
        chunks, places = self.layout.places(flat)
        values: np.ndarray | None = None
        for number in np.unique(chunks):
            is_here = chunks == number
            of_chunk = read(self._chunk(int(number)))[places[is_here]]
            if values is None:
                values = np.empty((len(flat), *of_chunk.shape[1:]), of_chunk.dtype)
            values[is_here] = of_chunk
        assert values is not None, "somebody asks for rows"
        return values.reshape(*rows.shape, *values.shape[1:])

    # Chunks
    # ----------------------------------------------------------------------------------------------

    def _chunk(self, number: int) -> Chunk:
        """The chunk, once it is there. The lock keeps the LRU and the judges in one order."""
        with self._lock:
            chunk = self._chunks.get(number)
            if chunk is None:
                self._wait_for(number)
                chunk = self._chunks[number] = Chunk(self.layout.path(number))
                if len(self._chunks) > _OPEN_CHUNKS:
                    self._chunks.popitem(last=False)
            self._chunks.move_to_end(number)
            if number not in self._met and self._judge is not None:
                self._met.add(number)
                self._judge.meet(chunk)
            return chunk

    def _wait_for(self, number: int) -> None:
        """Wait until a chunk is there. Raises what keeps it from being made."""
        path = self.layout.path(number)
        raise_failure(self.folder)  # of any chunk: the run would stop at it anyway
        began = last = time.monotonic()
        while not path.exists():
            time.sleep(_POLL_S)
            now = time.monotonic()
            if now - last >= _TELL_EVERY_S:
                last = now
                count = len(self.layout.finished())
                log.info(
                    "training waits for rows: %d of %d chunks are encoded, %.0f s waited",
                    *(count, self.layout.num_chunks, now - began),
                )
            if self._encoder is not None:
                self._encoder.check()
                if self._encoder.is_done and not path.exists():  # somebody has removed it since
                    ChunkEncoder(self._task, self._index, self.layout).make(number)
        if self._encoder is not None and self._encoder.is_done and not self._is_told:
            self._is_told = True
            num_new = self.layout.num_chunks - self._chunks_before
            seconds = time.monotonic() - self._began
            log.info(
                "train: all %s rows are encoded (%d chunks in %.1f s)",
                *(f"{len(self):,}", num_new, seconds),
            )

    # What is known of the split
    # ----------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        return {"rows": len(self), "is_streamed": True}

    def lost_labels(self) -> tuple[int, int]:
        return 0, 0  # judged chunk by chunk (statistics/met_rows.py)

    def row_hashes(self, fields: Sequence[str]) -> np.ndarray:
        raise NotImplementedError("the rows are encoded while they are trained on")

    def raw_hashes(self) -> np.ndarray | None:
        return None

    def cuts(self) -> dict[str, dict[str, Any]]:
        return {}

    def notes(self) -> left_out.Notes:
        return left_out.Notes()


class _Column:
    """An array by row, of which single rows are asked for."""

    def __init__(self, store: StreamStore, read: Callable[[Chunk], np.ndarray]) -> None:
        self._store, self._read = store, read

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        return self._store.of_rows(np.asarray(rows), self._read)
