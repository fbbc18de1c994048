"""The oracle of every optimizer: a small network, its data, the engine that trains it, and the same
steps in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from trainer.config import deepspeed_config
from trainer.config.optimizer.freeze import Freeze
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
# Two ranks and three cut a matrix at stages 1 and 2, too: blocks of one size would end where ranks do.
INNER = (WIDTH + 5, WIDTH + 7, WIDTH + 9)


class Net(nn.Module):
    """An embedding, blocks of growing size, a norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, inner), nn.Tanh(), nn.Linear(inner, WIDTH))
            for inner in INNER
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
    begins_in: torch.dtype = torch.float32,
) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after the same steps on whole batches in torch, and the norms of gradients.

    begins_in: the dtype that the weights are rounded to before they train in fp32.
    """
    model, (ids, targets) = net().to(begins_in).float(), data()
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


@contextmanager
def orthogonal_in_fp32() -> Iterator[None]:
    """Inside, Muon's matrices become orthogonal in fp32, torch's and ours.

    Both iterate in bf16, which rounds a gradient to 8 bits. Five steps enlarge a singular value near
    0 by up to 3.44 ** 5 = 485, and a rounding in its direction as well: two runs whose gradients
    differ in the last bit of fp32 are then 1e-3 apart. Nothing else of either code is replaced.
    """
    from trainer.models.optimizers import muon

    in_bf16 = muon.orthogonal

    def in_fp32(matrix: Tensor) -> Tensor:
        with no_bf16():
            return in_bf16(matrix)

    theirs = torch.optim._muon._zeropower_via_newtonschulz  # pyright: ignore

    def theirs_in_fp32(*args: Any) -> Tensor:
        with no_bf16():
            return theirs(*args)

    of_torch = mock.patch("torch.optim._muon._zeropower_via_newtonschulz", theirs_in_fp32)
    with of_torch, mock.patch.object(muon, "orthogonal", in_fp32):
        yield


def no_bf16() -> Any:
    return mock.patch.object(Tensor, "bfloat16", lambda tensor: tensor.float().clone())
