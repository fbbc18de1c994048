"""Driven runs in the worker of another one, the host: they share its base and its devices.

The service alone sends jobs here (jobs/serve/steps/upkeep/hosts.py): nothing is started, the host's
worker is asked to compute one run more (trainer/operations/guests.py). An id is
`<the host's run folder>:<token>`. When the host's job has ended, its guests are "preempted", and
go on from their own folders elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from jobs.job_state import ENDED, Observed
from jobs.protocol import Finding, JobSpec, Rendered, Traits
from jobs.record import events as record
from jobs.record.paths import RunFolder
from jobs.record.state_table import EXIT_FILES, end_of
from jobs.record.times import age_of, now
from trainer.errors import EXIT_OK, EXIT_PAUSED, EXIT_PREEMPTED, ConfigError
from trainer.files.atomic import create_json, read_json
from trainer.operations.guests import Guests

HOST = "LATHE_HOST_RUN"  # of a job's environment: the id of the run whose worker computes it
AGAIN_S = 30.0  # within which the job of a host that failed is begun again, with its guests


class BesideHost:
    """The workers of driven runs as a backend."""

    name: ClassVar[str] = "beside"
    traits: ClassVar[Traits] = Traits(shares_disk=True, needs_host=True)
    validation: ClassVar[str] = "run for real by the tests"

    def check(self) -> list[Finding]:
        """One good finding: it is files in run folders."""
        return [Finding("beside", True, "runs of the service share the worker of another run")]

    def render(self, spec: JobSpec) -> Rendered:
        """Who asks whom. ConfigError for a job that the service did not send."""
        host = spec.environment.get(HOST)
        if host is None:
            raise ConfigError(
                "-j beside: got a job without a host. The service alone sends driven runs there, "
                "where service.py says `driven: {together: N}`: use -j local, or another backend."
            )
        folder = Path(spec.folder)
        values = {"host": str(folder.with_name(host)), "id": spec.exp_id}
        return Rendered(spec.token, "rendered.beside.json", json.dumps(values) + "\n")

    def rehearse(self, rendered: Rendered) -> str | None:
        """None: a worker has no dry run."""
        return None

    def submit(self, rendered: Rendered) -> str:
        """Ask the host's worker, once."""
        values = json.loads(rendered.text)
        Guests.of(Path(values["host"])).ask(rendered.token, values["id"])
        return f"{values['host']}:{rendered.token}"

    def find(self, token: str) -> list[str]:
        """No ids: asking the same host again with the same token changes nothing."""
        return []

    def query(self, ids: Sequence[str]) -> dict[str, Observed]:
        """How each guest stands, by the files of its host."""
        states = {job_id: _observed(*_split(job_id)) for job_id in ids}
        return {job_id: observed for job_id, observed in states.items() if observed is not None}

    def cancel(self, job_id: str) -> None:
        """Ask the host's worker to save the run and let it go."""
        host, token = _split(job_id)
        Guests.of(host).stop(token)

    def logs(self, job_id: str, *, follow: bool) -> Iterator[str]:
        """Where to look: the host's worker says what it does for all of its runs."""
        host, _ = _split(job_id)
        yield f"computed by the worker of {host.name}: see the log of that run\n"


def _split(job_id: str) -> tuple[Path, str]:
    host, _, token = job_id.rpartition(":")
    return Path(host), token


def _observed(host: Path, token: str) -> Observed | None:
    """How a guest stands; None, it never asked."""
    guests = Guests.of(host)
    stay = guests.stay(token)
    if stay.state == "absent":
        return None
    if stay.state == "waiting" and token in guests.stops():
        guests.let_out(token, EXIT_PREEMPTED)
        stay = guests.stay(token)
    gone = None if stay.state == "out" else _why_gone(host)
    if gone is not None:
        guests.stop(token)  # a worker that comes back does not take it up
        guests.let_out(token, EXIT_PREEMPTED, gone)
        stay = guests.stay(token)
    if stay.state != "out":
        text = None if stay.state == "in" else f"it waits for the worker of {host.name}"
        return Observed("running" if stay.state == "in" else "queued", text)
    # the exit file is the truth of a job, and is seen from the next look on
    code = 1 if stay.code is None else stay.code
    is_new = _write_exit(guests, token, code, stay.error)
    return Observed("running") if is_new else None


def _why_gone(host: Path) -> str | None:
    """Why the worker of a host computes nothing any more; None while it does, or may again."""
    job = record.read(RunFolder(host))
    last = None if job is None else job.last
    if last is None:
        return f"the host {host.name} was deleted"
    exit_file = RunFolder(host).attempt(last.number).exit
    code = (read_json(exit_file) or {}).get("code")
    if code is None and last.state not in ENDED:
        return None
    will_not_come = code in (EXIT_OK, EXIT_PAUSED) or last.is_cancelled
    if will_not_come or code is None or age_of(exit_file, None) > AGAIN_S:
        return f"the host {host.name} has ended"
    return None


def _write_exit(guests: Guests, token: str, code: int, error: str | None) -> bool:
    """Write the exit file of a guest's attempt, once; whether it is new."""
    asked = read_json(guests.folder / f"{token}.json") or {}
    run = RunFolder(guests.folder.parents[2] / str(asked["id"]))
    attempt = run.attempt(int(token.rpartition("_")[2]))
    code, kind = EXIT_FILES[end_of(code)]
    step = (read_json(run.status) or {}).get("step")
    facts = {"code": code, "kind": kind, "reason": error, "step": step, "start": 1}
    return create_json(attempt.exit, {"at": now(), **facts, "host": None, "id": None})
