"""The memory plan of every optimizer against what a real engine allocates."""

from __future__ import annotations

import gc

import pytest

from tests.numerics.lone_group import join_lone_group
from tests.numerics.test_memory_plan import Peak, Sum, Uneven, peak_of_an_engine, planned_of
from tests.ranks import run_on_ranks
from trainer.config.schema import Optim

OPTIMS = {
    "sgd": Optim(name="sgd", lr=1e-3),
    "momentum": Optim(name="sgd", lr=1e-3, momentum=0.9),
    "lion": Optim(name="lion", lr=1e-3),
    "muon": Optim(name="muon", lr=1e-3),
    "heavy_ball": Optim(name="muon", lr=1e-3, nesterov=False),
    "adamw": Optim(lr=1e-3),
    "adamw8bit": Optim(name="adamw8bit", lr=1e-3),
    "adafactor": Optim(name="adafactor", lr=1e-3),
}
NETWORKS = {"even": Sum, "uneven": Uneven}
# A network, an optimizer, a stage at which it is offered, a precision.
CASES = [
    (network, name, stage, precision)
    for network in NETWORKS
    for name in OPTIMS
    for stage in ((0,) if name == "adafactor" else (0, 1, 2, 3))
    for precision in ("fp32", "bf16")
    if network == "uneven" or name not in ("adamw", "heavy_ball")
]
TOLERANCE = 0.015


def _every_peak() -> dict[tuple[str, str, int, str], Peak]:
    join_lone_group()
    gc.freeze()
    return {
        (network, name, stage, precision): peak_of_an_engine(
            stage, precision, optim=OPTIMS[name], network=NETWORKS[network]
        )
        for network, name, stage, precision in CASES
    }


@pytest.fixture(scope="module")
def peaks() -> dict[tuple[str, str, int, str], Peak]:
    return run_on_ranks(1, _every_peak)[0]


@pytest.mark.long
@pytest.mark.parametrize(("network", "name", "stage", "precision"), CASES)
def test_the_plan_is_that_of_a_real_engine_with_every_optimizer(
    network: str,
    name: str,
    stage: int,
    precision: str,
    peaks: dict[tuple[str, str, int, str], Peak],
) -> None:
    real = peaks[network, name, stage, precision]
    planned = planned_of(real, NETWORKS[network](), OPTIMS[name])
    assert planned == pytest.approx(real.num_bytes, rel=TOLERANCE)
