"""Layers that keep less for the backward pass: outputs, gradients and random states have the bits of
peft and transformers, and what is kept is counted.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.bases import DECODERS, ENCODERS, SCALED, SEQ2SEQ
from trainer.models import adapters, fused
from trainer.models.frozen.quantized import QuantizedLinear
from trainer.models.lean import adapter, gated
from trainer.models.lean.dropout import TorchDraw

peft = pytest.importorskip("peft", reason="the optional package peft is not installed")

EVERY = DECODERS | SCALED
# A scale of 2 is taken into A's result, one of 3 is not.
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1}
GATED: dict[str, Any] = {
    "t5 v1.1": (SEQ2SEQ["t5 v1.1"], {"dropout_rate": 0.2}),
    "mt5": (SEQ2SEQ["mt5"], {"dropout_rate": 0.2}),
    "umt5": (SEQ2SEQ["umt5"], {"dropout_rate": 0.2, "feed_forward_proj": "gated-gelu"}),
    "longt5": (SEQ2SEQ["longt5"], {"dropout_rate": 0.2, "feed_forward_proj": "gated-silu"}),
    "modernbert": (ENCODERS["modernbert"], {"mlp_dropout": 0.2}),
    "gemma2": (DECODERS["gemma2"], {}),
    "phi3": (DECODERS["phi3"], {}),
}


@dataclass
class Passed:
    """What a forward and a backward pass gave, and the bytes that it kept in between."""

    output: Tensor
    gradients: dict[str, Tensor]
    state: Tensor  # of the generator, at the end
    kept: int
    places: set[tuple[int, ...]]  # shapes of what was kept


def passed(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> Passed:
    """Forward and backward under seed 7, of the sum of squares of what `run` gives."""
    storages: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes: set[tuple[int, ...]] = set()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
            shapes.add(tuple(tensor.shape))
        return tensor

    torch.manual_seed(7)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = run(model)
    output.float().square().mean().backward()
    named = model.named_parameters()
    gradients = {name: p.grad for name, p in named if p.grad is not None}
    return Passed(output.detach(), gradients, torch.get_rng_state(), sum(storages.values()), shapes)


def same(stock: Passed, lean: Passed) -> None:
    """No bit differs, and something trains."""
    assert torch.equal(stock.output, lean.output)
    assert stock.gradients.keys() == lean.gradients.keys()
    assert any(gradient.any() for gradient in stock.gradients.values())
    for name, gradient in stock.gradients.items():
        assert gradient.isfinite().all(), name
        assert torch.equal(gradient, lean.gradients[name]), name
    assert torch.equal(stock.state, lean.state)


def with_adapters(model: Any, dtype: torch.dtype, **lora: Any) -> Any:
    """The model with adapters of peft whose B is not 0; nothing else trains."""
    config = peft.LoraConfig(target_modules="all-linear", **(LORA | lora))
    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        peft.inject_adapter_in_model(config, model)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.2)
            parameter.requires_grad_("lora_" in name)
    return model.to(dtype).train()


def lean_of(model: Any) -> Any:
    """A copy that keeps less."""
    lean = copy.deepcopy(model)
    gated.keep_less(lean)
    adapter.keep_less(lean)
    return lean


def built(of: tuple[str, dict[str, Any]], kind: Any, **more: Any) -> Any:
    family, values = of
    torch.manual_seed(1)
    model = kind.from_config(AutoConfig.for_model(family, **(values | more)))
    fused.fuse(model)
    return model


def logits(model: Any) -> Tensor:
    return model(input_ids=torch.arange(51).view(3, 17) + 2, use_cache=False).logits


@pytest.mark.parametrize("name", EVERY)
def test_adapters_in_every_family_keep_less_and_change_no_bit(name: str) -> None:
    stock = with_adapters(built(EVERY[name], AutoModelForCausalLM), torch.bfloat16)
    lean = lean_of(stock)
    one, other = passed(stock, logits), passed(lean, logits)
    same(one, other)
    assert other.kept < 0.9 * one.kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"lora_alpha": 12},
        {"lora_dropout": 0.0},
        {"use_rslora": True, "r": 3, "lora_alpha": 5},
        {"init_lora_weights": "pissa"},
    ],
    ids=["usual", "scale 3", "no dropout", "rslora", "pissa"],
)
def test_every_scale_and_dtype_has_the_bits_of_peft(
    lora: dict[str, Any], dtype: torch.dtype
) -> None:
    stock = with_adapters(built(EVERY["llama"], AutoModelForCausalLM), dtype, **lora)
    lean = lean_of(stock)
    same(passed(stock, logits), passed(lean, logits))
    stock.eval()
    with torch.no_grad():
        assert torch.equal(logits(stock), logits(lean.eval()))


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_blocks_that_are_computed_again_draw_the_same_masks(rate: float) -> None:
    stock = with_adapters(
        built(EVERY["llama"], AutoModelForCausalLM), torch.float32, lora_dropout=rate
    )
    lean = lean_of(stock)
    want = passed(stock, logits)
    how = {"use_reentrant": False}
    lean.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    again = passed(lean, logits)
    same(want, again)
    assert again.kept < want.kept / 4


@pytest.mark.parametrize("is_adapted", [False, True], ids=["whole", "adapters"])
@pytest.mark.parametrize("name", GATED)
def test_a_gated_layer_keeps_two_factors_and_changes_no_bit(name: str, is_adapted: bool) -> None:
    of, more = GATED[name]
    kind = AutoModelForSeq2SeqLM if "t5" in name else AutoModel
    stock = built(of, kind, **more).train()
    if is_adapted:
        stock = with_adapters(stock, torch.bfloat16)
    lean = lean_of(stock)
    kinds = {type(module).__mro__[1].__name__ for module in lean.modules()}
    assert kinds & gated.CLASSES

    def run(model: Any) -> Tensor:
        ids = torch.arange(34).view(2, 17) + 2
        if "t5" in name:
            return model(input_ids=ids, decoder_input_ids=ids[:, :5]).logits
        return model(input_ids=ids).last_hidden_state

    one, other = passed(stock, run), passed(lean, run)
    same(one, other)
    assert other.kept < one.kept


def test_what_a_block_keeps_is_the_two_factors_and_each_input_once() -> None:
    rows, width, inner, r = 5, 32, 48, 4  # of LLAMA's shape in tests/bases.py
    stock = with_adapters(built(EVERY["llama"], AutoModelForCausalLM), torch.float32)
    mlp = lean_of(stock.model.layers[0].mlp)
    hidden = torch.randn(rows, width, requires_grad=True)
    other = passed(mlp, lambda model: model(hidden))
    lows, factors = 3 * rows * r, 2 * rows * inner
    masks = 2 * rows * width + rows * inner  # of a byte, for a processor
    assert other.kept == 4 * (rows * width + factors + lows) + masks
    assert (rows, inner) in other.places
    stocks = passed(stock.model.layers[0].mlp, lambda model: model(hidden))
    # a mask of four bytes a number and what dropout left of each input; silu's result
    assert stocks.kept == 4 * (2 * (2 * rows * width + rows * inner) + 3 * rows * inner + lows)


def test_an_activation_with_weights_of_its_own_trains_them() -> None:
    stock = built(EVERY["llama"], AutoModelForCausalLM, hidden_act="xielu", num_hidden_layers=1)
    lean = lean_of(stock)
    assert type(lean.model.layers[0].mlp) is type(stock.model.layers[0].mlp)
    assert type(lean.model.layers[0].mlp.act_fn).__name__ == "XIELUActivation"


@pytest.mark.parametrize(
    ("of_input", "of_adapter"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_an_input_of_another_dtype_is_converted_as_peft_does(
    of_input: torch.dtype, of_adapter: torch.dtype
) -> None:
    torch.manual_seed(3)
    base = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 8)).to(of_input)
    stock = with_adapters(base, of_input)
    for layer in adapters.layers_of(stock):
        layer.lora_A.to(of_adapter)
        layer.lora_B.to(of_adapter)
    hidden = torch.randn(6, 24, dtype=of_input)
    same(*(passed(model, lambda one: one(hidden)) for model in (stock, lean_of(stock))))


def test_a_quantised_base_has_the_bits_of_peft() -> None:
    torch.manual_seed(3)
    layers = [QuantizedLinear(nn.Linear(24, 24), 8, torch.float32) for _ in range(2)]
    stock = with_adapters(nn.Sequential(*layers), torch.float32)
    hidden = torch.randn(6, 24)
    lean = lean_of(stock)
    assert all(layer.takes_remade for layer in adapters.layers_of(lean))
    same(*(passed(model, lambda one: one(hidden)) for model in (stock, lean)))


def test_dora_and_adapters_that_are_off_merged_or_several_run_the_code_of_peft() -> None:
    hidden = torch.randn(6, 24)

    def layer(**lora: Any) -> tuple[Any, Any]:
        torch.manual_seed(3)
        stock = with_adapters(nn.Sequential(nn.Linear(24, 8)), torch.float32, **lora)
        return stock, lean_of(stock)

    stock, lean = layer(use_dora=True)
    assert type(lean[0]) is type(stock[0])
    same(*(passed(model, lambda one: one(hidden)) for model in (stock, lean)))
    stock, lean = layer()
    assert not torch.equal(stock(hidden), stock[0].base_layer(hidden))
    with adapters.switched_off([lean[0]]):
        assert torch.equal(lean(hidden), stock[0].base_layer(hidden))
    for model in (stock, lean):
        model.eval()[0].merge()
    assert torch.equal(lean(hidden), stock(hidden))
    assert torch.equal(lean(hidden), lean[0].base_layer(hidden))
    stock, lean = layer(lora_dropout=0.0)
    for model in (stock, lean):
        torch.manual_seed(4)
        config = peft.LoraConfig(r=2, init_lora_weights=False)
        model[0].update_layer("other", 2, lora_alpha=4, config=config)
        model[0].set_adapter(["default", "other"])
    same(*(passed(model, lambda one: one(hidden)) for model in (stock, lean)))


@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_mask_is_drawn_again_and_other_draws_are_not_disturbed(
    rate: float, is_transposed: bool
) -> None:
    input = torch.randn(40, 30)
    input = (input.t() if is_transposed else input).requires_grad_()
    torch.manual_seed(5)
    want = F.dropout(input, rate)
    (gradient,) = torch.autograd.grad(want.sum(), input)
    torch.manual_seed(5)
    draw = TorchDraw(input.device, rate)
    first = draw.first(input)
    assert torch.equal(first.values, want)
    after = torch.rand(3)
    again = draw.again(input.detach(), torch.ones_like(input, requires_grad=False), *first.kept)
    then = torch.rand(3)
    assert torch.equal(again.values, want)
    assert again.gradient is not None
    assert torch.equal(again.gradient, gradient)
    torch.manual_seed(5)
    F.dropout(input, rate)
    assert torch.equal(after, torch.rand(3))
    assert torch.equal(then, torch.rand(3))


def test_a_device_that_draws_fast_keeps_no_mask_but_its_generators_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A processor plays the device: its generator, and its tensors."""
    module = SimpleNamespace(
        get_rng_state=lambda device: torch.get_rng_state(),
        set_rng_state=lambda state, device: torch.set_rng_state(state),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    input = torch.randn(40, 30).requires_grad_()
    torch.manual_seed(5)
    draw = TorchDraw(torch.device("meta"), 0.4)
    first = draw.first(input)
    (gradient,) = torch.autograd.grad(first.values.sum(), input)
    assert not first.kept
    after = torch.rand(3)
    again = draw.again(input.detach(), torch.ones_like(input, requires_grad=False))
    then = torch.rand(3)
    assert torch.equal(again.values == 0, first.values == 0)
    assert torch.allclose(again.values, first.values)  # on a processor torch multiplies twice
    assert again.gradient is not None
    assert torch.allclose(again.gradient, gradient)
    torch.manual_seed(5)
    F.dropout(input, 0.4)
    assert torch.equal(after, torch.rand(3))
    assert torch.equal(then, torch.rand(3))


def test_only_a_power_of_two_that_loses_no_bit_is_taken_into_the_low_numbers() -> None:
    seen: list[Tensor] = []

    def up(low: Tensor) -> Tensor:
        seen.append(low)
        return low

    low = torch.full((2,), 1.5)
    for dtype, scale, moved in [
        (torch.float32, 2.0, 2.0),
        (torch.bfloat16, 0.25, 0.25),
        (torch.float32, 1.0, 1.0),
        (torch.float32, 3.0, 1.0),
        (torch.float32, 5 / math.sqrt(3), 1.0),
        (torch.float16, 2.0, 1.0),
    ]:
        result = adapter.scaled(up, low.to(dtype), scale)
        assert torch.equal(result, low.to(dtype) * scale)
        assert torch.equal(seen.pop(), low.to(dtype) * moved)


def test_a_bias_of_an_adapter_is_scaled_with_it() -> None:
    up, low = torch.nn.Linear(3, 5), torch.randn(2, 3)
    assert torch.equal(adapter.scaled(up, low, 2.0), up(low) * 2.0)
    plain = torch.nn.Linear(3, 5, bias=False)
    assert torch.equal(adapter.scaled(plain, low, 2.0), plain(low) * 2.0)


@pytest.mark.long  # 8 CPU seconds: a compiler is imported
def test_compiled_layers_run_the_stock_code() -> None:
    stock = with_adapters(built(EVERY["llama"], AutoModelForCausalLM), torch.float32)
    mlp = stock.model.layers[0].mlp
    lean = lean_of(mlp)
    compiled: Any = torch.compile(lean, backend="eager", fullgraph=True)
    hidden = torch.randn(5, 32, requires_grad=True)
    one, other = (passed(model, lambda one: one(hidden)) for model in (mlp, compiled))
    assert torch.equal(one.output, other.output)
    assert one.kept == other.kept
