"""A sparse retriever's losses and gradients are the same under GradCache, at every ZeRO stage and on
two ranks, as in one plain batch: regularisers are of the whole pool.

Run with -s to see the table of differences.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from exp_configs import vary
from tests.facts import TINY_BERT, experiment, write_facts
from tests.numerics.test_retriever_forms import PLAIN, Cut, rows_of, step_of
from tests.numerics.test_retriever_gradcache import QUERIES, STAGES, distance
from tests.ranks import run_on_ranks
from tests.tolerance import assert_same_step, depth_of
from trainer import tasks
from trainer.protocol.task import Places

CUTS: dict[int, list[Cut]] = {
    1: [((3, 5), [8]), (None, [3, 5])],
    2: [(None, [4, 4]), ((3, 5), [4, 4]), (None, [1, 3, 1, 3])],
}
# weights of which some are 0, so that maxima and regularisers have something to choose
BASE: dict[str, Any] = {"config": {**TINY_BERT["config"], "initializer_range": 0.2}, "seed": 1}
_WEIGHTS: dict[str, Any] = {"query_weight": 0.02, "passage_weight": 0.01, "temperature": 20.0}
_WARM = {**_WEIGHTS, "warmup_steps": 3}
_TAUGHT: dict[str, Any] = {"contrastive": 0.0, "distillation": {"kind": "margin_mse"}}
FORMS: dict[str, dict[str, Any]] = {
    "flops": {"sparse": _WARM},
    "sums": {"sparse": {**_WEIGHTS, "pooling": "sum"}},
    "l1": {"sparse": {**_WARM, "query_regulariser": "l1", "anti_zero": 1e5}},
    "tokens": {"sparse": {"queries": "tokens", "passage_weight": 0.01}},
    "margins": {"sparse": _WARM, "loss": _TAUGHT, "data": {"passages": 3}},
    "symmetric": {"sparse": _WARM, "loss": {"symmetric": True, "mask_duplicates": True}},
}
# A margin, as tests/tolerance.py means it. The largest logit alone has a gradient.
STEP_MARGINS: dict[str, Any] = {"loss": 0.3, "gradients": 6.0, "cancels": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def task_of(folder: Path, form: str, chunks: Any = None) -> Any:
    values = {**experiment("retriever, sparse", folder), "base": BASE, "sparse": {}, "loss": {}}
    cut = {} if chunks is None else {"query_chunk": chunks[0], "passage_chunk": chunks[1]}
    values = vary(vary(values, **FORMS[form]), loss=cut)
    return tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))


def stepped(folder: Path, form: str, stage: int, cut: Cut) -> tuple[float, dict[str, Tensor]]:
    task = task_of(folder, form, cut[0])
    return step_of(task, rows_of(task, is_one_absent=False), stage, cut[1])


def at(folder: Path, form: str, stages: tuple[int, ...], cuts: list[Cut]) -> list[Any]:
    return [(stage, cut, stepped(folder, form, stage, cut)) for stage in stages for cut in cuts]


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_a_sparse_step_is_that_of_one_batch_at_every_stage(
    form: str, world: int, folder: Path
) -> None:
    ((_, _, wanted),) = run_on_ranks(1, at, folder, form, (0,), [PLAIN])[0]
    found = run_on_ranks(world, at, folder, form, STAGES, CUTS[world])[0]
    losses = [abs(step[0] / wanted[0] - 1) for _, _, step in found]
    gradients = [distance(step[1], wanted[1]) for _, _, step in found]
    print(
        f"\n{form}, {world} rank(s), ZeRO 0-3: loss {wanted[0]:.3f}, differences "
        f"{max(losses):.1e} {max(gradients):.1e}"
    )
    how = {"depth": 2 * (depth_of(task_of(folder, form).model()) + QUERIES), **STEP_MARGINS}
    for stage, cut, step in found:
        assert_same_step(step, wanted, of=f"{form}, stage {stage} {cut}", **how)
