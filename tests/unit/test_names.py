"""What people call an experiment: its group, its place in it, and what tells it from its siblings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainval
from tests.wording import refused
from trainer.config.differences import names_by_difference
from trainer.config.groups import cartesian_exp_group, names, vary
from trainer.config.identity import base_label, exp_id
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


def test_a_name_that_is_given_to_a_whole_group_is_told_apart(tmp_path: Path) -> None:
    one, two = cartesian_exp_group({**PLAIN, "deepspeed": ["zero0", "zero2"]})
    given: dict[str, Any] = {"wandb_project_name": "p", "wandb_run_name": "mine", "group": "sweep"}
    both = Options(tmp_path, names=names("sweep", [one, two]), **given)
    shown = [settings.name for values in (one, two) if (settings := both.wandb(values))]
    assert shown == ["mine 1/2 deepspeed=zero0", "mine 2/2 deepspeed=zero2"]
    alone = Options(tmp_path, names=names("sweep", [one]), **given).wandb(one)
    assert alone is not None
    assert (alone.name, alone.group) == ("mine", "sweep")


def test_an_evaluation_keeps_the_name_of_the_run(tmp_path: Path) -> None:
    folder = tmp_path / exp_id(PLAIN)
    folder.mkdir()
    (folder / "status.json").write_text('{"state": "succeeded", "name": "sweep 1/2 lr=1"}')
    settings = Options(tmp_path, wandb_project_name="p").wandb(PLAIN)
    assert settings is not None
    assert settings.name == "sweep 1/2 lr=1"


def test_a_job_is_told_its_group_and_name(monkeypatch: pytest.MonkeyPatch) -> None:
    which = trainval.WhichRuns(exp_id=exp_id(PLAIN))
    assert trainval._names(which) == {"group": "", "names": {}}
    monkeypatch.setenv("LATHE_GROUP", "sweep")
    monkeypatch.setenv("LATHE_NAME", "sweep 1/2 lr=1")
    assert trainval._names(which) == {
        "group": "sweep",
        "names": {exp_id(PLAIN): "sweep 1/2 lr=1"},
    }


def test_a_base_has_a_short_name() -> None:
    begun = {"base": {"experiment": PLAIN}}
    for values, label in (
        ({"base": "bigcode/starcoderbase-1b"}, "starcoderbase-1b"),
        ({"base": "/models/llama-7b/#sha256=ab"}, "llama-7b"),
        ({"base": {"config": {"model_type": "t5"}}}, "random t5"),
        (begun, f"experiment {exp_id(PLAIN)[:12]}"),
        ({}, "random weights"),
    ):
        assert base_label(values) == label


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
