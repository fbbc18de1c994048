"""A process that has the libraries loaded and runs pytest in a fork of itself for each request.

`python server.py FOLDER LIBRARY ...`. FOLDER is a copy of the project. One JSON object a line comes
in, {"arguments", "module", "timeout_s"}, and one goes out, {"code", "failures", "errors",
"seconds", "cpu_s"}. Nothing of the project is imported here, only in the forks, so that each of
them sees the files as they are when it begins.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import multiprocessing.util
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import psutil
from _pytest.config import default_plugins
from hypothesis import Phase

OURS = ("trainer", "jobs", "tests", "exp_configs", "job_configs", "trainval")
NOT_THE_TESTS = (
    ImportError,
    SyntaxError,
    NameError,
)  # a fault that does not even run shows nothing about the tests
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
POLL_S = 0.05


class Recorder:
    """A plugin of pytest that keeps what failed and how."""

    def __init__(self) -> None:
        self.failures: list[list[str]] = []  # name of the test, what it raised
        self.errors: list[list[str]] = []  # the same, of what went wrong before a test could judge

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.errors.append([report.nodeid, _last_line(str(report.longrepr))])

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        if report.when == "collect":
            return
        is_broken = isinstance(call.excinfo.value, NOT_THE_TESTS)
        text = f"{call.excinfo.typename}: {_first_line(str(call.excinfo.value))}"
        (self.errors if is_broken else self.failures).append([report.nodeid, text])


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2][:200]


def serve(folder: Path, libraries: Sequence[str]) -> None:
    """Answer requests until the input ends."""
    os.environ.setdefault(
        "DS_ACCELERATOR", "cpu"
    )  # as trainer/training/engine.py does before it imports deepspeed
    for name in (*libraries, *(f"_pytest.{name}" for name in default_plugins)):
        importlib.import_module(name)
    for plugin in importlib.metadata.entry_points(group="pytest11"):
        plugin.load()
    # a failing property is not made smaller, which takes minutes; and the same examples every time
    hypothesis.settings.register_profile(
        "mutants", derandomize=True, phases=(Phase.explicit, Phase.generate)
    )
    hypothesis.settings.load_profile("mutants")
    loaded = [name for name in sys.modules if name.partition(".")[0] in OURS]
    assert not loaded, f"{loaded} would be the same in every fork"
    assert len(list(Path("/proc/self/task").iterdir())) == 1, (
        "a fork has one thread only: other threads' locks stay"
    )
    ctypes.CDLL(None).prctl(
        PR_SET_CHILD_SUBREAPER, 1
    )  # whatever a test leaves behind is ours to end
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answered(folder, json.loads(line))), flush=True)


def _answered(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    result, output = folder.parent / "result.json", folder.parent / "output.txt"
    result.unlink(missing_ok=True)
    began, cpu_before = time.monotonic(), _cpu_s()
    child = os.fork()
    if child == 0:
        _become_pytest(folder, request, result, output)
    code = _waited(child, request["timeout_s"])
    _end_descendants()
    answer: dict[str, Any] = {"code": code, "failures": [], "errors": [], "output": str(output)}
    if result.exists():
        answer |= json.loads(result.read_text())
    elif code is None:
        answer["errors"] = [["", f"not done after {request['timeout_s']} s"]]
    else:
        answer["errors"] = [
            ["", f"pytest died with exit status {code}: {_last_line(output.read_text())}"]
        ]
    return answer | {"seconds": time.monotonic() - began, "cpu_s": _cpu_s() - cpu_before}


def _fork_quickly() -> None:
    """Let multiprocessing's fork server, from which tests start their ranks, be a fork of this
    process instead of a new one that would load all libraries again.

    The fork is made now, while nothing but libraries is loaded, and waits until it is asked for
    (CPython 3.10 to 3.13: ForkServer.ensure_running starts it by util.spawnv_passfds).
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    server = os.fork()
    if server == 0:
        ours.close()
        _become_fork_server(theirs)
    theirs.close()
    spawn = multiprocessing.util.spawnv_passfds

    def spawned(path: Any, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in str(arguments[-1]) or ours.fileno() < 0:
            return spawn(path, arguments, descriptors)
        request = {"code": arguments[-1], "descriptors": list(descriptors)}
        socket.send_fds(ours, [json.dumps(request).encode()], descriptors)
        ours.close()
        return server

    multiprocessing.util.spawnv_passfds = spawned


def _become_fork_server(theirs: socket.socket) -> None:
    message, received, _, _ = socket.recv_fds(theirs, 65536, 8)
    theirs.close()
    if message:
        request = json.loads(message)
        for descriptor, wanted in zip(received, request["descriptors"], strict=True):
            os.dup2(descriptor, wanted + 100)
            os.close(descriptor)
        for wanted in request["descriptors"]:
            os.dup2(wanted + 100, wanted)
            os.close(wanted + 100)
        exec(request["code"], {})
    os._exit(0)


def _become_pytest(folder: Path, request: dict[str, Any], result: Path, output: Path) -> None:
    """Run pytest in this process, write what came of it, and end."""
    import pytest

    code = 1
    try:
        os.setsid()
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, target in ((nothing, 0), (descriptor, 1), (descriptor, 2)):
            os.dup2(number, target)
        os.chdir(folder)
        _fork_quickly()
        recorder = Recorder()
        if request["module"] is not None:
            try:
                importlib.import_module(request["module"])
            except Exception as error:
                recorder.errors.append(
                    [request["module"], f"{type(error).__name__}: {_first_line(str(error))}"]
                )
        code = 2 if recorder.errors else int(pytest.main(request["arguments"], plugins=[recorder]))
        facts = {"code": code, "failures": recorder.failures, "errors": recorder.errors}
        result.write_text(json.dumps(facts))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _waited(child: int, timeout_s: float) -> int | None:
    """The exit status of a child; None when it was not done in time, and was killed."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_S)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _end_descendants() -> None:
    """Kill and reap every process that a test has left behind; their parents may be gone, then they
    are ours.
    """
    for _ in range(100):
        left = psutil.Process().children(recursive=True)
        if not left:
            return
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(POLL_S)
    raise RuntimeError(f"{left} do not die")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))
    serve(Path(sys.argv[1]), sys.argv[2:])
