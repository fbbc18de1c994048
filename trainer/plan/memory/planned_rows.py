"""The rows that a plan measures: rows of the data, or without data rows that fill every limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trainer.data.content import rows_of
from trainer.data.epochs import Epochs
from trainer.data.mixed.mixture import Mixture
from trainer.data.order import (
    Lengths,
    Sharding,
    Sizes,
    evaluation_batches,
    sizes_of,
    windows_of_ranks,
)
from trainer.protocol.abilities import Answers, question_of
from trainer.protocol.task import DRAW, EPOCH, STEP, Task

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore
    from trainer.plan.memory.measure import Kind, MeasureRequest
    from trainer.plan.memory.subject import Subject

# Answers of so many tokens are generated and measured; memory is linear in the number of tokens.
SHORT_ANSWERS = (4, 8)
MOST_STEPS = 2000  # steps whose micro-batches are compared
_SPECIMENS = 8192
_DRAWN = 5


class RowsByNumber(Protocol):
    """Rows of a split by number."""

    lengths: np.ndarray  # (rows,) tokens on the device

    @property
    def sizes(self) -> Lengths:
        """The lengths, or lengths by axis and kind."""
        ...

    def encoded_rows(
        self, numbers: Iterable[int], *, is_drawn: bool
    ) -> list[dict[str, list[int]]]: ...

    def raw(self, numbers: Iterable[int]) -> list[dict[str, Any]]: ...


class StoredRows:
    """The rows of a token store."""

    def __init__(self, store: TokenStore, task: Task, split: str) -> None:
        self.lengths, self.sizes = np.asarray(store.lengths), sizes_of(store, task)
        self._store, self._task, self._split = store, task, split

    def encoded_rows(self, numbers: Iterable[int], *, is_drawn: bool) -> list[dict[str, list[int]]]:
        """Token ids of the rows. is_drawn: each with a random number, as in training."""
        return [_plain(self._store[int(number)], is_drawn) for number in numbers]

    def raw(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """The rows as text, in the order of `numbers`."""
        order = [int(number) for number in numbers]
        numbered = enumerate(islice(rows_of(self._task, self._split)(), max(order) + 1))
        rows = {number: row for number, row in numbered if number in set(order)}
        return [rows[number] for number in order]


class Specimens:
    """One row, repeated: without data, a plan measures a row that fills every limit."""

    def __init__(self, task: Task, row: dict[str, Any] | None = None) -> None:
        """row: the raw row; None: one that the task makes up."""
        self._row = task.specimen() if row is None else row
        self._encoded = task.encode(self._row)
        self.lengths = self.sizes = np.full(_SPECIMENS, task.length(self._encoded))

    def encoded_rows(self, numbers: Iterable[int], *, is_drawn: bool) -> list[dict[str, list[int]]]:
        """The one row, once for each number."""
        return [_plain(self._encoded, is_drawn) for _ in numbers]

    def raw(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        return [self._row for _ in numbers]


def epochs_of(rows: RowsByNumber, sharding: Sharding, seed: int) -> Epochs | Mixture:
    """The epochs of a plan's rows."""
    sources = rows.sizes.sources if isinstance(rows.sizes, Sizes) else ()
    return sharding.epochs(len(rows.lengths), seed, sources)


def _plain(row: Mapping[str, Any], is_drawn: bool) -> dict[str, list[int]]:
    fields = {name: [int(value) for value in values] for name, values in row.items()}
    return {**fields, DRAW: [_DRAWN], EPOCH: [0], STEP: [1]} if is_drawn else fields


@dataclass(frozen=True)
class Heavy:
    """A micro-batch that may need the most memory."""

    numbers: np.ndarray  # (rows,)
    is_first: bool  # of its step: no gradients of earlier micro-batches are in memory


def training_batches(subject: Subject) -> list[Heavy]:
    """The micro-batches of this run that may need the most memory."""
    train = subject.cfg.train
    seed = train.seed if train.order == "shuffled" else None
    return heaviest(subject.train, subject.sharding, seed=seed, steps=train.steps)


def heaviest(
    rows: RowsByNumber, sharding: Sharding, *, seed: int | None, steps: int
) -> list[Heavy]:
    """Candidates for the memory peak: the micro-batches with the most tokens (pads included) and
    with the most pairs of tokens, the first of a step and later ones apart.

    All ranks are searched, in MOST_STEPS steps: the first ones, and the first ones after every
    change of the weights of a mix.
    """
    is_packed = isinstance(rows.sizes, Sizes) and rows.sizes.is_packed
    # by (is_first, power of the lengths): the largest sum, and the rows that it belongs to
    largest: dict[tuple[bool, int], tuple[float, np.ndarray]] = {}
    for is_first, rows_RN in _micro_batches(rows, sharding, seed=seed, steps=steps):
        lengths_RN = rows.lengths[rows_RN].astype(np.float64)
        if not is_packed:
            lengths_RN[:] = lengths_RN.max(axis=1, keepdims=True)
        for power in (1, 2):
            sums_R, kind = (lengths_RN**power).sum(axis=1), (is_first, power)
            rank = int(sums_R.argmax())
            if kind not in largest or sums_R[rank] > largest[kind][0]:
                largest[kind] = (float(sums_R[rank]), rows_RN[rank])
    candidates: dict[tuple[bool, bytes], Heavy] = {}
    for (is_first, power), (total, numbers) in largest.items():
        # beside a later micro-batch of the same size lie the gradients of those before it
        if not is_first or total > largest.get((False, power), (0.0,))[0]:
            candidates[is_first, numbers.tobytes()] = Heavy(numbers, is_first)
    return list(candidates.values())


def _micro_batches(
    rows: RowsByNumber, sharding: Sharding, *, seed: int | None, steps: int
) -> Iterator[tuple[bool, np.ndarray]]:
    """Each micro-batch as (whether it is the first of its step, row numbers (ranks, rows)). Where
    ranks have different numbers of rows (micro_tokens), they are yielded one after the other.
    """
    are_alike = rows.lengths.min() == rows.lengths.max()
    for step in range(1) if are_alike else _searched(sharding, steps):
        window = windows_of_ranks(step, lengths=rows.sizes, sharding=sharding, seed=seed)
        for place, of_ranks in enumerate(window):
            if isinstance(of_ranks, np.ndarray):
                yield place == 0, of_ranks
            else:
                yield from ((place == 0, of_rank[None]) for of_rank in of_ranks)


def _searched(sharding: Sharding, steps: int) -> Iterator[int]:
    """The steps of a run whose micro-batches are compared: equally many after every change of the
    weights of a mix, for a source may have rows in no step before.
    """
    starts = [0]
    if sharding.mix is not None and sharding.mix.phases:
        starts = [start for start, _ in sharding.mix.phases if start < steps]
    each = MOST_STEPS // len(starts)
    for start, stop in pairwise([*starts, steps]):
        yield from range(start, min(stop, start + each))


def first_evaluated(lengths: np.ndarray, *, batch: int) -> np.ndarray:
    """The evaluation batch of the longest rows."""
    return evaluation_batches(len(lengths), lengths, batch=batch, world=1, rank=0)[0][0]


def binding_limit(task: Task) -> tuple[str, int] | None:
    """The key of the largest limit of length, with its value; None when the task has no limits."""
    return max(task.limits().items(), key=lambda item: item[1], default=None)


def request_of(subject: Subject, kind: Kind, rows: RowsByNumber, numbers: Any) -> MeasureRequest:
    """The request to measure the evaluation of these rows, or the generation of their answers."""
    return subject.request(kind, rows.encoded_rows(numbers, is_drawn=False))


def first_read(subject: Subject, *, batch: int) -> tuple[RowsByNumber, np.ndarray]:
    """The longest rows that a teacher reads, and the numbers of its heaviest batch."""
    rows = max(subject.train, subject.valid, key=lambda one: int(one.lengths.max()))
    return rows, first_evaluated(rows.lengths, batch=batch)


def teacher_requests(subject: Subject, *, batch: int) -> list[MeasureRequest]:
    """The request to measure the teacher's pass; [] without a teacher."""
    if getattr(subject.cfg, "teacher", None) is None:
        return []
    return [request_of(subject, "teach", *first_read(subject, batch=batch))]


def answer_requests(subject: Subject, numbers: Any) -> list[MeasureRequest]:
    """Requests to generate answers of two short lengths; other lengths are extrapolated."""
    if not subject.answers or not isinstance(subject.task, Answers):
        return []
    # scoring answers needs no device memory, so there are no references
    raw = [{**question_of(subject.task, row), "answers": []} for row in subject.valid.raw(numbers)]
    request = replace(request_of(subject, "answer", subject.valid, numbers), raw=raw)
    return [replace(request, answer_tokens=tokens) for tokens in SHORT_ANSWERS]
