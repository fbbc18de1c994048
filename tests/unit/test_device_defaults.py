"""What is decided for a GPU, and what one rehearses there."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.facts import experiment, write_facts
from tests.fake_cuda import install
from tests.forked import ROOT, TRAINVAL, run
from tests.ranks import run_alone
from tests.wording import refused
from trainer import switches
from trainer.models.processor import products
from trainer.runtime import device_defaults
from trainer.runtime.device_defaults import DeviceDefaults


def chosen(precision: str, **environment: str) -> DeviceDefaults:
    return DeviceDefaults.of_experiment(
        precision, optimizer="adamw", compiles=False, has_triton=False, environment=environment
    )


def test_fp32_multiplies_by_tf32_unless_it_is_told_not_to() -> None:
    assert chosen("fp32").allows_tf32
    assert not chosen("fp32", LATHE_TF32="0").allows_tf32
    assert not chosen("bf16").allows_tf32


@pytest.mark.parametrize(
    ("is_installed", "compiles", "word", "said"),
    [
        (True, False, "1", "rotations and gated layers: liger-kernel's"),
        (True, True, "1", "liger-kernel's kernels outside of them"),
        (True, False, "", "rotations and gated layers: torch's (LATHE_LIGER=1: liger-kernel's)"),
        (False, False, "", "rotations and gated layers: torch's"),
    ],
)
def test_a_gpu_says_whose_kernels_its_blocks_use(
    is_installed: bool, compiles: bool, word: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switches, "has_liger", lambda: is_installed)
    monkeypatch.setattr(device_defaults, "has_liger", lambda: is_installed)
    how: Any = {"optimizer": "adamw", "has_triton": True, "environment": {"LATHE_LIGER": word}}
    lines = DeviceDefaults.of_experiment("bf16", compiles=compiles, **how).lines()
    assert len(lines) == 4
    assert lines[2].endswith(f"; {said}")


def test_kernels_of_a_gpu_are_refused_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATHE_LIGER", "1")
    with refused("liger_needs_gpu"):
        device_defaults.settle("fp32", optimizer="adamw", compiles=False)


def test_a_run_on_a_gpu_says_what_was_chosen_and_one_on_a_cpu_has_nothing_to_say(
    tmp_path: Path,
) -> None:
    facts = write_facts(tmp_path / "facts")
    values = experiment("causal_lm", facts, train={"steps": 1, "precision": "bf16"})
    (tmp_path / "groups.py").write_text(f"EXP_GROUPS = {{'one': [{values!r}]}}\n")
    how = [*TRAINVAL, "-e", "one", "--exp_configs", str(tmp_path / "groups.py")]
    how += ["--data_path", str(facts), "--cache_dir", str(tmp_path / "cache"), "-sb"]
    gpu = run(
        *how, str(tmp_path / "gpu"), first=functools.partial(install, tmp_path / "waits.jsonl")
    )
    cpu = run(*how, str(tmp_path / "cpu"))
    assert (gpu.returncode, cpu.returncode) == (0, 0), gpu.stderr
    said = gpu.stdout + gpu.stderr
    for word in ("masters in fp32", "not cuDNN's", "fused AdamW", "expandable_segments", "30 min"):
        assert f"{word}" in said, said
    assert "device:" not in cpu.stdout + cpu.stderr


def test_a_gpu_attends_without_cudnn_and_multiplies_by_tf32_in_fp32() -> None:
    assert run_alone(_settled, "fp32") == [False, True]
    assert run_alone(_settled, "bf16") == [False, False]


def _settled(precision: str) -> list[bool]:
    import torch

    from trainer.runtime import device_defaults, distributed

    assert device_defaults.settle(precision, optimizer="adamw", compiles=False) is None
    distributed.is_gpu = lambda: True
    assert device_defaults.settle(precision, optimizer="adamw", compiles=False) is not None
    return [torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.matmul.allow_tf32]


def test_what_torch_reads_is_told_before_it_starts_and_a_word_of_the_user_stays() -> None:
    ours = ("PYTORCH_CUDA_ALLOC_CONF", "GOMP_SPINCOUNT")
    code = "from trainer.runtime import device_defaults as d; d.before_torch(); import os, sys;"
    code += f"print(*(os.environ.get(name) for name in {ours}), 'torch' in sys.modules)"
    of_user = {*ours, "OMP_WAIT_POLICY"}
    environment = {k: v for k, v in os.environ.items() if k not in of_user}
    for given, want in (
        ({}, "expandable_segments:True 20000 False"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "backend:native 20000 False"),
        ({"GOMP_SPINCOUNT": "7"}, "expandable_segments:True 7 False"),
        ({"OMP_WAIT_POLICY": "active"}, "expandable_segments:True None False"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=environment | given,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == want


def _after_many_lengths(is_told: bool) -> float:
    """MiB by which this process grows in 100 steps of a layer in bf16, each of another length."""
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        os.environ[name] = "131072"  # for the process that is started below: no holes in its heap
    os.environ.pop("ONEDNN_PRIMITIVE_CACHE_CAPACITY", None)
    if is_told:
        device_defaults.before_torch()
    code = """
import torch
from pathlib import Path
torch.set_num_threads(1)
layer = torch.nn.Linear(256, 1024, dtype=torch.bfloat16)
def step(length):
    x = torch.ones(length, 256, dtype=torch.bfloat16, requires_grad=True)
    layer(x).float().sum().backward()
    layer.zero_grad()
def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
step(2000)
before = held()
for length in range(1000, 1100):
    step(length)
print(held() - before)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(told.stdout)


@pytest.mark.skipif(
    torch.bfloat16 in products.lacking(), reason="oneDNN multiplies no bf16 on this processor"
)
def test_products_of_many_lengths_do_not_let_a_processor_run_out_of_memory() -> None:
    grown = run_alone(_after_many_lengths, True)
    assert grown < 150, "oneDNN keeps a product, and its memory, for every number of tokens"


def test_groups_that_deepspeed_makes_wait_as_long_as_ours() -> None:
    assert run_alone(_timeouts) == [60.0, 77.0]


def _timeouts() -> list[float]:
    """Of a group that somebody made with a time of their own, before and after."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from trainer.runtime import distributed

    distributed.init(timeout_s=77.0)
    made: Any = dist.new_group(timeout=timedelta(seconds=60))
    options = made._get_backend(torch.device("cpu")).options
    before = options._timeout.total_seconds()
    distributed.give_every_group_the_timeout()
    return [before, made._get_backend(torch.device("cpu")).options._timeout.total_seconds()]


def test_a_rehearsal_holds_no_two_gradients_of_a_deep_model() -> None:
    """Ten layers alike: backward holds the one that it makes, not one a layer."""
    assert 1 <= run_alone(_most_alive) <= 2


def _most_alive() -> int:
    import torch
    from torch import nn
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    from trainer.launch.memory import _drop_gradients

    alive: dict[int, Any] = {}
    most = [0]

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            for tensor in tree_iter(out):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if storage.nbytes() == 4 * 128 * 128 and key not in own:
                    alive[key] = weakref.ref(storage, lambda _, key=key: alive.pop(key, None))
            most[0] = max(most[0], len(alive))
            return out

    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(10)))
    weights = list(model.parameters())
    own = {weight.untyped_storage()._cdata for weight in weights}
    loss = model(torch.randn(2, 128)).sum()
    with Watching(), _drop_gradients(weights):
        torch.autograd.grad(loss, weights)
    return most[0]
