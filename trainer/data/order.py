"""Which rows each rank and micro-batch of a step trains on: f(seed, step, groups of ranks).

A step takes the next `global_batch` rows of its epoch (epochs.py); with `bucket_steps`, the rows of
several steps are first sorted by length, so that a step has rows of similar length; with an
arrangement (arranged/), those of an epoch change places, so that a step has rows that belong
together. A window is one
rank's share of a step. It is cut into micro-batches of a fixed number of rows, or of at most
`micro_tokens` tokens. A step depends on no earlier step, so resuming at step n costs nothing.

Most tasks have one length per row. A task with the ability `Shapes` has one length for each field
that it pads; for a task that `Packs`, only real tokens count. Rows of different kinds
(`Shapes.kind_field`) are sorted apart, and never share a micro-batch that `micro_tokens` limits.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.arranged.arrangement import Arrangement, arranged
from trainer.data.epochs import Epochs
from trainer.data.mixed.by_source import source_of_labels
from trainer.data.mixed.mixture import Mix, Mixture, mixture_of
from trainer.data.mixed.store import sources_in
from trainer.errors import ConfigError, DataError
from trainer.protocol.abilities import ArrangesRows, Packs, RankPlace, Shapes, shared
from trainer.protocol.task import DRAW, EPOCH, STEP, Batch, Task
from trainer.runtime import distributed

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore

_WINDOWS_AHEAD = 2  # one being copied to the device, one ready
_POLL_S = 0.1  # how soon a waiting collation thread notices that its reader has stopped


@dataclass(frozen=True)
class Sharding:
    """How the rows of one optimizer step are distributed over ranks and micro-batches.

    Neighbouring ranks that share the tokens of a row are a group, which gets the same rows. Without
    sharing, each rank is a group. Raises ConfigError when micro_batch x groups does not divide
    global_batch.
    """

    global_batch: int  # rows per optimizer step, over all ranks
    micro_batch: int  # rows per group and forward; with micro_tokens the maximum
    world: int
    rank: int
    # the most tokens per group and forward, padding included; a longer row is alone in its batch
    micro_tokens: int | None = None
    # the rows of this many steps are sorted by length before they are cut into steps
    bucket_steps: int = 1
    is_whole: bool = False  # every row of an epoch is trained on (train.epochs)
    mix: Mix | None = None  # the rows have several sources (data.mix)
    sharing: int = 1  # ranks of a group

    def __post_init__(self) -> None:
        least = min(
            self.global_batch,
            self.micro_batch,
            self.world,
            self.bucket_steps,
            self.micro_tokens or 1,
        )
        if least < 1 or not 0 <= self.rank < self.world or self.world % self.sharing:
            raise ConfigError(
                f"{self}: want numbers of at least 1, 0 <= rank < world, and a world that sharing "
                "divides."
            )
        together = self.micro_batch * self.groups
        if self.global_batch % together:
            below = max(1, self.global_batch // together) * together
            raise ConfigError(
                f"train.global_batch={self.global_batch} is not a multiple of "
                f"micro_batch={self.micro_batch} x world={self.groups} = {together}.\nUse {below} "
                f"or {below + together}, or another micro_batch."
            )

    def epochs(
        self, num_rows: int, seed: int | None, sources: Sequence[int] = ()
    ) -> Epochs | Mixture:
        """The epochs of so many rows. DataError when they do not fill a step.

        sources: the rows of each source of a mix; (): not known, so that they are taken for one.
        """
        if self.mix is not None and sources:
            return mixture_of(self.mix, tuple(sources), self.global_batch, seed)
        return Epochs(num_rows, self.global_batch, seed, self.is_whole)

    @property
    def groups(self) -> int:
        """How many groups have rows of their own."""
        return self.world // self.sharing

    @property
    def group(self) -> int:
        """The number of this rank's group."""
        return self.rank // self.sharing

    @property
    def place(self) -> RankPlace:
        """This rank's place in its group."""
        return RankPlace(self.rank % self.sharing, self.sharing)

    @property
    def accumulation(self) -> int:
        """Micro-batches per group and optimizer step; with micro_tokens the minimum."""
        return self.global_batch // (self.micro_batch * self.groups)


@dataclass(frozen=True)
class Sizes:
    """The lengths and kinds of rows; rows of different kinds are batched apart."""

    # (rows, axes) int64: each axis is padded to the longest row of a micro-batch
    axes_NA: np.ndarray
    kinds_N: np.ndarray  # (rows,)
    is_packed: bool = False  # micro-batches are streams of real tokens without padding
    sources: tuple[int, ...] = ()  # the rows of each source of a mix
    arrangement: Arrangement | None = None  # which rows belong together in a step

    def __len__(self) -> int:
        return len(self.kinds_N)

    @property
    def lengths_N(self) -> np.ndarray:
        """(rows,) int64: the sum over all axes."""
        return self.axes_NA.sum(axis=1)


Lengths = np.ndarray | Sizes  # (rows,): one axis, one kind


def sizes_of(store: TokenStore, task: object) -> Sizes:
    """The sizes of a store's rows as its task pads or packs them."""
    is_packed, sources = isinstance(task, Packs) and task.is_packed, sources_in(store)
    by = task.arrangement(store, sources) if isinstance(task, ArrangesRows) else None
    if not isinstance(task, Shapes):
        return Sizes(store.axes(), np.zeros(len(store), np.int32), is_packed, sources, by)
    kind = task.kind_field()
    kinds = np.zeros(len(store), np.int32) if kind is None else store.numbers(kind)
    return Sizes(store.axes(task.padded_fields()), kinds, is_packed, sources, by)


def _sizes(lengths: Lengths) -> Sizes:
    if isinstance(lengths, Sizes):
        return lengths
    return Sizes(np.asarray(lengths, dtype=np.int64)[:, None], np.zeros(len(lengths), np.int32))


@dataclass(frozen=True)
class StepBatches:
    """One rank's share of an optimizer step."""

    step: int  # 0-based
    # micro-batches, equally many on all ranks, on the CPU, pinned when there is a GPU
    batches: list[Batch]
    rows: list[np.ndarray]  # the row numbers of each micro-batch
    units: Tensor  # () int64 on the CPU: units of all its batches
    sources: Sequence[Tensor] = ()  # of a mix: the source of each label of each micro-batch, (N,)


def bucketed_step_rows(
    step: int, lengths: Lengths, *, epochs: Epochs | Mixture, bucket_steps: int
) -> np.ndarray:
    """Like Epochs.rows, with less padding: the rows of `bucket_steps` steps (a bucket) are sorted
    by kind and length and cut into steps again, in an order drawn from (seed, epoch, bucket). An
    epoch has the same rows as without buckets.

    A seed of None ignores bucket_steps. The last bucket of an epoch may have fewer steps, and a
    step with rows of two epochs is a bucket of its own. Rows that belong together (Sizes) are put
    into one step instead.
    """
    by = lengths.arrangement if isinstance(lengths, Sizes) else None
    if by is not None and epochs.seed is not None:
        pool, place = epochs.pool(step)
        return arranged(epochs, pool, by).rows_SB[place]
    if bucket_steps == 1 or epochs.seed is None:
        return epochs.rows(step)
    span = epochs.span(step)
    bucket, place = divmod(step - span.start, bucket_steps)
    first = step - place
    count = min(bucket_steps, span.stop - first)
    pool = [epochs.rows(first + i) for i in range(count)]
    words = [epochs.seed, epochs.epoch(step), bucket]
    draws = np.random.PCG64(np.random.SeedSequence(words)).random_raw(count)
    ranked = _longest_first(np.concatenate(pool), _sizes(lengths))
    return ranked.reshape(count, -1)[np.argsort(draws, kind="stable")[place]]


def window_rows(
    step: int, *, lengths: Lengths, sharding: Sharding, seed: int | None
) -> list[np.ndarray]:
    """The rows of this rank at `step`: an array of row numbers for each micro-batch, the longest
    rows first. It is the part of its group in windows_of_ranks.
    """
    every = windows_of_ranks(step, lengths=lengths, sharding=sharding, seed=seed)
    return [of_groups[sharding.group] for of_groups in every]


def windows_of_ranks(
    step: int, *, lengths: Lengths, sharding: Sharding, seed: int | None
) -> list[np.ndarray] | list[list[np.ndarray]]:
    """The rows of every group of ranks for each micro-batch of `step`; without micro_tokens each is
    an array of shape (groups, micro_batch). Together they are the rows of bucketed_step_rows.

    The rows of the step are sorted by kind and length first. So a micro-batch has rows of similar
    length and little padding, and the ranks have neighbouring rows at the same time. All ranks get
    the same number of rows. Packed rows are also balanced by tokens, so that no rank waits for
    another; padded rows need no balance, because the longest row sets the time on any rank. With
    micro_tokens a micro-batch is as many rows of one kind as fit, and all ranks get the same number
    of micro-batches.
    """
    sizes = _sizes(lengths)
    rows = bucketed_step_rows(
        step,
        sizes,
        epochs=sharding.epochs(len(sizes), seed, sizes.sources),
        bucket_steps=sharding.bucket_steps,
    )
    ranked, world = _longest_first(rows, sizes), sharding.groups
    if sharding.micro_tokens is not None:
        cuts = _cut_by_tokens(ranked, sizes, sharding)
        return [cuts[start : start + world] for start in range(0, len(cuts), world)]
    dealt = ranked.reshape(sharding.accumulation, world * sharding.micro_batch)
    if sizes.is_packed and world > 1 and sharding.micro_batch > 1:
        tokens = sizes.axes_NA[dealt].sum(axis=-1)
        dealt = np.stack([_evenly(*pair, world=world) for pair in zip(dealt, tokens, strict=True)])
    return list(dealt.reshape(sharding.accumulation, world, sharding.micro_batch))


def _evenly(rows: np.ndarray, tokens: np.ndarray, *, world: int) -> np.ndarray:
    """The same rows, ordered by rank. Each row goes to the rank with the fewest tokens so far,
    among the ranks that do not have all their rows yet.
    """
    share = len(rows) // world
    had: list[list[int]] = [[] for _ in range(world)]
    fewest = [(0, rank) for rank in range(world)]
    for row, length in zip(rows.tolist(), tokens.tolist(), strict=True):
        sum_, rank = heappop(fewest)
        had[rank].append(row)
        if len(had[rank]) < share:
            heappush(fewest, (sum_ + length, rank))
    return np.array(had, dtype=rows.dtype).reshape(-1)


def _cut_by_tokens(ranked: np.ndarray, sizes: Sizes, sharding: Sharding) -> list[np.ndarray]:
    """Cut ranked rows into micro-batches of one kind that respect micro_tokens and micro_batch.
    The number of micro-batches is a multiple of the groups.
    """
    assert sharding.micro_tokens is not None
    axes_NA, kinds_N = sizes.axes_NA[ranked], sizes.kinds_N[ranked]
    starts, widest_A, real = [0], axes_NA[0], int(axes_NA[0].sum())
    for place in range(1, len(ranked)):
        wider_A, longer = np.maximum(widest_A, axes_NA[place]), real + int(axes_NA[place].sum())
        count = place - starts[-1] + 1
        tokens = longer if sizes.is_packed else count * int(wider_A.sum())
        fits = count <= sharding.micro_batch and tokens <= sharding.micro_tokens
        if fits and kinds_N[place] == kinds_N[starts[-1]]:
            widest_A, real = wider_A, longer
        else:
            starts.append(place)
            widest_A, real = axes_NA[place], int(axes_NA[place].sum())
    cuts = np.split(ranked, starts[1:])
    while len(cuts) % sharding.groups:
        index = max(range(len(cuts)), key=lambda i: len(cuts[i]))
        half = (len(cuts[index]) + 1) // 2
        cuts[index : index + 1] = [cuts[index][:half], cuts[index][half:]]
    return cuts


def padding_share(lengths: Lengths, sharding: Sharding, *, seed: int | None, steps: int) -> float:
    """The share of padding, 0 to 1, among the tokens of the first `steps` steps of all ranks."""
    sizes = _sizes(lengths)
    if sizes.is_packed:
        return 0.0
    everyone = [replace(sharding, rank=rank) for rank in range(sharding.world)]
    real = padded = 0
    for step in range(steps):
        for one in everyone:
            for rows in window_rows(step, lengths=sizes, sharding=one, seed=seed):
                axes_RA = sizes.axes_NA[rows]
                real += int(axes_RA.sum())
                padded += len(rows) * int(axes_RA.max(axis=0).sum())
    return 1 - real / max(1, padded)


def windows(
    store: TokenStore,
    task: Task,
    sharding: Sharding,
    *,
    seed: int,
    start_step: int,
    stop_step: int,
    is_shuffled: bool = True,
) -> Generator[StepBatches, None, None]:
    """The windows of steps start_step .. stop_step - 1, which a thread collates ahead of their use.

    It draws no global random number. An error in the thread is raised here. The thread ends with
    the generator: close the generator when you leave early. Raises DataError at once when the store
    has fewer rows than a step.
    """
    sizes = sizes_of(store, task)
    epochs = sharding.epochs(len(store), seed if is_shuffled else None, sizes.sources)
    return _ahead(
        _Collation(store, task, sharding, seed, epochs, sizes),
        start_step,
        stop_step,
    )


def evaluation_batches(
    num_rows: int, lengths: np.ndarray, *, batch: int, world: int, rank: int
) -> list[tuple[np.ndarray, bool]]:
    """(rows, counted) of every evaluation batch of this rank. Over all ranks, the counted batches
    hold every row once.

    Batches have rows of similar length, the longest first, and are the same for any world size. All
    ranks get the same number of batches, because a forward may be a collective: a rank with too few
    repeats a batch with counted = False.
    """
    if num_rows < 1:
        raise DataError("the valid split has no rows. Give it at least one.")
    order = _longest_first(np.arange(num_rows), _sizes(lengths[:num_rows]))
    batches = [order[start : start + batch] for start in range(0, num_rows, batch)]
    mine = [(rows, True) for rows in batches[rank::world]]
    short = -(-len(batches) // world) - len(mine)
    return mine + [(batches[-1], False)] * short  # the last batch is the cheapest


def _longest_first(rows: np.ndarray, sizes: Sizes) -> np.ndarray:
    """The rows sorted by kind, highest first, then by length, longest first; ties keep their order.
    So the step that needs the most memory comes first.
    """
    return rows[
        np.lexsort((-sizes.axes_NA[rows].sum(axis=1), -sizes.kinds_N[rows].astype(np.int64)))
    ]


@dataclass(frozen=True)
class _Collation:
    """Makes the window of a step number."""

    store: TokenStore
    task: Task
    sharding: Sharding
    seed: int  # of what is drawn for a row
    epochs: Epochs | Mixture
    sizes: Sizes

    def window(self, step: int) -> StepBatches:
        seed = self.epochs.seed
        rows = window_rows(step, lengths=self.sizes, sharding=self.sharding, seed=seed)
        batches: list[Batch] = []
        for numbers in rows:
            epochs = self.epochs.epochs_of(step, numbers).tolist()
            pairs = zip(numbers.tolist(), epochs, strict=True)
            batch = self.task.collate([self._row(step, *pair) for pair in pairs])
            batches.append(shared(self.task, batch, self.sharding.place))
        units = torch.stack([self.task.units(batch).to("cpu", torch.int64) for batch in batches])
        batches = [distributed.pin_batch(batch) for batch in batches]
        sources = self._sources(batches, rows, units)
        return StepBatches(step, batches, rows, units.sum(), sources)

    def _sources(
        self, batches: Sequence[Batch], rows: Sequence[np.ndarray], units: Tensor
    ) -> list[Tensor]:
        """The source of every label of each micro-batch; [] without a mix."""
        if not self.sizes.sources:
            return []
        ends = np.cumsum(self.sizes.sources)
        numbers = (torch.from_numpy(np.searchsorted(ends, one, side="right")) for one in rows)
        return [source_of_labels(*one) for one in zip(batches, numbers, units, strict=True)]

    def _row(self, step: int, number: int, epoch: int) -> dict[str, np.ndarray]:
        words = np.random.SeedSequence([self.seed, step, number]).generate_state(1, np.uint64)
        return {
            **self.store[number],
            DRAW: (words >> np.uint64(1)).astype(np.int64),
            EPOCH: np.array([epoch]),
            STEP: np.array([step + 1]),
        }


def _ahead(
    collation: _Collation, start_step: int, stop_step: int
) -> Generator[StepBatches, None, None]:
    """The windows in order, made by a thread that is at most `_WINDOWS_AHEAD` windows ahead."""
    ready: queue.Queue[Any] = queue.Queue(maxsize=_WINDOWS_AHEAD)
    closed = threading.Event()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def hand_over(item: Any) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            if device is not None:
                # per thread: pinning would otherwise open a context on GPU 0
                torch.cuda.set_device(device)
            for step in range(start_step, stop_step):
                if not hand_over(collation.window(step)):
                    return
            hand_over(None)
        except BaseException as error:
            hand_over(error)

    thread = threading.Thread(target=work, name="collate", daemon=True)

    def stop() -> None:
        closed.set()
        thread.join()

    # A script that dies of an error keeps this generator alive in its traceback, and the
    # interpreter then stops the daemon thread wherever it is, in the middle of C++ code too.
    # Handlers of atexit run before that.
    atexit.register(stop)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop()
        atexit.unregister(stop)
