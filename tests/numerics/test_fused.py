"""One kernel in the place of a formula: the same numbers, on the pretended GPU of
tests/fake_cuda.py, and rounded no worse.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config
from transformers.activations import NewGELUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5LayerNorm

from tests.facts import LLAMA, TINY_T5, experiment, write_facts
from tests.runs.test_device_waits import trained
from trainer.models.fused import fuse, rms_norm

DEVICE = torch.device("meta")  # any that is not the CPU


@pytest.mark.parametrize("of_family", [T5LayerNorm, LlamaRMSNorm])
def test_a_fused_norm_is_the_familys_and_rounds_no_worse(of_family: Any) -> None:
    norm = of_family(64, eps=1e-5).double()
    torch.nn.init.normal_(norm.weight, 1.0, 0.2)
    exact = torch.randn(32, 64, dtype=torch.float64) * 3
    stock = norm(exact)
    eps = norm.variance_epsilon
    fused = rms_norm(exact, norm.weight, eps)
    assert torch.allclose(fused, stock, rtol=1e-6, atol=1e-7)  # the family's takes its mean in fp32
    half = norm.bfloat16()
    rounded = exact.bfloat16()
    want = rms_norm(rounded.double(), half.weight.double(), eps)
    ours = (rms_norm(rounded, half.weight, eps).double() - want).abs().mean()
    theirs = (half(rounded).double() - want).abs().mean()
    assert ours <= theirs


def test_on_the_cpu_modules_stay_as_they_are() -> None:
    model = torch.nn.Sequential(T5LayerNorm(8), NewGELUActivation())
    hidden = torch.randn(4, 8)
    before = model(hidden)
    fuse(model)
    assert torch.equal(model(hidden), before)
    assert model.to(DEVICE)(hidden.to(DEVICE)).shape == before.shape


@pytest.mark.parametrize(
    ("dtype", "of_wo"),
    [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)],
)
def test_a_relu_under_dropout_keeps_one_tensor_and_changes_no_bit(
    dtype: torch.dtype, of_wo: torch.dtype
) -> None:
    config = T5Config(d_model=8, d_ff=32, dropout_rate=0.3)
    given, weights = torch.randn(50, 8, dtype=dtype), torch.randn(50, 8, dtype=dtype)
    found: list[list[torch.Tensor]] = []
    kept: list[set[int]] = []
    for is_fused in (False, True):
        torch.manual_seed(2)
        layer: Any = T5DenseActDense(config).to(dtype)
        layer.wo.to(of_wo)
        if is_fused:
            fuse(layer)
        hidden, places = given.clone().requires_grad_(), set[int]()

        def keep(tensor: torch.Tensor, places: set[int] = places) -> torch.Tensor:
            if tensor.shape == (50, 32):
                places.add(tensor.untyped_storage().data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            mixed = layer(hidden)
        (mixed * weights).sum().backward()
        found.append([mixed, hidden.grad, layer.wi.weight.grad, layer.wo.weight.grad])
        kept.append(places)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert [len(places) for places in kept] == ([3, 1] if dtype == of_wo else [3, 2])
    assert found[0][0].std() > 0


@pytest.mark.parametrize(
    ("task", "base"),
    [
        ("causal_lm", LLAMA),
        (
            "summariser",
            {**TINY_T5, "config": TINY_T5["config"] | {"feed_forward_proj": "gated-gelu"}},
        ),
    ],
)
def test_a_run_on_a_gpu_has_the_losses_of_one_on_the_cpu(
    task: str, base: dict[str, Any], tmp_path: Path
) -> None:
    """Norms and activations fused, pads hidden by causality alone."""
    facts = write_facts(tmp_path / "facts")
    values = experiment(task, facts) | {"base": base}
    here = trained(values, facts, tmp_path / "gpu", 2, tmp_path / "waits.jsonl")
    there = trained(values, facts, tmp_path / "cpu", 2, None)
    losses = [[line["loss"] for line in run if "loss" in line] for run in (here, there)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]
