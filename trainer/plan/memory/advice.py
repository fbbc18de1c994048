"""Finds changes with which a run needs less memory.

Each change is measured under fake tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from trainer import tasks
from trainer.config.auto import AUTO, with_recomputation
from trainer.config.deepspeed_config import PRESETS
from trainer.errors import ConfigError
from trainer.plan.memory.deepspeed_terms import Breakdown, Zero, host, training
from trainer.plan.memory.measure import (
    TRAINING,
    Measured,
    MeasuringError,
    measure,
    scale_to_rows,
    with_value,
)
from trainer.plan.memory.planned_rows import Specimens, binding_limit, training_batches

if TYPE_CHECKING:
    from trainer.devices import Device
    from trainer.plan.memory.measure import MeasureRequest
    from trainer.plan.memory.plan import Basis, MemoryPlan
    from trainer.plan.memory.subject import Subject

RECOMPUTED = "train.gradient_checkpointing"  # the key
_SHORTER = (2, 4, 8)  # limits that are tried: a half, a quarter and an eighth of the present one
_SHORTEST = 32
_MOST_ROWS = 1 << 24
# Numbers of rows, to see what one more row costs. A single row has no padding, so it would use
# other kernels.
_FEW, _SOME = 2, 4
STAGES = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")


@dataclass(frozen=True)
class Fix:
    """One change of the experiment or of a flag."""

    what: str
    total: int  # bytes per device after the change, in its phase
    saving: int
    phase: str = TRAINING


@dataclass(frozen=True)
class Stage:
    """The training step under a DeepSpeed file."""

    preset: str
    peak: Breakdown
    host: int


@dataclass(frozen=True)
class Advice:
    """The changes that would save memory."""

    stages: list[Stage]
    fixes: list[Fix] = field(default_factory=list)  # those that save most come first
    largest_rows: int = 0  # how many of the longest rows fit into a micro-batch
    largest_tokens: int = 0  # the same number in padded tokens
    seconds: float = 0.0  # CPU seconds that measuring took

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def largest_fitting(peak_at: Callable[[int], int], nbytes: int) -> int:
    """The largest number of rows that needs at most `nbytes`; 0 if one row needs more.

    peak_at: gives the bytes for a number of rows. They must not fall with more rows.
    """
    if peak_at(1) > nbytes:
        return 0
    high = 1
    while peak_at(high) <= nbytes and high < _MOST_ROWS:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak_at(middle) <= nbytes else (low, middle)
    return low


def stages(subject: Subject, basis: Basis, *, cublas: int) -> list[Stage]:
    """The training step under each file of ds_configs/ that the experiment goes with."""
    step = basis.worst
    possible: list[Stage] = []
    for preset in STAGES:
        if not (PRESETS / f"{preset}.json").is_file():
            continue
        try:
            zero = subject.zero_of(subject.with_deepspeed(preset))
        except ConfigError:  # Adafactor above stage 0, fp16 at it: nothing to choose
            continue
        peak = training(step, zero, cublas=cublas, is_first=basis.is_first)
        possible.append(Stage(preset, peak, host(step, zero)))
    return possible


def advise(subject: Subject, basis: Basis, device: Device | None, *, cublas: int) -> Advice:
    """The changes that save memory, with their predicted peaks.

    device: the device that the run should fit; None: no limit is known.
    """
    step, now = basis.worst, basis.total
    usable = device.usable(subject.sharding.world) if device is not None else None
    longest_rows = [
        (f"rows {rows}", _of_longest(subject, rows)) for rows in _counts(subject, basis)
    ]
    other_ways = _other_attention(subject, basis)
    now_recomputed = subject.cfg.train.gradient_checkpointing
    if now_recomputed != 1:
        values = with_value(subject.values, RECOMPUTED, True)
        change = f"{RECOMPUTED} {json.dumps(now_recomputed)} -> true"
        other_ways.insert(0, (change, subject.training_request(basis.numbers, values)))
    is_too_large = usable is not None and basis.total > usable
    shorter = _shorter(subject, basis, shortest_only=not is_too_large)
    requests = [*longest_rows, *other_ways, *shorter]
    steps = dict(
        zip(
            [name for name, _ in requests],
            measure([r for _, r in requests], subject.places),
            strict=True,
        )
    )

    def peak(measured: Measured) -> int:
        zero = subject.zero
        return training(measured, zero, cublas=cublas, is_first=basis.is_first).total

    points = [(rows, steps[f"rows {rows}"]) for rows in _counts(subject, basis)]
    points += [(len(basis.numbers), step)] if len(points) == 1 else []

    def peak_at(rows: int) -> int:
        return peak(scale_to_rows(points[0], points[1], rows))

    found_stages = stages(subject, basis, cublas=cublas)
    changes = [
        *[(name, peak(steps[name])) for name, _ in other_ways],
        *_limit_change(subject, basis, {name: peak(steps[name]) for name, _ in shorter}, usable),
        *_fewer_rows(subject, peak_at, usable),
        *[(f"--deepspeed {stage.preset}", stage.peak.total) for stage in found_stages],
    ]
    fixes = [Fix(what, total, now - total) for what, total in changes if total < now]
    fixes += fewer_evaluated(basis.plan, usable)
    longest = int(subject.train.lengths.max())
    rows = 0 if usable is None else largest_fitting(peak_at, usable)
    seconds = sum(measured.seconds for measured in steps.values())
    return Advice(
        found_stages, sorted(fixes, key=lambda fix: -fix.saving), rows, rows * longest, seconds
    )


def _counts(subject: Subject, basis: Basis) -> tuple[int, ...]:
    """The numbers of longest rows to measure. One is enough if the plan is a second point."""
    lengths, rows = subject.train.lengths, len(basis.numbers)
    if rows >= _SOME and bool((lengths[basis.numbers] == lengths.max()).all()):
        return (rows // 2,)
    return _FEW, _SOME


def _of_longest(subject: Subject, rows: int) -> MeasureRequest:
    order = np.argsort(-subject.train.lengths, kind="stable")
    return subject.training_request(np.resize(order, rows))


def _other_attention(subject: Subject, basis: Basis) -> list[tuple[str, MeasureRequest]]:
    """Requests for other values of a key named attention. flex is left out: it needs CUDA."""
    requests: list[tuple[str, MeasureRequest]] = []
    for block in type(subject.cfg).model_fields:
        schema = getattr(type(getattr(subject.cfg, block, None)), "model_fields", {}).get(
            "attention"
        )
        if schema is None:
            continue
        now = getattr(subject.cfg, block).attention
        for other in get_args(schema.annotation):
            if other not in (now, "flex"):
                values = with_value(subject.values, f"{block}.attention", other)
                requests.append(
                    (
                        f"{block}.attention {now} -> {other}",
                        subject.training_request(basis.numbers, values),
                    )
                )
    return requests


def _shorter(
    subject: Subject, basis: Basis, *, shortest_only: bool
) -> list[tuple[str, MeasureRequest]]:
    """Requests for the heaviest micro-batch, encoded again with shorter limits. With micro_tokens
    it then holds more rows.
    """
    limit = binding_limit(subject.task)
    if limit is None:
        return []
    key, value = limit
    limits = [value // part for part in _SHORTER if value // part >= _SHORTEST]
    requests: list[tuple[str, MeasureRequest]] = []
    for shorter in limits[-1:] if shortest_only else limits:
        values = with_value(subject.values, key, shorter)
        cfg = tasks.parse(values)
        task = tasks.load(cfg, subject.places)
        raw = subject.train.raw(basis.numbers)
        different = {id(row): row for row in raw}  # made-up rows are all the same object
        encoded = {number: Specimens(task, row) for number, row in different.items()}
        specimens = [encoded[id(row)] for row in raw]
        count = len(basis.numbers)
        if cfg.train.micro_tokens is not None:
            longest = max(int(specimen.lengths[0]) for specimen in specimens)
            count = max(1, min(cfg.train.micro_batch, cfg.train.micro_tokens // longest))
        rows = [
            specimens[number % len(specimens)].encoded_rows([0], is_drawn=True)[0]
            for number in range(count)
        ]
        requests.append((f"{key} {shorter}", subject.request("train", rows, values)))
    return requests


def _limit_change(
    subject: Subject, basis: Basis, peaks: dict[str, int], usable: int | None
) -> list[tuple[str, int]]:
    """The shortest limit that was tried; if the run does not fit, also the longest that fits."""
    if not peaks:
        return []
    key, value = binding_limit(subject.task) or ("", 0)
    tried = [(int(name.rpartition(" ")[2]), total) for name, total in peaks.items()]
    fitting = [
        (limit, total)
        for limit, total in tried
        if usable is not None and total <= usable < basis.total
    ]
    return [
        (f"max_length: {key} {value} -> {limit}", total)
        for limit, total in dict.fromkeys([*fitting[:1], tried[-1]])
    ]


def _fewer_rows(
    subject: Subject, peak_at: Callable[[int], int], usable: int | None
) -> list[tuple[str, int]]:
    """A smaller micro-batch with more accumulation: the largest that fits, or half of it."""
    train = subject.cfg.train
    if train.micro_tokens is not None or train.micro_batch == 1:
        return []
    fitting = largest_fitting(peak_at, usable) if usable is not None else train.micro_batch // 2
    rows = largest_divisor(
        train.global_batch // subject.sharding.groups, min(fitting, train.micro_batch - 1)
    )
    return [(f"train.micro_batch {train.micro_batch} -> {rows}", peak_at(rows))] if rows else []


def fewer_evaluated(plan: MemoryPlan, usable: int | None) -> list[Fix]:
    """Smaller batches in evaluation, if that phase has the peak: the largest that fits, or half.

    Everything but weights and optimizer is taken to grow with the number of rows.
    """
    worst = plan.peak
    if worst.name == TRAINING or worst.rows == 1:
        return []
    per_row = (worst.peak.activations + worst.peak.logits) / worst.rows
    fixed = worst.peak.total - per_row * worst.rows
    rows = worst.rows // 2 if usable is None else int((usable - fixed) // per_row)
    if not 1 <= rows < worst.rows:
        return []
    total = int(fixed + per_row * rows)
    return [
        Fix(f"train.eval_batch {worst.rows} -> {rows}", total, worst.peak.total - total, worst.name)
    ]


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`; 0 when most is below 1."""
    return next((size for size in range(min(most, number), 0, -1) if number % size == 0), 0)


def largest_rows(
    subject: Subject, presets: Sequence[str], *, usable: int, cublas: int
) -> dict[str, int]:
    """How many of the longest rows fit into a micro-batch, for each of these DeepSpeed files."""
    counts = (_FEW, _SOME)
    few, some = measure([_of_longest(subject, rows) for rows in counts], subject.places)
    most_rows: dict[str, int] = {}
    for preset in presets:
        zero = subject.zero_of(subject.with_deepspeed(preset))
        points = (counts[0], few), (counts[1], some)

        def peak_at(rows: int, zero: Zero = zero, points: Any = points) -> int:
            return training(scale_to_rows(points[0], points[1], rows), zero, cublas=cublas).total

        most_rows[preset] = largest_fitting(peak_at, usable)
    return most_rows


# Blocks computed again
# --------------------------------------------------------------------------------------------------


def recomputation_line(how: bool | int) -> str:
    """Which blocks are recomputed, as text."""
    if how is False:
        return "none"
    return "every block" if how == 1 else f"every {how}th block"


def recomputing(subject: Subject, how: bool | int) -> Subject:
    """The subject with this recomputation instead of its own."""
    values = with_value(subject.values, RECOMPUTED, how)
    return replace(subject, values=values, cfg=with_recomputation(subject.cfg, how))


def choose_recomputation(subject: Subject, device: Device | None) -> Subject:
    """The subject with the recomputation that "auto" stands for on a device, and a note about it.
    ConfigError without a device, or if memory cannot be planned.
    """
    if subject.cfg.train.gradient_checkpointing != AUTO:
        return subject
    how = least_recomputed(subject, device)
    note = f'{RECOMPUTED} "auto": {recomputation_line(how)} computed again'
    return replace(recomputing(subject, how), notes=[*subject.notes, note])


def least_recomputed(subject: Subject, device: Device | None) -> bool | int:
    """The least recomputation that fits: none, else every k-th block with the largest k that fits,
    else every block. ConfigError without a device, or if memory cannot be planned.
    """
    if device is None:
        raise ConfigError(
            f'{RECOMPUTED}="auto" needs to know the device. Run on a GPU, give --device, such as '
            "--device 24GiB, or say true, false or a number."
        )
    room = Room(subject, device)
    try:
        return room.least()
    except MeasuringError as error:
        raise ConfigError(
            f'{RECOMPUTED}="auto": no plan could be made. Say true, false or a number.\n{error}'
        ) from error


def fits_recomputed(subject: Subject, how: bool | int, device: Device) -> bool:
    """Whether a training step with this recomputation fits. True if memory cannot be planned."""
    room = Room(subject, device)
    try:
        return room.has(how)
    except MeasuringError:
        return True


class Room:
    """Compares the heaviest training step with the memory of a device."""

    def __init__(self, subject: Subject, device: Device) -> None:
        self._subject, self._cublas = subject, device.cublas_nbytes
        self._usable = device.bytes_to_fill(subject.sharding.world)
        self._batches = training_batches(subject)
        self.step = cache(self._heaviest)

    def least(self) -> bool | int:
        if self.has(False):
            return False
        blocks = self.step(False)[1].blocks

        def peak_at(every: int) -> int:
            return self.step(every)[0] if every <= blocks else self._usable + 1

        every = largest_fitting(peak_at, self._usable)
        return every if every > 1 else True

    def has(self, how: bool | int) -> bool:
        return self.step(how)[0] <= self._usable

    def _heaviest(self, how: bool | int) -> tuple[int, Measured]:
        """(highest peak of all micro-batches, the step that has it)."""
        subject = self._subject
        values: dict[str, Any] = with_value(subject.values, RECOMPUTED, how)
        requests = [subject.training_request(batch.numbers, values) for batch in self._batches]
        steps = measure(requests, subject.places)
        peaks = [
            training(step, subject.zero, cublas=self._cublas, is_first=batch.is_first).total
            for step, batch in zip(steps, self._batches, strict=True)
        ]
        worst = max(range(len(steps)), key=peaks.__getitem__)
        return peaks[worst], steps[worst]
