"""Finds the fastest way to train that fits into memory. It predicts time and memory for every
DeepSpeed file, micro-batch size and recomputation at the same global batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.errors import ConfigError
from trainer.plan.memory.advice import STAGES, largest_fitting
from trainer.plan.memory.deepspeed_terms import Zero, host, training
from trainer.plan.memory.measure import Measured, measure, scale_to_rows, with_value
from trainer.plan.time.step_time import Cluster, MicroBatches, StepTime, between, step_time

if TYPE_CHECKING:
    from trainer.plan.memory.measure import MeasureRequest
    from trainer.plan.memory.subject import Subject
    from trainer.plan.time.rates import Rates

_FEW, _SOME = 2, 8  # rows of the two micro-batches that are measured
_CUBLAS = 64 * 2**20  # the largest workspaces of cuBLAS
_CHECKPOINTING = "train.gradient_checkpointing"


@dataclass(frozen=True)
class Way:
    """One way to train."""

    preset: str
    micro_batch: int
    recompute_every: int | None  # every n-th block is recomputed in backward; None: none
    accumulation: int
    time: StepTime  # of one step
    peak: int  # bytes per device
    host: int

    def changes(self, values: dict[str, Any]) -> dict[str, Any]:
        """The experiment dictionary that trains this way."""
        changed = with_value(values, "train.micro_batch", self.micro_batch)
        every = self.recompute_every
        if every is None and values.get("train", {}).get("activation_offload"):
            changed = with_value(changed, "train.activation_offload", False)
        return with_value(changed, _CHECKPOINTING, every if every and every > 1 else bool(every))

    @property
    def text(self) -> str:
        every = self.recompute_every
        again = f", recomputing every {every}th block" if every else ""
        again = ", recomputing" if every == 1 else again
        return f"{self.preset}, micro-batch {self.micro_batch} x {self.accumulation}{again}"


@dataclass(frozen=True)
class _Points:
    """Two measured steps with few and with more rows; a step of any other size is interpolated."""

    typical: list[tuple[int, MicroBatches]]  # (rows, times); the rows have the middle length
    longest: list[tuple[int, Measured]]
    by_rows: dict[int, Measured] = field(default_factory=dict[int, Measured])

    def batches(self, rows: int, count: int) -> list[tuple[StepTime, float]]:
        """(time of one, how many) of a step's `count` micro-batches of `rows` rows each."""
        (few, less), (some, more) = self.typical
        of_one = between((few, less.of_one), (some, more.of_one), rows)
        of_last = between((few, less.of_last), (some, more.of_last), rows)
        return MicroBatches(of_one, of_last).of_step(count)

    def memory(self, rows: int) -> Measured:
        if rows not in self.by_rows:
            self.by_rows[rows] = scale_to_rows(self.longest[0], self.longest[1], rows)
        return self.by_rows[rows]


def ways(
    subject: Subject,
    rates: Rates,
    cluster: Cluster,
    *,
    usable: int,
    presets: Sequence[str] = STAGES,
    micro_batches: Sequence[int] | None = None,
    recomputed: Sequence[int | None] | None = None,
) -> list[Way]:
    """Every way that fits into `usable` bytes, the fastest first.

    micro_batches: the sizes to try; None: all that divide a rank's rows of a step. recomputed: n
    for every n-th block; None: try no block, all, and every second, fourth, eighth, ...
    """
    groups = cluster.world // subject.sharding.sharing
    share = subject.cfg.train.global_batch // groups
    sizes = micro_batches or [n for n in range(1, share + 1) if share % n == 0]
    zeros: dict[str, Zero] = {}
    for preset in presets:
        with contextlib.suppress(ConfigError):  # Adafactor above stage 0: nothing to choose
            zeros[preset] = subject.zero_of(subject.with_deepspeed(preset))
    all_ways: list[Way] = []
    for every, points in _measure(subject, rates, recomputed).items():
        for preset, zero in zeros.items():
            most = largest_fitting(
                lambda rows, zero=zero, points=points: _peak(points, zero, rows, share), usable
            )
            for rows in sizes:
                if rows > most:
                    continue
                now = _of(zero, share // rows)
                batches = points.batches(rows, share // rows)
                time = step_time(batches, points.longest[0][1], now, rates, cluster)
                peak = _peak(points, zero, rows, share)
                beside = host(points.memory(rows), now)
                all_ways.append(Way(preset, rows, every, share // rows, time, peak, beside))
    return sorted(all_ways, key=lambda way: (way.time.total, way.peak))


def why(best: Way, others: Sequence[Way]) -> str:
    """What the first way saves compared with the next one of another kind."""
    other = next((way for way in others if way.preset != best.preset), None) or next(
        iter(others), None
    )
    if other is None:
        return "nothing else fits"
    mine, theirs = best.time.shares(), other.time
    saved = {name: getattr(theirs, name) - share * best.time.total for name, share in mine.items()}
    part = max(saved, key=lambda name: saved[name])
    slower = other.time.total / best.time.total - 1
    return f"{other.text} takes {slower:.1%} longer, most of it in {part}"


def _of(zero: Zero, accumulation: int) -> Zero:
    return replace(zero, accumulates=accumulation > 1)


def _peak(points: _Points, zero: Zero, rows: int, share: int) -> int:
    now = _of(zero, max(1, share // rows))
    return training(points.memory(rows), now, cublas=_CUBLAS).total


def _measure(
    subject: Subject, rates: Rates, recomputed: Sequence[int | None] | None
) -> dict[int | None, _Points]:
    """Measured steps of few and of more rows, by `recompute_every`."""
    lengths = subject.train.lengths
    order = np.argsort(lengths, kind="stable")
    middle, longest = order[len(order) // 2 :], order[::-1]
    kernels = "fakegpu" if rates.overlaps_launches else "cpu"
    typical: list[MeasureRequest] = []
    heavy: list[MeasureRequest] = []
    every_so_many = (None, 1) if recomputed is None else recomputed
    for every in every_so_many:
        values = with_value(subject.values, _CHECKPOINTING, every or False)
        for rows in (_FEW, _SOME):
            step = subject.training_request(np.resize(longest, rows), values)
            heavy.append(replace(step, accumulates=True))
            step = subject.training_request(np.resize(middle, rows), values)
            how = {"device": kernels, "groups_rows": True}
            typical.append(replace(step, accumulates=True, **how))
    steps = measure([*heavy, *typical], subject.places)
    long, short = steps[: len(heavy)], steps[len(heavy) :]
    points = {
        every: _Points(
            [
                (rows, MicroBatches.of(step, rates))
                for rows, step in zip((_FEW, _SOME), short[start : start + 2], strict=True)
            ],
            list(zip((_FEW, _SOME), long[start : start + 2], strict=True)),
        )
        for start, every in zip(range(0, len(steps), 2), every_so_many, strict=False)
    }
    return points if recomputed is not None else points | _of_some_blocks(points[None], points[1])


def _of_some_blocks(none: _Points, all_: _Points) -> dict[int | None, _Points]:
    """Steps that recompute every second, fourth, eighth, ... block, interpolated: every recomputed
    block adds the same time and saves the same bytes.
    """
    points_of: dict[int | None, _Points] = {}
    blocks, every = none.longest[0][1].blocks, 2
    while every <= blocks:
        again = len(range(0, blocks, every))

        def part(low: StepTime, high: StepTime, again: int = again) -> StepTime:
            return between((0, low), (blocks, high), again)

        typical = [
            (rows, MicroBatches(part(low.of_one, high.of_one), part(low.of_last, high.of_last)))
            for (rows, low), (_, high) in zip(none.typical, all_.typical, strict=True)
        ]
        longest = [
            (rows, some_again(low, high, again, blocks))
            for (rows, low), (_, high) in zip(none.longest, all_.longest, strict=True)
        ]
        points_of[every] = _Points(typical, longest)
        every *= 2
    return points_of


def some_again(none: Measured, all_: Measured, again: int, blocks: int) -> Measured:
    """The step with `again` of its blocks recomputed: its bytes, and the host's calls."""
    calls = {
        name: round(none.calls.get(name, 0) + (most - none.calls.get(name, 0)) * again / blocks)
        for name, most in all_.calls.items()
    }
    return replace(scale_to_rows((0, none), (blocks, all_), again), calls=calls)
