"""The host runs ahead of a GPU: how often a training step waits for it, and how batches get there.
Runs on the pretended GPU of tests/fake_cuda.py.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.contract.runs import untimed
from tests.facts import EVERY_BLOCK, LLAMA, experiment, write_facts
from tests.fake_cuda import HOST, install, waits_of
from tests.forked import TRAINVAL, run
from tests.long import long_but
from tests.ranks import run_alone
from trainer.switches import CPU_KERNELS

MOST = 3  # waits of an optimizer step, whatever its micro-batches
TASKS = ("causal_lm", "cross_attention", "fid", "retriever", "summariser", "vera")
_SELDOM = {"steps": 5, "log_every": 5, "eval_every": 5, "save_every": 5}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def trained(
    values: dict[str, Any], facts: Path, folder: Path, stage: int, file: Path | None
) -> Any:
    """Metrics of a run, on the pretended GPU, which writes to `file`, or on the CPU."""
    values = {**values, "deepspeed": f"zero{stage}"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "groups.py").write_text(f"EXP_GROUPS = {{'one': [{values!r}]}}\n")
    how = ["-e", "one", "--exp_configs", str(folder / "groups.py"), "-sb", str(folder / "out")]
    how += ["--data_path", str(facts), "--cache_dir", str(facts / "cache"), "-r", "1"]
    first = None if file is None else functools.partial(install, file)
    done = run(*TRAINVAL, *how, first=first)
    assert done.returncode == 0, done.stderr[-3000:]
    (metrics,) = (folder / "out").glob("*/metrics.jsonl")
    return untimed(metrics)


def waits(
    values: dict[str, Any], facts: Path, folder: Path, stage: int
) -> Counter[tuple[str, str]]:
    """Those of the fourth step, which neither logs nor evaluates."""
    file = folder / "device.jsonl"
    trained(values, facts, folder, stage, file)
    return waits_of(file, 3)


def seldom(task: str, facts: Path, micro_batch: int = 2, **changes: Any) -> dict[str, Any]:
    train = {**_SELDOM, "precision": "bf16", "micro_batch": micro_batch}
    return experiment(task, facts, train=train, **changes)


def listed(found: Counter[tuple[str, str]]) -> str:
    return "\n".join(f"{count} x {kind}: {place}" for (kind, place), count in found.items())


@pytest.mark.parametrize("task", long_but(("causal_lm", "vera"), TASKS))
def test_a_step_of_every_task_waits_three_times_at_most(
    task: str, facts: Path, tmp_path: Path
) -> None:
    found = waits(seldom(task, facts), facts, tmp_path, 3)
    assert 0 < found.total() <= MOST, listed(found)


@pytest.mark.parametrize("stage", long_but((2,), (0, 1, 2)))
def test_more_micro_batches_mean_no_more_waits(stage: int, facts: Path, tmp_path: Path) -> None:
    found = waits(seldom("causal_lm", facts, micro_batch=1), facts, tmp_path, stage)
    assert 0 < found.total() <= MOST, listed(found)


@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_no_stage_and_no_precision_waits_more(
    task: str, stage: int, precision: str, facts: Path, tmp_path: Path
) -> None:
    values = seldom(task, facts, micro_batch=1)
    values["train"] = {**values["train"], "precision": precision}
    found = waits(values, facts, tmp_path, stage)
    assert 0 < found.total() <= MOST, listed(found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("cross_attention", {"data": {"packed": False}}),
        ("cross_attention", {"base": LLAMA, "layers": EVERY_BLOCK}),
        ("vera", {"base": LLAMA}),
        ("retriever", {"base": LLAMA, "encoder": {"pooling": "eos"}}),
        ("causal_lm", {"base": LLAMA, "train": {"gradient_checkpointing": True}}),
    ],
)
def test_other_bases_and_layouts_wait_no_more(
    task: str, changes: dict[str, Any], facts: Path, tmp_path: Path
) -> None:
    train = {**_SELDOM, "precision": "bf16", **changes.get("train", {})}
    found = waits(experiment(task, facts, **{**changes, "train": train}), facts, tmp_path, 2)
    assert 0 < found.total() <= MOST, listed(found)


@pytest.mark.parametrize(
    ("stage", "clip"),
    [
        pytest.param(0, 0.1, marks=pytest.mark.long),
        (2, 0.1),
        (2, 100.0),
    ],
)
def test_what_saves_a_wait_changes_no_number(
    stage: int, clip: float, facts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in bf16 at stage 0 and clipped sums at stage 2 are DeepSpeed's, to the last bit."""
    monkeypatch.setenv(CPU_KERNELS, "0")  # a GPU has none
    values = experiment("cross_attention", facts, train={"precision": "bf16"})
    values["optim"] = {**values["optim"], "clip": clip}
    file = tmp_path / "device.jsonl"
    here = trained(values, facts, tmp_path / "gpu", stage, file)
    assert here == trained(values, facts, tmp_path / "cpu", stage, None)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    to_device = [line for line in lines if line.get("copy") == "to device" and line["step"] == 1]
    assert to_device
    assert not [line for line in to_device if line["waits"]], "a batch is copied from pinned memory"
    # the counts of a step, four numbers, go with what is computed
    assert {line["nbytes"] for line in to_device if line["stream"] == 0} == {32}


def test_two_micro_batches_of_a_window_are_on_the_device_and_the_second_comes_early(
    tmp_path: Path,
) -> None:
    seen = run_alone(_walked, tmp_path / "device.jsonl")
    assert seen == {"copied": [2, 3, 4, 4], "alive": [2, 2, 2, 1], "again": 2}


def _walked(file: Path) -> dict[str, Any]:
    """Of a window of four: after each micro-batch is asked for, how many were copied, how many are
    alive; and how many copies follow when the first one is asked for again.
    """
    import gc

    import torch

    from trainer.runtime.batch import OnDevice
    from trainer.runtime.distributed import pin_batch

    install(file)
    from tests.fake_cuda import _installed

    window = OnDevice([pin_batch({"tokens": torch.arange(3)}) for _ in range(4)])
    copied, alive = [], []
    for batch in window:
        assert batch["tokens"].device != HOST
        gc.collect()
        copied.append(len(file.read_text().splitlines()))
        alive.append(len(_installed[0].on_device))
    before = len(file.read_text().splitlines())
    _ = window[0]
    return {
        "copied": copied,
        "alive": alive,
        "again": len(file.read_text().splitlines()) - before,
    }
