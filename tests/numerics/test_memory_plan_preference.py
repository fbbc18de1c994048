"""The memory plan of every loss of preferences against what a real engine allocates, by the CPU's own
record; decoders and T5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exp_configs import vary
from tests.facts import TINY_T5, experiment, write_facts
from tests.numerics.test_memory_plan_adapters import (
    ROWS,
    TOLERANCE,
    WIDER,
    _every_predicted,
    _every_real,
)
from tests.ranks import run_alone, run_on_ranks
from tests.tolerance import note

LOSSES = ("dpo", "kto", "orpo", "reward")
BASES: dict[str, dict[str, Any]] = {"decoder": {}, "t5": {"base": TINY_T5}}


def values_of(loss: str, base: str, precision: str, folder: Path) -> dict[str, Any]:
    values: Any = experiment(
        "preference",
        folder,
        train={"global_batch": ROWS, "micro_batch": ROWS, "precision": precision},
        data={"max_tokens": 128},
        preference={"loss": loss},
        **BASES[base],
    )
    config = values["base"]["config"]
    wider = config | WIDER[config["model_type"]]
    return vary(values, base={"config": wider, "seed": 1})


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")]
)
@pytest.mark.parametrize("base", BASES)
def test_a_step_of_preferences_is_planned_within_the_tolerance(
    base: str, stage: int, precision: str, tmp_path: Path
) -> None:
    folder = write_facts(tmp_path)
    cases = [(values_of(loss, base, precision, folder), stage) for loss in LOSSES]
    predicted = run_alone(_every_predicted, cases, folder)
    (real,) = run_on_ranks(1, _every_real, cases, folder)
    for loss, planned, allocated in zip(LOSSES, predicted, real, strict=True):
        note("bytes", loss, abs(planned - allocated), TOLERANCE * allocated)
        assert planned == pytest.approx(allocated, rel=TOLERANCE), loss
