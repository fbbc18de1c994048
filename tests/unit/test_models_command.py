"""`python -m trainer`: what it runs, what it says and how it ends."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import T5Config, T5ForConditionalGeneration
from typer.testing import CliRunner, Result

from tests import forked
from tests.forked import TRAINER
from tests.wording import says
from trainer.__main__ import app

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a plain T5."""
    config = T5Config(d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=20)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_runs_as_a_process(model: Path, tmp_path: Path) -> None:
    done = forked.run(*TRAINER, "import", "fid", str(model), "--out", str(tmp_path / "t5"))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "t5" / "model.safetensors").is_file()
    assert '"tokenizer": ' in done.stdout  # which the log asks to name in the experiment


def test_a_model_is_exported_in_the_layout_asked_for(model: Path, tmp_path: Path) -> None:
    done = command("export", "fid", model, "--out", tmp_path / "fid", "--layout", "fid")
    assert (done.exit_code, done.stderr) == (0, "")
    assert (tmp_path / "fid" / "pytorch_model.bin").is_file()


def test_bad_input_ends_in_one_message_and_code_2(tmp_path: Path) -> None:
    done = command("import", "fid", tmp_path / "nothing", "--out", tmp_path / "t5")
    assert done.exit_code == 2
    assert done.stderr.startswith("ConfigError: ")
    assert done.stderr.count("\n") == 1
    says("reader_not_t5_config", done.stderr, at=f"{tmp_path}/nothing")


def test_a_task_without_models_to_exchange_is_told_which_have_some(tmp_path: Path) -> None:
    done = command("import", "causal_lm", tmp_path, "--out", tmp_path / "t5")
    assert done.exit_code == 2
    listed = done.stderr.strip().rpartition("Those that have: ")[2].removesuffix(".").split(", ")
    assert listed == sorted(
        file.parent.name for file in ROOT.glob("trainer/tasks/*/interchange.py")
    )


def test_an_export_of_adapters_leads_to_merge(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    done = command("export", "causal_lm", tmp_path, "--out", tmp_path / "new")
    assert done.exit_code == 2
    fix = re.compile(rf".*lathe merge {re.escape(str(tmp_path))} --out")
    says("adapters_as_base", done.stderr, at=str(tmp_path), fix=fix)


def test_help_never_imports_torch() -> None:
    code = """
import contextlib, io, runpy, sys
for arguments in (["--help"], ["import", "--help"], ["export", "--help"]):
    sys.argv = ["trainer", *arguments]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:
        runpy.run_module("trainer", run_name="__main__")
    assert "Usage: python -m trainer" in shown.getvalue(), shown.getvalue()
assert not {"torch", "transformers", "deepspeed", "wandb"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
