"""What haven's JobManager asks of a scheduler, answered by our submission and our record.

haven decides which experiments it launches, copies the code, and names the command. Sending is
ours: the job runs under the wrapper, and is on record, so that `lathe status`, `cancel`, `logs` and
`reconcile` know it, and a job that is alive is not sent a second time.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.backends import BackendCache
from jobs.config import JobConfig
from jobs.errors import Refused, Unreachable
from jobs.job_state import ENDED_BADLY, JobState
from jobs.record import events as record
from jobs.record.paths import BaseFolder, RunFolder
from jobs.record.status import survey
from jobs.submit import control, group, prepare
from trainer.config.block import validate
from trainer.config.flags import PATHS, RUN_FLAGS, SWITCHES
from trainer.config.groups import names
from trainer.errors import ConfigError
from trainer.files.atomic import read_json

if TYPE_CHECKING:
    from jobs.record.row import Row
    from jobs.submit.request import Request

GROUP = "group"  # key of a job dictionary for haven: how `lathe status` calls its experiments
KILL_S, KILL_POLL_S = 600.0, 0.5
# haven raises "wtf" for every state that it does not know, and launches what is FAILED, CANCELLED,
# INTERRUPTED, TIMEOUT or NODE_FAIL again.
STATES: Mapping[JobState, str] = {
    "pending": "QUEUED",
    "submitting": "QUEUED",
    "submitted": "QUEUED",
    "queued": "QUEUED",
    "held": "QUEUED",
    "paused": "QUEUED",
    "running": "RUNNING",
    "succeeded": "SUCCEEDED",
    "failed": "FAILED",
    "oom": "FAILED",
    "timeout": "TIMEOUT",
    "preempted": "INTERRUPTED",
    "cancelled": "CANCELLED",
    "lost": "NODE_FAIL",
}
ALIVE = ("QUEUED", "RUNNING")
# haven's command: the launch line, a Python file and its arguments, of which --exp_id is the first
COMMAND = re.compile(r"(?P<launcher>.+?)\s+(?P<program>\S+\.py\s+--exp_id\s.*)", re.DOTALL)

log = logging.getLogger(__name__)


class HavenJob(dict[str, Any]):
    """One job as haven reads it, by key or by attribute: id, state, runs, alive, command."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Scheduler:
    """In the place of haven's modules toolkit_manager and slurm_manager; `api` is not used."""

    def __init__(
        self,
        backend: str,
        base: Path,
        experiments: Sequence[dict[str, Any]] = (),
        *,
        group: str = "haven",
    ) -> None:
        """backend: where jobs are sent. experiments: those that haven launches, the group."""
        self._backend, self._base, self._group = backend, BaseFolder(base.absolute()), group
        self._backend_of = BackendCache()
        self._names = names(group, list(experiments))

    def get_jobs(self, api: Any, account_id: str | None) -> list[HavenJob]:
        """The last job of every experiment of the folder."""
        return [self._job(row) for row in self._rows().values() if row.job_id is not None]

    def get_jobs_dict(
        self, api: Any, job_id_list: Sequence[str], query_size: int = 20
    ) -> dict[str, HavenJob]:
        """The jobs of these ids. One that neither a record nor the scheduler knows is left out."""
        if not job_id_list:
            return {}
        rows = self._rows()
        jobs = {job_id: self._job(rows[job_id]) for job_id in job_id_list if job_id in rows}
        others = [job_id for job_id in job_id_list if job_id not in jobs]
        if others:  # sent by haven alone
            for job_id, observed in self._backend_of(self._backend).query(others).items():
                state = "queued" if observed.will_rerun else observed.state
                jobs[job_id] = _haven_job(job_id, state, starts=observed.restarts + 1, command="")
        return jobs

    def get_job(self, api: Any, job_id: str) -> HavenJob:
        """One job; haven wants a ValueError for an id that nobody knows."""
        jobs = self.get_jobs_dict(api, [job_id])
        if job_id not in jobs:
            raise ValueError(f"job id {job_id} not found.")
        return jobs[job_id]

    def kill_job(self, api: Any, job_id: str) -> None:
        """Ask for the end of a job and wait until it is dead.

        Unreachable when it lives on for ten minutes.
        """
        row = self._rows().get(job_id)
        if row is None:
            self._backend_of(self._backend).cancel(job_id)
        else:
            control.cancel(self._base, [row], self._backend_of)
        end = time.monotonic() + KILL_S
        while (job := self.get_jobs_dict(api, [job_id]).get(job_id)) is not None and job.alive:
            if time.monotonic() > end:
                raise Unreachable(
                    f"{job_id} is still {job.state} {KILL_S:.0f} s after it was asked to end."
                )
            time.sleep(KILL_POLL_S)

    def submit_job(
        self,
        api: Any,
        account_id: str | None,
        command: str,
        job_config: Mapping[str, Any],
        workdir: str,
        savedir_logs: str | None = None,
    ) -> str:
        """The id of a job that runs `command` in `workdir`, which is SAVEDIR_BASE/<id>/code; of the
        earlier one where that is alive or has succeeded.

        ConfigError for what a training would refuse, Refused where the scheduler says no.
        """
        folder = RunFolder(Path(workdir).parent)
        keys = {key: value for key, value in job_config.items() if key != "name"}
        if account_id:
            keys.setdefault(self._backend_of(self._backend).traits.account_key, account_id)
        job = validate(JobConfig, keys, source="job_config")
        request = self._request(folder, command, job, Path(workdir))
        (result,) = group.submit(replace(request, answer_wait_s=0))
        if result.is_unanswered:  # a job that arrived and has failed meanwhile is not sent again
            (result,) = group.submit(replace(request, retry=()))
        log.info("%s: %s, %s", result.exp_id, result.action, result.text)
        row = record.read(folder)
        last = row.last if row is not None else None
        exit_file = {} if last is None else read_json(folder.attempt(last.number).exit) or {}
        # a job whose reply was lost and that has ended has written its id itself
        job_id = last and (last.id or exit_file.get("id"))
        if last is None or job_id is None:
            raise Refused(f"{result.exp_id}: {result.text}")
        if savedir_logs is not None:
            for name in ("logs.txt", "err.txt"):  # which haven's notebooks show
                _link(Path(savedir_logs, name), f"attempts/{last.number}/{name}")
        return str(job_id)

    def _request(self, folder: RunFolder, command: str, job: JobConfig, workdir: Path) -> Request:
        """The request to send one experiment with haven's copy of the code and haven's command."""
        values = read_json(folder.exp_dict)
        parts = COMMAND.fullmatch(command.strip())
        if values is None or parts is None:
            raise ConfigError(
                f"command {command!r} in {folder.path}: want LAUNCH_LINE FILE.py --exp_id ID ..., "
                "as haven's run_wizard writes it, beside exp_dict.json."
            )
        if job.survive:
            raise ConfigError(
                f"survive={job.survive!r}: haven's launcher starts no such ranks. Leave it out, or "
                "use lathe-jobs submit."
            )
        _refuse_without_lathe(workdir)
        program, flags = _program(shlex.split(parts["program"]))
        launcher = "" if parts["launcher"] == "python" else parts["launcher"]
        request = prepare.make(
            group=self._group,
            experiments=[values],
            base=self._base.path,
            backend=self._backend,
            job=job.model_copy(update={"python_binary": launcher or job.python_binary}),
            flags=flags,
            allow_dirty=True,
            take_snapshot=False,  # haven has copied the code
            retry=ENDED_BADLY,  # haven launches what has ended so
        )
        return replace(request, workdir=workdir, program=program, shown=self._names)

    def _rows(self) -> dict[str, Row]:
        """The row of each experiment of the folder, by the ids of its jobs."""
        rows = survey(self._base, backend_of=self._backend_of)
        ids = {row.exp_id: {row.job_id, *(job.id for job in row.history)} for row in rows}
        return {name: row for row in rows for name in ids[row.exp_id] if name is not None}

    def _job(self, row: Row) -> HavenJob:
        command = (read_json(RunFolder(Path(row.folder)).job_dict) or {}).get("command", "")
        return _haven_job(str(row.job_id), row.state, starts=len(row.starts), command=str(command))


def _haven_job(job_id: str, state: JobState, *, starts: int, command: str) -> HavenJob:
    return HavenJob(
        id=job_id,
        state=STATES[state],
        runs=[{}] * starts,  # haven counts them
        alive=STATES[state] in ALIVE,
        command=["/bin/bash", "-c", command],  # haven shows the third word
    )


def _program(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The program of a job with absolute paths, and those of its arguments that are flags of a run.
    What haven writes as "None" was not given.
    """
    flags: dict[str, str] = {}
    for at in range(1, len(words) - 1):
        name, value = words[at].removeprefix("--"), words[at + 1]
        is_off = value == "None" or (value == "False" and name in SWITCHES)
        if not words[at].startswith("--") or name not in RUN_FLAGS or is_off:
            continue
        if name in PATHS:  # a job runs in another folder
            value = words[at + 1] = os.path.abspath(os.path.expanduser(value))
        flags[name] = value
    return words, flags


def _refuse_without_lathe(workdir: Path) -> None:
    """ConfigError where the job would not find Lathe's wrapper."""
    if (workdir / "jobs" / "node" / "wrapper.py").is_file():
        return
    try:
        importlib.metadata.distribution("lathe-finetune")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"{workdir}: haven's copy of the code has no Lathe in it, and it is not installed. "
            "Start from the folder of Lathe (workdir=), or install it: pip install -e FOLDER."
        ) from None


def _link(path: Path, target: str) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with suppress(OSError):  # only haven's notebooks read it
        os.symlink(target, temporary)
        os.replace(temporary, path)
