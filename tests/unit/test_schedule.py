"""The learning-rate factors against transformers' and torch's own schedulers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers

from tests.wording import refused
from trainer.config.block import validate
from trainer.config.schema import Schedule
from trainer.training.schedule import Plateau, factor


def theirs(name: str, warmup: int, total: int, **own: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = transformers.get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs=own,
    )
    found = []
    for _ in range(total):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


SHAPES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"shape": "linear"}, "linear", {}),
    ({"shape": "cosine"}, "cosine", {}),
    ({"shape": "constant"}, "constant_with_warmup", {}),
    ({"shape": "inverse_sqrt"}, "inverse_sqrt", {}),
    ({"shape": "cosine", "cycles": 3}, "cosine_with_restarts", {"num_cycles": 3}),
    ({"shape": "cosine", "min_lr_ratio": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    (
        {"shape": "polynomial", "power": 2.0, "min_lr_ratio": 0.01},
        "polynomial",
        {"power": 2.0, "lr_end": 0.01},
    ),
    *(
        (
            {"shape": "wsd", "decay": decay, "min_lr_ratio": 0.2, "decay_ratio": 0.4},
            "warmup_stable_decay",
            {"decay_type": decay, "min_lr_ratio": 0.2},
        )
        for decay in ("linear", "cosine", "1-sqrt")
    ),
]


@pytest.mark.parametrize(("own", "name", "others"), SHAPES)
@pytest.mark.parametrize(("warmup", "total"), [(0, 7), (1, 10), (4, 30)])
def test_factors_equal_transformers_schedulers(
    own: dict[str, Any], name: str, others: dict[str, Any], warmup: int, total: int
) -> None:
    schedule = validate(Schedule, {**own, "warmup_steps": warmup})
    ours = [factor(schedule, step, total) for step in range(total)]
    wanted, start = others, 0
    if own["shape"] == "wsd":
        wanted = {**others, "num_decay_steps": math.ceil(own["decay_ratio"] * total)}
        start = warmup  # theirs warms up from min_lr_ratio, ours from 0
    found = theirs(name, warmup, total, **wanted)
    assert ours[start:] == pytest.approx(found[start:], abs=1e-12)


@pytest.mark.parametrize(
    ("shape", "foreign"),
    [
        ("linear", {"cycles": 2}),
        ("constant", {"min_lr_ratio": 0.1}),
        ("cosine", {"decay": "linear"}),
    ],
)
def test_a_key_of_another_shape_is_refused(shape: str, foreign: dict[str, Any]) -> None:
    with refused("key_of_another_shape", shape=shape, key=next(iter(foreign))):
        validate(Schedule, {"shape": shape, **foreign})


def test_min_lr_ratio_is_where_linear_ends() -> None:
    schedule = validate(Schedule, {"shape": "linear", "min_lr_ratio": 0.25})
    assert factor(schedule, 0, 4) == 1.0
    assert factor(schedule, 4, 4) == 0.25


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
