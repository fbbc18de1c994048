"""A loop over HTTP whose server is killed at times drawn from a seed: every operation is in the log
once, and every result is that of the undisturbed loop.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import own_queue
from tests.serve.driven_stub import ROOT, DrivenStub
from tests.serve.driving import Driver
from trainer.operations.operation_log import FOLDER, OperationReader

SEED = int(os.environ.get("LATHE_CHAOS_SEED", "1"))
STEPS, KILLS, LATE_S = 60, 6, 300.0
SERVER = """
import sys, threading
from pathlib import Path
sys.path.insert(0, {root!r})
from jobs.serve.offers import Offer
from jobs.serve.steps.experiments import Driven
from service import TINY_CHAT
from tests.serve.conftest import serving

models = {{"tiny-chat": Offer(experiment=TINY_CHAT, driven=Driven(max_tokens=64))}}
with serving(Path({base!r}), python=Path({python!r}), models=models) as service:
    Path({url!r}).write_text(service.url)
    threading.Event().wait()
"""


class Victim:
    """A server in a process of its own, which may be killed and begun again."""

    def __init__(self, folder: Path, stub: DrivenStub) -> None:
        self.url_file, self.base = folder / "url", folder / "base"
        names = {"root": str(ROOT), "base": str(self.base), "url": str(self.url_file)}
        self.code = SERVER.format(python=str(stub.python), **names)
        self.process = self.begin()

    def begin(self) -> subprocess.Popen[bytes]:
        self.url_file.unlink(missing_ok=True)
        return subprocess.Popen([sys.executable, "-c", self.code], cwd=ROOT)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def driver(self) -> Driver:
        return Driver(httpx.Client(base_url=self.url_file.read_text(), timeout=60))

    def ask(self, call: Callable[[Driver], Any]) -> Any:
        """What a call gives, asked again until a server answers it, as the SDK does."""
        until = time.monotonic() + LATE_S
        while time.monotonic() < until:
            try:
                return call(self.driver())
            except (httpx.TransportError, FileNotFoundError, httpx.UnsupportedProtocol):
                time.sleep(0.1)
        raise TimeoutError("no server answered")


@contextmanager
def victim(folder: Path) -> Iterator[Victim]:
    with DrivenStub(folder / "stub") as stub, own_queue(folder / "queue"):
        one = Victim(folder, stub)
        try:
            yield one
        finally:
            one.kill()


def results_of(one: Victim, kills: list[int]) -> list[Any]:
    """The results of a loop. kills: numbers of steps during which the server is killed."""
    session = one.ask(lambda client: client.session())
    created = one.ask(lambda client: client.post("create_model", client.create(session)))
    model = one.ask(lambda client: client.result(created))["model_id"]
    results: list[Any] = []
    for step in range(STEPS):
        rows, update = 2 * step + 1, 2 * step + 2
        losses = one.ask(lambda client, seq=rows: client.rows(model, seq))
        if step in kills:
            one.kill()
            one.process = one.begin()
        done = one.ask(lambda client, seq=update: client.step(model, seq, lr=1e-3))
        results.append(
            one.ask(lambda client, future=losses: client.result(future)).metrics["loss:sum"]
        )
        results.append(one.ask(lambda client, future=done: client.result(future)))
    runs = [path.parent for path in one.base.glob(f"*/{FOLDER}")]
    assert len(runs) == 1
    reader, kinds = OperationReader(runs[0] / FOLDER), list[str]()
    while (operation := reader.next()) is not None:
        kinds.append(operation.kind)
    assert kinds == ["create", *["forward_backward", "optim_step"] * STEPS]
    return results


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_loop_over_a_server_that_is_killed_gives_the_results_of_the_undisturbed_one(
    tmp_path: Path,
) -> None:
    calm, wild = tmp_path / "calm", tmp_path / "wild"
    calm.mkdir()
    wild.mkdir()
    with victim(calm) as one:
        undisturbed = results_of(one, [])
    kills = sorted(random.Random(SEED).sample(range(STEPS), KILLS))
    with victim(wild) as one:
        assert results_of(one, kills) == undisturbed
