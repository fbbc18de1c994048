"""Whether another start of an attempt lives, seen from the node on which a new one begins. Standard
library.

On this host its process is looked up. On another, whose clock may be minutes ahead or behind, its
heartbeat counts only when it changes while we look. A date alone decides one thing: what is older
than any difference between two clocks is dead.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.record.paths import Attempt
from jobs.record.times import CLOCKS_S, seconds_since, seconds_since_change
from trainer.files.atomic import read_json

ALIVE_S = 90.0  # three heartbeats: one that does not change for so long has stopped


@dataclass
class Pulse:
    """What has been seen of the last start of an attempt so far."""

    attempt: Attempt
    is_seen: bool = False  # it lives for certain: its process is there, or its heartbeat changed
    _sign: Any = None
    _since: float = field(default_factory=time.monotonic)

    def may_live(self) -> bool:
        """Look again. False once it is certain that nothing runs; true while that is open."""
        starts = self.attempt.starts()
        if not starts or self.attempt.exit.exists():
            return False
        started = read_json(starts[-1]) or {}
        beat = read_json(self.attempt.heartbeat) or {}
        by_date_s = min(seconds_since(started.get("at")), seconds_since(beat.get("at")))
        if started.get("host") == socket.gethostname():
            self.is_seen = by_date_s < ALIVE_S and Path(f"/proc/{started.get('pid')}").exists()
            return self.is_seen
        moment, sign = time.monotonic(), (len(starts), started, beat)
        if sign != self._sign:
            self.is_seen = self._sign is not None
            self._sign, self._since = sign, moment
        by_disk_s = min(map(seconds_since_change, (starts[-1], self.attempt.heartbeat)))
        if not self.is_seen and min(by_date_s, by_disk_s) > CLOCKS_S:
            return False
        return moment - self._since < ALIVE_S
