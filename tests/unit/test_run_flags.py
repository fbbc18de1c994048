"""The table of the flags that a run reads: what trainval.py takes is what a job's command gets."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import trainval
from jobs.submit.prepare import training_flags
from trainer.config.flags import PATHS, RUN_FLAGS, SWITCHES, RunFlags
from trainer.training.options import Options

EVERY: dict[str, Any] = {  # a value of each flag that is not its default
    "data_path": Path("/data"),
    "cache_dir": Path("/cache"),
    "log_every": 5,
    "deepspeed": "zero3",
    "wandb_entity_name": "somebody",
    "wandb_project_name": "something",
    "wandb_run_name": "mine",
    "wandb_log_gradients": True,
    "wandb_artifacts": False,
    "trackers": "mlflow",
    "push_to_hub": True,
    "do_extra_evals": True,
    "generation_eval_max_sample_size": 7,
    "device": "24GiB",
    "force": True,
    "strict": True,
    "num_proc": 3,
    "test": True,
    "until": 4,
}


def words(flags: RunFlags) -> list[str]:
    """The words of a command line, as a job's program gets them."""
    return [
        f"--{name}" if name in SWITCHES else f"--{name}={text}"
        for name, text in flags.as_text().items()
    ]


def handed_over(monkeypatch: pytest.MonkeyPatch, *line: str) -> RunFlags:
    """What trainval.py reads out of a command line."""
    seen: list[RunFlags] = []
    monkeypatch.setattr(trainval, "end", lambda command: command())
    monkeypatch.setattr(
        trainval, "_train_or_send", lambda which, flags, launch: seen.append(flags) or 0
    )
    get_command(trainval.app).main(["-e", "x", *line], standalone_mode=False)
    return seen[0]


def test_a_flag_of_on_and_off_may_stand_without_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the published README writes --wandb_log_gradients."""
    for line in (
        ["--wandb_log_gradients", "--push_to_hub", "no"],
        ["--push_to_hub=false", "--wandb_log_gradients"],
    ):
        flags = handed_over(monkeypatch, *line)
        assert (flags.wandb_log_gradients, flags.push_to_hub) == (True, False)
        sent = training_flags(line)
        assert (sent["wandb_log_gradients"], sent["push_to_hub"]) in (
            ("true", "no"),
            ("true", "false"),
        )


def test_this_test_knows_every_flag() -> None:
    assert set(EVERY) == set(RUN_FLAGS), "give the new flag another value than its default"
    assert [name for name in EVERY if getattr(RunFlags(), name) == EVERY[name]] == []


@pytest.mark.parametrize("name", RUN_FLAGS)
def test_a_flag_is_passed_on_to_a_job_as_it_was_given(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the number of answered rows counts where rows are answered
    with_it = {"do_extra_evals"} if name == "generation_eval_max_sample_size" else set[str]()
    flags = RunFlags(**{each: EVERY[each] for each in {name, *with_it}})
    assert handed_over(monkeypatch, *words(flags)) == flags
    assert training_flags(words(flags)) == flags.as_text()


def test_a_flag_that_is_not_given_is_not_passed_on() -> None:
    assert words(RunFlags()) == [
        "--cache_dir=tmp-cache",
        "--wandb_log_gradients=false",
        "--wandb_artifacts=true",
        "--push_to_hub=false",
        "--do_extra_evals=false",
    ]


def test_the_word_none_of_a_launch_script_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    line = [word for name in RUN_FLAGS for word in (f"--{name}", "None")]
    assert handed_over(monkeypatch, *line) == RunFlags()
    assert handed_over(monkeypatch, "--device=none", "--num_proc=None") == RunFlags()
    assert handed_over(monkeypatch, "--force", "True", "--strict", "False") == RunFlags(force=True)


def test_a_run_has_every_flag_and_paths_and_switches_are_known_by_their_types() -> None:
    assert {*RUN_FLAGS} < {field.name for field in fields(Options)}
    assert PATHS == ("data_path", "cache_dir")
    assert SWITCHES == ("test", "force", "strict")
