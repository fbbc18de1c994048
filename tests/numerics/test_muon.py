"""Muon's orthogonal step against torch's, which weights it takes, and why DeepSpeed's is not used."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.numerics.every_optimizer import Net, ds_for, net
from tests.ranks import run_on_ranks
from trainer.config.schema import Optim
from trainer.models.optimizers import muon, rates

OPTIM = Optim(name="muon", lr=0.02)


@pytest.mark.parametrize("shape", [(4, 4), (3, 8), (9, 2)])
def test_a_step_of_a_whole_matrix_is_torchs_bit_for_bit(shape: tuple[int, int]) -> None:
    ours, theirs = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(shape))
    group = {"params": [ours], "weight_decay": 0.1, "rule": rates.OWN, "lr": 0.02}
    own = muon.Muon([group], OPTIM)
    other = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    made = torch.Generator().manual_seed(1)
    for _ in range(3):
        ours.grad = torch.randn(shape, generator=made)
        theirs.grad = ours.grad.clone()
        own.step()
        other.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(64, 64), (24, 80), (96, 40), (1, 7), (33, 1)])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_a_matrix_becomes_orthogonal_with_the_bits_of_torchs_own_function(
    shape: tuple[int, int], scale: float
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * scale
    before = matrix.clone()
    theirs = torch.optim._muon._zeropower_via_newtonschulz(  # pyright: ignore
        matrix.clone(), muon.COEFFICIENTS, muon.NUM_STEPS, muon.EPS
    )
    ours = muon.orthogonal(matrix)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, theirs)
    assert torch.equal(matrix, before)


def test_singular_values_of_a_step_are_near_one() -> None:
    made = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(muon.orthogonal(made).float())
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_embeddings_heads_and_vectors_are_left_to_adamw() -> None:
    found = rates.rules(Net(), OPTIM)
    for name, rule in found.items():
        is_hidden = name.startswith("blocks") and name.endswith("weight")
        assert rule == (rates.OWN if is_hidden else rates.ADAMW), name


def _norms_of_deepspeed() -> tuple[float, float, float]:
    """(norm of the gradient, the norm that DeepSpeed clips by, the norm of its step) with its own
    Muon at stage 2, clipped at the gradient's norm.
    """
    import deepspeed
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    model = nn.Linear(12, 16, bias=False)
    weight = model.weight
    weight.use_muon = True  # pyright: ignore[reportAttributeAccessIssue]
    before = weight.detach().clone()
    with torch.compiler.set_stance("force_eager"):
        optimizer = MuonWithAuxAdam([{"params": [weight], "use_muon": True, "lr": 1.0}])
        ds = ds_for(2, Optim(lr=1.0, clip=0.001), precision="fp32", world=1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds)
        loss = engine(torch.eye(12)).square().mean() * 0.01
        (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
        engine.backward(loss)
        engine.step()
    step = float((weight.detach() - before).norm())
    return float(gradient.norm()), float(engine.get_global_grad_norm()), step


def test_deepspeeds_own_muon_clips_what_it_has_made_orthogonal() -> None:
    """Why ours is not DeepSpeed's: when this fails, DeepSpeed clips the gradient, and trainer/models/
    optimizers/muon.py may be looked at again. A gradient far below the clip is clipped all the same.
    """
    ((gradient, clipped, step),) = run_on_ranks(1, _norms_of_deepspeed)
    assert gradient < 0.001
    assert clipped > 1.0
    assert step == pytest.approx(0.001, rel=0.01)


def _share_of_a_clipped_step() -> float:
    """By how much our step shrinks when a gradient is clipped to a thousandth."""
    from trainer.training.engine import Engine

    steps = []
    for clip in (0.0, 1e-3):
        optim = OPTIM.model_copy(update={"clip": clip})
        model = net()
        before = model.blocks[0][0].weight.detach().clone()
        live = Engine(model, ds_for(2, optim, precision="fp32", world=1), optim)
        live.backward(live.model(torch.arange(6).view(2, 3)).square().sum() * 100)
        live.step(0.02)
        steps.append(float((live.weights(lambda k: True)["blocks.0.0.weight"] - before).norm()))
        live.destroy()
    return steps[1] / steps[0]


def test_our_clipping_leaves_an_orthogonal_step_as_large_as_it_is() -> None:
    assert run_on_ranks(1, _share_of_a_clipped_step)[0] == pytest.approx(1.0, rel=0.02)
