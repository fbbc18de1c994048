"""The memory of DeepSpeed 0.19.8 besides the model's own tensors, as our engine drives it. This
module imports no torch.

Every formula was compared with the CPU allocator's record of a real engine: stages 0 to 3, fp32 and
bf16, one and two ranks (tests/numerics/test_memory_plan.py repeats it for one rank). In formulas, P
is the number of trainable parameters, F of frozen ones, e the bytes of each in the model's dtype,
w the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from trainer.config import deepspeed_config

if TYPE_CHECKING:
    from trainer.plan.memory.measure import Measured

_REDUCED_AT_ONCE = 500_000_000  # numbers: engine.allreduce_no_retain's bucket, which no key changes
_NORM_WIDTH = 8  # bytes: DeepSpeed takes the norm of a gradient from a copy in fp64


@dataclass(frozen=True)
class Breakdown:
    """Bytes on one device at one moment."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def parts(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Zero:
    """How DeepSpeed divides a model: the settings that the formulas need."""

    stage: int
    world: int
    width: int  # bytes of a weight: e
    accumulates: bool  # more than one micro-batch a step
    is_bf16: bool = True
    offloads_optimizer: bool = False
    offloads_weights: bool = False
    reduce_bucket: int = 500_000_000
    prefetch_bucket: int = 50_000_000
    max_live: int = 1_000_000_000
    max_reuse: int = 1_000_000_000
    persisted: int = 100_000  # stage 3 leaves weights of at most so many numbers whole
    sub_group: int = 1_000_000_000
    overlaps: bool = False
    keeps_frozen: bool = False  # whole on every rank at stage 3, beside its part of them

    @classmethod
    def of(
        cls,
        ds: dict[str, Any],
        *,
        accumulates: bool,
        keeps_frozen: bool = False,
    ) -> Zero:
        """From a complete dictionary (deepspeed_config.build)."""
        zero, precision = ds["zero_optimization"], deepspeed_config.precision(ds)
        world = deepspeed_config.num_ranks(ds)
        return cls(
            stage=zero["stage"],
            world=world,
            width=4 if precision == "fp32" else 2,
            accumulates=accumulates,
            is_bf16=precision == "bf16",
            offloads_optimizer=deepspeed_config.offload_device(ds, "offload_optimizer") != "none",
            offloads_weights=deepspeed_config.offload_device(ds, "offload_param") != "none",
            reduce_bucket=int(zero.get("reduce_bucket_size", cls.reduce_bucket)),
            prefetch_bucket=int(zero.get("stage3_prefetch_bucket_size", cls.prefetch_bucket)),
            max_live=int(zero.get("stage3_max_live_parameters", cls.max_live)),
            max_reuse=int(zero.get("stage3_max_reuse_distance", cls.max_reuse)),
            persisted=int(zero.get("stage3_param_persistence_threshold", cls.persisted)),
            sub_group=int(zero.get("sub_group_size", cls.sub_group)),
            overlaps=bool(zero.get("overlap_comm", zero["stage"] == 3))
            and world > 1
            and zero["stage"] > 1,
            keeps_frozen=keeps_frozen,
        )

    @property
    def gathers(self) -> bool:
        """Whether stage 3 gathers weights. A single rank does not: its parts are the weights
        (deepspeed's NoGatherHandle makes no copy).
        """
        return self.world > 1 or self.offloads_weights

    @property
    def copies_into_buckets(self) -> bool:
        """Whether reduce buckets are allocated in full, as contiguous_gradients asks.

        Not by our engine on a single rank.
        """
        if self.stage == 1 and self.is_bf16 and not self.offloads_optimizer:
            return False  # DeepSpeed's BF16_Optimizer has none
        return self.stage == 3 or (self.stage > 0 and (self.world > 1 or self.offloads_optimizer))


def training(step: Measured, zero: Zero, *, cublas: int, is_first: bool = False) -> Breakdown:
    """The memory peak of a training step, from the second step on.

    is_first: of the first micro-batch of a step, when no gradients are in memory yet.
    """
    resident = _between_steps(step, zero)
    moments: list[Breakdown] = []
    if zero.stage == 3 and zero.gathers:
        reading = Breakdown(
            activations=step.reading.activations,
            logits=step.reading.logits,
            buffers=_gathered_ahead(step, zero),
            workspace=cublas + step.scratch,
        )
        moments.append(_sum(resident, reading))
    # where micro-batches wait for each other, the backward pass of the first one comes last
    is_alone = not zero.accumulates or (is_first and not step.waits)
    for moment in step.moments_at(zero.stage):
        rest = Breakdown(
            activations=moment.activations, logits=moment.logits, workspace=cublas + step.scratch
        )
        gradients = moment.gradients
        if not is_alone and zero.stage < 2:
            # those of the micro-batches before
            gradients = max(moment.gradients for moment in step.moments_at(zero.stage))
        accumulated = _gradient_sums(step, zero)
        if is_alone and zero.copies_into_buckets:
            accumulated = accumulated * gradients // (zero.width * step.trainable)
        elif is_alone:
            accumulated = 0
        gradients = _in_flight(gradients, step, zero) + accumulated
        moments.append(_sum(resident, Breakdown(gradients=gradients), rest))
    if zero.stage == 3:
        # After backward only these weights are still whole: the small ones, the one that was used
        # last, and frozen ones that every rank keeps. Each other one was freed after its use.
        small = sum(size * count for size, count in step.sizes if size <= zero.persisted)
        frozen = step.frozen if zero.keeps_frozen else 0
        whole = _whole_weights(step, zero)
        freed = whole - min(whole, zero.width * (small + step.largest + frozen))
        resident = replace(resident, weights=resident.weights - freed)
    moments.append(_sum(resident, _at_reduction(step, zero), Breakdown(workspace=cublas)))
    for stepping in _moments_of_step(step, zero):
        moments.append(_sum(resident, stepping, Breakdown(workspace=cublas)))
    return max(moments, key=lambda breakdown: breakdown.total)


def inference(step: Measured, zero: Zero, *, cublas: int) -> Breakdown:
    """The memory peak of an evaluation or a generation between training steps. The states of the
    optimizer stay on the device meanwhile.
    """
    most = step.peak
    resident = _between_steps(step, zero)
    return _sum(
        resident, Breakdown(activations=most.activations, logits=most.logits, workspace=cublas)
    )


def teaching(step: Measured, *, cublas: int) -> Breakdown:
    """The memory peak of a teacher's pass, before the run's own weights are read: each rank holds
    the whole teacher.
    """
    most = step.peak
    return Breakdown(
        weights=step.weights,
        activations=most.activations,
        logits=most.logits,
        buffers=step.buffers,
        workspace=cublas,
    )


def host(step: Measured, zero: Zero) -> int:
    """Bytes of host memory that a rank needs because of offloading: of weights, the optimizer, and
    inputs of blocks.
    """
    P, F, w = step.trainable, step.frozen, zero.world
    weights = zero.width * (P + F) // w if zero.offloads_weights else 0
    weights += step.offloaded
    if not zero.offloads_optimizer:
        return weights
    # fp32 weights, the gradients, AdamW's two states and an average. At stages 1 and 2 also the
    # weights that go back to the device and one gradient on its way here; at stage 3 the sums of
    # the gradients.
    optimizer = (4 + 4) * P + 4 * step.states
    if zero.stage == 3:
        return weights + (optimizer + _sum_width(zero) * P) // w
    return weights + (optimizer + zero.width * P) // w + zero.width * step.largest


def host_to_read(step: Measured, zero: Zero, *, is_random: bool) -> int:
    """Bytes of host memory that a rank needs while it reads the base.

    Below ZeRO-3, and for a random base, these are all weights; the engine then moves them to the
    device. Under ZeRO-3 the weights of a checkpoint are read one after the other. This rank's share
    of each goes to the device at once, or stays in host memory where weights are offloaded.
    """
    if zero.stage < 3 or is_random:
        return step.weights
    share = step.weights // zero.world if zero.offloads_weights else 0
    return share + zero.width * step.largest  # a frozen weight may be larger still


def _sum(*parts: Breakdown) -> Breakdown:
    names = [field.name for field in fields(Breakdown)]
    return Breakdown(**{name: sum(getattr(part, name) for part in parts) for name in names})


def _between_steps(step: Measured, zero: Zero) -> Breakdown:
    """The memory that stays on the device between steps: weights, optimizer states, buffers, and
    the gradients that DeepSpeed never frees.
    """
    P, w = step.trainable, zero.world
    weights, gradients = step.weights, 0
    if zero.stage == 3:
        share = 0 if zero.offloads_weights else step.weights // w
        weights = share + _whole_weights(step, zero)
        gradients = 0 if zero.offloads_optimizer else 4 * P // w
    elif zero.stage == 1 and zero.is_bf16 and not zero.offloads_optimizer:
        gradients = 4 * P
    # this rank's part of the optimizer's states and of the fp32 master weights
    optimizer = 0
    if not zero.offloads_optimizer:
        has_masters = zero.width < 4 or zero.stage > 0
        total = (4 * P if has_masters else 0) + 4 * step.states
        optimizer = total // w if zero.stage else total
    # gradients are reduced through one buffer, or through two where that overlaps with backward
    buffers = step.buffers
    if zero.copies_into_buckets:
        count = 2 if zero.overlaps and zero.stage < 3 else 1
        buffers += count * zero.reduce_bucket * zero.width
    if zero.offloads_optimizer and zero.stage == 2:
        buffers += zero.width * step.largest  # one gradient on its way to the host
    return Breakdown(weights=weights, gradients=gradients, optimizer=optimizer, buffers=buffers)


def _whole_weights(step: Measured, zero: Zero) -> int:
    """Bytes of the weights that stage 3 has gathered for use, beside this rank's part of them."""
    if not zero.gathers:
        return 0
    most = zero.width * (zero.max_live + zero.prefetch_bucket)
    if zero.keeps_frozen:
        return zero.width * step.frozen + min(zero.width * step.trainable, most)
    return min(zero.width * (step.trainable + step.frozen), most)


def _gathered_ahead(step: Measured, zero: Zero) -> int:
    """The buffer of one all-gather of several weights (AllGatherCoalescedHandle), which is freed
    when the last of these weights is used.
    """
    if zero.world == 1:
        return 0  # there is no exchange
    large = sum(size * count for size, count in step.sizes if size > zero.persisted)
    if zero.keeps_frozen:
        large = min(large, step.trainable)
    return zero.width * min(large, zero.prefetch_bucket)


def _gradient_sums(step: Measured, zero: Zero) -> int:
    """Bytes of the sums of gradients over micro-batches that stage 2 keeps: this rank's part, in
    fp32 (in fp16 for a model in fp16).
    """
    if zero.stage != 2 or zero.offloads_optimizer:
        return 0
    return _unstepped(step.trainable, zero)


def _sum_width(zero: Zero) -> int:
    """Bytes of one number in the sums of gradients."""
    return 4 if zero.is_bf16 else zero.width


def _in_flight(gradients: int, step: Measured, zero: Zero) -> int:
    """Bytes of complete gradients, in the model's dtype, that are still in memory. From stage 2 on,
    gradients are freed once they are copied into a bucket.
    """
    if zero.stage == 3:
        return 0
    if zero.stage < 2 or not zero.copies_into_buckets:
        return gradients
    if step.largest <= zero.reduce_bucket:
        return 0  # each is copied into a bucket and freed
    # weights that are larger than a bucket are reduced on their own, and three were seen waiting
    return min(gradients, 2 * max(zero.reduce_bucket, 3 * step.largest) * zero.width)


def _at_reduction(step: Measured, zero: Zero) -> Breakdown:
    """The gradients at the end of a micro-batch, while they are reduced, and the copies that this
    takes.
    """
    P, e = step.trainable, zero.width
    gradients, copies = _in_flight(e * P, step, zero), 0
    # in fp32 a gradient may become the sum itself, without a copy
    is_sum = e == 4 and not zero.accumulates and not zero.copies_into_buckets
    if not is_sum:
        gradients += _gradient_sums(step, zero)
    if zero.stage == 3:
        # one flat tensor, then gloo's own copy, or this rank's part of the sum in fp32
        part = 4 // zero.world if e < 4 else 0
        copies = (e + max(e, part)) * max(step.largest, min(P, zero.reduce_bucket))
    elif zero.stage == 2:
        flat = 0 if zero.copies_into_buckets else e * (P if e == 4 else min(P, zero.reduce_bucket))
        copies = flat + (4 * step.largest if e < 4 else 0)
    elif zero.stage == 1 and e < 4:
        copies = 4 * step.largest
    return Breakdown(gradients=gradients, workspace=copies)


def _moments_of_step(step: Measured, zero: Zero) -> list[Breakdown]:
    """The gradients at moments of the optimizer's step that may be its highest (without gradients
    that are never freed), and what DeepSpeed and the optimizer copy then.
    """
    P, w, e = step.trainable, zero.world, zero.width
    if zero.offloads_optimizer:
        gradients = e * P if zero.stage < 2 else 0
        return [Breakdown(gradients=gradients, workspace=4 * step.largest)]
    if zero.stage == 0:
        copies = 4 * P if e < 4 else 0  # fp32 copies of all gradients
        own = max((group.copies(group.largest, is_cut=False) for group in step.groups), default=0)
        return [Breakdown(gradients=e * P, workspace=copies + own)]
    if zero.stage == 3:
        # the gradients of one sub-group at a time become one flat tensor, and are stepped
        parts = [(group, min(group.numbers // w, zero.sub_group)) for group in step.groups]
        flat = [4 * part + group.copies(part, is_cut=w > 1) for group, part in parts]
        norm = _NORM_WIDTH * step.largest // w
        return [Breakdown(workspace=most) for most in (norm, *flat)]
    if zero.stage == 1 and zero.is_bf16:
        # Small groups are flattened in fp32 and cast to the dtype that is sent. A group of more
        # elements than a bucket is one tensor, which is neither flattened nor split. The optimizer
        # steps when these are freed.
        sent = (4 + 2) * P if P <= _REDUCED_AT_ONCE else 2 * P
        own = [group.copies(group.numbers // w, is_cut=w > 1) for group in step.groups]
        return [Breakdown(gradients=e * P, workspace=most) for most in (sent, *own)]
    return _moments_by_group(step, zero)


def _moments_by_group(step: Measured, zero: Zero) -> list[Breakdown]:
    """The moments of DeepSpeedZeroOptimizer.step (stages 1 and 2): a group's gradients become one
    flat tensor in fp32, are freed, and then the group is stepped. Groups behind it still wait.
    """
    w = zero.world
    norm = _NORM_WIDTH * min(step.largest, step.trainable // w)
    moments = [Breakdown(gradients=_unstepped(step.trainable, zero), workspace=norm)]
    unstepped = step.trainable
    for group in step.groups:
        part = group.numbers // w
        before = _unstepped(unstepped, zero)
        unstepped -= group.numbers
        after = _unstepped(unstepped, zero)
        own = group.copies(part, is_cut=w > 1)
        if zero.stage == 2 and zero.is_bf16:  # the sums lie in a flat tensor already
            moments.append(Breakdown(gradients=before, workspace=own))
            continue
        flat = 4 * part + (zero.width * part if zero.width < 4 else 0)
        moments.append(Breakdown(gradients=before, workspace=flat))
        moments.append(Breakdown(gradients=after + 4 * part, workspace=own))
    return moments


def _unstepped(numbers: int, zero: Zero) -> int:
    """Bytes of the gradients of so many numbers at stages 1 and 2, until the optimizer steps."""
    if zero.stage < 2:
        return zero.width * numbers
    return _sum_width(zero) * numbers // zero.world
