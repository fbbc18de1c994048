"""Ray: one job of a Ray cluster for each attempt, through Ray's own JobSubmissionClient.

The submission id is the attempt's token, and Ray refuses a second job of that id: that one is
adopted. Ray's client has no time limit of its own, so each call runs in a thread that is waited for
only so long. An id is the token, with "<address>/" before it when the job dictionary names the
cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from jobs.backends.k8s.checks import FOREIGN, K8S_ONLY, refuse_foreign, text_faults
from jobs.backends.k8s.manifest import GRACE_MARGIN_S
from jobs.errors import Refused, Unreachable
from jobs.job_state import JobState, Observed
from jobs.protocol import Finding, JobSpec, Rendered, Traits
from jobs.time_limits import within
from trainer.errors import ConfigError

TIMEOUT_S = 60.0  # for one request; Ray 2.60 answers a submission in 3 s
OVERRIDES = (
    "RAY_API_SERVER_ADDRESS",
    "RAY_ADDRESS",
)  # these win over an address that is given to Ray's client
ADDRESS = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+(/[A-Za-z0-9._/-]*)?")
STATUS = re.compile(r"status code (\d{3})\b")
STATES: dict[str, JobState] = {
    "PENDING": "queued",
    "RUNNING": "running",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "STOPPED": "cancelled",
}
# The job is as good as before and may go on elsewhere: Ray never starts one again by itself.
RUN_AGAIN = {
    "JOB_SUPERVISOR_ACTOR_DIED": "its node or Ray's process on it died",
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT": "Ray found no room for it in time "
    "(RAY_JOB_START_TIMEOUT_SECONDS)",
}
log = logging.getLogger(__name__)
T = TypeVar("T")


class Ray:
    """A Ray cluster: job.address, else $RAY_ADDRESS, else the one of this machine."""

    name: ClassVar[str] = "ray"
    traits: ClassVar[Traits] = Traits()
    validation: ClassVar[str] = (
        "by hand on one real Ray 2.60 head without GPU; a loopback HTTP server in the tests"
    )

    def __init__(self, address: str | None = None) -> None:
        """address: of the dashboard, for `find` and `check`; ids and jobs carry their own."""
        self.address = address

    def check(self) -> list[Finding]:
        """Whether Ray is installed and the cluster answers."""
        try:
            version = importlib.import_module("ray").__version__
        except ModuleNotFoundError:
            return [Finding("ray", False, "not installed: pip install -e '.[ray]'")]
        findings = [Finding("ray", True, str(version))]
        try:
            remote = _ask(self.address, lambda client: client.get_version())
        except (Unreachable, RayError) as error:
            return [*findings, Finding("cluster", False, str(error))]
        return [
            *findings,
            Finding(
                "cluster", True, f"{self.address or 'the default one'} answers (version {remote})"
            ),
        ]

    def render(self, spec: JobSpec) -> Rendered:
        """The submission as JSON. ConfigError names what Ray cannot do."""
        refuse_foreign(spec, (*FOREIGN, *K8S_ONLY), backend="ray")
        faults = [*text_faults(spec)]
        address = spec.job.address
        # Ray's client imports a module for some other schemes, and starts nothing for these two
        if address is not None and not ADDRESS.fullmatch(address):
            faults.append(
                f'address: {address!r}, want the dashboard\'s, for example "http://head:8265".'
            )
        if spec.job.nodes > 1:
            faults.append(
                f"nodes: {spec.job.nodes}, but a Ray job's entry point has one node. Use slurm "
                "or k8s."
            )
        if faults:
            raise ConfigError(
                f"job for ray: {len(faults)} mistake(s)\n"
                + "\n".join(f"  {fault}" for fault in faults)
            )
        job = spec.job
        # Read by Ray's supervisor, which runs in the job's environment: its own default is 3 s.
        wait_s = str(job.grace_s + GRACE_MARGIN_S)
        variables = {
            **spec.wrapper_environment,
            "LATHE_JOB_ID": _id(job.address, spec.token),
            "RAY_JOB_STOP_WAIT_TIME_S": wait_s,
        }
        # Ray hands the entry point to a shell, so it is joined of words that are each quoted. It
        # runs in a folder of Ray's; env -C enters the snapshot, with neither a shell's `cd` nor an
        # upload of it (the file system is shared).
        submission = {
            "submission_id": spec.token,
            "entrypoint": shlex.join(["env", "-C", spec.workdir, *spec.wrapper]),
            "entrypoint_num_cpus": job.resources.cpu,
            "entrypoint_num_gpus": job.resources.gpu,
            "entrypoint_memory": job.resources.mem * 2**30,
            "runtime_env": {"env_vars": variables},
            "metadata": {"exp_id": spec.exp_id, "group": spec.group, "attempt": str(spec.attempt)},
        }
        values = {"address": job.address, "submission": submission}
        return Rendered(spec.token, "rendered.ray.json", json.dumps(values, indent=2) + "\n")

    def rehearse(self, rendered: Rendered) -> str | None:
        """Ray has no dry run."""
        return None

    def submit(self, rendered: Rendered) -> str:
        """The id. A job of this id that exists already is adopted: it is the same submission."""
        job = json.loads(rendered.text)
        address, submission = job["address"], job["submission"]
        job_id = _id(address, rendered.token)
        try:
            _ask(address, lambda client: client.submit_job(**submission))
        except RayError as answer:
            if "already exists" in str(answer):
                log.info("%s was there already: adopted", job_id)
                return job_id
            if answer.status in (400, 404, 405, 422):
                raise Refused(f"Ray refused {job_id}: {answer}") from None
            raise Unreachable(f"{job_id}: {answer}") from None
        return job_id

    def find(self, token: str) -> list[str]:
        """The id, when the cluster knows the token.

        No ids when no address is known and none answers at the default one. This is safe: a
        submission under the same token is adopted.
        """
        is_guess = self.address is None and not any(os.environ.get(name) for name in OVERRIDES)
        try:
            _ask(self.address, lambda client: client.get_job_info(token))
        except RayError as answer:
            if answer.status == 404:
                return []
            raise Unreachable(f"{token}: {answer}") from None
        except Unreachable:
            if is_guess:
                return []
            raise
        return [_id(self.address, token)]

    def query(self, ids: Sequence[str]) -> dict[str, Observed]:
        """What the cluster says of these ids, in one request for each cluster."""
        groups: dict[str | None, list[str]] = defaultdict(list)
        for job_id in ids:
            groups[_parts(job_id)[0]].append(job_id)
        answers: dict[str, Observed] = {}
        for address, members in groups.items():
            try:
                listed: list[Any] = _ask(address, lambda client: client.list_jobs())
            except RayError as answer:
                raise Unreachable(f"cannot list the jobs: {answer}") from None
            by_token = {job.submission_id: job for job in listed if job.submission_id}
            pairs = [(job_id, by_token.get(_parts(job_id)[1])) for job_id in members]
            answers.update(
                {job_id: observe(details) for job_id, details in pairs if details is not None}
            )
        return {job_id: answers[job_id] for job_id in ids if job_id in answers}

    def cancel(self, job_id: str) -> None:
        """Ask Ray to stop it: SIGTERM to all its processes, and SIGKILL after the job's own grace.

        Ray 2.60 shows STOPPED only when that grace is over, and stops a job that still waits once
        it starts.
        """
        address, token = _parts(job_id)
        try:
            _ask(address, lambda client: client.stop_job(token))
        except RayError as answer:
            if answer.status != 404:  # 404: Ray has forgotten it
                raise Unreachable(f"cannot stop {job_id}: {answer}") from None

    def logs(self, job_id: str, *, follow: bool) -> Iterator[str]:
        """Lines of the job's output as Ray keeps it; nothing when Ray does not know it."""
        address, token = _parts(job_id)
        try:
            if follow:
                _ask(address, lambda client: client.get_job_info(token))
                yield from _lines(_tail(address, token))
            else:
                yield from str(
                    _ask(address, lambda client: client.get_job_logs(token))
                ).splitlines()
        except RayError as answer:
            if answer.status != 404:
                raise Unreachable(f"no log of {job_id}: {answer}") from None


class RayError(Exception):
    """A status of Ray's server that is no success."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(" ".join(text.split())[-400:])


def observe(details: Any) -> Observed:
    """The state of a job, from Ray's JobDetails."""
    status = str(getattr(details.status, "value", details.status))
    state = STATES.get(status, "submitted")
    # it ends with 20 kB of log
    message = str(details.message or "").partition(", last available logs")[0]
    again = RUN_AGAIN.get(str(details.error_type or ""))
    if status == "FAILED" and again is not None:
        state, message = "preempted", f"{again}: {message}"
    reason = None if state in ("running", "succeeded") else message[:500] or None
    host = urlsplit(details.driver_agent_http_address or "").hostname
    return Observed(state, reason, host=host, exit_code=getattr(details, "driver_exit_code", None))


def _id(address: str | None, token: str) -> str:
    return token if address is None else f"{address.rstrip('/')}/{token}"


def _parts(job_id: str) -> tuple[str | None, str]:
    address, _, token = job_id.rpartition("/")
    return address or None, token


def _connect(address: str | None) -> Any:
    """Ray's client.

    Unreachable when the environment would send it to another cluster than the job dictionary.
    """
    try:
        package = importlib.import_module("ray.job_submission")
    except ModuleNotFoundError:
        raise ConfigError("the ray backend needs Ray. pip install -e '.[ray]'") from None
    winner = next((name for name in OVERRIDES if os.environ.get(name)), None)
    if (
        address is not None
        and winner is not None
        and os.environ[winner].rstrip("/") != address.rstrip("/")
    ):
        raise Unreachable(
            f"{winner}={os.environ[winner]} overrides the job's address {address} in Ray. Unset it."
        )
    return package.JobSubmissionClient(address)


def _ask(address: str | None, call: Callable[[Any], T]) -> T:
    """The reply to one request.

    RayError for a status that is no success, Unreachable for everything else.
    """
    return _within(TIMEOUT_S, lambda: call(_connect(address)))


def _within(limit_s: float, call: Callable[[], T]) -> T:
    try:
        return within(limit_s, "the Ray cluster", call)
    except Unreachable:
        raise
    except BaseException as error:
        raise _translate(error) from error


def _translate(error: BaseException) -> BaseException:
    if status := STATUS.search(str(error)):
        return RayError(int(status[1]), str(error))
    is_of_ray = type(error).__module__.partition(".")[0] in ("ray", "aiohttp")
    if is_of_ray or isinstance(error, (OSError, RuntimeError, ValueError)):
        return Unreachable(f"the Ray cluster cannot be seen: {error}")
    return error


def _tail(address: str | None, token: str) -> Iterator[str]:
    """Pieces of the log as they come, until the job has ended.

    Waits between two pieces without limit.
    """
    client = _within(TIMEOUT_S, lambda: _connect(address))
    loop = asyncio.new_event_loop()
    pieces = client.tail_job_logs(token)
    try:
        while (piece := loop.run_until_complete(anext(pieces, None))) is not None:
            yield piece
    except Exception as error:
        raise _translate(error) from None
    finally:
        # interrupted while it waited: it cannot be closed in order
        with contextlib.suppress(RuntimeError):
            loop.run_until_complete(pieces.aclose())
        loop.close()


def _lines(pieces: Iterator[str]) -> Iterator[str]:
    rest = ""
    for piece in pieces:
        *whole, rest = (rest + piece).split("\n")
        yield from whole
    if rest:
        yield rest
