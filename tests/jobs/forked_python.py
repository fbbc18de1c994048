"""A `python` for the jobs of a test whose trainings fork from a process that has imported everything,
and which counts their CPU seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.ranks import SERVED

# What a launch line starts: it has a training forked, and ends as that ends.
CLIENT = """#!{python} -S
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    server.sendall(json.dumps([os.getpid(), os.getcwd(), dict(os.environ), sys.argv[1:]]).encode() + b"\\n")
    code = int(server.makefile().readline())
sys.exit(code if code >= 0 else 1)
"""


class ForkedPython:
    """The program `python`, as long as `forking` is open."""

    def __init__(self, folder: Path) -> None:
        self.program, self.spent = folder / "python", folder / "cpu"
        self.socket = folder / "socket"
        self.program.write_text(CLIENT.format(python=sys.executable, path=str(self.socket)))
        self.program.chmod(0o755)

    def cpu_s(self) -> list[float]:
        """The CPU seconds of each training that has ended, by whatever signal, since `spent` was
        named.
        """
        return [float(line) for line in self.spent.read_text().split()]

    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        """Inside, the program works."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.socket))
            listener.listen()
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            yield

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # whoever asked was killed
            asked = json.loads(connection.makefile().readline())
            process = SERVED.Process(target=_train, args=(*asked, str(self.spent)))
            process.start()
            process.join()
            connection.sendall(b"%d\n" % (process.exitcode or 0))


def _train(pid: int, folder: str, environment: dict[str, str], argv: list[str], spent: str) -> None:
    """In the forked process: be `python ARGV` with the outputs of the process `pid`, and write down
    its CPU seconds.
    """
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number in (1, 2):
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    child = os.fork()
    if child:
        _, status, used = os.wait4(child, 0)
        with open(spent, "a") as file:
            file.write(f"{used.ru_utime + used.ru_stime:.2f}\n")
        os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
    torch.set_num_threads(1)
    sys.path.insert(0, folder)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
