"""`python -m trainer verify`: a good run, one that was meddled with, one that changed its ranks; and
files of a run folder that are damaged.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.facts import experiment, with_dropout, write_facts
from tests.forked import TRAINER, TRAINVAL, run, run_ranks
from tests.runs.test_commands import lines
from tests.runs.test_features import Launcher
from tests.wording import says
from trainer.switches import CPU_KERNELS, CPU_KERNELS_VERSION

STEPS = 8


def _die_at(step: int) -> None:
    """From now on this process kills itself as it begins its `step`-th step, once what it saves is
    written.
    """
    from trainer.runtime import beside
    from trainer.training import loop

    train_step, begun = loop.train_step, []

    def dying(*args: Any, **how: Any) -> Any:
        begun.append(1)
        if len(begun) == step:
            for thread in threading.enumerate():
                if thread.name == beside.NAME:
                    thread.join()
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(*args, **how)

    loop.train_step = dying


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def _values(folder: Path) -> dict[str, Any]:
    train = {"steps": STEPS, "log_every": 1, "eval_every": 4, "save_every": 3, "keep_last": 3}
    schedule = {"shape": "reduce_on_plateau", "patience": 0, "warmup_steps": 1}
    return with_dropout(experiment("causal_lm", folder, train=train, schedule=schedule))


def _argv(folder: Path, root: Path) -> list[str]:
    launcher = Launcher(folder, root, mine=[_values(folder)])
    return [*TRAINVAL, *launcher._flags, "-sb", str(launcher.savedir), "-e", "mine"]


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run that nothing disturbed."""
    root = tmp_path_factory.mktemp("run")
    done = run(*_argv(folder, root))
    assert done.returncode == 0, done.stderr
    (found,) = (root / "out").glob("[0-9a-f]*")
    return found


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to meddle with."""
    target = tmp_path / "out" / trained.name
    shutil.copytree(trained, target)
    return target


def verify(run_folder: Path, data: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    argv = (str(run_folder), "--data_path", str(data), "--cache_dir", str(data / "cache"), *flags)
    return run(*TRAINER, "verify", *argv)


def test_a_good_run_verifies_and_any_stretch_of_it_comes_out_again(
    folder: Path, trained: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    for start, steps, agreed in ((None, 1, 2), (4, 4, 4), (0, 8, 8)):
        flags = ["--replay", str(steps)] + ([] if start is None else ["--from", str(start)])
        done = verify(trained, folder, *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        if start is not None:
            assert f"steps {start + 1} to {start + steps}: {agreed} proof(s) agree" in done.stdout
    assert "steps 1 to 8: 1 rank(s)" in done.stdout
    after = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    assert after == before, "nothing is written to the run"


def test_a_replay_computes_by_the_kernels_of_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without the kernels that are the default was refused, with the name of a folder that
    was gone.
    """
    monkeypatch.setenv(CPU_KERNELS, "0")
    done = run(*_argv(folder, tmp_path))
    assert done.returncode == 0, done.stderr
    monkeypatch.delenv(CPU_KERNELS)
    (trained,) = (tmp_path / "out").glob("[0-9a-f]*")
    done = verify(trained, folder, "--replay", "4", "--from", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps 5 to 8: 4 proof(s) agree" in done.stdout


def _flip(content: list[bytes]) -> list[bytes]:
    """One bit of a digit of the loss of step 3."""
    (at,) = [n for n, line in enumerate(content) if line.startswith(b'{"step": 3, "loss"')]
    line = bytearray(content[at])
    line[line.index(b"loss") + 10] ^= 1
    return [*content[:at], bytes(line), *content[at + 1 :]]


MEDDLED: dict[str, tuple[Any, str]] = {
    "a bit": (_flip, "was changed, or lines before it are lost"),
    "a line lost": (lambda lines: lines[:3] + lines[4:], "line 4 was changed, or lines before it"),
    "a line doubled": (lambda lines: [*lines[:3], lines[2], *lines[3:]], "line 4 stands there twi"),
    "garbage": (lambda lines: [*lines[:3], b"\x00\x01\n", *lines[3:]], "line 4 is no line of a"),
}


@pytest.mark.parametrize("how", MEDDLED)
def test_a_line_that_was_meddled_with_is_named(how: str, folder: Path, copy: Path) -> None:
    """By verify; and by a resume, which drops what is none or stands there twice."""
    meddle, text = MEDDLED[how]
    path = copy / "metrics.jsonl"
    original = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(meddle(original)))
    done = verify(copy, folder)
    assert (done.returncode, text in done.stderr) == (1, True), done.stderr
    (copy / "status.json").write_text("[]")
    resumed = run(*_argv(folder, copy.parent.parent))
    assert resumed.returncode == 0, resumed.stderr
    assert text in " ".join((resumed.stdout + resumed.stderr).split())
    if how in ("a line doubled", "garbage"):
        assert path.read_bytes() == b"".join(original)


def test_a_replay_names_the_first_step_that_differs_and_what_is_known(
    folder: Path, copy: Path
) -> None:
    path = copy / "metrics.jsonl"
    content = path.read_text().splitlines()
    for at, line in enumerate(content):
        entry = json.loads(line)
        if entry["step"] >= 6 and "proof" in entry:  # as if another machine had gone on from there
            entry["loss"], entry["proof"] = entry["loss"] + 1e-6, f"{'0' * 16}/1"
        content[at] = json.dumps(entry)
    path.write_text("\n".join(content) + "\n")
    done = verify(copy, folder, "--replay", "4", "--from", "4")
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert "step 6 comes out otherwise (5 is the last that does not). loss was " in said
    assert "versions and device are those of the checkpoint" in said


def _die_with_earlier_kernels() -> None:
    from trainer.training import checkpoint

    checkpoint.CPU_KERNELS_VERSION = 1
    _die_at(6)


def test_a_run_that_goes_on_with_other_ranks_says_so_and_is_replayed_with_those(
    folder: Path, tmp_path: Path
) -> None:
    """So it does of other kernels of a processor: nothing was said of their last bits."""
    argv = _argv(folder, tmp_path)
    killed = run(*argv, first=_die_with_earlier_kernels)
    assert killed.returncode == -signal.SIGKILL
    resumed = run_ranks(2, *argv)
    assert [done.returncode for done in resumed] == [0, 0]
    said = " ".join((resumed[0].stdout + resumed[0].stderr).split())
    assert f"cpu_kernels was 1, is {CPU_KERNELS_VERSION}. The run goes on" in said
    (found,) = (tmp_path / "out").glob("[0-9a-f]*")
    said = verify(found, folder).stdout
    assert "steps 1 to 4: 1 rank(s)" in said
    assert "steps 5 to 8: 2 rank(s)" in said
    begun = verify(found, folder, "--replay", "9", "--from", "0")
    assert "steps 1 to 4: 4 proof(s) agree" in begun.stdout, begun.stdout + begun.stderr
    refused = verify(found, folder, "--replay", "2", "--from", "6")
    assert refused.returncode == 2
    says("replay_absent", refused.stderr, world=1, step=6)
    flags = ["--data_path", str(folder), "--cache_dir", str(folder / "cache")]
    both = run_ranks(2, *TRAINER, "verify", str(found), *flags, "--replay", "2", "--from", "6")
    assert [done.returncode for done in both] == [0, 0], both[0].stderr
    assert "steps 7 to 8: 2 proof(s) agree" in both[0].stdout


@pytest.mark.parametrize("content", ["{", "null", "[3]"])
def test_what_can_be_made_again_is_with_a_word(
    content: str, folder: Path, trained: Path, copy: Path
) -> None:
    """And a run that says it succeeded is not believed without final/."""
    names = ("exp_dict.json", "data.json", "score_list.json")
    for name in names:
        (copy / name).write_text(content)
    shutil.rmtree(copy / "final")
    resumed = run(*_argv(folder, copy.parent.parent))
    assert resumed.returncode == 0, resumed.stderr
    said = " ".join((resumed.stdout + resumed.stderr).split())
    for name in names:
        assert f"/{name}: " in said.replace(" ", "").replace(":", ": "), name
        assert (copy / name).read_bytes() == (trained / name).read_bytes(), name
    assert lines(copy.parent) == lines(trained.parent)
    weights = ("final", "model.safetensors")
    assert copy.joinpath(*weights).read_bytes() == trained.joinpath(*weights).read_bytes()


def test_a_folder_without_a_run_is_refused(folder: Path, tmp_path: Path) -> None:
    done = verify(tmp_path, folder)
    assert done.returncode == 2
    assert "metrics.jsonl: No such file" in done.stderr
