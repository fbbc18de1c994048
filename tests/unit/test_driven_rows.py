"""Rows of a driven run: their losses by formula, and how they are dealt and packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.driven.losses import LOSSES
from trainer.driven.packs import batch_of, deal, inputs_of, split_outputs
from trainer.operations.rows import DrivenRow


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro"])
def test_losses_and_their_gradients_are_the_formulas(name: str) -> None:
    l = torch.tensor([-1.0, -0.2, -2.0, -0.7], dtype=torch.float64, requires_grad=True)  # noqa: E741
    q = torch.tensor([-1.1, -0.9, -1.0, -0.7], dtype=torch.float64)
    a = torch.tensor([0.5, 1.0, -2.0, 0.3], dtype=torch.float64)
    r = (l.detach() - q).exp()
    c = r.clamp(0.8, 1.2)
    losses, gradients = {  # by hand: d r / d l = r
        "importance_sampling": (-r * a, -r * a),
        "ppo": (-torch.minimum(r * a, c * a), torch.where(r * a <= c * a, -r * a, 0.0)),
        "cispo": (-c * l.detach() * a, -c * a),
        "dro": (-(l.detach() * a - 0.025 * (l.detach() - q) ** 2), -(a - 0.05 * (l.detach() - q))),
    }[name]
    got = LOSSES[name].tokens(l, {"logprobs": q, "advantages": a}, {})
    got.sum().backward()
    torch.testing.assert_close(got.detach(), losses)
    assert l.grad is not None
    torch.testing.assert_close(l.grad, gradients)


def test_a_token_whose_ratio_is_infinite_and_clipped_has_no_gradient_and_spoils_no_other() -> None:
    """ppo clips it where its advantage is not negative; with a negative one it has no bound."""
    l = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)  # noqa: E741
    inputs = {"logprobs": torch.tensor([-200.0, -200.0, -1.0])}
    inputs["advantages"] = torch.tensor([2.0, 0.0, 1.0])
    losses = LOSSES["ppo"].tokens(l, inputs, {})
    losses.sum().backward()
    torch.testing.assert_close(losses.detach(), torch.tensor([-2.4, 0.0, -1.0]))
    assert l.grad is not None
    assert l.grad.tolist() == [0.0, 0.0, -1.0]
    inputs["advantages"] = torch.tensor([-1.0, 0.0, 1.0])
    assert LOSSES["ppo"].tokens(l, inputs, {}).isinf().tolist() == [True, False, False]


def test_cross_entropy_is_weighted_and_thresholds_may_differ_by_token() -> None:
    logps = torch.tensor([-1.0, -2.0])
    weighted = LOSSES["cross_entropy"].tokens(logps, {"weights": torch.tensor([0.5, 0.0])}, {})
    assert weighted.tolist() == [0.5, 0.0]
    assert LOSSES["cross_entropy"].tokens(logps, {}, {}).tolist() == [1.0, 2.0]
    inputs = {"logprobs": logps - 1.0, "advantages": torch.ones(2)}
    high = {"clip_high_threshold": torch.tensor([1.5, 10.0])}
    clipped = LOSSES["ppo"].tokens(logps, inputs | high, {"clip_low_threshold": 0.5})
    torch.testing.assert_close(clipped, -torch.tensor([1.5, float(np.e)]))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 40))
def test_every_row_is_dealt_once(lengths: list[int], world: int, most: int) -> None:
    dealt = deal(lengths, world=world, most_tokens=most)
    assert sorted(row for packs in dealt for pack in packs for row in pack) == [
        *range(len(lengths))
    ]
    assert len({len(packs) for packs in dealt}) == 1
    for packs in dealt:
        for pack in packs:
            assert len(pack) <= 1 or sum(lengths[row] for row in pack) <= most
    loads = [sum(lengths[row] for pack in packs for row in pack) for packs in dealt]
    assert max(loads) - min(loads) <= max(lengths)
    outputs = [
        torch.cat(
            [torch.full((lengths[row],), row) for pack in packs for row in pack] or [torch.zeros(0)]
        )
        for packs in dealt
    ]
    split = split_outputs(outputs, dealt, dict(enumerate(lengths)))
    assert [set(one.tolist()) for one in split] == [{row} for row in range(len(lengths))]


@pytest.mark.parametrize("is_packed", [True, False])
def test_targets_stand_at_their_positions(is_packed: bool) -> None:
    rows = [
        DrivenRow(np.arange(2, 2 + length, dtype=np.int32), {"target_tokens": targets})
        for length, targets in ((3, np.array([5, 6, 7])), (2, np.array([8, 9])))
    ]
    batch = batch_of(rows, is_packed=is_packed, pad=1)
    ids = batch["tokens"] if is_packed else batch["input_ids"].flatten()
    assert ids[batch["scored"]].tolist() == [2, 3, 4, 2, 3]
    assert batch["targets"].tolist() == [5, 6, 7, 8, 9]


def test_a_position_with_many_targets_is_scored_for_each() -> None:
    targets = np.array([[5, 6], [7, 8]])
    row = DrivenRow(
        np.array([2, 3], np.int32),
        {"target_tokens": targets, "weights": np.array([1.0, 2.0], np.float32)},
    )
    batch = batch_of([row], is_packed=True, pad=1)
    assert batch["scored"].tolist() == [0, 0, 1, 1]
    assert batch["targets"].tolist() == [5, 6, 7, 8]
    assert inputs_of([row])["weights"].tolist() == [1.0, 1.0, 2.0, 2.0]
