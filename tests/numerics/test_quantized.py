"""A frozen base in 8 or 4 bits: what is computed, what is kept, what is refused."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from exp_configs import vary
from tests.contract.runs import SHORT, untimed
from tests.contract.test_task_adapters import _run_and_read, bytes_of
from tests.contract.test_task_contract import _die_then_resume
from tests.facts import experiment, write_facts
from tests.numerics import test_memory_plan_adapters as plans
from tests.ranks import run_alone, run_on_ranks
from tests.tolerance import note
from tests.wording import refused
from trainer import tasks
from trainer.config import deepspeed_config
from trainer.models.frozen.quantized import QuantizedLinear
from trainer.protocol.task import DRAW, EPOCH, Places

pytest.importorskip("bitsandbytes", reason="the optional package bitsandbytes is not installed")
TASKS = tasks.names()
LORA: dict[str, Any] = {"r": 4, "dropout": 0.0}
# The largest error of a product, by its largest number: half a step of 127 in a row; NF4's widest
# gap, .15, halved, of a block's largest weight. Sums of 256 such errors, at random signs.
ERRORS = {8: 0.02, 4: 0.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def values_of(task: str, folder: Path, bits: int | None, **train: Any) -> dict[str, Any]:
    packed = {} if bits is None else {"base_bits": bits}
    return experiment(task, folder, train=train | packed, lora=LORA)


def loaded(values: dict[str, Any], folder: Path) -> Any:
    return tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder / "runs"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_product_is_that_of_the_unpacked_weight_forward_and_backward(
    bits: Any, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    plain = nn.Linear(256, 96).to(dtype)
    layer = QuantizedLinear(plain, bits, torch.float32).to(dtype)
    assert layer.scales.dtype == torch.float32, "scales are not converted with the model"
    x = torch.randn(3, 5, 256, dtype=dtype, requires_grad=True)
    layer(x).square().sum().backward()
    found, x.grad = x.grad, None
    twin = nn.functional.linear(x, layer.weight, plain.bias)
    twin.square().sum().backward()
    assert torch.equal(layer(x), twin)
    assert torch.equal(found, x.grad)
    stock = plain(x)
    error = (twin - stock).abs().max() / stock.abs().max()
    assert 1e-4 < error < ERRORS[bits]
    assert not next(layer.parameters()).requires_grad
    assert layer.packed.nbytes == 256 * 96 * bits // 8


def test_a_row_or_a_block_of_zeros_stays_zero() -> None:
    plain = nn.Linear(64, 8, bias=False)
    with torch.no_grad():
        plain.weight[3] = 0
    for bits in (8, 4):
        weight = QuantizedLinear(plain, bits, torch.float32).weight
        assert weight.isfinite().all()
        assert weight[3].abs().max() == 0


def test_evaluation_in_between_changes_nothing() -> None:
    """bitsandbytes' own layer packs its weight anew for AVX-512 in evaluation, and has no gradient
    afterwards.
    """
    torch.manual_seed(2)
    layer = QuantizedLinear(nn.Linear(128, 64, bias=False), 4, torch.bfloat16).to(torch.bfloat16)
    x = torch.randn(4, 128, dtype=torch.bfloat16, requires_grad=True)
    before = torch.autograd.grad(layer(x).sum(), x)[0]
    layer.eval()
    with torch.no_grad():
        layer(x)
    layer.train()
    assert torch.equal(torch.autograd.grad(layer(x).sum(), x)[0], before)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("bits", [8, 4])
def test_every_task_has_its_base_in_so_many_bits(name: str, bits: int, folder: Path) -> None:
    values = values_of(name, folder, bits)
    task = loaded(values, folder)
    model, skeleton = task.model(), task.skeleton()
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert layers
    assert not [n for n in layers if n.endswith(".wo")]
    shapes = {n: (m.packed.shape, m.scales.shape) for n, m in layers.items()}
    planned = [(n, m) for n, m in skeleton.named_modules() if isinstance(m, QuantizedLinear)]
    assert {n: (m.packed.shape, m.scales.shape) for n, m in planned} == shapes
    plain = loaded(values_of(name, folder, None), folder).model()
    left = [n for n, m in plain.named_modules() if type(m) is nn.Linear and n not in layers]
    kept = ("lora_", "lm_head", "head", ".wo", "crossattention", "cross", "mlp", "pooler")
    assert [n for n in left if not any(word in n for word in kept)] == []
    rows = [task.encode(row) for row in islice(task.rows("train"), 2)]
    batch = task.collate([{**row, DRAW: [5], EPOCH: [0]} for row in rows])
    (loss, *_) = task.losses(model.train(), [batch])
    loss.backward()
    grown = [
        n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0
    ]
    assert any("lora_B" in n for n in grown)
    (stock, *_) = task.losses(plain.train(), [batch])
    # other weights, the same model: tiny random bases are near the uniform loss either way
    assert abs(loss.item() - stock.item()) < 0.1 * stock.item()


@pytest.mark.parametrize(
    ("name", "bits", "world", "stage"),
    [("causal_lm", 4, 2, 2), pytest.param("vera", 8, 1, 1, marks=pytest.mark.long)],
)
def test_a_killed_run_on_packed_weights_resumes_bit_for_bit_and_its_export_reads_back(
    name: str, bits: int, world: int, stage: int, folder: Path, tmp_path: Path
) -> None:
    values = values_of(name, folder, bits, **SHORT)
    straight, metrics, again = run_on_ranks(
        world, _run_and_read, values, folder, tmp_path / "straight", stage
    )[0]
    assert again == pytest.approx(metrics, rel=1e-5)
    outcome, killed = run_on_ranks(
        world, _die_then_resume, values, folder, tmp_path / "killed", stage
    )[0]
    assert outcome == "killed"
    assert untimed(killed / "metrics.jsonl") == untimed(straight / "metrics.jsonl")
    assert bytes_of(killed) == bytes_of(straight)


def test_a_merged_export_adds_adapters_to_the_weights_with_all_their_bits(folder: Path) -> None:
    values = vary(values_of("causal_lm", folder, 4), lora={"export": "merged"})
    task = loaded(values, folder)
    weights = {n: p.detach() for n, p in task.model().named_parameters() if p.requires_grad}
    task.export(weights, out := folder / "merged")
    saved = load_file(out / "model.safetensors")
    stock = dict(
        loaded(vary(values, lora=None, train={"base_bits": None}), folder)
        .model()
        .base.named_parameters()
    )
    assert saved.keys() == stock.keys()
    for name, tensor in saved.items():  # lora_B begins at zero
        assert torch.equal(tensor, stock[name].to(tensor.dtype)), name


def test_weights_that_train_and_stage_3_are_refused(folder: Path) -> None:
    plain = vary(experiment("causal_lm", folder), train={"base_bits": 8})
    with refused("base_bits_of_trained"):
        tasks.parse(plain)
    cfg = tasks.parse(values_of("causal_lm", folder, 4))
    with refused("stage_of_base_bits", bits=4, stage=3):
        deepspeed_config.build(
            deepspeed_config.read("zero3"), train=cfg.train, optim=cfg.optim, world=1, source="test"
        )


@pytest.mark.long
@pytest.mark.parametrize(
    ("bits", "precision"), [(8, "bf16"), (4, "fp32"), (4, "bf16"), ("fp8", "bf16")]
)
def test_a_step_on_packed_weights_is_planned_within_the_tolerance(
    bits: int | str, precision: str, folder: Path
) -> None:
    cases = [
        (vary(plans.values_of(name, "lora", precision, folder), train={"base_bits": bits}), 2)
        for name in TASKS
    ]
    predicted = run_alone(plans._every_predicted, cases, folder)
    (real,) = run_on_ranks(1, plans._every_real, cases, folder)
    for name, planned, allocated in zip(TASKS, predicted, real, strict=True):
        note("bytes", name, abs(planned - allocated), plans.TOLERANCE * allocated)
        assert planned == pytest.approx(allocated, rel=plans.TOLERANCE), name
