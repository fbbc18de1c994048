"""The memory plan against torch's allocator on a CUDA device. Nothing here runs on a CPU
machine.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.facts import experiment, write_facts
from tests.ranks import run_alone

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device; none is visible here"
    ),
]
T5 = {"vocab_size": 32128, "decoder_start_token_id": 0}
SHAPES: dict[str, dict[str, Any]] = {
    "t5-base": T5 | {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "t5-large": T5 | {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
    "t5-3b": T5 | {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32},
    "gpt_bigcode-1b": {
        "n_embd": 2048,
        "n_layer": 24,
        "n_head": 16,
        "n_inner": 8192,
        "n_positions": 8192,
    },
    "bert-base": {},
}
OVER, UNDER = 0.05, 0.02  # how much too high, and too low, a prediction may be


@dataclass(frozen=True)
class Case:
    model: str
    length: int
    attention: str
    recompute: bool

    def build(self, device: str) -> nn.Module:
        import transformers

        kinds = {"t5": "T5", "gp": "GPTBigCode", "be": "Bert"}
        heads = {
            "t5": "T5ForConditionalGeneration",
            "gp": "GPTBigCodeForCausalLM",
            "be": "BertForMaskedLM",
        }
        family = self.model[:2]
        config = getattr(transformers, f"{kinds[family]}Config")(
            **SHAPES[self.model], attn_implementation=self.attention
        )
        with torch.device(device):
            model = getattr(transformers, heads[family])(config).bfloat16().train()
        if self.recompute:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        return model

    def rows(self) -> dict[str, torch.Tensor]:
        ids = torch.ones(2, self.length, dtype=torch.int64)
        mask = torch.ones_like(ids)
        mask[-1, -self.length // 8 :] = 0
        labels = ids[:, :128].clone() if self.model.startswith("t5") else ids.clone()
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


CASES = [
    Case(*parts)
    for parts in product(SHAPES, (256, 512), ("eager", "sdpa"), (False, True))
    if parts[0] != "t5-3b" or parts[3]  # whole activations of 3B only where they are recomputed
] + [Case("t5-base", 2048, "sdpa", False)]


def predicted(case: Case) -> int:
    """Weights, gradients and activations on the fake device, by a process of its own."""
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from tests.gpu.test_memory_on_cuda import Case
from trainer.plan.memory.fake_device import fake_device
case = {case!r}
model, rows = case.build("meta"), case.rows()
with fake_device("fakegpu") as device:
    device.place(model)
    device.tracker.watch(model)
    device.tracker.restart()
    model(**device.copy_of(rows)).loss.backward()
    tracker = device.tracker
    peak = max(moment.total for moment in tracker.moments) + device.scratch
    print(tracker.live["weights"] + tracker.live["buffers"] + peak)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_predicted_within_five_percent_and_hardly_ever_too_low(case: Case) -> None:
    from trainer.runtime.gpus import device_here

    gc.collect()  # models of earlier cases hold themselves in reference cycles
    before = torch.cuda.memory_allocated()
    model = case.build("cuda")
    rows = {name: tensor.cuda() for name, tensor in case.rows().items()}
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    model(**rows).loss.backward()
    real = torch.cuda.max_memory_allocated() - before
    del model
    here = device_here()
    assert here is not None
    wanted = predicted(case) + here.cublas_nbytes
    assert -UNDER <= wanted / real - 1 <= OVER, (
        f"planned {wanted / 2**30:.2f}, measured {real / 2**30:.2f} GiB"
    )


@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_stays_within_its_plan(stage: str, precision: str, tmp_path: Path) -> None:
    found = run_alone(_planned_and_measured, stage, precision, tmp_path)
    assert _peak(found) == pytest.approx(found["measured"], rel=0.08)


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_inputs_of_blocks_in_host_memory_leave_the_device_as_planned(
    stage: str, tmp_path: Path
) -> None:
    """The same losses, in less memory of the device: as much less as planned, but for a tenth."""
    stays, goes = (
        run_alone(_planned_and_measured, stage, "bf16", tmp_path / str(is_offloaded), is_offloaded)
        for is_offloaded in (False, True)
    )
    assert goes["losses"] == stays["losses"]
    for found in (stays, goes):
        assert _peak(found) == pytest.approx(found["measured"], rel=0.08)
    saved = stays["measured"] - goes["measured"]
    assert saved > 0
    assert _peak(stays) - _peak(goes) == pytest.approx(saved, rel=0.1)
    on_host = goes["plan"]["host"] - stays["plan"]["host"]
    assert 0 < goes["pinned"] - stays["pinned"] <= 2 * on_host


def _peak(found: dict[str, Any]) -> int:
    """The highest peak of the phases that were planned."""
    return max(sum(phase["peak"].values()) for phase in found["plan"]["phases"])


def _planned_and_measured(
    stage: str, precision: str, tmp_path: Path, is_offloaded: bool | None = None
) -> dict[str, Any]:
    """The memory plan of a run and what it measured, its losses, and the most pinned memory.

    is_offloaded: of adapters, whose step is highest where inputs of blocks are kept, whether these
    wait on the host; None: the whole model is trained, and no block computed again.
    """
    import json

    from tests.contract.runs import lines_of, losses
    from trainer.launch.run import run
    from trainer.runtime import distributed
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    distributed.init()
    folder = write_facts(tmp_path / "facts")
    base = {
        "config": {
            "model_type": "gpt_bigcode",
            "n_embd": 1024,
            "n_layer": 8,
            "n_head": 8,
            "n_inner": 4096,
        }
    }
    base["config"] |= {"n_positions": 128, "vocab_size": 384, "bos_token_id": 0, "eos_token_id": 0}
    train: dict[str, Any] = {"precision": precision}
    more: dict[str, Any] = {"base": base}
    if is_offloaded is not None:
        train |= {"gradient_checkpointing": True, "activation_offload": is_offloaded}
        train |= {"global_batch": 8, "micro_batch": 8}
        base["config"]["n_layer"] = 24
        more["lora"] = {"r": 8, "alpha": 16}
    values = experiment("causal_lm", folder, train=train) | more
    planned = plan(
        values,
        Options(tmp_path / "out", data_path=folder, cache_dir=tmp_path / "cache", deepspeed=stage),
        world=1,
        rank=0,
    )
    assert (
        run(
            planned,
            Options(
                tmp_path / "out", data_path=folder, cache_dir=tmp_path / "cache", deepspeed=stage
            ),
            Preemption(),
        )
        == 0
    )
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    found = json.loads((planned.folder / "memory_plan.json").read_text())
    return found | {"losses": losses(lines_of(planned.folder)), "pinned": pinned}
