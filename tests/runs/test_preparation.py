"""`python -m trainer prepare`, and runs that read what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from filelock import FileLock

from tests.facts import experiment, write_facts
from tests.forked import TRAINER, TRAINVAL, run, run_ranks
from tests.wording import says


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


def flags(groups: Path, data_path: Path, *more: str) -> list[str]:
    return [
        "--exp_configs",
        str(groups),
        "--data_path",
        str(data_path),
        "--cache_dir",
        str(groups.parent / "c"),
        *more,
    ]


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
    words = flags(groups, folder, "--out", str(out), "--shard_tokens", "500")
    made, other = run_ranks(2, *TRAINER, "prepare", "-e", "cached", *words)
    assert (made.returncode, other.returncode) == (0, 0), made.stderr + other.stderr
    assert "distinct contexts of" in made.stdout
    assert "bytes per element" in made.stdout
    for group, data_path in (("online", folder), ("cached", out)):
        done = run(*TRAINVAL, *flags(groups, data_path, "-e", group, "-sb", str(folder / group)))
        assert done.returncode == 0, done.stderr
    online, cached = losses(folder / "online"), losses(folder / "cached")
    assert len(online) == 6 + 2
    assert cached == pytest.approx(online, rel=1e-5)


def test_a_cached_run_without_states_exits_with_the_command_that_makes_them(
    folder: Path, groups: Path
) -> None:
    done = run(*TRAINVAL, *flags(groups, folder, "-e", "cached", "-sb", str(folder / "bad")))
    assert done.returncode == 2
    says("states_absent", done.stderr)
    assert "Traceback" not in done.stderr


def test_a_folder_is_prepared_by_one_process_at_a_time(folder: Path, groups: Path) -> None:
    with FileLock(folder / ".busy.lock"):
        done = run(
            *TRAINER,
            "prepare",
            "-e",
            "cached",
            *flags(groups, folder, "--out", str(folder / "busy")),
        )
    assert done.returncode == 2, done.stderr
    says("states_being_prepared", done.stderr)
    assert not (folder / "busy").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nq", "--source nq: want NAME=FOLDER_OR_HUB_ID"),
        ("natural=x", "--source natural: no such set."),
    ],
)
def test_a_wrong_source_is_one_message(
    folder: Path, groups: Path, source: str, message: str
) -> None:
    words = flags(groups, folder, "--out", str(folder / "wrong"), "--source", source)
    done = run(*TRAINER, "prepare", "-e", "cached", *words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
