"""An offer may mix the uploaded rows with others of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jobs.serve.lathe_routes import strange_texts
from jobs.serve.offers import Offer, TuningRequest, fill
from tests.wording import refused
from trainer import tasks

EXPERIMENT: dict[str, Any] = {
    "task": "causal_lm",
    "base": "x",
    "data": {"source": "chat", "mix": {"train.jsonl": 0.8, "/data/general.jsonl": 0.2}},
    "train": {"global_batch": 8, "micro_batch": 8},
    "optim": {"lr": 1e-3},
}
REQUEST = TuningRequest(num_rows=100, kind="chat", seed=7, label="job", epochs=2)


def test_the_epochs_of_a_job_are_those_of_its_own_rows() -> None:
    filled = fill(Offer(experiment=EXPERIMENT), REQUEST)
    assert filled.steps == math.ceil(2 * 100 / 0.8 / 8)
    cfg: Any = tasks.parse(filled.experiment)
    assert (cfg.train.steps, cfg.train.epochs) == (filled.steps, None)
    assert cfg.data.files.valid == "valid.jsonl"
    assert cfg.data.part("train.jsonl").files.train == "train.jsonl"


@pytest.mark.parametrize(
    "mix", [{"a.jsonl": 1.0}, {"train.jsonl": None, "/data/general.jsonl": None}]
)
def test_an_offer_says_how_much_of_the_mix_is_uploaded(mix: dict[str, Any]) -> None:
    offer = Offer(experiment={**EXPERIMENT, "data": {"source": "chat", "mix": mix}})
    with refused("mix_of_offer"):
        fill(offer, REQUEST)


def test_a_source_outside_of_the_roots_is_seen_by_its_name() -> None:
    values = {"data": {"mix": {"/etc/passwd": 0.5, "/data/a.jsonl": 0.5}}}
    assert list(strange_texts(values, ["/data"])) == ["data.mix./etc/passwd"]
