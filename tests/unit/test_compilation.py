"""A kernel is compiled by one process at a time, which says so, and a killed one blocks nobody."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.files import compilation
from trainer.files.compilation import compiling


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch builds the extension `kernel`."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path / "kernel"


def test_a_compile_is_said_once_and_what_is_compiled_already_is_not(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with compiling("kernel", "a kernel, once, in about 4 minutes"):
        (folder / "kernel.so").write_text("")
    with compiling("kernel", "a kernel, once, in about 4 minutes"):
        pass
    own = [record for record in caplog.records if record.name.startswith("trainer.")]
    (said,) = [record.getMessage() for record in own]
    assert said == f"compiling a kernel, once, in about 4 minutes (in {folder})"


def test_the_lock_of_a_killed_compile_is_removed_and_that_of_a_living_one_is_not(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    lock = folder / "lock"
    lock.touch()
    worker = subprocess.Popen(
        [sys.executable, "-c", "input()"], cwd=folder, stdin=subprocess.PIPE, text=True
    )
    try:
        while not compilation._is_worked_in(folder):  # it is being started
            time.sleep(0.01)
        with compiling("kernel", "a kernel"):
            assert lock.exists(), "ninja runs in this folder: its lock is no stale one"
    finally:
        worker.communicate("\n")
    with compiling("kernel", "a kernel"):
        assert not lock.exists()
    assert "killed while it compiled; removed" in caplog.text


@pytest.mark.long
def test_two_processes_do_not_compile_at_once(folder: Path) -> None:
    code = (
        "import time\n"
        "from trainer.files.compilation import compiling\n"
        "with compiling('kernel', 'a kernel'):\n"
        "    print('in', flush=True)\n"
        "    input()\n"
    )
    root = Path(__file__).resolve().parents[2]
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "in\n"
    lock = compilation.FileLock(folder.with_name("kernel.lathe.lock"))
    with pytest.raises(compilation.Timeout):
        lock.acquire(timeout=0)
    other.communicate("\n")
    lock.acquire(timeout=60)
    lock.release()
