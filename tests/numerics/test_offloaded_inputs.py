"""Inputs of blocks that are computed again wait outside of the device: the same bits, in less memory
of the device, as much less as planned.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bases import OF_TASK as BASES
from tests.bases import base_of
from tests.contract.runs import train, untimed
from tests.contract.test_task_contract import _die_then_resume
from tests.facts import LLAMA, OF_TASK, experiment, with_dropout, write_facts
from tests.fake_cuda import install, waits_of
from tests.long import long_but
from tests.numerics.test_recomputation import options, step
from tests.ranks import run_alone, run_on_ranks
from tests.runs.test_device_waits import MOST, trained
from tests.runs.test_shared_rows import train_one
from tests.tolerance import assert_equal_step
from tests.wording import refused, says
from trainer import tasks
from trainer.commands.plan import subject_for
from trainer.config import auto, deepspeed_config
from trainer.devices import GIB, Device
from trainer.launch import preflight, start
from trainer.models import recomputation
from trainer.plan.forecast import forecast
from trainer.plan.memory import fake_step
from trainer.plan.memory.fake_device import PlannedInputs
from trainer.plan.memory.measure import measuring
from trainer.plan.memory.plan import make
from trainer.plan.time.fastest import Way
from trainer.plan.time.step_time import Cluster
from trainer.plan.time.target import Target
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

    def forget_input(self, tensor_id: int) -> None:
        del self.copies[tensor_id]


@pytest.fixture
def store() -> Iterator[Elsewhere]:
    """Inside, blocks that are computed again keep their inputs there."""
    elsewhere = Elsewhere()
    recomputation.keep_inputs_in(elsewhere)
    yield elsewhere
    recomputation.keep_inputs_in(None)


def both(values: dict[str, Any], folder: Path, store: Elsewhere) -> None:
    """A step is the same with inputs on the device and in the store, which then has none left."""
    goes, ran = step(values, folder)
    recomputation.keep_inputs_in(None)
    stays, ran_then = step(values, folder)
    assert_equal_step(goes, stays)
    assert ran_then == ran
    assert store.copies == {}, "each one comes back"


@pytest.mark.parametrize("name", long_but(("causal_lm", "fid"), OF_TASK))
def test_inputs_come_back_with_the_same_bits_and_nobody_keeps_them_meanwhile(
    name: str, folder: Path, store: Elsewhere
) -> None:
    values = experiment(name, folder, train={"gradient_checkpointing": True})
    both(with_dropout(values), folder, store)
    assert len(store.taken) >= 2, "each block that is computed again"
    assert store.most_alive <= 3, "the graph holds no input besides"


OF_FAMILIES = [(task, name) for task in ("causal_lm", "retriever") for name in BASES[task]]
OF_FAMILIES.remove(("retriever", "mpnet"))


def test_a_family_whose_blocks_are_not_computed_again_is_refused(folder: Path) -> None:
    values = experiment("retriever", folder, train={"gradient_checkpointing": True})
    values["base"] = base_of("retriever", "mpnet", vocab_size=384)
    with refused("recomputes_no_blocks", family="mpnet"):
        step(values, folder)


@pytest.mark.long
@pytest.mark.parametrize(("task", "name"), OF_FAMILIES)
def test_blocks_of_every_family_give_their_inputs_away(
    task: str, name: str, folder: Path, store: Elsewhere
) -> None:
    values = experiment(task, folder, train={"gradient_checkpointing": True})
    values["base"] = base_of(task, name, vocab_size=384)
    both(values, folder, store)
    assert len(store.taken) >= 2


def test_only_every_kth_block_gives_its_input_away(folder: Path, store: Elsewhere) -> None:
    values = experiment("causal_lm", folder, base=DEEP, train={"gradient_checkpointing": 2})
    step(values, folder)
    assert len(store.taken) == BLOCKS // 2


def layers(count: int) -> list[nn.Linear]:
    torch.manual_seed(1)
    return [nn.Linear(8, 8) for _ in range(count)]


def through(blocks: list[nn.Linear], hidden: Tensor) -> Tensor:
    for number, block in enumerate(blocks):
        hidden = recomputation.run(block, hidden, number=number, every=1)
    return hidden


def test_a_graph_that_is_dropped_gives_its_inputs_up(store: Elsewhere) -> None:
    blocks = layers(4)
    for block in blocks[:2]:
        block.requires_grad_(False)
    hidden = through(blocks, torch.ones(3, 8))
    assert [*store.copies] == [3, 4], "the backward pass never comes to the blocks below"
    assert store.most_alive == 1, "the one that is given away"
    del hidden
    assert store.copies == {}
    with torch.no_grad():
        through(blocks, torch.ones(3, 8))
    assert len(store.taken) == 4


def test_blocks_within_what_is_computed_again_as_a_whole_keep_no_inputs(store: Elsewhere) -> None:
    gradients: list[Tensor] = []
    for run in (through, functools.partial(recomputation.of_many_blocks, through)):
        blocks = layers(3)
        loss = run(blocks, torch.ones(3, 8)).square().sum()
        count = len(store.taken)
        loss.backward()
        assert len(store.taken) == count == 3
        gradients.append(torch.cat([block.weight.grad for block in blocks]))  # pyright: ignore
    assert torch.equal(*gradients)
    assert store.copies == {}


def test_a_block_that_is_given_its_input_by_name_is_refused(store: Elsewhere) -> None:
    with refused("offload_of_named_input"):
        recomputation.run(lambda: torch.ones(3), number=0, every=1)


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_share_rows_have_the_same_bits(stage: int, folder: Path, tmp_path: Path) -> None:
    train = {"steps": 2, "eval_every": 2, "gradient_checkpointing": True}
    values = experiment("causal_lm", folder, base=DEEP, train=train)
    stays, goes = (
        run_on_ranks(2, _sharing, values, folder, tmp_path / str(is_offloaded), stage, is_offloaded)
        for is_offloaded in (False, True)
    )
    for (lines, taken, left), (want, none, _) in zip(goes, stays, strict=True):
        assert lines == want
        assert taken >= 2 * BLOCKS
        assert left == none == 0


def _sharing(
    values: dict[str, Any], folder: Path, out: Path, stage: int, is_offloaded: bool
) -> tuple[list[dict[str, Any]], int, int]:
    """The lines of a run whose ranks share rows, how many inputs this rank gave away, and how many
    of these never came back.
    """
    elsewhere = Elsewhere()
    if is_offloaded:
        start.settle_inputs = lambda train: recomputation.keep_inputs_in(elsewhere)
    run = train_one(values, folder, out, stage=stage, ranks=2)
    return untimed(run / "metrics.jsonl"), len(elsewhere.taken), len(elsewhere.copies)


# On the pretended GPU
# --------------------------------------------------------------------------------------------------


def is_input(line: dict[str, Any]) -> bool:
    """Whether a line of the pretended GPU is an input on its way to the host, which does not wait:
    numbers of a step go there, too, and are smaller.
    """
    is_away = line.get("copy") == "to host" and line["stream"] and not line["waits"]
    return bool(is_away) and line["nbytes"] >= 1024


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_copies_them_on_a_stream_of_its_own_and_the_host_waits_no_more(
    stage: int, folder: Path, tmp_path: Path
) -> None:
    train = {"steps": 5, "log_every": 5, "eval_every": 5, "save_every": 5, "precision": "bf16"}
    values = experiment("causal_lm", folder, base=DEEP, train={**train, **OFFLOADED})
    file = tmp_path / "device.jsonl"
    goes = trained(values, folder, tmp_path / "goes", stage, file)
    del values["train"]["activation_offload"]
    assert goes == trained(values, folder, tmp_path / "stays", stage, tmp_path / "stays.jsonl")
    assert 0 < waits_of(file, 3).total() <= MOST
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    of_step = [line for line in lines if line["step"] == 3 and "copy" in line]
    micro_batches = values["train"]["global_batch"] // values["train"]["micro_batch"]
    to_host = [line for line in of_step if is_input(line)]
    assert len(to_host) == micro_batches * (BLOCKS - 1), "the newest stays"
    sizes = {line["nbytes"] for line in to_host}
    back = [line for line in of_step if line["copy"] == "to device" and line["nbytes"] in sizes]
    assert len(back) == micro_batches * (BLOCKS - 2), "nor does the one before have to come back"
    assert not [line for line in back if line["waits"] or not line["stream"]]


@pytest.mark.long
def test_a_killed_run_resumes_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    steps = {"steps": 5, "save_every": 2, "eval_every": 5}
    values = experiment("causal_lm", folder, base=DEEP, train={**steps, **OFFLOADED})
    straight, (outcome, resumed) = (
        run_on_ranks(1, each, with_dropout(values), folder, tmp_path / each.__name__)[0]
        for each in (_undisturbed, _killed)
    )
    assert outcome == "killed"
    for each in (_undisturbed, _killed):
        lines = (tmp_path / each.__name__ / "device.jsonl").read_text().splitlines()
        assert len([*filter(is_input, map(json.loads, lines))]) >= 5 * (BLOCKS - 1)
    assert untimed(resumed / "metrics.jsonl") == untimed(straight / "metrics.jsonl")
    whole, after = (run / "final" / "model.safetensors" for run in (straight, resumed))
    assert after.read_bytes() == whole.read_bytes()


def _undisturbed(values: dict[str, Any], folder: Path, root: Path) -> Path:
    root.mkdir()
    install(root / "device.jsonl")
    return train(values, folder, root, stage=2)[0]


def _killed(values: dict[str, Any], folder: Path, root: Path) -> tuple[str, Path]:
    root.mkdir()
    install(root / "device.jsonl")
    return _die_then_resume(values, folder, root, stage=2)


def test_the_planned_store_does_what_deepspeed_does(tmp_path: Path) -> None:
    found = run_alone(_both_stores, tmp_path / "device.jsonl")
    assert found["planned"] == found["deepspeed"]
    is_there, on_host, after = found["deepspeed"]
    assert is_there == [False, False, False, False, True, True]
    assert (on_host, after) == (BLOCKS - 1, 1)


def _both_stores(file: Path) -> dict[str, tuple[list[bool], int, int]]:
    """Of six inputs: whether the device still has each when the last one has been given away, and
    how many have host memory; the latter once more when a graph of five has been dropped, and two
    more inputs have come.
    """
    install(file)
    from tests.fake_cuda import DEVICE
    from trainer.training.engine import PinnedInputs

    found: dict[str, tuple[list[bool], int, int]] = {}
    for name, store in {"planned": PlannedInputs(), "deepspeed": PinnedInputs()}.items():
        storages: list[weakref.ref[Any]] = []
        numbers: list[int | None] = []
        for _ in range(BLOCKS):
            tensor = torch.ones(32, 32, device=DEVICE)
            storages.append(weakref.ref(tensor.untyped_storage()))
            numbers.append(store.offload_input(tensor))
            del tensor
        gc.collect()
        assert store.offload_input(torch.ones(32, device=DEVICE)) is None, "it is too small"
        is_there = [one() is not None for one in storages]
        on_host = len(store._nbytes if name == "planned" else store._tracker)
        for number in numbers[:-1]:
            assert number is not None
            store.forget_input(number)
        assert numbers[-1] is not None
        assert store.restore_input(numbers[-1]).shape == (32, 32)
        for _ in range(2):
            store.offload_input(torch.ones(32, 32, device=DEVICE))
        after = len(store._nbytes if name == "planned" else store._tracker)
        found[name] = (is_there, on_host, after)
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
            most = max(one.activations + one.logits for one in basis.worst.moments)
            found[name] = [basis.worst.offloaded, most, basis.plan.host]
    return found


def test_a_plan_counts_them_on_the_host_and_not_on_the_device(tmp_path: Path) -> None:
    found = run_alone(_planned, write_facts(tmp_path))
    on_host, most, host = found["goes"]
    assert found["stays"][0] == 0
    assert on_host > 0
    a_pinned = on_host // (BLOCKS - 1)
    assert a_pinned & (a_pinned - 1) == 0, "torch's pool takes powers of 2"
    an_input, rest = divmod(found["stays"][1] - most, BLOCKS - 2)
    assert rest == 0, "the newest two stay"
    assert a_pinned // 2 < an_input <= a_pinned
    assert host - found["stays"][2] == on_host


def _planned_on_processor(folder: Path) -> dict[str, list[Any]]:
    device = Device("a processor", 8 * GIB, 0, is_processor=True)
    target = Target(device, None, Cluster(1, 1))
    found: dict[str, list[Any]] = {}
    with measuring(fake_step.answer_all):
        for name, more in {"stays": {}, "goes": {"activation_offload": True}}.items():
            train = {"gradient_checkpointing": True, "precision": "bf16", **more}
            values = experiment("causal_lm", folder, base=DEEP, train=train)
            made = forecast(subject_for(values, options(folder), 1), target)
            memory = made.memory
            hosts = [stage.host for stage in made.advice.stages]
            found[name] = [memory.peak.peak.total, memory.host, made.advice.largest_rows, hosts]
            found[f"{name}, notes"] = memory.notes
    return found


def test_a_plan_of_a_processor_counts_them_where_they_are(tmp_path: Path) -> None:
    """A processor is its own host, and nothing goes anywhere in its runs."""
    found = run_alone(_planned_on_processor, write_facts(tmp_path))
    assert found["goes"] == found["stays"]
    assert found["stays, notes"] == []
    (note,) = found["goes, notes"]
    assert note == "on a processor train.activation_offload changes nothing"


def test_the_fastest_way_without_blocks_computed_again_offloads_none(folder: Path) -> None:
    time: Any = None
    values = experiment("causal_lm", folder, train=OFFLOADED)
    for every, is_offloaded in ((None, False), (1, True)):
        changed = Way("zero2", 1, every, 4, time, 0, 0).changes(values)
        assert changed["train"]["activation_offload"] is is_offloaded
        says_nothing = preflight._of_offload(plan(changed, options(folder), world=1, rank=0))
        assert [*says_nothing] == []


# What is refused, and what is said
# --------------------------------------------------------------------------------------------------


def test_without_blocks_that_are_computed_again_it_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    values = experiment("causal_lm", folder, train={"activation_offload": True})
    planned = plan(values, options(folder), world=1, rank=0)
    problems = "\n".join(preflight.look(planned, options(folder)).problems)
    says("offload_of_nothing", problems)
    says("offload_to_native_memory", problems)
    task = tasks.load(planned.cfg, options(folder).places)
    with refused("offload_of_nothing"):
        preflight.refuse_early(planned, options(folder), task)


def test_nothing_is_planned_that_a_run_would_refuse(folder: Path) -> None:
    values = experiment("causal_lm", folder, train={"activation_offload": True})
    with refused("offload_of_nothing"):
        subject_for(values, options(folder), 1)
    values["train"]["gradient_checkpointing"] = "auto"
    assert subject_for(values, options(folder), 1).cfg.train.activation_offload


def test_deepspeeds_own_key_is_refused_with_ours(folder: Path) -> None:
    cfg = tasks.parse(experiment("causal_lm", folder))
    file = {**deepspeed_config.read("zero2"), "activation_checkpointing": {}}
    file["activation_checkpointing"]["cpu_checkpointing"] = True
    with refused("deepspeed_own_recomputation"):
        deepspeed_config.build(file, train=cfg.train, optim=cfg.optim, world=1, source="test")


def test_a_client_drives_no_run_with_it(folder: Path) -> None:
    values = experiment("causal_lm", folder, lora={})
    values["data"] = {"source": "client"}
    values["train"] = {"steps": 1, "global_batch": 1, "micro_batch": 1, **OFFLOADED}
    with refused("driven_key", key="train.activation_offload=True"):
        tasks.parse(values)


@pytest.mark.parametrize(
    ("again", "told"),
    [
        (True, "a processor, where train.activation_offload changes nothing"),
        (False, 'gradient_checkpointing="auto": no block is computed again'),
    ],
)
def test_it_is_said_where_nothing_changes(
    again: bool, told: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = experiment("causal_lm", folder, train=OFFLOADED)
    values["train"]["gradient_checkpointing"] = "auto"
    cfg = auto.with_recomputation(tasks.parse(values), again)
    with caplog.at_level(logging.INFO):
        start.settle_inputs(cfg.train)
    assert told in caplog.text
    assert recomputation._store is None
