"""A frozen layer in FP8 on a CUDA device: within its bound, as on a processor, and twice the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.numerics.test_fp8 import bound_of, far_apart, normal, share, with_outliers
from trainer.models.frozen import fp8
from trainer.models.frozen.quantized import QuantizedLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device of sm89 or later; none is visible here",
    ),
]


def layers(outputs: int, inputs: int) -> tuple[QuantizedLinear, QuantizedLinear]:
    """The same layer on the processor and on the device."""
    plain = nn.Linear(inputs, outputs).to(torch.bfloat16)
    here = QuantizedLinear(plain, "fp8", torch.bfloat16)
    return here, copy.deepcopy(here).cuda()


def test_the_device_multiplies_fp8() -> None:
    assert fp8.problem_of(torch.device("cuda", 0)) is None


@pytest.mark.parametrize("rows", [1, 5, 129, 4096])  # kernels differ by the number of rows
@pytest.mark.parametrize("of_input", [normal, far_apart, with_outliers])
def test_a_product_is_within_its_bound_and_near_the_processor_s(of_input, rows: int) -> None:
    torch.manual_seed(2)
    here, there = layers(512, 2048)
    x = of_input(rows, 2048).bfloat16()
    assert torch.equal(fp8.scales_of(x), fp8.scales_of(x.cuda()).cpu())
    scales = fp8.scales_of(x)
    codes = fp8.pack(x, scales).view(torch.uint8)
    assert torch.equal(codes, fp8.pack(x.cuda(), scales.cuda()).view(torch.uint8).cpu())
    found, on_processor = there(x.cuda()).cpu().double(), here(x).double()
    assert share(found - on_processor, on_processor) < 2**-8
    exact = x.double() @ here.weight.double().t()
    error = (found - here.bias.double() - exact).abs()
    bound = bound_of(x.double(), here.weight.double()) + 2**-8 * found.abs() + 2**-8
    assert (error <= bound).all()


def test_forward_and_backward_give_the_same_bits_again() -> None:
    torch.manual_seed(3)
    _, there = layers(1024, 1024)
    x = torch.randn(777, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(777, 1024, device="cuda", dtype=torch.bfloat16)
    found = [(out := there(x), torch.autograd.grad(out, x, gradient)[0]) for _ in range(2)]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][1], gradient @ there.weight)


def test_no_input_and_the_weight_once_is_kept() -> None:
    _, there = layers(4096, 4096)
    x = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    there(x)
    before = torch.cuda.memory_allocated()
    out = there(x)
    assert torch.cuda.memory_allocated() - before == out.nbytes
