"""A stand-in for Toolkit: an HTTP server on 127.0.0.1 that runs each job as a process group. For
tests only.

    python server.py --port-file FILE [--gpus 8] [--slots 64] ...     serves until SIGTERM; writes
    its URL to FILE

It does what is known of the service: names are unique, also against dead jobs; QUEUING, QUEUED,
RUNNING, then an end; a higher bid starts first; a restartable job that is preempted becomes
INTERRUPTED and then queues again with one more entry in `runs`. And it fails as the service does,
when a test turns one of its knobs (Service.KNOBS).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

TICK_S = 0.01
ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")
NAME = re.compile(r"[a-z0-9_]+\Z")


class Problem(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


@dataclass
class Job:
    """One job and its runs."""

    spec: dict[str, Any]
    log: Path
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    state: str = "QUEUING"
    info: str = ""
    created: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)  # when it came into this state
    runs: list[dict[str, Any]] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    ends_as: str | None = None  # CANCELLED or INTERRUPTED, once somebody asked for it
    killed_at: float | None = None

    def become(self, state: str) -> None:
        self.state, self.since = state, time.monotonic()

    @property
    def is_dead(self) -> bool:
        return self.state in ENDED or (self.state == "INTERRUPTED" and not self.spec["restartable"])

    def shown(self) -> dict[str, Any]:
        tags = [f"{key}={value}" for key, value in self.spec["tags"].items()]
        facts = {"id": self.id, "state": self.state, "stateInfo": self.info}
        return {**facts, "alive": not self.is_dead, "runs": self.runs, **self.spec, "tags": tags}


class Service:
    """The jobs, a thread that moves them on, and the knobs of a test."""

    KNOBS = (
        "fail_next",
        "lose_next_create",
        "lose_fraction",
        "rotate_token",
        "preempt",
        "queue_delay",
        "stats",
    )

    def __init__(
        self,
        *,
        gpus: int = 8,
        slots: int = 64,
        account: str = "lathe.tests",
        kill_after_s: float = 2.0,
    ) -> None:
        self.gpus, self.slots, self.account, self.kill_after_s = gpus, slots, account, kill_after_s
        self.lock = threading.RLock()
        self.jobs: dict[str, Job] = {}
        self.token = self.session_token = secrets.token_hex(8)
        self.session_from = 0.0
        self.queue_delay_s, self.rest_s = 0.0, 0.05
        self.to_fail, self.to_lose, self.loss, self.dice = 0, 0, 0.0, random.Random(0)
        self.counts = {"created": 0, "clashes": 0, "lost": 0, "failed": 0, "unauthorised": 0}
        self.folder = tempfile.TemporaryDirectory(prefix="toolkit-standin-")
        self.is_closing = threading.Event()
        self.mover = threading.Thread(target=self._move_on, daemon=True)
        self.mover.start()

    def close(self) -> None:
        """Kill every job and forget everything."""
        self.is_closing.set()
        self.mover.join()
        for job in self.jobs.values():
            if job.process is not None:
                _signal(job.process, signal.SIGKILL)
                job.process.wait()
        self.folder.cleanup()

    # Knobs

    def fail_next(self, n: int) -> None:
        """Answer the next n requests with 502, without doing anything."""
        self.to_fail = n

    def lose_next_create(self, n: int = 1) -> None:
        """Create the next n jobs, but close the connection instead of answering."""
        self.to_lose = n

    def lose_fraction(self, fraction: float, seed: int = 0) -> None:
        """Lose the answer to each creation with this probability."""
        self.loss, self.dice = fraction, random.Random(seed)

    def rotate_token(self, window_s: float = 0.3) -> None:
        """Refuse the token that sessions hold; they get the new one after `window_s`."""
        self.token, self.session_from = secrets.token_hex(8), time.monotonic() + window_s

    def preempt(self, id: str) -> None:
        """Interrupt a running job: TERM, then KILL."""
        job = self._job(id)
        if job.state != "RUNNING":
            raise Problem(409, f"cannot preempt a job that is in state {job.state}")
        self._stop(job, "INTERRUPTED")

    def queue_delay(self, seconds: float) -> None:
        """Keep new jobs in QUEUING for so long."""
        self.queue_delay_s = seconds

    def stats(self) -> dict[str, Any]:
        """What happened so far: counts, and how many times each name was started."""
        return {
            **self.counts,
            "starts": {job.spec["name"]: len(job.runs) for job in self.jobs.values()},
        }

    # What `eai` asks for

    def session(self) -> str:
        if self.session_token != self.token and time.monotonic() >= self.session_from:
            self.session_token = self.token
        return self.session_token

    def admit(self, authorization: str | None) -> None:
        """Problem for the next `fail_next` requests, and for a token that is not the
        present one.
        """
        if self.to_fail:
            self.to_fail -= 1
            self.counts["failed"] += 1
            raise Problem(502, "bad gateway")
        if authorization != f"Bearer {self.token}":
            self.counts["unauthorised"] += 1
            raise Problem(401, "token is invalid")

    def create(self, spec: dict[str, Any]) -> tuple[Job, bool]:
        """A new job, and whether its answer is to be lost."""
        name = spec["name"]
        if not NAME.match(name):
            raise Problem(400, f"name {name!r} must match ^[a-z0-9_]+$")
        if not spec["command"] or spec["gpu"] > self.gpus:
            raise Problem(400, f"want a command and at most {self.gpus} GPUs")
        if any(job.spec["name"] == name for job in self.jobs.values()):
            self.counts["clashes"] += 1
            raise Problem(409, f"a job named {name} already exists")
        job = Job(spec, Path(self.folder.name) / f"{len(self.jobs)}.log")
        self.jobs[job.id] = job
        self.counts["created"] += 1
        is_lost = self.to_lose > 0 or self.dice.random() < self.loss
        self.to_lose = max(0, self.to_lose - 1)
        self.counts["lost"] += is_lost
        return job, is_lost

    def listed(self, query: dict[str, str]) -> list[dict[str, Any]]:
        """Jobs, newest first; name is a part of the name, as with the service's own filter."""
        found = [
            job for job in reversed(self.jobs.values()) if query.get("name", "") in job.spec["name"]
        ]
        if "account" in query:
            found = [job for job in found if job.spec["account"] == query["account"]]
        if "tag" in query:
            key, _, value = query["tag"].partition("=")
            found = [job for job in found if job.spec["tags"].get(key) == value]
        if (state := query.get("state", "alive")) == "alive":
            found = [job for job in found if not job.is_dead]
        elif state != "all":
            found = [job for job in found if job.state.lower() in state.lower().split(",")]
        return [job.shown() for job in found[: int(query.get("limit", "100"))]]

    def cancel(self, id: str) -> None:
        job = self._job(id)
        if job.is_dead or job.state == "CANCELLING":
            raise Problem(409, f"cannot cancel a job that is in state {job.state}")
        self._stop(job, "CANCELLED")

    def shown(self, id: str) -> dict[str, Any]:
        return self._job(id).shown()

    def log_of(self, id: str) -> tuple[Path, bool]:
        """The log of a job, and whether more may come."""
        job = self._job(id)
        return job.log, not job.is_dead

    def _job(self, id: str) -> Job:
        if id not in self.jobs:
            raise Problem(404, f"job {id} not found")
        return self.jobs[id]

    # Moving on

    def _move_on(self) -> None:
        while not self.is_closing.wait(TICK_S):
            with self.lock:
                for job in self.jobs.values():
                    self._step(job)
                self._start_what_fits()

    def _step(self, job: Job) -> None:
        age = time.monotonic() - job.since
        if job.process is not None:
            self._watch(job, job.process)
        elif job.state == "QUEUING" and age >= self.queue_delay_s:
            job.become("QUEUED")
        elif job.state == "INTERRUPTED" and not job.is_dead and age >= self.rest_s:
            job.become("QUEUING")

    def _watch(self, job: Job, process: subprocess.Popen[bytes]) -> None:
        limit = job.spec["max_run_time"]
        if not _has_ended(process):
            if job.ends_as is None and limit and time.monotonic() - job.since > limit:
                job.info = f"ran for longer than {limit} s"
                self._stop(job, "CANCELLED")
            if job.killed_at is not None and time.monotonic() - job.killed_at > self.kill_after_s:
                _signal(process, signal.SIGKILL)
            return
        _signal(process, signal.SIGKILL)  # a container ends with its first process
        code = process.wait()
        job.runs[-1]["exitCode"] = code if code >= 0 else 128 - code
        job.become(job.ends_as or ("SUCCEEDED" if code == 0 else "FAILED"))
        job.runs[-1]["state"] = job.state
        job.process = job.ends_as = job.killed_at = None

    def _start_what_fits(self) -> None:
        waiting = [job for job in self.jobs.values() if job.state == "QUEUED"]
        for job in sorted(waiting, key=lambda job: (-job.spec["bid"], job.created)):
            running = [other for other in self.jobs.values() if other.process is not None]
            used = sum(other.spec["gpu"] for other in running)
            if len(running) < self.slots and used + job.spec["gpu"] <= self.gpus:
                self._start(job)

    def _start(self, job: Job) -> None:
        run = {"id": str(uuid.uuid4()), "state": "RUNNING"}
        job.runs.append(run)
        own = {
            "EAI_JOB_ID": job.id,
            "EAI_RUN_INDEX": str(len(job.runs) - 1),
            "EAI_ACCOUNT_ID": job.spec["account"],
        }
        home = Path(self.folder.name) / job.id
        home.mkdir(exist_ok=True)
        env = {"PATH": os.defpath, "HOME": str(home), **own, **job.spec["env"]}
        with job.log.open("ab") as log:
            try:
                job.process = subprocess.Popen(
                    job.spec["command"],
                    cwd=job.spec["workdir"] or home,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                log.write(f"{error}\n".encode())
                run.update({"state": "FAILED", "exitCode": 127})
                job.become("FAILED")
                return
        job.become("RUNNING")

    def _stop(self, job: Job, state: str) -> None:
        """Ask a job to end as `state`; a job that does not run ends at once."""
        if job.process is None:
            job.become(state)
            return
        job.ends_as, job.killed_at = state, time.monotonic()
        if state == "CANCELLED":
            job.become("CANCELLING")
        _signal(job.process, signal.SIGTERM)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """To the whole group of a job, of which its first process is the leader."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the first process has ended. It is not reaped: its group keeps its number until it is
    killed.
    """
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class _Handler(BaseHTTPRequestHandler):
    service: Service

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing on the screen."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        url = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = [part for part in url.path.split("/") if part]
        try:
            if parts[-1:] == ["log"]:
                self._log(parts[1], follow="follow" in query)
                return
            with self.service.lock:
                answer = self._routed(method, parts, query, json.loads(body or b"{}"))
        except Problem as problem:
            self._send(problem.status, {"error": problem.text})
            return
        if answer is None:  # the answer is lost
            self.close_connection = True
            return
        self._send(200, answer)

    def _routed(self, method: str, parts: list[str], query: dict[str, str], body: Any) -> Any:
        service = self.service
        if parts == ["session"]:
            return {"token": service.session()}
        if parts == ["control"]:
            assert body["knob"] in service.KNOBS, body
            return {"result": getattr(service, body["knob"])(**body["values"])}
        service.admit(self.headers.get("Authorization"))
        if parts == ["account"]:
            return {"id": service.account, "name": "tests"}
        if parts == ["job"] and method == "POST":
            job, is_lost = service.create({"account": service.account, **body})
            return None if is_lost else job.shown()
        if parts == ["job"]:
            return {"items": service.listed(query)}
        if method == "DELETE":
            service.cancel(parts[1])
        return service.shown(parts[1])

    def _log(self, id: str, *, follow: bool) -> None:
        with self.service.lock:
            self.service.admit(self.headers.get("Authorization"))
            path, _ = self.service.log_of(id)
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        sent, may_grow = 0, True
        while may_grow and not self.service.is_closing.is_set():
            with self.service.lock:
                may_grow = follow and self.service.log_of(id)[1]
            content = path.read_bytes()[sent:] if path.exists() else b""
            sent += len(content)
            self.wfile.write(content)
            self.wfile.flush()
            if may_grow:
                time.sleep(2 * TICK_S)
        self.close_connection = True

    def _send(self, status: int, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def listen(service: Service) -> ThreadingHTTPServer:
    """A server of this service on a free port of 127.0.0.1; the caller runs serve_forever."""
    handler = type("Handler", (_Handler,), {"service": service})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    return server


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="A stand-in for Toolkit. For tests only.")
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--kill-after-s", type=float, default=2.0)
    args = parser.parse_args()
    service = Service(gpus=args.gpus, slots=args.slots, kill_after_s=args.kill_after_s)
    server = listen(service)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    temporary = args.port_file.with_suffix(".tmp")
    temporary.write_text(url_of(server))
    temporary.rename(args.port_file)
    try:
        server.serve_forever(poll_interval=0.05)
    finally:
        service.close()


if __name__ == "__main__":
    sys.exit(main())
