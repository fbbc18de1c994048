"""`eai`, the command line of Toolkit: one call and its answer, the jobs in it, and which errors
pass by themselves.

Never verified against the service: the shape of `--format json` beyond id, name and state, and the
words of its errors. What is not understood counts as "cannot see", never as a failure of a job.
Source: the commands and error texts in public repositories that drive `eai`, 2021-2026.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from jobs.errors import Unreachable
from jobs.job_state import JobState, Observed
from jobs.time_limits import run_program

EAI = "eai"
READ_S, SEND_S, CHECK_S = 60.0, 180.0, 20.0
RESTART_TAG = "restartable"  # a tag of ours: Toolkit runs an interrupted job again by itself

ID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
PASSING = re.compile(
    r"\b50[0234]\b|token is invalid|dial tcp|\beof\b|server-side error|internal error|no response"
    r"|context deadline exceeded|i/o timeout|connection re(set|fused)|tls handshake|too many "
    r"requests",
    re.IGNORECASE,
)
REFUSALS = re.compile(
    r"http: 4(00|03|04|13|22)\b|unknown (flag|command|shorthand)|invalid argument|required flag"
)
GONE = re.compile(r"not found|http: 404", re.IGNORECASE)
ENDED = re.compile(r"cannot cancel a job that is in state", re.IGNORECASE)

STATES: dict[str, JobState] = {
    "QUEUING": "queued",
    "QUEUED": "queued",
    "RUNNING": "running",
    "CANCELLING": "running",  # its processes may still write into the run folder
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "INTERRUPTED": "preempted",
}


@dataclass(frozen=True)
class EaiJob:
    """One job as `eai` lists it."""

    id: str
    name: str
    state: str  # in Toolkit's words
    info: str
    runs: tuple[Mapping[str, Any], ...]  # one for each start
    command: tuple[str, ...]
    is_restartable: bool

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EaiJob:
        """Read one object of `--format json`; only `id` must be there."""
        tags, runs = json.dumps(values.get("tags")), cast("list[Any]", values.get("runs") or [])
        return cls(
            str(values["id"]),
            str(values.get("name") or ""),
            str(values.get("state") or "UNKNOWN").upper(),
            str(values.get("stateInfo") or ""),
            tuple(cast("dict[str, Any]", run) for run in runs if isinstance(run, dict)),
            tuple(str(word) for word in cast("list[Any]", values.get("command") or [])),
            bool(values.get("restartable"))
            or f"{RESTART_TAG}=yes" in tags
            or f'"{RESTART_TAG}": "yes"' in tags,
        )

    @property
    def will_rerun(self) -> bool:
        return self.state == "INTERRUPTED" and self.is_restartable

    @property
    def is_alive(self) -> bool:
        """Whether it runs or may run again. An unknown state counts as alive."""
        return self.will_rerun or STATES.get(self.state, "running") in ("queued", "running")

    def observe(self) -> Observed:
        """The same in the words of jobs.protocol.

        A state that says nothing leaves the job where its runs say it is.
        """
        state = STATES.get(self.state, "running" if self.runs else "queued")
        exit_code = self.runs[-1].get("exitCode") if self.runs else None
        return Observed(
            state,
            f"{self.state}: {self.info}" if self.info else self.state,
            exit_code=exit_code
            if isinstance(exit_code, int) and state in ("succeeded", "failed")
            else None,
            restarts=max(0, len(self.runs) - 1),
            will_rerun=self.will_rerun,
        )


@dataclass(frozen=True)
class ToolkitReply:
    """The exit code and the output of one call of `eai`."""

    code: int | None  # None: there was no answer
    out: str
    err: str

    @property
    def text(self) -> str:
        return " ".join(
            (self.err.strip() or self.out.strip() or f"eai ended with {self.code}").split()
        )[:500]

    @property
    def is_passing(self) -> bool:
        """Whether the same call may work in a while."""
        return self.code is None or (self.code != 0 and PASSING.search(self.text) is not None)


def call(*words: str, timeout_s: float) -> ToolkitReply:
    """One run of `eai`. Unreachable when there is no such command."""
    try:
        process = run_program([EAI, *words], timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        return ToolkitReply(None, "", f"no reply within {timeout_s:.0f} s")
    except OSError as error:
        raise Unreachable(
            f"eai cannot be run: {error.strerror}. Install Toolkit's command line, and run: eai "
            "login"
        ) from None
    out, err = (text.decode(errors="replace") for text in (process.stdout, process.stderr))
    return ToolkitReply(process.returncode, out, err)


def parse_jobs(text: str, source: str) -> list[EaiJob]:
    """The jobs of `--format json`: one object in a line, or one array.

    Unreachable when it is something else.
    """
    try:
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError:
        lines = _whole(text)
    values = [
        item
        for line in lines
        for item in (cast("list[Any]", line) if isinstance(line, list) else [line])
    ]
    if not all(isinstance(item, dict) and "id" in item for item in values):
        raise Unreachable(
            f"{source}: want one JSON object with an id in a line, got {text[:200]!r}"
        )
    return [EaiJob.of(item) for item in values]


def _whole(text: str) -> list[Any]:
    try:
        return [json.loads(text)]
    except ValueError:
        return [None]


def follow_log(job_id: str) -> Iterator[str]:
    """Lines of a job's log as they come, until the job ends. Unreachable when `eai` breaks off."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [EAI, "job", "log", "-f", job_id],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
        )
        try:
            assert process.stdout is not None, "stdout is a pipe"
            for line in process.stdout:
                yield line.rstrip("\n")
            code = process.wait(READ_S)
        finally:
            process.kill()
            process.wait(READ_S)
        errors.seek(0)
        answer = ToolkitReply(code, "", errors.read())
        if code != 0 and not GONE.search(answer.text):
            raise Unreachable(f"eai job log -f {job_id}: {answer.text}")
