"""Faults in the service: exactly once, what is told, who may."""

from tests.mutants.fault import Fault

VIEW = "tests/serve/test_job_view.py"
HOSTILE = "tests/serve/test_hostile_requests.py"

FAULTS = [
    Fault(
        "jobs/serve/job_view.py",
        'is_too_late = cancel is None or (row.ended_at or "") <= cancel.at',
        "is_too_late = True",
        why="a job that was told to be cancelled becomes a success",
        tests=VIEW,
    ),
    Fault(
        "jobs/serve/job_view.py",
        'last.wish == "pause" or row.history[-1].at < last.at',
        'last.wish == "pause"',
        why="a job that is to go on counts as cancelled, and never does",
        tests=VIEW,
    ),
    Fault(
        "jobs/serve/keeper.py",
        "is_same = size >= before.end and _digest(file, before.end) == before.mark",
        "is_same = size >= before.end",
        why="events are lost when a run that resumed has written more than it had",
        tests=VIEW,
    ),
    Fault(
        "jobs/serve/tickets.py",
        'f"{owner}\\0{key}"',
        'f"{key}"',
        why="an Idempotency-Key of one token finds the job of another",
        tests=VIEW,
    ),
    Fault(
        "jobs/serve/access.py",
        "        return self.owner in (None, owner)",
        "        return True",
        why="a token sees the jobs and files of others",
        tests=HOSTILE,
    ),
    Fault(
        "jobs/serve/app.py",
        "        if not self.gate.is_our_origin(headers):\n",
        "        if False:\n",
        why="a page of another site starts jobs",
        tests=HOSTILE,
    ),
    Fault(
        "jobs/serve/uploads.py",
        "    if not parts.is_whole:\n",
        "    if False:\n",
        why="half of an upload is kept as a file",
        tests=HOSTILE,
    ),
]
