"""Predicts the seconds of one optimizer step from its operators, the rates of a device, and what
DeepSpeed does besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from trainer.plan.operators import Operator

if TYPE_CHECKING:
    from trainer.plan.memory.deepspeed_terms import Zero
    from trainer.plan.memory.measure import Measured
    from trainer.plan.time.rates import Link, Rates


@dataclass(frozen=True)
class _HostWork:
    """What the host does besides the model's operators, counted in launches, by stage of ZeRO."""

    per_weight: dict[int, float]  # for each weight in a step
    per_weight_and_batch: dict[int, float]  # for each weight in a micro-batch
    # For each module that runs, once in forward and once in backward: Python, and a cold cache. At
    # stage 3 it also gathers its weights before it runs and releases them afterwards.
    per_visit: dict[int, float]


_STEP, _PER_BATCH = 400, 400  # for each step and each micro-batch, at any stage
# Fitted by eye to 70 runs of ten small models on a CPU (docs/log.md).
_ON_CPU = _HostWork(
    per_weight={0: 6, 1: 12, 2: 12, 3: 25},
    per_weight_and_batch={0: 0, 1: 2, 2: 8, 3: 20},
    per_visit={0: 12, 1: 12, 2: 12, 3: 45},
)
# Fitted by eye to 14 runs of narrow models on an H200 (benchmarks/gpu_host.py, docs/log.md), where
# a launch takes longer than on a CPU and Python does not. Stage 1 was not measured.
_ON_GPU = _HostWork(
    per_weight={0: 15, 1: 22, 2: 22, 3: 19},
    per_weight_and_batch={0: 0, 1: 2, 2: 6, 3: 20},
    per_visit={0: 5, 1: 4, 2: 4, 3: 48},
)
# How often a rank's fp32 numbers are read besides the optimizer: norm, clipping, copies.
_PASSES = {0: 3, 1: 5, 2: 5, 3: 5}
_ADDED = 3  # passes to add the gradients of a micro-batch to those of earlier ones
# Passes over the gradients when they are reduced through a buffer: they are copied into new memory
# (_FLATTENED), then scaled and copied back (_COPIED).
_FLATTENED, _COPIED = {0: 2, 1: 5, 2: 5, 3: 3}, {0: 4, 1: 6, 2: 6, 3: 6}
# The same for a single rank, which flattens nothing before stage 3.
_FLATTENED_ALONE, _COPIED_ALONE = {0: 0, 1: 0, 2: 0, 3: 3}, {0: 0, 1: 4, 2: 4, 3: 6}
# The same for a gather of stage 3: the sent bytes, and every weight assembled from its parts.
_PUT_TOGETHER = 4
# On a CPU, operators take this many times longer in a step than alone in a calibration, which keeps
# the fastest of several runs and has more of its data in caches.
IN_A_STEP = 1.06
_HIDDEN = 0.9  # share of the communication that is hidden if it can overlap with backward


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step, by part."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0  # operators that only move memory
    launches: float = 0.0  # the host, while the device waits for it
    optimizer: float = 0.0
    communication: float = 0.0  # the part that no computation hides
    input: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    def shares(self) -> dict[str, float]:
        """Each part as a share of the total."""
        return {name: value / self.total for name, value in asdict(self).items()}

    def times(self, factor: float) -> StepTime:
        """Every part scaled by a factor."""
        return StepTime(**{name: factor * value for name, value in asdict(self).items()})

    def plus(self, other: StepTime) -> StepTime:
        """The sum of both, part by part."""
        theirs = asdict(other)
        return StepTime(**{name: value + theirs[name] for name, value in asdict(self).items()})


@dataclass(frozen=True)
class Work:
    """The operators of one micro-batch."""

    operators: list[tuple[Operator, float]]  # (operator, how often it runs)
    tracked: float = 0.0  # calls of the host while autograd records a graph
    plain: float = 0.0  # calls of the host without a graph

    @classmethod
    def of(cls, step: Measured) -> Work:
        """Any micro-batch of a measured step, except the last one."""
        return cls._of(step.operators, step.calls)

    @classmethod
    def of_last(cls, step: Measured) -> Work:
        """The last micro-batch of a measured step."""
        if not step.operators_of_last:
            return cls.of(step)
        return cls._of(step.operators_of_last, step.calls_of_last)

    @classmethod
    def _of(cls, values: list[list[Any]], calls: Mapping[str, float]) -> Work:
        operators = [
            (Operator(name, flops, nbytes, tuple(sides), dtype), float(times))
            for name, flops, nbytes, sides, dtype, times in values
        ]
        return cls(operators, calls.get("tracked", 0.0), calls.get("plain", 0.0))

    @property
    def flops(self) -> float:
        return sum(operator.flops * times for operator, times in self.operators)


def flops_of(step: Measured, count: float) -> float:
    """FLOPs of a step with `count` micro-batches like those of a measured step."""
    return max(0.0, count - 1) * Work.of(step).flops + min(1.0, count) * Work.of_last(step).flops


@dataclass(frozen=True)
class MicroBatches:
    """The times of the micro-batches in one step: all take the same, except for the last one."""

    of_one: StepTime
    of_last: StepTime

    @classmethod
    def of(cls, step: Measured, rates: Rates) -> MicroBatches:
        """The times of the micro-batches of a measured step."""
        one = computing(Work.of(step), rates)
        return cls(one, computing(Work.of_last(step), rates))

    def of_step(self, count: float, *, share: float = 1.0) -> list[tuple[StepTime, float]]:
        """(time, how many) of `share` of a step of `count` micro-batches."""
        return [(self.of_one, share * max(0.0, count - 1)), (self.of_last, share * min(1.0, count))]


def computing(work: Work, rates: Rates) -> StepTime:
    """Seconds of the operators of one micro-batch and of all launches of the host. hide_launches()
    leaves out the launches that a GPU does not wait for.
    """
    parts: dict[str, float] = {"matmul": 0.0, "attention": 0.0, "memory": 0.0}
    for operator, times in work.operators:
        parts[operator.kind] += times * operator_s(operator, rates)
    if not rates.overlaps_launches:
        parts = {name: IN_A_STEP * seconds for name, seconds in parts.items()}
    launches = work.tracked * rates.launch_s + work.plain * rates.plain_launch_s
    return StepTime(**parts, launches=launches)


def between(few: tuple[int, StepTime], some: tuple[int, StepTime], rows: int) -> StepTime:
    """The time of a micro-batch of `rows` rows, interpolated: every part is linear in the rows."""
    (few_rows, less), (some_rows, more) = few, some
    part = (rows - few_rows) / (some_rows - few_rows)
    values = asdict(more)
    return StepTime(
        **{name: max(0.0, low + part * (values[name] - low)) for name, low in asdict(less).items()}
    )


def hide_launches(time: StepTime, rates: Rates) -> StepTime:
    """`time` without the launches that overlap with the work of a GPU."""
    if not rates.overlaps_launches:
        return time
    of_device = time.matmul + time.attention + time.memory + time.optimizer
    return replace(time, launches=max(0.0, time.launches - of_device))


def operator_s(operator: Operator, rates: Rates) -> float:
    """Seconds of one operator on the device."""
    flops, count = operator.flops, operator.sides[0] if operator.sides else 1
    moving = rates.moving_s(operator.name, operator.nbytes)
    if not flops:
        return moving
    if operator.is_fused:
        return max(rates.attention_s(operator.name, flops, count=count), moving)
    product = rates.product_s(flops / count, count=count, dtype=operator.dtype)
    return max(product, operator.nbytes / rates.memory_bytes_per_s)


@dataclass(frozen=True)
class Cluster:
    """How many devices, on how many machines."""

    world: int
    nodes: int = 1

    def link(self, rates: Rates) -> Link:
        """The bandwidth and latency of a ring over all ranks. A data sheet gives the rate of one
        adapter. Every device has an adapter, and NCCL's rings use all of them at the same time; a
        calibration has measured them together.
        """
        if self.nodes == 1:
            return rates.within
        adapters = 1 if rates.is_measured else self.world // self.nodes
        speed = min(rates.within.bytes_per_s, adapters * rates.between.bytes_per_s)
        return replace(rates.between, bytes_per_s=speed)


def step_time(
    batches: Sequence[tuple[StepTime, float]],
    step: Measured,
    zero: Zero,
    rates: Rates,
    cluster: Cluster,
) -> StepTime:
    """The seconds of one optimizer step.

    batches: (computing() of a micro-batch, how many there are of it). step: any measured step of
    the model, for the sizes of the model.
    """
    together = StepTime()
    for time, count in batches:
        together = together.plus(time.times(count))
    count = sum(number for _, number in batches)
    own = step.trainable / (zero.world if zero.stage else 1)
    if zero.offloads_optimizer:
        transfer_s = (4 + zero.width) * own / rates.host_bytes_per_s  # gradients down, weights up
        update = own * rates.host_update_s + transfer_s
    else:
        passed = 4 * _PASSES[zero.stage] * own
        update = own * rates.update_s + passed / rates.memory_bytes_per_s
    # gradients are copied into their sums, into reduction buffers, and back
    nbytes = zero.width * step.trainable
    is_alone = zero.world == 1
    flattened = (_FLATTENED_ALONE if is_alone else _FLATTENED)[zero.stage]
    of_reduction = (_COPIED_ALONE if is_alone else _COPIED)[zero.stage]
    passes = of_reduction * _reductions(zero, count) + _ADDED * max(0.0, count - 1)
    fresh_passes = flattened * _reductions(zero, count)
    copied = nbytes * (fresh_passes / _fresh(rates) + passes / rates.memory_bytes_per_s)
    work = _ON_GPU if rates.overlaps_launches else _ON_CPU
    weights, stage = step.num_weights, zero.stage
    of_step = _STEP + weights * work.per_weight[stage]
    of_batch = _PER_BATCH + weights * work.per_weight_and_batch[stage]
    host = rates.launch_s * (
        of_step + count * of_batch + work.per_visit[stage] * _visits(step, count)
    )
    together = together.plus(StepTime(optimizer=update, memory=copied, launches=host))
    together = hide_launches(together, rates)
    sending = _sending(step, zero, cluster, rates, count)
    computed = together.matmul + together.attention + together.memory
    hideable = 0.6 * computed if zero.overlaps or zero.stage == 3 else 0.0
    if not rates.overlaps_launches:  # a CPU cannot compute and send at once
        hideable = 0.0
    visible = max(sending - _HIDDEN * hideable, (1 - _HIDDEN) * sending)
    return together.plus(StepTime(communication=visible))


def _visits(step: Measured, batches: float) -> float:
    """How often modules run in a step of so many micro-batches, of which the last may run fewer."""
    of_one = step.calls.get("visits", 0)
    of_last = step.calls_of_last.get("visits", of_one)
    return max(0.0, batches - 1) * of_one + min(1.0, batches) * of_last


def _reductions(zero: Zero, batches: float) -> float:
    """How often a step reduces the gradients."""
    return batches if zero.stage > 1 else 1.0


def _fresh(rates: Rates) -> float:
    return rates.fresh_bytes_per_s or rates.memory_bytes_per_s


def _sending(step: Measured, zero: Zero, cluster: Cluster, rates: Rates, batches: float) -> float:
    """Seconds of all communication in a step."""
    if zero.world == 1:
        return 0.0
    link, share = cluster.link(rates), (zero.world - 1) / zero.world
    trained = zero.width * step.trainable
    buckets = 1 + trained / (zero.width * zero.reduce_bucket)
    gather, scatter = rates.gathering or link, rates.scattering or link
    if zero.stage == 3:
        scattered = share * trained / scatter.bytes_per_s + buckets * scatter.latency_s
        # weights that every rank keeps are gathered one by one after the update (_post_step)
        num_small = sum(count for size, count in step.sizes if size <= zero.persisted)
        return (
            batches * (_gathering(step, zero, rates, gather) + scattered)
            + num_small * gather.latency_s
        )
    # Stages 1 and 2 reduce every bucket to all ranks, too; each rank then takes its own part
    # (allreduce_and_scatter: use_multi_rank_bucket_allreduce).
    reduced = 2 * (share * trained / link.bytes_per_s + buckets * link.latency_s)
    updated = share * trained / gather.bytes_per_s + gather.latency_s if zero.stage else 0.0
    return _reductions(zero, batches) * reduced + updated


def _gathering(step: Measured, zero: Zero, rates: Rates, link: Link) -> float:
    """Seconds that stage 3 takes to gather the weights for one micro-batch."""
    numbers = sum(size * count for size, count in step.sizes if size > zero.persisted)
    # a weight that backward needs again within max_reuse numbers is not released after forward
    again = max(0.0, 1 - zero.max_reuse / max(1, 2 * numbers))
    # a forward without gradients (GradCache) keeps the weights that its backward would need
    times = 1 + again * step.calls.get("runs", 1)
    whole = zero.width * numbers
    share, collectives = (zero.world - 1) / zero.world, 1 + numbers / zero.prefetch_bucket
    exchange_s = share * whole / link.bytes_per_s + collectives * link.latency_s
    offloaded = whole / zero.world / rates.host_bytes_per_s if zero.offloads_weights else 0.0
    return times * (exchange_s + _PUT_TOGETHER * whole / _fresh(rates) + offloaded)
