"""Ranks that share a stream of tokens compute what one rank computes: the same losses, and gradients
that add up to the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bases import DECODERS, SCALED
from tests.families import base, ids_of
from tests.ranks import run_on_ranks
from trainer.models.decoder.streams import reader_of
from trainer.models.distillation import DistillationTerms, teacher_fields
from trainer.models.inputs.neftune import noise_fields
from trainer.models.losses import Terms
from trainer.models.packed.layout import pack_labelled
from trainer.models.stretches.stretch import stretch_of
from trainer.protocol.abilities import RankPlace
from trainer.protocol.task import DRAW, Batch
from trainer.runtime import distributed
from trainer.tasks.causal_lm.task import CausalLM

# Cut in the middle of rows, at their ends, with rows shorter than a stretch and longer; and fewer
# tokens than ranks.
LENGTHS = {"even": [9, 3, 12], "odd": [40, 1, 5, 1, 14], "one row": [29], "three tokens": [3]}
# Of a loss, and of the largest gradient: blocks compute in fp64, and the loss of logits in fp32.
TOLERANCE = 1e-6
FAMILIES = [*DECODERS, *SCALED]


def _batch(lengths: list[int], *, is_taught: bool = False) -> Batch:
    rows = ids_of(lengths, 3)
    flags = [
        [int((place + row) % 3 != 0) for place in range(len(ids))] for row, ids in enumerate(rows)
    ]
    batch = pack_labelled(rows, flags)
    draws = [{DRAW: [7 + number]} for number in range(len(rows))]
    if is_taught:
        count = len(batch["scored"])
        logps_NK = torch.randn(count, 4, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
        ids_NK = torch.arange(4, dtype=torch.int32).expand(count, 4)
        batch |= teacher_fields(ids_NK, logps_NK - 0.1, torch.full((count,), -2.4))
        batch |= noise_fields(draws, lengths, 5.0)
    return batch


def _model(name: str, *, is_taught: bool, every: int | None = None) -> CausalLM:
    of_base = base("causal_lm", name).double()
    body: Any = getattr(of_base, of_base.base_model_prefix)
    terms = Terms(0.1, 1e-3) if is_taught else Terms()
    how = DistillationTerms("forward", 0.5, 2.0, 96) if is_taught else None
    of_base.train()
    return CausalLM(of_base, reader_of(body, recompute_every=every), terms, how).train()


def _step(model: CausalLM, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**batch)["loss"]
    loss.backward()
    return loss.detach(), {
        name: x.grad for name, x in model.named_parameters() if x.grad is not None
    }


def _differences(names: list[str], ranks: int, every: int | None) -> list[tuple[str, float]]:
    """On a rank: how far shared steps are from whole ones, relatively, by what was compared."""
    distributed.make_neighbours(ranks)
    place = RankPlace(distributed.rank() % ranks, ranks)
    found: list[tuple[str, float]] = []
    for name in names:
        for kind, lengths in LENGTHS.items():
            is_taught = name == "llama"
            model = _model(name, is_taught=is_taught, every=every)
            batch = _batch(lengths, is_taught=is_taught)
            loss, gradients = _step(model, batch)
            part = stretch_of(batch, place)
            own_loss, own_gradients = _step(model, part)
            sums = _sum_of_neighbours(own_loss, place)
            found.append((f"{name}, {kind}: loss", _relative(sums, loss)))
            assert gradients.keys() == own_gradients.keys()
            largest = max(float(one.abs().max()) for one in gradients.values())
            for weight, gradient in gradients.items():
                total = _sum_of_neighbours(own_gradients[weight], place)
                error = float((total - gradient).abs().max()) / largest
                found.append((f"{name}, {kind}: {weight}", error))
    return found


def _sum_of_neighbours(tensor: Tensor, place: RankPlace) -> Tensor:
    first = distributed.rank() - place.number
    return torch.cat(distributed.gather_rows(tensor[None])[first : first + place.ranks]).sum(0)


def _relative(got: Tensor, want: Tensor) -> float:
    return abs(float(got) - float(want)) / abs(float(want))


@pytest.mark.parametrize(
    ("world", "ranks", "names", "every"),
    [
        (2, 2, ["llama", "qwen3"], None),
        pytest.param(2, 2, FAMILIES, 1, marks=pytest.mark.long),
        pytest.param(4, 4, FAMILIES, None, marks=pytest.mark.long),
        pytest.param(4, 2, ["llama"], 1, marks=pytest.mark.long),
    ],
)
def test_ranks_that_share_a_stream_have_the_loss_and_the_gradients_of_one(
    world: int, ranks: int, names: list[str], every: int | None
) -> None:
    for found in run_on_ranks(world, _differences, names, ranks, every):
        wrong = [one for one in found if not one[1] <= TOLERANCE]
        assert len(found) > 100
        assert wrong == []
