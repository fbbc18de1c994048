"""Inputs of blocks that are computed again wait outside of the device: the same bits, in less memory
of the device, as much less as planned.
"""

from __future__ import annotations

import gc
import json
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.facts import LLAMA, OF_TASK, experiment, with_dropout, write_facts
from tests.fake_cuda import install, waits_of
from tests.numerics.test_recomputation import options, step
from tests.ranks import run_alone
from tests.runs.test_device_waits import MOST, trained
from tests.tolerance import assert_equal_step
from tests.wording import refused, says
from trainer.commands.plan import subject_for
from trainer.config import deepspeed_config
from trainer.launch import preflight, start
from trainer.models import recomputation
from trainer.plan.memory import fake_step
from trainer.plan.memory.fake_device import PlannedInputs
from trainer.plan.memory.measure import measuring
from trainer.plan.memory.plan import make
from trainer.training.run_plan import plan

BLOCKS = 6
DEEP = {**LLAMA, "config": {**LLAMA["config"], "num_hidden_layers": BLOCKS}}
OFFLOADED = {"gradient_checkpointing": True, "activation_offload": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


class Elsewhere:
    """A store that copies what it takes, and knows whether anybody else still has it."""

    def __init__(self) -> None:
        self.copies: dict[int, Tensor] = {}
        self.taken: list[tuple[int, ...]] = []
        self.storages: list[weakref.ref[Any]] = []
        self.most_alive = 0

    def offload_input(self, tensor: Tensor) -> int:
        self.taken.append(tuple(tensor.shape))
        self.storages.append(weakref.ref(tensor.untyped_storage()))
        self.copies[len(self.taken)] = tensor.detach().clone()
        self.most_alive = max(self.most_alive, sum(one() is not None for one in self.storages))
        return len(self.taken)

    def restore_input(self, tensor_id: int) -> Tensor:
        return self.copies.pop(tensor_id)


@pytest.mark.parametrize("name", OF_TASK)
def test_inputs_come_back_with_the_same_bits_and_nobody_keeps_them_meanwhile(
    name: str, folder: Path
) -> None:
    values = with_dropout(experiment(name, folder, train={"gradient_checkpointing": True}))
    stays, ran = step(values, folder)
    store = Elsewhere()
    recomputation.keep_inputs_in(store)
    try:
        goes, ran_then = step(values, folder)
    finally:
        recomputation.keep_inputs_in(None)
    assert_equal_step(goes, stays)
    assert ran_then == ran
    assert len(store.taken) >= 2, "each block that is computed again"
    assert store.copies == {}, "each one comes back"
    gc.collect()
    assert store.most_alive <= 3, "the graph holds no input besides"


def test_only_every_kth_block_gives_its_input_away(folder: Path) -> None:
    values = experiment("causal_lm", folder, base=DEEP, train={"gradient_checkpointing": 2})
    store = Elsewhere()
    recomputation.keep_inputs_in(store)
    try:
        step(values, folder)
    finally:
        recomputation.keep_inputs_in(None)
    assert len(store.taken) == BLOCKS // 2


# On the pretended GPU
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2])
def test_deepspeed_copies_them_on_a_stream_of_its_own_and_the_host_waits_no_more(
    stage: int, folder: Path, tmp_path: Path
) -> None:
    train = {"steps": 5, "log_every": 5, "eval_every": 5, "save_every": 5, "precision": "bf16"}
    values = experiment("causal_lm", folder, base=DEEP, train={**train, **OFFLOADED})
    file = tmp_path / "device.jsonl"
    here = trained(values, folder, tmp_path / "gpu", stage, file)
    del values["train"]["activation_offload"]
    assert here == trained(values, folder, tmp_path / "cpu", stage, None)
    assert 0 < waits_of(file, 3).total() <= MOST
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    of_step = [line for line in lines if line["step"] == 3 and "copy" in line]
    micro_batches = values["train"]["global_batch"] // values["train"]["micro_batch"]
    to_host = [line for line in of_step if line["copy"] == "to host" and line["stream"]]
    assert len(to_host) == micro_batches * (BLOCKS - 1), "the newest stays"
    assert not [line for line in to_host if line["waits"]]
    sizes = {line["nbytes"] for line in to_host}
    back = [line for line in of_step if line["copy"] == "to device" and line["nbytes"] in sizes]
    assert len(back) == micro_batches * (BLOCKS - 2), "nor does the one before have to come back"
    assert not [line for line in back if line["waits"] or not line["stream"]]


def test_the_planned_store_does_what_deepspeed_does(tmp_path: Path) -> None:
    found = run_alone(_both_stores, tmp_path / "device.jsonl")
    assert found["planned"] == found["deepspeed"] == [False, False, False, False, True, True]


def _both_stores(file: Path) -> dict[str, list[bool]]:
    """Of six inputs: whether the device still has each when the last one has been given away."""
    install(file)
    from tests.fake_cuda import DEVICE
    from trainer.training.engine import pinned_inputs

    found: dict[str, list[bool]] = {}
    for name, store in {"planned": PlannedInputs(), "deepspeed": pinned_inputs()}.items():
        storages: list[weakref.ref[Any]] = []
        for _ in range(BLOCKS):
            tensor = torch.ones(32, 32, device=DEVICE)
            storages.append(weakref.ref(tensor.untyped_storage()))
            store.offload_input(tensor)
            del tensor
        gc.collect()
        found[name] = [one() is not None for one in storages]
    return found


# The plan
# --------------------------------------------------------------------------------------------------


def _planned(folder: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    with measuring(fake_step.answer_all):
        for name, more in {"stays": {}, "goes": {"activation_offload": True}}.items():
            train = {"gradient_checkpointing": True, "precision": "bf16", **more}
            values = experiment("causal_lm", folder, base=DEEP, train=train)
            basis = make(subject_for(values, options(folder), 1), cublas=0)
            tokens = basis.worst.shapes["tokens"][-1] if "tokens" in basis.worst.shapes else 0
            most = max(one.activations + one.logits for one in basis.worst.moments)
            found[name] = [basis.worst.offloaded, most, tokens, basis.plan.host]
    return found


def test_a_plan_counts_them_on_the_host_and_not_on_the_device(tmp_path: Path) -> None:
    found = run_alone(_planned, write_facts(tmp_path))
    on_host, most, *_ = found["goes"]
    assert found["stays"][0] == 0
    assert on_host > 0
    a_pinned = on_host // (BLOCKS - 1)
    assert a_pinned & (a_pinned - 1) == 0, "torch's pool takes powers of 2"
    saved = found["stays"][1] - most
    assert (BLOCKS - 3) * a_pinned // 2 < saved <= (BLOCKS - 2) * a_pinned
    assert found["goes"][3] - found["stays"][3] == on_host


# What is refused, and what is said
# --------------------------------------------------------------------------------------------------


def test_without_blocks_that_are_computed_again_it_is_refused(folder: Path, tmp_path: Path) -> None:
    values = experiment("causal_lm", folder, train={"activation_offload": True})
    planned = plan(values, options(folder), world=1, rank=0)
    found = preflight.look(planned, options(folder))
    says("offload_of_nothing", "\n".join(found.problems))
    cfg = planned.cfg
    preset = deepspeed_config.read("zero2") | {
        "activation_checkpointing": {"cpu_checkpointing": True}
    }
    with refused("deepspeed_own_recomputation"):
        deepspeed_config.build(preset, train=cfg.train, optim=cfg.optim, world=1, source="test")


def test_on_a_processor_it_is_said_that_nothing_changes(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = experiment("causal_lm", folder, train=OFFLOADED)
    with caplog.at_level(logging.INFO):
        start.settle_inputs(plan(values, options(folder), world=1, rank=0).cfg.train)
    assert "a processor, where train.activation_offload changes nothing" in caplog.text
    assert recomputation._store is None
