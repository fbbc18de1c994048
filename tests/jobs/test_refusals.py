"""What a job would refuse is refused before it is sent, in the words of the training; and what
trains here trains as a job: with --steps, with "auto", with relative paths.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exp_configs import CAUSAL_LM_TINY, CROSSATTN_TINY, experiments_of, vary
from jobs.code.repository import MAX_WEIGHTS
from jobs.submit.refusals import start_folder
from tests.jobs.conftest import Make, Place
from tests.wording import Fault, fault, refused, says
from trainer.config.identity import exp_id
from trainer.config.userfile import START_FOLDER, placed
from trainer.plan.time.rates import of_data_sheet, plain

ROOT = Path(__file__).resolve().parents[2]


def given(here: Place, values: dict[str, Any]) -> str:
    """Make it the one experiment of the group; returns its id."""
    here.groups.write_text(f"EXP_GROUPS = {{'sweep': [{values!r}]}}\n")
    return exp_id(values)


def spec_of(here: Place, name: str) -> dict[str, Any]:
    return json.loads((here.base / name / "attempts" / "1" / "spec.json").read_text())


def trainval(here: Place, *more: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    words = ["-e", "sweep", "-sb", str(here.base), "-j", "local", "--allow_dirty"]
    words += ["--exp_configs", str(here.groups), "--python_binary", str(here.python), *more]
    return subprocess.run(
        [sys.executable, str(ROOT / "trainval.py"), *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


TINY = CAUSAL_LM_TINY
REFUSED: list[tuple[dict[str, Any], list[str], Fault]] = [
    (vary(TINY, train={"steps": 4}), [], fault("warmup_too_long", warmup=10, steps=4)),
    (vary(TINY, train={"best": "loss"}), [], fault("best_not_of_validation", best="loss")),
    (vary(TINY, train={"activation_offload": True}), [], fault("offload_of_nothing")),
    (vary(TINY, base="./no/folder"), [], fault("base_absent", base="./no/folder")),
    (vary(TINY, base="README.md/"), [], fault("base_absent", base="README.md/")),
    (vary(TINY, tokenizer="../no/tokenizer"), [], fault("tokenizer_nowhere", data="not given")),
    (vary(CROSSATTN_TINY, init_from="final"), [], fault("init_from_absent", folder="final")),
    (
        TINY,
        ["--trackers", "tensorbord"],
        fault("tracker_unknown", tracker="tensorbord", nearest="tensorboard"),
    ),
    (TINY, ["--device", "h2000"], fault("device_unknown", device="h2000", nearest="h200")),
    (TINY, ["--device", "2xh200"], fault("device_count_of_job", devices=2, processes=1)),
    (TINY, ["--device", "h100,h200"], fault("device_kinds")),
    (TINY, ["--device", "no-such-calibration.json"], fault("calibration_unreadable")),
    (vary(TINY, optim={"lr": 100.0}), ["--strict"], fault("rate_odd", lr=100, highest="0.1")),
    (TINY, ["--wandb_entity_name", "us"], fault("entity_alone")),
    (TINY, ["--data_path", str(ROOT / "README.md")], fault("data_path_is_file_of_a_run")),
]


@pytest.mark.parametrize(
    ("values", "flags", "code"), REFUSED, ids=[str(code.code) for _, _, code in REFUSED]
)
def test_what_a_job_would_refuse_is_refused_before_it_is_sent(
    values: dict[str, Any], flags: list[str], code: Fault, place: Make
) -> None:
    here = place(1)
    given(here, values)
    common = ["-e", "sweep", "-sb", str(here.base), "--exp_configs", str(here.groups)]
    planned = here.lathe("plan", *common, "--", *flags)
    assert planned.code == 2, planned.out
    says(code, planned.out)


def test_a_job_that_would_be_refused_is_not_sent(place: Make) -> None:
    here = place(1)
    given(here, vary(TINY, base="./no/folder"))
    sent = here.submit()
    assert sent.code == 2, sent.out
    says("base_absent", sent.out)
    assert not list(here.base.glob("*/job.jsonl"))


def test_an_optimizer_on_nvme_is_refused_for_a_job_with_survive(
    place: Make, tmp_path: Path
) -> None:
    here = place(1)
    file = tmp_path / "nvme.json"
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": offload}}))
    profile = tmp_path / "profile.py"
    profile.write_text('JOB_CONFIGS = {"default": {"survive": "2"}}\n')
    given(here, TINY)
    sent = here.submit("--job_configs", str(profile), "--", "--deepspeed", str(file))
    assert sent.code == 2, sent.out
    says("survive_on_nvme", sent.out)


# --steps


@pytest.mark.parametrize("sender", ["lathe-jobs", "trainval.py"])
def test_steps_below_the_warmup_are_sent_and_told_to_the_training(sender: str, place: Make) -> None:
    here = place(1)
    given(here, TINY)
    shortened = exp_id(vary(TINY, train={"steps": 4}))
    if sender == "lathe-jobs":
        sent = here.submit("--steps", "4", "--", "--num_proc", "1")
        assert sent.code == 0, sent.out
    else:
        dry = trainval(here, "--steps", "4", "--dry_run")
        assert (dry.returncode, shortened in dry.stdout) == (0, True), dry.stdout + dry.stderr
        done = trainval(here, "--steps", "4", "--num_proc", "1")
        assert done.returncode == 0, done.stdout + done.stderr
    program = spec_of(here, shortened)["program"]
    assert "--steps=4" in program
    assert program[-1] == "--num_proc=1"


def test_a_dry_run_with_j_refuses_what_a_job_would(place: Make) -> None:
    here = place(1)
    given(here, vary(TINY, train={"steps": 4}))
    done = trainval(here, "--dry_run")
    assert done.returncode == 2, done.stdout
    says("warmup_too_long", done.stderr, warmup=10, steps=4)


def test_a_run_that_has_begun_goes_on_with_a_long_warmup(place: Make) -> None:
    here = place(1)
    name = given(here, vary(TINY, train={"steps": 4}))
    (here.base / name / "checkpoints" / "step-2").mkdir(parents=True)
    (here.base / name / "exp_dict.json").write_text(json.dumps(vary(TINY, train={"steps": 4})))
    sent = here.submit()
    assert sent.code == 0, sent.out


@pytest.mark.parametrize(
    "values",
    [vary(TINY, train={"micro_batch": "auto"}), vary(TINY, deepspeed="auto")],
    ids=["micro_batch", "deepspeed"],
)
def test_what_the_training_chooses_is_left_to_the_job(values: dict[str, Any], place: Make) -> None:
    here = place(1)
    name = given(here, values)
    sent = here.submit()
    assert sent.code == 0, sent.out
    assert spec_of(here, name)["exp_id"] == name


# Relative paths


def test_relative_paths_start_where_the_command_was_typed(
    place: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, mine = place(1), tmp_path / "mine"
    (mine / "bases" / "decoder").mkdir(parents=True)
    (mine / "my.json").write_text('{"zero_optimization": {"stage": 0}}')
    values = vary(TINY, base="bases/decoder", deepspeed="./my.json")
    name = given(here, values)
    done = trainval(here, cwd=mine)
    assert done.returncode == 0, done.stdout + done.stderr
    spec = spec_of(here, name)
    assert spec["environment"][START_FOLDER] == str(mine)
    assert json.loads((here.base / name / "exp_dict.json").read_text()) == values
    monkeypatch.setenv(START_FOLDER, str(mine))
    assert placed("bases/decoder") == str(mine / "bases" / "decoder")


def test_a_calibration_reaches_the_job_by_its_absolute_path(place: Make, tmp_path: Path) -> None:
    here = place(1)
    name = given(here, TINY)
    rates = of_data_sheet("h200")
    assert rates is not None
    (tmp_path / "rates.json").write_text(json.dumps(plain(rates)))
    done = trainval(here, "--device", "1xrates.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"--device=1x{tmp_path / 'rates.json'}" in spec_of(here, name)["program"]


def test_no_folder_is_told_where_no_path_is_relative(place: Make, tmp_path: Path) -> None:
    here = place(1)
    name = given(here, vary(TINY, base=str(tmp_path)))
    assert here.submit().code == 0
    assert START_FOLDER not in spec_of(here, name)["environment"]


def test_a_placed_path_is_the_name_itself_where_nothing_lies_in_the_start_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert placed("gpt2") == "gpt2"
    monkeypatch.setenv(START_FOLDER, str(tmp_path))
    assert (placed("gpt2"), placed(""), placed("/usr")) == ("gpt2", "", "/usr")
    (tmp_path / "gpt2").mkdir()
    assert placed("gpt2") == str(tmp_path / "gpt2")


def write_weights(folder: Path) -> None:
    """A folder with more weights than a snapshot of the code takes."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(MAX_WEIGHTS + 1))


def test_files_of_the_project_are_those_of_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    values = vary(TINY, deepspeed="ds_configs/zero1.json")
    assert start_folder([values], ROOT, shares_disk=True) == {}
    assert start_folder([vary(TINY, base="docs")], ROOT, shares_disk=True) == {}


def test_a_folder_whose_weights_the_snapshot_leaves_out_is_read_where_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_weights(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    found = start_folder([vary(TINY, base="model")], tmp_path, shares_disk=True)
    assert found == {START_FOLDER: str(tmp_path)}


def test_a_name_that_is_too_long_for_a_file_is_refused_as_any_other() -> None:
    for values in (vary(TINY, base="./" + "x" * 300), vary(TINY, tokenizer="./" + "x" * 300)):
        assert start_folder([values], ROOT, shares_disk=True) == {}


@pytest.mark.parametrize("where", ["elsewhere", "project"])
def test_a_relative_folder_that_the_node_cannot_see_is_refused(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_weights(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    project = tmp_path if where == "project" else ROOT
    values = vary(TINY, base="model#sha256=0")
    assert start_folder([values], project, shares_disk=True) == {START_FOLDER: os.getcwd()}
    with refused("relative_unseen", names="model"):
        start_folder([values], project, shares_disk=False)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\0")
    if where == "project":  # the snapshot holds all of it
        assert start_folder([values], project, shares_disk=False) == {}


# Run folders


def test_a_run_folder_that_is_a_link_out_of_the_base_is_not_sent(
    place: Make, tmp_path: Path
) -> None:
    here = place(2, is_base_there=False)
    first, second = (exp_id(values) for values in experiments_of("sweep", here.groups, None))
    (tmp_path / "elsewhere").mkdir()
    here.base.mkdir()
    (here.base / first).symlink_to(tmp_path / "elsewhere")
    sent = here.submit()
    assert sent.code == 3, sent.out
    says("run_folder_leads_out", " ".join(sent.out.split()), folder=first)
    assert here.until_all("succeeded")[0]["exp_id"] == second
    assert not list((tmp_path / "elsewhere").iterdir())
