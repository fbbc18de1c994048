"""Every optimizer under the engine against plain torch at every stage of ZeRO, its state through
save and restore, and its groups of rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_on_ranks
from tests.tolerance import assert_all_close
from trainer.config import deepspeed_config
from trainer.config.optimizer.freeze import Freeze
from trainer.config.optimizer.optim import RateGroup
from trainer.config.schema import Optim, Train

STEPS, ROWS, WIDTH, LR = 6, 8, 12, 0.02
BASE = {"lr": LR, "clip": 0.5, "weight_decay": 0.1}
EVERY: dict[str, Optim] = {
    "sgd": Optim(name="sgd", **BASE),
    "momentum": Optim(name="sgd", momentum=0.9, nesterov=True, **BASE),
    "lion": Optim(name="lion", **BASE),
    "muon": Optim(name="muon", betas=(0.9, 0.95), **BASE),
    "adamw": Optim(betas=(0.9, 0.95), **BASE),
}
STAGES = (0, 1, 2, 3)
BLOCKS = 3
# As tests/tolerance.py means them: sums of every layer there and back, at every step.
DEPTH = STEPS * 2 * (BLOCKS + 2) * WIDTH
WEIGHTS = {"what": "weights", "depth": DEPTH, "margin": 0.4, "cancels": 1.0}
# A number of bf16's rounding decides a sign (Lion), or a singular value near none (Muon).
BF16_WEIGHTS = {"what": "weights in bf16", "depth": DEPTH, "margin": 0.6, "cancels": 1.0}


class Net(nn.Module):
    """An embedding, blocks of odd sizes with norms, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH + 5), nn.Tanh(), nn.Linear(WIDTH + 5, WIDTH))
            for _ in range(BLOCKS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids_BT: Tensor) -> Tensor:
        hidden_BD = self.embed(ids_BT).mean(1)
        for block in self.blocks:
            hidden_BD = hidden_BD + block(hidden_BD)
        return self.head(self.norm(hidden_BD)).squeeze(-1)


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Net()


def data() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 7, (STEPS, ROWS, 4), generator=made)
    return ids, torch.randn(STEPS, ROWS, generator=made)


def ds_for(stage: int, optim: Optim, *, precision: str, world: int) -> dict[str, Any]:
    rows = 2 * world
    train = Train(steps=STEPS, global_batch=rows, micro_batch=2, precision=precision)  # pyright: ignore
    preset = deepspeed_config.read(f"zero{stage}")
    if stage == 3:  # every weight is divided, however small
        preset["zero_optimization"] |= {
            "reduce_bucket_size": 1000,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 10_000,
        }
    built = deepspeed_config.build(
        preset, train=train, optim=optim, world=world, source="test", hidden_size=WIDTH
    )
    return deepspeed_config.for_engine(built)


def make(
    stage: int,
    optim: Optim,
    *,
    precision: str = "fp32",
    plus: float = 1.0,
    freeze: tuple[Freeze, ...] = (),
    weights: Mapping[str, Tensor] | None = None,
) -> Any:
    from trainer.runtime import distributed
    from trainer.training import engine

    model = net()
    if weights is not None:
        engine.load_weights(model, weights)
    ds = ds_for(stage, optim, precision=precision, world=distributed.world())
    return engine.Engine(model, ds, optim, plus=plus, freeze=freeze)


def train(live: Any, steps: range, factor: Callable[[int], float] = lambda _: 1.0) -> list[float]:
    """Micro-batches of three and one rows on each rank, or five and three."""
    from trainer.runtime import distributed

    ids, targets = data()
    count = ROWS // distributed.world()
    own = slice(distributed.rank() * count, (distributed.rank() + 1) * count)
    norms = []
    for step in steps:
        x, y = ids[step, own], targets[step, own]
        live.begin(step + 1)
        for part in (slice(0, 3), slice(3, count)):
            loss = ((live.model(x[part]).float() - y[part]) ** 2).sum() / ROWS
            live.backward(loss)
        live.step(LR * factor(step))
        norms.append(live.grad_norm())
    return norms


def everything(live: Any) -> dict[str, Tensor]:
    return live.weights(lambda k: True) | live.optimizer.tensors(lambda k: True)


# Plain torch
# --------------------------------------------------------------------------------------------------


class LionOfThePaper:
    """Algorithm 2 of Chen et al. 2023, a weight at a time."""

    def __init__(self, groups: list[dict[str, Any]], optim: Optim) -> None:
        self.groups, self.betas = groups, optim.betas
        self.averages: dict[Tensor, Tensor] = {}

    def step(self) -> None:
        for group in self.groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                average = self.averages.get(weight, torch.zeros_like(weight))
                update = torch.sign(self.betas[0] * average + (1 - self.betas[0]) * weight.grad)
                change = group["lr"] * (update + group["weight_decay"] * weight.detach())
                weight.data -= change
                new = self.betas[1] * average + (1 - self.betas[1]) * weight.grad
                self.averages[weight] = new


class Several:
    """Optimizers that step together."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for one in self.optimizers:
            one.step()


def of_torch(groups: list[dict[str, Any]], optim: Optim, is_hidden: Callable[[Any], bool]) -> Any:
    if optim.name == "lion":
        return LionOfThePaper(groups, optim)
    if optim.name == "sgd":
        how = {"momentum": optim.momentum, "nesterov": optim.nesterov}
        return torch.optim.SGD(groups, lr=LR, foreach=False, **how)
    how = {"betas": optim.betas, "eps": optim.eps, "foreach": False}
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=LR, **how)
    hidden = [{**g, "params": [p for p in g["params"] if is_hidden(p)]} for g in groups]
    others = [{**g, "params": [p for p in g["params"] if not is_hidden(p)]} for g in groups]
    hidden, others = [g for g in hidden if g["params"]], [g for g in others if g["params"]]
    muon = torch.optim.Muon(
        hidden, lr=LR, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    return Several(muon, torch.optim.AdamW(others, lr=LR, **how))


def reference(
    optim: Optim,
    *,
    share: Callable[[str], float] = lambda _: 1.0,
    decay: Callable[[str, float], float] = lambda _, decay: decay,
    stands: Callable[[str, int], bool] = lambda *_: False,
    factor: Callable[[int], float] = lambda _: 1.0,
) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after the same steps on whole batches in torch, and the norms of gradients."""
    model, (ids, targets) = net(), data()
    named = dict(model.named_parameters())
    names = {p: name for name, p in named.items()}
    groups = [
        {
            "params": [p],
            "lr": LR * share(name),
            "weight_decay": decay(name, 0.1 if p.ndim > 1 else 0.0),
        }
        for name, p in named.items()
    ]
    rates = [group["lr"] for group in groups]
    optimizer = of_torch(groups, optim, lambda p: p.ndim == 2 and names[p].startswith("blocks"))
    norms = []
    for step, (x, y) in enumerate(zip(ids, targets, strict=True)):
        for name, p in named.items():
            p.requires_grad_(not stands(name, step + 1))
        for every in getattr(optimizer, "optimizers", [optimizer]):
            for group in getattr(every, "param_groups", getattr(every, "groups", None)):
                name = names[group["params"][0]]
                group["lr"] = rates[list(named).index(name)] * factor(step)
        ((model(x) - y) ** 2).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(list(named.values()), optim.clip)))
        optimizer.step()
        model.zero_grad()
    return {name: p.detach() for name, p in named.items()}, norms


# Every optimizer
# --------------------------------------------------------------------------------------------------


def _at_every_stage(name: str, precision: str) -> dict[int, dict[str, Tensor]]:
    found = {}
    for stage in STAGES:
        live = make(stage, EVERY[name], precision=precision)
        train(live, range(STEPS))
        found[stage] = everything(live)
        live.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", list(EVERY))
def test_steps_are_those_of_plain_torch_at_every_stage(name: str, world: int) -> None:
    wanted, _ = reference(EVERY[name])
    for stage, found in run_on_ranks(world, _at_every_stage, name, "fp32")[0].items():
        weights = {key: found[key] for key in wanted}
        assert_all_close(weights, wanted, of=f"stage {stage}", **WEIGHTS)


def _in_bf16(name: str) -> dict[int, dict[str, Tensor]]:
    return _at_every_stage(name, "bf16")


@pytest.mark.parametrize("name", ["momentum", "muon"])
def test_bf16_keeps_fp32_masters_near_fp32_at_every_stage(name: str) -> None:
    wanted, _ = reference(EVERY[name])
    for stage, found in run_on_ranks(2, _in_bf16, name)[0].items():
        masters = {key: found[f"{key}|master"] for key in wanted}
        assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
        assert all(found[key].dtype == torch.bfloat16 for key in wanted)
        how = {**BF16_WEIGHTS, "dtype": torch.bfloat16}
        assert_all_close(masters, wanted, of=f"stage {stage}", **how)


# Saved, and resumed
# --------------------------------------------------------------------------------------------------

HALF = STEPS // 2
# A group of two matrices that stands still at first, and one that does so later.
FREEZE = (
    Freeze(match="blocks.0.*.weight", until=2),
    Freeze(match="embed.*", since=2, until=4),
)
Saved = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float | int]]


def _saved(name: str, precision: str, stages: list[int]) -> dict[int, tuple[Saved, Any]]:
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", list(EVERY))
def test_a_restored_state_continues_bit_for_bit_at_every_stage(name: str, precision: str) -> None:
    ran = run_on_ranks(2, _saved, name, precision, list(STAGES))[0]
    again = run_on_ranks(2, _resumed, name, precision, {s: one for s, (one, _) in ran.items()})[0]
    for stage, (_, straight) in ran.items():
        resumed = again[stage][1]
        assert straight.keys() == resumed.keys()
        for key, tensor in straight.items():
            assert torch.equal(tensor, resumed[key]), (stage, key)


@pytest.mark.parametrize("name", [name for name in EVERY if name != "adamw"])
def test_a_state_of_two_ranks_is_read_whole_by_one_and_by_three(name: str) -> None:
    ran = run_on_ranks(2, _saved, name, "bf16", list(STAGES))[0]
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


# Weights that stand still
# --------------------------------------------------------------------------------------------------


def _with_freeze(name: str) -> dict[int, Any]:
    found = {}
    for stage in STAGES:
        live = make(stage, EVERY[name], freeze=FREEZE)
        states = []
        norms = []
        for step in range(STEPS):
            norms += train(live, range(step, step + 1))
            states.append(everything(live))
        found[stage] = states, norms, live.optimizer.scalars()
        live.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_what_stands_still_gets_no_update_at_all_at_any_stage(name: str, world: int) -> None:
    def stands(key: str, step: int) -> bool:
        is_first = key.startswith("blocks.0") and key.endswith("weight") and step <= 2
        return is_first or (key == "embed.weight" and 2 < step <= 4)

    wanted, wanted_norms = reference(EVERY[name], stands=stands)
    for stage, (states, norms, scalars) in run_on_ranks(world, _with_freeze, name)[0].items():
        started = net().state_dict()
        for key in ("blocks.0.0.weight", "blocks.0.2.weight"):
            assert torch.equal(states[1][key], started[key])
            assert not any(states[1][k].any() for k in states[1] if k.startswith(f"{key}|"))
            assert not torch.equal(states[2][key], started[key])
        for key in (key for key in states[1] if key.startswith("embed")):
            assert torch.equal(states[1][key], states[3][key]), (stage, key)
        weights = {key: states[-1][key] for key in wanted}
        assert_all_close(weights, wanted, of=f"stage {stage}", **WEIGHTS)
        for got, want in zip(norms, wanted_norms, strict=True):
            assert got == pytest.approx(want, rel=1e-4)
        assert scalars["optimizer_step"] == STEPS
        counts = [count for key, count in scalars.items() if key.startswith("optimizer_step.")]
        assert set(counts) == {4}


def _empty() -> dict[int, dict[str, Tensor]]:
    found = {}
    for stage in STAGES:
        live = make(stage, EVERY["momentum"], freeze=FREEZE)
        found[stage] = live.optimizer.tensors(lambda k: True)
        live.destroy()
    return found


def test_before_the_first_step_nothing_is_remembered_of_what_stands_still_for_sgd() -> None:
    for found in run_on_ranks(1, _empty)[0].values():
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


def _grouped() -> dict[int, dict[str, Tensor]]:
    found = {}
    for stage in STAGES:
        live = make(stage, GROUPED)
        train(live, range(STEPS), _falling)
        found[stage] = everything(live)
        live.destroy()
    return found


def _falling(step: int) -> float:
    return 1.0 - step / STEPS


@pytest.mark.parametrize("world", [1, 2])
def test_groups_and_layer_decay_are_those_of_plain_torch_at_every_stage(world: int) -> None:
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
    for stage, found in run_on_ranks(world, _grouped)[0].items():
        weights = {key: found[key] for key in wanted}
        assert_all_close(weights, wanted, of=f"stage {stage}", **WEIGHTS)
        for key, started in net().state_dict().items():
            if key.startswith("blocks.1") and key.endswith("bias"):
                assert torch.equal(found[key], started)
