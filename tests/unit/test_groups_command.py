"""`python -m trainer groups`, and the versions that every command tells."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import trainval
from exp_configs import EXP_GROUPS
from jobs.cli import app as jobs_app
from tests.wording import says
from trainer.__main__ import app
from trainer.config.identity import exp_id


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["groups", *arguments])


def test_every_group_has_a_line_and_a_part_of_a_name_chooses_some() -> None:
    lines = command().stdout.splitlines()
    assert [line.split()[0] for line in lines] == sorted(EXP_GROUPS)
    chosen = command("lookup_tiny").stdout.splitlines()
    assert [line.split()[0] for line in chosen] == sorted(
        name for name in EXP_GROUPS if "lookup_tiny" in name
    )
    assert chosen[1].endswith("  2 fid; steps 800, 600")


def test_a_group_is_shown_as_the_dictionaries_that_are_trained() -> None:
    said = command("fid_lookup_tiny").stdout
    shown = [ast.literal_eval(text.partition("\n")[2]) for text in said.split("\n\n")]
    assert shown == EXP_GROUPS["fid_lookup_tiny"]
    heads = [line for line in said.splitlines() if line.startswith("# ")]
    assert heads == [
        f"# {place} of 2: {exp_id(values)}" for place, values in enumerate(shown, start=1)
    ]


def test_groups_of_a_file_are_told_and_unknown_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("EXP_GROUPS = {'mine': [{'task': 'fid', 'train': {'steps': 3}}]}\n")
    assert command("--exp_configs", str(path)).stdout == "mine  1 fid; steps 3\n"
    done = command("minee", "--exp_configs", str(path))
    assert done.exit_code == 2
    says("group_unknown", done.stderr, at="ConfigError", group="minee", nearest="mine")


@pytest.mark.parametrize("program", [app, jobs_app, trainval.app])
def test_every_program_tells_its_version(program: Any) -> None:
    said = CliRunner().invoke(program, ["--version"])
    assert said.exit_code == 0
    assert said.stdout.startswith("lathe ")
    assert "transformers 5" in said.stdout
