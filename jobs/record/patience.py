"""Queries that return within seconds: while a scheduler does not answer, its last answer counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from jobs.errors import Unreachable

if TYPE_CHECKING:
    from jobs.job_state import Observed
    from jobs.protocol import Backend

WAIT_S = 3.0
LAST_ANSWER_S = 120.0  # an older answer is not used in place of a missing one


@dataclass
class _Question:
    """One query of a scheduler, in a thread of its own."""

    backend: Backend
    ids: tuple[str, ...]
    began: float = field(default_factory=time.monotonic)
    observed: dict[str, Observed] | None = None
    error: Exception | None = None
    _is_answered: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        """Send the query, and keep the answer or the error."""
        try:
            self.observed = self.backend.query(self.ids)
        except Exception as error:  # of any kind: `query` raises it
            self.error = error
        self._is_answered.set()

    def wait(self) -> bool:
        """Wait until WAIT_S after the query began; returns whether there is an answer."""
        return self._is_answered.wait(max(self.began + WAIT_S - time.monotonic(), 0))


class _Patient:
    """A backend whose `query` returns or raises within WAIT_S; everything else is unchanged."""

    def __init__(self, name: str, backend: Backend) -> None:
        self._name, self._backend = name, backend
        self._lock = threading.Lock()
        self._open: _Question | None = None
        self._last: _Question | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def query(self, ids: Sequence[str]) -> dict[str, Observed]:
        """As `Backend.query`. Unreachable without an answer now or in the last LAST_ANSWER_S."""
        while True:
            question = self._question(ids)
            is_answered = question.wait()
            if not is_answered:
                break
            with self._lock:
                self._open = None if self._open is question else self._open
                self._last = question if question.error is None else self._last
            if question.error is not None:
                raise question.error
            if set(ids) <= set(question.ids):
                return dict(question.observed or {})
        last = self._last
        is_known = last is not None and set(ids) <= set(last.ids)
        if last is None or not is_known or time.monotonic() - last.began > LAST_ANSWER_S:
            waited_s = time.monotonic() - question.began
            raise Unreachable(f"{self._name} has not answered for {waited_s:.0f} s")
        return dict(last.observed or {})

    def _question(self, ids: Sequence[str]) -> _Question:
        """The query that has no answer yet, or a new one."""
        with self._lock:
            if self._open is None:
                self._open = _Question(self._backend, tuple(ids))
                threading.Thread(target=self._open.ask, daemon=True).start()
            return self._open


class PatientBackends:
    """Backends by their names, for a caller that must not block while a scheduler does."""

    def __init__(self, backend_of: Callable[[str], Backend]) -> None:
        self._backend_of = backend_of
        self._backends: dict[str, _Patient] = {}

    def __call__(self, name: str) -> Backend:
        if name not in self._backends:
            self._backends[name] = _Patient(name, self._backend_of(name))
        return cast("Backend", self._backends[name])
