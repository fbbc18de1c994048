"""What came after the first figures of a GPU, on a CUDA device: every task and form, teachers, and runs that are driven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from exp_configs import vary
from tests import golden_files
from tests.driven_runs import (
    create,
    drive,
    driven_values,
    folder_of,
    passed,
    results_of,
    rows_of_seed,
    step,
    tensors_sha,
    write_log,
)
from tests.facts import FORMS, LLAMA, OF_TASK, TINY_T5, experiment, write_facts
from tests.gpu.test_on_cuda import train
from tests.ranks import run_on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device; none is visible here"
    ),
]
_MATRYOSHKA = {"dims": [16, 8]}
_RETRIEVER = {
    "symmetric": {"loss": {"symmetric": True, "margin": 0.1, "matryoshka": _MATRYOSHKA}},
    "learnt": {
        "encoder": {"learn_temperature": True},
        "loss": {"false_negatives": {"share": 0.95}, "mask_duplicates": True},
    },
}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def losses(values: dict[str, Any], facts: Path, savedir: Path, stage: int) -> list[float]:
    return [line["loss"] for line in train(values, facts, savedir, stage) if "loss" in line]


@pytest.mark.parametrize("task", sorted(set(OF_TASK) - {"causal_lm", "cross_attention"}))
def test_golden_losses_of_the_other_tasks_hold(task: str, facts: Path, tmp_path: Path) -> None:
    golden = golden_files.read(task)["losses"]
    for precision, stage, allowed in (("fp32", 0, 1e-3), ("bf16", 2, 5e-2)):
        values = experiment(task, facts, train={"steps": 10, "precision": precision})
        found = losses(values, facts, tmp_path / precision, stage)
        assert found == pytest.approx(golden, rel=allowed), precision


@pytest.mark.parametrize("name", [*FORMS, *_RETRIEVER, "teacher llama", "teacher t5"])
def test_a_form_learns_the_same_in_both_precisions(name: str, facts: Path, tmp_path: Path) -> None:
    if name in FORMS:
        values = experiment(name, facts)
    elif name in _RETRIEVER:
        values = vary(experiment("retriever", facts), **_RETRIEVER[name])
    else:
        task, base = {"llama": ("causal_lm", LLAMA), "t5": ("summariser", TINY_T5)}[name[8:]]
        how = {"base": {**base, "seed": 9}, "top_k": 6, "divergence": "mixed"}
        values = experiment(task, facts, base=base, teacher=how)
    exact = losses(values, facts, tmp_path / "fp32", 0)
    rounded = losses(vary(values, train={"precision": "bf16"}), facts, tmp_path / "bf16", 2)
    assert rounded == pytest.approx(exact, rel=5e-2, abs=2e-2)
    assert len(exact) == 6


@pytest.mark.parametrize("data", [{}, {"together": 4}])
def test_a_driven_run_has_the_same_bits_twice(
    data: dict[str, Any], facts: Path, tmp_path: Path
) -> None:
    values = driven_values(
        facts, lora={"dropout": 0.1}, train={"precision": "bf16", "save_every": 2}, data=data
    )
    steps = [create(values)]
    for number in range(3):
        steps += [passed(rows_of_seed(number)), passed(rows_of_seed(9), "forward"), step()]
    steps += [("save_state", {"name": "one"}, b""), ("save_for_sampler", {"name": "one"}, b"")]
    steps += [passed(rows_of_seed(5)), step(), ("end", {}, b"")]
    runs = [folder_of(values, tmp_path / name) for name in ("first", "second")]
    for run in runs:
        write_log(run, steps)
        run_on_ranks(1, drive, values, facts, run.parent, 2)
    first, second = map(results_of, runs)
    assert [one.error for one in first] == [None] * len(steps)
    assert [one.digest for one in first] == [one.digest for one in second]
    assert tensors_sha(runs[0] / "final") == tensors_sha(runs[1] / "final") != {}
