"""search.jsonl: the append-only record of a search, from which a killed one is rebuilt.

It lies in <savedir_base>/_jobs/searches/<group>/. Every line is one JSON object with `at` (UTC) and
`event`, fsynced before anything that follows from it is sent. A torn last line (its writer was
killed) is ignored. Events:

    begun      digest, keys, metric, is_least_best, steps    once, the first line
    asked      trial, values, exp_id                         before the trial is submitted
    told       trial, rung, score                            null: the trial failed, for this reason
    promoted   rung, trials                                  which go on beyond this step
    ended      trial                                         the best one of all
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from jobs.record.times import now
from trainer.errors import LatheError
from trainer.files.atomic import read_small, refusals

FILE = "search.jsonl"


@dataclass
class Trial:
    """One trial: its values, and its score at each rung that it has come to."""

    number: int
    values: dict[str, Any]
    exp_id: str
    scores: dict[int, float | None] = field(default_factory=dict[int, "float | None"])

    @property
    def has_failed(self) -> bool:
        return None in self.scores.values()


@dataclass
class SearchState:
    """What the events of search.jsonl add up to."""

    digest: str = ""  # of the dictionary, its sweep and how it is searched
    keys: tuple[str, ...] = ()
    metric: str = ""
    is_least_best: bool = True
    steps: int = 0  # of a whole run
    trials: list[Trial] = field(default_factory=list[Trial])
    promoted: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    best: int | None = None  # the number of the best trial, once the search has ended

    @property
    def first_rung(self) -> int | None:
        """The first step at which trials were compared: the one that all of them came to."""
        return min((rung for trial in self.trials for rung in trial.scores), default=None)

    def ranked(self, rung: int) -> list[Trial]:
        """The trials that have a score at a rung, the best first; of equal ones the earlier."""
        sign = 1 if self.is_least_best else -1
        scored = [(trial.scores.get(rung), trial) for trial in self.trials]
        pairs = [(score, trial) for score, trial in scored if score is not None]
        return [trial for _, trial in sorted(pairs, key=lambda one: (sign * one[0], one[1].number))]


@dataclass(frozen=True)
class SearchRecord:
    """The file of one search."""

    path: Path

    @classmethod
    def of(cls, base: Path, group: str) -> SearchRecord:
        """The record of the search of a group, whatever letters its name has."""
        return cls(
            base
            / "_jobs"
            / "searches"
            / quote(group, safe="", errors="surrogatepass").replace(".", "%2E")
            / FILE
        )

    def read(self) -> SearchState | None:
        """The search; None where none was begun. LatheError where the file was altered."""
        try:
            content = read_small(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return _fold(_whole(content))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise LatheError(
                f"{self.path}: an event is malformed ({type(error).__name__}: {error}). Mend that "
                "line, or move the file away: the search then begins anew, and takes the trials "
                "as far as they were trained."
            ) from None

    def append(self, *events: Mapping[str, Any]) -> None:
        """Add events, whole and durable, each on a line of its own. The caller holds the lock."""
        lines = b"".join(json.dumps({"at": now(), **event}).encode() + b"\n" for event in events)
        with refusals(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                    lines = b"\n" + lines  # the last writer was killed in the middle of its line
                file.write(lines)
                os.fsync(file.fileno())


def asked(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The events that must be on the disk before these trials are submitted."""
    return [
        {"event": "asked", "trial": one.number, "values": one.values, "exp_id": one.exp_id}
        for one in trials
    ]


def _whole(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.splitlines():
        with suppress(ValueError):
            event: Any = json.loads(line)
            if isinstance(event, dict):
                yield cast("dict[str, Any]", event)


def _fold(events: Iterator[dict[str, Any]]) -> SearchState | None:
    search: SearchState | None = None
    for event in events:
        kind = event["event"]
        if search is None:
            search = SearchState(
                event["digest"],
                tuple(event["keys"]),
                event["metric"],
                event["is_least_best"],
                int(event["steps"]),
            )
        elif kind == "asked":
            search.trials.append(Trial(event["trial"], dict(event["values"]), event["exp_id"]))
        elif kind == "told":
            search.trials[int(event["trial"])].scores[int(event["rung"])] = event["score"]
        elif kind == "promoted":
            search.promoted[int(event["rung"])] = list(event["trials"])
        elif kind == "ended":
            search.best = event["trial"]
    return search
