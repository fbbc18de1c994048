"""Every step of a processor's plan is measured with a processor's kernels, and every other step
with a GPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.facts import experiment, write_facts
from tests.numerics.test_recomputation import options
from tests.unit.test_memory_parts import measured
from trainer import tasks
from trainer.commands.plan import subject_for
from trainer.data.order import Sharding
from trainer.devices import GIB, Device
from trainer.launch import prepare
from trainer.launch.prepare import PreparedRun
from trainer.plan.forecast import forecast
from trainer.plan.memory import advice
from trainer.plan.memory import plan as memory_plan
from trainer.plan.memory.measure import Kind, Measured, MeasureRequest, Moment
from trainer.plan.memory.planned_rows import request_of
from trainer.plan.memory.subject import Subject
from trainer.plan.time.step_time import Cluster
from trainer.plan.time.target import Target
from trainer.switches import CPU_KERNELS
from trainer.training.run_plan import plan

# "auto": the blocks that are computed again are chosen by measured steps, too
TRAIN = {"gradient_checkpointing": "auto", "eval_batch": 2}
KINDS: tuple[Kind, ...] = ("evaluate", "answer", "teach")
GPU, PROCESSOR = (Device("any", 8 * GIB, 0, is_processor=is_it) for is_it in (False, True))


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = write_facts(tmp_path_factory.mktemp("facts"))
    values = experiment("summariser", folder, train=TRAIN, data={"source_tokens": 64})
    return replace(subject_for(values, options(folder), 1), answers=True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[MeasureRequest]:
    """All steps that are to be measured."""
    requests: list[MeasureRequest] = []

    def measure(more: Sequence[MeasureRequest], places: Any) -> list[Measured]:
        requests.extend(more)
        return [replace(measured([Moment(0, 1000, 1000)]), blocks=2) for _ in more]

    for module in (memory_plan, advice):
        monkeypatch.setattr(module, "measure", measure)
    return requests


@pytest.mark.parametrize(("device", "kernels"), [(GPU, "fakegpu"), (PROCESSOR, "cpu")])
def test_a_plan_measures_every_step_with_the_kernels_of_its_device(
    device: Device, kernels: str, subject: Subject, asked: list[MeasureRequest]
) -> None:
    for nbytes in (8 * GIB, 2**29):  # it fits, or what would fit is looked for
        target = Target(replace(device, nbytes=nbytes), None, Cluster(1, 1))
        forecast(subject, target)
    assert {request.kind for request in asked} == {"train", "evaluate", "answer"}
    assert {request.device for request in asked} == {kernels}
    assert len(asked) > 10


def test_a_processors_rows_that_fit_and_its_other_steps_take_its_kernels(
    subject: Subject, asked: list[MeasureRequest]
) -> None:
    planned = subject.of_processor()
    advice.largest_rows(planned, ["zero2"], usable=GIB, cublas=0)
    asked += [request_of(planned, kind, planned.valid, [0]) for kind in KINDS]
    assert {request.device for request in asked} == {"cpu"}


def test_a_run_is_planned_with_the_kernels_of_where_it_runs_and_planned_again_elsewhere(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan is kept in its folder: of other kernels, it is not read."""
    folder = subject.places.data_path
    assert folder is not None
    planned = plan(experiment("summariser", folder), options(folder), world=1, rank=0)
    run = PreparedRun(planned, tasks.load(planned.cfg, subject.places), {}, subject.places)
    keys: set[str] = set()
    for is_gpu, word, kernels in ((True, "1", "fakegpu"), (False, "1", "cpu"), (False, "0", "cpu")):
        monkeypatch.setattr(prepare.distributed, "is_gpu", lambda is_it=is_gpu: is_it)
        monkeypatch.setenv(CPU_KERNELS, word)
        assert run.subject().kernels == kernels
        keys.add(run.key(GPU))
    assert len(keys) == 3


def test_shorter_rows_are_shared_by_as_many_ranks_as_those_of_the_run(
    subject: Subject, asked: list[MeasureRequest]
) -> None:
    shared = replace(subject, sharding=Sharding(4, 2, 2, 0, sharing=2))
    advice.advise(shared, memory_plan.make(shared, cublas=0), None, cublas=0)
    assert {one.sharing for one in asked if one.kind == "train"} == {2}
