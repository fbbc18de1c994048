"""What a person sees on a terminal while a run trains, and what the keyboard does to it."""

from __future__ import annotations

import fcntl
import functools
import os
import pty
import re
import struct
import termios
import threading
from pathlib import Path
from typing import Any

import pyte
import pytest

from tests.facts import experiment, write_facts
from tests.forked import TRAINVAL, Started, start
from tests.runs.test_features import Launcher

ROWS = 200  # of the terminal: nothing scrolls away
TIME = r"\d\d:\d\d:\d\d"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def _onto_terminal(name: str, columns: int) -> None:
    """From now on this process, which leads a session of its own, is at that terminal."""
    terminal = os.open(name, os.O_RDWR)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    for descriptor in (0, 1, 2):
        os.dup2(terminal, descriptor)
    os.close(terminal)
    os.environ["TERM"] = "xterm"
    for name in ("COLUMNS", "LINES"):  # of the terminal that the tests were started at
        os.environ.pop(name, None)


class Terminal:
    """A pseudo-terminal with a command at it; what is on its screen is kept while it runs."""

    def __init__(self, columns: int, *argv: str, first: Any = None) -> None:
        self.master, slave = pty.openpty()
        self._screen = pyte.Screen(columns, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self.bytes = b""
        become = functools.partial(_first_of_all, os.ttyname(slave), columns, first)
        self.command: Started = start(*argv, first=become)
        self._slave = slave  # open, for a terminal that nobody has open yet ends its reader
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                content = os.read(self.master, 65536)
            except OSError:  # everybody has left the terminal
                return
            self.bytes += content
            self._stream.feed(content)

    def press(self, key: bytes) -> None:
        os.write(self.master, key)

    def finish(self) -> int:
        """The exit code of the command, once its screen is as it left it."""
        code = self.command.finish().returncode
        os.close(self._slave)
        self._reader.join(30)
        os.close(self.master)
        return code

    def lines(self) -> list[str]:
        """The lines of the screen, without blanks at their ends and blank ones."""
        return [line.rstrip() for line in self._screen.display if line.strip()]


def _first_of_all(name: str, columns: int, first: Any) -> None:
    _onto_terminal(name, columns)
    if first is not None:
        first()


@pytest.mark.parametrize("columns", [80, 140])
def test_lines_stay_whole_above_one_bar_on_a_real_terminal(
    columns: int, folder: Path, tmp_path: Path
) -> None:
    values = experiment("causal_lm", folder, train={"steps": 12, "log_every": 4, "eval_every": 6})
    launcher = Launcher(folder, tmp_path, mine=[values])
    flags = [*launcher._flags, "-sb", str(launcher.savedir), "-e", "mine"]
    terminal = Terminal(columns, *TRAINVAL, *flags)
    assert terminal.finish() == 0, "\n".join(terminal.lines())
    lines = terminal.lines()
    shown = "\n".join(lines)
    if target := os.environ.get("LATHE_SHOW_SCREEN"):  # for docs/log.md
        Path(f"{target}-{columns}.txt").write_text(shown + "\n")
    bars = [line for line in lines if line.startswith("step")]
    assert len(bars) == 1, f"the bar is drawn in one place\n{shown}"
    assert re.fullmatch(r"step 12/12 ━+ loss \d\.\d{4}", bars[0]), shown
    assert len(bars[0]) == columns, "it fills the line"
    assert lines[-1] == bars[0], "below all lines"
    heads = [line for line in lines if re.match(rf"{TIME}  step \d", line)]
    steps = [re.search(r"step (\d+)/12  (\S+)", line) for line in heads]
    assert [(step[1], step[2]) for step in steps if step] == [
        ("1", "loss"),
        ("4", "loss"),
        ("6", "valid/loss"),
        ("8", "loss"),
        ("12", "loss"),
        ("12", "valid/loss"),
    ]
    for line in lines:
        assert len(re.findall("step ", line)) <= 1, f"two things in one line: {line}"
        assert ("━" in line) == (line in bars), f"a piece of the bar in a line: {line}"
    whole = " ".join(" ".join(lines).split())
    assert len(re.findall(r"lr \S+ tokens \d+ grad_norm \S+ tokens_per_s \S+", whole)) == 3, shown
    assert all(re.match(TIME, line) for line in lines if "saved step-" in line)
    assert b"\x1b[?25h" in terminal.bytes, "the cursor is shown again"
