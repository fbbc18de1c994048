"""What every task promises. Parametrised over the task folders: a new task is tested by being
there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import exp_configs
from tests import golden_files
from tests.contract.runs import (
    EVERY_ENTRY,
    SHORT,
    Runs,
    losses,
    train,
    untimed,
    usual,
)
from tests.facts import FORMS, OF_TASK, experiment
from tests.long import long_but
from tests.ranks import run_on_ranks
from tests.wording import refused
from trainer import tasks
from trainer.protocol.task import Places

TASKS = tasks.names()
EVERY_FORM = [*TASKS, *FORMS]


def load(task: str, folder: Path) -> Any:
    cfg = tasks.parse(experiment(task, folder))
    return tasks.load(cfg, Places(folder, folder / "cache", folder / "runs"))


def encoded(task: Any, split: str = "train") -> list[dict[str, Any]]:
    return [task.encode(row) for row in task.rows(split)]


@pytest.mark.parametrize("name", TASKS)
def test_the_tiny_group_parses_and_a_misspelt_key_is_refused(name: str) -> None:
    tiny = [
        d
        for group, d in exp_configs.EXP_GROUPS.items()
        if group.endswith("_tiny")
        for d in d
        if d["task"] == name
    ]
    assert tiny, f"exp_configs.py has no *_tiny group of task {name}"
    tasks.parse(tiny[0])
    with refused("key_unknown", nearest="micro_batch"):
        tasks.parse({**tiny[0], "train": {**tiny[0]["train"], "micro_bach": 1}})


@pytest.mark.parametrize("name", TASKS)
def test_this_contract_covers_the_task(name: str) -> None:
    assert name in OF_TASK, f"tests/facts.py has no small experiment of task {name}"


@pytest.mark.parametrize("name", EVERY_FORM)
def test_losses_yields_one_sum_for_each_micro_batch(name: str, folder: Path) -> None:
    task = load(name, folder)
    model = task.model().eval()
    rows = encoded(task)[:4]
    one, two = task.collate(rows[:1]), task.collate(rows[1:3])
    apart = [loss.detach() for loss in task.losses(model, [one, two])]
    assert [loss.shape for loss in apart] == [torch.Size([])] * 2
    (together,) = task.losses(model, [task.collate(rows[:3])])
    torch.testing.assert_close(sum(apart), together.detach(), rtol=1e-6, atol=1e-5)
    assert int(task.units(one) + task.units(two)) == int(task.units(task.collate(rows[:3])))


@pytest.mark.parametrize("name", EVERY_FORM)
def test_encode_is_pure(name: str, folder: Path) -> None:
    task = load(name, folder)
    before = torch.get_rng_state()
    rows = list(task.rows("train"))
    assert [task.encode(row) for row in rows] == [task.encode(row) for row in reversed(rows)][::-1]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", TASKS)
def test_only_the_trainable_weights_move_and_all_of_them_do(name: str, folder: Path) -> None:
    task = load(name, folder)
    model = task.model().train()
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0
    )
    for loss in task.losses(model, [task.collate(encoded(task)[:8])]):
        loss.backward()
    optimizer.step()
    moved = [key for key, p in model.named_parameters() if not torch.equal(p, before[key])]
    trainable = [key for key, p in model.named_parameters() if p.requires_grad]
    still = [key for key in trainable if key not in moved]
    golden_files.write_if_told(name, trainable=trainable, unmoved=still)
    known = golden_files.read(name)
    assert trainable == known["trainable"]
    assert set(moved) <= set(trainable)
    assert set(still) <= set(known.get("unmoved", [])), (
        f"tests/golden/{name}.json names under `unmoved` the trainable weights whose gradient is always 0, "
        "such as a bias of keys "
        "that softmax takes no notice of. The others have to move."
    )
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def _scores(name: str, folder: Path, batch: int) -> dict[str, float]:
    from trainer.runtime import distributed
    from trainer.training import scoring

    task = load(name, folder)
    rows = encoded(task, "valid")

    class Rows(list):  # what evaluate reads of a TokenStore
        lengths = np.array([task.length(row) for row in rows])

    class Engine:
        model = task.model().eval()

        def train(self) -> None: ...
        def eval(self) -> None: ...

    assert distributed.world() >= 1
    return scoring.evaluate(Engine(), task, Rows(rows), batch=batch)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", long_but(TASKS, EVERY_FORM))
def test_scores_do_not_depend_on_batches_or_ranks(name: str, folder: Path) -> None:
    # the gap of untrained rewards is the difference of two fp32 numbers near 1, which are equal but
    # for a thousandth
    how: dict[str, float] = {"abs": 2**-23} if name in FORMS else {}
    alone = run_on_ranks(1, _scores, name, folder, 22)[0]
    for shared in run_on_ranks(
        2, _scores, name, folder, 5
    ):  # 22 rows: five batches, of which the last is short
        assert shared == pytest.approx(alone, rel=1e-6, **how)


in_full = pytest.mark.parametrize(
    "is_every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["usual", "every"]
)


@in_full
@pytest.mark.parametrize("name", long_but(("causal_lm", "vera"), EVERY_FORM))
def test_stages_ranks_and_accumulation_agree(name: str, is_every: bool, runs: Runs) -> None:
    """Their losses are those of a step whose rows are one micro-batch on one rank."""
    wanted = runs.of(name, "at once").losses
    assert len(wanted) == SHORT["steps"]
    for world, stage in EVERY_ENTRY if is_every else usual(name):
        losses = runs.of(name, "plain", world, stage).losses
        assert losses == pytest.approx(wanted, abs=1e-5), f"ZeRO {stage} on {world} rank(s)"


def _losses_at(
    stages: tuple[int, ...], values: dict[str, Any], folder: Path, savedir: Path
) -> dict[int, list[float]]:
    return {
        stage: losses(train(values, folder, savedir / f"zero{stage}", stage)[1]) for stage in stages
    }


@pytest.mark.parametrize("name", TASKS)
def test_ten_golden_losses(name: str, folder: Path, tmp_path: Path) -> None:
    values = experiment(name, folder, train={"steps": 10})
    (by_stage,) = run_on_ranks(1, _losses_at, (0,), values, folder, tmp_path)
    golden_files.write_if_told(name, losses=by_stage[0])
    assert min(by_stage[0][5:]) < by_stage[0][0], (
        "the loss has to fall within ten steps of eight rows, or no test could tell training from "
        "standing still: make this task's rows in tests/facts.py easier, or raise optim.lr there"
    )
    assert by_stage[0] == pytest.approx(golden_files.read(name)["losses"], rel=2e-5)


def _die_then_resume(
    values: dict[str, Any], folder: Path, savedir: Path, stage: int
) -> tuple[str, Path]:
    """Die without a word inside step 4, more than a step after a checkpoint; the same run again."""
    from trainer.training import loop

    original, seen = loop.train_step, []

    def dying(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    loop.train_step = dying
    try:
        train(values, folder, savedir, stage)
        outcome = "finished"
    except KeyboardInterrupt:
        outcome = "killed"
    loop.train_step = original
    return outcome, train(values, folder, savedir, stage)[0]


@in_full
@pytest.mark.parametrize("name", long_but(("causal_lm", "vera"), EVERY_FORM))
def test_a_killed_run_resumes_bit_for_bit_with_dropout(
    name: str, is_every: bool, runs: Runs, tmp_path: Path
) -> None:
    """It leaves what an undisturbed one leaves."""
    of_task = [(1, 0), (1, 2), (2, 1), (2, 3)] if name == "causal_lm" else [(2, 3)]
    values = runs.values(name, "dropout")
    for world, stage in EVERY_ENTRY if is_every else of_task:
        straight = runs.of(name, "dropout", world, stage).folder
        savedir = tmp_path / f"{world}-{stage}"
        ranks = run_on_ranks(world, _die_then_resume, values, runs.folder, savedir, stage)
        outcome, killed = ranks[0]
        assert outcome == "killed"
        one, two = (untimed(path / "metrics.jsonl") for path in (straight, killed))
        assert two == one, f"ZeRO {stage} on {world} rank(s)"
        whole, resumed = (path / "final" / "model.safetensors" for path in (straight, killed))
        assert resumed.read_bytes() == whole.read_bytes(), f"ZeRO {stage} on {world} rank(s)"
