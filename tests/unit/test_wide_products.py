"""Products of 16-bit numbers on a processor without instructions for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.models.processor import products
from trainer.plan.memory.fake_device import fake_device
from trainer.plan.memory.tracker import forwards_in
from trainer.plan.time.blocks import whole
from trainer.switches import CPU_KERNELS

# N rows, D inputs, V outputs, B matrices of a batch
N, D, V, B = 7, 5, 6, 3


@pytest.fixture(params=[torch.bfloat16, torch.float16])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """A dtype that this processor has no instructions for, whatever it has."""
    monkeypatch.setattr(products, "widened", set[torch.dtype]())
    monkeypatch.setattr(products, "lacking", lambda: {request.param})
    products.use(request.param)
    return request.param


def _drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _in_place(method: str, **how: float) -> Callable[[Any, Any, Any], Tensor]:
    return lambda total, left, right: getattr(total.clone(), method)(left, right, **how)


def _into(function: Any) -> Callable[[Any, Any, Any], Tensor]:
    """The product written into a tensor that holds something else."""

    def call(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return function(left, right, out=torch.full_like(total, torch.nan))

    return call


WAYS: dict[str, Callable[[Any, Any, Any], Tensor]] = {
    "mm": lambda _, left, right: left @ right,
    "mm.out": _into(torch.mm),
    "addmm": lambda total, left, right: torch.addmm(total, left, right, beta=0.5, alpha=2.0),
    "addmm.out": lambda total, left, right: torch.addmm(
        total, left, right, beta=0.5, out=torch.empty_like(total)
    ),
    "addmm_": _in_place("addmm_", beta=0.5),
    "bmm": lambda _, left, right: left @ right,
    "bmm.out": _into(torch.bmm),
    "baddbmm": lambda total, left, right: torch.baddbmm(total, left, right, alpha=0.5),
    "baddbmm_": _in_place("baddbmm_", alpha=0.5),
}


def _operands(name: str, dtype: torch.dtype) -> list[Tensor]:
    batch = (B,) if "bmm" in name else ()
    shapes = ((N, V), (N, D), (D, V))
    return [_drawn(*batch, *shape, seed=n).to(dtype) for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("name", WAYS)
def test_a_product_is_that_of_32_bits_rounded_once(name: str, dtype: torch.dtype) -> None:
    operands = _operands(name, dtype)
    before = [one.clone() for one in operands]
    found = WAYS[name](*operands)
    want = WAYS[name](*[one.float() for one in operands]).to(dtype)
    assert torch.equal(found, want)
    assert found.dtype == dtype
    assert all(torch.equal(one, other) for one, other in zip(operands, before, strict=True))


def test_every_operator_is_tried() -> None:
    assert {*WAYS, "_scaled_dot_product_flash_attention_for_cpu_backward"} == {*products.NAMES}


def test_gradients_of_a_layer_and_of_attention_are_those_of_32_bits(dtype: torch.dtype) -> None:
    """torch 2.13's own loops were 40 to 60 times as slow for the gradient of what goes in."""

    def gradients(x: Tensor, w: Tensor, b: Tensor, seen: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.linear(x, w, b), (x, w, b), seen[0])

    inputs = [one.to(dtype).requires_grad_() for one in (_drawn(2, N, D), _drawn(V, D), _drawn(V))]
    onto = _drawn(2, N, V, seed=1).to(dtype)
    wide = [one.detach().float().requires_grad_() for one in inputs]
    found = gradients(*inputs, [onto])
    for one, want in zip(found, gradients(*wide, [onto.float()]), strict=True):
        torch.testing.assert_close(one, want.to(dtype), rtol=0, atol=1e-2)
    heads = [_drawn(1, 2, N, 8, seed=n).to(dtype).requires_grad_() for n in range(3)]
    wide = [one.detach().float().requires_grad_() for one in heads]
    of_heads = _drawn(1, 2, N, 8, seed=4).to(dtype)
    attend = F.scaled_dot_product_attention
    found = torch.autograd.grad(attend(*heads, is_causal=True), heads, of_heads)
    wanted = torch.autograd.grad(attend(*wide, is_causal=True), wide, of_heads.float())
    for one, want in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.float(), want, rtol=0, atol=3e-2)


def test_a_torch_without_onednn_has_its_loops_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of a Mac, which does not have oneDNN's questions either."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    assert products.lacking() == {torch.bfloat16, torch.float16}


def test_only_numbers_of_this_dtype_are_widened_and_not_where_the_kernels_are_off(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, left, right = _operands("mm", dtype)
    seen: list[str] = []

    def noted(name: str, args: Any, kwargs: Any) -> Tensor:
        seen.append(name)
        return products.product(name, args, kwargs)

    monkeypatch.setattr(products, "by_way_of_32_bits", noted)
    torch.mm(left, right)
    assert seen == ["mm"]
    torch.mm(left.float(), right.float())
    torch.mm(left[: products.FEW_ROWS], right.t().contiguous().t())  # torch's own is as fast
    monkeypatch.setenv(CPU_KERNELS, "0")
    torch.mm(left, right)
    assert seen == ["mm"]


def test_operands_of_two_dtypes_are_refused_as_torch_does(dtype: torch.dtype) -> None:
    _, left, right = _operands("mm", dtype)
    for act in (
        lambda: left @ right.float(),
        lambda: torch.mm(left, right, out=torch.empty(N, V)),
        lambda: left @ right[1:],
    ):
        with pytest.raises(RuntimeError):
            act()


def test_a_plan_counts_the_widened_copies(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 256
    most: list[int] = []
    for kernels in ("1", "0"):
        monkeypatch.setenv(CPU_KERNELS, kernels)
        with fake_device("cpu") as device:
            layer = device.place(torch.nn.Linear(size, size, bias=False, dtype=dtype))
            device.tracker.watch(layer, whole())
            device.tracker.restart()
            layer(torch.empty(8, size, dtype=dtype)).sum().backward()
            heads = [torch.empty(1, 2, N, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
            F.scaled_dot_product_attention(*heads).sum().backward()
            most.append(max(one.activations for one in device.tracker.moments))
            ran = forwards_in(device.tracker.parts())[0].operators
            products_ran = [one for one in ran if one.flops and not one.is_fused]
            assert {one.kind for one in products_ran} == {"matmul"}
    assert most[0] - most[1] >= 4 * size * size, "the weight in fp32"
