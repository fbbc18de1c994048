"""`python -m trainer prepare`, and runs that read what it wrote: real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.facts import experiment, write_facts

ROOT = Path(__file__).parent.parent.parent
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "trainer",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


@pytest.fixture(scope="module")
def groups(folder: Path) -> Path:
    data = {"state_dtype": "fp32", "include_context_ids": True}
    train = {"micro_tokens": 500, "bucket_steps": 2}
    online, cached = (
        [experiment("cross_attention", folder, data={**data, "encode": encode}, train=train)]
        for encode in ("online", "cached")
    )
    path = folder / "groups.py"
    path.write_text(f"EXP_GROUPS = {{'online': {online!r}, 'cached': {cached!r}}}\n")
    return path


def run(
    argv: list[str], groups: Path, data_path: Path, *flags: str
) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    given = [
        "--exp_configs",
        str(groups),
        "--data_path",
        str(data_path),
        "--cache_dir",
        str(groups.parent / "c"),
        *flags,
    ]
    return subprocess.run(
        [*argv, *given],
        env={**inherited, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )


def losses(savedir: Path) -> list[float]:
    (path,) = savedir.glob("[0-9a-f]*/metrics.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["loss"] for line in found if "loss" in line] + [
        line["valid/loss"] for line in found if "valid/loss" in line
    ]


def test_a_run_on_states_that_two_ranks_prepared_has_the_losses_of_one_that_encodes(
    folder: Path, groups: Path
) -> None:
    out = folder / "prepared"
    made = run(
        [*TORCHRUN, "prepare", "-e", "cached"],
        groups,
        folder,
        "--out",
        str(out),
        "--shard_tokens",
        "500",
    )
    assert made.returncode == 0, made.stderr
    assert "distinct contexts of" in made.stdout
    assert "bytes per element" in made.stdout
    trainval = [sys.executable, str(ROOT / "trainval.py")]
    for group, data_path in (("online", folder), ("cached", out)):
        done = run([*trainval, "-e", group, "-sb", str(folder / group)], groups, data_path)
        assert done.returncode == 0, done.stderr
    online, cached = losses(folder / "online"), losses(folder / "cached")
    assert len(online) == 6 + 2
    assert cached == pytest.approx(online, rel=1e-5)


def test_a_cached_run_without_states_exits_with_the_command_that_makes_them(
    folder: Path, groups: Path
) -> None:
    done = run(
        [sys.executable, str(ROOT / "trainval.py"), "-e", "cached", "-sb", str(folder / "bad")],
        groups,
        folder,
    )
    assert done.returncode == 2
    assert "Run `python -m trainer prepare` with this group" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_is_prepared_by_one_process_at_a_time(folder: Path, groups: Path) -> None:
    with FileLock(folder / ".busy.lock"):
        done = run(
            [sys.executable, "-m", "trainer", "prepare", "-e", "cached"],
            groups,
            folder,
            "--out",
            str(folder / "busy"),
        )
    assert done.returncode == 2, done.stderr
    assert "another process is preparing it" in done.stderr
    assert not (folder / "busy").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--source", "nq"), "--source nq: want NAME=FOLDER_OR_HUB_ID"),
        (("--source", "natural=x"), "--source natural: no such set."),
    ],
)
def test_a_wrong_source_is_one_message(
    folder: Path, groups: Path, flags: tuple[str, ...], message: str
) -> None:
    argv = [sys.executable, "-m", "trainer", "prepare", "-e", "cached"]
    done = run(argv, groups, folder, "--out", str(folder / "wrong"), *flags)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
