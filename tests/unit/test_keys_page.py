"""docs/keys.md and `python -m trainer keys` say of every key what its schema says."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from exp_configs import EXP_GROUPS
from tests.unit.pages import assert_made, wrapped
from tests.wording import Fault, fault, says
from trainer import tasks
from trainer.__main__ import app
from trainer.config import reference
from trainer.config.schema import Experiment

HEAD = """# Every key of an experiment's dictionary

Made from the schemas by `tests/unit/test_keys_page.py`, which also says how to make it anew. The
keys of the first section are those of every experiment. `python -m trainer keys TASK [KEY]` says the
same in a terminal, and `--json_schema` writes it for editors and other programs.
"""
EXPERIMENTS = [values for group in EXP_GROUPS.values() for values in group]


def section(title: str, keys: list[reference.Key]) -> list[str]:
    lines = [f"## {title}", ""]
    for key in keys:
        default = "required" if key.default is None else f"default `{key.default}`"
        lines += wrapped(f"- `{key.path}`: `{key.kind}`; {default}")
        lines += wrapped("  <br>" + key.description.replace("<", "&lt;"))
    return [*lines, ""]


def page() -> str:
    """The whole page, as text."""
    common = reference.keys(Experiment)
    known = {key.path for key in common}
    text = [HEAD, *section("Every experiment", common)]
    for name in tasks.names():
        own = [key for key in reference.keys(tasks.config_of(name)) if key.path not in known]
        text += section(f"Task `{name}`", own)
    return "\n".join(text).rstrip() + "\n"


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments])


def test_the_page_of_keys_is_up_to_date() -> None:
    assert_made("keys.md", page(), __file__)


@pytest.mark.parametrize("task", tasks.names())
def test_every_key_is_described(task: str) -> None:
    keys = reference.keys(tasks.config_of(task))
    assert [key.path for key in keys if not key.description] == []


@pytest.mark.parametrize("task", tasks.names())
def test_the_json_schema_takes_every_experiment_of_ours_and_no_unknown_key(task: str) -> None:
    from jsonschema import Draft202012Validator  # takes 2 s, of every worker that only collects

    schema = json.loads(command(task, "--json_schema").stdout)
    Draft202012Validator.check_schema(schema)
    checked = Draft202012Validator(schema)
    of_task = [values for values in EXPERIMENTS if values["task"] == task]
    assert of_task
    assert [error.message for values in of_task for error in checked.iter_errors(values)] == []
    assert not checked.is_valid({**of_task[0], "colour": "blue"})
    train = of_task[0]["train"]
    assert checked.is_valid({**of_task[0], "train": {**train, "micro_batch": "auto"}})
    assert not checked.is_valid({**of_task[0], "train": {**train, "micro_batch": 0}})


def test_a_key_is_told_with_what_it_may_be_its_default_and_its_meaning() -> None:
    said = command("causal_lm", "optim.clip")
    assert said.exit_code == 0
    assert said.stdout == (
        "optim.clip: number at least 0; default 1.0\n"
        "    Largest norm of the whole gradient; 0.0 switches clipping off. Muon: of the gradient, before\n"
        "    anything is made orthogonal.\n"
    )
    block = command("fid", "schedule").stdout
    assert block.startswith("schedule: block; default {}\n")
    assert "schedule.patience: integer at least 0; default 10\n" in block
    assert "optim" not in block
    assert "train.steps: integer above 0 | null; default null\n" in command("vera").stdout
    assert 'train.micro_batch: integer above 0 | "auto"; required\n' in command("vera").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("causal_lm", "lr"), fault("key_unknown", key="lr", nearest="optim.lr")),
        (("causal_lm", "optim.lrr"), fault("key_unknown", key="optim.lrr", nearest="optim.lr")),
        (("causal_ml",), fault("task_unknown", at="TASK", task="causal_ml", nearest="causal_lm")),
        (("fid", "optim", "--json_schema"), fault("schema_of_whole_dictionary")),
    ],
)
def test_what_does_not_exist_is_told_with_what_is_meant(
    arguments: tuple[str, ...], said: Fault
) -> None:
    done = command(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("ConfigError: ")
    says(said, done.stderr)
