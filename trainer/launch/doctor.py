"""Examines the engine: compares steps under DeepSpeed with the same steps in ten lines of torch.

Every case trains a small network for STEPS steps on all ranks (two gloo ranks for the command) at
ZeRO 0 to 3, and with plain torch on one rank. A difference above rounding is a finding. A run
examines its own stage if its cache has not seen these versions of DeepSpeed and torch yet.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import deepspeed_config
from trainer.config.block import validate
from trainer.config.identity import digest
from trainer.config.schema import Experiment
from trainer.errors import ProofError
from trainer.files.atomic import write_json
from trainer.runtime import distributed, rng
from trainer.switches import EXAMINE, is_on
from trainer.training.engine import Engine

STEPS, WIDTH, LR = 4, 8, 0.01
# Gradients here are about 1. With AdamW's usual 1e-8 every step has the size of the learning rate,
# however small its gradient, so a gradient that is only bf16's rounding would step in any
# direction.
EPS = 0.1
# The largest difference of a weight below 1 after STEPS steps: a few last places of fp32, and two
# of bf16, because the weights are bf16 beside fp32 masters. Measured here: 6e-8 and 1.6e-3.
TOLERANCE = {"fp32": 2e-6, "bf16": 8e-3}
# The relative difference of the gradient norm. Measured here: 1.7e-7 and 1.3e-3.
NORM_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}

STAGES = (0, 1, 2, 3)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Case:
    """One kind of training that is examined."""

    name: str
    clip: float = 0.0
    precision: str = "fp32"
    micro_batches: tuple[int, int] = (1, 1)  # in a step, on even and on odd ranks
    is_twice: bool = False  # a layer is used twice in a forward
    is_tied: bool = False  # two layers share a weight
    is_frozen: bool = False  # the first layer does not train
    is_retained: bool = False  # each part runs forward twice, as GradCache does
    is_in_two_forwards: bool = False  # two forwards, one backward through both
    is_managed: bool = False  # DeepSpeed accumulates itself; no run of ours lets it
    is_beside: bool = False  # a layer is also called outside the engine's forward


CASES = (
    Case("plain"),
    Case("accumulation", micro_batches=(3, 3)),
    Case("module used twice", is_twice=True),
    Case("used twice, bf16", precision="bf16", is_twice=True),
    Case("in two forwards, bf16", precision="bf16", is_in_two_forwards=True),
    Case("tied weights", is_tied=True),
    Case("frozen base", is_frozen=True),
    Case("GradCache", is_retained=True, micro_batches=(2, 2)),
    Case("bf16 masters", precision="bf16"),
    Case("clipping", clip=0.1),
    Case("uneven ranks", micro_batches=(1, 3)),
    Case("DeepSpeed accumulates", precision="bf16", micro_batches=(2, 2), is_managed=True),
    Case(
        "the same, beside", precision="bf16", micro_batches=(2, 2), is_managed=True, is_beside=True
    ),
)


@dataclass(frozen=True)
class Examined:
    """The result of a case at a stage."""

    case: str
    stage: int
    weights: float  # the largest difference of a weight
    norm: float  # the largest relative difference of a gradient's norm
    is_sound: bool
    error: str = ""

    def text(self) -> str:
        """The result in words: the differences, or the error."""
        return self.error or f"weights {self.weights:.1e}, norm {self.norm:.1e} off"


class Net(nn.Module):
    """Three layers; a case ties, freezes or repeats some of them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        if case.is_tied:
            self.last.weight = self.first.weight
        for parameter in self.first.parameters() if case.is_frozen else ():
            parameter.requires_grad = False

    def forward(self, inputs_BD: Tensor) -> Tensor:
        hidden_BD = torch.tanh(self.first(inputs_BD))
        hidden_BD = torch.tanh(self.middle(hidden_BD))
        if self.case.is_twice:
            hidden_BD = torch.tanh(self.middle(hidden_BD))
        return self.last(hidden_BD)


def examine(stages: Sequence[int] = STAGES) -> Iterator[Examined]:
    """One finding for each case and stage. A collective."""
    for case in CASES:
        # the twin trains in plain torch, on all rows at once
        net = _net(case)
        trained = [p for p in net.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LR, eps=EPS, weight_decay=0.0)
        norms: list[float] = []
        for step in range(STEPS):
            inputs_BD = torch.cat([rows for own in _rows(case, step) for rows in own])
            (_of_forwards(case, net, inputs_BD) / len(inputs_BD)).backward()
            norm = nn.utils.clip_grad_norm_(trained, case.clip or float("inf"))
            norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
        weights = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
        for stage in stages:
            yield _compare(case, stage, (weights, norms))


def before_first_use(stage: int, cache_dir: Path) -> None:
    """Examine the engine at this stage, unless `cache_dir` knows these versions. A collective.

    ProofError if the engine differs from plain torch; on a GPU a warning. Random state is kept.
    """
    if not is_on(EXAMINE, os.environ, default=True):
        return
    facts = {name: version(name) for name in ("deepspeed", "torch")}
    facts |= {"stage": str(stage), "device": distributed.device().type}
    facts |= {"ranks": "several" if distributed.world() > 1 else "one"}
    record = cache_dir / "examined" / f"{digest(facts)[:32]}.json"
    if distributed.on_main(record.is_file):
        return
    before = rng.capture()
    try:
        findings = list(examine([stage]))
    finally:
        rng.restore(before)
    wrong = next((text for text in distributed.gather(named(findings)) if text), "")
    if wrong:
        text = (
            f"DeepSpeed {facts['deepspeed']} with torch {facts['torch']} does not do what plain "
            f"torch does: {wrong}.\nInstall the versions of constraints.txt; `python -m trainer "
            f"doctor` tells more. "
        )
        if distributed.is_gpu():  # the tolerances were not measured on GPUs
            log.warning("%sIt trains all the same.", text)
            return
        raise ProofError(f"{text}{EXAMINE}=off in the environment trains all the same.")

    def remember() -> None:
        record.parent.mkdir(parents=True, exist_ok=True)
        write_json(record, facts)

    distributed.on_main(remember)
    log.info("deepspeed %s examined at ZeRO-%d: sound", facts["deepspeed"], stage)


def table(findings: Sequence[Examined]) -> list[str]:
    """A line for each case, a column for each stage: how far the weights are off, or WRONG."""
    stages = sorted({one.stage for one in findings})
    versions = ", ".join(f"{name} {version(name)}" for name in ("deepspeed", "torch"))
    lines = [f"{versions}; {distributed.world()} ranks, {distributed.device()}"]
    lines += [f"{'':22}" + "".join(f"{f'ZeRO-{stage}':>12}" for stage in stages)]
    for case in dict.fromkeys(one.case for one in findings):
        cells = [
            f"{one.weights:.1e}" if one.is_sound else "CANNOT RUN" if one.error else "WRONG"
            for one in findings
            if one.case == case
        ]
        lines.append(f"{case:22}" + "".join(f"{cell:>12}" for cell in cells))
    return lines


def named(findings: Sequence[Examined]) -> str:
    """The unsound findings as text: each problem, with the cases and stages that have it."""
    places: dict[str, list[str]] = {}
    for one in findings:
        if not one.is_sound:
            # many cases may raise the same error, but differences are their own
            key = one.error or f"{one.case}, {one.text()}"
            place = f"{one.case} at ZeRO-{one.stage}" if one.error else f"ZeRO-{one.stage}"
            places.setdefault(key, []).append(place)
    return "; ".join(f"{what} ({', '.join(where)})" for what, where in places.items())


def _compare(case: Case, stage: int, twin: tuple[dict[str, Tensor], list[float]]) -> Examined:
    weights, norms = twin
    try:
        ours, our_norms = _under_deepspeed(case, stage)
    except Exception as error:
        # any error: a version of DeepSpeed that fails here is what we look for
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return Examined(case.name, stage, float("nan"), float("nan"), False, text)
    off = max(float((ours[name].float() - weights[name]).abs().max()) for name in weights)
    norm = max(abs(a - b) / b for a, b in zip(our_norms, norms, strict=True))
    is_sound = off <= TOLERANCE[case.precision] and norm <= NORM_TOLERANCE[case.precision]
    return Examined(case.name, stage, off, norm, is_sound)


def _net(case: Case) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Net(case)


def _rows(case: Case, step: int) -> list[list[Tensor]]:
    """(2, WIDTH) inputs of every rank and micro-batch. Every rank gets all of them."""
    generator = torch.Generator().manual_seed(100 + step)
    return [
        [torch.randn(2, WIDTH, generator=generator) for _ in range(case.micro_batches[rank % 2])]
        for rank in range(distributed.world())
    ]


def _loss(outputs_BD: Tensor) -> Tensor:
    return (outputs_BD.float() - 1.0).square().sum()


def _of_forwards(case: Case, model: Any, inputs_BD: Tensor) -> Tensor:
    """The loss of one forward, or of two forwards with the same weights."""
    loss = _loss(model(inputs_BD))
    if case.is_beside:
        loss = loss + _loss(getattr(model, "module", model).middle(inputs_BD))
    return loss + _loss(model(inputs_BD.flip(1))) if case.is_in_two_forwards else loss


def _under_deepspeed(case: Case, stage: int) -> tuple[dict[str, Tensor], list[float]]:
    values = {
        "task": "doctor",
        "base": "none",
        "train": {
            "steps": STEPS, "global_batch": 2 * distributed.world(), "micro_batch": 2,
            "precision": case.precision,
        },
        "optim": {"lr": LR, "eps": EPS, "clip": case.clip, "weight_decay": 0.0},
    }  # fmt: skip
    cfg = validate(Experiment, values)
    ds = deepspeed_config.build(
        deepspeed_config.read(f"zero{stage}"),
        train=cfg.train,
        optim=cfg.optim,
        world=distributed.world(),
        source="doctor",
    )
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    config = deepspeed_config.for_engine(ds)
    if case.is_managed:
        (most,) = {*case.micro_batches}
        config |= {"managed_gradient_accumulation": True, "gradient_accumulation_steps": most}
        config["train_batch_size"] *= most
    engine = Engine(copy.deepcopy(_net(case)).to(dtype), config, cfg.optim)
    engine.model.enable_backward_allreduce |= case.is_managed
    try:
        norms = [_step(case, engine, step, dtype) for step in range(STEPS)]
        return engine.weights(lambda k: True), norms
    finally:
        engine.destroy()


def _step(case: Case, engine: Engine, step: int, dtype: torch.dtype) -> float:
    """Train one step on this rank's rows, as the loop and GradCache do: its gradient norm."""
    rows = _rows(case, step)
    count = sum(len(batch) for own in rows for batch in own)
    own = [batch.to(distributed.device(), dtype) for batch in rows[distributed.rank()]]
    if case.is_managed:
        for group in engine.model.optimizer.param_groups:
            group["lr"] = LR
        for batch in own:  # DeepSpeed wants the mean over ranks and micro-batches
            loss = _of_forwards(case, engine.model, batch) * len(rows) * len(own) / count
            engine.model.backward(loss)
            engine.model.step()
        return engine.grad_norm()
    # all ranks run the same number of forwards, because ZeRO-3 gathers weights on all of them
    most = max(case.micro_batches)
    scales = [1.0] * len(own) + [0.0] * (most - len(own))
    own += [own[-1]] * (most - len(own))
    for batch, scale in zip(own, scales, strict=True):
        if case.is_retained:
            with torch.no_grad():
                held_BD = engine.model(batch)
            leaf_BD = held_BD.detach().requires_grad_()
            (gradient_BD,) = torch.autograd.grad(_loss(leaf_BD) * scale / count, leaf_BD)
            engine.backward((engine.model(batch) * gradient_BD).sum())
        else:
            engine.backward(_of_forwards(case, engine.model, batch) * scale / count)
    engine.step(LR)
    return engine.grad_norm()
