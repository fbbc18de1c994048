"""What the server cannot read, and why: one line in the log, /healthz, and the page of runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Trouble:
    reason: str
    kind: str
    since: float = field(default_factory=time.monotonic)


@dataclass
class Troubles:
    """The jobs, uploads and runs that cannot be read or carried on now, by name."""

    confirm_s: float  # a folder that is moved at this moment is no trouble yet
    _open: dict[str, _Trouble] = field(default_factory=dict[str, _Trouble])

    def note(self, name: str, reason: str, *, kind: str, is_transient: bool) -> bool:
        """Remember a trouble, and log it if it is new. Returns whether it is there for good: it
        does not pass by itself, and was of the same kind `confirm_s` seconds ago.

        kind: a text that stays the same as long as the trouble does (errors.kind_of).
        """
        trouble = self._open.get(name)
        if trouble is None or trouble.kind != kind:
            trouble = self._open[name] = _Trouble(reason, kind)
            log.warning("%s: %s", name, reason)
        return not is_transient and time.monotonic() - trouble.since >= self.confirm_s

    def end(self, name: str) -> None:
        """Forget a trouble, if there is one of this name."""
        if self._open.pop(name, None) is not None:
            log.info("%s: no trouble any more", name)

    def keep(self, names: Collection[str], *, prefix: str = "") -> None:
        """Forget all others of those whose name begins so: their folders are gone or readable."""
        self.keep_if(lambda name: name in names, prefix=prefix)

    def keep_if(self, is_kept: Callable[[str], bool], *, prefix: str) -> None:
        """Forget those whose name begins so and that are not to be kept."""
        for name in list(self._open):
            if name.startswith(prefix) and not is_kept(name):
                self.end(name)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    @property
    def reasons(self) -> dict[str, str]:
        """Name -> reason, by name."""
        return {name: trouble.reason for name, trouble in sorted(self._open.copy().items())}
