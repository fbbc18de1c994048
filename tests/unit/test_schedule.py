"""The learning-rate factors against transformers' and torch's own schedulers."""

from __future__ import annotations

import pytest
import torch
import transformers

from trainer.config.schema import Schedule
from trainer.training.schedule import Plateau, factor


def theirs(name: str, warmup: int, total: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = transformers.get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=total
    )
    found = []
    for _ in range(total):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("shape", "name"),
    [("linear", "linear"), ("cosine", "cosine"), ("constant", "constant_with_warmup")],
)
@pytest.mark.parametrize(("warmup", "total"), [(0, 7), (1, 10), (4, 30)])
def test_factors_equal_transformers_schedulers(
    shape: str, name: str, warmup: int, total: int
) -> None:
    schedule = Schedule(shape=shape, warmup_steps=warmup)  # pyright: ignore[reportArgumentType]
    ours = [factor(schedule, step, total) for step in range(total)]
    assert ours == pytest.approx(theirs(name, warmup, total), abs=1e-12)


def test_a_warmup_ratio_is_rounded_up() -> None:
    assert Schedule(warmup_ratio=0.05).warmup_of(30) == 2


def test_plateau_follows_torch() -> None:
    losses = [3.0, 2.0, 1.99999, 2.1, 2.2, 1.9, 1.9, 1.9, 1.9, 1.9, 1.9, 1.0, 1.1, 1.1, 1.1, 1.1]
    schedule = Schedule(shape="reduce_on_plateau", factor=0.5, patience=2)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    torchs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    ours = Plateau()
    for loss in losses:
        torchs.step(loss)
        ours.update(loss, schedule)
        assert ours.factor == optimizer.param_groups[0]["lr"]


def test_plateau_survives_json() -> None:
    plateau = Plateau()
    assert Plateau.of(plateau.state()) == plateau
    plateau.update(1.5, Schedule(shape="reduce_on_plateau"))
    assert Plateau.of(plateau.state()) == plateau
