"""Pooled losses against one plain batch of everything: any cut, ranks and ZeRO stage, with and
without dropout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.numerics.test_engine import ds_for
from tests.ranks import run_on_ranks
from tests.tolerance import assert_all_close, assert_close, depth_of
from trainer.config.schema import Optim
from trainer.models.gradcache import PoolScope, gather_tensors, pooled_losses
from trainer.runtime import rng

QUERIES, WIDTH, SCORED, PER_QUERY = 8, 6, 5, 2
OPTIM = Optim(lr=0.1, clip=0.0)


class Towers(nn.Module):
    """Queries and passages through one network, as a retriever does."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.layers = nn.Sequential(
                nn.Linear(WIDTH, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, SCORED)
            )

    def forward(self, queries: Tensor, passages: Tensor) -> dict[str, Tensor]:
        return {
            "queries": self.layers(queries),
            "passages": self.layers(passages),
            "numbers": torch.arange(len(queries)),
        }


# As tests/tolerance.py means them: the sums of both layers, of a score, over the passages, and over
# the queries. A gradient has passed them twice.
DEPTH = depth_of(Towers()) + SCORED + QUERIES * PER_QUERY + QUERIES
LOSSES = {"what": "loss", "depth": DEPTH, "margin": 0.2}
GRADIENTS = {"what": "gradients", "depth": 2 * DEPTH, "margin": 1.2}


def everything() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        "queries": torch.randn(QUERIES, WIDTH, generator=generator),
        "passages": torch.randn(QUERIES * PER_QUERY, WIDTH, generator=generator),
    }


def cut(sizes: list[int]) -> list[dict[str, Tensor]]:
    batch = everything()
    queries = batch["queries"].split(sizes)
    passages = batch["passages"].split([size * PER_QUERY for size in sizes])
    return [{"queries": q, "passages": p} for q, p in zip(queries, passages, strict=True)]


def in_batch(pool: Mapping[str, Tensor]) -> Tensor:
    scores = pool["queries"] @ pool["passages"].T
    return F.cross_entropy(scores, torch.arange(len(scores)) * PER_QUERY, reduction="sum")


def plain() -> tuple[float, dict[str, Tensor]]:
    model = Towers()
    loss = in_batch(model(**everything())) / QUERIES
    loss.backward()
    return float(loss.detach()), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


CUTS = {1: [[8], [4, 4], [2, 2, 2, 2], [3, 1, 4]], 2: [[4, 4], [2, 2, 2, 2], [1, 3, 2, 2]]}


def stepped(stage: int, sizes: list[int]) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the weights after one update, of this rank's share of the cuts."""
    from trainer.runtime import distributed
    from trainer.training import engine

    live = engine.Engine(Towers(), ds_for(stage, "fp32", distributed.world()), OPTIM)
    share = len(sizes) // distributed.world()
    mine = cut(sizes)[distributed.rank() * share : (distributed.rank() + 1) * share]
    total = torch.zeros((), dtype=torch.float64)
    for summed in pooled_losses(lambda batch: live.model(**batch), mine, in_batch):
        live.backward(summed / QUERIES)
        total += (summed / QUERIES).detach()
    found: dict[str, Tensor] = {}
    live.step(
        0.1, watch=lambda named: found.update({name: gradient.clone() for name, gradient in named})
    )
    live.destroy()
    return float(distributed.total(total)), found


def at_every_stage(cuts: list[list[int]]) -> dict[tuple[int, tuple[int, ...]], Any]:
    return {
        (stage, tuple(sizes)): stepped(stage, sizes) for sizes in cuts for stage in (0, 1, 2, 3)
    }


@pytest.mark.parametrize("world", [1, 2])
def test_any_cut_on_any_ranks_has_the_loss_and_the_gradients_of_one_batch_at_every_stage(
    world: int,
) -> None:
    loss, gradients = plain()
    for found in run_on_ranks(world, at_every_stage, CUTS[world]):
        for where, (got_loss, got) in found.items():
            assert_close(got_loss, loss, of=f"{where}", **LOSSES)
            assert_all_close(got, gradients, of=f"{where}", **GRADIENTS)


def test_dropout_is_drawn_once_and_both_passes_agree_on_it() -> None:
    cached, direct = Towers(0.5), Towers(0.5)
    batches = cut([2, 6])
    rng.seed_everything(5, 0)
    for summed in pooled_losses(lambda batch: cached(**batch), batches, in_batch):
        summed.backward()
    after = torch.rand(3)
    rng.seed_everything(5, 0)
    parts = [direct(**batch) for batch in batches]
    in_batch(
        {name: torch.cat([part[name] for part in parts]) for name in ("queries", "passages")}
    ).backward()
    assert torch.equal(torch.rand(3), after), (
        "random numbers go on as if every batch had been run once"
    )
    for one, two in zip(cached.parameters(), direct.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert one.grad.abs().max() > 0
        assert_close(one.grad, two.grad, **GRADIENTS)


def test_the_last_batch_is_encoded_once_and_the_others_twice() -> None:
    calls: list[tuple[int, bool]] = []
    model = Towers()

    def encode(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        calls.append((len(batch["queries"]), torch.is_grad_enabled()))
        return model(**batch)

    list(pooled_losses(encode, cut([8]), in_batch))
    assert calls == [(8, True)]
    calls.clear()
    list(pooled_losses(encode, cut([3, 1, 4]), in_batch))
    assert calls == [(3, False), (1, False), (4, True), (3, True), (1, True)]


def test_no_graph_is_built_beside_one_that_waits_for_its_backward_pass() -> None:
    model, waiting, most = Towers(), 0, 0

    def encode(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        nonlocal waiting, most
        waiting += torch.is_grad_enabled()
        most = max(most, waiting)
        return model(**batch)

    for summed in pooled_losses(encode, cut([2, 2, 2, 2]), in_batch):
        summed.backward()
        waiting -= 1
    assert (waiting, most) == (0, 1)


def test_each_part_of_the_loss_is_counted_once_whatever_the_cut() -> None:
    model = Towers()
    values = [
        sum(float(x) for x in pooled_losses(lambda b: model(**b), cut(sizes), in_batch))
        for sizes in CUTS[1]
    ]
    assert_close(values, [values[0]] * len(values), **LOSSES)


def test_what_is_no_representation_is_passed_along_unchanged() -> None:
    seen: list[Tensor] = []

    def keep(pool: Mapping[str, Tensor]) -> Tensor:
        seen.append(pool["numbers"])
        return in_batch(pool)

    model = Towers()
    list(pooled_losses(lambda batch: model(**batch), cut([3, 5]), keep))
    assert seen[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert seen[0].dtype == torch.int64


# Each rank's part of the loss
# ---------------------------------------------------------------------------------------


def _own_part(sizes: list[int], pool: PoolScope) -> tuple[float, dict[str, Tensor]]:
    """The loss over all ranks and its gradients, where each rank computes the scores of its own
    queries only.
    """
    from trainer.runtime import distributed

    model, share = Towers(), len(sizes) // distributed.world()
    mine = cut(sizes)[distributed.rank() * share : (distributed.rank() + 1) * share]
    total = torch.zeros(())
    for summed in pooled_losses(lambda batch: model(**batch), mine, in_batch, pool):
        (summed / QUERIES).backward()
        total += summed.detach() / QUERIES
    gradients = {
        name: distributed.total(p.grad).float()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return float(distributed.total(total)), gradients


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("sizes", [[4, 4], [1, 3, 2, 2]], ids=str)
def test_ranks_that_score_their_own_queries_alone_share_the_gradients_of_the_passages(
    sizes: list[int], on_host: bool
) -> None:
    loss, gradients = plain()
    for got_loss, got in run_on_ranks(
        2, _own_part, sizes, PoolScope(own=("queries",), on_host=on_host)
    ):
        assert_close(got_loss, loss, **LOSSES)
        assert_all_close(got, gradients, **GRADIENTS)


def test_a_pool_for_each_rank_holds_nothing_of_the_others() -> None:
    model, halves = Towers(), cut([4, 4])
    wanted = sum(in_batch(model(**half)) for half in halves) / QUERIES
    assert isinstance(wanted, Tensor)
    wanted.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for loss, gradients in run_on_ranks(2, _own_part, [2, 2, 2, 2], PoolScope(across_ranks=False)):
        assert_close(loss, wanted.item(), **LOSSES)
        assert_all_close(gradients, expected, **GRADIENTS)


def _gathered(wanted: list[int]) -> list[dict[str, Tensor]]:
    from trainer.runtime import distributed

    rows = wanted[distributed.rank()]
    return gather_tensors(
        {
            "vectors": torch.full((rows, 3), 0.5 + distributed.rank(), dtype=torch.bfloat16),
            "flags": torch.arange(rows) % 2 == distributed.rank(),
            "numbers": torch.arange(rows) + 2**40,
        }
    )


def test_tensors_of_several_types_and_lengths_come_back_whole_from_every_rank() -> None:
    for found in run_on_ranks(2, _gathered, [3, 1]):
        assert [len(part["vectors"]) for part in found] == [3, 1]
        assert found[1]["vectors"].tolist() == [[1.5] * 3]
        assert found[0]["flags"].tolist() == [True, False, True]
        assert found[0]["numbers"].tolist() == [2**40, 2**40 + 1, 2**40 + 2]
        assert found[0]["vectors"].dtype == torch.bfloat16
