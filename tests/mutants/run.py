"""`python -m tests.mutants.run`: put every fault of the list into a copy of the project, and see
whether tests fail.

Each fault is tried alone, with the tests that belong to its file, those that `make test` runs (no
long ones). A fault is killed when a test fails; it has survived when all pass; it is broken when
its text is not in the file exactly once, when the file cannot be imported with it, or when the
tests cannot be collected or do not end. Before that, every selection of tests must be green without
any fault; the faults of one that is not are left out. Exit code 0: all killed; 1: not all; 2: the
list is wrong, or a selection is not green.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.mutants.fault import BadFault, Fault, applied, problem
from tests.mutants.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (
    ".git",
    ".venv",
    "results",
    "out",
    "tmp-cache",
    "build",
    "*.egg-info",
    ".*_cache",
    ".hypothesis",
    "wandb",
)
PYTEST = (
    "-x",
    "-q",
    "-m",
    "not long and not gpu",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:randomly",
    "--no-header",
    "-o",
    "timeout=180",  # ranks that wait for each other for ever are a fault that was noticed
)
LIBRARIES = (
    *("numpy", "torch", "torch.distributed", "torch._dynamo", "torch.utils.flop_counter"),
    *("transformers.models.t5.modeling_t5", "transformers.models.llama.modeling_llama"),
    *("transformers.models.bert.modeling_bert", "safetensors.torch", "tokenizers"),
    "transformers.models.gpt_bigcode.modeling_gpt_bigcode",
    # what engines of ZeRO 1 to 3 import late
    *("deepspeed", "deepspeed.comm.mori", "deepspeed.module_inject.auto_ep_layer"),
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    *("sklearn.metrics", "pydantic", "typer", "rich.console", "filelock", "ijson", "regex"),
    *("hypothesis.strategies", "hypothesis.core", "hypothesis.internal.conjecture.engine"),
)
TIMEOUT_S = 600.0  # for one selection of tests, on a machine that is busy with other things
NO_TESTS = 5  # pytest's exit code when it has collected nothing

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """What became of one fault, or (without one) of a selection of tests that must be green."""

    kind: str  # killed, survived, broken; of a selection: green, red
    text: str
    seconds: float = 0.0
    cpu_s: float = 0.0


class Server:
    """A copy of the project, and the process that runs its tests (tests/mutants/server.py)."""

    def __init__(self, root: Path, scratch: Path, libraries: Sequence[str]) -> None:
        self.folder = scratch / "project"
        shutil.copytree(root, self.folder, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        if (root.parent / "shared").is_dir():  # reference data of some tests
            (scratch / "shared").symlink_to(root.parent / "shared")
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        environment |= {
            "TOKENIZERS_PARALLELISM": "false",
            "WANDB_MODE": "offline",
            "HF_HUB_OFFLINE": "1",
            # compiled code is told from its source by seconds and size, which faults may share
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        environment["JE_ARROW_MALLOC_CONF"] = (
            "background_thread:false"  # pyarrow's: a fork wants one thread only
        )
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("server.py")),
                str(self.folder),
                *libraries,
            ],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def run(self, tests: str, *, module: str | None, timeout_s: float) -> dict[str, Any]:
        """What pytest says to a selection of tests, see tests/mutants/server.py."""
        request = {
            "arguments": [*PYTEST, *shlex.split(tests)],
            "module": module,
            "timeout_s": timeout_s,
        }
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it was started with a pipe"
        while line := self._process.stdout.readline():
            if line.startswith("{"):  # libraries print while they are imported
                return json.loads(line)
        raise RuntimeError(f"the test server ended with exit code {self._process.wait()}")


def without_fault(server: Server, tests: str, *, timeout_s: float = TIMEOUT_S) -> Outcome:
    """Whether a selection of tests is green: only then does its failing tell anything."""
    answer = server.run(tests, module=None, timeout_s=timeout_s)
    times = (answer["seconds"], answer["cpu_s"])
    if answer["code"] == 0:
        return Outcome("green", tests, *times)
    first = [*answer["errors"], *answer["failures"], [tests, "collects no test"]][0]
    return Outcome("red", f"{tests}\n    {first[0]}: {first[1]}", *times)


def with_fault(
    server: Server, fault: Fault, number: int, *, timeout_s: float = TIMEOUT_S
) -> Outcome:
    """What the tests say to a fault. number: another one for each fault."""
    try:
        with applied(server.folder, fault, number=number):
            answer = server.run(fault.tests, module=fault.module, timeout_s=timeout_s)
    except BadFault as error:
        return Outcome("broken", str(error))
    times = (answer["seconds"], answer["cpu_s"])
    if answer["errors"] or answer["code"] == NO_TESTS:
        first = [*answer["errors"], [fault.tests, "collects no test"]][0]
        return Outcome("broken", f"{first[0]}: {first[1]}", *times)
    if answer["code"] == 0:
        return Outcome("survived", fault.tests, *times)
    if not answer["failures"]:
        return Outcome(
            "broken",
            f"pytest ended with {answer['code']} and no test failed: {answer['output']}",
            *times,
        )
    name, text = answer["failures"][0]
    return Outcome("killed", f"{name} ({text})", *times)


@contextmanager
def servers(
    root: Path, count: int, *, libraries: Sequence[str] = LIBRARIES
) -> Iterator[list[Server]]:
    """So many copies of the project with a process each, which has the libraries loaded."""
    with ExitStack() as stack:
        started: list[Server] = []
        for _ in range(count):
            scratch = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True)
            )
            server = Server(root, Path(scratch), libraries)
            stack.callback(server.close)
            started.append(server)
        yield started


def in_parallel(pool: Sequence[Server], tasks: Sequence[Callable[[Server], T]]) -> list[T]:
    """The results of the tasks in their order, each done by the server that is free first."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(tasks)):
        waiting.put(number)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def work(server: Server) -> None:
        while not errors:
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results[number] = tasks[number](server)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(server,)) for server in pool]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(tasks))]


def chosen(faults: Sequence[Fault], only: str | None) -> list[Fault]:
    """Those whose file, text, reason or tests have `only` in them; None: all."""
    return [
        one
        for one in faults
        if only is None or only in "\n".join((one.file, one.text, one.why, one.tests))
    ]


def try_all(
    root: Path, faults: Sequence[Fault], *, jobs: int, libraries: Sequence[str] = LIBRARIES
) -> int:
    """Try the faults on copies of the project at `root`, and print what became of each. Returns the
    exit code.
    """
    began = time.monotonic()
    selections = list(dict.fromkeys(fault.tests for fault in faults))
    with servers(root, min(jobs, len(faults)), libraries=libraries) as pool:
        print(f"{len(selections)} selections of tests, to be green without any fault")
        green = in_parallel(
            pool,
            [
                lambda server, tests=tests: _told(without_fault(server, tests))
                for tests in selections
            ],
        )
        is_green = {
            tests: outcome.kind == "green" for tests, outcome in zip(selections, green, strict=True)
        }
        if not all(is_green.values()):
            print("tests fail without any fault: what they say to faults would mean nothing")
            faults = [fault for fault in faults if is_green[fault.tests]]
        print(f"{len(faults)} faults")
        outcomes = in_parallel(
            pool,
            [
                lambda server, fault=fault, number=number: _told(
                    with_fault(server, fault, number), fault
                )
                for number, fault in enumerate(faults)
            ],
        )
    minutes = (time.monotonic() - began) / 60
    cpu_minutes = sum(outcome.cpu_s for outcome in (*green, *outcomes)) / 60
    killed = sum(outcome.kind == "killed" for outcome in outcomes)
    for kind in ("survived", "broken"):
        for fault, outcome in zip(faults, outcomes, strict=True):
            if outcome.kind == kind:
                print(
                    f"{kind.upper()} {fault.file}: {fault.text!r} -> {fault.replacement!r}\n    "
                    f"{outcome.text}"
                )
    print(f"{killed} of {len(faults)} killed in {minutes:.1f} min ({cpu_minutes:.1f} CPU min)")
    if not all(is_green.values()):
        return 2
    return 0 if killed == len(faults) else 1


def _told(outcome: Outcome, fault: Fault | None = None) -> Outcome:
    subject = f"{fault.file}: {fault.replacement.strip()!r} " if fault is not None else ""
    print(
        f"{outcome.kind:8} {outcome.seconds:5.1f} s {outcome.cpu_s:5.1f} CPU s  "
        f"{subject}{outcome.text}",
        flush=True,
    )
    return outcome


def main(arguments: Sequence[str]) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants.run", description="Try the list of faults."
    )
    parser.add_argument(
        "--only", metavar="TEXT", help="faults with this in file, text, reason or tests"
    )
    parser.add_argument("--list", action="store_true", help="show the faults and try none")
    parser.add_argument(
        "--check", action="store_true", help="see whether every fault can be tried, and try none"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="how many at a time (2)")
    given = parser.parse_args(arguments)
    faults = chosen(FAULTS, given.only)
    if not faults:
        parser.error(f"--only {given.only}: no fault has that in it, see --list")
    if given.list:
        for fault in faults:
            print(
                f"{fault.file}: {fault.text!r} -> {fault.replacement!r}\n    {fault.why}\n    "
                f"{fault.tests}"
            )
        return 0
    problems = [text for fault in faults if (text := problem(ROOT, fault)) is not None]
    print(
        "\n".join(
            [*problems, f"{len(faults) - len(problems)} of {len(faults)} faults can be tried"]
        )
    )
    if problems:
        return 2
    return 0 if given.check else try_all(ROOT, faults, jobs=given.jobs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
