"""Adafactor under the engine against torch's own step and the paper's formulas, its state, and
where it is refused.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.numerics.tiny_network import ROWS, STEPS, data, network
from tests.ranks import run_on_ranks
from tests.tolerance import assert_all_close, assert_close, depth_of
from tests.wording import refused
from trainer.config import deepspeed_config
from trainer.config.block import validate
from trainer.config.schema import Optim, Train
from trainer.models import optimizers
from trainer.models.optimizers.rates import OWN

OPTIM = Optim(name="adafactor", lr=0.02, weight_decay=0.1, clip=0.5)


# As tests/tolerance.py means them: the sums of every layer and one over the rows, there and back, at
# every step.
DEPTH = STEPS * 2 * (depth_of(network()) + ROWS)
TRAINED = {"what": "weights and state", "depth": DEPTH, "margin": 0.3}
BF16_WEIGHTS = {"what": "weights after training in bf16", "depth": DEPTH, "margin": 0.12}
# A step of the paper on a matrix of 3 by 4 sums over rows, columns, and all elements twice.
PAPERS_STEP = {"what": "a step", "depth": 3 + 4 + 2 * 3 * 4, "margin": 0.02}


def built(optim: Optim, stage: int, precision: str, world: int) -> dict[str, Any]:
    train = Train(steps=STEPS, global_batch=ROWS, micro_batch=2, precision=precision)  # pyright: ignore
    preset = deepspeed_config.read(f"zero{stage}")
    return deepspeed_config.build(
        preset, train=train, optim=optim, world=world, source="test", hidden_size=8
    )


def make(precision: str, weights: dict[str, Tensor] | None = None) -> Any:
    from trainer.runtime import distributed
    from trainer.training.engine import Engine, load_weights

    net = network().to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    if weights is not None:
        load_weights(net, weights)
    return Engine(
        net, deepspeed_config.for_engine(built(OPTIM, 0, precision, distributed.world())), OPTIM
    )


def train(live: Any, steps: range) -> list[float]:
    """This rank's losses, each a sum over its rows divided by all rows."""
    from trainer.runtime import distributed

    inputs, targets = data()
    share = slice(distributed.rank(), None, distributed.world())
    losses = []
    for step in steps:
        x, y = inputs[step, share], targets[step, share]
        for half in (slice(0, len(x) // 2), slice(len(x) // 2, None)):
            found = live.model(x[half].to(next(live.model.parameters()).dtype)).squeeze(-1).float()
            loss = ((found - y[half]) ** 2).sum() / ROWS
            live.backward(loss)
            losses.append(float(loss.detach()))
        live.step(OPTIM.lr)
    return losses


def _after_training(precision: str) -> dict[str, Tensor]:
    live = make(precision)
    train(live, range(STEPS))
    return live.weights(lambda k: True) | live.optimizer.tensors(lambda k: True)


def by_torch() -> dict[str, Tensor]:
    """Weights and state after the same steps, by torch's optimizer on the whole batch."""
    net, (inputs, targets) = network(), data()
    named = {name: p for name, p in net.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.Adafactor(groups, lr=0.02, beta2_decay=-0.8, eps=(1e-16, 1e-3), d=1.0)
    for x, y in zip(inputs, targets, strict=True):
        ((net(x).squeeze(-1) - y) ** 2).mean().backward()
        nn.utils.clip_grad_norm_(list(named.values()), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    state = {
        f"{name}|{key}": value
        for name, p in named.items()
        for key, value in optimizer.state[p].items()
    }
    return {name: p.detach() for name, p in named.items()} | {
        k: v for k, v in state.items() if "|step" not in k
    }


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_the_engine_takes_torchs_own_steps_on_any_ranks(world: int) -> None:
    wanted = by_torch()
    for found in run_on_ranks(world, _after_training, "fp32"):
        assert_all_close(found, wanted, **TRAINED)


def test_bf16_keeps_fp32_weights_in_their_own_shapes() -> None:
    (found,) = run_on_ranks(1, _after_training, "bf16")
    wanted = by_torch()
    for name, tensor in wanted.items():
        if "|" not in name:
            assert found[name].dtype == torch.bfloat16
            master = found[f"{name}|master"]
            assert_close(master, tensor, of=name, dtype=torch.bfloat16, **BF16_WEIGHTS)
        else:
            assert found[name].shape == tensor.shape


def _through_a_checkpoint(
    precision: str,
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], list[float]]:
    live = make(precision)
    train(live, range(3))
    weights, state, scalars = (
        live.weights(lambda k: True),
        live.optimizer.tensors(lambda k: True),
        live.optimizer.scalars(),
    )
    straight = train(live, range(3, STEPS))
    one = live.weights(lambda k: True) | live.optimizer.tensors(lambda k: True)
    live.destroy()
    again = make(precision, weights)
    again.optimizer.restore(state, scalars)
    resumed = train(again, range(3, STEPS))
    return (
        one,
        again.weights(lambda k: True) | again.optimizer.tensors(lambda k: True),
        straight,
        resumed,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_restored_state_continues_bit_for_bit(precision: str) -> None:
    for one, two, straight, resumed in run_on_ranks(2, _through_a_checkpoint, precision):
        assert straight == resumed
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


def paper_step(
    weight: list[list[float]], gradient: list[list[float]], *, lr: float
) -> list[list[float]]:
    """Algorithm 4 of Shazeer & Stern 2018 at step 1, element by element: no epsilon, beta2 = 0,
    relative step lr.
    """
    rows = [sum(g * g for g in row) for row in gradient]
    columns = [sum(row[j] ** 2 for row in gradient) for j in range(len(gradient[0]))]
    update = [
        [g / math.sqrt(rows[i] * columns[j] / sum(rows)) for j, g in enumerate(row)]
        for i, row in enumerate(gradient)
    ]
    flat = [u for row in update for u in row]
    rms = math.sqrt(sum(u * u for u in flat) / len(flat))
    weights = [w for row in weight for w in row]
    size = max(1e-3, math.sqrt(sum(w * w for w in weights) / len(weights)))
    return [
        [w - lr * size * u / max(1.0, rms) for w, u in zip(*pair, strict=True)]
        for pair in zip(weight, update, strict=True)
    ]


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-5])
def test_a_step_is_the_papers_however_small_the_gradients(scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = nn.Parameter(torch.randn(3, 4, generator=generator))
    weight.grad = torch.randn(3, 4, generator=generator) * scale
    wanted = torch.tensor(paper_step(weight.tolist(), weight.grad.tolist(), lr=0.01))
    optimizer = optimizers.build(
        [{"params": [weight], "weight_decay": 0.0, "rule": OWN, "share": 1.0}], OPTIM
    )
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.step()
    assert_close(weight, wanted, **PAPERS_STEP)


def test_a_row_without_a_gradient_stays_where_it_is() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    weight.grad = torch.tensor([[0.0] * 4, [1e-4] * 4, [0.0] * 4])
    optimizer = optimizers.build(
        [{"params": [weight], "weight_decay": 0.0, "rule": OWN, "share": 1.0}], OPTIM
    )
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.step()
    assert torch.equal(weight[0], torch.ones(4))
    assert (weight[1] < 1).all()


@pytest.mark.parametrize("optim", [OPTIM, Optim(lr=0.01)], ids=["adafactor", "adamw"])
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)])
def test_state_shapes_are_those_of_the_optimizer(optim: Optim, shape: tuple[int, ...]) -> None:
    weight = nn.Parameter(torch.ones(shape))
    weight.grad = torch.ones(shape)
    optimizer = optimizers.build(
        [{"params": [weight], "weight_decay": 0.0, "rule": OWN, "share": 1.0}], optim
    )
    optimizer.step()
    found = {key: value.shape for key, value in optimizer.state[weight].items() if key != "step"}
    assert found == optimizers.state_shapes(optim, weight.shape, rule=OWN)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_that_flatten_weights_are_refused(stage: int) -> None:
    with refused("stage_of_adafactor", stage=stage):
        built(OPTIM, stage, "fp32", 1)
    assert built(OPTIM, 0, "fp32", 1)["zero_optimization"]["stage"] == 0


def _shapes_at_stage_1() -> list[int]:
    from trainer.training.engine import Engine

    ds = deepspeed_config.for_engine(
        built(Optim(lr=0.02), 1, "fp32", 1)
    )  # as if it were not refused
    live = Engine(network(), ds, OPTIM)
    return [p.ndim for group in live.optimizer.inner().param_groups for p in group["params"]]


def test_deepspeed_does_flatten_weights_at_stage_1() -> None:
    """Why Adafactor is refused there: when this fails, DeepSpeed keeps shapes, and the refusal may
    go.
    """
    assert run_on_ranks(1, _shapes_at_stage_1) == [[1, 1]]


def test_an_optimizer_block_of_the_file_is_refused() -> None:
    train = Train(steps=1, global_batch=2, micro_batch=2, precision="fp32")
    preset = {
        **deepspeed_config.read("zero0"),
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    with refused("deepspeed_optimizer_twice", key="optim.name", value="adafactor"):
        deepspeed_config.build(preset, train=train, optim=OPTIM, world=1, source="test")


def test_what_only_adamw_reads_is_refused() -> None:
    with refused("adafactor_keys"):
        validate(Optim, {"name": "adafactor", "lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8})
    assert validate(Optim, {"name": "adafactor", "lr": 0.1}).name == "adafactor"
