"""What every task's run can do besides learning: go on with another number of ranks, recompute, log
its gradients.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import golden_files
from tests.contract.runs import Runs, losses, train, usual
from tests.facts import FORMS
from tests.long import long_but
from tests.ranks import run_on_ranks
from trainer import tasks

TASKS = tasks.names()
EVERY_FORM = [*TASKS, *FORMS]


# Another world size
# -------------------------------------------------------------------------------------------------


def _go_on(values: dict[str, Any], folder: Path, savedir: Path) -> list[float]:
    return losses(train(values, folder, savedir, stage=2)[1])


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", long_but(("causal_lm", "fid"), EVERY_FORM))
def test_a_run_resumed_on_another_number_of_ranks_goes_on_with_the_same_losses(
    name: str, first: int, then: int, runs: Runs, tmp_path: Path
) -> None:
    straight = runs.of(name, "plain", first, 2)
    copy = shutil.copytree(straight.folder, tmp_path / straight.folder.name)
    shutil.rmtree(copy / "checkpoints" / "step-4")  # back to its checkpoint of step 2, as by a kill
    values = runs.values(name, "plain")
    resumed = run_on_ranks(then, _go_on, values, runs.folder, tmp_path)[0]
    assert len(resumed) == 4
    before, after = resumed[:2], resumed[2:]
    assert before == straight.losses[:2], "the lines before the checkpoint stay as written"
    assert after == pytest.approx(straight.losses[2:], abs=1e-5)


# Recomputation
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", long_but(("fid",), EVERY_FORM))
def test_gradient_checkpointing_changes_no_loss_even_with_dropout(
    name: str, stage: int, runs: Runs
) -> None:
    plain = runs.of(name, "dropout", 2, stage).losses
    assert runs.of(name, "recomputed", 2, stage).losses == pytest.approx(plain, abs=1e-6)


# Gradient norms
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_logged_gradient_norms_make_up_the_global_norm(name: str, runs: Runs) -> None:
    trainable = golden_files.read(name)["trainable"]
    for stage in [stage for world, stage in usual(name) if world == 2]:
        by_step: dict[int, dict[str, float]] = {}
        for line in runs.of(name, "plain", 2, stage).lines:
            by_step.setdefault(line["step"], {}).update(line)
        assert len(by_step) == 4
        for line in by_step.values():
            norms = {
                key.removeprefix("grad_norm/"): value
                for key, value in line.items()
                if "grad_norm/" in key
            }
            assert list(norms) == trainable, f"ZeRO {stage}"
            total = math.hypot(*norms.values())
            assert total == pytest.approx(line["grad_norm"], rel=1e-4), f"ZeRO {stage}"


# Exports
# --------------------------------------------------------------------------------------------------


def _read_again(values: dict[str, Any], folder: Path, run_folder: Path) -> dict[str, float]:
    """The validation metrics of a run's final/."""
    from trainer.data.token_store import store_of
    from trainer.evaluation.run import Question
    from trainer.evaluation.run import run as evaluate
    from trainer.protocol.abilities import ComparesWithStart
    from trainer.protocol.task import Places
    from trainer.training.options import Options
    from trainer.training.scoring import Frozen
    from trainer.training.scoring import evaluate as metrics

    savedir, cache = run_folder.parent, folder / "cache"
    options = Options(savedir, data_path=folder, cache_dir=cache)
    task = tasks.load(tasks.parse(values), Places(folder, cache, savedir))
    assert evaluate(Question(values, model="final"), options).keys()
    store = store_of(task, "valid", cache)
    if isinstance(task, ComparesWithStart):  # the run has stored it
        task.read_start(lambda: pytest.fail("all is there"), {"valid": store}, batch=3)
    model = Frozen(task.load_export(run_folder / "final").eval())
    return metrics(model, task, store, batch=3)


@pytest.mark.parametrize("name", long_but(TASKS, EVERY_FORM))
def test_an_exported_model_reads_back_with_the_metrics_of_its_run(name: str, runs: Runs) -> None:
    trained = runs.of(name, "plain", 1, 2)
    values = runs.values(name, "plain")
    again = run_on_ranks(1, _read_again, values, runs.folder, trained.folder)[0]
    last = {
        key.removeprefix("valid/"): value
        for key, value in trained.lines[-1].items()
        if key.startswith("valid/")
    }
    assert again == pytest.approx(last, rel=1e-5)
    for weights in trained.folder.glob("final/*.safetensors"):
        assert weights.stat().st_mode & 0o044, "others of the group can read what a run leaves"
