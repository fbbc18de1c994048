"""Run folders that older code began and did not finish: today's code goes on with them.

tests/fixtures/older_runs/ holds them as archives, with the numbers that the older code itself gave
in runs that nothing interrupted (made.json); make.py there has written both.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI

from tests.forked import ROOT, TRAINVAL, free_port, run, run_ranks
from tests.jobs.conftest import queue, wait_until
from tests.long import long_but

__all__ = ["queue"]

ARCHIVES = ROOT / "tests" / "fixtures" / "older_runs"
MADE = json.loads((ARCHIVES / "made.json").read_text())
MADE_WITH, RUNS = MADE["made_with"], MADE["runs"]
STARTED_BY_HAND = long_but(
    ("causal_lm_tiny",), [name for name, facts in RUNS.items() if "ranks" in facts]
)
# Another processor or another version rounds otherwise. A run from the first step, or with other
# rows, is further off in its first loss.
ROUNDING = 1e-5

pytestmark = pytest.mark.skipif(
    platform.python_version() != MADE_WITH["python"],
    reason="the embedded corpus is another one in every version of Python",
)


def vendor() -> str:
    """Who made this processor: libraries of matrices choose other loops for other makers."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("vendor_id")), "")


def rounds_as_then() -> bool:
    """Whether this machine gives the very bits of the one that made the archives."""
    here = {name: version(name) for name in ("torch", "transformers", "deepspeed")}
    here["vendor"] = vendor()
    here["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    here["threads"] = int(os.environ["OMP_NUM_THREADS"])
    return all(MADE_WITH[name] == value for name, value in here.items())


def unpack(name: str, base: Path) -> None:
    """Write the files of an archive into a savedir_base."""
    with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
        archive.extractall(base, filter="data")


def metrics(run_folder: Path) -> list[str]:
    return (run_folder / "metrics.jsonl").read_text().splitlines()


def lines_until(lines: list[str], step: int) -> list[str]:
    return [line for line in lines if json.loads(line)["step"] <= step]


def numbers(lines: list[str], key: str, *, behind: int) -> dict[str, float]:
    """What stands under `key` in the lines behind a step, by step."""
    found = [json.loads(line) for line in lines]
    return {str(line["step"]): line[key] for line in found if key in line and line["step"] > behind}


def weights(run_folder: Path) -> dict[str, str]:
    """The digest of each file of final weights."""
    final = run_folder / "final"
    return {
        str(path.relative_to(final)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(final.rglob("*.safetensors"))
    }


def assert_went_on(run_folder: Path, before: list[str], name: str) -> None:
    """The run resumed at its checkpoint, and ended with the numbers of the older code: to the last
    bit on the same kind of machine with the same versions, else to 1e-5 of each loss.

    before: the lines of metrics.jsonl in the archive. They hold the time at which each was written,
    so that a run that began anew would have other ones.
    """
    facts: dict[str, Any] = RUNS[name]
    step, after = facts["checkpoint"], metrics(run_folder)
    untouched = lines_until(before, step)
    assert untouched, "the archive holds steps before its checkpoint"
    # The evaluation that belongs to the checkpoint's step may have come after the save.
    assert after[: len(untouched)] == untouched, "the run began anew"
    assert json.loads((run_folder / "status.json").read_text())["state"] == "succeeded"
    losses = numbers(after, "loss", behind=step)
    valid_losses = numbers(after, "valid/loss", behind=step)
    if rounds_as_then():
        assert losses == facts["losses"]
        assert valid_losses == facts["valid_losses"]
        assert weights(run_folder) == facts["weights"]
    else:
        assert losses == pytest.approx(facts["losses"], rel=ROUNDING)
        assert valid_losses == pytest.approx(facts["valid_losses"], rel=ROUNDING)
        assert weights(run_folder).keys() == facts["weights"].keys()


@pytest.mark.parametrize("name", STARTED_BY_HAND)
def test_a_run_that_was_killed_under_older_code_goes_on_to_the_same_numbers(
    name: str, tmp_path: Path
) -> None:
    facts, base = RUNS[name], tmp_path / "out"
    unpack(name, base)
    folder = base / facts["exp_id"]
    before = metrics(folder)
    argv = [*TRAINVAL, "--exp_id", facts["exp_id"], "-sb", str(base)]
    argv += ["--cache_dir", str(tmp_path / "cache")]
    ranks = facts["ranks"]
    ended = [run(*argv)] if ranks == 1 else run_ranks(ranks, *argv)
    for done in ended:
        assert done.returncode == 0, done.stdout + done.stderr
    told = ended[0].stdout + ended[0].stderr
    assert f"step {facts['checkpoint'] + 1}/" in told
    assert "step 1/" not in told, "the run began anew"
    assert_went_on(folder, before, name)


# Jobs
# --------------------------------------------------------------------------------------------------


def unpack_job(name: str, base: Path, queue: Path) -> Path:
    """Write the files of a job, and the older code that it runs, into a savedir_base; the folder
    of its run. Where its files named a path of the machine that made them, they name ours now.
    """
    unpack(name, base)
    paths = {"@BASE@": base, "@PYTHON@": sys.executable, "@QUEUE@": queue, "@HOME@": base.parent}
    for path in base.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".txt") and not path.is_symlink():
            text = path.read_text()
            for placeholder, real in paths.items():
                text = text.replace(placeholder, str(real))
            path.write_text(text)
    unpack("code", base)
    return base / RUNS[name]["exp_id"]


def lathe_jobs(*words: str) -> str:
    """What `lathe-jobs WORDS` of today's code prints."""
    done = subprocess.run(
        [sys.executable, "-m", "jobs", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_for_second_attempt(base: Path, run_folder: Path) -> None:
    """Return once the second attempt of the one job has succeeded."""
    ended = run_folder / "attempts" / "2" / "exit.json"
    wait_until(ended.exists, bool, within_s=300)
    (row,) = json.loads(lathe_jobs("status", "-sb", str(base), "--json"))
    logs = (ended.parent / "logs.txt").read_text() + (ended.parent / "err.txt").read_text()
    assert (row["state"], row["attempts"]) == ("succeeded", 2), logs


@pytest.mark.long
def test_a_job_that_older_code_sent_is_retried_with_its_own_code(
    tmp_path: Path, queue: Path
) -> None:
    base = tmp_path / "base"
    folder = unpack_job("local_job", base, queue)
    before = metrics(folder)
    lathe_jobs("retry", folder.name, "-sb", str(base))
    wait_for_second_attempt(base, folder)
    assert (folder / "code").resolve().parent.name == RUNS["local_job"]["code"]
    assert_went_on(folder, before, "local_job")


@pytest.mark.long
def test_a_job_that_older_code_sent_is_submitted_again_with_todays_code(
    tmp_path: Path, queue: Path
) -> None:
    base, groups = tmp_path / "base", tmp_path / "groups.py"
    folder = unpack_job("local_job", base, queue)
    before = metrics(folder)
    values = json.loads((folder / "exp_dict.json").read_text())
    groups.write_text(f"EXP_GROUPS = {{'tiny': [{values!r}]}}\n")
    words = ["-e", "tiny", "--exp_configs", str(groups), "-sb", str(base), "-j", "local"]
    words += ["--retry", "failed", "--allow-dirty", "--", "--cache_dir", str(base / "cache")]
    lathe_jobs("submit", *words)
    wait_for_second_attempt(base, folder)
    assert (folder / "code").resolve().parent.name != RUNS["local_job"]["code"]
    assert_went_on(folder, before, "local_job")


@contextlib.contextmanager
def serving(base: Path) -> Iterator[OpenAI]:
    """A client of today's service over a savedir_base."""
    port = free_port()
    words = ["-m", "jobs", "serve", "-sb", str(base), "--port", str(port), "--every_s", "0.2"]
    server = subprocess.Popen([sys.executable, *words], cwd=ROOT)
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)

    def is_up() -> bool:
        with contextlib.suppress(openai.APIConnectionError):
            return bool(client.models.list().data)
        return False

    try:
        wait_until(is_up, bool)
        yield client
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.long
def test_a_job_that_was_paused_under_an_older_service_goes_on_under_todays(
    tmp_path: Path, queue: Path
) -> None:
    base, facts = tmp_path / "base", RUNS["service_job"]
    folder = unpack_job("service_job", base, queue)
    before = metrics(folder)
    with serving(base) as client:
        jobs = client.fine_tuning.jobs
        (job,) = jobs.list().data
        assert (job.id, job.status) == (facts["job"], "queued")
        assert job.model_dump()["lathe"]["is_paused"]
        assert jobs.resume(job.id).id == job.id
        wait_until(
            lambda: jobs.retrieve(job.id).status, lambda status: status != "queued", within_s=60
        )
        ended = ("succeeded", "failed", "cancelled")
        status = wait_until(
            lambda: jobs.retrieve(job.id).status, lambda status: status in ended, within_s=300
        )
        told = list(jobs.list_events(job.id, limit=1000))
        assert status == "succeeded", told
        steps = [event.data["step"] for event in told if "train_loss" in (event.data or {})]
    assert sorted(steps) == list(range(1, facts["steps"] + 1)), "each step is told once"
    assert_went_on(folder, before, "service_job")
