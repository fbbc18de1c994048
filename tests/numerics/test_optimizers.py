"""Every optimizer under the engine against plain torch at every stage of ZeRO, its state through
save and restore, and its groups of rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.long import cases_long_but, long_but
from tests.numerics.every_optimizer import (
    BASE,
    BLOCKS,
    EVERY,
    LR,
    STAGES,
    STEPS,
    WIDTH,
    everything,
    make,
    net,
    orthogonal_in_fp32,
    reference,
    train,
)
from tests.ranks import run_on_ranks
from tests.tolerance import assert_all_close, note
from trainer.config.optimizer.freeze import Freeze
from trainer.config.optimizer.optim import RateGroup
from trainer.config.schema import Optim

# As tests/tolerance.py means them: sums of every layer there and back, at every step.
DEPTH = STEPS * 2 * (BLOCKS + 2) * WIDTH
WEIGHTS = {"depth": DEPTH, "margin": 0.4, "cancels": 1.0}
# How far masters beside weights in bf16 end from fp32, as a share of how far they moved, in the mean:
# at most twice the largest measured (docs/optimisers.md).
OF_MOVES_IN_BF16 = {"sgd": 0.003, "momentum": 0.0034, "lion": 0.07, "muon": 0.34, "adamw": 0.017}


# Every optimizer
# --------------------------------------------------------------------------------------------------


# An optimizer, ranks, stages: one case of each optimizer is quick, and one of two ranks.
QUICK = [
    ("sgd", 1, (0,)),
    ("momentum", 1, (1,)),
    ("lion", 1, (2,)),
    ("adamw", 1, (3,)),
    ("muon", 2, (2,)),
]
CASES = [(name, world, STAGES) for name in EVERY for world in (1, 2)]


def _ends(name: str, precision: str, stages: Sequence[int]) -> dict[int, dict[str, Tensor]]:
    found = {}
    with orthogonal_in_fp32():
        for stage in stages:
            live = make(stage, EVERY[name], precision=precision)
            train(live, range(STEPS))
            found[stage] = everything(live)
            live.destroy()
    return found


@pytest.mark.parametrize(("name", "world", "stages"), cases_long_but(QUICK, QUICK + CASES))
def test_steps_are_those_of_plain_torch(name: str, world: int, stages: tuple[int, ...]) -> None:
    with orthogonal_in_fp32():
        wanted, _ = reference(EVERY[name])
    for stage, found in run_on_ranks(world, _ends, name, "fp32", stages)[0].items():
        weights = {key: found[key] for key in wanted}
        what = f"{name}, stage {stage}, fp32"
        assert_all_close(weights, wanted, what=what, of=f"{world} ranks", **WEIGHTS)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", list(EVERY))
def test_bf16_keeps_fp32_masters_near_fp32_at_every_stage(name: str, world: int) -> None:
    with orthogonal_in_fp32():
        wanted, _ = reference(EVERY[name], begins_in=torch.bfloat16)
    started = net().bfloat16().state_dict()
    moved = _mean_distance(wanted, started)
    for stage, found in run_on_ranks(world, _ends, name, "bf16", STAGES)[0].items():
        masters = {key: found[f"{key}|master"] for key in wanted}
        assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
        assert all(found[key].dtype == torch.bfloat16 for key in wanted)
        share = _mean_distance(masters, wanted) / moved
        note(f"{name}, stage {stage}, bf16", f"{world} ranks", share, OF_MOVES_IN_BF16[name])
        assert share < OF_MOVES_IN_BF16[name], stage


def _mean_distance(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    return float(torch.cat([(one[key] - two[key]).abs().flatten() for key in one]).mean())


# Saved, and resumed
# --------------------------------------------------------------------------------------------------

HALF = STEPS // 2
# A group of two matrices that stands still at first, and one that does so later.
FREEZE = (
    Freeze(match="blocks.0.*.weight", until=2),
    Freeze(match="embed.*", since=2, until=4),
)
Saved = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float | int]]


def _saved(name: str, precision: str, stages: Sequence[int]) -> dict[int, tuple[Saved, Any]]:
    """What is saved after half of the steps, and what an undisturbed run ends with."""
    found = {}
    for stage in stages:
        live = make(stage, EVERY[name], precision=precision, freeze=FREEZE)
        train(live, range(HALF))
        saved = (
            live.weights(lambda k: True),
            live.optimizer.tensors(lambda k: True),
            live.optimizer.scalars(),
        )
        train(live, range(HALF, STEPS))
        found[stage] = saved, everything(live)
        live.destroy()
    return found


def _resumed(name: str, precision: str, saved: dict[int, Saved]) -> dict[int, Any]:
    """What a run ends with that goes on from what was saved."""
    found = {}
    for stage, (weights, state, scalars) in saved.items():
        live = make(stage, EVERY[name], precision=precision, freeze=FREEZE, weights=weights)
        live.optimizer.restore(state, scalars)
        restored = everything(live)
        train(live, range(HALF, STEPS))
        found[stage] = restored, everything(live)
        live.destroy()
    return found


QUICK_RESUME = ("adamw", "fp32", 1, (1,))
RESUMES = [(name, kind, 2, STAGES) for name in EVERY for kind in ("fp32", "bf16")]


@pytest.mark.parametrize(
    ("name", "precision", "world", "stages"),
    cases_long_but([QUICK_RESUME], [QUICK_RESUME, *RESUMES]),
)
def test_a_restored_state_continues_bit_for_bit(
    name: str, precision: str, world: int, stages: tuple[int, ...]
) -> None:
    ran = run_on_ranks(world, _saved, name, precision, stages)[0]
    before = {stage: one for stage, (one, _) in ran.items()}
    again = run_on_ranks(world, _resumed, name, precision, before)[0]
    for stage, (_, straight) in ran.items():
        resumed = again[stage][1]
        assert straight.keys() == resumed.keys()
        for key, tensor in straight.items():
            assert torch.equal(tensor, resumed[key]), (stage, key)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in EVERY if name != "adamw"])
def test_a_state_of_two_ranks_is_read_whole_by_one_and_by_three(name: str) -> None:
    ran = run_on_ranks(2, _saved, name, "bf16", STAGES)[0]
    for world in (1, 3):
        saved = {stage: one for stage, (one, _) in ran.items()}
        for stage, (restored, _) in run_on_ranks(world, _restored, name, saved)[0].items():
            weights, state, _ = saved[stage]
            for key, tensor in (weights | state).items():
                assert torch.equal(tensor, restored[key]), (world, stage, key)


def _restored(name: str, saved: dict[int, Saved]) -> dict[int, Any]:
    found = {}
    for stage, (weights, state, scalars) in saved.items():
        live = make(stage, EVERY[name], precision="bf16", freeze=FREEZE, weights=weights)
        live.optimizer.restore(state, scalars)
        found[stage] = everything(live), live.optimizer.scalars()
        live.destroy()
    return found


def _regrouped(stages: Sequence[int]) -> list[tuple[Any, Any]]:
    """The counts of steps before and after other groups of rates."""
    found = []
    groups = (RateGroup(match="blocks.0.2.*", lr=0.01), RateGroup(match="embed.*", lr=0.02))
    for stage in stages:
        live = make(stage, EVERY["adamw"], freeze=FREEZE)
        train(live, range(HALF))
        weights, state = live.weights(lambda k: True), live.optimizer.tensors(lambda k: True)
        scalars = live.optimizer.scalars()
        live.destroy()
        optim = EVERY["adamw"].model_copy(update={"groups": groups})
        other = make(stage, optim, freeze=FREEZE, weights=weights)
        other.optimizer.restore(state, scalars)
        found.append((scalars, other.optimizer.scalars()))
        other.destroy()
    return found


@pytest.mark.parametrize("stages", long_but([(1,)], [(1,), (0, 2, 3)]))
def test_counts_of_steps_belong_to_weights_whatever_their_groups(stages: tuple[int, ...]) -> None:
    for before, after in run_on_ranks(1, _regrouped, stages)[0]:
        assert len(before) > 1, "some weights stood still"
        assert after == before


# Weights that stand still
# --------------------------------------------------------------------------------------------------


def _with_freeze(name: str, stages: Sequence[int]) -> dict[int, Any]:
    found = {}
    with orthogonal_in_fp32():
        for stage in stages:
            live = make(stage, EVERY[name], freeze=FREEZE)
            states = []
            norms = []
            for step in range(STEPS):
                norms += train(live, range(step, step + 1))
                states.append(everything(live))
            found[stage] = states, norms, live.optimizer.scalars()
            live.destroy()
    return found


QUICK_STAND = ("adamw", 1, (2,))
STANDS = [(name, world, STAGES) for name in ("adamw", "muon") for world in (1, 2)]


@pytest.mark.parametrize(
    ("name", "world", "stages"), cases_long_but([QUICK_STAND], [QUICK_STAND, *STANDS])
)
def test_what_stands_still_gets_no_update_at_all(
    name: str, world: int, stages: tuple[int, ...]
) -> None:
    def stands(key: str, step: int) -> bool:
        is_first = key.startswith("blocks.0") and key.endswith("weight") and step <= 2
        return is_first or (key == "embed.weight" and 2 < step <= 4)

    with orthogonal_in_fp32():
        wanted, wanted_norms = reference(EVERY[name], stands=stands)
    ran = run_on_ranks(world, _with_freeze, name, stages)[0]
    for stage, (states, norms, scalars) in ran.items():
        started = net().state_dict()
        for key in ("blocks.0.0.weight", "blocks.0.2.weight"):
            assert torch.equal(states[1][key], started[key])
            assert not any(states[1][k].any() for k in states[1] if k.startswith(f"{key}|"))
            assert not torch.equal(states[2][key], started[key])
        for key in (key for key in states[1] if key.startswith("embed")):
            assert torch.equal(states[1][key], states[3][key]), (stage, key)
        weights = {key: states[-1][key] for key in wanted}
        what = f"{name} that stood still, stage {stage}, fp32"
        assert_all_close(weights, wanted, what=what, of=f"{world} ranks", **WEIGHTS)
        for got, want in zip(norms, wanted_norms, strict=True):
            assert got == pytest.approx(want, rel=1e-4)
        assert scalars["optimizer_step"] == STEPS
        counts = {key: n for key, n in scalars.items() if key.startswith("optimizer_step|")}
        stood = ["blocks.0.0.weight", "blocks.0.2.weight", "embed.weight"]
        if name == "muon":  # matrices are orthogonalised, and no step of theirs is counted
            stood = ["embed.weight"]
        assert counts == {f"optimizer_step|{key}": 4 for key in stood}


def _empty(stages: Sequence[int]) -> dict[int, dict[str, Tensor]]:
    found = {}
    for stage in stages:
        live = make(stage, EVERY["momentum"], freeze=FREEZE)
        found[stage] = live.optimizer.tensors(lambda k: True)
        live.destroy()
    return found


@pytest.mark.parametrize("stages", long_but([(1,)], [(1,), (0, 2, 3)]))
def test_before_the_first_step_nothing_is_remembered_of_what_stands_still_for_sgd(
    stages: tuple[int, ...],
) -> None:
    for found in run_on_ranks(1, _empty, stages)[0].values():
        assert len(found) == len(net().state_dict())
        assert not any(tensor.any() for tensor in found.values())


# Groups of rates
# --------------------------------------------------------------------------------------------------

GROUPED = Optim(
    betas=(0.9, 0.95),
    layer_decay=0.5,
    groups=(
        RateGroup(match="head.*", lr=0.05, weight_decay=0.3),
        RateGroup(match="blocks.1.*.bias", lr=0.0),
    ),
    **BASE,
)


def _grouped(stages: Sequence[int]) -> dict[int, dict[str, Tensor]]:
    found = {}
    for stage in stages:
        live = make(stage, GROUPED)
        train(live, range(STEPS), _falling)
        found[stage] = everything(live)
        live.destroy()
    return found


def _falling(step: int) -> float:
    return 1.0 - step / STEPS


QUICK_GROUPS = (1, (0,))


@pytest.mark.parametrize(
    ("world", "stages"), cases_long_but([QUICK_GROUPS], [QUICK_GROUPS, (1, STAGES), (2, STAGES)])
)
def test_groups_and_layer_decay_are_those_of_plain_torch(
    world: int, stages: tuple[int, ...]
) -> None:
    def share(name: str) -> float:
        if name.startswith("head"):
            return 0.05 / LR
        if name.startswith("blocks.1") and name.endswith("bias"):
            return 0.0
        if name.startswith("blocks"):
            return 0.5 ** (BLOCKS - int(name.split(".")[1]))
        return 0.5 ** (BLOCKS + 1) if name.startswith("embed") else 1.0

    def decay(name: str, usual: float) -> float:
        return 0.3 if name.startswith("head") else usual

    wanted, _ = reference(GROUPED, share=share, decay=decay, factor=_falling)
    for stage, found in run_on_ranks(world, _grouped, stages)[0].items():
        weights = {key: found[key] for key in wanted}
        what = f"groups of rates, stage {stage}, fp32"
        assert_all_close(weights, wanted, what=what, of=f"{world} ranks", **WEIGHTS)
        for key, started in net().state_dict().items():
            if key.startswith("blocks.1") and key.endswith("bias"):
                assert torch.equal(found[key], started)
