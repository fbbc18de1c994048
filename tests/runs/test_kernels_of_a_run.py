"""A run on a processor goes on with the kernels that it began with, to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract.runs import lines_of, losses
from tests.facts import experiment, write_facts
from tests.runs.test_mixes import command
from tests.wording import says
from trainer.switches import CPU_KERNELS


@pytest.mark.long
@pytest.mark.parametrize(("began", "other"), [("1", "0"), ("0", "1")])
def test_a_run_that_began_with_other_kernels_is_refused_and_goes_on_with_its_own(
    began: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_facts(tmp_path / "facts")
    values = experiment("causal_lm", folder, train={"steps": 4, "save_every": 2})
    monkeypatch.setenv(CPU_KERNELS, began)
    whole = command(folder, tmp_path / "whole", values)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert command(folder, tmp_path / "runs", values, "--until", "2").returncode == 10
    (run,) = (path.parent for path in (tmp_path / "runs").glob("*/data.json"))
    assert json.loads((run / "data.json").read_text()).get("cpu_kernels", False) == (began == "1")
    monkeypatch.setenv(CPU_KERNELS, other)
    done = command(folder, tmp_path / "runs", values)
    assert done.returncode == 2, done.stdout + done.stderr
    says("kernels_changed", done.stderr, switch=CPU_KERNELS, was=began, now=other)
    monkeypatch.delenv(CPU_KERNELS)  # then the run's own count
    done = command(folder, tmp_path / "runs", values)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = losses(lines_of(tmp_path / "whole" / run.name))
    assert len(wanted) == 4
    assert losses(lines_of(run)) == wanted
