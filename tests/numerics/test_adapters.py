"""Adapters in every task: the losses of a run are those of peft in a plain torch loop, every adapter
takes part, and what is exported is the same model for peft and for stock transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exp_configs import vary
from tests.contract.runs import from_folder, losses, train
from tests.facts import experiment, write_facts
from tests.ranks import run_on_ranks
from tests.tolerance import assert_close, note
from tests.wording import refused
from trainer import tasks
from trainer.exports import record
from trainer.exports.merge import merge
from trainer.models import adapters
from trainer.protocol.task import DRAW, EPOCH, Places
from trainer.runtime import distributed

peft = pytest.importorskip("peft", reason="the optional package peft is not installed")

from tests.numerics import plain_peft  # noqa: E402 (it imports peft)

TASKS = tasks.names()
STEPS, ROWS, LR = 8, 8, 0.005
TRAIN = {
    "steps": STEPS,
    "global_batch": ROWS,
    "micro_batch": ROWS,
    "order": "as_given",
    "eval_every": STEPS,
    "save_every": STEPS,
    "eval_batch": 11,
    "best": None,
}
# every draw of rows, distractors and passages the first ones
# as the plain loop has it
OF_TASK = {"preference": {"preference": {"loss": "simpo", "beta": 2.0, "gamma": 0.5}}}
DATA: dict[str, dict[str, Any]] = {
    "causal_lm": {"max_tokens": 128},
    "cross_attention": {"shuffled_context": False},
    "retriever": {"select_positive": "first", "select_negatives": "first"},
    "vera": {"statements": 5},
}
# Of a loss, as tests/tolerance.py means it: twelve products of at most 64 terms.
LOSS: dict[str, Any] = {"what": "loss", "depth": 12 * 64, "margin": 0.3}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "alpha": 8, "dropout": 0.0},
    "rslora": {"r": 4, "alpha": 4, "dropout": 0.0, "rslora": True, "targets": "all-linear"},
    "dora": {"r": 2, "alpha": 8, "dropout": 0.0, "dora": True, "targets": "all-linear"},
}
every_kind = pytest.mark.parametrize(
    "kind", ["lora", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("rslora", "dora"))]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


def values_of(
    name: str, kind: str, folder: Path, bases: Path, *, is_smooth: bool = False
) -> dict[str, Any]:
    """is_smooth: a T5 without a ReLU."""
    values = experiment(
        name,
        folder,
        train=TRAIN,
        optim={"lr": LR},
        schedule={"shape": "constant", "warmup_steps": 0},
        data=DATA.get(name, {}),
        lora=KINDS[kind],
        **OF_TASK.get(name, {}),
    )
    config = values["base"]["config"]  # type: ignore[index]
    if is_smooth and config["model_type"] == "t5":  # type: ignore[index]
        config |= {"feed_forward_proj": "gated-gelu"}  # type: ignore[operator]
    return from_folder(values, bases)


def loaded(values: dict[str, Any], folder: Path) -> Any:
    return tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder / "runs"))


def added_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """What a task's new layers hold, by name."""
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not adapters.is_adapter(name)
    }


def plain_of(task: Any, model: torch.nn.Module) -> plain_peft.Plain:
    """The plain model that starts from what `model`, ours, starts from."""
    lora = task.cfg.lora
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets,  # None: as peft knows the family
        use_rslora=lora.rslora,
        use_dora=lora.dora,
    )
    loop = plain_peft.LOOPS[task.cfg.task]
    base = loop.read(str(task.cfg.base))
    torch.manual_seed(task.cfg.train.seed)
    return loop(peft.get_peft_model(base, config), added_of(model))


def randomise(model: torch.nn.Module) -> dict[str, Tensor]:
    """Move every trained matrix of a model, for B begins at 0 and hides A; all trained weights by
    name.
    """
    generator = torch.Generator().manual_seed(1)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            if parameter.ndim > 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return trained  # type: ignore[return-value]


def drawn_rows(task: Any) -> tuple[list[Any], Any]:
    """Some encoded rows, and the batch that they are in training."""
    rows = [task.encode(row) for row in task.rows("train")][:ROWS]
    return rows, task.collate([{**row, DRAW: [5], EPOCH: [0]} for row in rows])


def loss_of(task: Any, model: torch.nn.Module, batch: Any) -> Tensor:
    """() the mean that a step minimises."""
    (summed,) = task.losses(model, [batch])
    return summed / task.units(batch)


def named_as_peft_does(task: Any, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Trained tensors of ours under the names of plain_peft."""
    place = {"retriever": "query_model."}.get(task.cfg.task, f"{task.base_name}.")
    return {
        f"base_model.model.{name.removeprefix(place)}".replace(".default", "")
        if adapters.is_adapter(name)
        else name: tensor
        for name, tensor in named.items()
    }


# Training
# --------------------------------------------------------------------------------------------------


def _losses_of_runs(
    of_task: dict[str, dict[str, Any]], folder: Path, savedir: Path
) -> dict[str, list[float]]:
    return {name: losses(train(values, folder, savedir)[1]) for name, values in of_task.items()}


@pytest.mark.long
@every_kind
def test_the_losses_of_a_run_are_those_of_peft_in_a_plain_loop(
    kind: str, folder: Path, bases: Path, tmp_path: Path
) -> None:
    # Where a unit of a ReLU is within rounding of 0, one of two equal runs has a gradient there and
    # the other has none: from that step on they part.
    of_task = {name: values_of(name, kind, folder, bases, is_smooth=True) for name in TASKS}
    (got,) = run_on_ranks(1, _losses_of_runs, of_task, folder, tmp_path)
    for name, values in of_task.items():
        task = loaded(values, folder)
        plain = plain_of(task, task.model())
        rows = [task.encode(row) for row in task.rows("train")]
        steps = [rows[start : start + ROWS] for start in range(0, STEPS * ROWS, ROWS)]
        want = plain_peft.trained_losses(plain, steps, lr=LR)
        assert len(got[name]) == STEPS
        assert abs(want[-1] - want[0]) > 0.01, f"{name}: something trains"
        apart = max(abs(one - two) for one, two in zip(got[name], want, strict=True))
        note("losses", f"{name} {kind}", apart, 1e-5)
        assert apart < 1e-5, f"{name}: {got[name]} {want}"


@every_kind
@pytest.mark.parametrize("name", TASKS)
def test_every_adapter_has_the_gradient_that_peft_gives_it(
    name: str, kind: str, folder: Path, bases: Path
) -> None:
    assert distributed.world() == 1
    task = loaded(values_of(name, kind, folder, bases), folder)
    model = task.model().train()
    plain = plain_of(task, model)
    ours, theirs = named_as_peft_does(task, randomise(model)), plain.trained()
    assert ours.keys() == theirs.keys()
    with torch.no_grad():
        for key, parameter in theirs.items():
            parameter.copy_(ours[key])
    rows, batch = drawn_rows(task)
    loss_of(task, model, batch).backward()
    plain.loss(rows).backward()
    largest = max(float(p.grad.abs().max()) for p in theirs.values())
    for key, parameter in theirs.items():
        gradient = ours[key].grad
        assert gradient is not None, key
        if ".lora_" in key:
            assert gradient.abs().max() > 0, f"{key} takes no part"
        assert (gradient - parameter.grad).abs().max() < 1e-5 * largest, key


# Exports
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lora", "rslora", pytest.param("dora", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", TASKS)
def test_adapters_are_exported_as_peft_reads_them(
    name: str, kind: str, folder: Path, bases: Path, tmp_path: Path
) -> None:
    task = loaded(values_of(name, kind, folder, bases), folder)
    model = task.model()
    trained = {key: p.detach().clone() for key, p in randomise(model).items()}
    task.export(trained, tmp_path / "final")
    rows, batch = drawn_rows(task)
    want = loss_of(task, model.eval(), batch)
    again = loss_of(task, task.load_export(tmp_path / "final").eval(), batch)
    assert torch.equal(again, want)
    loop = plain_peft.LOOPS[name]
    stock = loop.read(str(task.cfg.base))
    read = peft.PeftModel.from_pretrained(stock, tmp_path / "final")
    assert_close(loop(read, added_of(model)).loss(rows), want, **LOSS)
    config = tmp_path / "final" / "config.json"  # of cross_attention, whose code reads the base
    if name == "cross_attention":
        assert json.loads(config.read_text())["base"] == task.cfg.base
        assert not (tmp_path / "final" / "base").exists()
    else:
        assert not config.exists(), "the base is named, not copied"


@pytest.mark.parametrize("name", [name for name in TASKS if name != "cross_attention"])
def test_merging_an_export_gives_the_files_of_a_run_that_merges(
    name: str, folder: Path, bases: Path, tmp_path: Path
) -> None:
    values = values_of(name, "lora", folder, bases)
    task = loaded(values, folder)
    weights = {key: p.detach().clone() for key, p in randomise(task.model()).items()}
    task.export(weights, tmp_path / "final")
    record.write(
        tmp_path / "final",
        record.of_run(tmp_path / "final", values=values, task=task, run_folder=tmp_path),
    )
    merge(tmp_path, tmp_path / "merged", task.places)
    whole = vary(values, lora={"export": "merged"})
    loaded(whole, folder).export(weights, tmp_path / "want")
    made = record.read(tmp_path / "merged")
    assert made is not None
    assert made.experiment == whole
    assert made.files == record.digests(tmp_path / "want")
    with refused("merge_without_adapters", folder=tmp_path / "merged"):
        merge(tmp_path / "merged", tmp_path / "twice", task.places)
    with refused("merge_exists", out=tmp_path / "merged"):
        merge(tmp_path, tmp_path / "merged", task.places)


@every_kind
@pytest.mark.parametrize("name", [name for name in TASKS if name != "cross_attention"])
def test_merged_adapters_are_a_stock_model(
    name: str, kind: str, folder: Path, bases: Path, tmp_path: Path
) -> None:
    values = values_of(name, kind, folder, bases)
    task = loaded(vary(values, lora={"export": "merged"}), folder)
    model = task.model()
    task.export(
        {key: p.detach().clone() for key, p in randomise(model).items()}, tmp_path / "final"
    )
    rows, batch = drawn_rows(task)
    want = loss_of(task, model.eval(), batch)
    loop = plain_peft.LOOPS[name]
    stock = loop.read(str(tmp_path / "final"))
    assert_close(loop(stock, added_of(model)).loss(rows), want, **LOSS)
    for reader in (task, loaded({**values, "lora": None}, folder)):
        again = loss_of(reader, reader.load_export(tmp_path / "final").eval(), batch)
        assert_close(again, want, **LOSS)
    assert not list(tmp_path.glob("final/adapter*"))
