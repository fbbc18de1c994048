"""A server that is killed again and again under its clients: every job starts once, nothing is lost."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest
from openai import OpenAI

from tests.serve.conftest import CHAT, Stub, jsonl, wait_until

ROOT = Path(__file__).resolve().parents[2]
CLIENTS, JOBS, KILLS = 3, 40, 12
WITHIN_S = 900.0
T = TypeVar("T")


@dataclass
class KilledServer:
    """A server as a process, started again whenever it was killed."""

    base: Path
    python: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    kills: int = 0
    client: OpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.client = OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1",
            api_key="x",
            _strict_response_validation=True,
            max_retries=0,
            timeout=30,
        )

    def start(self) -> None:
        argv = [sys.executable, "-m", "jobs.serve.app", "-sb", str(self.base)]
        argv += ["--port", str(self.port), "--python_binary", str(self.python)]
        argv += ["--allow-dirty", "--every_s", "0.2"]
        log = (self.base.parent / "server.log").open("ab")
        self.process = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log)

    def kill(self) -> None:
        assert self.process is not None, "it was started"
        self.process.send_signal(signal.SIGKILL)
        self.kills += self.process.wait() == -signal.SIGKILL

    def is_up(self) -> bool:
        with contextlib.suppress(openai.APIConnectionError):
            return bool(self.client.models.list().data)
        return False

    def insist(self, ask: Callable[[], T], *, until: float) -> T:
        """What the server answers in the end, however often it is down."""
        while True:
            try:
                return ask()
            except openai.APIConnectionError:
                assert time.monotonic() < until, "it was down for too long"
                time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_forty_jobs_of_three_clients_survive_twelve_kills_of_the_server(
    tmp_path: Path, stub: Stub, queue: Path
) -> None:
    server = KilledServer(tmp_path / "base", stub.python, free_port())
    server.start()
    wait_until(server.is_up, bool, within_s=120)
    until = time.monotonic() + WITHIN_S
    content = jsonl(CHAT)
    file = server.client.files.create(file=("a.jsonl", content), purpose="fine-tune")
    ids: list[dict[int, str]] = [{} for _ in range(CLIENTS)]
    seen: dict[str, str] = {}
    problems: list[BaseException] = []

    def create(job: int) -> Any:
        return server.client.fine_tuning.jobs.create(
            model="tiny-chat",
            training_file=file.id,
            metadata={"number": str(job)},
            extra_headers={"Idempotency-Key": f"job {job}"},
        )

    def be_client(number: int) -> None:
        order = random.Random(number).sample(range(JOBS), JOBS)
        try:
            for job in [*order, *order[:10]]:  # and some of them once more
                made = server.insist(lambda job=job: create(job), until=until)
                assert ids[number].setdefault(job, made.id) == made.id
                time.sleep(0.1)
        except BaseException as error:
            problems.append(error)

    def watch() -> None:
        """Every event that was ever told."""
        while not is_over.is_set():
            for job_id in list(ids[0].values()):
                with contextlib.suppress(openai.APIConnectionError):
                    for event in server.client.fine_tuning.jobs.list_events(job_id, limit=7):
                        assert seen.setdefault(event.id, event.message) == event.message
            time.sleep(0.2)

    is_over = threading.Event()
    threads = [threading.Thread(target=be_client, args=(number,)) for number in range(CLIENTS)]
    watcher = threading.Thread(target=watch)
    for thread in (*threads, watcher):
        thread.start()
    chance = random.Random(5)
    try:
        while server.kills < KILLS:
            time.sleep(chance.uniform(0.2, 3.0))
            server.kill()
            if chance.random() < 0.3:  # who knows better begins anew without an index
                for path in (server.base / "_service").glob("index-*"):
                    path.unlink(missing_ok=True)
            server.start()
            wait_until(server.is_up, bool, within_s=120)
        for thread in threads:
            thread.join(WITHIN_S)
        assert not problems, problems
        jobs = server.client.fine_tuning.jobs
        wait_until(
            lambda: Counter(job.status for job in jobs.list(limit=100)),
            lambda counts: counts == {"succeeded": JOBS},
            within_s=WITHIN_S,
        )
        is_over.set()
        watcher.join(60)
        assert ids[0] == ids[1] == ids[2]
        assert len({*ids[0].values()}) == JOBS
        assert {job.id for job in jobs.list()} == {*ids[0].values()}
        told: dict[str, str] = {}
        for job_id in ids[0].values():
            events = list(jobs.list_events(job_id))[::-1]
            texts = [event.message for event in events]
            assert len(texts) == len(set(texts)) == 10, texts
            assert [text for text in texts if text.startswith("Step")] == [
                f"Step {step}/4: training loss={8 / step:.4f}" for step in range(1, 5)
            ]
            told |= {event.id: event.message for event in events}
        assert seen.items() <= told.items()
    finally:
        is_over.set()
        server.kill()
    starts = Counter(stub.starts())
    assert len(starts) == JOBS
    assert set(starts.values()) == {1}
    runs = [path for path in server.base.iterdir() if (path / "final/config.json").exists()]
    assert len(runs) == JOBS
