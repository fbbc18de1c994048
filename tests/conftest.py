"""What holds for every test: one thread each, a fair share of the tests for each worker, and no
process left behind.

Two ranks on two cores must not fight, and results must not depend on how many cores a machine has.
"""

import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LATHE_EXAMINE", "off")  # 2 CPU seconds of every run with a new cache
if shutil.which("nvidia-smi") is None:  # before anything imports Triton, which looks once
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("LATHE_LIGER", "0")  # a pretended GPU would ask the interpreter

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# Every process that this one starts, and every process that those start, carries this in its
# environment.
MARK = ("LATHE_TESTS_OF", f"{os.getpid()}-{time.time_ns()}")
os.environ[MARK[0]] = MARK[1]

# Folders in the order in which they start: what takes long comes first, so that no worker is left
# with it alone.
SLOW_FIRST = ("numerics", "contract", "runs", "jobs", "parity", "gpu", "unit")
TASKS = {path.parent.name for path in Path(__file__).parent.parent.glob("trainer/tasks/*/task.py")}
LEAVE_S = 30.0  # what has been told to end may take so long on a busy machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow ones."""
    items.sort(key=lambda item: _place(item.path.parent.name))


def pytest_collection_finish() -> None:
    """Look for garbage seldom, and not among all that was imported: a tenth of the time of quick
    tests. Those that need it to be gone collect it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Name a failed test when it fails: a run that is cut off has said what it saw. What tests print
    in lines that begin with SHOW stands at the end.
    """
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Reports(terminal))


class _Reports:
    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal
        self._shown: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(crash.message if crash else report.longrepr).strip().partition("\n")[0]
            self._terminal.write_line(f"\n{report.when} failed: {report.nodeid}: {reason}")
        if report.when == "call":
            lines = report.capstdout.splitlines()
            self._shown += [line for line in lines if line.startswith("SHOW ")]

    def pytest_terminal_summary(self) -> None:
        for line in self._shown:
            self._terminal.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under pytest-xdist a worker gets a group of tests at a time, and each group goes to one.

    The marker xdist_group would say the same, but pytest 9.2 does not see what pytest-xdist 3.8
    makes of it: every test is then a group of its own, and both workers set up what a file shares.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

        def _reschedule(self, node: Any) -> None:
            """A worker runs its last test once it knows what follows. xdist 3.8 forgets to tell one
            that replaces a dead one, which then waits for ever.
            """
            while node in self.registered_collections:
                super()._reschedule(node)
                if node.shutting_down or self._pending_of(self.assigned_work[node]) > 1:
                    return

    return Groups(config, log)


def group(nodeid: str) -> str:
    """Tests of one file share what is dear to set up; the contract's share the runs of a task; one
    Slurm at a time is enough.
    """
    file, _, name = nodeid.partition("::")
    if "/contract/" in file:
        task = TASKS & set(name.partition("[")[2].rstrip("]").split("-"))
        return f"contract of {min(task)}" if task else file
    return "slurm" if "/jobs/" in file and "slurm" in nodeid else file


def _place(folder: str) -> int:
    return SLOW_FIRST.index(folder) if folder in SLOW_FIRST else len(SLOW_FIRST)


@pytest.fixture(autouse=True)
def no_test_depends_on_another() -> Iterator[None]:
    """A test that draws without a seed of its own draws the same, alone and after any other; and
    none leaves a process group to the next, whose command would end this process with it.
    """
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)  # torch.manual_seed() takes a millisecond
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    yield
    if dist := sys.modules.get("torch.distributed"):
        has_group = dist.is_available() and dist.is_initialized()
        if has_group:
            dist.destroy_process_group()
        assert not has_group, "this test left a process group behind"


@pytest.fixture(scope="session", autouse=True)
def steps_are_measured_without_importing_again() -> Iterator[None]:
    """Five CPU seconds less for each process; trainval.py starts a real one in its tests."""
    from trainer.plan.memory import measure

    def started(said: Any) -> Any:
        from tests.forked import Measurer

        return Measurer(said)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_start", started)
        yield


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
        # wandb 0.31 keeps one service for a process that opened a run, until that process ends.
        if process.name() == "wandb-core" and str(os.getpid()) in process.cmdline():
            return False
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.environ().get(MARK[0]) == MARK[1] or Path(process.cwd()).is_relative_to(base)
    except psutil.Error:  # it ended meanwhile, or belongs to somebody else
        return False
