"""The peak memory of a run by category, on the device, on the host and on the disk. A step of the
run is executed with fake tensors, which have shapes but compute nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.schema import RandomBase
from trainer.config.userfile import placed
from trainer.models.recomputation import check
from trainer.plan.memory.deepspeed_terms import (
    Breakdown,
    Zero,
    host,
    host_to_read,
    inference,
    teaching,
    training,
)
from trainer.plan.memory.measure import (
    EVALUATION,
    GENERATION,
    TEACHING,
    TRAINING,
    Measured,
    measure,
)
from trainer.plan.memory.planned_rows import (
    SHORT_ANSWERS,
    answer_requests,
    first_evaluated,
    first_read,
    request_of,
    teacher_requests,
    training_batches,
)
from trainer.protocol.abilities import Answers

if TYPE_CHECKING:
    from trainer.devices import Device
    from trainer.plan.memory.planned_rows import RowsByNumber
    from trainer.plan.memory.subject import Subject

# host memory of a process that has imported torch, transformers and CUDA's libraries
_PROCESS = 2 * 2**30


@dataclass(frozen=True)
class Phase:
    """The memory peak of training, evaluation or generation, or of the teacher's pass before."""

    name: str
    peak: Breakdown
    rows: int
    longest: int
    shapes: dict[str, list[int]]
    tensors: list[tuple[str, int]]


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a run needs."""

    phases: list[Phase]
    host: int  # bytes of host memory, for this rank
    checkpoints: int  # bytes on disk, for the whole run
    download: int
    heaviest: list[int]  # the rows of the micro-batch with the highest peak
    heaviest_evaluated: list[int]
    seconds: float  # of CPU time, that measuring took
    notes: list[str]

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.peak.total)

    def fits(self, device: Device, world: int) -> bool:
        return self.peak.peak.total <= device.usable(world)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> MemoryPlan:
        phases = [
            Phase(
                **{
                    **phase,
                    "peak": Breakdown(**phase["peak"]),
                    "tensors": [(n, b) for n, b in phase["tensors"]],
                }
            )
            for phase in values["phases"]
        ]
        return cls(**{**values, "phases": phases})


@dataclass(frozen=True)
class Basis:
    """A plan, and the measured step from which it was made."""

    plan: MemoryPlan
    worst: Measured  # of the training step
    numbers: list[int]  # its rows
    is_first: bool  # whether this micro-batch is the first one of a step

    @property
    def total(self) -> int:
        return self.plan.phases[0].peak.total


def make(subject: Subject, *, cublas: int) -> Basis:
    """Make the plan of one run. MeasuringError when its step cannot run under fake tensors;
    ConfigError when train.gradient_checkpointing names more blocks than the model has.
    """
    batches = training_batches(subject)
    eval_batch = subject.cfg.train.eval_batch or subject.cfg.train.micro_batch
    eval_rows = first_evaluated(subject.valid.lengths, batch=eval_batch)
    requests = [subject.training_request(batch.numbers) for batch in batches]
    requests.append(request_of(subject, "evaluate", subject.valid, eval_rows))
    requests += answer_requests(subject, eval_rows)
    of_teacher = teacher_requests(subject, batch=eval_batch)
    steps_of_requests = measure([*requests, *of_teacher], subject.places)
    check(subject.cfg.train.recompute_every, steps_of_requests[0].blocks)
    steps, evaluated, answered, of_pass = (
        steps_of_requests[: len(batches)],
        steps_of_requests[len(batches)],
        steps_of_requests[len(batches) + 1 : len(requests)],
        steps_of_requests[len(requests) :],
    )
    peaks = [
        training(step, subject.zero, cublas=cublas, is_first=batch.is_first)
        for step, batch in zip(steps, batches, strict=True)
    ]
    worst = max(range(len(steps)), key=lambda number: peaks[number].total)
    numbers = batches[worst].numbers
    phases = [
        phase(TRAINING, peaks[worst], steps[worst], subject.train, numbers),
        phase(
            EVALUATION,
            inference(evaluated, subject.zero, cublas=cublas),
            evaluated,
            subject.valid,
            eval_rows,
        ),
    ]
    if answered and isinstance(subject.task, Answers):
        # what generating needs is extrapolated from two shorter runs
        few, more = answered
        a_token = max(0, more.peak.total - few.peak.total) // (SHORT_ANSWERS[1] - SHORT_ANSWERS[0])
        further = a_token * max(0, subject.task.answer_tokens() - SHORT_ANSWERS[1])
        grown = replace(
            more, moments=[replace(more.peak, activations=more.peak.activations + further)]
        )
        peak = inference(grown, subject.zero, cublas=cublas)
        phases.append(phase(GENERATION, peak, grown, subject.valid, eval_rows))
    for step in of_pass:
        read = first_read(subject, batch=eval_batch)
        phases.append(phase(TEACHING, teaching(step, cublas=cublas), step, *read))
    # checkpoints kept, the best one, the one being written, and the exports best/ and final/
    kept = subject.cfg.train.keep_last + 1 + (subject.cfg.train.best is not None)
    exports = 2 * subject.zero.width * steps[worst].trainable
    on_disk = kept * _saved_numbers(steps[worst], subject.zero) + exports
    plan = MemoryPlan(
        phases=phases,
        host=max([_on_host(steps[worst], subject), *(_PROCESS + one.weights for one in of_pass)]),
        checkpoints=on_disk,
        download=_to_download(steps[worst], subject),
        heaviest=[int(number) for number in numbers],
        heaviest_evaluated=[int(number) for number in eval_rows],
        seconds=sum(step.seconds for step in steps_of_requests),
        notes=subject.notes,
    )
    return Basis(plan, steps[worst], plan.heaviest, batches[worst].is_first)


def phase(name: str, peak: Breakdown, step: Measured, rows: RowsByNumber, numbers: Any) -> Phase:
    return Phase(
        name, peak, len(numbers), int(rows.lengths[numbers].max()), step.shapes, step.tensors
    )


# Besides the device
# -----------------------------------------------------------------------------------------------


def _on_host(step: Measured, subject: Subject) -> int:
    """The host memory that a rank needs at most: while it reads the base, or while it writes a
    checkpoint.
    """
    zero = subject.zero
    # while it writes, a rank holds its share of a checkpoint; rank 0 has all weights to export
    share = max(_saved_numbers(step, zero) // zero.world, zero.width * step.trainable)
    later = host(step, zero) + share
    is_random = isinstance(subject.cfg.base, RandomBase)
    return _PROCESS + max(host_to_read(step, zero, is_random=is_random), later)


def _saved_numbers(step: Measured, zero: Zero) -> int:
    """Bytes of a checkpoint: trainable weights, the optimizer's state in fp32, and fp32 weights
    below fp32.
    """
    return (
        zero.width * step.trainable
        + 4 * step.states
        + (4 * step.trainable if zero.width < 4 else 0)
    )


def _to_download(step: Measured, subject: Subject) -> int:
    """Bytes of a base on the Hub that is not in the cache, assuming fp32. 0 for folders and random
    bases.
    """
    base = subject.cfg.base
    if not isinstance(base, str) or Path(placed(base)).is_dir():
        return 0
    from huggingface_hub import try_to_load_from_cache

    names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    if any(isinstance(try_to_load_from_cache(base, name), str) for name in names):
        return 0
    return 4 * (step.trainable + step.frozen)
