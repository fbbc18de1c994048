"""Offload with DeepSpeed's own CPU AdamW: the same numbers as without it, and the same bits after a
resume.

The kernel is compiled once (one to two minutes) into the virtual environment: only the first run of
the tests pays.
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

from tests.numerics.test_engine import DEPTH, STEPS, make, train
from tests.ranks import run_on_ranks
from tests.tolerance import assert_close

EXTENSIONS = Path(sys.prefix) / "torch_extensions"
BINARIES = Path(
    sys.executable
).parent  # ninja is installed beside python, also where no environment is activated
HALF = STEPS // 2
# As tests/tolerance.py means them: every step goes there and back. In bf16 too: the weights are
# rounded alike with offload and without.
LOSSES = {"what": "losses", "depth": STEPS * 2 * DEPTH, "margin": 0.08}
NORMS = {"what": "norms", "depth": STEPS * 2 * DEPTH, "margin": 0.15}

no_compiler = [
    tool
    for tool in ("g++", "ninja")
    if not shutil.which(tool, path=f"{BINARIES}:{os.environ['PATH']}")
]
pytestmark = pytest.mark.skipif(
    bool(no_compiler),
    reason=f"DeepSpeed compiles its CPU AdamW, and {' and '.join(no_compiler)} is not installed",
)


def _use_kernel_cache() -> None:
    os.environ["TORCH_EXTENSIONS_DIR"] = str(EXTENSIONS)
    os.environ["PATH"] = f"{BINARIES}:{os.environ['PATH']}"


def _compile() -> None:
    _use_kernel_cache()
    from deepspeed.ops.op_builder import CPUAdamBuilder  # pyright: ignore[reportAttributeAccessIssue]

    CPUAdamBuilder().load(verbose=False)


@pytest.fixture(scope="module")
def kernel() -> None:
    """The compiled kernel. A build that was killed leaves torch's lock, for which the next one
    would wait forever.
    """
    EXTENSIONS.mkdir(exist_ok=True)
    with FileLock(EXTENSIONS / "build.lock", timeout=300):
        (EXTENSIONS / "cpu_adam" / "lock").unlink(missing_ok=True)
        run_on_ranks(1, _compile, timeout_s=900)


Found = dict[tuple[str, int], Any]  # by precision and stage


def _everything(cases: list[tuple[str, int]]) -> dict[str, Found]:
    """All that the tests look at, from few engines: making one with DeepSpeed's AdamW takes it over
    a second.
    """
    _use_kernel_cache()
    plain = {case: _straight(*case, offload=False) for case in cases}
    offload = {case: _straight(*case, offload=True) for case in cases}
    resumed = {case: _resumed(*case, offload[case]["saved"]) for case in cases}
    moved = {case: _resumed(*case, plain[case]["saved"]) for case in cases if case[0] == "fp32"}
    return {"plain": plain, "offload": offload, "resumed": resumed, "moved": moved}


def _straight(precision: str, stage: int, *, offload: bool) -> dict[str, Any]:
    """Losses, norms and last tensors of a whole run, and what a checkpoint half-way would hold."""
    live = make(stage, precision, offload=offload)
    losses, norms = train(live, range(HALF))
    saved = (
        live.weights(lambda k: True),
        live.optimizer.tensors(lambda k: True),
        live.optimizer.scalars(),
    )
    found = _to_the_end(live)
    return found | {
        "losses": losses + found["losses"],
        "norms": norms + found["norms"],
        "saved": saved,
    }


def _resumed(precision: str, stage: int, saved: tuple[Any, Any, Any]) -> dict[str, Any]:
    weights, state, scalars = saved
    live = make(stage, precision, weights, offload=True)
    live.optimizer.restore(state, scalars)
    return _to_the_end(live)


def _to_the_end(live: Any) -> dict[str, Any]:
    losses, norms = train(live, range(HALF, STEPS))
    tensors = {**live.weights(lambda k: True), **live.optimizer.tensors(lambda k: True)}
    live.destroy()
    return {"losses": losses, "norms": norms, "tensors": tensors}


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.long), 2],
    ids=["1 rank", "2 ranks"],
)
def of_ranks(kernel: None, request: pytest.FixtureRequest) -> list[dict[str, Found]]:
    precisions = ("fp32", "bf16") if request.param == 1 else ("fp32",)
    return run_on_ranks(
        request.param,
        _everything,
        [(precision, stage) for precision in precisions for stage in (2, 3)],
    )


def test_losses_and_gradient_norms_with_offload_equal_those_without(
    of_ranks: list[dict[str, Found]],
) -> None:
    found = of_ranks[0]
    for case, plain in found["plain"].items():
        ours, of = found["offload"][case], f"{case}"
        assert_close(ours["losses"], plain["losses"], of=of, **LOSSES)
        assert_close(ours["norms"], plain["norms"], of=of, **NORMS)


def test_resume_with_offload_is_bit_exact(of_ranks: list[dict[str, Found]]) -> None:
    for found in of_ranks:
        for case, resumed in found["resumed"].items():
            straight = found["offload"][case]
            assert resumed["losses"] == straight["losses"][HALF:], case
            assert resumed["tensors"].keys() == straight["tensors"].keys()
            same = [
                torch.equal(tensor, straight["tensors"][name])
                for name, tensor in resumed["tensors"].items()
            ]
            assert all(same), case


def test_a_run_saved_without_offload_goes_on_with_it(of_ranks: list[dict[str, Found]]) -> None:
    found = of_ranks[0]
    for case, moved in found["moved"].items():
        straight = found["plain"][case]["losses"][HALF:]
        assert_close(moved["losses"], straight, of=f"{case}", **LOSSES)
