"""haven's own launcher and JobManager, haven-ai 0.7.3, send by us: to the stand-ins of Toolkit and
Slurm, and to a real Slurm.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from exp_configs import EXP_GROUPS, vary
from jobs.backends import BackendCache
from jobs.cli import app
from jobs.haven import library as haven
from jobs.haven.scheduler import STATES, Scheduler
from jobs.job_state import ACTIVE
from jobs.job_state import STATES as JOB_STATES
from jobs.record.paths import BaseFolder, is_exp_id
from jobs.record.status import survey
from tests.jobs.conftest import wait_until
from tests.jobs.real_slurm import need_slurm, real_slurm
from tests.jobs.toolkit_standin import Standin, standin
from tests.serve.fake_slurm import FakeSlurm
from tests.wording import refused
from trainer.config.identity import exp_id

ROOT = Path(__file__).resolve().parents[2]
HAS_HAVEN = importlib.util.find_spec("haven") is not None
needs_haven = pytest.mark.skipif(
    not HAS_HAVEN, reason="haven is an extra: pip install -e '.[haven]'"
)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Standin]:
    monkeypatch.setenv("LATHE_EAI_RETRY_S", "2")
    with standin(kill_after_s=0.3) as running:
        yield running


def havens(name: str) -> Any:
    """A module of haven itself, connected."""
    haven.connect()
    return importlib.import_module(f"haven.{name}")


GROUP = [vary(EXP_GROUPS["causal_lm_tiny"][0], train={"seed": seed}) for seed in range(3)]
IDS = [exp_id(values) for values in GROUP]
# A launch line's python: a training that lasts 30 ms. It does what the file `what` says.
STUB = """#!{python} -S
import json, os, signal, sys, time
flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
folder = os.path.join(flags["--savedir_base"], flags["--exp_id"])
with open(os.path.join(flags["--savedir_base"], "starts"), "a") as file:
    print(json.dumps([flags["--exp_id"], sys.argv[1], os.getcwd(), sys.argv[2:]]), file=file)
what = open({what!r}).read()
print("out", what)
print("err", what, file=sys.stderr)
if what == "sleep":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    time.sleep(600)
if what != "ok":
    sys.exit(int(what))
with open(os.path.join(folder, "status.json"), "w") as file:
    json.dump({{"state": "succeeded", "step": 1, "total": 1}}, file)
"""


@dataclass
class Launcher:
    """A program that calls haven's run_wizard, with a stand-in for the training."""

    base: Path
    code: Path
    python: Path
    what: Path
    scheduler: str

    def run(self, experiments: list[dict[str, Any]] = GROUP, *, option: str = "run") -> None:
        """Let haven send the experiments; job_option: what it would ask for on stdin."""
        of_toolkit = {"image": "registry/image:1", "data": [f"org.acct.home:{self.base.parent}"]}
        job = {
            "account_id": None,
            "group": "sweep",
            **(of_toolkit if self.scheduler == "toolkit" else {"partition": "low"}),
        }
        havens("haven_wizard").run_wizard(
            func=None,
            exp_list=experiments,
            job_config=job,
            savedir_base=str(self.base),
            args=Namespace(data_path="rows", device=None, force=False),
            python_binary_path=str(self.python),
            python_file_path="launch.py",
            workdir=str(self.code),
            job_scheduler=self.scheduler,
            job_option=option,
        )

    def rows(self) -> list[dict[str, Any]]:
        """What `lathe status` says."""
        done = CliRunner().invoke(app, ["status", "-sb", str(self.base), "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def until(self, *states: str) -> list[dict[str, Any]]:
        """The rows as soon as each is in one of these states."""
        return wait_until(self.rows, lambda rows: all(row["state"] in states for row in rows))

    def starts(self) -> list[Any]:
        path = self.base / "starts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Launcher]:
    monkeypatch.setattr(sys, "argv", ["launch.py"])  # haven reads it
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the copied code holds no Lathe here

    def make(scheduler: str) -> Launcher:
        made = Launcher(
            *(tmp_path / name for name in ("base", "code", "python", "what")), scheduler
        )
        made.code.mkdir()
        (made.code / "launch.py").write_text("")
        (tmp_path / "rows").mkdir()
        made.what.write_text("ok")
        made.python.write_text(STUB.format(python=sys.executable, what=str(made.what)))
        made.python.chmod(0o755)
        clock = SimpleNamespace(sleep=lambda seconds: None, time=time.time, time_ns=time.time_ns)
        monkeypatch.setattr(havens("haven_jobs"), "time", clock)  # it waits 3 s for each table
        return made

    return make


@needs_haven
def test_havens_launcher_sends_a_group_that_status_knows(
    service: Standin, launcher: Callable[[str], Launcher], tmp_path: Path
) -> None:
    sweep = launcher("toolkit")
    sweep.run()
    rows = sweep.until("succeeded")
    assert sorted(row["exp_id"] for row in rows) == sorted(IDS)
    assert {(row["group"], row["backend"], row["by_hand"]) for row in rows} == {
        ("sweep", "toolkit", False)
    }
    assert sorted(path.name for path in sweep.base.iterdir() if is_exp_id(path.name)) == sorted(IDS)
    for row in rows:
        folder = sweep.base / row["exp_id"]
        known = json.loads((folder / "job_dict.json").read_text())
        assert known["job_id"] == row["job_id"]
        assert (folder / "logs.txt").read_text() == "out ok\n"
        spec = json.loads((folder / "attempts" / "1" / "spec.json").read_text())
        assert spec["environment"]["LATHE_GROUP"] == "sweep"
        assert spec["environment"]["LATHE_NAME"].startswith("sweep ")
    starts = sweep.starts()
    assert sorted(start[0] for start in starts) == sorted(IDS)
    for name, program, folder, words in starts:
        assert (program, folder) == ("launch.py", str(sweep.base / name / "code"))
        given = dict(zip(words[::2], words[1::2], strict=True))
        # a relative path is that of the launcher; what is None is haven's word None
        assert (given["--data_path"], given["--device"]) == (str(tmp_path / "rows"), "None")
    assert (
        havens("haven_jobs")
        .JobManager(exp_list=GROUP, savedir_base=str(sweep.base), job_scheduler="toolkit")
        .get_job(rows[0]["job_id"])
        .state
        == "SUCCEEDED"
    )
    sweep.run()
    assert service.stats()["created"] == 3


@pytest.mark.long
@needs_haven
def test_a_job_that_lives_is_not_sent_again_and_is_killed(
    service: Standin, launcher: Callable[[str], Launcher]
) -> None:
    sweep = launcher("toolkit")
    sweep.what.write_text("sleep")
    sweep.run(GROUP[:2])
    sweep.until("running")
    sweep.run(GROUP[:2])
    for path in sweep.base.glob("*/job_dict.json"):
        path.unlink()  # the launcher died before it could write down the id
    sweep.run(GROUP[:2])
    assert service.stats()["created"] == 2
    sweep.run(GROUP[:2], option="kill")
    assert {row["state"] for row in sweep.rows()} == {"cancelled"}


@needs_haven
def test_a_failed_job_is_sent_again_and_a_lost_reply_makes_no_second_job(
    service: Standin, launcher: Callable[[str], Launcher]
) -> None:
    sweep = launcher("toolkit")
    sweep.what.write_text("3")
    service.lose_next_create(1)
    sweep.run(GROUP[:1])
    (first,) = sweep.until("failed")
    assert (service.stats()["created"], service.stats()["lost"]) == (1, 1)
    sweep.what.write_text("ok")
    sweep.run(GROUP[:1])
    (second,) = sweep.until("succeeded")
    assert second["attempts"] == 2
    assert second["job_id"] != first["job_id"]
    assert (sweep.base / IDS[0] / "err.txt").read_text() == "err ok\n"


@needs_haven
def test_on_slurm_havens_launcher_writes_our_script_and_no_accounting_is_needed(
    launcher: Callable[[str], Launcher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    slurm.make(monkeypatch)
    sweep = launcher("slurm")
    sweep.run()
    sweep.run()
    rows = sweep.rows()
    assert {(row["state"], row["backend"]) for row in rows} == {("queued", "slurm")}
    assert len(slurm.jobs()) == 3
    names = {
        json.loads((sweep.base / name / "attempts" / "1" / "spec.json").read_text())["token"]
        for name in IDS
    }
    assert set(slurm.jobs()) == names


@needs_haven
def test_what_a_training_would_refuse_is_refused_before_it_is_sent(
    service: Standin, launcher: Callable[[str], Launcher]
) -> None:
    sweep = launcher("toolkit")
    with refused("key_unknown", key="train.stepz"):
        sweep.run([vary(GROUP[0], train={"stepz": 3})])
    assert service.stats()["created"] == 0


@needs_haven
def test_haven_copies_no_code_into_a_snapshot(tmp_path: Path) -> None:
    for name in ("mine", "snapshot"):
        (tmp_path / name).mkdir()
    (tmp_path / "snapshot" / "kept.py").write_text("")
    (tmp_path / "code").symlink_to("snapshot")
    havens("haven_utils").copy_code(f"{tmp_path}/mine/", str(tmp_path / "code"), verbose=0)
    assert (tmp_path / "snapshot" / "kept.py").exists()
    assert not (tmp_path / "code").is_symlink()


PROGRAM = """
from argparse import ArgumentParser
from pathlib import Path

from jobs.haven.library import connect

connect()
from haven import haven_wizard

from trainer.api.haven import trainval
from trainer.config.groups import read

parser = ArgumentParser()
for name in ("--data_path", "--cache_dir", "--device"):
    parser.add_argument(name)
haven_wizard.run_wizard(
    func=trainval,
    exp_groups=read(Path("groups.py")) if Path("groups.py").exists() else None,
    job_config={job!r},
    args=parser.parse_known_args()[0],
    job_option="run",
)
"""
GROUPS = """
from exp_configs import EXP_GROUPS as BUILT_IN, vary

SHORT = {"steps": 4, "eval_every": 4, "log_every": 4}
EXP_GROUPS = {
    "sweep": [
        vary(BUILT_IN["causal_lm_tiny"][0], train={**SHORT, "seed": seed}, schedule={"warmup_steps": 1})
        for seed in range(2)
    ]
}
"""


@pytest.mark.long
@needs_haven
@pytest.mark.parametrize("scheduler", ["toolkit", "slurm"])
def test_a_program_that_calls_havens_launcher_trains_a_group_as_jobs(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, base = tmp_path / "code", tmp_path / "base"
    code.mkdir()
    (code / "groups.py").write_text(GROUPS)
    job: dict[str, Any] = {"account_id": None, "group": "sweep"}
    job["environment_vars"] = {"OMP_NUM_THREADS": "1"}
    if scheduler == "toolkit":
        job |= {"image": "registry/image:1", "data": [f"org.acct.home:{tmp_path}"]}
    else:
        need_slurm()
        job |= {"partition": "low", "resources": {"cpu": 1, "mem": 3}}
    (code / "launch.py").write_text(PROGRAM.replace("{job!r}", repr(job)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with standin(own_process=True, slots=1) if scheduler == "toolkit" else real_slurm():
        done = subprocess.run(
            [
                *(sys.executable, "launch.py", "-e", "sweep", "-sb", str(base), "-j", scheduler),
                *("--cache_dir", str(tmp_path / "cache")),
            ],
            cwd=code,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        rows = wait_until(
            lambda: survey(BaseFolder(base), backend_of=BackendCache()),
            lambda rows: all(row.state in ("succeeded", "failed") for row in rows),
            within_s=600,
        )
    assert len(rows) == 2
    for row in rows:
        assert row.state == "succeeded", Path(row.folder, "err.txt").read_text()[-3000:]
        assert (row.group, row.backend) == ("sweep", scheduler)
        assert exp_id(json.loads(Path(row.folder, "exp_dict.json").read_text())) == row.exp_id
        assert json.loads(Path(row.folder, "status.json").read_text())["name"].startswith("sweep ")
    assert len({row.metrics["loss"] for row in rows}) == 2


# The seam


def test_every_state_is_one_that_haven_knows() -> None:
    known = (*STATES.values(),)
    assert set(STATES) == set(JOB_STATES)
    if HAS_HAVEN:
        theirs = havens("haven_jobs")
        assert set(known) <= {
            *theirs.ALIVE_STATES,
            *theirs.COMPLETED_STATES,
            *theirs.FAILED_STATES,
        }
        # what may still run is never launched a second time
        assert not {STATES[state] for state in ACTIVE} & set(theirs.FAILED_STATES)


def test_a_command_that_is_not_the_launchers_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / IDS[0]
    folder.mkdir()
    (folder / "exp_dict.json").write_text(json.dumps(GROUP[0]))
    command = "python train.py; rm -rf /"
    with refused("haven_command", command=command):
        Scheduler("toolkit", tmp_path).submit_job(None, None, command, {}, str(folder / "code"))


def test_a_job_that_nobody_knows_is_what_haven_expects(service: Standin, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"job id .* not found"):
        Scheduler("toolkit", tmp_path).get_job(None, "00000000-0000-4000-8000-000000000000")


def test_a_wrong_key_of_the_job_dictionary_is_named(tmp_path: Path) -> None:
    with refused("key_unknown", key="resource", nearest="resources"):
        Scheduler("toolkit", tmp_path).submit_job(
            None, None, "python a.py --exp_id x", {"resource": {}}, str(tmp_path / IDS[0] / "code")
        )
