"""`make demo`: what it needs, that it goes on after a kill, and how well it reads at the end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from exp_configs import EXP_GROUPS
from tests import forked
from tests.wording import says
from trainer.config.groups import vary
from trainer.config.identity import exp_id
from trainer.demo.__main__ import NEXT
from trainer.demo.talk import NUM_QUESTIONS
from trainer.errors import EXIT_BAD_INPUT, EXIT_OK

DEMO = ("-m", "trainer.demo")
# What extras bring, and what these bring: a demo whose machine has none of it must not miss it.
EXTRAS = ("matplotlib", "nltk", "pandas", "peft", "rouge_score", "scipy", "sklearn", "wandb")
SEEDS = (0, 1, 2)
PATIENCE_S = 1200  # of a training of two minutes, on a busy machine


def folder_of(savedir: Path, seed: int) -> Path:
    return savedir / exp_id(vary(EXP_GROUPS["demo"][0], train={"seed": seed}))


def steps_of(folder: Path) -> list[int]:
    """The steps that a run has written about."""
    lines = folder / "metrics.jsonl"
    if not lines.is_file():
        return []
    return [json.loads(line)["step"] for line in lines.read_text().splitlines() if line[-1] == "}"]


@contextlib.contextmanager
def started(savedir: Path, cache: Path, seed: int, bare: Path) -> Iterator[subprocess.Popen[str]]:
    """The demo as `make demo` starts it, where no extra is installed; it ends with the block."""
    bare.mkdir(exist_ok=True)
    lines = "\n".join(f"sys.modules[{name!r}] = None" for name in EXTRAS)
    (bare / "sitecustomize.py").write_text(f"import sys\n{lines}\n")
    environment = {**os.environ, "PYTHONPATH": f"{bare}{os.pathsep}{forked.ROOT}"}
    environment |= {"OMP_NUM_THREADS": "2"}
    where = ["-sb", str(savedir), "--cache_dir", str(cache), "--seed", str(seed)]
    process = subprocess.Popen(
        [sys.executable, *DEMO, *where],
        cwd=forked.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def text_of(savedir: Path, cache: Path, seed: int, bare: Path) -> str:
    """What the demo says until it ends."""
    with started(savedir, cache, seed, bare) as process:
        text, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == EXIT_OK, text
    return text


@pytest.mark.long
@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_demo_reads_after_two_minutes_of_training(seed: int, tmp_path: Path) -> None:
    savedir, cache, bare = (tmp_path / name for name in ("results", "cache", "bare"))
    folder = folder_of(savedir, seed)
    before: list[int] = []
    if seed == SEEDS[0]:  # one of them is killed on the way, and goes on
        until = time.monotonic() + PATIENCE_S
        with started(savedir, cache, seed, bare) as killed:
            while max(steps_of(folder), default=0) < 140 and killed.poll() is None:
                assert time.monotonic() < until, "no step 140"
                time.sleep(0.2)
        before = steps_of(folder)
        assert before
    said = text_of(savedir, cache, seed, bare)
    assert NEXT in said, said
    (of_context, of_nothing) = re.findall(
        rf"^right +(\d+) of {NUM_QUESTIONS} +(\d+) of", said, re.M
    )[0]
    assert int(of_context) >= 8, said
    assert int(of_nothing) <= 2, said
    (untrained,) = re.findall(rf"Before the training (\d+) of {NUM_QUESTIONS}", said)
    assert int(untrained) <= 2, said
    steps = steps_of(folder)
    assert steps[: len(before)] == before
    assert 1 not in steps[len(before) :] or not before, "it began anew"
    again = text_of(savedir, cache, seed, bare)
    assert again[again.index(f"{NUM_QUESTIONS} questions") :] in said
    assert steps_of(folder) == steps, "it trained again"


def test_the_demo_refuses_a_file_for_its_folder_of_runs(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("")
    ended = forked.run(*DEMO, "-sb", "results", cwd=tmp_path)
    assert ended.returncode == EXIT_BAD_INPUT, ended.stdout + ended.stderr
    says("file_unwritable", ended.stderr, at="results/demo_rows", reason="Not a directory")
    assert "Traceback" not in ended.stderr + ended.stdout


def test_the_demo_knows_no_seed_below_0(tmp_path: Path) -> None:
    ended = forked.run(*DEMO, "--seed", "-1", cwd=tmp_path)
    assert ended.returncode == EXIT_BAD_INPUT
    assert "--seed" in ended.stderr
