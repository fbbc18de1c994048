"""Predicts the time of a whole run: the start, steps on rows of their real lengths, evaluations,
generation and saving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.config.schema import steps_between
from trainer.data.order import window_rows
from trainer.devices import data_sheet
from trainer.plan.memory.measure import Measured, measure
from trainer.plan.memory.planned_rows import (
    SHORT_ANSWERS,
    Specimens,
    answer_requests,
    epochs_of,
    request_of,
)
from trainer.plan.time.step_time import (
    Cluster,
    MicroBatches,
    StepTime,
    Work,
    computing,
    flops_of,
    hide_launches,
    step_time,
)
from trainer.protocol.abilities import Answers

if TYPE_CHECKING:
    from trainer.plan.memory.subject import Subject
    from trainer.plan.time.rates import Rates

_SAMPLED_STEPS = 60  # steps whose micro-batches stand for those of all steps
_TYPICAL = 3  # micro-batches that are counted: a small one, a middle one and a large one
_EVERY = 1000  # steps between evaluations and between saves, if the experiment does not say
# The share of the writing time for which a run waits if it saves in the background (docs/log.md).
_WAITED = 0.21
_IMPORTS_S = 12.0  # to import torch, transformers and deepspeed, before a model is built


@dataclass(frozen=True)
class RunTime:
    """The predicted seconds of a run, on one device or on several at once."""

    step: StepTime
    steps: int
    units: float  # in one step, on all ranks
    unit: str
    flops: float  # in one step, on one rank
    world: int
    mfu: float | None  # share of the data sheet's peak, on a CPU of its fastest product
    evaluation_s: float = 0.0  # all evaluations together
    generation_s: float = 0.0
    saving_s: float = 0.0
    startup_s: float = 0.0
    device: str = ""
    is_measured: bool = False  # the rates are from a calibration, not from a data sheet
    notes: list[str] = field(default_factory=list[str])

    @property
    def total_s(self) -> float:
        parts = (self.evaluation_s, self.generation_s, self.saving_s, self.startup_s)
        return self.steps * self.step.total + sum(parts)

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "step_s": self.step.total, "total_s": self.total_s}


def run_time(subject: Subject, rates: Rates, cluster: Cluster) -> RunTime:
    """Predict the time of an experiment. MeasuringError if a step cannot run under fake tensors."""
    kernels = "fakegpu" if rates.overlaps_launches else "cpu"
    batches, per_step = typical_batches(subject)
    by_length = np.argsort(subject.valid.lengths, kind="stable")
    start = max(0, (len(by_length) - _eval_rows(subject)) // 2)
    evaluated = by_length[start : start + _eval_rows(subject)]  # rows of the middle length
    requests = [subject.training_request(numbers) for numbers in batches]
    requests.append(request_of(subject, "evaluate", subject.valid, evaluated))
    requests += answer_requests(subject, evaluated)
    how = {"device": kernels, "groups_rows": True}
    steps_of_requests = measure([replace(request, **how) for request in requests], subject.places)
    steps, evaluation, answers = (
        steps_of_requests[: len(batches)],
        steps_of_requests[len(batches)],
        steps_of_requests[len(batches) + 1 :],
    )
    share = 1 / len(steps)
    times = [
        batch
        for step in steps
        for batch in MicroBatches.of(step, rates).of_step(per_step, share=share)
    ]
    time = step_time(times, steps[0], subject.zero, rates, cluster)
    flops = share * sum(flops_of(step, per_step) for step in steps)
    sheet, mfu = data_sheet(rates.name), None
    if sheet is not None:
        mfu = flops / time.total / sheet.peak_flops
    elif not rates.overlaps_launches:
        fastest = max(rate for curve in rates.matmul.values() for _, rate in curve)
        mfu = flops / time.total / fastest
    train = subject.cfg.train
    return replace(
        _around(subject, rates, cluster, steps[0], (evaluation, answers)),
        step=time,
        steps=train.steps,
        units=share * per_step * _groups(subject, cluster) * sum(step.units for step in steps),
        unit=subject.task.unit,
        flops=flops,
        mfu=mfu,
    )


def typical_batches(subject: Subject) -> tuple[list[Any], float]:
    """(row numbers of a few typical micro-batches of this rank, the number of micro-batches in a
    step).
    """
    train, sizes = subject.cfg.train, subject.train.sizes
    seed = train.seed if train.order == "shuffled" else None
    lengths = subject.train.lengths
    are_alike = lengths.min() == lengths.max()
    steps = 1 if are_alike else min(train.steps, _SAMPLED_STEPS)
    batches: list[Any] = []
    for step in range(steps):
        batches += window_rows(step, lengths=sizes, sharding=subject.sharding, seed=seed)
    batches.sort(key=lambda numbers: int(lengths[numbers].sum()))
    count = 1 if are_alike else min(_TYPICAL, len(batches))
    places = [(2 * number + 1) * len(batches) // (2 * count) for number in range(count)]
    return [batches[place] for place in places], len(batches) / steps


def _eval_rows(subject: Subject) -> int:
    train = subject.cfg.train
    return min(train.eval_batch or train.micro_batch, len(subject.valid.lengths))


def _groups(subject: Subject, cluster: Cluster) -> int:
    """How many groups of devices have rows of their own."""
    return cluster.world // subject.sharding.sharing


def _around(
    subject: Subject,
    rates: Rates,
    cluster: Cluster,
    step: Measured,
    evaluated: tuple[Measured, Sequence[Measured]],
) -> RunTime:
    """Seconds of everything besides the steps: the start, evaluations and saves."""
    train = subject.cfg.train
    epochs = epochs_of(subject.train, subject.sharding, train.seed)
    evaluations = -(-train.steps // steps_between(train.eval_every or _EVERY, epochs.steps))
    saves = -(-train.steps // steps_between(train.save_every or _EVERY, epochs.steps))
    notes: list[str] = []
    batches = -(-len(subject.valid.lengths) // (_eval_rows(subject) * _groups(subject, cluster)))
    if isinstance(subject.valid, Specimens):
        batches = 0
        notes.append("how many rows are evaluated is not known: evaluations are left out")
    if subject.sharding.sharing > 1:
        notes.append("what devices that share rows send each other in attention is left out")
    evaluation, answers = evaluated
    once = _total(evaluation, rates) * batches
    nbytes = (14 if subject.zero.width < 4 else 12) * step.trainable / cluster.world
    weights = step.weights / rates.disk_bytes_per_s
    return RunTime(
        StepTime(),
        0,
        0,
        "",
        0,
        cluster.world,
        None,
        evaluation_s=evaluations * once,
        generation_s=evaluations * _answering(subject, answers, rates, cluster),
        saving_s=saves * _WAITED * nbytes / rates.disk_bytes_per_s + 2 * weights,
        startup_s=_IMPORTS_S + weights,
        device=rates.name,
        is_measured=rates.is_measured,
        notes=notes,
    )


def _total(step: Measured, rates: Rates) -> float:
    return hide_launches(computing(Work.of(step), rates), rates).total


def _answering(
    subject: Subject, answers: Sequence[Measured], rates: Rates, cluster: Cluster
) -> float:
    """Seconds to generate the answers of one evaluation, each as long as it may be."""
    if not answers or not isinstance(subject.task, Answers):
        return 0.0
    few, more = (_total(answer, rates) for answer in answers)
    a_token = (more - few) / (SHORT_ANSWERS[1] - SHORT_ANSWERS[0])
    batch = more + a_token * max(0, subject.task.answer_tokens() - SHORT_ANSWERS[1])
    wish, most = subject.cfg.train.answers, len(subject.valid.lengths)
    rows = min(wish, most) if isinstance(wish, int) and wish else most
    return batch * -(-rows // (_eval_rows(subject) * cluster.world))
