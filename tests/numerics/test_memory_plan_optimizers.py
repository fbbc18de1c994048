"""The memory plan of every optimizer against what a real engine allocates."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.numerics.lone_group import join_lone_group
from tests.numerics.test_memory_plan import LAYERS, WIDTH, Peak, peak_of_an_engine, planned_of
from tests.ranks import run_on_ranks
from trainer.config.schema import Optim
from trainer.models.optimizers import state_nbytes
from trainer.models.optimizers.rates import ADAMW, OWN

OPTIMS = {
    "sgd": Optim(name="sgd", lr=1e-3),
    "momentum": Optim(name="sgd", lr=1e-3, momentum=0.9),
    "lion": Optim(name="lion", lr=1e-3),
    "muon": Optim(name="muon", lr=1e-3),
}
CASES = [(name, stage, p) for name in OPTIMS for stage in (0, 1, 2, 3) for p in ("fp32", "bf16")]
TOLERANCE = 0.015


def _every_peak() -> dict[tuple[str, int, str], Peak]:
    join_lone_group()
    gc.freeze()
    return {case: peak_of_an_engine(case[1], case[2], optim=OPTIMS[case[0]]) for case in CASES}


@pytest.fixture(scope="module")
def peaks() -> dict[tuple[str, int, str], Peak]:
    return run_on_ranks(1, _every_peak)[0]


@pytest.mark.long
@pytest.mark.parametrize(("name", "stage", "precision"), CASES)
def test_the_plan_is_that_of_a_real_engine_with_every_optimizer(
    name: str, stage: int, precision: str, peaks: dict[tuple[str, int, str], Peak]
) -> None:
    optim, real = OPTIMS[name], peaks[name, stage, precision]
    vector, matrix = torch.Size([WIDTH]), torch.Size([WIDTH, WIDTH])
    rule = ADAMW if name == "muon" else OWN
    nbytes = state_nbytes(optim, matrix, rule=OWN) + state_nbytes(optim, vector, rule=rule)
    planned = planned_of(real, states=LAYERS * nbytes // 4)
    assert planned == pytest.approx(real.num_bytes, rel=TOLERANCE)
