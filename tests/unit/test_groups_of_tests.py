"""How the tests are run: which stay in one process, and what becomes of processes that die."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import group
from tests.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = "tests/contract/test_task_contract.py::test_stages_ranks_and_accumulation_agree"
FEATURES = "tests/contract/test_task_features.py::test_a_run_resumed_on_another_number_of_ranks"


@pytest.mark.parametrize(
    ("one", "other", "is_together"),
    [
        (f"{CONTRACT}[fid]", f"{FEATURES}[fid-2-1]", True),
        (f"{CONTRACT}[fid]", f"{CONTRACT}[vera]", False),
        ("tests/unit/test_rng.py::test_a", "tests/unit/test_rng.py::test_b[fid]", True),
        ("tests/unit/test_rng.py::test_a", "tests/unit/test_token_store.py::test_a", False),
        ("tests/jobs/test_slurm.py::test_a", "tests/jobs/test_chaos.py::test_on_slurm[x]", True),
        ("tests/jobs/test_local.py::test_a", "tests/jobs/test_chaos.py::test_on_slurm[x]", False),
    ],
)
def test_tests_that_share_what_is_dear_stay_together(
    one: str, other: str, is_together: bool
) -> None:
    assert (group(one) == group(other)) is is_together


DIES_ONCE = """
import os, pathlib, time
died = pathlib.Path(__file__).with_name("died")
def test_first():
    time.sleep(0.5)
def test_last():
    if not died.exists():
        died.touch()
        os._exit(0)
"""


@pytest.mark.long
def test_a_worker_that_dies_is_a_failure_and_the_rest_of_the_tests_run(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    for number in range(12):
        (tmp_path / f"test_a{number}.py").write_text("def test_alone(): pass")
    (tmp_path / "test_b.py").write_text(DIES_ONCE)
    argv = ["-c", str(tmp_path / "pytest.ini"), "-p", "tests.conftest", "-n2", str(tmp_path)]
    # A folder of its own: pytest would otherwise delete what older runs left in the shared one, which
    # can be gigabytes.
    argv += ["--dist", "loadscope", "--basetemp", str(tmp_path / "temporary")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert "crashed while running 'test_b.py::test_last'" in done.stdout, done.stdout
    assert "1 failed, 14 passed" in done.stdout


def _dies() -> None:
    os._exit(7)


def test_a_rank_that_ends_without_a_word_is_a_failure_at_once() -> None:
    with pytest.raises(AssertionError, match=r"ranks ended without a result: \{0: 7\}"):
        run_on_ranks(1, _dies)


def test_no_two_files_of_tests_share_a_name() -> None:
    """pytest calls their modules alike, and a rank would import the other one."""
    files = Counter(path.name for path in (ROOT / "tests").glob("*/test_*.py"))
    assert [name for name, count in files.items() if count > 1] == []
