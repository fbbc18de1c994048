"""The memory plan of every task with adapters against what a real engine allocates, by the CPU's own
record.

The plan's step runs on the fake CPU here: a GPU's kernels, which plans are for, allocate otherwise.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from exp_configs import vary
from tests.facts import experiment, write_facts
from tests.ranks import run_alone, run_on_ranks
from tests.tolerance import note
from trainer import tasks
from trainer.config import deepspeed_config
from trainer.plan.memory import fake_device
from trainer.plan.memory.deepspeed_terms import Zero, training
from trainer.plan.memory.measure import MeasureRequest
from trainer.protocol.task import DRAW, EPOCH, Places
from trainer.runtime.batch import to_device
from trainer.training.engine import Engine

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
from memory_plan import TOLERANCE, events_of, live_bytes, recorded

pytest.importorskip("peft", reason="the optional package peft is not installed")

TASKS = tasks.names()
ROWS, STEPS, BUCKET = 4, 2, 100_000
WIDER: dict[str, Any] = {
    "t5": {"d_model": 128, "d_kv": 32, "d_ff": 512},
    "bert": {"hidden_size": 128, "intermediate_size": 512, "max_position_embeddings": 256},
    "gpt_bigcode": {"n_embd": 128, "n_inner": 512, "n_positions": 256},
}
LONGER: dict[str, dict[str, Any]] = {
    "causal_lm": {"max_tokens": 256},
    "cross_attention": {"decoder_tokens": 128, "context_tokens": 256},
    "fid": {"passage_tokens": 256, "contexts": 2},
    "preference": {"max_tokens": 128},
    "retriever": {"query_tokens": 64, "passage_tokens": 256},
    "summariser": {"source_tokens": 256, "target_tokens": 64},
    "vera": {"max_tokens": 128},
}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"r": 8, "dropout": 0.1},
    "dora": {"r": 8, "dropout": 0.0, "dora": True, "targets": "all-linear"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def values_of(name: str, kind: str, precision: str, folder: Path) -> dict[str, Any]:
    values: Any = experiment(
        name,
        folder,
        train={"global_batch": ROWS, "micro_batch": ROWS, "precision": precision},
        data=LONGER[name],
        lora=KINDS[kind],
    )
    config = values["base"]["config"]
    base = {"config": config | WIDER[config["model_type"]], "seed": 1}
    if name == "retriever":
        values = vary(values, loss={"query_chunk": None, "passage_chunk": None})
    return vary(values, base=base)


def rows_of(task: Any) -> list[dict[str, list[int]]]:
    """Rows that fill their limits, as a plan without data takes them."""
    row = {name: [int(i) for i in ids] for name, ids in task.encode(task.specimen()).items()}
    return [{**row, DRAW: [5], EPOCH: [0]}] * ROWS


def preset_of(stage: int) -> dict[str, Any]:
    preset = deepspeed_config.read(f"zero{stage}")
    if stage == 3:  # its buckets are allocated in full and would outweigh these models
        small = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters")
        preset["zero_optimization"] |= dict.fromkeys((*small, "stage3_max_reuse_distance"), BUCKET)
    return preset


def loaded(values: dict[str, Any], folder: Path) -> Any:
    return tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder / "runs"))


def built(values: dict[str, Any], stage: int) -> dict[str, Any]:
    cfg = tasks.parse(values)
    return deepspeed_config.build(
        preset_of(stage), train=cfg.train, optim=cfg.optim, world=1, source="test"
    )


def _real(values: dict[str, Any], folder: Path, stage: int) -> int:
    """The most that an engine holds at once in its second step."""
    task, ds = loaded(values, folder), built(values, stage)
    batch = task.collate(rows_of(task))
    with recorded() as profiler:
        model = task.model()
        gc.collect()
        engine = Engine(model, deepspeed_config.for_engine(ds), task.cfg.optim)
        engine.train()
        own = {name: tensor.clone() for name, tensor in to_device(batch).items()}
        for step in range(STEPS):
            gc.collect()  # cycles of DeepSpeed hold gradients until Python happens to look
            with torch.profiler.record_function(f"STEP {step}"):
                losses = task.losses(engine.model, [own])
                loss = next(losses) / 1.0
            engine.backward(loss)
            del loss, losses
            gc.collect()
            engine.step(1e-3)
    engine.destroy()
    (_, second) = sorted(e.start_time_ns for e in events_of(profiler) if e.name.startswith("STEP "))
    return max(live for at, live in live_bytes(profiler, {}) if at >= second)


def _every_real(cases: list[tuple[dict[str, Any], int]], folder: Path) -> list[int]:
    # DeepSpeed leaves tensors in cycles: they are taken away as soon as they are there, or what is
    # measured depends on when Python happens to look
    gc.freeze()
    gc.set_threshold(50, 1, 1)
    return [_real(values, folder, stage) for values, stage in cases]


def _every_predicted(cases: list[tuple[dict[str, Any], int]], folder: Path) -> list[int]:
    from trainer.plan.memory import fake_step

    on_gpu = fake_device.fake_device
    fake_device.fake_device = lambda name: on_gpu("cpu")  # type: ignore[assignment]
    places = Places(folder, folder / "cache", folder / "runs")
    found: list[int] = []
    for values, stage in cases:
        request = MeasureRequest(values, "train", rows_of(loaded(values, folder)))
        step = fake_step._measure(request, places)
        zero = Zero.of(built(values, stage), accumulates=False)
        found.append(training(step, zero, cublas=0).total)
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["causal_lm"], id="one task"),
        pytest.param(TASKS, id="all", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    ("kind", "stage", "precision"),
    [
        ("lora", 3, "bf16"),  # where a frozen base needs more than its weights
        pytest.param("lora", 2, "fp32", marks=pytest.mark.long),
        pytest.param("dora", 0, "fp32", marks=pytest.mark.long),
        pytest.param("dora", 1, "bf16", marks=pytest.mark.long),
    ],
)
def test_a_step_with_adapters_is_planned_within_the_tolerance(
    kind: str, stage: int, precision: str, names: list[str], folder: Path
) -> None:
    cases = [(values_of(name, kind, precision, folder), stage) for name in names]
    predicted = run_alone(_every_predicted, cases, folder)
    (real,) = run_on_ranks(1, _every_real, cases, folder)
    for name, planned, allocated in zip(names, predicted, real, strict=True):
        note("bytes", name, abs(planned - allocated), TOLERANCE * allocated)
        assert planned == pytest.approx(allocated, rel=TOLERANCE), name
