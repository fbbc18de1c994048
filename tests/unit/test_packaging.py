"""The package that is built holds everything that a run reads, and works away from this folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ("trainer", "jobs", "ds_configs")
# Reads every DeepSpeed file and makes one of a group's experiments complete, out of the unpacked
# package alone.
USE = """
import json
import exp_configs, job_configs, jobs.cli, trainer, trainval
from trainer import tasks
from trainer.config import deepspeed_config

names = sorted(path.stem for path in deepspeed_config.PRESETS.glob("*.json"))
files = {name: deepspeed_config.read(name) for name in names}
values = exp_configs.experiments_of("causal_lm_tiny", None, 7)[0]
cfg = tasks.parse(values)
ds = deepspeed_config.build(files[cfg.deepspeed], train=cfg.train, optim=cfg.optim, world=1, source="test")
print(json.dumps({
    "where": [module.__file__ for module in (exp_configs, job_configs, jobs.cli, trainer, trainval)],
    "presets": names,
    "stage": ds["zero_optimization"]["stage"],
    "steps": cfg.train.steps,
}))
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, made by the backend that `pip wheel .` calls, unpacked."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in CODE:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"):
        shutil.copy(path, source)
    build = f"import setuptools.build_meta as backend; print(backend.build_wheel({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("lathe_finetune-*.whl")
    zipfile.ZipFile(wheel).extractall(out / "unpacked")
    return out / "unpacked"


def test_a_package_that_lies_elsewhere_finds_groups_and_deepspeed_files(unpacked: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    done = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=unpacked.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(Path(path).is_relative_to(unpacked) for path in found["where"])
    assert found["presets"] == sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json"))
    assert (found["stage"], found["steps"]) == (2, 7)


def test_the_package_holds_every_file_and_its_licence(unpacked: Path) -> None:
    for name in CODE:
        for path in (ROOT / name).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert (unpacked / path.relative_to(ROOT)).read_bytes() == path.read_bytes(), path
    (info,) = unpacked.glob("lathe_finetune-*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The Lathe authors"
    text = (info / "licenses" / "LICENSE").read_text()
    assert text.startswith("                                 Apache License\n")
    assert "Copyright 2026 The Lathe authors" in text
