"""Masks that are drawn again, on a CUDA device: as F.dropout draws them, and as peft has them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainer.models.lean import adapter
from trainer.models.lean.dropout import TorchDraw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device; none is visible here"
    ),
]


@pytest.mark.parametrize("shape", [(4096, 512), (7, 13), (3, 5, 31)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_is_drawn_again_on_the_device(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    input = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    torch.cuda.manual_seed(5)
    want = F.dropout(input, 0.3)
    (gradient,) = torch.autograd.grad(want.sum(), input)
    torch.cuda.manual_seed(5)
    draw = TorchDraw(input.device, 0.3)
    first = draw.first(input)
    assert torch.equal(first.values, want)
    assert not first.kept
    after = torch.rand(3, device="cuda")
    again = draw.again(input.detach(), torch.ones_like(input, requires_grad=False))
    assert torch.equal(again.values, want)
    assert again.gradient is not None
    assert torch.equal(again.gradient, gradient)
    torch.cuda.manual_seed(5)
    F.dropout(input, 0.3)
    assert torch.equal(after, torch.rand(3, device="cuda"))


def test_an_adapter_has_the_gradients_of_peft_on_the_device() -> None:
    peft = pytest.importorskip("peft", reason="the optional package peft is not installed")
    config = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.1, target_modules=["0", "1"])
    stock: Any = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 64)).requires_grad_(False)
    peft.inject_adapter_in_model(config, stock)
    for layer in stock:
        nn.init.normal_(layer.lora_B["default"].weight, std=0.2)
    lean = copy.deepcopy(stock)
    adapter.keep_less(lean)
    hidden = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    found: list[list[torch.Tensor]] = []
    for model in (stock, lean):
        model.to("cuda", torch.bfloat16)
        torch.cuda.manual_seed(3)
        output = model(hidden)
        output.float().square().mean().backward()
        trained = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([output, *trained])
    assert len(found[0]) == 5
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
