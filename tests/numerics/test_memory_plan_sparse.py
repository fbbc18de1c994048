"""The memory plan of a sparse retriever's step, whose logits exist in chunks alone, against what a
real engine allocates, by the CPU's own record.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exp_configs import vary
from tests.facts import experiment, write_facts
from tests.numerics.test_memory_plan_adapters import (
    ROWS,
    TOLERANCE,
    WIDER,
    _every_predicted,
    _every_real,
)
from tests.ranks import run_alone, run_on_ranks
from tests.tolerance import note

# A chunk has 32 MiB of logits; those of all passages would be 128.
VOCABULARY = 16_384
SPARSE: dict[str, dict[str, Any]] = {
    "max": {},
    "sum": {"pooling": "sum"},
    "tokens": {"queries": "tokens"},
}


def values_of(name: str, precision: str, folder: Path) -> dict[str, Any]:
    values: Any = experiment(
        "retriever, sparse",
        folder,
        train={"global_batch": ROWS, "micro_batch": ROWS, "precision": precision},
        data={"query_tokens": 32, "passage_tokens": 256},
    )
    values |= {"sparse": SPARSE[name], "loss": {}}
    config = {**values["base"]["config"], "vocab_size": VOCABULARY}
    wider = config | WIDER["bert"] | {"max_position_embeddings": 256}
    return vary(values, base={"config": wider, "seed": 1})


@pytest.mark.long
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "bf16"), (3, "fp32")])
def test_a_step_of_words_is_planned_within_the_tolerance(
    stage: int, precision: str, tmp_path: Path
) -> None:
    folder = write_facts(tmp_path)
    cases = [(values_of(name, precision, folder), stage) for name in SPARSE]
    predicted = run_alone(_every_predicted, cases, folder)
    (real,) = run_on_ranks(1, _every_real, cases, folder)
    for name, planned, allocated in zip(SPARSE, predicted, real, strict=True):
        print(f"\nZeRO {stage}, {precision}, {name}: {planned / allocated - 1:+.2%} of {allocated}")
        note("bytes", name, abs(planned - allocated), TOLERANCE * allocated)
        assert planned == pytest.approx(allocated, rel=TOLERANCE), name
