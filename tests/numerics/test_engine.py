"""The engine against plain torch, for every ZeRO stage on one and two ranks, and its state through
save and restore.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.tiny_network import ROWS, STEPS, data, network
from tests.ranks import run_on_ranks
from tests.tolerance import assert_all_close, assert_close, depth_of
from trainer.config import deepspeed_config
from trainer.config.schema import Optim, Train
from trainer.training import checkpoint

OPTIM = Optim(lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, clip=0.5)


# As tests/tolerance.py means them: the sums of every layer, and one over the rows. A gradient has
# passed them twice, and what follows steps of the optimizer once more for each.
DEPTH = depth_of(network()) + ROWS
LOSSES = {"what": "losses", "depth": STEPS * 2 * DEPTH, "margin": 0.12}
NORMS = {"what": "norms", "depth": STEPS * 2 * DEPTH, "margin": 0.15}
WEIGHTS = {"what": "weights", "depth": STEPS * 2 * DEPTH, "margin": 0.4}
GRADIENTS = {"what": "gradients", "depth": 2 * DEPTH, "margin": 1.0}
# What a layer gives is rounded to bf16; its sums are not.
IN_BF16 = {"dtype": torch.bfloat16, "depth": len(network())}
BF16_LOSSES = {"what": "losses in bf16", "margin": 0.08, **IN_BF16}
BF16_GRADIENTS = {"what": "gradients in bf16", "margin": 3.0, **IN_BF16}
SHRINKS = {"what": "weight decay", "depth": 3, "margin": 1.2, "scale": 1.0}


def reference(
    dtype: torch.dtype = torch.float32,
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The same recipe in a dozen lines of torch: losses, gradient norms, final weights."""
    net, (inputs, targets) = network().to(dtype), data()
    named = {name: p for name, p in net.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": OPTIM.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps, foreach=False
    )
    losses, norms = [], []
    for x, y in zip(inputs, targets, strict=True):
        loss = ((net(x).squeeze(-1) - y) ** 2).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(list(named.values()), OPTIM.clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, {name: p.detach() for name, p in named.items()}


def ds_for(stage: int, precision: str, world: int, *, offload: bool = False) -> dict[str, Any]:
    train = Train(steps=STEPS, global_batch=ROWS, micro_batch=2, precision=precision)  # pyright: ignore
    name = f"zero{stage}_offload" if offload else f"zero{stage}"
    preset = deepspeed_config.read(name)
    for key in (
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    ):
        if preset["zero_optimization"].get(key) == "auto":
            preset["zero_optimization"][key] = 1000 if key == "reduce_bucket_size" else 0
    # deepspeed 0.19.8, __params_to_release, looks so many numbers ahead at every release: in a tiny
    # model over all that is left of a generation.
    if stage == 3:
        preset["zero_optimization"]["stage3_max_reuse_distance"] = 10_000
    return deepspeed_config.for_engine(
        deepspeed_config.build(preset, train=train, optim=OPTIM, world=world, source=name)
    )


def make(
    stage: int,
    precision: str,
    weights: Mapping[str, torch.Tensor] | None = None,
    *,
    offload: bool = False,
) -> Any:
    from trainer.runtime import distributed
    from trainer.training import engine

    net = network()
    if weights is not None:
        engine.load_weights(net, weights)
    return engine.Engine(net, ds_for(stage, precision, distributed.world(), offload=offload), OPTIM)


def train(live: Any, steps: range) -> tuple[list[float], list[float]]:
    """Uneven micro-batches: each rank takes its share of the rows of a step in pieces of 3 and 1,
    or 5 and 3.
    """
    from trainer.runtime import distributed

    inputs, targets = data()
    per_rank = ROWS // distributed.world()
    mine = slice(distributed.rank() * per_rank, (distributed.rank() + 1) * per_rank)
    cut = per_rank - 3 if per_rank == 8 else 3
    losses, norms = [], []
    for step in steps:
        x, y = inputs[step, mine], targets[step, mine]
        mean = torch.zeros((), dtype=torch.float64)
        for piece in (slice(0, cut), slice(cut, per_rank)):
            output = live.model(x[piece].to(next(live.model.parameters()).dtype))
            loss = ((output.float().squeeze(-1) - y[piece]) ** 2).sum() / ROWS
            live.backward(loss)
            mean += loss.detach()
        live.step(OPTIM.lr)
        losses.append(float(distributed.total(mean)))
        norms.append(live.grad_norm())
    return losses, norms


def _shrinks(decay: str) -> dict[int, dict[str, float]]:
    """By how much one step with a gradient of zero shrinks the weights that began at one."""
    from trainer.runtime import distributed
    from trainer.training import engine

    found: dict[int, dict[str, float]] = {}
    for stage in (0, 3):
        optim = OPTIM.model_copy(update={"decay": decay})
        live = engine.Engine(network(), ds_for(stage, "fp32", distributed.world()), optim)
        live.backward(live.model(data()[0][0]).sum() * 0.0)
        before = live.weights(lambda k: True)
        live.step(1.0)  # AdamW multiplies by 1 - lr x decay, and its own step is 0
        after = live.weights(lambda k: True)
        found[stage] = {
            name: float(1 - (after[name] / before[name]).flatten()[0]) for name in after
        }
        live.destroy()
    return found


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_weight_decay_acts_on_matrices_or_on_everything(decay: str) -> None:
    matrices = {"3.weight", "5.weight"}
    for found in run_on_ranks(1, _shrinks, decay)[0].values():
        for name, shrunk in found.items():
            if name == "2.bias":
                continue  # a norm's bias begins at zero
            wanted = OPTIM.weight_decay if decay == "all" or name in matrices else 0.0
            assert_close(shrunk, wanted, of=name, **SHRINKS)


STAGES = (0, 1, 2, 3)


def _plain_runs(precision: str) -> dict[int, Any]:
    return {stage: _run(stage, precision) for stage in STAGES}


def _run(stage: int, precision: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    live = make(stage, precision)
    losses, norms = train(live, range(STEPS))
    weights = live.weights(lambda k: True)
    live.destroy()
    return losses, norms, weights


@pytest.mark.parametrize("world", [1, 2])
def test_uneven_micro_batches_equal_one_full_batch_of_plain_torch_at_every_stage(
    world: int,
) -> None:
    wanted_losses, wanted_norms, wanted = reference()
    for stage, (losses, norms, weights) in run_on_ranks(world, _plain_runs, "fp32")[0].items():
        of = f"stage {stage}"
        assert_close(losses, wanted_losses, of=of, **LOSSES)
        assert_close(norms, wanted_norms, of=of, **NORMS)
        trained = {name: weights[name] for name in wanted}
        assert_all_close(trained, wanted, of=of, **WEIGHTS)


def test_bf16_keeps_fp32_master_weights_and_stays_near_fp32_at_every_stage() -> None:
    for stage, (losses, _, weights) in run_on_ranks(2, _plain_runs, "bf16")[0].items():
        of = f"stage {stage}"
        assert_close(losses, reference()[0], of=of, **BF16_LOSSES)
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def _resumes(pairs: list[tuple[int, int]], precision: str) -> dict[tuple[int, int], Any]:
    return {pair: _through_a_checkpoint(pair[0], precision, 3, pair[1]) for pair in pairs}


def _through_a_checkpoint(stage: int, precision: str, at: int, resume_stage: int) -> dict[str, Any]:
    live = make(stage, precision)
    train(live, range(at))
    weights, state, scalars = (
        live.weights(lambda k: True),
        live.optimizer.tensors(lambda k: True),
        live.optimizer.scalars(),
    )
    straight = train(live, range(at, STEPS))
    straight_weights, straight_state = (
        live.weights(lambda k: True),
        live.optimizer.tensors(lambda k: True),
    )
    live.destroy()
    again = make(resume_stage, precision, weights)
    again.optimizer.restore(state, scalars)
    resumed = train(again, range(at, STEPS))
    resumed_weights, resumed_state = (
        again.weights(lambda k: True),
        again.optimizer.tensors(lambda k: True),
    )
    again.destroy()
    return {
        "losses": (straight, resumed),
        "weights": (straight_weights, resumed_weights),
        "state": (straight_state, resumed_state),
    }


def _same_bits(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_restored_state_continues_bit_for_bit_at_every_stage(precision: str, world: int) -> None:
    for of_rank in run_on_ranks(world, _resumes, [(stage, stage) for stage in STAGES], precision):
        for pair, result in of_rank.items():
            assert result["losses"][0] == result["losses"][1], pair
            assert _same_bits(*result["weights"]), pair
            assert _same_bits(*result["state"]), pair


def test_state_saved_at_one_stage_continues_at_another() -> None:
    pairs = [(0, 3), (3, 1), (2, 0), (1, 2)]
    for pair, result in run_on_ranks(2, _resumes, pairs, "fp32")[0].items():
        straight, resumed = result["losses"]
        assert_close(resumed[0], straight[0], of=f"stages {pair}", **LOSSES)


def _written(root: Path, precision: str) -> dict[int, dict[str, torch.Tensor]]:
    """Checkpoints of every stage, behind a step that goes on; and what they should hold."""
    found = {}
    for stage in STAGES:
        live = make(stage, precision)
        train(live, range(2))
        found[stage] = live.weights(lambda k: True) | live.optimizer.tensors(lambda k: True)
        weights, optimizer = live.own_tensors()
        copies = live.state_copy
        copies.of({**weights, **optimizer})
        made: list[dict[str, torch.Tensor]] = []
        copying = threading.Timer(0.1, lambda made=made, copies=copies: made.append(copies.copy()))
        copying.start()
        train(live, range(2, 4))
        copying.join()
        own = {name: made[0][name] for name in weights}, {n: made[0][n] for n in optimizer}
        state = {"engine": live.optimizer.scalars()}
        checkpoint.save(
            root / str(stage), 2, weights=own[0], optimizer=own[1], rng={}, state=state, keep_last=1
        )
        live.destroy()
    return found


def _read_back(root: Path, precision: str, stages: list[int]) -> dict[int, Any]:
    """What engines of each stage hold after they read the checkpoint of the stage before."""
    found = {}
    for stage in stages:
        for saved in (stage, (stage + 1) % 4):
            folder = root / str(saved) / "step-2"
            live = make(stage, precision, checkpoint.read_tensors(folder, "weights"))
            state = checkpoint.read_state(folder)["engine"]
            live.optimizer.restore(checkpoint.read_tensors(folder, "optimizer"), state)
            found[stage, saved] = live.weights(lambda k: True) | live.optimizer.tensors(
                lambda k: True
            )
            live.destroy()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pieces_written_behind_a_step_are_read_at_any_stage_and_number_of_ranks(
    precision: str, tmp_path: Path
) -> None:
    wanted = run_on_ranks(2, _written, tmp_path, precision)[0]
    for world, stages in ((2, [0, 1, 2, 3]), (1, [0, 3]), (4, [2, 3])):
        for of_rank in run_on_ranks(world, _read_back, tmp_path, precision, stages):
            for (stage, saved), tensors in of_rank.items():
                assert _same_bits(tensors, wanted[saved]), (world, stage, saved)


def _before_the_first_step() -> dict[int, dict[str, torch.Tensor]]:
    found = {}
    for stage in STAGES:
        live = make(stage, "bf16")
        found[stage] = {**live.weights(lambda k: True), **live.optimizer.tensors(lambda k: True)}
        live.destroy()
    return found


def test_building_an_engine_moves_no_weight_at_any_stage() -> None:
    """deepspeed 0.19.8 steps the optimizer while it builds stage 0 in bf16; our groups start at
    learning rate 0.
    """
    for found in run_on_ranks(2, _before_the_first_step)[0].values():
        for name, parameter in network().named_parameters():
            if parameter.requires_grad:
                assert torch.equal(found[name], parameter.bfloat16())
                assert not found[f"{name}|exp_avg"].any()


def _watched_gradients() -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for precision in ("fp32", "bf16"):
        for stage in STAGES:
            live, seen = make(stage, precision), {}
            inputs, targets = data()
            from trainer.runtime import distributed

            mine = slice(distributed.rank(), ROWS, distributed.world())
            output = live.model(inputs[0, mine].to(next(live.model.parameters()).dtype)).float()
            live.backward(((output.squeeze(-1) - targets[0, mine]) ** 2).sum() / ROWS)
            live.step(
                0.01, lambda named, seen=seen: seen.update({name: g.clone() for name, g in named})
            )
            found[f"{precision} stage {stage}"] = seen
            live.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_watched_gradients_are_full_reduced_and_unclipped_at_every_stage(world: int) -> None:
    net, (inputs, targets) = network(), data()
    ((net(inputs[0]).squeeze(-1) - targets[0]) ** 2).mean().backward()
    wanted = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    for of_rank in run_on_ranks(world, _watched_gradients):
        for case, seen in of_rank.items():
            if case.startswith("fp32"):
                assert_all_close(seen, wanted, of=case, **GRADIENTS)
            else:
                assert_all_close(seen, wanted, of=case, **BF16_GRADIENTS)


# What the rotations of a Llama turn by. In bf16 some are off by 0.002: after 4000 tokens, by a turn.
FREQUENCIES = 10000.0 ** -(torch.arange(0, 64, 2) / 64)


def _buffers_of_engines() -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    from trainer.training import engine

    for stage in (0, 3):
        net = network().bfloat16()
        net.register_buffer("frequencies", FREQUENCIES.clone(), persistent=False)
        live = engine.Engine(net, ds_for(stage, "bf16", 1), OPTIM)
        found[stage] = live.model.module.frequencies.clone()
        live.destroy()
    return found


def test_an_engine_in_bf16_leaves_buffers_as_they_are() -> None:
    """Stock decoders keep the frequencies of their rotations there (transformers 5.23), in fp32;
    deepspeed 0.19.8 casts weights alone, which earlier versions did not.
    """
    for stage, buffer in run_on_ranks(1, _buffers_of_engines)[0].items():
        assert torch.equal(buffer, FREQUENCIES), f"stage {stage}: {buffer.dtype}"
