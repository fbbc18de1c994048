"""The list of faults holds for the project as it is, and the command that tries them judges a toy
project rightly.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.fault import BadFault, Fault, applied, problem
from tests.mutants.faults import FAULTS
from tests.mutants.run import ROOT, Server, servers, try_all, with_fault, without_fault

SUM = "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return a * 2\n"
TESTS = "from trainer.toy import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
HANGS = "import time\n\n\ndef test_hangs():\n    time.sleep(60)\n"
LEAVES_A_PROCESS = """
import subprocess
import sys


def test_leaves_a_process_behind():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "left-by-a-test"], start_new_session=True)
"""
IN_ANOTHER_PROCESS = """
import multiprocessing

from trainer.toy import add


def test_add_in_a_process_of_the_fork_server():
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(add, (2, 3)) == 5
"""
ADD = "tests/test_add.py"
FEW = ()  # libraries: the toy needs no torch


def fault(text: str, replacement: str, tests: str = ADD) -> Fault:
    return Fault("trainer/toy.py", text, replacement, why="a toy", tests=tests)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A project of one module, called as one of ours."""
    files = {"trainer/__init__.py": "", "trainer/toy.py": SUM, "tests/test_add.py": TESTS}
    files |= {"tests/test_hangs.py": HANGS, "tests/test_leaves.py": LEAVES_A_PROCESS}
    for name, content in files.items():
        path = tmp_path / "toy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / "toy"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests here."""
    root = tmp_path_factory.mktemp("root")
    for name, content in {
        "trainer/__init__.py": "",
        "trainer/toy.py": SUM,
        "tests/test_add.py": TESTS,
    }.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(content)
    (root / "tests" / "test_hangs.py").write_text(HANGS)
    (root / "tests" / "test_process.py").write_text(IN_ANOTHER_PROCESS)
    (root / "tests" / "test_leaves.py").write_text(LEAVES_A_PROCESS)
    with servers(root, 1, libraries=FEW) as (one,):
        yield one


def test_every_fault_of_the_list_can_be_tried() -> None:
    assert [text for one in FAULTS if (text := problem(ROOT, one)) is not None] == []
    assert len({(one.file, one.text, one.replacement) for one in FAULTS}) == len(FAULTS) >= 60


def test_a_fault_that_a_test_notices_is_killed_by_it(server: Server) -> None:
    assert without_fault(server, ADD).kind == "green"
    outcome = with_fault(server, fault("a + b", "a - b"), 1)
    assert outcome.kind == "killed"
    assert outcome.text.startswith("tests/test_add.py::test_add (AssertionError")


def test_a_fault_reaches_the_processes_of_multiprocessings_fork_server(server: Server) -> None:
    assert without_fault(server, "tests/test_process.py").kind == "green"
    outcome = with_fault(server, fault("a + b", "a - b", "tests/test_process.py"), 5)
    assert (outcome.kind, "AssertionError" in outcome.text) == ("killed", True)


def test_a_fault_that_no_test_notices_has_survived(server: Server) -> None:
    assert with_fault(server, fault("a * 2", "a * 3"), 2).kind == "survived"


@pytest.mark.parametrize(
    ("text", "replacement", "tests", "reason"),
    [
        ("a - b", "a + b", ADD, "stands there 0 times"),
        ("(a", "(b", ADD, "stands there 2 times"),
        ("a + b", "a +", ADD, "no Python"),
        ("a + b", "a + b", ADD, "changes nothing"),
        ("a + b", "b + a", "tests/test_absent.py", "test_absent.py does not exist"),
        ("def add", "import nothing_of_this_name\n\n\ndef add", ADD, "ModuleNotFoundError"),
        ("def add", "def sub", ADD, "ImportError"),
        ("a + b", "a + c", ADD, "NameError"),
        ("a + b", "b + a", f"{ADD} -k nothing", "collects no test"),
    ],
)
def test_a_fault_that_shows_nothing_about_the_tests_is_broken(
    text: str, replacement: str, tests: str, reason: str, server: Server
) -> None:
    outcome = with_fault(server, fault(text, replacement, tests), 3)
    assert outcome.kind == "broken"
    assert reason in outcome.text


def test_a_test_that_does_not_end_is_broken_and_killed(server: Server) -> None:
    began = time.monotonic()
    outcome = with_fault(server, fault("a + b", "a - b", "tests/test_hangs.py"), 4, timeout_s=2)
    assert (outcome.kind, "not done after 2 s" in outcome.text) == ("broken", True)
    assert time.monotonic() - began < 30


def test_processes_that_a_test_leaves_behind_are_ended(server: Server) -> None:
    assert without_fault(server, "tests/test_leaves.py").kind == "green"
    commands = [
        path.read_bytes()
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if os.access(path, os.R_OK)
    ]
    assert not any(b"left-by-a-test" in command for command in commands)


def test_a_file_is_put_back_with_its_time_and_has_another_one_meanwhile(toy: Path) -> None:
    path = toy / "trainer" / "toy.py"
    before = path.stat().st_mtime_ns
    with pytest.raises(KeyboardInterrupt), applied(toy, fault("a + b", "a - b"), number=7):  # noqa: PT012
        assert "a - b" in path.read_text()
        assert path.stat().st_mtime_ns != before
        raise KeyboardInterrupt
    assert (path.read_text(), path.stat().st_mtime_ns) == (SUM, before)


def test_a_fault_that_cannot_be_tried_is_not_applied(toy: Path) -> None:
    with pytest.raises(BadFault, match="0 times"), applied(toy, fault("nothing", "else"), number=8):
        raise AssertionError("not reached")


def test_selections_that_fail_without_a_fault_are_told_and_only_the_others_are_tried(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (toy / "tests" / "test_wrong.py").write_text(TESTS.replace("== 5", "== 6"))
    faults = [fault("a + b", "a - b"), fault("a + b", "a - b", "tests/test_wrong.py")]
    assert try_all(toy, faults, jobs=1, libraries=FEW) == 2
    told = capsys.readouterr().out
    assert "tests fail without any fault" in told
    assert "1 of 1 killed" in told


def test_the_exit_code_says_whether_all_were_killed(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        try_all(toy, [fault("a + b", "a - b"), fault("a * 2", "a * 3")], jobs=2, libraries=FEW) == 1
    )
    said = capsys.readouterr().out
    assert "1 of 2 killed in " in said
    assert "SURVIVED trainer/toy.py: 'a * 2' -> 'a * 3'" in said
