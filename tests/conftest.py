"""What holds for every test: one thread each, a fair share of the tests for each worker, and no
process left behind.

Two ranks on two cores must not fight, and results must not depend on how many cores a machine has.
"""

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Every process that this one starts, and every process that those start, carries this in its
# environment.
MARK = ("LATHE_TESTS_OF", f"{os.getpid()}-{time.time_ns()}")
os.environ[MARK[0]] = MARK[1]

# Folders in the order in which they start: what takes long comes first, so that no worker is left
# with it alone.
SLOW_FIRST = ("numerics", "contract", "runs", "jobs", "parity", "gpu", "unit")
LEAVE_S = 30.0  # what has been told to end may take so long on a busy machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests stay in one process under pytest-xdist, and begin with the slow ones."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=lambda item: _place(item.path.parent.name))


def _group(item: pytest.Item) -> str:
    """Tests of one file share what is dear to set up; the contract's share the runs of a task; a
    Slurm stands alone.
    """
    if (
        item.path.parent.name == "contract"
        and isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
    ):
        return f"contract of {item.callspec.params.get('name', item.path.name)}"
    return "slurm" if "slurm" in item.nodeid else item.path.name


def _place(folder: str) -> int:
    return SLOW_FIRST.index(folder) if folder in SLOW_FIRST else len(SLOW_FIRST)


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After the last test of this worker: a process that a test started and nobody ended is named,
    ended, a failure.
    """
    base = tmp_path_factory.getbasetemp()
    yield
    deadline = time.monotonic() + LEAVE_S
    while (left := _left_behind(base)) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = [
        f"{process.pid}: {' '.join(process.cmdline())[:200]}"
        for process in left
        if process.is_running()
    ]
    for process in left:
        process.kill()
    assert not names, f"processes that the tests left behind after {LEAVE_S:.0f} s:\n" + "\n".join(
        names
    )


def _left_behind(base: Path) -> list[psutil.Process]:
    """Living processes that carry this worker's mark, or work in its folder of temporary files."""
    served = {os.getpid(), multiprocessing.forkserver._forkserver._forkserver_pid}  # pyright: ignore
    served |= {multiprocessing.resource_tracker._resource_tracker._pid}  # pyright: ignore
    return [
        process
        for process in psutil.process_iter()
        if process.pid not in served and _is_ours(process, base)
    ]


def _is_ours(process: psutil.Process, base: Path) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.environ().get(MARK[0]) == MARK[1] or Path(process.cwd()).is_relative_to(base)
    except psutil.Error:  # it ended meanwhile, or belongs to somebody else
        return False
