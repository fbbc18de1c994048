"""Blocks that are computed again in backward: the same step in less memory, as much less as planned,
and the choice that a run makes for itself.
"""

from __future__ import annotations

import json
import logging
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.contract.runs import DORA
from tests.facts import OF_TASK, TINY_BASE, experiment, with_dropout, write_facts
from tests.ranks import run_alone
from tests.tolerance import Step, assert_equal_step
from tests.wording import refused
from trainer import tasks
from trainer.commands.plan import subject_for
from trainer.devices import CONTEXT, FILLED, Device
from trainer.launch import preflight
from trainer.launch.run import run
from trainer.plan.memory import advice, fake_step
from trainer.plan.memory.measure import measuring
from trainer.plan.memory.plan import make
from trainer.plan.time.blocks import whole
from trainer.protocol.task import DRAW, EPOCH, Places
from trainer.runtime import distributed
from trainer.runtime.preemption import Preemption
from trainer.training.options import Options
from trainer.training.run_plan import plan

LAYERS = {"n_layer": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def step(values: dict[str, Any], folder: Path) -> tuple[Step, int]:
    """Loss and gradients of a micro-batch with dropout, and how many layers ran."""
    task = tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))
    model = task.model().train()
    ran: list[None] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: ran.append(None))
    encoded = [task.encode(row) for row, _ in zip(task.rows("train"), range(3), strict=False)]
    zero = {DRAW: np.array([5]), EPOCH: np.array([0])}
    batch = task.collate(
        [{**{k: np.asarray(v) for k, v in row.items()}, **zero} for row in encoded]
    )
    torch.manual_seed(4)
    (loss,) = task.losses(model, [batch])
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return (float(loss.detach()), gradients), len(ran)


@pytest.mark.parametrize("adapters", [{}, {"lora": DORA | {"dropout": 0.2}}], ids=["whole", "lora"])
@pytest.mark.parametrize("name", OF_TASK)
def test_the_step_is_the_same_to_the_last_bit_however_many_blocks_are_computed_again(
    name: str, adapters: dict[str, Any], folder: Path
) -> None:
    steps: dict[Any, Step] = {}
    ran: dict[Any, int] = {}
    for how in (False, 2, 1):
        changed = {**adapters, "train": {"gradient_checkpointing": how}}
        steps[how], ran[how] = step(with_dropout(experiment(name, folder, **changed)), folder)
    assert ran[False] < ran[2] < ran[1]
    assert_equal_step(steps[2], steps[False])
    assert_equal_step(steps[1], steps[False])


# The plan
# --------------------------------------------------------------------------------------------------


def deep(folder: Path, task: str = "causal_lm", **train: Any) -> dict[str, Any]:
    """An experiment on a base of six blocks, more than a plan shows of blocks that are alike."""
    return experiment(task, folder, base={"config": TINY_BASE["config"] | LAYERS}, train=train)


def room_for(values: dict[str, Any], folder: Path, nbytes: int = 2**40) -> Any:
    """What a device that may be filled with so many bytes has for the heaviest step."""
    subject = subject_for(values, options(folder), 1)
    return advice.Room(subject, Device("mine", _size(nbytes)))


def options(folder: Path, **more: Any) -> Options:
    places = {"data_path": folder, "cache_dir": folder / "cache"}
    return Options(folder / "runs", deepspeed="zero2", **places, **more)


def _size(nbytes: int) -> int:
    return CONTEXT + int(nbytes / FILLED) + 1


def _by_choice(folder: Path, task: str, choices: tuple[Any, ...]) -> dict[Any, list[Any]]:
    with measuring(fake_step.answer_all):
        room = room_for(deep(folder, task), folder)
        steps = {how: room.step(how) for how in choices}
    return {how: [peak, step.moments, step.blocks] for how, (peak, step) in steps.items()}


def _in_full(folder: Path, task: str, choices: tuple[Any, ...]) -> dict[Any, list[Any]]:
    """The same, every block run."""
    by = fake_step._run_blocks
    fake_step._run_blocks = lambda request, places, _: by(request, places, lambda _: whole())
    return _by_choice(folder, task, choices)


@pytest.mark.parametrize(
    ("task", "choices"), [("causal_lm", (False, 4, True)), ("cross_attention", (False,))]
)
def test_a_plan_by_a_few_blocks_is_that_of_all_whatever_is_computed_again(
    task: str, choices: tuple[Any, ...], tmp_path: Path
) -> None:
    found, full = (
        run_alone(each, write_facts(tmp_path / each.__name__), task, choices)
        for each in (_by_choice, _in_full)
    )
    assert found == full
    assert found[False][2] == 6
    peaks = [found[how][0] for how in choices]
    assert sorted(set(peaks), reverse=True) == peaks


def _chosen(folder: Path) -> list[Any]:
    values = deep(folder)
    with measuring(fake_step.answer_all):
        peaks = {how: room_for(values, folder).step(how)[0] for how in (False, 6, 2)}
        sizes = [peaks[False], peaks[False] - 1, peaks[6] - 1, peaks[2] - 1, 1]
        return [room_for(values, folder, size).least() for size in sizes]


def test_auto_is_the_least_that_fits_and_every_block_where_nothing_does(tmp_path: Path) -> None:
    assert run_alone(_chosen, write_facts(tmp_path)) == [False, 6, 5, True, True]


# The run
# --------------------------------------------------------------------------------------------------


def _begun_and_gone_on(folder: Path) -> list[tuple[Any, list[str], str]]:
    """What was chosen, the lines and the log of a run on a device that is too small for all; then
    of its second half on one that is large, and on one that is smaller still.
    """
    distributed.init()
    said = StringIO()
    logger = logging.getLogger("trainer")
    logger.addHandler(logging.StreamHandler(said))
    logger.setLevel(logging.INFO)
    values = deep(folder, gradient_checkpointing="auto")
    with measuring(fake_step.answer_all):  # the run finds these steps in its cache
        subject = subject_for(values, options(folder), 1).of_processor()  # as the run plans it
        room = advice.Room(subject, Device("mine", _size(2**40)))
        peaks = {how: room.step(how)[0] for how in (False, 1, 2, 3, 4, 5, 6)}
        for how in (6, 2):
            make(advice.recomputing(subject, how), cublas=0)
    found: list[tuple[Any, list[str], str]] = []
    for nbytes in (_size(peaks[False] - 1), 2**35, _size(peaks[2])):
        given = options(folder, device=f"{nbytes / 2**20}MiB")
        planned = plan(values, given, world=1, rank=0)
        assert run(planned, given, Preemption()) == 0
        resolved = json.loads((planned.folder / "resolved.json").read_text())
        lines = (planned.folder / "metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line).get("loss") for line in lines]
        found.append((resolved["train"]["gradient_checkpointing"], losses, said.getvalue()))
        said.seek(said.truncate(0))
        shutil.rmtree(planned.folder / "checkpoints" / "step-6")
        (planned.folder / "status.json").unlink()
    return found


@pytest.mark.long
def test_a_resumed_run_keeps_its_choice_and_says_where_it_does_not_fit(tmp_path: Path) -> None:
    first, larger, smaller = run_alone(_begun_and_gone_on, write_facts(tmp_path))
    assert [first[0], larger[0], smaller[0]] == [6, 6, 2]
    assert "every 6th block computed again (train.gradient_checkpointing is auto)" in first[2]
    assert "every 6th block computed again, as this run began" in larger[2]
    assert "does not fit into" in smaller[2]
    assert first[1] == larger[1]
    assert len(first[1]) > 6


def test_a_choice_that_nothing_can_be_planned_for_is_refused(tmp_path: Path) -> None:
    values = deep(write_facts(tmp_path), gradient_checkpointing="auto")
    subject = subject_for(values, options(tmp_path), 1)
    with refused("checkpointing_without_device"):
        advice.choose_recomputation(subject, None)


def test_more_blocks_than_there_are_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    values = deep(write_facts(tmp_path), gradient_checkpointing=7)
    planned = plan(values, options(tmp_path), world=1, rank=0)
    task = tasks.load(planned.cfg, options(tmp_path).places)
    with refused("checkpointing_above_blocks", value=7, blocks=6):
        preflight.refuse_early(planned, options(tmp_path), task)
