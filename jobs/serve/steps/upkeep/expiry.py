"""What goes by itself: saved weights whose time is over, and samples of sessions that are over."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from jobs.serve.job_view import seconds
from jobs.serve.steps.catalogue.checkpoints import expired, remove

if TYPE_CHECKING:
    from jobs.serve.steps.context import Steps

EVERY_S = 60.0
SAMPLES_S = 24 * 3600.0  # that samples, and weights of samplers without a name, outlive a session
ARCHIVE_S = 24 * 3600.0  # no download takes longer
SILENT_S = 7 * 24 * 3600.0  # a session without a heartbeat for so long counts as ended

log = logging.getLogger(__name__)


async def sweep_always(steps: Steps) -> None:
    """Sweep from time to time, until it is cancelled."""
    while True:
        try:
            await run_in_threadpool(sweep, steps)
        except Exception:  # of any kind: one bad folder must not keep the others
            log.exception("what has expired could not be removed")
        await asyncio.sleep(EVERY_S)


def sweep(steps: Steps) -> None:
    """Remove what has expired, and what a server that was killed has left."""
    for session in steps.sessions.ids():
        try:
            _sweep_session(steps, session)
        except Exception:  # of any kind: one odd folder keeps no other
            log.exception("%s: what has expired could not be removed", session)
    for path in steps.sessions.root.glob(".archive-*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > ARCHIVE_S:
                path.unlink()


def _sweep_session(steps: Steps, session: str) -> None:
    runs = steps.sessions.runs(session)
    for run, facts in expired(steps, runs):
        log.info("%s: %s/%s has expired", run.id, facts.kind, facts.name)
        remove(steps, run, facts)
    if _is_over(steps, session):
        folder = steps.sessions.folder(session)
        # a log that this server has open is removed when it is opened no more
        for path in [path for path in folder.glob("sample-*") if path.is_dir()]:
            _remove_idle(steps, path)
        for run in runs:
            if run.exp_id is not None:
                for path in (steps.runs.folder(run) / "sampler").glob("session.*"):
                    shutil.rmtree(path, ignore_errors=True)
        if not steps.sessions.has_runs(session) and steps.sessions.silent_s(session) > SILENT_S:
            log.info("%s is removed: it has no run, and its client is silent", session)
            steps.sessions.remove(session)


def _remove_idle(steps: Steps, folder: Path) -> None:
    if not steps.samples.is_open(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _is_over(steps: Steps, session: str) -> bool:
    """Whether nobody samples in a session any more."""
    end = steps.sessions.finished(session)
    if end is not None:
        return time.time() - seconds(end.at) > SAMPLES_S
    with suppress(OSError):
        return steps.sessions.silent_s(session) > SILENT_S
    return False
