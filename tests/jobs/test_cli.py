"""The command itself: what it refuses, its exit codes, its --json, and what it must never do by
accident.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from exp_configs import experiments_of
from jobs import cli
from jobs.errors import NothingMatched
from jobs.record import events as record
from jobs.record.events import Sent
from jobs.record.paths import BaseFolder
from jobs.record.row import Row
from jobs.report import selection
from jobs.submit import prepare
from tests.jobs.conftest import Make, Place
from tests.wording import refused, says
from trainer.config.identity import exp_id
from trainer.errors import ConfigError
from trainer.runtime import process

ROOT = Path(__file__).resolve().parents[2]


def words(here: Place, *more: str, backend: str = "local") -> list[str]:
    """What every command on the group takes."""
    group = ["-e", "sweep", "-sb", str(here.base), "-j", backend, "--exp_configs", str(here.groups)]
    return [*group, "--python_binary", str(here.python), *more]


def ids_of(here: Place) -> list[str]:
    return [exp_id(values) for values in experiments_of("sweep", here.groups, None)]


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    """A command of its own process, with streams of its own."""
    return subprocess.run(
        [sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


# Help


def commands() -> list[str]:
    """All but `serve`, which becomes another program."""
    names = [str(info.name) for info in cli.app.registered_commands]
    return [name for name in names if name != "serve"]


HELP = """
import contextlib, io, json, sys, time
from jobs.cli import app
begun, found = time.process_time(), {{}}
for name in {names!r}:
    before, text = time.process_time(), io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            app([name, "--help"], prog_name="lathe-jobs")
    except SystemExit as end:
        found[name] = [end.code, begun + time.process_time() - before, text.getvalue()]
heavy = [name for name in ("torch", "deepspeed", "transformers", "wandb") if name in sys.modules]
print(json.dumps([found, heavy]))
"""


def test_every_help_is_there_without_torch_and_within_a_second_of_cpu() -> None:
    done = run("-c", HELP.format(names=commands()))
    assert done.returncode == 0, done.stderr
    found, heavy = json.loads(done.stdout)
    assert heavy == []
    assert sorted(found) == sorted(commands())
    for name, (code, cpu_s, text) in found.items():
        assert (code, cpu_s < 1.0) == (0, True), (name, cpu_s)
        assert f"Usage: lathe-jobs {name}" in text
        # a text for another tool, a token and a protocol are no JSON of ours
        assert ("--json" in text) == (name not in ("export", "token", "mcp")), name


def test_the_help_of_the_service_calls_it_by_the_name_that_was_typed() -> None:
    done = run("-m", "jobs", "serve", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith("Usage: lathe-jobs serve [OPTIONS]")


@pytest.mark.parametrize("argv", [["-h"], ["--help"], [], ["submit", "-h"]])
def test_help_comes_by_either_name_and_without_arguments(argv: list[str]) -> None:
    done = run("-m", "jobs", *argv)
    assert "Usage: lathe-jobs" in done.stdout + done.stderr
    assert done.returncode == (0 if argv else 2)


def test_help_says_which_command_sends_new_flags(place: Make) -> None:
    here = place(1)
    for name in ("retry", "submit"):
        text = " ".join(here.lathe(name, "--help").out.split())
        assert "`retry ID` sends exactly what was sent before" in text, text
        assert "`submit --retry failed`" in text


# Exit codes


def test_exit_code_0_when_all_is_as_asked(place: Make) -> None:
    here = place(1)
    assert here.lathe("plan", *words(here)).code == 0


def test_exit_code_2_for_bad_input(place: Make) -> None:
    here = place(1)
    said = here.lathe("plan", *words(here), "--job_configs", "nowhere.py")
    assert said.code == 2
    assert "nowhere.py" in said.out


def test_exit_code_3_when_some_experiment_was_not_dealt_with(place: Make, tmp_path: Path) -> None:
    here = place(1)
    configs = tmp_path / "configs.py"
    configs.write_text(
        'JOB_CONFIGS = {"default": {"resources": {"gpu": 4}}}'
    )  # the queue of the tests has none
    said = here.submit("--job_configs", str(configs))
    assert (said.code, "SomeFailed: 1 of 1" in said.out) == (3, True)


def test_exit_code_4_when_the_scheduler_cannot_be_reached(
    place: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = place(1)
    monkeypatch.setenv("PATH", str(here.base))  # no sbatch there
    said = here.lathe("plan", *words(here, backend="slurm"))
    assert said.code == 4, said.out
    assert here.lathe("doctor", "-j", "slurm").code == 4


@pytest.mark.parametrize("command", ["status", "results"])
def test_exit_code_5_when_nothing_matched(command: str, place: Make) -> None:
    here = place(1)
    assert here.lathe(command, "-sb", str(here.base)).code == 5
    assert here.lathe("show", "abc", "-sb", str(here.base)).code == 5


# One clear error instead of a traceback


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (
            "x.txt",
            "JOB_CONFIGS = {}",
            "want the path of a Python file (.py) that defines JOB_CONFIGS",
        ),
        (
            "a.py",
            'JOB_CONFIGS = {"default": [1]}',
            "JOB_CONFIGS['default'] is a list. Want a dictionary",
        ),
        ("a.py", 'JOB_CONFIGS = {"sweep": None}', "JOB_CONFIGS['sweep'] is None"),
        ("a.py", "\n\nJOB_CONFIGS = {\n  'a': ]\n", "a.py:4: SyntaxError"),
        (
            "a.py",
            'JOB_CONFIGS = {"sweep": {"cpu": 1}}',
            "a.py: job dictionary of 'sweep': 1 mistake(s)",
        ),
        ("a.py", "raise SystemExit", "a.py:1: SystemExit"),
    ],
)
def test_a_fault_of_the_job_dictionaries_is_one_error(
    name: str, text: str, complaint: str, place: Make, tmp_path: Path
) -> None:
    here = place(1)
    (tmp_path / name).write_text(text)
    said = here.lathe("plan", *words(here), "--job_configs", str(tmp_path / name))
    assert said.code == 2, said.out
    assert complaint in said.out


@pytest.mark.parametrize("text", ["-5s", "0", "nan", "inf", "1e300h", "soon", "s"])
def test_a_pause_that_is_no_pause_is_refused(text: str, place: Make) -> None:
    here = place(1)
    said = here.lathe("reconcile", "-sb", str(here.base), "--every", text)
    assert said.code == 2, said.out
    assert "--every" in said.out
    assert here.lathe("status", "-sb", str(here.base), "--watch", "--every", text).code == 2


def test_pauses_are_read() -> None:
    assert [selection.seconds(text) for text in ("30s", "5m", "2h", "0.5", "7")] == [
        30,
        300,
        7200,
        0.5,
        7,
    ]


@pytest.mark.parametrize("command", ["submit", "plan"])
def test_a_base_folder_that_is_no_text_is_refused(command: str, place: Make) -> None:
    here = place(1)
    base = str(here.base) + "\udcff"  # what Python makes of the byte 0xff
    more = [
        "-e",
        "sweep",
        "-j",
        "local",
        "--exp_configs",
        str(here.groups),
        "--python_binary",
        str(here.python),
    ]
    said = here.lathe(command, *more, "-sb", base)
    assert said.code == 2, said.out
    assert "--savedir_base" in said.out
    assert here.lathe("status", "-sb", base).code == 2


def test_words_that_are_no_text_are_told_and_do_not_end_in_a_traceback(place: Make) -> None:
    here = place(1)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for more in (["-e", b"\xff\x1b[31m"], ["-e", "sweep", "--", "--data_path", b"/\xff"]):
        argv = [
            sys.executable,
            "-m",
            "jobs",
            "plan",
            "-sb",
            str(here.base),
            "--exp_configs",
            str(here.groups),
            *more,
        ]
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, timeout=120)
        assert done.returncode == 2, done.stderr
        assert b"Traceback" not in done.stderr
        assert b"ConfigError" in done.stderr
        assert b"\x1b" not in done.stderr  # what a message shows cannot drive the terminal


def test_a_base_folder_that_is_a_file_is_one_error(place: Make) -> None:
    here = place(1, is_base_there=False)
    here.base.write_text("")
    said = here.lathe("status", "-sb", str(here.base))
    assert said.code == 2, said.out
    assert str(here.base) in said.out


def test_a_job_that_picks_its_own_gpus_is_refused_by_the_local_queue(
    place: Make, tmp_path: Path
) -> None:
    here = place(1)
    configs = tmp_path / "configs.py"
    text = (
        'JOB_CONFIGS = {{"default": {{"resources": {{"gpu": {}}}, "environment_vars": '
        '["CUDA_VISIBLE_DEVICES={}"]}}}}'
    )
    configs.write_text(text.format(1, "0"))
    said = here.lathe("plan", *words(here), "--job_configs", str(configs))
    assert said.code == 2, said.out
    assert "CUDA_VISIBLE_DEVICES" in said.out
    configs.write_text(text.format(0, ""))  # without GPUs it takes nobody's
    assert here.lathe("plan", *words(here), "--job_configs", str(configs)).code == 0


# --only and --prune


def test_one_word_of_only_that_fits_nothing_is_named(place: Make) -> None:
    here = place(2)
    good, _ = ids_of(here)
    said = here.lathe("plan", *words(here), "--only", good[:8], "--only", "typo")
    assert said.code == 5, said.out
    assert "'typo'" in said.out
    assert good[:8] not in said.out
    (result,) = here.lathe("plan", *words(here), "--only", good[:8], "--json").json
    assert result["exp_id"] == good


def test_an_empty_word_of_only_is_refused(place: Make) -> None:
    here = place(2, is_base_there=False)
    said = here.submit("--only", "")
    assert (said.code, "--only" in said.out, here.base.exists()) == (2, True, False)


def test_prune_leaves_alone_what_only_left_out(place: Make) -> None:
    here = place(3)
    here.says("sleep")
    here.submit()
    here.until_all("running")
    first, second, left = ids_of(here)
    here.groups.write_text(here.groups.read_text().replace("range(3)", "range(2)"))
    assert here.submit("--only", first, "--prune", "--yes").code == 0
    here.until(lambda rows: Counter(row["state"] for row in rows) == {"running": 2, "cancelled": 1})
    assert {row["exp_id"] for row in here.status() if row["state"] == "running"} == {first, second}
    assert left not in (first, second)
    here.lathe("cancel", "-e", "sweep", "-sb", str(here.base), "--yes")
    here.until_all("cancelled")


def test_prune_needs_yes_and_without_it_nothing_is_sent(place: Make) -> None:
    here = place(1, is_base_there=False)
    said = here.submit("--prune")
    assert (said.code, "--yes" in said.out, here.base.exists()) == (2, True, False)


def test_nothing_is_reset_when_one_of_them_is_alive(place: Make) -> None:
    here = place(2)
    first, second = ids_of(here)
    here.submit("--only", first)
    here.until_all("succeeded")
    here.says("sleep")
    here.submit("--only", second)
    here.until(lambda rows: {row["state"] for row in rows} == {"succeeded", "running"})
    said = here.lathe("reset", first, second, "-sb", str(here.base), "--yes")
    assert (said.code, second in said.out) == (2, True)
    assert (here.base / first).exists()
    here.lathe("cancel", second, "-sb", str(here.base))
    here.until_all("cancelled", "succeeded")


# --json


def test_a_plan_as_json_holds_the_rendered_texts(place: Make) -> None:
    here = place(2, is_base_there=False)
    results = here.lathe("plan", *words(here), "--json", "--show-rendered").json
    assert [json.loads(result["rendered"])["group"] for result in results] == [
        f"{here.base}:sweep"
    ] * 2
    assert not here.base.exists()
    assert "rendered" not in here.lathe("plan", *words(here), "--json").json[0]
    assert '"cpus": 1' in here.lathe("plan", *words(here), "--show-rendered").out


def test_reconcile_for_ever_prints_one_json_line_a_round(place: Make) -> None:
    here = place(1)
    command = [
        sys.executable,
        "-m",
        "jobs",
        "reconcile",
        "-sb",
        str(here.base),
        "--every",
        "0.1s",
        "--json",
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            assert [json.loads(child.stdout.readline()) for _ in range(2)] == [[], []]
        finally:
            child.kill()


def test_what_an_inline_training_prints_stays_out_of_the_json(place: Make) -> None:
    here = place(1)
    done = run("-m", "jobs", "submit", *words(here, "--allow-dirty", "--json", backend="inline"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["action"] == "send"
    assert "training with" in done.stderr
    done = run("-m", "jobs", "submit", *words(here, "--allow-dirty", backend="inline"))
    assert "it is done" in done.stdout


@pytest.mark.long  # twelve programs
def test_stdout_of_every_json_command_is_json_alone(place: Make) -> None:
    here = place(1)
    base = ["-sb", str(here.base), "--json"]
    (sent,) = json.loads(
        run("-m", "jobs", "submit", *words(here, "--allow-dirty", "--json")).stdout
    )
    here.until_all("succeeded")
    name = sent["exp_id"]
    lines: dict[str, list[str]] = {
        "plan": words(here, "--json"),
        "status": base,
        "show": [name, *base],
        "cancel": [name, *base],
        "retry": [name, *base],
        "reconcile": base,
        "doctor": ["--json"],
        "results": base,
        "gc": [*base, "--yes"],
        "logs": [name, "--tail", "1", *base],
        "reset": [name, "--yes", *base],
    }
    others = {"submit", "export", "token", "mcp", "sweep"}  # of sweep's stdout: test_sweeps.py
    assert set(lines) | others == set(commands())
    for command, more in lines.items():
        done = run("-m", "jobs", command, *more)
        assert done.returncode == 0, (command, done.stderr)
        json.loads(done.stdout)


def test_two_forms_of_results_at_once_are_refused(place: Make, tmp_path: Path) -> None:
    html = str(tmp_path / "x.html")
    here = place(1)
    for line in (
        ["results", "--json", "--csv"],
        ["results", "--json", "--html", html],
        ["status", "--watch", "--json"],
    ):
        done = run("-m", "jobs", *line, "-sb", str(here.base))
        assert (done.returncode, done.stdout) == (2, "")
        says("one_form_of_output", done.stderr)


# What is told


def row_of(**changes: Any) -> Row:
    return Row("e" * 32, "g", "failed", "/base/" + "e" * 32, **changes)


@pytest.mark.parametrize(("index", "is_told"), [(0, True), (3, True), (None, False)])
def test_details_name_the_part_of_an_array(index: int | None, is_told: bool) -> None:
    sent = Sent(1, "t", "fta_1", index, "slurm", "2026-01-01T00:00:00+00:00", id="7_0")
    assert (f"part {index} of fta_1" in selection.details(row_of(history=(sent,)))) == is_told


def test_details_cannot_drive_the_terminal() -> None:
    assert "\x1b" not in selection.details(row_of(reason="a \x1b[2J b"))


def test_one_experiment_named_twice_is_chosen_once(place: Make) -> None:
    here = place(1)
    here.submit()
    here.until_all("succeeded")
    (name,) = ids_of(here)
    assert len(selection.select_rows(here.base, [name, name[:9]], None)) == 1
    with pytest.raises(NothingMatched):
        selection.select_rows(here.base, ["f" * 33], None)
    with pytest.raises(ConfigError):
        selection.select_rows(here.base, [], None)


# The GPU that the queue gave


def test_a_training_sees_the_gpu_that_the_queue_gave_it(
    place: Make, queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = place(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    configs = tmp_path / "configs.py"
    configs.write_text('JOB_CONFIGS = {"default": {"resources": {"gpu": 1}}}')
    told = (
        'open(os.path.join(folder, "gpu"), '
        '"w").write(os.environ["CUDA_VISIBLE_DEVICES"])\nprint("training with"'
    )
    here.python.write_text(here.python.read_text().replace('print("training with"', told))
    here.says("sleep")
    here.submit("--job_configs", str(configs))
    here.until(lambda rows: len(list(here.base.glob("*/gpu"))) == 2, within_s=180)
    assert sorted(path.read_text() for path in here.base.glob("*/gpu")) == ["4", "5"]
    here.lathe("cancel", "-e", "sweep", "-sb", str(here.base), "--yes")
    here.until_all("cancelled")


# trainval.py -j


def by_hand(here: Place, **status: Any) -> Path:
    """A folder that a local run left, with a checkpoint."""
    (values,) = experiments_of("sweep", here.groups, None)
    folder = BaseFolder(here.base).run(exp_id(values)).path
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "old").touch()
    (folder / "exp_dict.json").write_text(json.dumps(values))
    if status:
        (folder / "status.json").write_text(json.dumps(status))
    return folder


def trainval(here: Place, *more: str) -> subprocess.CompletedProcess[str]:
    return run("trainval.py", *words(here), "--allow_dirty", *more)


@pytest.mark.parametrize(
    "status", [{"state": "failed", "step": 3, "total": 9}, {}], ids=["failed", "nothing said"]
)
def test_reset_moves_a_folder_that_a_local_run_left(status: dict[str, Any], place: Make) -> None:
    here = place(1)
    folder = by_hand(here, **status)
    done = trainval(here, "-r", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    here.until_all("succeeded")
    assert not (folder / "checkpoints").exists()
    (aside,) = here.base.glob(f"{folder.name}.bak-*")
    assert (aside / "checkpoints" / "old").exists()
    assert f"moved to {aside}" in done.stdout


def test_a_run_that_was_started_by_hand_is_shown_and_left_alone_until_it_has_died(
    place: Make,
) -> None:
    here = place(1)
    training = subprocess.Popen(["sleep", "60"])
    try:
        facts = {**process.facts(), "pid": training.pid, "birth": process.birth(training.pid)}
        at = {"host": facts["host"], "updated_at": record.now(), "process": facts}
        folder = by_hand(here, state="running", step=3, total=9, **at)
        base = ["-sb", str(here.base)]
        (row,) = here.status()
        assert (row["state"], row["by_hand"], row["backend"]) == ("running", True, None)
        assert f"{facts['host']}, by hand" in here.lathe("status", *base).out
        group = [*base, "-e", "sweep"]
        (row,) = here.lathe("status", *group, "--exp_configs", str(here.groups), "--json").json
        assert row["exp_id"] == folder.name
        (result,) = here.lathe("results", *group, "--exp_configs", str(here.groups), "--json").json
        assert result["exp_id"] == folder.name
        assert here.lathe("status", *group, "--json").code == 5  # no built-in group of that name
        (result,) = here.submit("--json").json
        assert (result["action"], result["state"]) == ("skip", "running")
        assert f"process {training.pid}" in result["text"]
        for command in ("cancel", "retry"):
            refused = here.lathe(command, folder.name, *base)
            assert (refused.code, "started by hand" in refused.out) == (2, True)
        assert here.starts() == []
    finally:
        training.kill()
        training.wait()
    (row,) = here.status()
    assert (row["state"], "is gone" in row["reason"]) == ("lost", True)
    assert here.submit().code == 0
    (row,) = here.until_all("succeeded")
    assert not row["by_hand"]


def test_a_folder_in_which_a_local_run_is_alive_is_not_moved(place: Make) -> None:
    here = place(1)
    folder = by_hand(here, state="running", step=3, total=9, host="here", updated_at=record.now())
    done = trainval(here, "-r", "1")
    assert done.returncode == 2, done.stdout + done.stderr
    says("run_alive_by_hand", done.stderr)
    assert folder.exists()


def test_without_reset_a_folder_of_a_local_run_is_gone_on_with(place: Make) -> None:
    here = place(1)
    folder = by_hand(here, state="failed", step=3, total=9)
    assert trainval(here).returncode == 0
    here.until_all("succeeded")
    assert (folder / "checkpoints" / "old").exists()


def test_nothing_is_moved_when_the_group_could_not_be_sent(place: Make) -> None:
    here = place(1)
    folder = by_hand(here, state="failed", step=3, total=9)
    done = trainval(here, "-r", "1", "--data_path", str(here.base / "nowhere"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert (folder / "checkpoints" / "old").exists()


def test_a_dry_run_of_a_group_that_is_to_be_sent_moves_nothing(place: Make) -> None:
    here = place(1)
    folder = by_hand(here, state="failed", step=3, total=9)
    done = trainval(here, "-r", "1", "--dry_run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert folder.name in done.stdout
    assert (folder / "checkpoints" / "old").exists()


# Flags of the training


@pytest.mark.parametrize("sender", ["lathe-jobs", "trainval.py"])
def test_a_device_and_force_travel_with_the_job(sender: str, place: Make) -> None:
    here = place(1)
    if sender == "lathe-jobs":
        assert here.submit("--", "--device", "24GiB", "--force").code == 0
    else:
        done = run("trainval.py", *words(here), "--allow_dirty", "--device", "24GiB", "--force")
        assert done.returncode == 0, done.stdout + done.stderr
    spec = json.loads((here.base / ids_of(here)[0] / "attempts" / "1" / "spec.json").read_text())
    assert spec["program"][-2:] == ["--device=24GiB", "--force"]


def test_a_switch_with_a_value_is_refused() -> None:
    with refused("flag_value", flag="--force", value=1, flag_again="--force"):
        prepare.training_flags(["--force=1"])
