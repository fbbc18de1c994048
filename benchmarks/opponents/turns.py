"""Contestants in processes of their own, which take turns at the steps of a race, so that the noise
of the machine hits all alike, and each has its own clock, its own heap and its own peak.

The parent imports everything and computes nothing with gradients; each contestant is a fork of it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import torch

Command = tuple[str, Any]
Answers = dict[str, Callable[[Any], Any]]  # what a contestant can be asked, by name
_STOP = "stop"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def keep_freed_memory() -> None:
    """From here on malloc keeps freed blocks, in this process and those forked from it."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


class Contestant:
    """A forked process that answers commands, one at a time."""

    def __init__(self, make: Callable[[], Answers]) -> None:
        """make: called in the new process."""
        self._mine, others = Pipe()
        sys.stdout.flush()
        self._process = os.fork()
        if self._process == 0:
            status = 1
            try:
                self._mine.close()
                _serve(make, others)
                status = 0
            except (EOFError, BrokenPipeError):  # the parent is gone
                pass
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        others.close()

    def ask(self, name: str, what: Any = None) -> Any:
        """Its answer. RuntimeError with the reason if it has none."""
        self._mine.send((name, what))
        is_right, answer = self._mine.recv()
        if not is_right:
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        # said in words: contestants that were forked later hold this end of the line, too
        self._mine.send((_STOP, None))
        self._mine.close()
        os.waitpid(self._process, 0)


def _serve(make: Callable[[], Answers], line: Any) -> None:
    torch.set_num_threads(1)
    before = _status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew (man proc)
    answers = make()
    answers["peak_mib"] = lambda _: (_status("VmHWM") - before) / 1024
    while True:
        name, what = line.recv()
        if name == _STOP:
            return
        try:
            line.send((True, answers[name](what)))
        except Exception as error:  # the other side says what became of it
            lines = str(error).splitlines() or [""]
            line.send((False, f"{type(error).__name__}: {lines[0][:160]}"))


def _status(name: str) -> int:
    """KiB of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{name}:"))


def clocked(step: Callable[[int], float]) -> Callable[[int], tuple[float, float]]:
    """(CPU seconds of this process, loss) of a step."""

    def run(number: int) -> tuple[float, float]:
        start = time.process_time()
        loss = step(number)
        return time.process_time() - start, loss

    return run
