"""What every task's run can do besides learning: go on with another number of ranks, recompute, log
its gradients.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from exp_configs import vary
from tests.facts import experiment, with_dropout, write_facts
from tests.ranks import run_on_ranks
from trainer import tasks

TASKS = tasks.names()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def train(
    values: dict[str, Any], folder: Path, savedir: Path, stage: int = 0, **flags: Any
) -> tuple[Path, list[dict[str, Any]]]:
    """Run an experiment to its end on the ranks of this process group; its folder and the lines of
    metrics.jsonl.
    """
    from trainer.runtime import distributed
    from trainer.telemetry.run_record import Preemption
    from trainer.training.run import Options, plan, run

    options = Options(
        savedir, data_path=folder, cache_dir=folder / "cache", deepspeed=f"zero{stage}", **flags
    )
    planned = plan(values, options, world=distributed.world(), rank=distributed.rank())
    assert run(planned, options, Preemption()) == 0
    return planned.folder, [
        json.loads(line) for line in (planned.folder / "metrics.jsonl").read_text().splitlines()
    ]


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines if "loss" in line]


# Another world size
# -------------------------------------------------------------------------------------------------


def _go_back_to_step_3_and_go_on(
    values: dict[str, Any], folder: Path, savedir: Path, again: bool
) -> list[float]:
    """Train; `again`: what an earlier call left is cut back to its checkpoint of step 3, as a kill
    would.
    """
    from trainer.runtime import distributed

    if again and distributed.is_main():
        (last,) = savedir.glob("*/checkpoints/step-6")
        shutil.rmtree(last)
    distributed.barrier()
    return losses(train(values, folder, savedir, stage=2)[1])


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", TASKS)
def test_a_run_resumed_on_another_number_of_ranks_goes_on_with_the_same_losses(
    name: str, first: int, then: int, folder: Path, tmp_path: Path
) -> None:
    values = experiment(name, folder, train={"best": None})
    (straight, *_) = run_on_ranks(
        first, _go_back_to_step_3_and_go_on, values, folder, tmp_path, False
    )
    resumed = run_on_ranks(then, _go_back_to_step_3_and_go_on, values, folder, tmp_path, True)[0]
    assert len(resumed) == 6
    assert resumed[:3] == straight[:3], "the lines before the checkpoint stay as they were written"
    assert resumed[3:] == pytest.approx(straight[3:], abs=1e-5)


# Recomputation
# ------------------------------------------------------------------------------------------------------


def _with_and_without_recomputation(
    values: dict[str, Any], folder: Path, savedir: Path
) -> dict[int, tuple[list[float], list[float]]]:
    recomputed = vary(values, train={"gradient_checkpointing": True})
    return {
        stage: (
            losses(train(values, folder, savedir / f"{stage}", stage)[1]),
            losses(train(recomputed, folder, savedir / f"{stage}", stage)[1]),
        )
        for stage in (0, 3)
    }


@pytest.mark.parametrize("name", TASKS)
def test_gradient_checkpointing_changes_no_loss_even_with_dropout(
    name: str, folder: Path, tmp_path: Path
) -> None:
    values = with_dropout(
        experiment(name, folder, train={"steps": 3, "eval_every": 10, "save_every": 10})
    )
    for found in run_on_ranks(2, _with_and_without_recomputation, values, folder, tmp_path):
        for stage, (plain, recomputed) in found.items():
            assert recomputed == pytest.approx(plain, abs=1e-6), f"ZeRO {stage}"


# Gradient norms
# -----------------------------------------------------------------------------------------------------


def _logged_gradients(
    values: dict[str, Any], folder: Path, savedir: Path
) -> dict[int, list[dict[str, Any]]]:
    return {
        stage: train(values, folder, savedir / f"{stage}", stage, log_gradients=True)[1]
        for stage in (0, 2, 3)
    }


@pytest.mark.parametrize("name", TASKS)
def test_logged_gradient_norms_make_up_the_global_norm(
    name: str, folder: Path, tmp_path: Path
) -> None:
    values = experiment(name, folder, train={"steps": 2, "eval_every": 10, "save_every": 10})
    trainable = json.loads((Path(__file__).parent.parent / "golden" / f"{name}.json").read_text())[
        "trainable"
    ]
    for stage, lines in run_on_ranks(2, _logged_gradients, values, folder, tmp_path)[0].items():
        by_step: dict[int, dict[str, float]] = {}
        for line in lines:
            by_step.setdefault(line["step"], {}).update(line)
        for line in by_step.values():
            norms = {
                key.removeprefix("grad_norm/"): value
                for key, value in line.items()
                if "grad_norm/" in key
            }
            assert list(norms) == trainable, f"ZeRO {stage}"
            assert math.hypot(*norms.values()) == pytest.approx(line["grad_norm"], rel=1e-4), (
                f"ZeRO {stage}"
            )


# Exports
# ------------------------------------------------------------------------------------------------------------


def _exported_again(
    values: dict[str, Any], folder: Path, savedir: Path
) -> tuple[dict[str, float], dict[str, float]]:
    """The validation metrics of a run's last line, and those of its final/ read again."""
    from trainer.evaluation.run import Question
    from trainer.evaluation.run import run as evaluate
    from trainer.evaluation.scoring import Frozen
    from trainer.evaluation.scoring import evaluate as metrics
    from trainer.tasks.protocol import Places
    from trainer.training.run import Options, store_of

    run_folder, lines = train(values, folder, savedir)
    options = Options(savedir, data_path=folder, cache_dir=folder / "cache")
    task = tasks.load(tasks.parse(values), Places(folder, folder / "cache", savedir))
    assert evaluate(Question(values, model="final"), options).keys()
    again = metrics(
        Frozen(task.exported(run_folder / "final").eval()),
        task,
        store_of(task, "valid", options),
        batch=3,
    )
    said = {
        key.removeprefix("valid/"): value
        for key, value in lines[-1].items()
        if key.startswith("valid/")
    }
    return said, again


@pytest.mark.parametrize("name", TASKS)
def test_an_exported_model_reads_back_with_the_metrics_of_its_run(
    name: str, folder: Path, tmp_path: Path
) -> None:
    said, again = run_on_ranks(
        1, _exported_again, experiment(name, folder, train={"steps": 3}), folder, tmp_path
    )[0]
    assert again == pytest.approx(said, rel=1e-5)
    for weights in tmp_path.glob("*/final/*.safetensors"):
        assert weights.stat().st_mode & 0o044, "others of the group can read what a run leaves"
