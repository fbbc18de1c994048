"""Whole runs with layers that keep less: the bits of peft at every stage of ZeRO, after a kill, and
the memory plan against the allocator.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.runs import lines_of, losses
from tests.contract.test_task_contract import _die_then_resume
from tests.facts import LLAMA, experiment, write_facts
from tests.numerics import test_memory_plan_adapters as plans
from tests.ranks import run_alone, run_on_ranks
from tests.tolerance import note
from trainer.config import deepspeed_config
from trainer.models.lean import adapter, gated

pytest.importorskip("peft", reason="the optional package peft is not installed")

ADAPTED: dict[str, Any] = {"r": 4, "alpha": 8, "dropout": 0.2, "targets": "all-linear"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def values_of(folder: Path, **train: Any) -> dict[str, Any]:
    steps = {"steps": 4, "save_every": 2, "eval_every": 2} | train
    values = experiment("causal_lm", folder, train=steps, lora=ADAPTED)
    return {**values, "base": LLAMA}


def _trained(
    values: dict[str, Any], folder: Path, savedir: Path, preset: Path, is_lean: bool
) -> tuple[list[float], bytes]:
    """The losses and the adapters of a run, with the layers of peft and transformers or ours."""
    from trainer.launch.run import run
    from trainer.runtime import distributed
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    if not is_lean:
        gated.keep_less = adapter.keep_less = lambda model: None
    options = Options(savedir, data_path=folder, cache_dir=folder / "cache", deepspeed=str(preset))
    planned = plan(values, options, world=distributed.world(), rank=distributed.rank())
    assert run(planned, options, Preemption()) == 0
    weights = planned.folder / "final" / "adapter_model.safetensors"
    return losses(lines_of(planned.folder)), weights.read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_has_the_bits_of_peft_at_every_stage(
    stage: int, recomputed: bool, folder: Path, tmp_path: Path
) -> None:
    content = deepspeed_config.read(f"zero{stage}")
    if stage == 3:  # small weights are divided, too
        content["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    preset = tmp_path / "zero.json"
    preset.write_text(json.dumps(content))
    values = values_of(folder, gradient_checkpointing=recomputed)
    stock, lean = (
        run_on_ranks(2, _trained, values, folder, tmp_path / str(is_lean), preset, is_lean)[0]
        for is_lean in (False, True)
    )
    assert len(stock[0]) == 4
    assert stock == lean


@pytest.mark.long
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_a_killed_run_resumes_bit_for_bit(recomputed: bool, folder: Path, tmp_path: Path) -> None:
    values = values_of(folder, gradient_checkpointing=recomputed)
    preset = tmp_path / "zero.json"
    preset.write_text(json.dumps(deepspeed_config.read("zero2")))
    straight = run_on_ranks(1, _trained, values, folder, tmp_path / "straight", preset, True)[0]
    outcome, killed = run_on_ranks(1, _die_then_resume, values, folder, tmp_path / "killed", 2)[0]
    assert outcome == "killed"
    weights = (killed / "final" / "adapter_model.safetensors").read_bytes()
    assert (losses(lines_of(killed)), weights) == straight


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "precision", "recomputed"),
    [(2, "bf16", False), (0, "fp32", False), (3, "bf16", False), (2, "fp32", True)],
)
def test_a_step_is_planned_within_the_tolerance(
    stage: int, precision: str, recomputed: bool, folder: Path
) -> None:
    config = LLAMA["config"] | {"hidden_size": 128, "intermediate_size": 384}
    values = experiment(
        "causal_lm",
        folder,
        train={
            "global_batch": plans.ROWS,
            "micro_batch": plans.ROWS,
            "precision": precision,
            "gradient_checkpointing": recomputed,
        },
        data={"max_tokens": 256},
        lora=ADAPTED,
    )
    config = config | {"max_position_embeddings": 256, "num_hidden_layers": 6}
    values = {**values, "base": {"config": config, "seed": 1}}
    cases = [(values, stage)]
    (planned,) = run_alone(plans._every_predicted, cases, folder)
    ((allocated,),) = run_on_ranks(1, plans._every_real, cases, folder)
    note("bytes", f"llama {stage}", abs(planned - allocated), plans.TOLERANCE * allocated)
    assert planned == pytest.approx(allocated, rel=plans.TOLERANCE)
