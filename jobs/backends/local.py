"""Processes of this machine: a queue bounded by its cores and GPUs, which survives whoever submitted."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

from jobs.errors import Refused, Unreachable
from jobs.queue import CANCELLED, Capacity, Entry, Queue, birth, default_folder
from jobs.spec import Finding, JobSpec, Observed, Rendered
from trainer.disk import refusals
from trainer.errors import EXIT_OK, EXIT_PREEMPTED, ConfigError

FOLLOW_S = 0.3


class Local:
    """jobs/queue.py as a backend. Ids are `<host>:<token>`: another machine sees nothing of this one's queue."""

    name: ClassVar[str] = "local"
    validation: ClassVar[str] = "run for real by the tests"

    def __init__(self) -> None:
        self._queue = Queue(default_folder())
        self._host = socket.gethostname()
        self._capacity = Capacity.here()

    def check(self) -> list[Finding]:
        """The queue's folder, its runner, and the devices that jobs share."""
        capacity = self._capacity
        runner = "runs" if self._queue.has_runner() else "not running: the next job starts it"
        return [
            Finding("queue", True, f"{self._queue.folder} (LATHE_QUEUE names another)"),
            Finding("runner", True, runner),
            Finding("devices", True, f"{capacity.cpus} cores, {len(capacity.gpus)} GPUs"),
        ]

    def render(self, spec: JobSpec) -> Rendered:
        """The queue's entry. Keys of clusters mean nothing here and are left out: any group can be tried locally."""
        if spec.job.nodes > 1:
            raise ConfigError(f"nodes={spec.job.nodes}: the local queue is one machine. Use nodes=1, or -j slurm.")
        entry = {
            "id": f"{self._host}:{spec.token}",
            "wrapper": spec.wrapper,
            "workdir": spec.workdir,
            "gpus": spec.job.gpus,
            "cpus": spec.job.resources.cpu,
            "grace_s": spec.job.grace_s,
            "group": f"{spec.folder.rpartition('/')[0]}:{spec.group}",
            "max_parallel": spec.max_parallel,
            "after": [job_id.partition(":")[2] for job_id in spec.after],
        }
        return Rendered(spec.token, "rendered.local.json", json.dumps(entry, indent=1) + "\n")

    def rehearse(self, rendered: Rendered) -> str | None:
        """Whether this machine could ever run it. Refused when it could not."""
        entry = json.loads(rendered.text)
        refusal = self._capacity.refusal(cpus=entry["cpus"], gpus=entry["gpus"])
        if refusal is not None:
            raise Refused(f"local: {refusal}. Ask for less in job_configs.py, or submit elsewhere.")
        return "fits this machine"

    def submit(self, rendered: Rendered) -> str:
        """Put it into the queue and see that a runner lives."""
        self.rehearse(rendered)
        entry = json.loads(rendered.text)
        with refusals(self._queue.folder):
            self._queue.add(rendered.token, json.dumps({**entry, "at": time.time()}))
            self._queue.wake()
        return entry["id"]

    def find(self, token: str) -> list[str]:
        """Its id when it is in this machine's queue."""
        return [f"{self._host}:{token}"] if self._queue.entry(token).folder.exists() else []

    def query(self, ids: Sequence[str]) -> dict[str, Observed]:
        """What the queue's files say; a runner is started when jobs wait for one."""
        foreign = {job_id.partition(":")[0] for job_id in ids} - {self._host}
        if foreign:
            raise Unreachable(f"local jobs of {', '.join(sorted(foreign))} can only be seen there, not on {self._host}")
        entries = {job_id: self._queue.entry(job_id.partition(":")[2]) for job_id in ids}
        found = {job_id: self._observe(entry) for job_id, entry in entries.items() if entry.folder.exists()}
        if any(observed.state == "queued" for observed in found.values()):
            self._queue.wake()
        return found

    def _observe(self, entry: Entry) -> Observed:
        ended = entry.ended()
        if ended is not None:
            return _ending(ended["code"], ended["reason"])
        started = entry.started()
        if started is None:
            return Observed("queued", "waits for devices")
        if birth(started["pid"]) == started["birth"]:
            return Observed("running", host=self._host)
        return Observed("failed", "its wrapper is gone: killed, or the machine went down", host=self._host)

    def cancel(self, job_id: str) -> None:
        """Ask for its end: a waiting job leaves the queue, a running one gets SIGTERM and may save."""
        self._queue.cancel(job_id.partition(":")[2])
        self._queue.wake()

    def logs(self, job_id: str, *, follow: bool) -> Iterator[str]:
        """What the wrapper printed; the training's own output is in the attempt's folder."""
        entry = self._queue.entry(job_id.partition(":")[2])
        path, position = entry.folder / "wrapper.log", 0
        while True:
            is_over = entry.ended() is not None
            if path.exists():
                with path.open(errors="replace") as file:
                    file.seek(position)
                    yield from file
                    position = file.tell()
            if is_over or not follow:
                return
            time.sleep(FOLLOW_S)


def _ending(code: int, reason: str | None) -> Observed:
    if code == EXIT_OK:
        return Observed("succeeded", exit_code=0)
    if code == EXIT_PREEMPTED:
        return Observed("preempted", reason, exit_code=code)
    if code == CANCELLED:
        return Observed("cancelled", reason, exit_code=code)
    return Observed("failed", reason or f"its wrapper ended with {code}", exit_code=code)
