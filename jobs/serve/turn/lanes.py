"""Actions for jobs, each in a thread: one that hangs, as its scheduler does, holds up no other.

A job has one action at a time. Actions of one kind for one backend share a lane, which bounds how
many of them there are at once, and how many of one owner: so the jobs of one owner never take the
whole of a lane, and cancellations do not wait for submissions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lane:
    """What shares a bound: the actions in progress, of all owners and of one."""

    name: str  # "send slurm"
    width: int = 8
    of_one_owner: int = 2


@dataclass(frozen=True)
class Action:
    """Something to be done for a job. take: returns whether anything was done."""

    job_id: str
    owner: str
    lane: Lane
    take: Callable[[], bool]


@dataclass
class Lanes:
    """The actions that wait, in their order, and those that are in progress, both by job."""

    _change: threading.Condition = field(default_factory=threading.Condition)
    _waiting: dict[str, Action] = field(default_factory=dict[str, Action])
    _running: dict[str, Action] = field(default_factory=dict[str, Action])
    _ended_at: dict[str, float] = field(default_factory=dict[str, float])
    _advanced: set[str] = field(default_factory=set[str])
    _starts: int = 0
    # (lane, owner) -> the number of the last start
    _last_starts: dict[tuple[Lane, str], int] = field(default_factory=dict[tuple[Lane, str], int])

    def replace(self, actions: Iterable[Action], *, seen_at: float) -> None:
        """Make these the actions that wait; those that waited before keep their place.

        seen_at: the monotonic time from which on the files were read that call for the actions. A
        job whose last action has ended since is left out, because that action may have done it.
        """
        with self._change:
            due = {
                action.job_id: action
                for action in actions
                if self._ended_at.get(action.job_id, seen_at) <= seen_at
                and action.job_id not in self._running
            }
            before = [job_id for job_id in self._waiting if job_id in due]
            self._waiting = {job_id: due[job_id] for job_id in (*before, *due)}
            self._start()

    def is_busy(self, job_id: str) -> bool:
        """Whether an action of a job is in progress."""
        return job_id in self._running

    def forget_all_but(self, job_ids: Collection[str]) -> None:
        """Forget what was done for jobs that have ended."""
        with self._change:
            self._advanced.intersection_update(job_ids)
            for job_id in self._ended_at.keys() - job_ids:
                del self._ended_at[job_id]

    def join(self) -> set[str]:
        """Wait until no action waits or is in progress; the jobs for which anything was done."""
        with self._change:
            self._change.wait_for(lambda: not self._waiting and not self._running)
            advanced, self._advanced = self._advanced, set()
        return advanced

    def _start(self) -> None:
        """Start what there is room for, of the owners in turn. The caller holds the lock."""
        while (action := self._next()) is not None:
            threading.Thread(target=self._work, args=(action,), daemon=True).start()
            self._running[action.job_id] = self._waiting.pop(action.job_id)
            self._starts += 1
            self._last_starts[action.lane, action.owner] = self._starts

    def _next(self) -> Action | None:
        """The action to be started now; None when nothing waits that there is room for."""
        of_lane = Counter(action.lane for action in self._running.values())
        of_owner = Counter((action.lane, action.owner) for action in self._running.values())
        first: dict[tuple[Lane, str], Action] = {}
        for action in self._waiting.values():
            first.setdefault((action.lane, action.owner), action)
        free = [
            key
            for key in first
            if of_lane[key[0]] < key[0].width and of_owner[key] < key[0].of_one_owner
        ]
        return first[min(free, key=lambda key: self._last_starts.get(key, 0))] if free else None

    def _work(self, action: Action) -> None:
        is_done = False
        try:
            is_done = action.take()
        except Exception:  # of any kind: the next turn offers the action again
            log.exception("%s", action.job_id)
        with self._change:
            del self._running[action.job_id]
            self._ended_at[action.job_id] = time.monotonic()
            if is_done:
                self._advanced.add(action.job_id)
            self._change.notify_all()
            self._start()
