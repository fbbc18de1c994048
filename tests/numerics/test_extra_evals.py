"""Answers by generation during training: the same on any ranks and stages, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.facts import experiment, facts, with_dropout, write_facts
from tests.ranks import run_on_ranks
from trainer import tasks
from trainer.errors import ConfigError
from trainer.loop import first_questions
from trainer.metrics import answer_scores
from trainer.task import Places

MEASURES = ("em", "f1", "precision", "recall", "recall_em")
CASES = [(1, 0), (1, 3), (2, 0), (2, 3)]  # ranks, ZeRO stage
ANSWERED = 21  # of 22 rows, in batches of 4: six batches of which the last is short; then two ranks in batches of 16


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def learning(folder: Path) -> dict[str, Any]:
    """An experiment that learns to begin its answers right, though not where things are."""
    train = {"steps": 24, "eval_every": 12, "save_every": 24, "eval_batch": 5}
    data = {"loss_on": "answer", "answer_tokens": 12}
    return experiment("cross_attention", folder, train=train, data=data, optim={"lr": 0.03})


def trained(values: dict[str, Any], folder: Path, savedir: Path, stage: int, extra_evals: int) -> Path:
    """Run an experiment to its end on the ranks of this process group; its folder."""
    from trainer import distributed
    from trainer.run import Options, plan, run

    options = Options(
        savedir, data_path=folder, cache_dir=folder / "cache", deepspeed=f"zero{stage}", extra_evals=extra_evals
    )
    planned = plan(values, options, world=distributed.world(), rank=distributed.rank())
    assert run(planned, options) == 0
    return planned.folder


def lines(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def table(run_folder: Path, step: int) -> list[dict[str, Any]]:
    text = (run_folder / "answers" / f"step-{step}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
