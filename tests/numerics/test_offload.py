"""Offload with DeepSpeed's own CPU AdamW: the same numbers as without it, and the same bits after a resume.

The kernel is compiled once (one to two minutes) into the virtual environment, so that only the first run of the tests pays.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from tests.numerics.test_engine import STEPS, make, train
from tests.ranks import run_on_ranks

EXTENSIONS = Path(sys.prefix) / "torch_extensions"
BINARIES = Path(sys.executable).parent  # ninja is installed beside python, also where no environment is activated
STAGES = (2, 3)

no_compiler = [tool for tool in ("g++", "ninja") if not shutil.which(tool, path=f"{BINARIES}:{os.environ['PATH']}")]
pytestmark = pytest.mark.skipif(
    bool(no_compiler), reason=f"DeepSpeed compiles its CPU AdamW, and {' and '.join(no_compiler)} is not installed"
)


def _use_kernel_cache() -> None:
    os.environ["TORCH_EXTENSIONS_DIR"] = str(EXTENSIONS)
    os.environ["PATH"] = f"{BINARIES}:{os.environ['PATH']}"


def _compile() -> None:
    _use_kernel_cache()
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load(verbose=False)


@pytest.fixture(scope="module")
def kernel() -> None:
    """The compiled kernel. A build that was killed leaves torch's lock, for which the next one would wait forever."""
    EXTENSIONS.mkdir(exist_ok=True)
    with FileLock(EXTENSIONS / "build.lock", timeout=300):
        (EXTENSIONS / "cpu_adam" / "lock").unlink(missing_ok=True)
        run_on_ranks(1, _compile, timeout_s=900)


def _losses(precision: str) -> dict[tuple[int, bool], tuple[list[float], list[float]]]:
    _use_kernel_cache()
    found = {}
    for stage in STAGES:
        for offload in (False, True):
            live = make(stage, precision, offload=offload)
            found[stage, offload] = train(live, range(STEPS))
            live.destroy()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_losses_and_gradient_norms_with_offload_equal_those_without(kernel: None, world: int, precision: str) -> None:
    found = run_on_ranks(world, _losses, precision)[0]
    for stage in STAGES:
        for with_offload, without in zip(found[stage, True], found[stage, False], strict=True):
            assert with_offload == pytest.approx(without, abs=1e-5 if precision == "fp32" else 2e-3), f"stage {stage}"


def _resume(precision: str, saved_with_offload: bool) -> dict[int, tuple[Any, Any]]:
    """By stage: losses, weights and optimizer state of a run with offload, and of one that was resumed half-way."""
    _use_kernel_cache()
    found = {}
    for stage in STAGES:
        live = make(stage, precision, offload=saved_with_offload)
        train(live, range(3))
        weights, state, scalars = live.weights(lambda k: True), live.optimizer_state(lambda k: True), live.scalars()
        straight = _go_on(live)
        again = make(stage, precision, weights, offload=True)
        again.restore(state, scalars)
        found[stage] = straight, _go_on(again)
    return found


def _go_on(live: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses, _ = train(live, range(3, STEPS))
    tensors = {**live.weights(lambda k: True), **live.optimizer_state(lambda k: True)}
    live.destroy()
    return losses, tensors


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_resume_with_offload_is_bit_exact(kernel: None, world: int, precision: str) -> None:
    for of_rank in run_on_ranks(world, _resume, precision, True):
        for stage, ((losses, tensors), (again, tensors_again)) in of_rank.items():
            assert again == losses, f"stage {stage}"
            assert tensors_again.keys() == tensors.keys()
            different = [name for name in tensors if not torch.equal(tensors[name], tensors_again[name])]
            assert not different, f"stage {stage}"


def test_a_run_saved_without_offload_goes_on_with_it(kernel: None) -> None:
    for stage, ((losses, _), (again, _)) in run_on_ranks(2, _resume, "fp32", False)[0].items():
        assert again == pytest.approx(losses, abs=1e-5), f"stage {stage}"
