"""haven-ai 0.7.3 for notebooks: its JobManager over our Toolkit backend, its ResultManager, its id.
Its only importer.

haven is never in the way of an experiment: ids, folders and submission are ours
(trainer/config/schema.py, jobs/). Three things are cured when it is loaded: it asks pkg_resources
for its version, which setuptools 82 dropped; its toolkit module needs a client that is not public,
and this module takes that place; every summary sets TZ=US/Eastern for the whole process, and now
only formats the time so.

haven unpickles score_list.pkl: look only at folders that you trust.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import shlex
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from jobs.backends.toolkit.backend import Toolkit, rendered_job
from jobs.config import JobConfig
from jobs.errors import Unreachable
from trainer.config.block import validate
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from jobs.backends.toolkit.eai import EaiJob
    from jobs.protocol import Rendered

INSTALL = "Install it with: pip install -e '.[haven]'"
SHELL_WORDS = frozenset(";&|<>()")
KILL_S, KILL_POLL_S = 600.0, 0.5
# haven raises "wtf" for every other state, and starts what is FAILED, CANCELLED or INTERRUPTED
# again.
KNOWN = ("RUNNING", "QUEUED", "QUEUING", "SUCCEEDED", "FAILED", "CANCELLED", "INTERRUPTED")


class HavenJob(dict[str, Any]):
    """One job as haven reads it, by key or by attribute: id, state, runs, alive, command, name."""

    @classmethod
    def of(cls, job: EaiJob) -> HavenJob:
        """haven's view of a Toolkit job. A job that may still run never gets a state in which haven
        would send it again.
        """
        state = job.state if job.state in KNOWN else "RUNNING" if job.runs else "QUEUED"
        return cls(
            id=job.id,
            state="QUEUED" if job.will_rerun else state,
            runs=[dict(run) for run in job.runs],
            alive=job.is_alive,
            command=["/bin/bash", "-c", shlex.join(job.command)],  # haven shows the third word
            name=job.name,
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def hash_dict(values: dict[str, Any]) -> str:
    """haven's own id of an experiment, which exp_id must equal. ConfigError without haven."""
    return str(_load("haven_utils").hash_dict(values))


def job_manager(
    savedir_base: str | Path,
    exp_list: Sequence[dict[str, Any]] | None = None,
    *,
    workdir: str | Path = ".",
    **job: Any,
) -> Any:
    """haven's JobManager over the folders of `savedir_base`, talking to Toolkit through us.

    exp_list: by default every experiment below savedir_base. job: a job dictionary as `-j toolkit`
    reads it, needed to launch only. For experiments of EXP_GROUPS prefer `jobs submit`: haven keeps
    no record of what it sends.
    """
    manager = _load("haven_jobs")
    utils = _load("haven_utils")
    experiments = (
        utils.get_exp_list(str(savedir_base), verbose=False) if exp_list is None else list(exp_list)
    )
    return manager.JobManager(
        exp_list=experiments,
        savedir_base=str(savedir_base),
        workdir=str(workdir),
        job_config=dict(job),
        job_scheduler="toolkit",
    )


def result_manager(savedir_base: str | Path, **options: Any) -> Any:
    """haven's ResultManager over the folders of `savedir_base`; options as haven documents them."""
    return _load("haven_results").ResultManager(savedir_base=str(savedir_base), **options)


# The seam: haven's names and signatures. `api` is a Toolkit.


def get_api(**_: Any) -> Toolkit:
    """The object that haven passes to the other functions."""
    return Toolkit()


def get_jobs(api: Toolkit, account_id: str | None) -> list[HavenJob]:
    """Every job of this user, and of the account."""
    return [
        HavenJob.of(job) for job in Toolkit(account=account_id, retry_s=api.retry_s).list_jobs()
    ]


def get_jobs_dict(
    api: Toolkit, job_id_list: Sequence[str], query_size: int = 20
) -> dict[str, HavenJob]:
    """The jobs of these ids; one that Toolkit does not know is left out."""
    return {job_id: HavenJob.of(job) for job_id, job in api.details(job_id_list).items()}


def get_job(api: Toolkit, job_id: str) -> HavenJob:
    """One job; haven wants a ValueError for an id that nobody knows."""
    jobs = get_jobs_dict(api, [job_id])
    if job_id not in jobs:
        raise ValueError(f"job id {job_id} not found.")
    return jobs[job_id]


def kill_job(api: Toolkit, job_id: str) -> None:
    """Ask for the end of a job and wait until it is dead.

    Unreachable when it lives on for ten minutes.
    """
    api.cancel(job_id)
    end = time.monotonic() + KILL_S
    while (job := api.details([job_id]).get(job_id)) is not None and job.is_alive:
        if time.monotonic() > end:
            raise Unreachable(
                f"{job_id} is still {job.state} {KILL_S:.0f} s after it was asked to end."
            )
        time.sleep(KILL_POLL_S)


def submit_job(
    api: Toolkit,
    account_id: str | None,
    command: str,
    job_config: Mapping[str, Any],
    workdir: str,
    savedir_logs: str | None = None,
) -> str:
    """The id of a job that runs `command` in `workdir`; a live job that was sent for the same is
    that job.

    command is split as a shell splits it, but no shell ever reads it: ConfigError for ;, |, & and
    their like.
    """
    argv = _words(command)
    # the name is what finds the job again
    keys = {key: value for key, value in job_config.items() if key != "name"}
    job = validate(
        JobConfig, keys | ({"account_id": account_id} if account_id else {}), source="job_config"
    )
    digest = hashlib.sha256(repr((account_id, workdir, argv)).encode()).hexdigest()[:16]
    if savedir_logs is not None:  # logs.txt and err.txt, as haven reads them; a restart appends
        line = 'exec "$@" >>"$0/logs.txt" 2>>"$0/err.txt"'
        argv = ["/bin/sh", "-c", line, savedir_logs, *argv]
    number = 0
    while True:
        rendered = rendered_job(
            f"hv_{digest}_{number}",
            job,
            command=argv,
            workdir=workdir,
            writes=[savedir_logs] if savedir_logs else [],
            environment=job.environment_vars,
            tags={"exp_id": Path(workdir).parent.name},
        )
        earlier = api.details(api.find(rendered.token))
        if not earlier:
            return _submit(api, rendered)
        if alive := [job.id for job in earlier.values() if job.is_alive]:
            return alive[0]
        number += 1


def _submit(api: Toolkit, rendered: Rendered) -> str:
    try:
        return api.submit(rendered)
    except Unreachable:
        if ids := api.find(rendered.token):  # the reply was lost, the job was not
            return ids[0]
        raise


def _words(command: str) -> list[str]:
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise ConfigError(f"command {command!r}: {error}. Quote it as for a shell.") from None
    if not words or any(
        set(word) <= SHELL_WORDS or "`" in word or "$" in word for word in words if word
    ):
        raise ConfigError(
            f"command {command!r}: want one program and its arguments; no shell reads it. "
            "Use `jobs submit`, which activates an environment by itself."
        )
    return words


# Loading


@cache
def _load(name: str) -> Any:
    """haven.<name>, with three defects repaired. ConfigError when haven is not installed."""
    if importlib.util.find_spec("haven") is None:
        raise ConfigError(f"haven is not installed. {INSTALL}")
    try:
        with _pkg_resources():
            utils = importlib.import_module("haven.haven_utils")
        jobs = importlib.import_module("haven.haven_jobs")
        module = importlib.import_module(f"haven.{name}")
    except ImportError as error:
        raise ConfigError(f"haven cannot be imported: {error}. {INSTALL}") from error
    utils.time_to_montreal = _eastern_time  # type: ignore[attr-defined]
    jobs.toolkit_manager = sys.modules[__name__]  # type: ignore[attr-defined]  # what `from . import` finds
    return module


@contextmanager
def _pkg_resources() -> Generator[None]:
    """Answer the one question that haven asks of pkg_resources, which newer setuptools lack.

    The stand-in is removed after the block, so that no other package finds it.
    """
    if "haven" in sys.modules or importlib.util.find_spec("pkg_resources") is not None:
        yield
        return

    def get_distribution(name: str) -> SimpleNamespace:
        return SimpleNamespace(version=importlib.metadata.version(name))

    stub: Any = ModuleType("pkg_resources")
    stub.get_distribution = get_distribution
    sys.modules["pkg_resources"] = stub
    try:
        yield
    finally:
        del sys.modules["pkg_resources"]


def _eastern_time(fname: str | None = None, timezone: str = "US/Eastern") -> str:
    """When a file was changed (or now) as haven writes it: "03:14 PM (Nov 21)".

    This process' TZ is not touched.
    """
    try:
        # the first is an optional alias
        zone = ZoneInfo({"US/Eastern": "America/New_York"}.get(timezone, timezone))
    except ZoneInfoNotFoundError:  # a machine without time zones
        zone = None
    moment = os.path.getctime(fname) if fname else time.time()
    return datetime.fromtimestamp(moment, zone).strftime("%I:%M %p (%b %d)")
