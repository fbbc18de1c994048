"""A gradient that is dropped leaves weights, masters and moments as they are, at every ZeRO stage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.numerics.test_average import make, train
from tests.numerics.tiny_network import data
from tests.ranks import run_on_ranks
from trainer.models.base_model import DTYPES


def _tensors(live: object) -> dict[str, Tensor]:
    weights, optimizer = live.own_tensors()  # type: ignore[attr-defined]
    return {name: tensor.clone() for name, tensor in {**weights, **optimizer}.items()}


def _dropped(stage: int, precision: str) -> tuple[dict[str, Tensor], ...]:
    live = make(stage, precision)
    train(live, range(2))
    before, count = _tensors(live), live.optimizer.scalars()
    live.backward(live.model(data()[0][0].to(DTYPES[precision])).sum())
    live.leave_out()
    assert live.step_was_skipped()
    assert live.optimizer.scalars() == count
    after = _tensors(live)
    train(live, range(2, 4))
    straight = make(stage, precision)
    train(straight, range(4))
    return before, after, _tensors(live), _tensors(straight)


@pytest.mark.parametrize(
    ("stage", "precision", "world"),
    [
        (1, "bf16", 1),
        *(
            pytest.param(stage, precision, world, marks=pytest.mark.long)
            for stage in (0, 1, 2, 3)
            for precision in ("fp32", "bf16")
            for world in (1, 2)
        ),
    ],
)
def test_a_dropped_gradient_changes_nothing(stage: int, precision: str, world: int) -> None:
    for before, after, later, straight in run_on_ranks(world, _dropped, stage, precision):
        assert before
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor), name
        for name, tensor in straight.items():
            assert torch.equal(later[name], tensor), name
