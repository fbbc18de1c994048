"""Every form of a retriever's loss is the same under GradCache, at every ZeRO stage and on two
ranks, as in one plain batch.

Run with -s to see the table of differences.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from exp_configs import vary
from tests.facts import TINY_BERT, experiment, write_facts
from tests.numerics.test_engine import ds_for
from tests.numerics.test_retriever_gradcache import QUERIES, STAGES, depth, distance
from tests.numerics.test_retriever_gradcache import STEP as MARGINS
from tests.ranks import run_on_ranks
from tests.tolerance import assert_same_step
from trainer import tasks
from trainer.config.schema import Optim
from trainer.protocol.task import DRAW, EPOCH, STEP, Places
from trainer.runtime import distributed

# chunks of queries and passages, or of tokens (None: plain), and micro-batches
Cut = tuple[Any, list[int]]
PLAIN: Cut = (None, [8])
CUTS: dict[int, list[Cut]] = {
    1: [((3, 5), [8]), (None, [3, 5]), (70, [3, 5])],
    2: [(None, [4, 4]), ((3, 5), [4, 4]), (None, [1, 3, 1, 3]), (70, [4, 4]), (40, [1, 3, 1, 3])],
}
_TWO: dict[str, Any] = {"data": {"passages": 3, "positives": 2}}
LEARNT: dict[str, Any] = {"encoder": {"learn_temperature": True}}
# scores that differ: of nearly equal ones the gradients of a list would cancel
_WIDE = {"config": {**TINY_BERT["config"], "initializer_range": 0.3}}
SPREAD = {"base": _WIDE, "data": {"passages": 3}}
LISTS = ("pointwise", "margin", "ranknet", "softmax", "lambda")  # losses of a cross-encoder
FORMS: dict[str, dict[str, Any]] = {
    "symmetric": {"loss": {"symmetric": True, "mask_duplicates": True}, **LEARNT},
    "margin": {"loss": {"margin": 0.1}},
    "each positive": {"loss": {"symmetric": True}, **_TWO},
    "supcon": {"loss": {"positives": "supcon"}, **_TWO},
    "marginal": {"loss": {"positives": "marginal"}, **_TWO},
    "triplet": {"loss": {"kind": "triplet", "margin": 0.3}, **_TWO},
    "false negatives": {"loss": {"symmetric": True, "false_negatives": {"margin": -0.1}}},
    "by the teacher": {"loss": {"false_negatives": {"by": "teacher", "above": 0.5}}, **_TWO},
    "matryoshka": {"loss": {"matryoshka": {"dims": [16, 8, 3], "weights": [1.0, 0.5, 0.2]}}},
    "layers": {"loss": {"symmetric": True, "matryoshka": {"layers": [1, 0]}}, **_TWO},
    "layers and dims": {
        "loss": {
            "matryoshka": {
                "dims": [16, 4],
                "weights": [1.0, 0.5],
                "layers": [1],
                "layer_weights": [0.7],
                "divergence": 0.5,
            }
        }
    },
    "divergence": {"loss": {"contrastive": 0.0, "distillation": {}}, **LEARNT, **_TWO},
    "margins": {"loss": {"distillation": {"kind": "margin_mse"}}, **_TWO},
    "all at once": {
        "loss": {
            "symmetric": True,
            "mask_duplicates": True,
            "margin": 0.05,
            "false_negatives": {"above": 0.95, "share": 0.99},
            "matryoshka": {"dims": [16, 4]},
            "distillation": {"kind": "margin_mse", "coefficient": 0.1},
        },
        **LEARNT,
        **_TWO,
    },
    "late": {"late": {"temperature": 0.5}},
    "late, symmetric": {
        "late": {"mean": True, "temperature": 0.05},
        "loss": {"symmetric": True, "mask_duplicates": True},
    },
    "late, attended": {"late": {"attend": True}, "loss": {"positives": "supcon"}, **_TWO},
    "late, divergence": {
        "late": {"expand": False},
        "loss": {"distillation": {}, "false_negatives": {"share": 0.9}},
        **_TWO,
    },
    **{f"cross, {loss}": {"cross": {"loss": loss}, **SPREAD} for loss in LISTS},
    "late, margins": {
        "loss": {"contrastive": 0.0, "distillation": {"kind": "margin_mse"}, "pool_on_host": True},
        **_TWO,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def task_of(folder: Path, form: str, chunks: Any = None) -> Any:
    kind = form.partition(",")[0]
    values = experiment(f"retriever, {kind}" if kind in ("late", "cross") else "retriever", folder)
    if kind == "cross":  # which lists share nothing in
        return loaded(vary(values, **FORMS[form]), folder)
    cut: dict[str, Any] = {}
    if isinstance(chunks, int):
        cut = {"chunk_tokens": chunks}
    elif chunks is not None:
        cut = {"query_chunk": chunks[0], "passage_chunk": chunks[1]}
    values["loss"] = cut
    return loaded(vary(values, **FORMS[form]), folder)


def loaded(values: dict[str, Any], folder: Path) -> Any:
    return tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))


def rows_of(task: Any, *, is_one_absent: bool = True) -> list[dict[str, Any]]:
    """8 rows as step 2 takes them, with a teacher's scores, of which one may be absent."""
    found = [task.encode(row) for _, row in zip(range(QUERIES), task.rows("train"), strict=False)]
    generator = np.random.default_rng(7)
    rows = []
    for number, row in enumerate(found):
        scores = generator.normal(size=len(row["lengths"])).astype(np.float32)
        if number == 2 and is_one_absent:
            scores[-1] = np.nan
        draw = {DRAW: np.array([number]), EPOCH: np.array([0]), STEP: np.array([2])}
        rows.append({**row, **draw, "scores": scores.view(np.int32).tolist()})
    return rows


def stepped(folder: Path, form: str, stage: int, cut: Cut) -> tuple[float, dict[str, Tensor]]:
    task = task_of(folder, form, cut[0])
    return step_of(task, rows_of(task), stage, cut[1])


def step_of(
    task: Any, rows: list[dict[str, Any]], stage: int, sizes: list[int]
) -> tuple[float, dict[str, Tensor]]:
    """The loss of 8 queries over all ranks, in micro-batches of these sizes, and the gradient of
    every weight, under an engine.
    """
    from trainer.training.engine import Engine

    live = Engine(task.model(), ds_for(stage, "fp32", distributed.world()), Optim(lr=0.1, clip=0.0))
    live.train()
    starts, share = np.cumsum([0, *sizes]), len(sizes) // distributed.world()
    mine = range(distributed.rank() * share, (distributed.rank() + 1) * share)
    batches = [task.collate(rows[starts[k] : starts[k + 1]]) for k in mine]
    total = torch.zeros((), dtype=torch.float64)
    for summed in task.losses(live.model, batches):
        live.backward(summed / QUERIES)
        total += (summed / QUERIES).detach()
    gradients: dict[str, Tensor] = {}
    live.step(
        0.1,
        watch=lambda named: gradients.update({name: gradient.clone() for name, gradient in named}),
    )
    live.destroy()
    return float(distributed.total(total)), gradients


def at(folder: Path, form: str, stages: tuple[int, ...], cuts: list[Cut]) -> list[Any]:
    return [(stage, cut, stepped(folder, form, stage, cut)) for stage in stages for cut in cuts]


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_that_of_one_batch_at_every_stage(form: str, world: int, folder: Path) -> None:
    ((_, _, wanted),) = run_on_ranks(1, at, folder, form, (0,), [PLAIN])[0]
    of = {"late": (type(None), tuple), "cross": type(None)}.get(form.partition(",")[0], object)
    cuts = [cut for cut in CUTS[world] if isinstance(cut[0], of)]  # late cuts by texts alone
    found = run_on_ranks(world, at, folder, form, STAGES, cuts)[0]
    losses = [abs(step[0] - wanted[0]) for _, _, step in found]
    gradients = [distance(step[1], wanted[1]) for _, _, step in found]
    print(f"\n{form}, {world} rank(s), ZeRO 0-3: {max(losses):.1e} {max(gradients):.1e}")
    assert wanted[0] > 1e-3
    if "encoder" in FORMS[form]:
        assert wanted[1]["log_scale.log_scale"].abs().max() > 1e-4, "the temperature learns"
    how = {"depth": 2 * depth(folder), **MARGINS}
    for stage, cut, step in found:
        assert_same_step(step, wanted, of=f"{form}, stage {stage} {cut}", **how)
