"""Starts the stand-in for Toolkit, with its `eai` on PATH. For tests only.

with standin() as toolkit:                       # a server in threads of this process, or
                                                 own_process=True
    backend = Toolkit(retry_s=2)                 # finds `eai`; other processes need
                                                 toolkit.environment
    toolkit.lose_next_create(1)                  # the knobs: see server.Service
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.jobs.toolkit_standin import server

HERE = Path(__file__).parent
START_S = 10.0


@dataclass(frozen=True)
class Standin:
    """The stand-in that runs: how to reach it, and its knobs."""

    url: str
    bin: Path  # the folder that holds `eai`

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs so that `eai` speaks with this server: PATH and EAI_STANDIN."""
        return {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "EAI_STANDIN": self.url}

    def fail_next(self, n: int) -> None:
        self._turn("fail_next", n=n)

    def lose_next_create(self, n: int = 1) -> None:
        self._turn("lose_next_create", n=n)

    def lose_fraction(self, fraction: float, seed: int = 0) -> None:
        self._turn("lose_fraction", fraction=fraction, seed=seed)

    def rotate_token(self, window_s: float = 0.3) -> None:
        self._turn("rotate_token", window_s=window_s)

    def preempt(self, job_id: str) -> None:
        self._turn("preempt", id=job_id)

    def queue_delay(self, seconds: float) -> None:
        self._turn("queue_delay", seconds=seconds)

    def stats(self) -> dict[str, Any]:
        """created, clashes, lost, failed, unauthorised: counts; starts: name -> how many times it
        was started.
        """
        return self._turn("stats")

    def _turn(self, knob: str, **values: Any) -> Any:
        request = Request(
            f"{self.url}/control", json.dumps({"knob": knob, "values": values}).encode()
        )
        with urlopen(request, timeout=START_S) as answer:
            return json.load(answer)["result"]


@contextmanager
def standin(*, own_process: bool = False, **settings: Any) -> Iterator[Standin]:
    """A stand-in until the block ends; then all its jobs are dead. settings: gpus, slots,
    kill_after_s.

    Within the block, PATH and EAI_STANDIN of this process lead to it.
    """
    with tempfile.TemporaryDirectory(prefix="eai-") as name:
        folder = Path(name)
        script = (HERE / "eai").read_text().partition("\n")[2]
        (folder / "eai").write_text(
            f"#!{sys.executable} -IS\n{script}"
        )  # 60 ms instead of 200: no site-packages
        (folder / "eai").chmod(0o755)
        with (_process if own_process else _threads)(folder, settings) as url:
            made = Standin(url, folder)
            before = {key: os.environ.get(key) for key in made.environment}
            os.environ.update(made.environment)
            try:
                yield made
            finally:
                for key, value in before.items():
                    os.environ.pop(key) if value is None else os.environ.update({key: value})


@contextmanager
def _threads(folder: Path, settings: dict[str, Any]) -> Iterator[str]:
    service = server.Service(**settings)
    try:
        with server.listen(service) as listening:
            thread = threading.Thread(
                target=listening.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
            )
            thread.start()
            try:
                yield server.url_of(listening)
            finally:
                listening.shutdown()
                thread.join()
    finally:
        service.close()


@contextmanager
def _process(folder: Path, settings: dict[str, Any]) -> Iterator[str]:
    port_file = folder / "url"
    words = [
        word
        for key, value in settings.items()
        for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    process = subprocess.Popen(
        [sys.executable, "-IS", str(HERE / "server.py"), "--port-file", str(port_file), *words]
    )
    try:
        end = time.monotonic() + START_S
        while not port_file.exists():
            assert process.poll() is None, "the stand-in ended at once"
            assert time.monotonic() < end, "the stand-in did not start"
            time.sleep(0.02)
        yield port_file.read_text()
    finally:
        process.terminate()
        try:
            process.wait(START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
