"""The command `lathe`: every command by one name, a file of groups as its first word, and files of
groups in YAML and JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner, Result

from exp_configs import EXP_GROUPS
from jobs.cli import app as jobs_app
from tests.wording import Fault, fault, refused, says
from trainer import tasks
from trainer.__main__ import app as trainer_app
from trainer.commands.dictionaries import TASKS
from trainer.config.groups import read
from trainer.config.identity import exp_id
from trainer.lathe import app, name_of
from trainer.launch import ending

ONE: dict[str, Any] = EXP_GROUPS["causal_lm_tiny"][0]
OTHER: dict[str, Any] = {**ONE, "optim": {**ONE["optim"], "lr": 1e-4}}


@pytest.fixture(autouse=True)
def _ends_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(ending, "leave", leave)


def lathe(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def group_file(folder: Path, **groups: Any) -> Path:
    path = folder / "mine.json"
    path.write_text(json.dumps(groups))
    return path


def test_a_file_that_is_changed_within_a_second_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "mine.py"
    for seed in (3, 4):
        path.write_text(f"EXP_GROUPS = {{'mine': [{{'seed': {seed}}}]}}")
        os.utime(path, (1_700_000_000, 1_700_000_000))
        assert read(path) == {"mine": [{"seed": seed}]}
    assert [one.name for one in tmp_path.iterdir()] == ["mine.py"]


def test_every_command_of_both_programs_is_one_of_lathe() -> None:
    names = {info.name for info in app.registered_commands}
    for program in (trainer_app, jobs_app):
        assert {name_of(info) for info in program.registered_commands} <= names
    assert "train" in names
    assert "--to" in lathe("jobs", "export", "-h").stdout  # lathe export is the trainer's


def test_a_file_of_groups_is_the_first_word_and_one_group_needs_no_name(tmp_path: Path) -> None:
    path = group_file(tmp_path, mine=[ONE])
    done = lathe("train", str(path), "-sb", str(tmp_path / "runs"), "--dry_run")
    assert done.exit_code == 0, done.output
    assert exp_id(ONE) in done.output
    assert lathe("groups", str(path)).stdout == "mine  1 causal_lm; steps 60\n"


def test_of_two_groups_one_is_named(tmp_path: Path) -> None:
    path = group_file(tmp_path, first=[ONE], second=[OTHER])
    done = lathe("train", str(path), "-sb", str(tmp_path / "runs"), "--dry_run")
    assert done.exit_code == 2
    says("group_not_named", done.stderr, at="ConfigError", file=path, groups="first, second")
    runs = str(tmp_path / "runs")
    done = lathe("train", str(path), "-e", "second", "-sb", runs, "--dry_run")
    assert exp_id(OTHER) in done.output


def test_without_a_group_a_file_of_groups_is_proposed() -> None:
    says("group_required", lathe("train").stderr, at="ConfigError")


def test_of_several_experiments_one_is_named(tmp_path: Path) -> None:
    done = lathe("plan", str(group_file(tmp_path, sweep=[ONE, OTHER])))
    assert done.exit_code == 2
    last = f"{exp_id(OTHER)}  sweep 2/2 lr=0.0001"
    says("group_of_several", done.stderr, at="ConfigError", group="sweep", count=2, entries=last)


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["train", "one.json", "two.yaml"], "two.yaml"),
        (["train", "-e", "mine", "one.json"], "one.json"),
        (["plan", "one.txt"], "one.txt"),
        (["train", "data"], "data"),
    ],
)
def test_a_file_of_groups_is_the_first_word_alone(words: list[str], word: str) -> None:
    done = lathe(*words)
    assert done.exit_code == 2
    says("file_not_first", done.stderr, at="ConfigError", command=words[0], word=word)


def test_a_file_that_is_wrong_ends_with_2_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("EXP_GROUPS = {'a': 3}\n")
    done = lathe("train", str(tmp_path / "mine.py"))
    assert done.exit_code == 2
    assert done.stderr.startswith("ConfigError: ")


YAML = """
sweep:
  - &first
    task: causal_lm
    optim: {lr: 1e-4, betas: [0.9, 0.95]}
    train: {steps: 0o17, seed: 010, precision: fp32}
    data: {source: no, when: 2024-05-01, none: ~, size: 1_000, time: 12:30}
  - <<: *first
    task: fid
"""


def test_yaml_values_have_the_types_of_json(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(YAML)
    first, second = read(tmp_path / "sweep.yaml")["sweep"]
    wanted = {
        "task": "causal_lm",
        "optim": {"lr": 1e-4, "betas": [0.9, 0.95]},
        "train": {"steps": 15, "seed": 10, "precision": "fp32"},
        "data": {
            "source": "no",
            "when": "2024-05-01",
            "none": None,
            "size": "1_000",
            "time": "12:30",
        },
    }
    assert first == wanted
    assert second == {**wanted, "task": "fid"}


def as_yaml(values: Any) -> str:
    import yaml

    return yaml.safe_dump(values)


@pytest.mark.parametrize("group", ["causal_lm_tiny", "fid_tiny", "retriever_tiny", "vera_tiny"])
@pytest.mark.parametrize("write", [as_yaml, json.dumps], ids=["yaml", "json"])
def test_ids_equal_those_of_the_same_dictionaries(write: Any, group: str, tmp_path: Path) -> None:
    path = tmp_path / f"mine.{'yaml' if write is as_yaml else 'json'}"
    for content in ({group: EXP_GROUPS[group]}, EXP_GROUPS[group], EXP_GROUPS[group][0]):
        path.write_text(write(content))
        (experiments,) = read(path).values()
        want = EXP_GROUPS[group][: len(experiments)]
        assert [exp_id(values) for values in experiments] == [exp_id(values) for values in want]
    assert list(read(path)) == ["mine"]  # one experiment: the group is named after the file


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.yaml", "a:\n  b: 1\n  b: 2\n", fault("yaml_wrong", line=2, problem="b: stated twice")),
        ("a.yaml", "a: [1\nb: 2\n", fault("yaml_wrong", line=2)),
        ("a.yaml", "a:\n\t- task: fid\n", fault("yaml_tab", line=2)),
        ("a.json", "[" * 100_000, fault("groups_deep")),
        ("a.yaml", "a: !!python/object:os.system x\n", fault("yaml_wrong", line=1)),
        ("a.yaml", "a: !!timestamp 2024-05-01\n", fault("yaml_wrong", line=1)),
        ("a.yaml", "# nothing yet\n", fault("groups_kind", kind="nothing")),
        ("a.yaml", "just a text\n", fault("groups_kind", kind="a str")),
        ("a.json", '{"a": 1,\n "b": }', fault("json_wrong", line=2)),
        ("a.json", '{"a": 1, "a": 2}', fault("groups_twice", key="a")),
        ("a.json", '{"a": NaN}', fault("groups_nan")),
    ],
)
def test_what_is_no_group_of_experiments_is_refused_by_its_line(
    name: str, text: str, why: Fault, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with refused(why) as caught:
        read(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", "a: [{b: 1}]"), ("a.json", '{"a": [{"b": 1}]}')]
)
def test_a_file_of_windows_begins_with_a_mark(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read(tmp_path / name) == {"a": [{"b": 1}]}


def test_a_file_imports_its_neighbours_and_not_those_of_the_file_before(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "parts.py").write_text(f"STEPS = {number}\n")
        (folder / "mine.py").write_text(
            "from parts import STEPS\nEXP_GROUPS = {'a': [{'steps': STEPS}]}\n"
        )
    assert [read(tmp_path / str(number) / "mine.py") for number in (1, 2)] == [
        {"a": [{"steps": 1}]},
        {"a": [{"steps": 2}]},
    ]


def test_a_file_in_a_folder_of_the_path_changes_neither_the_path_nor_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "neighbour_on_path.py").write_text("STEPS = 3\n")
    (tmp_path / "mine.py").write_text(
        "from neighbour_on_path import STEPS\nEXP_GROUPS = {'a': [{'steps': STEPS}]}\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = list(sys.path)
    assert read(tmp_path / "mine.py") == {"a": [{"steps": 3}]}
    assert sys.path == before
    assert sys.modules.pop("neighbour_on_path").STEPS == 3


@pytest.mark.parametrize("task", TASKS)
def test_a_new_file_is_an_experiment_of_ten_keys(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(TASKS[task]) == 10
    done = lathe("new", task)
    assert done.exit_code == 0, done.output
    ((experiment,),) = read(tmp_path / f"{task}.py").values()
    assert tasks.parse(experiment).task == task
    again = lathe("new", task)
    assert again.exit_code == 2
    says("new_file_exists", again.stderr, at="ConfigError", file=f"{task}.py")


def test_there_is_a_new_file_for_every_task() -> None:
    assert sorted(TASKS) == sorted(tasks.names())
