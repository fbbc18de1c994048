"""Submitting for real: a queue of one's own, and a `python` that acts like a training in
milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
from typer.testing import CliRunner

from jobs.cli import app
from tests.jobs.stored_code import lay_code_into
from trainer.runtime.process import birth

GROUPS = """
from exp_configs import EXP_GROUPS as BUILT_IN, vary

EXP_GROUPS = {
    "sweep": [vary(BUILT_IN["causal_lm_tiny"][0], train={"seed": seed}) for seed in range(COUNT)],
}
"""

# What a training leaves behind, in 30 ms: one line in `starts` each time it begins, then what STUB
# says: an exit code, "sleep" (until SIGTERM, then 75), "stubborn" (until SIGKILL) or "ok".
STUB = """#!{python} -S
import json, os, signal, sys, time
flags = dict(word[2:].split("=", 1) for word in sys.argv[2:] if word.startswith("--") and "=" in word)
folder = os.path.join(flags["savedir_base"], flags["exp_id"])
values = json.load(open(os.path.join(folder, "exp_dict.json")))
with open(os.path.join(flags["savedir_base"], "starts"), "a") as file:
    file.write(flags["exp_id"] + " " + os.environ.get("LATHE_JOB_ID", os.environ.get("SLURM_JOB_ID", "-")) + "\\n")
print("training with", sys.argv[1:])
print("a warning", file=sys.stderr)
what = open({what!r}).read().strip()
stop = []
if what == "sleep":
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    while not stop:
        time.sleep(0.02)
    sys.exit(75)
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
if what != "ok":
    sys.exit(int(what))
with open(os.path.join(folder, "metrics.jsonl"), "w") as file:
    file.write(json.dumps({{"step": 1, "loss": float(values["train"]["seed"])}}) + "\\n")
os.makedirs(os.path.join(folder, "final"), exist_ok=True)
with open(os.path.join(folder, "final", "config.json"), "w") as file:
    json.dump({{}}, file)
with open(os.path.join(folder, "status.json"), "w") as file:
    json.dump({{"state": "succeeded", "step": 1, "total": 1}}, file)
"""


T = TypeVar("T")


def wait_until(look: Callable[[], T], is_so: Callable[[T], bool], *, within_s: float = 120) -> T:
    """What `look()` returns as soon as `is_so` holds of it; fails after `within_s`."""
    deadline = time.monotonic() + within_s
    while not is_so(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


@dataclass
class Outcome:
    """What a command said."""

    code: int
    out: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Place:
    """A savedir_base, a group of experiments, and a stand-in for the training."""

    base: Path
    groups: Path
    python: Path
    what: Path

    def says(self, text: str) -> None:
        """What the training does from now on."""
        self.what.write_text(text)

    def lathe(self, *words: str) -> Outcome:
        """Run `lathe-jobs WORDS` in this process."""
        done = CliRunner().invoke(app, list(words))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Outcome(done.exit_code, done.stdout if "--json" in words else done.output)

    def submit(self, *words: str, backend: str = "local") -> Outcome:
        """Submit the group `sweep`."""
        common = [
            "-e",
            "sweep",
            "-sb",
            str(self.base),
            "-j",
            backend,
            "--exp_configs",
            str(self.groups),
        ]
        return self.lathe(
            "submit", *common, "--python_binary", str(self.python), "--allow-dirty", *words
        )

    def status(self) -> list[dict[str, Any]]:
        """Rows of `status --json`, by id."""
        return self.lathe("status", "-sb", str(self.base), "--json").json

    def starts(self) -> list[str]:
        """The ids of the experiments in the order in which their trainings began."""
        path = self.base / "starts"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    def until(
        self, is_so: Callable[[list[dict[str, Any]]], bool], *, within_s: float = 120
    ) -> list[dict[str, Any]]:
        """Rows as soon as `is_so(rows)`; fails after `within_s`, with the states and the logs of the
        queue.
        """
        try:
            return wait_until(self.status, is_so, within_s=within_s)
        except AssertionError:
            queue = self.base.parent / "queue"
            seen = [(row["exp_id"], row["state"], row["reason"]) for row in self.status()]
            logs = [path.read_text() for path in sorted(queue.rglob("*.log"))]
            pytest.fail("\n".join(map(str, [*seen, *logs])))

    def until_all(self, *states: str, within_s: float = 120) -> list[dict[str, Any]]:
        """Rows as soon as every one is in one of `states`."""
        return self.until(
            lambda rows: all(row["state"] in states for row in rows), within_s=within_s
        )


class Make(Protocol):
    """How tests get a Place."""

    def __call__(self, count: int, *, is_base_there: bool = True) -> Place: ...


@pytest.fixture
def place(tmp_path: Path, queue: Path) -> Make:
    """Makes a Place with so many experiments. Its savedir_base holds the code of the project already,
    unless it is not to be there.
    """

    def make(count: int, *, is_base_there: bool = True) -> Place:
        groups, python, what = (
            tmp_path / "groups.py",
            tmp_path / "bin" / "python",
            tmp_path / "what",
        )
        groups.write_text(GROUPS.replace("COUNT", str(count)))
        python.parent.mkdir()
        python.write_text(STUB.format(python=sys.executable, what=str(what)))
        python.chmod(0o755)
        what.write_text("ok")
        if is_base_there:
            lay_code_into(tmp_path / "base")
        return Place(tmp_path / "base", groups, python, what)

    return make


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A local queue that belongs to this test: four cores, no GPU; whatever it started is stopped
    afterwards.
    """
    folder = tmp_path / "queue"
    monkeypatch.setenv("LATHE_QUEUE", str(folder))
    monkeypatch.setenv("LATHE_QUEUE_CPUS", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield folder
    for path in folder.glob("jobs/*/started.json"):
        facts = json.loads(path.read_text())
        if birth(facts["pid"]) == facts["birth"]:
            os.killpg(facts["pid"], signal.SIGKILL)
    for path in folder.glob("jobs/*"):
        (path / "cancel").touch()  # the runner ends by itself when nothing is left
