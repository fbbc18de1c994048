"""From an installed wheel, in an empty folder, everything runs that runs in a clone: training here,
jobs, the service. The code of a job is the installed version, by its digest.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.code.snapshot import verify
from jobs.record.paths import BaseFolder
from tests.jobs.conftest import wait_until

ROOT = Path(__file__).resolve().parents[2]
GROUP = ["-e", "causal_lm_tiny", "--steps", "4"]  # below its warm-up of 10 steps
ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"{n}?"},
            {"role": "assistant", "content": f"It is {n}."},
        ]
    }
    for n in range(10)
]
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the wheel of this clone, without its dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    copy = folder / "clone"  # a build leaves a folder beside the sources
    subprocess.run(["git", "clone", "--quiet", "--no-local", str(ROOT), str(copy)], check=True)
    differing = subprocess.run(
        ["git", "diff", "HEAD", "--binary"], cwd=ROOT, capture_output=True, check=True
    )
    if differing.stdout:
        subprocess.run(["git", "apply"], cwd=copy, input=differing.stdout, check=True)
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(copy)]
    subprocess.run(wheel, check=True, timeout=300)
    (file,) = folder.glob("lathe_finetune-*.whl")
    target = folder / "site-packages"
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(target), str(file)], check=True, timeout=300
    )
    return target


@pytest.fixture
def environment(site: Path, queue: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(site)}


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def run(*words: str, cwd: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def snapshot_of(base: Path, site: Path) -> str:
    """The digest of the one snapshot, after a look at what it is."""
    (folder,) = (base / "_jobs" / "code").iterdir()
    told = json.loads((folder / "code.json").read_text())
    assert (told["commit"], told["is_dirty"], told["dirty"]) == (None, False, {})
    assert told["version"].startswith("lathe ")
    taken = {entry["path"] for entry in told["files"]}
    assert {"trainval.py", "ds_configs/zero2.json", "jobs/node/wrapper.py"} <= taken
    assert all((site / path).is_file() for path in taken)
    assert verify(BaseFolder(base), folder.name) == []
    return folder.name


def test_a_group_trains_here_and_as_a_job_with_the_same_losses(
    site: Path, environment: dict[str, str], empty: Path
) -> None:
    here = run("trainval", *GROUP, "-sb", "here", cwd=empty, environment=environment)
    assert here.returncode == 0, here.stdout + here.stderr
    flags = [*GROUP, "-sb", "sent", "-j", "local"]
    sent = run("trainval", *flags, cwd=empty, environment=environment)
    assert sent.returncode == 0, sent.stdout + sent.stderr

    def rows() -> list[dict[str, Any]]:
        told = run("jobs", "status", "-sb", "sent", "--json", cwd=empty, environment=environment)
        assert told.returncode == 0, told.stderr
        return json.loads(told.stdout)

    (row,) = wait_until(
        rows, lambda rows: rows[0]["state"] in ("succeeded", "failed"), within_s=300
    )
    assert row["state"] == "succeeded", row
    folders = [empty / base / row["exp_id"] for base in ("here", "sent")]
    assert losses(folders[0]) == losses(folders[1])
    assert len(losses(folders[0])) > 0
    assert (folders[1] / "final" / "config.json").is_file()
    digest = snapshot_of(empty / "sent", site)
    spec = json.loads((folders[1] / "attempts" / "1" / "spec.json").read_text())
    assert digest in spec["workdir"]
    print(
        f"SHOW wheel: {row['exp_id'][:8]} --steps 4 below the warm-up of 10, here and -j local: losses "
        f"{losses(folders[0])} = {losses(folders[1])}, code {digest[:12]}"
    )


@pytest.fixture
def service(environment: dict[str, str], empty: Path) -> Iterator[str]:
    """The address of `lathe-jobs serve`, started in the empty folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with (empty / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jobs", "serve", "-sb", "base", "--port", port],
            cwd=empty,
            env=environment,
            stdout=log,
            stderr=log,
        )
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return urllib.request.urlopen(f"{address}/healthz", timeout=5).status == 200
        except OSError:
            assert server.poll() is None, (empty / "log").read_text()
            return False

    wait_until(answers, bool)
    yield address
    server.send_signal(signal.SIGTERM)
    server.wait(30)


def test_the_service_trains_in_an_empty_folder(service: str, site: Path, empty: Path) -> None:
    from openai import OpenAI

    here = OpenAI(base_url=f"{service}/v1", api_key="none", max_retries=0)
    content = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    file = here.files.create(file=("rows.jsonl", content), purpose="fine-tune")
    sent = here.fine_tuning.jobs.create(
        model="tiny-chat", training_file=file.id, hyperparameters={"n_epochs": 1}
    )
    job = wait_until(
        lambda: here.fine_tuning.jobs.retrieve(sent.id),
        lambda job: job.status in ("succeeded", "failed", "cancelled"),
        within_s=300,
    )
    assert job.status == "succeeded", (job.error, (empty / "log").read_text())
    digest = snapshot_of(empty / "base", site)
    print(f"SHOW wheel: the service in an empty folder: {job.id} {job.status}, code {digest[:12]}")
