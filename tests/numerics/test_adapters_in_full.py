"""Adapters in some layers, of several ranks, that begin otherwise, with biases and modules that train
whole beside them: each is what peft makes of the same words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exp_configs import vary
from tests.contract.runs import from_folder, losses, train, untimed
from tests.facts import LLAMA, experiment, with_dropout, write_facts
from tests.long import long_but
from tests.ranks import run_on_ranks
from tests.tolerance import assert_close
from tests.wording import Fault, fault, refused
from trainer import tasks
from trainer.exports import record
from trainer.exports.merge import merge
from trainer.models import adapters
from trainer.models.frozen.freezing import trainable_report

peft = pytest.importorskip("peft", reason="the optional package peft is not installed")

from tests.numerics import plain_peft  # noqa: E402 (it imports peft)
from tests.numerics.test_adapters import (  # noqa: E402
    LOSS,
    drawn_rows,
    loaded,
    loss_of,
    randomise,
)

SMALL = {"r": 4, "alpha": 8, "dropout": 0.0}
# By kind: our words, and peft's for the same.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layers": (
        {"layers": [1, 3], "targets": "all-linear"},
        {"target_modules": r"transformer\.h\.[13]\..*(c_attn|c_proj|c_fc)"},
    ),
    "patterns": (
        {
            "targets": ["c_attn", "c_fc"],
            "patterns": [{"match": "h.1.*", "r": 2}, {"match": "c_fc", "r": 6, "alpha": 3}],
        },
        {
            "target_modules": ["c_attn", "c_fc"],
            "rank_pattern": {r"h\.1\..*": 2, "c_fc": 6},
            "alpha_pattern": {r"h\.[023]\.mlp.c_fc": 3},
        },
    ),
    "gaussian": ({"init": "gaussian"}, {"init_lora_weights": "gaussian"}),
    "pissa": ({"init": "pissa"}, {"init_lora_weights": "pissa"}),
    "pissa of patterns": (
        {"init": "pissa", "rslora": True, "patterns": [{"match": "h.0.*", "r": 2, "alpha": 3}]},
        {
            "init_lora_weights": "pissa",
            "use_rslora": True,
            "rank_pattern": {r"h\.0\..*": 2},
            "alpha_pattern": {r"h\.0\..*": 3},
        },
    ),
    "fast pissa": ({"init": "pissa_niter_16"}, {"init_lora_weights": "pissa_niter_16"}),
    "all biases": ({"bias": "all"}, {"bias": "all"}),
    "biases of layers": ({"bias": "lora_only"}, {"bias": "lora_only"}),
    "tokens": ({"tokens": [9, 5, 300]}, {"trainable_token_indices": {"wte": [9, 5, 300]}}),
    "modules": ({"modules_to_save": ["wpe", "h.2.mlp"]}, {"modules_to_save": ["wpe", "h.2.mlp"]}),
}
EVERYTHING: dict[str, Any] = {
    "r": 3,
    "alpha": 5,
    "dropout": 0.2,
    "layers": [0, 2],
    "targets": "all-linear",
    "patterns": [{"match": "c_attn", "r": 2}],
    "bias": "all",
    "modules_to_save": ["ln_f", "wpe"],
    "tokens": [7, 11],
    "init": "pissa",
}
every_kind = pytest.mark.parametrize(
    "kind", long_but(("layers", "patterns", "pissa", "modules", "tokens"), KINDS)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


def values_of(folder: Path, bases: Path, lora: dict[str, Any]) -> dict[str, Any]:
    values = experiment("causal_lm", folder, data={"max_tokens": 128}, lora=SMALL | lora)
    return from_folder(values, bases)


def task_of(kind: str, folder: Path, bases: Path, **more: Any) -> Any:
    return loaded(values_of(folder, bases, KINDS[kind][0] | more), folder)


def plain_of(task: Any, kind: str) -> plain_peft.Plain:
    """What peft makes of the same words, from the same seed."""
    how = {"r": SMALL["r"], "lora_alpha": SMALL["alpha"], "lora_dropout": 0.0}
    config = peft.LoraConfig(**how, **KINDS[kind][1])
    base = plain_peft.CausalLM.read(str(task.cfg.base))
    torch.manual_seed(task.cfg.train.seed)
    return plain_peft.CausalLM(peft.get_peft_model(base, config), {})


def as_peft_names_them(trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """Trained tensors of ours under the names of plain_peft."""
    return {
        f"base_model.model.{name.removeprefix('base.')}".replace(".default", "").replace(
            ".token_rows", ".token_adapter.trainable_tokens_delta"
        ): tensor
        for name, tensor in trained.items()
    }


def trained_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}  # type: ignore[misc]


@every_kind
def test_what_trains_and_how_is_what_peft_makes_of_it(kind: str, folder: Path, bases: Path) -> None:
    task = task_of(kind, folder, bases)
    model = task.model().train()
    plain = plain_of(task, kind)
    theirs = {
        name.replace(".modules_to_save", ""): parameter
        for name, parameter in plain.trained().items()
    }
    ours = as_peft_names_them(trained_of(model))
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert torch.equal(ours[name], parameter), f"{name} begins otherwise"
    assert trainable_report(task.skeleton()) == trainable_report(model), "as the plan counts it"
    randomise(model)
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(ours[name])
    rows, batch = drawn_rows(task)
    loss, other = loss_of(task, model, batch), plain.loss(rows)
    assert_close(loss, other, **LOSS)
    loss.backward()
    other.backward()
    largest = max(float(p.grad.abs().max()) for p in theirs.values())
    for name, parameter in theirs.items():
        gradient = ours[name].grad
        assert gradient is not None, name
        assert (gradient - parameter.grad).abs().max() < 1e-5 * largest, name


@every_kind
def test_an_export_is_the_same_model_for_peft_and_for_us(
    kind: str, folder: Path, bases: Path, tmp_path: Path
) -> None:
    task = task_of(kind, folder, bases)
    model = task.model()
    weights = {name: p.detach().clone() for name, p in randomise(model).items()}
    rows, batch = drawn_rows(task)
    want = loss_of(task, model.eval(), batch)
    task.export(weights, tmp_path / "final")
    assert_close(loss_of(task, task.load_export(tmp_path / "final").eval(), batch), want, **LOSS)
    stock = plain_peft.CausalLM.read(str(task.cfg.base))
    read = peft.PeftModel.from_pretrained(stock, tmp_path / "final")
    assert_close(plain_peft.CausalLM(read, {}).loss(rows), want, **LOSS)
    whole = task_of(kind, folder, bases, export="merged")
    whole.export(weights, tmp_path / "merged")
    stock = plain_peft.CausalLM.read(str(tmp_path / "merged"))
    assert_close(plain_peft.CausalLM(stock, {}).loss(rows), want, **LOSS)
    made = record.of_run(
        tmp_path / "final",
        values=values_of(folder, bases, KINDS[kind][0]),
        task=task,
        run_folder=tmp_path,
    )
    record.write(tmp_path / "final", made)
    merge(tmp_path / "final", tmp_path / "later", task.places)
    stock = plain_peft.CausalLM.read(str(tmp_path / "later"))
    assert_close(plain_peft.CausalLM(stock, {}).loss(rows), want, **LOSS)


def test_a_run_that_begins_with_a_part_of_its_base_is_exported_beside_the_whole(
    folder: Path, bases: Path, tmp_path: Path
) -> None:
    task = task_of("pissa", folder, bases)
    model = task.model()
    whole = loaded(values_of(folder, bases, {}), folder).model()
    name = "transformer.h.0.attn.c_attn.base_layer.weight"
    taken = dict(model.base.named_parameters())[name]
    assert not torch.equal(taken, dict(whole.base.named_parameters())[name])
    task.export({name: p.detach() for name, p in trained_of(model).items()}, tmp_path / "final")
    said = json.loads((tmp_path / "final" / adapters.ADAPTER).read_text())
    assert (said["r"], said["lora_alpha"]) == (2 * SMALL["r"], 2 * SMALL["alpha"])
    assert "init_lora_weights" not in said
    read = task.load_export(tmp_path / "final")
    assert torch.equal(
        dict(read.base.named_parameters())[name], dict(whole.base.named_parameters())[name]
    )


# Runs
# --------------------------------------------------------------------------------------------------


def resumed(values: dict[str, Any], folder: Path, savedir: Path, stage: int) -> tuple[Path, Path]:
    """The folders of an undisturbed run and of one that was killed. A collective."""
    from tests.contract.test_task_contract import _die_then_resume

    straight, _ = train(values, folder, savedir / "straight", stage)
    outcome, killed = _die_then_resume(values, folder, savedir / "killed", stage)
    assert outcome == "killed"
    return straight, killed


@pytest.mark.parametrize(
    ("world", "stage"),
    [
        pytest.param(world, stage, marks=pytest.mark.long)
        for world in (1, 2)
        for stage in (0, 1, 2, 3)
    ],
)
def test_a_run_with_everything_is_the_same_at_every_stage_and_after_a_kill(
    world: int, stage: int, folder: Path, bases: Path, tmp_path: Path
) -> None:
    values = with_dropout(experiment("causal_lm", folder, train={"steps": 4, "save_every": 2}))
    values = {**from_folder(values, bases), "lora": EVERYTHING}
    straight, killed = map(Path, run_on_ranks(world, resumed, values, folder, tmp_path, stage)[0])
    one, two = (untimed(path / "metrics.jsonl") for path in (straight, killed))
    assert one == two
    files = [
        (path / "final" / "adapter_model.safetensors").read_bytes() for path in (straight, killed)
    ]
    assert files[0] == files[1]
    still = vary(
        values,
        lora={"dropout": 0.0},
        base=from_folder(experiment("causal_lm", folder, train={"steps": 4}), bases)["base"],
    )
    alone = run_on_ranks(1, train, still, folder, tmp_path / "alone", 0)[0][1]
    here = run_on_ranks(world, train, still, folder, tmp_path / "here", stage)[0][1]
    assert losses(here) == pytest.approx(losses(alone), abs=1e-5)
    assert len(set(losses(alone))) == len(losses(alone)) > 1


# What is refused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"init": "pissa", "r": 4096}, fault("lora_rank_beyond", r=4096)),
        ({"tokens": [5, 70000]}, fault("lora_token_absent", token=70000)),
        ({"layers": [1, 9]}, fault("lora_layers_absent", absent="9")),
        ({"patterns": [{"match": "c_atn"}]}, fault("lora_pattern_unfit", match="c_atn")),
        ({"modules_to_save": ["lm_heat"]}, fault("lora_module_absent", module="lm_heat")),
        ({"modules_to_save": ["lm_head"]}, fault("lora_module_shared", module="lm_head")),
    ],
)
def test_layers_and_modules_that_are_not_there_are_refused(
    lora: dict[str, Any], said: Fault, folder: Path
) -> None:
    task = loaded(experiment("causal_lm", folder, lora=lora), folder)
    for build in (task.model, task.skeleton):
        with refused(said):
            build()


def test_biases_that_a_base_does_not_have_are_refused(folder: Path) -> None:
    task = loaded(experiment("causal_lm", folder, base=LLAMA, lora={"bias": "all"}), folder)
    with refused("lora_bias_absent"):
        task.skeleton()


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("cross_attention", {"lora": {"init": "pissa"}}, fault("lora_changes_encoder")),
        ("cross_attention", {"lora": {"bias": "all"}}, fault("lora_changes_encoder")),
        ("cross_attention", {"lora": {"tokens": [1]}}, fault("lora_changes_encoder")),
        ("causal_lm", {"lora": {"tokens": [3, 3]}}, fault("lora_token_twice")),
        ("causal_lm", {"lora": {"init": "pissa", "dora": True}}, fault("lora_pissa_dora")),
        (
            "causal_lm",
            {"lora": {"init": "pissa"}, "train": {"base_bits": 8}},
            fault("lora_moved_bits"),
        ),
    ],
)
def test_what_changes_a_base_that_must_stay_is_refused(
    name: str, values: dict[str, Any], said: Fault, folder: Path
) -> None:
    with refused(said):
        tasks.parse(vary(experiment(name, folder), **values))
