"""Processes of this machine: a queue bounded by its cores and GPUs, which outlives the submitter.

Ids are `<host>:<queue>:<token>`, with the random id of the queue's folder
(jobs/backends/local/queue.py): another LATHE_QUEUE, home or machine neither finds such a job nor
calls it lost. What cannot be seen from here is never said to have ended: asked about such jobs
alone, the answer is Unreachable; among others they are "submitted", with the place where they are
seen. A job is handed to one queue only: which one is in its rendered.local.json before it is sent.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from jobs.backends.local.queue import Queue, QueuedJob, attempt_of, default_folder
from jobs.backends.local.runner import CANCELLED, RESTARTED, Capacity
from jobs.errors import Refused, Unreachable, reason_of
from jobs.job_state import Observed
from jobs.protocol import Finding, JobSpec, Rendered, Traits
from jobs.record.bases import has_model, sentence
from jobs.record.paths import RunFolder
from jobs.secret_keys import minimal_environment
from trainer.errors import EXIT_OK, EXIT_PREEMPTED, ConfigError, LatheError
from trainer.files.atomic import read_json, refusals, replace_file

FOLLOW_S = 0.3
FILE = "rendered.local.json"
DEVICES = ("LATHE_QUEUE_CPUS", "CUDA_VISIBLE_DEVICES")  # what the runner shares out
OF_A_JOB = (
    "LATHE_JOB_ID",
    "LATHE_OUTCOME",
    "LATHE_NODE_RANK",
    "LATHE_HEAD_NODE",
)  # of a job that submits others


class Local:
    """The queue of this machine (jobs/backends/local/queue.py) as a backend."""

    name: ClassVar[str] = "local"
    traits: ClassVar[Traits] = Traits(
        runs_here=True, shares_disk=True, keeps_queue=True, awaits_bases=True
    )
    validation: ClassVar[str] = "run for real by the tests"

    def __init__(self) -> None:
        inherited = minimal_environment(os.environ, is_same_machine=True)
        environment = {name: value for name, value in inherited.items() if name not in OF_A_JOB}
        environment |= {name: os.environ[name] for name in DEVICES if name in os.environ}
        self._queue = Queue(default_folder(), environment)

    @cached_property
    def _capacity(self) -> Capacity:
        return Capacity.here()

    def check(self) -> list[Finding]:
        """The queue's folder, its runner, and the devices that jobs share."""
        try:
            with refusals(self._queue.folder):
                text = self._of_another_host()
                runner = (
                    "runs" if self._queue.has_runner() else "not running: the next job starts it"
                )
        except LatheError as error:
            return [Finding("queue", False, str(error))]
        folder = Finding(
            "queue", text is None, text or f"{self._queue.folder} (LATHE_QUEUE names another)"
        )
        try:
            text = f"{self._capacity.cpus} cores, {len(self._capacity.gpus)} GPUs"
            devices = Finding("devices", True, text)
        except ConfigError as error:  # `render` says it too, as bad input
            devices = Finding("devices", False, str(error), is_blocking=False)
        return [folder, Finding("runner", True, runner), devices]

    def _of_another_host(self) -> str | None:
        if self._queue.is_here:
            return None
        owner = self._queue.identity["host"]
        return (
            f"the queue {self._queue.folder} belongs to {owner}, this is {socket.gethostname()}: "
            "submit there, or name a folder of this machine as LATHE_QUEUE"
        )

    def render(self, spec: JobSpec) -> Rendered:
        """The queue's entry; keys of clusters mean nothing here and are left out.

        So any group can be tried locally.
        """
        if spec.job.nodes > 1:
            raise ConfigError(
                f"nodes={spec.job.nodes}: the local queue is one machine. Use nodes=1, or -j slurm."
            )
        if spec.job.gpus and "CUDA_VISIBLE_DEVICES" in spec.job.environment_vars:
            raise ConfigError(
                f"job dictionary of {spec.group!r}: environment_vars sets CUDA_VISIBLE_DEVICES, "
                f"which the local queue gives to each job ({spec.job.gpus} GPUs). Remove it; to "
                "keep GPUs from the queue set it in the submitting shell."
            )
        _ = self._capacity  # ConfigError before anything is sent
        entry = {
            "id": self._queue.id_of(spec.token),
            "queue": str(self._queue.folder),
            "wrapper": spec.wrapper,
            "workdir": spec.workdir,
            "attempt": f"{spec.folder}/attempts/{spec.attempt}",
            "gpus": spec.job.gpus,
            "cpus": spec.job.resources.cpu,
            "grace_s": spec.job.grace_s,
            "group": f"{spec.folder.rpartition('/')[0]}:{spec.group}",
            "max_parallel": spec.max_parallel,
            "after": spec.after,
            "base": spec.base,
            "environment": spec.wrapper_environment,
        }
        return Rendered(spec.token, FILE, json.dumps(entry, indent=1) + "\n")

    def rehearse(self, rendered: Rendered) -> str | None:
        """Whether this machine could ever run it. Refused when it could not."""
        entry = json.loads(rendered.text)
        if (text := self._of_another_host()) is not None:
            raise Refused(f"local: {text}.")
        refusal = self._capacity.refusal(cpus=entry["cpus"], gpus=entry["gpus"])
        if refusal is not None:
            raise Refused(f"local: {refusal}. Ask for less in job_configs.py, or submit elsewhere.")
        for job_id in entry["after"]:
            token = self._own(job_id)
            if token is None or not self._queue.entry(token).folder.exists():
                raise Refused(
                    f"--after {job_id}: no job of this queue. Give the id of one, as `status "
                    "--json` says it."
                )
        return "fits this machine"

    def submit(self, rendered: Rendered) -> str:
        """Put a job into the queue and make sure that a runner lives. Returns the job's id.

        Unreachable when the job may be in another queue already.
        """
        self.rehearse(rendered)
        entry = json.loads(rendered.text)
        with refusals(self._queue.folder):
            if (elsewhere := _id_elsewhere(entry, self._queue)) is not None:
                return elsewhere
            self._queue.add(rendered.token, json.dumps({**entry, "at": time.time()}))
            self._queue.wake()
        return entry["id"]

    def find(self, token: str) -> list[str]:
        """The job's id if it is in this queue. Unreachable if this machine cannot have sent it
        here.
        """
        entry = self._queue.entry(token)
        if entry.folder.exists():
            if entry.read_end() is None:
                self._wake()  # its submitter may have died before it did so
            return [str(entry.read()["id"])]
        if (text := self._of_another_host()) is not None:
            raise Unreachable(f"local: {text}")
        return []

    def query(self, ids: Sequence[str]) -> dict[str, Observed]:
        """The states of these jobs, from the queue's files. Starts a runner when there is none and
        jobs wait or run.

        Unreachable when none of these jobs can be seen from here.
        """
        answers: dict[str, Observed] = {}
        unseen: dict[str, str] = {}
        outlook = _Outlook(self._queue, read_json(self._queue.folder / "free.json") or {})
        for job_id in ids:
            token = self._own(job_id)
            if token is None:
                unseen[job_id] = _where(job_id)
            elif (entry := self._queue.entry(token)).folder.exists():
                try:
                    observed = outlook.of(entry)
                except Exception as error:  # of any kind: it must not hide the others
                    observed = Observed("held", reason_of(error, entry.folder))
                if observed is not None:
                    answers[job_id] = observed
                else:
                    unseen[job_id] = _out_of_sight(entry)
        if unseen and len(unseen) == len(ids):
            raise Unreachable("; ".join(sorted(set(unseen.values()))))
        if any(observed.state in ("queued", "running") for observed in answers.values()):
            # for those that run as well: without a runner nobody stops one that is cancelled
            self._wake()
        return answers | {job_id: Observed("submitted", text) for job_id, text in unseen.items()}

    def _wake(self) -> None:
        with refusals(self._queue.folder):
            self._queue.wake()

    def _own(self, job_id: str) -> str | None:
        """The token of an id of this queue; None for any other id."""
        token = job_id.rpartition(":")[2]
        return (
            token if token and self._queue.is_here and job_id == self._queue.id_of(token) else None
        )

    def cancel(self, job_id: str) -> None:
        """Ask for the end of a job: a waiting one leaves the queue, a running one gets SIGTERM and
        may save.

        Unreachable when its queue cannot be seen.
        """
        token = self._own(job_id)
        if token is None:
            raise Unreachable(_where(job_id))
        entry = self._queue.entry(token)
        started = entry.read_start()
        with refusals(self._queue.folder):
            self._queue.cancel(token)
            self._queue.wake()
        if started is not None and entry.read_end() is None and entry.life(started) == "unseen":
            raise Unreachable(f"asked for the end of {job_id}, but: {_out_of_sight(entry)}")

    def logs(self, job_id: str, *, follow: bool) -> Iterator[str]:
        """What the wrapper printed; the training's own output is in the attempt's folder.

        Unreachable when its queue cannot be seen.
        """
        token = self._own(job_id)
        if token is None:
            raise Unreachable(_where(job_id))
        entry = self._queue.entry(token)
        path, position = entry.folder / "wrapper.log", 0
        while True:
            is_over = entry.read_end() is not None or not entry.folder.exists()
            if path.exists():
                with path.open(errors="replace") as file:
                    file.seek(position)
                    yield from file
                    position = file.tell()
            if is_over or not follow:
                return
            time.sleep(FOLLOW_S)


@dataclass(frozen=True)
class _Outlook:
    """The queue's files as they are during one query. free: the cores, GPUs and running jobs of
    each group, as the runner last wrote them.
    """

    queue: Queue
    free: Mapping[str, Any]

    @cached_property
    def _attempts(self) -> dict[str, list[str]]:
        tokens: dict[str, list[str]] = {}
        for token in self.queue.tokens():
            tokens.setdefault(attempt_of(token)[0], []).append(token)
        return tokens

    def of(self, entry: QueuedJob) -> Observed | None:
        """The state of a job; None when it was started where nothing can be seen from here."""
        if (ended := entry.read_end()) is not None:
            return _ending(ended)
        started = entry.read_start()
        if started is None:
            return self._waiting(entry.read())
        state, host = entry.life(started), started.get("host")
        if state == "unseen":
            return None
        if state == "restarted":
            return Observed("preempted", RESTARTED, host=host)
        if state == "alive" or self.queue.has_runner():  # which says in a moment how it ended
            return Observed("running", host=host)
        if (ended := entry.read_end()) is not None:
            return _ending(ended)
        return Observed("failed", "its wrapper is gone: killed, as its runner was", host=host)

    def _waiting(self, facts: Mapping[str, Any]) -> Observed:
        """Held while its base waits for a person; else queued."""
        base = facts.get("base")
        if base is not None and not has_model(Path(base)):
            text, is_held = sentence(RunFolder(Path(base)))
            return Observed("held" if is_held else "queued", text)
        return Observed("queued", self._why(facts))

    def _why(self, facts: Mapping[str, Any]) -> str:
        """The reason why a job waits."""
        before = [job_id for job_id in facts["after"] if not self._has_succeeded(job_id)]
        if before:
            return f"waits for {', '.join(before)}"
        free = self.free
        peers, limit = free.get("groups", {}).get(facts["group"], 0), facts.get("max_parallel")
        if limit is not None and peers >= limit:
            return f"waits for its group: {peers} of at most {limit} run"
        short = [
            f"needs {facts[kind]} {unit}{'s' * (facts[kind] != 1)}, {free[kind]} free"
            for kind, unit in (("cpus", "core"), ("gpus", "GPU"))
            if free.get(kind, facts[kind]) < facts[kind]
        ]
        return f"waits for devices: {'; '.join(short)}" if short else "waits for its turn"

    def _has_succeeded(self, job_id: str) -> bool | None:
        return self.queue.has_succeeded(
            self._attempts.get(attempt_of(job_id.rpartition(":")[2])[0], ())
        )


def _where(job_id: str) -> str:
    host, _, queue = job_id.rpartition(":")[0].partition(":")
    return (
        f"local jobs of the queue {queue} of {host} can only be seen there, with the same "
        "LATHE_QUEUE and home"
    )


def _out_of_sight(entry: QueuedJob) -> str:
    host = (entry.read_start() or {}).get("host")
    return f"{entry.folder}: started on {host} in another container, and can only be seen there"


def _id_elsewhere(entry: Mapping[str, Any], queue: Queue) -> str | None:
    """The id under which another queue has a job; None when none has. Unreachable when that cannot
    be known here.

    The attempt's folder names the queue that it was first handed to. The caller holds the
    experiment's lock: what is not in that queue now never gets into it.
    """
    path = Path(entry["attempt"]) / FILE
    before = read_json(path) or entry
    token = entry["id"].rpartition(":")[2]
    if before["id"] == entry["id"] or before["id"].rpartition(":")[2] != token:
        return None
    other = replace(queue, folder=Path(before["queue"]))
    if (
        not (other.folder / "identity.json").exists()
        or other.id_of(token) != before["id"]
        or not other.is_here
    ):
        raise Unreachable(
            f"{token} was first sent to the queue {before['queue']} as {before['id']}, and may "
            "run: look there first"
        )
    if other.entry(token).folder.exists():
        other.wake()
        return before["id"]
    replace_file(path, json.dumps(entry, indent=1).encode())
    return None


def _ending(ended: Mapping[str, Any]) -> Observed:
    code, reason = ended["code"], ended["reason"]
    if code == EXIT_OK:
        return Observed("succeeded", exit_code=0)
    if code == EXIT_PREEMPTED:
        return Observed("preempted", reason, exit_code=code)
    if code == CANCELLED:
        return Observed("cancelled", reason, exit_code=code)
    return Observed("failed", reason or f"its wrapper ended with {code}", exit_code=code)
