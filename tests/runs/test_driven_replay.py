"""Logged operations are run again to the same bits after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.driven_runs import (
    create,
    drive,
    driven_values,
    folder_of,
    passed,
    results_of,
    rows_of_seed,
    step,
    tensors_sha,
    write_log,
)
from tests.facts import write_facts
from tests.ranks import run_on_ranks


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=13, valid=4)


def test_ten_operations_are_run_again_to_the_same_bits(facts: Path, tmp_path: Path) -> None:
    values = driven_values(facts, lora={"dropout": 0.2})
    passes = [passed(rows_of_seed(number)) for number in range(6)]
    steps = [create(values), passes[0], passes[1], step(), passes[2], passes[3], step()]
    clipped = step(grad_clip_norm=0.1, weight_decay=0.1)
    steps += [passes[4], clipped, passed(rows_of_seed(9), "forward")]
    steps += [passes[5], step(learning_rate=0.001), ("end", {}, b"")]
    runs = [folder_of(values, tmp_path / name) for name in ("quiet", "killed")]
    for run in runs:
        write_log(run, steps)
    run_on_ranks(1, drive, values, facts, tmp_path / "quiet", 2)
    with pytest.raises(AssertionError, match="ended without a result"):
        run_on_ranks(1, drive, values, facts, tmp_path / "killed", 2, (0, 8))
    run_on_ranks(1, drive, values, facts, tmp_path / "killed", 2)
    quiet, killed = map(results_of, runs)
    assert [one.error for one in quiet] == [None] * len(steps)
    assert [one.digest for one in killed] == [one.digest for one in quiet]
    assert tensors_sha(runs[1] / "final") == tensors_sha(runs[0] / "final")
    assert tensors_sha(runs[0] / "final")
