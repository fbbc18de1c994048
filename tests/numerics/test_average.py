"""The average of the weights (train.ema) against torch's own, at every ZeRO stage, on one rank and
two; exchanged in the model, and saved and restored on another number of ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.facts import LLAMA, experiment, write_facts
from tests.numerics.test_engine import IN_BF16, OPTIM, WEIGHTS, ds_for, train
from tests.numerics.tiny_network import STEPS, data, network
from tests.ranks import run_on_ranks
from tests.tolerance import assert_all_close
from tests.wording import refused
from trainer import tasks
from trainer.config import deepspeed_config
from trainer.config.schema import Train
from trainer.plan.memory.deepspeed_terms import Zero, host
from trainer.plan.memory.measure import MeasureRequest, measure
from trainer.protocol.task import DRAW, EPOCH, Places

DECAY = 0.8
BF16_WEIGHTS = {"what": "weights in bf16", "margin": 0.02, **IN_BF16}
AFTER = {"fp32": WEIGHTS, "bf16": BF16_WEIGHTS}
EVERY = [
    (stage, precision, world)
    for stage in (0, 1, 2, 3)
    for precision in ("fp32", "bf16")
    for world in (1, 2)
]
SHORT = [(0, "fp32", 1), (0, "bf16", 2), (1, "bf16", 2), (2, "fp32", 2), (3, "bf16", 2)]
every_case = pytest.mark.parametrize(
    ("stage", "precision", "world"),
    [pytest.param(*case, marks=[] if case in SHORT else pytest.mark.long) for case in EVERY],
)


def make(stage: int, precision: str, *, weights: Any = None, persisted: int = 0) -> Any:
    from trainer.runtime import distributed
    from trainer.training import engine

    net = network()
    if weights is not None:
        engine.load_weights(net, weights)
    ds = ds_for(stage, precision, distributed.world())
    if stage == 3:  # weights of at most so many numbers are whole on every rank
        ds["zero_optimization"]["stage3_param_persistence_threshold"] = persisted
    return engine.Engine(net, ds, OPTIM)


def masters_of(live: Any) -> dict[str, Tensor]:
    """The full fp32 weights."""
    of_optimizer = live.optimizer.tensors(lambda k: True)
    masters = {k[:-7]: t for k, t in of_optimizer.items() if k.endswith("|master")}
    return masters or {name: t.clone() for name, t in live.weights(lambda k: True).items()}


def whole(live: Any) -> dict[str, Tensor]:
    """The full average, from the parts of all ranks."""
    import torch.distributed as dist

    pieces = [(name, start, values.tolist()) for name, start, values in live.average.pieces()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pieces)
    found: dict[str, Tensor] = {}
    for name, start, values in (piece for pieces in everyone for piece in pieces):
        shape = dict(network().named_parameters())[name].shape
        flat = found.setdefault(name, torch.full(shape, torch.nan)).view(-1)
        assert flat[start : start + len(values)].isnan().all(), "each element comes once"
        flat[start : start + len(values)] = torch.tensor(values)
    return found


def _trained(stage: int, precision: str, persisted: int = 0) -> dict[str, Any]:
    """Masters after every step, the average, what the model holds with it and after it, and the
    losses of steps with such looks between them and without.
    """
    live = make(stage, precision, persisted=persisted)
    live.keep_average(DECAY)
    # not masters_of(): before its first step the optimizer's state would be made by one more
    before = {name: weight.float() for name, weight in live.weights(lambda k: True).items()}
    seen, losses = [before], []
    for step in range(STEPS):
        losses += train(live, range(step, step + 1))[0]
        seen.append(masters_of(live))
    average, held = whole(live), live.weights(lambda k: True)
    x = data()[0][0].to(next(live.model.parameters()).dtype)
    live.eval()
    outputs = [live.model(x).detach().float()]
    with live.averaged():
        shown = live.weights(lambda k: True)
        outputs.append(live.model(x).detach().float())
    outputs.append(live.model(x).detach().float())
    live.train()
    kept = live.weights(lambda k: True)
    losses += train(live, range(1))[0]
    undisturbed = make(stage, precision, persisted=persisted)
    plain = train(undisturbed, range(STEPS))[0] + train(undisturbed, range(1))[0]
    return {
        "seen": seen,
        "average": average,
        "held": held,
        "shown": shown,
        "kept": kept,
        "outputs": outputs,
        "losses": losses,
        "plain": plain,
    }


def by_torch(seen: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    update, names = get_ema_multi_avg_fn(DECAY), list(seen[0])
    averages = [seen[0][name].float().clone() for name in names]
    for weights in seen[1:]:
        update(averages, [weights[name].float() for name in names], 0)
    return dict(zip(names, averages, strict=True))


@every_case
def test_the_average_is_torchs_and_is_shown_and_taken_back(
    stage: int, precision: str, world: int
) -> None:
    for found in run_on_ranks(world, _trained, stage, precision):
        wanted = by_torch(found["seen"])
        assert wanted.keys() == found["average"].keys()
        for name, average in wanted.items():
            assert torch.equal(found["average"][name], average), name
            dtype = found["held"][name].dtype
            assert torch.equal(found["shown"][name], average.to(dtype)), name
            assert torch.equal(found["kept"][name], found["held"][name]), name
            assert not torch.equal(found["shown"][name], found["held"][name]), name
        own, averaged, own_again = found["outputs"]
        assert torch.equal(own, own_again)
        assert not torch.equal(own, averaged)
        assert found["losses"] == found["plain"], "averaging changes no step"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_that_stage_3_leaves_whole_are_exchanged_too(precision: str) -> None:
    for found in run_on_ranks(2, _trained, 3, precision, 10):
        own, averaged, own_again = found["outputs"]
        assert torch.equal(own, own_again)
        net = network().to(found["held"]["3.weight"].dtype)
        net.load_state_dict(found["shown"], strict=False)
        x = data()[0][0].to(net[0].weight.dtype)
        near = {"fp32": 1e-5, "bf16": 1e-2}[precision]
        assert torch.allclose(net.eval()(x).detach().float(), averaged, atol=near)
        assert found["losses"] == found["plain"]


def test_the_average_of_a_whole_training_is_that_of_plain_torch() -> None:
    net, (inputs, targets) = network(), data()
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averaged.update_parameters(net)
    named = {name: p for name, p in net.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": OPTIM.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps)
    for x, y in zip(inputs, targets, strict=True):
        ((net(x).squeeze(-1) - y) ** 2).mean().backward()
        torch.nn.utils.clip_grad_norm_(list(named.values()), OPTIM.clip)
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(net)
    wanted = {name: dict(averaged.module.named_parameters())[name].detach() for name in named}
    (found,) = run_on_ranks(1, _trained, 2, "fp32")
    assert_all_close(found["average"], wanted, **WEIGHTS)


@pytest.mark.long
@pytest.mark.parametrize(("ema", "states"), [(None, 2), (0.999, 3)])
def test_an_average_is_planned_as_one_more_state(
    ema: float | None, states: int, tmp_path: Path
) -> None:
    folder = write_facts(tmp_path)
    values = experiment("causal_lm", folder, base=LLAMA, train={"ema": ema})
    places = Places(folder, folder / "cache", folder / "runs")
    task = tasks.load(tasks.parse(values), places)
    row = task.encode(task.specimen())
    row = {field: list(ids) for field, ids in row.items()} | {DRAW: [5], EPOCH: [0]}
    (step,) = measure([MeasureRequest(values, "train", [row])], places)
    assert step.states == states * step.trainable
    zero = Zero(stage=2, world=2, width=2, accumulates=False, offloads_optimizer=True)
    kept = host(step, zero) - host(replace(step, states=2 * step.trainable), zero)
    assert kept == 4 * (states - 2) * step.trainable // 2


# Through a checkpoint
# --------------------------------------------------------------------------------------------------


def _saved(folder: Path, stage: int, precision: str) -> dict[str, Tensor]:
    from trainer.training import checkpoint

    live = make(stage, precision)
    live.keep_average(DECAY)
    train(live, range(4))
    weights, optimizer = live.own_tensors()
    own: dict[str, Any] = {"weights": weights, "optimizer": optimizer, "rng": {}}
    own["state"] = {"engine": live.optimizer.scalars()}
    checkpoint.save(folder, 4, **own, average=live.average.own_tensors(), keep_last=1)
    train(live, range(4, STEPS))
    return whole(live)


def _resumed(folder: Path, stage: int, precision: str) -> tuple[dict[str, Tensor], bool]:
    from trainer.training import checkpoint, engine

    saved = checkpoint.Checkpoint(folder / "step-4")
    live = make(stage, precision, weights=saved.weights(engine.shapes(network())))
    live.keep_average(DECAY)
    live.optimizer.restore(saved.optimizer(live.optimizer.shapes()), saved.state()["engine"])
    stored = saved.average(engine.shapes(network()))
    live.average.restore(stored)
    restored = whole(live)
    is_same = all(torch.equal(restored[name], stored[name]) for name in stored)
    train(live, range(4, STEPS))
    return whole(live), is_same


@pytest.mark.parametrize(
    ("stage", "precision", "world", "later"),
    [
        (2, "bf16", 2, 2),
        (3, "bf16", 2, 1),
        pytest.param(0, "fp32", 2, 2, marks=pytest.mark.long),
        pytest.param(0, "bf16", 1, 2, marks=pytest.mark.long),
        pytest.param(1, "bf16", 1, 4, marks=pytest.mark.long),
        pytest.param(1, "bf16", 2, 2, marks=pytest.mark.long),
        pytest.param(3, "fp32", 4, 2, marks=pytest.mark.long),
        pytest.param(3, "bf16", 2, 2, marks=pytest.mark.long),
    ],
)
def test_an_average_goes_on_bit_for_bit_on_any_number_of_ranks(
    stage: int, precision: str, world: int, later: int, tmp_path: Path
) -> None:
    straight = run_on_ranks(world, _saved, tmp_path, stage, precision)[0]
    for resumed, is_same in run_on_ranks(later, _resumed, tmp_path, stage, precision):
        assert is_same
        if later == world:
            assert all(torch.equal(resumed[name], straight[name]) for name in straight)
        else:  # the sum of gradients has another order, and below fp32 each sum is rounded
            assert_all_close(resumed, straight, **AFTER[precision])


def _skipped() -> list[dict[str, Tensor]]:
    live = make(2, "bf16")
    live.keep_average(DECAY)
    train(live, range(2))
    before = whole(live)
    live.backward(live.model(data()[0][0].to(torch.bfloat16)).sum())
    live.leave_out()
    after_one = whole(live)
    live.backward(live.model(data()[0][0].to(torch.bfloat16)).sum() * float("nan"))
    live.step(0.01)
    assert live.step_was_skipped()
    return [before, after_one, whole(live)]


def test_an_update_that_is_left_out_is_not_averaged() -> None:
    before, after_one, after_another = run_on_ranks(1, _skipped)[0]
    for name, average in before.items():
        assert torch.equal(after_one[name], average)
        assert torch.equal(after_another[name], average)


def test_weights_on_nvme_are_refused(tmp_path: Path) -> None:
    train = Train(steps=1, global_batch=2, micro_batch=2, precision="bf16", ema=0.9)
    preset = deepspeed_config.read("zero3_nvme")
    for key in ("offload_param", "offload_optimizer"):
        if preset["zero_optimization"].get(key, {}).get("device") == "nvme":
            preset["zero_optimization"][key]["nvme_path"] = str(tmp_path)
    with refused("average_on_nvme", value=0.9):
        deepspeed_config.build(
            preset, train=train, optim=OPTIM, world=1, source="test", hidden_size=8
        )
