"""A run whose steps are made of rows that belong together reads the same rows on any number of
ranks, goes on from a kill with the same bits, and refuses to go on with other topics.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exp_configs import vary
from tests.contract.runs import untimed
from tests.facts import experiment, write_facts
from tests.runs.test_mixes import command, read_rows
from tests.wording import says

STEPS = 16
BATCHES: dict[str, dict[str, Any]] = {
    "topics": {"batches": {"topics": {"by": "words", "clusters": 3}, "distinct": True}},
    "one source": {
        "batches": {"source": "one", "distinct": True, "topics": {"clusters": 4}},
        "mix": {"queries/train.jsonl": 0.5, "queries/dev.jsonl": 0.5},
        "files": {"valid": "queries/dev.jsonl"},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def values_of(folder: Path, kind: str) -> dict[str, Any]:
    steps = {"steps": STEPS, "global_batch": 4, "micro_batch": 2, "save_every": 3, "log_every": 2}
    values = experiment("retriever", folder, train=steps)
    values["data"] = {**values["data"], **BATCHES[kind]}
    return values


@pytest.mark.parametrize("kind", ["topics", pytest.param("one source", marks=pytest.mark.long)])
def test_a_killed_run_goes_on_with_its_arranged_steps_and_on_other_ranks_has_the_same(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    values = values_of(folder, kind)
    whole, run = read_rows(1, values, folder, tmp_path / "whole")
    assert run is not None
    assert len(whole) == STEPS
    begun, _ = read_rows(1, values, folder, tmp_path / "killed", kill_at=10)
    went_on, again = read_rows(1, values, folder, tmp_path / "killed")
    assert {**begun, **went_on} == whole
    assert untimed(Path(str(again)) / "metrics.jsonl") == untimed(Path(run) / "metrics.jsonl")
    on_two, _ = read_rows(2, values, folder, tmp_path / "two")
    assert on_two == whole
    if kind == "one source":
        sizes = json.loads((Path(run) / "data.json").read_text())["splits"]["train"]["sources"]
        first = next(iter(sizes.values()))["rows"]
        assert all(len({row < first for row in rows}) == 1 for rows in whole.values())


def test_a_run_that_would_go_on_with_other_topics_is_refused(folder: Path, tmp_path: Path) -> None:
    values = vary(values_of(folder, "topics"), train={"save_every": 1})
    assert command(folder, tmp_path / "runs", values, "--until", "2").returncode == 10
    (kept,) = (folder / "cache" / "topics").glob("*/topics.npy")
    topics = np.load(kept)
    try:
        np.save(kept, topics[::-1].copy())
        done = command(folder, tmp_path / "runs", values)
    finally:
        np.save(kept, topics)
    assert done.returncode == 2, done.stderr
    says("run_changed", done.stderr, key="topics of data.batches")
