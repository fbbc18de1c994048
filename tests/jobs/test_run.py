"""The wrapper inside a job: one outcome for each way a training can end, and never two copies."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from jobs.node import host as node
from jobs.node import pulse
from jobs.node import wrapper as run
from jobs.record.paths import RunFolder
from jobs.record.times import age_of
from trainer.files.atomic import write_json
from trainer.runtime.process import birth

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def only_its_own_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper kills all descendants of its process. Here that is the tests' own, whose servers
    (of forks, of wandb) later tests still need.
    """
    all_of, before = node.descendants, set(node.descendants(os.getpid()))
    monkeypatch.setattr(node, "descendants", lambda pid: sorted(set(all_of(pid)) - before))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / ("a" * 32)
    path.mkdir()
    return path


# What trainval.py does at its end.
GOOD_END = """
import json, os
path = os.environ["LATHE_OUTCOME"]
os.path.exists(path) or json.dump({"code": 0}, open(path, "x"))
"""


def spec(folder: Path, code: str, number: int = 1, **changes: Any) -> None:
    """Write an attempt whose training is a line of Python; when it comes to its end it tells that
    all is well.
    """
    attempt = RunFolder(folder).attempt(number)
    attempt.folder.mkdir(parents=True)
    job = {"grace_s": 5, "nodes": 1, **changes.pop("job", {})}
    facts = {
        "launcher": [sys.executable, "-S", "-c", code + GOOD_END],
        "program": ["--flag"],
        "workdir": str(folder),
    }
    attempt.spec.write_text(
        json.dumps({**facts, "environment": {}, "activate": None, "job": job, **changes})
    )


def outcome(folder: Path, number: int = 1) -> dict[str, Any]:
    return json.loads(RunFolder(folder).attempt(number).exit.read_text())


def start(folder: Path, number: int = 1, **environment: str) -> subprocess.Popen[bytes]:
    """The wrapper as the scheduler runs it."""
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.node.wrapper", str(folder), str(number)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def until(is_so: Any, within_s: float = 120) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


TELL = "import os, json; json.dump({}, open(os.environ['LATHE_OUTCOME'], 'x')); "


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", (0, "succeeded")),
        ("raise SystemExit(2)", (2, "failed")),
        ("raise SystemExit(75)", (75, "preempted")),
        ("raise SystemExit(7)", (1, "failed")),
        ("import os; os.kill(os.getpid(), 9)", (1, "failed")),
        # what the training says of itself counts more than its launcher's exit code
        (TELL.format({"code": 75, "error": "x"}) + "raise SystemExit(1)", (75, "preempted")),
        (
            TELL.format({"code": 2, "error": "ConfigError: x"}) + "raise SystemExit(1)",
            (2, "failed"),
        ),
        (TELL.format({"code": 0, "error": "x"}) + "raise SystemExit(1)", (0, "succeeded")),
        (
            TELL.format({"code": 1, "error": "OutOfMemoryError: CUDA"}) + "raise SystemExit(1)",
            (1, "oom"),
        ),
    ],
)
def test_each_way_to_end_has_its_code(folder: Path, code: str, expected: tuple[int, str]) -> None:
    spec(folder, code)
    assert run.run(folder, 1) == expected[0]
    assert (outcome(folder)["code"], outcome(folder)["kind"]) == expected


def test_a_launch_line_that_runs_no_training_has_not_succeeded(folder: Path) -> None:
    spec(folder, "", launcher=["true"])
    assert run.run(folder, 1) == 1
    assert "does the launch line run trainval.py" in outcome(folder)["reason"]


def test_the_reason_is_the_error_that_the_training_told(folder: Path) -> None:
    spec(folder, TELL.format({"code": 2, "error": "DataError: line 3"}) + "raise SystemExit(1)")
    run.run(folder, 1)
    assert outcome(folder)["reason"] == "DataError: line 3"


def test_torchrun_waits_for_a_save_as_long_as_the_job_may_take(folder: Path) -> None:
    spec(folder, "import os; open('s', 'w').write(os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT'])")
    run.run(folder, 1)
    assert (folder / "s").read_text() == "5"


def test_a_program_that_does_not_exist_is_a_failure_and_not_a_crash(folder: Path) -> None:
    spec(folder, "", launcher=["/no/such/python"])
    assert run.run(folder, 1) == 1
    assert "No such file" in outcome(folder)["reason"]


def test_a_finished_attempt_is_never_run_again(folder: Path) -> None:
    spec(folder, "open('ran', 'a').write('x')")
    assert [run.run(folder, 1), run.run(folder, 1)] == [0, 0]
    assert (folder / "ran").read_text() == "x"


def test_a_second_copy_of_an_attempt_does_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec(folder, "open('ran', 'a').write('x'); raise SystemExit(75)")
    monkeypatch.setenv("LATHE_JOB_ID", "8")
    assert run.run(folder, 1) == 75
    monkeypatch.setenv("LATHE_JOB_ID", "9")
    assert run.run(folder, 1) == run.EXIT_DUPLICATE
    monkeypatch.setenv(
        "LATHE_JOB_ID", "8"
    )  # the scheduler starts the same job again: that is no copy
    assert run.run(folder, 1) == 75
    assert (folder / "ran").read_text() == "xx"
    assert {path.name for path in (folder / "attempts/1").glob("*-*.json")} == {
        *("started-1.json", "started-2.json", "exit-1.json"),
    }


def test_of_two_copies_that_start_at_the_same_moment_one_trains(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec(folder, "open('ran', 'a').write('x'); raise SystemExit(75)")
    codes: list[int] = []

    def overtaken() -> int:
        """The other copy runs as a whole while this one is about to write down that it starts."""
        monkeypatch.setattr(node, "restarts", lambda: 0)
        codes.append(run.run(folder, 1))
        return 0

    monkeypatch.setattr(node, "restarts", overtaken)
    codes.append(run.run(folder, 1))
    assert codes == [75, run.EXIT_DUPLICATE]
    assert (folder / "ran").read_text() == "x"


def test_an_attempt_that_was_given_up_never_starts(folder: Path) -> None:
    spec(folder, "open('ran', 'a').write('x')")
    RunFolder(folder).attempt(1).give_up_file.touch()
    assert run.run(folder, 1) == run.EXIT_DUPLICATE
    assert not (folder / "ran").exists()


def test_an_attempt_that_was_cancelled_stops_though_no_signal_comes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "HEARTBEAT_S", 0.0)
    mark = RunFolder(folder).attempt(1).cancel_file
    spec(folder, f"import pathlib, time; pathlib.Path({str(mark)!r}).touch(); time.sleep(60); ")
    assert run.run(folder, 1) == 75
    assert outcome(folder)["kind"] == "preempted"


def test_a_late_first_attempt_steps_back_from_the_second(folder: Path) -> None:
    spec(folder, "open('ran', 'a').write('x')")
    spec(folder, "import time; time.sleep(30)", number=2)
    second = start(folder, 2)
    until(RunFolder(folder).attempt(2).heartbeat.exists)
    assert run.run(folder, 1) == 75
    second.kill()
    second.wait()


def test_an_attempt_after_one_that_reached_the_end_trains_nothing(folder: Path) -> None:
    spec(folder, "open('ran', 'a').write('x')")
    spec(folder, "open('ran', 'a').write('x')", number=2)
    assert [run.run(folder, 1), run.run(folder, 2)] == [0, 0]
    assert (folder / "ran").read_text() == "x"


def test_an_attempt_for_the_test_of_a_run_that_is_done_runs_until_that_is_scored(
    folder: Path,
) -> None:
    scored = "open('ran', 'a').write('x'); open('test.json', 'w').write('{\"weights\": null}')"
    spec(folder, "open('ran', 'a').write('x')")
    for number in (2, 3):
        spec(folder, scored, number=number, program=["--exp_id=e", "--test"])
    assert [run.run(folder, number) for number in (1, 2, 3)] == [0, 0, 0]
    assert (folder / "ran").read_text() == "xx"


def test_a_job_started_again_while_it_is_alive_does_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "PATIENCE_S", 0.5)
    spec(folder, "open('ran', 'a').write('x'); import time; time.sleep(30)")
    first = start(folder, LATHE_JOB_ID="8")
    until((folder / "ran").exists)
    monkeypatch.setenv("LATHE_JOB_ID", "8")
    assert run.run(folder, 1) == run.EXIT_DUPLICATE
    first.kill()  # now it is dead for certain: its process is gone
    first.wait()
    until(lambda: (folder / "ran").read_text() == "x")
    spec_path = RunFolder(folder).attempt(1).spec
    values = json.loads(spec_path.read_text())
    values["launcher"][-1] = "open('ran', 'a').write('y')" + GOOD_END
    spec_path.write_text(json.dumps(values))
    assert run.run(folder, 1) == 0
    assert (folder / "ran").read_text() == "xy"


def test_an_attempt_steps_back_while_an_earlier_one_is_alive(folder: Path) -> None:
    spec(folder, "import time; time.sleep(30)")
    spec(folder, "open('ran', 'a').write('x')", number=2)
    first = start(folder)
    until(RunFolder(folder).attempt(1).heartbeat.exists)
    assert run.run(folder, 2) == 75
    assert "attempt 1 is alive" in outcome(folder, 2)["reason"]
    first.terminate()
    assert first.wait(timeout=45) == 75
    assert not (folder / "ran").exists()


def other_host(folder: Path, number: int, *, ahead_s: float) -> Path:
    """A start on a node whose clock is ahead (or, negative, behind): its heartbeat."""
    attempt = RunFolder(folder).attempt(number)
    moment = datetime.now(timezone.utc) + timedelta(seconds=ahead_s)
    at = moment.isoformat(timespec="milliseconds")
    facts = {"at": at, "host": "another", "pid": 1, "id": "8"}
    attempt.start_file(1).write_text(json.dumps(facts))
    attempt.heartbeat.write_text(json.dumps({"at": at, "step": 1}))
    return attempt.heartbeat


@pytest.mark.parametrize("ahead_s", [240.0, 0.0, -100.0])
def test_a_start_elsewhere_whose_heart_stopped_is_dead_whatever_its_clock_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    monkeypatch.setattr(pulse, "ALIVE_S", 0.3)
    spec(folder, "open('ran', 'a').write('x')", number=2)
    spec(folder, "")
    other_host(folder, 1, ahead_s=ahead_s)
    assert run.run(folder, 2) == 0
    assert (folder / "ran").exists()


@pytest.mark.parametrize("ahead_s", [240.0, 0.0, -100.0, -2000.0])
def test_a_start_elsewhere_whose_heart_beats_lives_whatever_its_clock_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    monkeypatch.setattr(pulse, "ALIVE_S", 10.0)
    spec(folder, "open('ran', 'a').write('x')", number=2)
    spec(folder, "")
    heartbeat = other_host(folder, 1, ahead_s=ahead_s)
    beat, has_ended = json.loads(heartbeat.read_text()), threading.Event()

    def beats() -> None:
        while not has_ended.wait(0.2):
            beat["step"] += 1
            write_json(heartbeat, beat)

    heart = threading.Thread(target=beats)
    heart.start()
    code = run.run(folder, 2)
    has_ended.set()
    heart.join()
    assert code == 75
    assert "attempt 1 is alive" in outcome(folder, 2)["reason"]
    assert not (folder / "ran").exists()


def test_a_start_elsewhere_that_is_older_than_any_clock_is_wrong_costs_no_wait(
    folder: Path,
) -> None:
    spec(folder, "open('ran', 'a').write('x')", number=2)
    spec(folder, "")
    heartbeat = other_host(folder, 1, ahead_s=-1000.0)
    for path in (heartbeat, *RunFolder(folder).attempt(1).starts()):
        os.utime(path, (time.time() - 1000, time.time() - 1000))
    begin = time.monotonic()
    assert run.run(folder, 2) == 0
    assert time.monotonic() - begin < 60


def test_the_age_of_a_heartbeat_is_the_disks_when_its_clock_is_ahead(folder: Path) -> None:
    spec(folder, "")
    heartbeat = other_host(folder, 1, ahead_s=240.0)
    os.utime(heartbeat, (time.time() - 700, time.time() - 700))
    at = json.loads(heartbeat.read_text())["at"]
    assert 690 < age_of(heartbeat, at) < 760
    assert age_of(heartbeat, None) == float("inf")
    assert age_of(folder / "absent", at) == 0.0


def test_a_clock_that_is_behind_makes_no_file_old_and_a_copy_is_as_old_as_it_says(
    folder: Path,
) -> None:
    status = folder / "status.json"
    status.write_text("{}")
    for behind_s, low, high in ((700, 0, 60), (3600, 3590, 3660)):
        at = datetime.now(timezone.utc) - timedelta(seconds=behind_s)
        assert low <= age_of(status, at.isoformat()) < high


SAVES = """
import signal, sys, time
def stop(*_):
    open("saved", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
open("ready", "w").close()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_lets_the_training_save(folder: Path, number: signal.Signals) -> None:
    spec(folder, SAVES)
    wrapper = start(folder)
    until((folder / "ready").exists)
    wrapper.send_signal(number)
    assert wrapper.wait(timeout=45) == 75
    assert (folder / "saved").exists()
    assert number.name in outcome(folder)["reason"]


def test_a_training_stopped_before_it_could_listen_asks_to_be_run_again(folder: Path) -> None:
    spec(folder, "open('ready', 'w').close(); import time; time.sleep(60)")
    wrapper = start(folder)
    until((folder / "ready").exists)
    wrapper.terminate()
    assert wrapper.wait(timeout=45) == 75


def test_ranks_in_sessions_of_their_own_are_stopped_and_none_is_left(folder: Path) -> None:
    rank = "import os, time; open('rank', 'w').write(str(os.getpid())); time.sleep(300)"
    spec(
        folder,
        "import subprocess, sys, time;"
        f"subprocess.Popen([sys.executable, '-S', '-c', {rank!r}], start_new_session=True); "
        "time.sleep(60)",
    )
    wrapper = start(folder)
    until(lambda: (folder / "rank").exists() and (folder / "rank").read_text())
    pid = int((folder / "rank").read_text())
    wrapper.terminate()
    assert wrapper.wait(timeout=45) == 75
    until(lambda: birth(pid) is None)


SAVES_ALONE = """
import json, os, signal, time
def save(*_):
    time.sleep({save_s})
    json.dump({{"code": 75}}, open(os.environ["LATHE_OUTCOME"], "w"))
    os._exit(75)
if os.fork() == 0:  # the training in a container, whose program dies of SIGTERM
    signal.signal(signal.SIGTERM, save)
    open({ready!r}, "w")
time.sleep(60)
"""


@pytest.mark.parametrize(("save_s", "is_saved"), [(0.7, True), (30, False)])
def test_a_training_saves_though_the_program_of_its_container_dies_of_the_signal(
    folder: Path, tmp_path: Path, save_s: float, is_saved: bool
) -> None:
    ready = tmp_path / "ready"
    spec(folder, SAVES_ALONE.format(save_s=save_s, ready=str(ready)), job={"grace_s": 3})
    threading.Thread(target=ask_when_there, args=(ready,), daemon=True).start()
    began = time.monotonic()
    assert run.run(folder, 1) == 75
    assert time.monotonic() - began < 10
    assert RunFolder(folder).attempt(1).outcome.exists() is is_saved


def ask_when_there(path: Path) -> None:
    """SIGTERM for this process as soon as a file is there."""
    while not path.exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)


def test_orphans_of_a_launcher_that_ended_are_killed(folder: Path) -> None:
    rank = "import os, time; open('rank', 'w').write(str(os.getpid())); time.sleep(300)"
    spec(
        folder,
        "import subprocess, sys, time, os;"
        f"subprocess.Popen([sys.executable, '-S', '-c', {rank!r}], start_new_session=True, "
        "stdout=subprocess.DEVNULL,"
        "stderr=subprocess.DEVNULL)\nwhile not (os.path.exists('rank') and open('rank').read()): "
        "time.sleep(0.01)",
    )
    assert start(folder).wait(timeout=45) == 0
    pid = int((folder / "rank").read_text())
    until(lambda: birth(pid) is None, within_s=60)


def test_output_is_kept_of_all_starts(folder: Path) -> None:
    spec(folder, "import sys; print('out'); print('err', file=sys.stderr); raise SystemExit(75)")
    run.run(folder, 1)
    run.run(folder, 1)
    assert (folder / "attempts/1/logs.txt").read_text() == "out\nout\n"
    assert (folder / "attempts/1/err.txt").read_text() == "err\nerr\n"


def test_the_key_reaches_the_training_and_no_file(folder: Path, tmp_path: Path) -> None:
    key, path = "k" * 40, tmp_path / "key"
    path.write_text(key + "\n")
    path.chmod(0o600)
    spec(
        folder,
        "import os; assert os.environ['WANDB_API_KEY'] == 'k' * 40",
        job={"wandb_key_file": str(path)},
    )
    assert run.run(folder, 1) == 0
    assert not [file for file in folder.rglob("*") if file.is_file() and key in file.read_text()]
    assert "WANDB_API_KEY" not in os.environ


def test_a_key_file_that_others_can_read_is_bad_input(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("k" * 40)
    path.chmod(0o640)
    spec(folder, "pass", job={"wandb_key_file": str(path)})
    assert run.run(folder, 1) == 2
    assert f"chmod 600 {path}" in outcome(folder)["reason"]
    os.mkfifo(tmp_path / "pipe", 0o600)
    spec(folder, "pass", number=2, job={"wandb_key_file": str(tmp_path / "pipe")})
    assert run.run(folder, 2) == 2


@pytest.mark.parametrize("form", ["", "/bin/activate"])
def test_an_environment_is_activated_without_a_shell(
    folder: Path, tmp_path: Path, form: str
) -> None:
    program = tmp_path / "env" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.symlink_to(sys.executable)
    spec(folder, "", activate=f"{tmp_path / 'env'}{form}")
    attempt = RunFolder(folder).attempt(1)
    values = json.loads(attempt.spec.read_text())
    code = "import os, shutil; print(shutil.which('python'), os.environ['VIRTUAL_ENV'])"
    attempt.spec.write_text(
        json.dumps({**values, "launcher": ["python", "-S", "-c", code + GOOD_END]})
    )
    assert run.run(folder, 1) == 0
    assert attempt.logs.read_text() == f"{program} {tmp_path / 'env'}\n"


def test_an_environment_that_is_not_there_says_where_it_was_looked_for(
    folder: Path, tmp_path: Path
) -> None:
    spec(
        folder,
        "pass",
        activate="nowhere",
        environment={"HOME": str(tmp_path), "PATH": "/bin", "CONDA_ENVS_PATH": "/a"},
    )
    assert run.run(folder, 1) == 1
    assert "/a/nowhere" in outcome(folder)["reason"]


def test_an_element_of_an_array_finds_its_experiment(
    folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    spec(folder, "open('ran', 'w').close()")
    (tmp_path / "index.json").write_text(
        json.dumps({"0": ["/elsewhere", 1], "3": [str(folder), 1]})
    )
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "8")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert run.main(["--array", str(tmp_path / "index.json")]) == 0
    assert (folder / "ran").exists()
    assert outcome(folder)["id"] == "8_3"
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "9")
    assert run.main(["--array", str(tmp_path / "index.json")]) == 2


def test_several_nodes_start_one_launcher_each_under_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    argv = node.on_each_node(["torchrun", "--standalone"], {"job": {"nodes": 2}})
    assert argv[0] == "srun"
    assert "--ntasks=2" in argv
    assert argv[-2:] == ["torchrun", "--standalone"]


def test_what_a_node_runs_names_every_package_as_its_own_files_do() -> None:
    own = {found.metadata["Name"]: found.version for found in importlib.metadata.distributions()}
    assert node.facts()["packages"] == own
    assert own["torch"] == importlib.metadata.version("torch")


def test_the_wrapper_needs_nothing_but_the_standard_library() -> None:
    code = (
        "import sys, jobs.node.wrapper; print(sorted(m for m in ('pydantic', 'torch', 'typer', "
        "'filelock') if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
