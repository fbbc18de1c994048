"""What the service costs: answers over finished runs, memory, cold starts. Trains nothing.

    python benchmarks/service.py [--runs 1000] [--asks 300]

The run folders are made up, with the files that a job through the service leaves.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jobs.record.paths import BaseFolder  # noqa: E402
from jobs.record.times import now  # noqa: E402
from jobs.serve import offers  # noqa: E402
from jobs.serve.tickets import FILE, JOB, ServiceFolder, Ticket, new_id  # noqa: E402
from trainer.config.identity import digest, exp_id  # noqa: E402

STEPS = 60


def finished(folder: ServiceFolder) -> str:
    """Make a job that has succeeded; returns its id."""
    offer = offers.read(None).models["tiny-chat"]
    job_id = new_id(JOB)
    asked = offers.Asked(num_rows=160, kind="chat", seed=1, label=job_id)
    values = offers.fill(offer, asked).experiment
    name = exp_id(values)
    folder.create(
        Ticket(
            id=job_id,
            created_at=now(),
            owner="local",
            model="tiny-chat",
            exp_id=name,
            experiment=values,
            request_digest="0" * 64,
            kind="chat",
            num_rows=160,
            seed=1,
            epochs=3,
            batch=8,
            lr_factor=1.0,
            training_file=new_id(FILE),
            metadata={"team": "lathe"},
        )
    )
    (folder.tickets / job_id / "checked.json").write_text(json.dumps({"at": now()}))
    run(folder.base.run(name).path, values)
    return job_id


def run(path: Path, values: dict[str, Any]) -> None:
    """Make the folder of a run that has succeeded."""
    attempt = path / "attempts" / "1"
    attempt.mkdir(parents=True)
    at = now()
    created = {"event": "created", "exp_id": path.name, "digest": digest(values)}
    created |= {"group": "service", "nonce": "abcdef"}
    token = f"ft_{path.name[:12]}_abcdef_1"
    intent = {"event": "intent", "attempt": 1, "token": token, "name": token}
    intent |= {"index": None, "backend": "local", "by": "bench:1"}
    sent = {"event": "submitted", "attempt": 1, "id": f"host:q:{token}", "adopted": False}
    ended = {"event": "observed", "attempt": 1, "state": "succeeded", "reason": None}
    events = [{"at": at, **event} for event in (created, intent, sent, {**ended, "host": "h"})]
    files = {
        "exp_dict.json": json.dumps(values),
        "job.jsonl": "".join(json.dumps(event) + "\n" for event in events),
        "status.json": json.dumps({"state": "succeeded", "step": STEPS, "total": STEPS}),
        "metrics.jsonl": "".join(
            json.dumps({"step": step, "loss": 5 / step, "lr": 1e-3, "tokens": 900 * step}) + "\n"
            for step in range(1, STEPS + 1)
        ),
        "attempts/1/spec.json": json.dumps({"job": {}}),
        "attempts/1/started-1.json": json.dumps({"at": at, "host": "h", "pid": 1}),
        "attempts/1/exit.json": json.dumps({"at": at, "code": 0, "kind": "succeeded", "start": 1}),
    }
    for name, text in files.items():
        (path / name).write_text(text)


class Server:
    """The server as a process."""

    def __init__(self, base: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        argv = [sys.executable, "-m", "jobs.serve.app", "-sb", str(base), "--allow-dirty"]
        self.began = time.monotonic()
        self.process = subprocess.Popen([*argv, "--port", str(self.port)], cwd=ROOT)

    def ask(self, path: str) -> Any:
        """What it answers."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return json.loads(answer.read())

    def until_it_knows(self, count: int) -> tuple[float, float]:
        """(seconds to the first answer, seconds until its index holds so many runs)."""
        first_s = None
        while True:
            try:
                rows = self.ask("/lathe/v1/status")
            except OSError:
                time.sleep(0.02)
                continue
            first_s = first_s or time.monotonic() - self.began
            if len(rows) >= count:
                return first_s, time.monotonic() - self.began
            time.sleep(0.5)

    def p95_ms(self, paths: list[str]) -> float:
        """Of the times that the answers take, one after the other."""
        times: list[float] = []
        for path in paths:
            began = time.perf_counter()
            self.ask(path)
            times.append(1000 * (time.perf_counter() - began))
        return statistics.quantiles(times, n=20)[-1]

    def resident_mb(self) -> float:
        """Its resident memory, 10^6 bytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1.024e-3 * int(text.partition("VmRSS:")[2].split()[0])

    def cpu_s(self) -> float:
        """CPU seconds it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def has_torch(self) -> bool:
        """Whether torch's libraries are in its memory."""
        return "libtorch" in Path(f"/proc/{self.process.pid}/maps").read_text()

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--asks", type=int, default=300)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="lathe-service-"))
    os.environ["LATHE_QUEUE"] = str(folder / "queue")
    try:
        service = ServiceFolder(BaseFolder(folder / "base"))
        service.make()
        ids = [finished(service) for _ in range(asked.runs)]
        show(folder / "base", ids, asked.asks)
    finally:
        shutil.rmtree(folder)


def show(base: Path, ids: list[str], asks: int) -> None:
    """Print the figures."""
    for kind in ("without an index", "with one"):
        server = Server(base)
        first_s, whole_s = server.until_it_knows(len(ids))
        print(
            f"cold start {kind}: answers after {first_s:.1f} s, whole after {whole_s:.1f} s, "
            f"{server.cpu_s():.1f} CPU seconds"
        )
        if kind == "without an index":
            server.stop()
    jobs, some = "/v1/fine_tuning/jobs", [ids[17 * k % len(ids)] for k in range(asks)]
    kinds = {
        "list of 20 jobs": [f"{jobs}?limit=20&after={name}" for name in some],
        "list of 100 jobs": [f"{jobs}?limit=100&after={name}" for name in some],
        "retrieve": [f"{jobs}/{name}" for name in some],
        "20 events": [f"{jobs}/{name}/events" for name in some],
        "checkpoints": [f"{jobs}/{name}/checkpoints" for name in some],
        "models, all of them": ["/v1/models"] * 40,
        "status, all of them": ["/lathe/v1/status"] * 40,
    }
    for kind, paths in kinds.items():
        print(f"p95 of {kind}: {server.p95_ms(paths):.1f} ms")
    print(f"resident: {server.resident_mb():.0f} MB; torch in it: {server.has_torch()}")
    server.stop()


if __name__ == "__main__":
    main()
