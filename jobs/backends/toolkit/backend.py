"""Toolkit, the cluster of ServiceNow, through its command line `eai`. Tried against a stand-in
only.

A job's name is its token: names are unique there, also against dead jobs, so the same attempt
cannot be sent twice. That needs the literal name: `--enforce-name` would add a suffix, and is never
used. Reading is retried for as long as the control plane usually needs to come back; sending never
is, because a reply may be lost after the job was created.

Never verified against the service: all that jobs/backends/toolkit/eai.py says of its answers, and
the state after --max-run-time.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jobs.backends.toolkit.eai import (
    CHECK_S,
    EAI,
    ENDED,
    GONE,
    ID,
    READ_S,
    REFUSALS,
    RESTART_TAG,
    SEND_S,
    EaiJob,
    ToolkitReply,
    call,
    follow_log,
    parse_jobs,
)
from jobs.errors import Refused, Unreachable
from jobs.protocol import Finding, JobSpec, Rendered, Traits
from jobs.secret_keys import SECRET
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from jobs.config import JobConfig
    from jobs.job_state import Observed

RETRY_S = 1500.0  # outages of up to half an hour were seen
LONGEST_PAUSE_S = 120.0
FEW = 3  # up to so many ids are asked for one by one; more with one listing
LONGEST_LIST = 1000
NON_PREEMPTABLE_S = 48 * 3600
OWN = ("account_id", "image", "data", "preemptable", "restartable", "bid", "wandb_key_secret")

NAME = re.compile(r"[a-z0-9_]+\Z")
MOUNT = re.compile(r"[^:]+:(/[^:]*)(?::(ro|rw))?\Z")
log = logging.getLogger(__name__)


class Toolkit:
    """Jobs on Toolkit, one container each.

    Everything that a job reads or writes lies in the mounts of `data`.
    """

    name: ClassVar[str] = "toolkit"
    traits: ClassVar[Traits] = Traits()
    validation: ClassVar[str] = "stand-in only; never reached the real service"

    def __init__(self, *, account: str | None = None, retry_s: float | None = None) -> None:
        """account: where to look for jobs, besides one's own.

        retry_s: how long reading is retried, in seconds.
        """
        self.account = account
        self.retry_s = (
            float(os.environ.get("LATHE_EAI_RETRY_S", RETRY_S)) if retry_s is None else retry_s
        )

    def check(self) -> list[Finding]:
        """Whether `eai` is there, is logged in, and knows an account."""
        path = shutil.which(EAI)
        if path is None:
            return [
                Finding(
                    "eai",
                    False,
                    "not on PATH. Install Toolkit's command line, or add its folder to PATH.",
                )
            ]
        login = call("login", "token", "-H", timeout_s=CHECK_S)
        reply = call("account", "get", "--field", "id", "--no-header", timeout_s=CHECK_S)
        return [
            Finding("eai", True, path),
            Finding(
                "login",
                login.code == 0,
                "a token" if login.code == 0 else f"{login.text}. Run: eai login",
            ),
            Finding(
                "account",
                reply.code == 0,
                reply.out.strip() if reply.code == 0 else f"{reply.text}. Set account_id",
            ),
        ]

    def render(self, spec: JobSpec) -> Rendered:
        """One `eai job new`. ConfigError for keys of other schedulers, and folders in no mount."""
        if spec.after:
            raise ConfigError(
                f"toolkit: after={spec.after}: Toolkit has no dependencies between jobs. Leave "
                "it out."
            )
        return _render(spec)

    def rehearse(self, rendered: Rendered) -> str | None:
        """None: `eai` has no dry run."""
        return None

    def submit(self, rendered: Rendered) -> str:
        """The id of the job with this name, whether this call made it or an earlier one did. Tried
        once.

        Refused: `eai` itself or the service said no, and no such job exists. Unreachable:
        everything else.
        """
        try:
            answer = call(*rendered.argv[1:], timeout_s=SEND_S)
        except Unreachable as error:  # there is no eai: nothing was sent
            raise Refused(str(error)) from None
        if answer.code == 0 and (ids := ID.findall(answer.out)):
            return ids[-1]
        if answer.is_passing or answer.code == 0:
            raise Unreachable(
                f"{rendered.token}: {answer.text}. Whether the job exists is not known: look for "
                "its name."
            )
        if existing := self.find(rendered.token):
            return existing[0]
        if REFUSALS.search(answer.text.lower()):
            raise Refused(f"{rendered.token}: {answer.text}")
        raise Unreachable(f"{rendered.token}: {answer.text}. No job of this name is listed yet.")

    def find(self, token: str) -> list[str]:
        """Ids of the jobs of exactly this name in every state; at most one, as names are unique."""
        return [job.id for job in self.list_jobs("-N", token) if job.name == token]

    def query(self, ids: Sequence[str]) -> dict[str, Observed]:
        """The states of these jobs. An id that the service does not know is left out."""
        return {job_id: job.observe() for job_id, job in self.details(ids).items()}

    def details(self, ids: Sequence[str]) -> dict[str, EaiJob]:
        """These jobs as `eai` shows them. An id neither shown nor listed is left out."""
        unique = list(dict.fromkeys(ids))
        jobs = {job.id: job for job in self.list_jobs()} if len(unique) > FEW else {}
        for job_id in unique:
            if job_id in jobs:
                continue
            answer = self._read("job", "get", job_id, "--format", "json")
            if answer.code == 0:
                jobs[job_id] = parse_jobs(answer.out, f"eai job get {job_id}")[0]
            elif not GONE.search(answer.text):
                raise Unreachable(f"eai job get {job_id}: {answer.text}")
        if len(unique) <= FEW and not all(job_id in jobs for job_id in unique):
            # a proxy that is starting says "not found" too
            jobs |= {job.id: job for job in self.list_jobs()}
        return {job_id: jobs[job_id] for job_id in unique if job_id in jobs}

    def cancel(self, job_id: str) -> None:
        """Ask for the end of a job. Nothing happens if it has ended or is unknown."""
        answer = self._read("job", "kill", job_id)
        if answer.code == 0 or ENDED.search(answer.text):
            return
        if not GONE.search(answer.text) or job_id in self.details([job_id]):
            raise Unreachable(f"eai job kill {job_id}: {answer.text}")

    def logs(self, job_id: str, *, follow: bool) -> Iterator[str]:
        """Lines of all runs of a job; with `follow` until it ends. Nothing for an unknown job."""
        if follow:
            yield from follow_log(job_id)
            return
        answer = self._read("job", "log", job_id)
        if answer.code != 0 and not GONE.search(answer.text):
            raise Unreachable(f"eai job log {job_id}: {answer.text}")
        yield from answer.out.splitlines() if answer.code == 0 else ()

    def list_jobs(self, *filters: str) -> list[EaiJob]:
        """Every job, dead ones too: one's own, and those of `account`. Unreachable."""
        scopes = [["--me"], *([["--account", self.account]] if self.account else [])]
        jobs: dict[str, EaiJob] = {}
        for scope in scopes:
            words = [
                "job",
                "ls",
                *scope,
                "--state",
                "all",
                "--limit",
                str(LONGEST_LIST),
                *filters,
                "--format",
                "json",
            ]
            answer = self._read(*words)
            if answer.code != 0:
                raise Unreachable(f"eai job ls: {answer.text}")
            jobs |= {job.id: job for job in parse_jobs(answer.out, "eai job ls")}
        return list(jobs.values())

    def _read(self, *words: str) -> ToolkitReply:
        """The first answer that is not a passing fault. Unreachable after `retry_s`."""
        end, pause_s = time.monotonic() + self.retry_s, min(1.0, self.retry_s / 20)
        while (answer := call(*words, timeout_s=READ_S)).is_passing:
            if time.monotonic() + pause_s > end:
                raise Unreachable(
                    f"eai {' '.join(words[:2])}: {answer.text}. Tried for {self.retry_s:.0f} s."
                )
            log.warning("eai %s: %s; again in %.1f s", " ".join(words[:2]), answer.text, pause_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return answer


def _render(spec: JobSpec) -> Rendered:
    """The `eai job new` that runs the wrapper under the name of its token, and its values as
    JSON. The folders that it reads and writes must lie in a mount.
    """
    job, environment = spec.job, {**spec.job.environment_vars, **spec.environment}
    tags = {"exp_id": spec.exp_id, "group": spec.group}
    job.refuse_foreign("toolkit", OWN)
    kind = (
        "restartable"
        if job.restartable
        else "preemptable"
        if job.preemptable
        else "non-preemptable"
    )
    problems = _key_problems(spec.token, job, environment, kind) + _mount_problems(spec)
    if problems:
        raise ConfigError("\n  ".join([f"toolkit: {len(problems)} mistake(s)", *problems]))
    values: dict[str, Any] = {
        "account": job.account_id,
        "name": spec.token,
        "image": job.image,
        **{name.replace("_", "-"): value for name, value in job.resources.model_dump().items()},
        "data": _mounts(job),
        "env": environment,
        "tag": {key: re.sub(r"[^A-Za-z0-9_.-]", "_", value) for key, value in tags.items()},
        "workdir": spec.workdir,
        "max-run-time": job.max_run_time,
        "bid": job.bid,
        "kind": kind,
        "command": spec.wrapper,
    }
    if job.restartable:
        values["tag"] |= {RESTART_TAG: "yes"}
    fields = {key: value for key, value in values.items() if value not in (None, [], {})}
    return Rendered(
        spec.token, "rendered.eai.json", json.dumps(fields, indent=2) + "\n", tuple(_argv(fields))
    )


def _argv(values: Mapping[str, Any]) -> Iterator[str]:
    yield from (EAI, "job", "new")
    for key, value in values.items():
        option = "--gpu-model-filter" if key == "gpu-model" else f"--{key}"
        if key == "kind":
            yield f"--{value}"
        elif isinstance(value, dict):
            for name, text in cast("dict[str, str]", value).items():
                yield from (option, f"{name}={text}")
        elif key == "data":
            for mount in value:
                yield from (option, mount)
        elif key != "command":
            yield from (option, str(value))
    yield from ("--field", "id", "--no-header", "--", *values["command"])


def _key_problems(
    token: str, job: JobConfig, environment: Mapping[str, str], kind: str
) -> list[str]:
    """A sentence for each key of a job dictionary that this backend cannot or must not obey."""
    problems: list[str] = []
    if job.nodes > 1:
        problems.append(
            f"nodes={job.nodes}: jobs of several nodes were never tried on Toolkit. Use nodes=1."
        )
    if job.image is None:
        problems.append("image: a job is a container. Name its image.")
    if not NAME.match(token):
        problems.append(f"name {token!r}: Toolkit allows a-z, 0-9 and _ only.")
    if kind == "non-preemptable" and (job.max_run_time or 0) > NON_PREEMPTABLE_S:
        problems.append(
            f"max_run_time={job.max_run_time}: a job that is neither preemptable nor restartable "
            f"has at most {NON_PREEMPTABLE_S} s. Set restartable, or less."
        )
    problems += [
        f"environment variable {name} looks like a secret, and everybody who sees the job sees "
        "it. Use wandb_key_file."
        for name in environment
        if SECRET.search(name)
    ]
    problems += [
        f"data {mount!r}: want NAME:/mount, with :ro or :rw."
        for mount in _mounts(job)
        if not MOUNT.match(mount)
    ]
    if job.wandb_key_secret and not _is_below(
        job.wandb_key_file or "", MOUNT.match(job.wandb_key_secret)
    ):
        problems.append(
            f"wandb_key_secret={job.wandb_key_secret!r} is a mount: wandb_key_file must name the "
            f"file in it. Got {job.wandb_key_file!r}."
        )
    return problems


def _mount_problems(spec: JobSpec) -> list[str]:
    """The folders that lie in no mount, a sentence each.

    A container sees nothing of the submitter's disk but its mounts.
    """
    job = spec.job
    mounts = [match for text in _mounts(job) if (match := MOUNT.match(text))]
    rw = [match for match in mounts if match[2] != "ro"]
    reads = [spec.workdir, *([job.wandb_key_file] if job.wandb_key_file else [])]
    unwritable = [path for path in [spec.folder] if not any(_is_below(path, match) for match in rw)]
    unseen = [path for path in reads if not any(_is_below(path, match) for match in mounts)]
    return [
        *(
            f"{path} is in no mount of `data` that can be written. Mounts: {job.data}."
            for path in unwritable
        ),
        *(
            f"{path} is in no mount of `data`: the job could not see it. Mounts: {job.data}."
            for path in unseen
        ),
    ]


def _mounts(job: JobConfig) -> list[str]:
    return [*job.data, *([job.wandb_key_secret] if job.wandb_key_secret else [])]


def _is_below(path: str, mount: re.Match[str] | None) -> bool:
    return mount is not None and PurePosixPath(path).is_relative_to(mount[1])
