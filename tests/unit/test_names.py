"""What people call an experiment: its group, its place in it, and what tells it from its siblings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.wording import refused
from trainer.config.differences import names_by_difference
from trainer.config.groups import cartesian_exp_group, names, vary
from trainer.config.identity import exp_id
from trainer.telemetry.wandb_run import _where
from trainer.training.options import Options
from trainer.training.schedule import log_interval

PLAIN = {"task": "t", "train": {"steps": 5, "seed": 1}, "optim": {"lr": 1e-3}}


def test_siblings_are_told_apart_by_what_differs_alone() -> None:
    experiments = [
        vary(PLAIN, optim={"lr": lr}, train={"seed": seed})
        for lr in (1e-3, 3e-4)
        for seed in (1, 2)
    ]
    assert names_by_difference(experiments) == [
        "seed=1 lr=0.001",
        "seed=2 lr=0.001",
        "seed=1 lr=0.0003",
        "seed=2 lr=0.0003",
    ]
    assert names_by_difference([PLAIN]) == [""]


def test_a_key_that_one_has_alone_is_named_where_it_is_and_much_is_not_listed() -> None:
    assert names_by_difference([PLAIN, {**PLAIN, "lora": True}]) == ["", "lora=true"]
    many = {f"key{number}": number for number in range(5)}
    assert names_by_difference([PLAIN, {**PLAIN, **many}]) == ["", ""]
    long = {**PLAIN, "base": "/a/very/long/path/of/a/model/on/some/disk"}
    assert names_by_difference([PLAIN, long])[1] == "base=/a/very/long/path/of/a/…"


def test_names_say_group_and_place_and_are_what_wandb_shows(tmp_path: Path) -> None:
    one, two = cartesian_exp_group({**PLAIN, "deepspeed": ["zero0", "zero2"]})
    named = names("sweep", [one, two])
    assert named == {
        exp_id(one): "sweep 1/2 deepspeed=zero0",
        exp_id(two): "sweep 2/2 deepspeed=zero2",
    }
    options = Options(tmp_path, wandb_project_name="p", names=named)
    settings = options.wandb(two)
    assert settings is not None
    assert (settings.entity, settings.name) == (None, "sweep 2/2 deepspeed=zero2")
    assert settings.id == exp_id(two)
    assert Options(tmp_path).wandb(two) is None
    with refused("entity_alone"):
        Options(tmp_path, wandb_entity_name="me").wandb(two)


def test_wandb_says_its_page_or_the_command_that_uploads_it() -> None:
    run = SimpleNamespace(offline=False, url="https://wandb.ai/me/p/runs/1", dir="/r/wandb/a/files")
    assert _where(run) == "https://wandb.ai/me/p/runs/1"
    run.offline = True
    assert _where(run) == "offline: `wandb sync /r/wandb/a` uploads it"


@pytest.mark.parametrize(
    ("steps", "every"),
    [(1, 1), (60, 1), (199, 1), (200, 2), (450, 2), (1000, 10), (60_000, 500), (10**6, 1000)],
)
def test_a_run_logs_in_proportion_to_its_steps(steps: int, every: int) -> None:
    assert log_interval(steps) == every
