"""GradCache is the plain step: at every ZeRO stage, on one rank and two, for chunks that divide the
batch and others.

Run with -s to see the table of differences.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.facts import experiment, write_facts
from tests.numerics.test_engine import ds_for
from tests.ranks import run_on_ranks
from tests.tolerance import assert_same_step, depth_of
from trainer import tasks
from trainer.config.schema import Optim
from trainer.protocol.task import DRAW, EPOCH, Places
from trainer.runtime import distributed

QUERIES = 8
# chunks of queries and passages (None: plain), and the micro-batches of all ranks
PLAIN: dict[int, tuple[Any, list[int]]] = {1: (None, [8]), 2: (None, [4, 4])}
CACHED: dict[int, list[tuple[Any, list[int]]]] = {
    1: [((2, 4), [8]), ((3, 5), [8]), (None, [4, 4]), (None, [3, 5]), ((1, 3), [4, 4])],
    2: [
        ((2, 4), [4, 4]),
        ((3, 5), [4, 4]),
        (None, [2, 2, 2, 2]),
        (None, [1, 3, 1, 3]),
        ((1, 3), [2, 2, 2, 2]),
    ],
}
STAGES = (0, 1, 2, 3)
# Margins, as tests/tolerance.py means them. Vectors of length 1 have gradients across them alone, so
# that those of the last layer cancel.
STEP: dict[str, Any] = {"loss": 0.3, "gradients": 6.0, "cancels": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def depth(folder: Path) -> int:
    """Operations on the way to a loss: the sums of the encoder, of a score, and over queries."""
    values = experiment("retriever", folder)
    task: Any = tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))
    return depth_of(task.model()) + QUERIES


def stepped(
    folder: Path, stage: int, precision: str, cut: tuple[Any, list[int]], **loss: Any
) -> tuple[float, dict[str, Tensor]]:
    """The loss of 8 queries over all ranks, and the gradient of every weight, under an engine."""
    from trainer.training.engine import Engine

    chunks, sizes = cut
    loss |= {} if chunks is None else {"query_chunk": chunks[0], "passage_chunk": chunks[1]}
    values = experiment("retriever", folder, loss=loss, train={"precision": precision})
    values["loss"] = loss
    task: Any = tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))
    found = [task.encode(row) for _, row in zip(range(QUERIES), task.rows("train"), strict=False)]
    rows = [{**row, DRAW: np.array([n]), EPOCH: np.array([0])} for n, row in enumerate(found)]
    live = Engine(
        task.model(), ds_for(stage, precision, distributed.world()), Optim(lr=0.1, clip=0.0)
    )
    live.train()
    starts, share = np.cumsum([0, *sizes]), len(sizes) // distributed.world()
    mine = range(distributed.rank() * share, (distributed.rank() + 1) * share)
    total = torch.zeros((), dtype=torch.float64)
    for summed in task.losses(
        live.model, [task.collate(rows[starts[k] : starts[k + 1]]) for k in mine]
    ):
        live.backward(summed / QUERIES)
        total += (summed / QUERIES).detach()
    gradients: dict[str, Tensor] = {}
    live.step(
        0.1,
        watch=lambda named: gradients.update({name: gradient.clone() for name, gradient in named}),
    )
    live.destroy()
    return float(distributed.total(total)), gradients


def every_cut(
    folder: Path, precision: str, stages: tuple[int, ...], cuts: list[Any]
) -> dict[tuple[int, int], Any]:
    return {
        (stage, k): stepped(folder, stage, precision, cut)
        for stage in stages
        for k, cut in enumerate(cuts)
    }


def distance(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    """Relative L2 distance of all gradients together."""
    assert one.keys() == two.keys()
    flat = [
        torch.cat([gradient.double().flatten() for _, gradient in sorted(g.items())])
        for g in (one, two)
    ]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def shown(title: str, lines: list[tuple[Any, ...]]) -> None:
    print(f"\n{title}\nranks  ZeRO  chunks  micro-batches     loss         gradient")
    for world, stage, (chunks, sizes), loss, gradient in lines:
        print(
            f"{world:5}  {stage:4}  {chunks or 'plain'!s:6}  {sizes!s:14}  {loss:.1e}  "
            f"{gradient:.1e}"
        )


def test_the_last_chunk_of_passages_is_encoded_once_and_all_others_twice(folder: Path) -> None:
    values = experiment("retriever", folder)
    task: Any = tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))
    model, seen = task.model(), []
    model.query_model.register_forward_hook(
        lambda module, inputs, output: seen.append(len(output.last_hidden_state))
    )
    ids, mask = torch.ones(5, 3, dtype=torch.int64), torch.ones(5, 3, dtype=torch.int64)
    found = model(
        query_ids=ids[:4], query_mask=mask[:4], passage_ids=ids, passage_mask=mask, chunks=(3, 2)
    )
    assert seen == [3, 1, 2, 2, 1], "queries, then passages"
    seen.clear()
    (found["queries"].sum() + found["passages"].sum()).backward()
    assert seen == [2, 2, 1, 3], "what was computed last comes first, without the last passage"


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2])
def test_cached_gradients_are_the_plain_ones_at_every_stage(world: int, folder: Path) -> None:
    ((wanted_loss, wanted),) = run_on_ranks(1, every_cut, folder, "fp32", (0,), [PLAIN[1]])[
        0
    ].values()
    cuts = [PLAIN[world], *CACHED[world]]
    found = run_on_ranks(world, every_cut, folder, "fp32", STAGES, cuts)[0]
    lines = [
        (world, stage, cuts[k], abs(loss - wanted_loss), distance(gradients, wanted))
        for (stage, k), (loss, gradients) in found.items()
    ]
    shown("fp32, against one rank's plain step", lines)
    assert len(lines) == len(STAGES) * len(cuts)
    how = {"depth": depth(folder), **STEP}
    for (stage, k), step in found.items():
        assert_same_step(step, (wanted_loss, wanted), of=f"stage {stage} {cuts[k]}", **how)


@pytest.mark.parametrize(("world", "stage"), [pytest.param(1, 1, marks=pytest.mark.long), (2, 3)])
def test_in_bf16_cached_gradients_are_as_near_to_fp32_as_plain_ones(
    world: int, stage: int, folder: Path
) -> None:
    ((wanted_loss, wanted),) = run_on_ranks(1, every_cut, folder, "fp32", (0,), [PLAIN[1]])[
        0
    ].values()
    cuts = [PLAIN[world], *CACHED[world][:4]]
    found = run_on_ranks(world, every_cut, folder, "bf16", (stage,), cuts)[0]
    lines = [
        (world, stage, cuts[k], abs(loss - wanted_loss), distance(gradients, wanted))
        for (_, k), (loss, gradients) in found.items()
    ]
    shown("bf16, against one rank's plain step in fp32", lines)
    plain = max(gradient for _, _, cut, _, gradient in lines if cut == cuts[0])
    assert all(gradient < 1.5 * plain for *_, gradient in lines)


def _own_pools(folder: Path) -> list[tuple[float, dict[str, Tensor]]]:
    cuts = [PLAIN[2], CACHED[2][3]]
    return [
        stepped(folder, 2, "fp32", cut, **how)
        for cut in cuts
        for how in ({}, {"pool_on_host": True})
    ]


def test_a_pool_on_the_host_changes_nothing(folder: Path) -> None:
    wanted, *others = run_on_ranks(2, _own_pools, folder)[0]
    for found in others:
        assert_same_step(found, wanted, depth=depth(folder), **STEP)


def _masked(folder: Path, sizes: list[int]) -> tuple[float, dict[str, Tensor]]:
    return stepped(folder, 1, "fp32", (None, sizes), mask_duplicates=True)


def test_masked_duplicates_are_found_on_other_ranks_too(folder: Path) -> None:
    wanted = run_on_ranks(1, _masked, folder, [8])[0]
    found = run_on_ranks(2, _masked, folder, [1, 3, 2, 2])[0]
    assert_same_step(found, wanted, depth=depth(folder), **STEP)
