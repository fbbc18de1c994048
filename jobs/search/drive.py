"""A search from its first trial to its best one: asked, submitted, scored and promoted, rung by
rung. What was done is known from search.jsonl and the run folders alone, so a killed search goes on
where it was.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jobs.errors import SomeFailed
from jobs.job_state import ENDED_BADLY
from jobs.record.by_hand import training_now
from jobs.record.metrics import evaluations
from jobs.record.state_table import LATER
from jobs.record.status import survey
from jobs.search import asking
from jobs.search.record import SearchRecord, SearchState, Trial, asked
from jobs.submit.group import submit
from trainer.config.differences import short_names, written
from trainer.config.identity import exp_id
from trainer.errors import ResumeError
from trainer.files.atomic import read_json

if TYPE_CHECKING:
    from jobs.record.row import Row
    from jobs.submit.request import ActionResult, Request
    from trainer.config.sweeps.sweep import Sweep

POLL_S, FAR_POLL_S = 1.0, 15.0  # between two looks: at this machine's jobs, and at a scheduler's

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Driver:
    """Everything that a search is driven with. The caller holds its lock."""

    group: str
    sweep: Sweep
    request: Request  # of any trials: backend, job dictionary, flags and code
    record: SearchRecord
    begun: SearchState  # what a new search would begin with, without trials
    poll_s: float | None = None  # None: as the backend wants it

    def drive(self) -> SearchState:
        """Train the trials from rung to rung. Returns the search with its best trial."""
        search = self._begin()
        rungs = self.sweep.search.rungs_of(search.steps)
        self._first_rung(search, rungs[0], is_last=len(rungs) == 1)
        for before, rung in itertools.pairwise(rungs):
            best = self._promoted(search, before)
            self._train(search, best, rung, is_last=rung == rungs[-1])
        ranked = search.ranked(rungs[-1])
        if not ranked:
            raise SomeFailed(
                f"{self.group}: no trial has a {search.metric} at its end. `lathe status` and "
                "`lathe logs ID` say why."
            )
        if search.best != ranked[0].number:
            self.record.append({"event": "ended", "trial": ranked[0].number})
            search.best = ranked[0].number
        return search

    def _begin(self) -> SearchState:
        """The search as its record has it, or a new one."""
        search = self.record.read()
        if search is None:
            begun = self.begun
            self.record.append(
                {
                    "event": "begun",
                    "digest": begun.digest,
                    "keys": list(begun.keys),
                    "metric": begun.metric,
                    "is_least_best": begun.is_least_best,
                    "steps": begun.steps,
                }
            )
            return begun
        if search.digest != self.begun.digest:
            raise ResumeError(
                f"-e {self.group}: {self.record.path} is of another sweep or search than the group "
                "states now. Give the group another name; or move that file away, and the search "
                "begins anew and takes every trial that both have as far as it was trained."
            )
        if search.trials:
            log.info("%s goes on: %d trials were asked for", self.group, len(search.trials))
        return search

    def _first_rung(self, search: SearchState, rung: int, *, is_last: bool) -> None:
        """Ask for every trial and train each to the first rung."""
        if self.sweep.search.how != "optuna":
            self._ask(search, self.sweep.trials()[len(search.trials) :])
            self._train(search, search.trials, rung, is_last=is_last)
            return
        most = self.sweep.search.trials or 0
        while True:
            self._train(search, search.trials, rung, is_last=is_last)
            missing = min(self.sweep.search.at_once, most - len(search.trials))
            values = asking.ask(self.sweep, search, missing) if missing > 0 else []
            if missing > 0 and not values:
                log.info("Optuna keeps to what it has tried: %d trials", len(search.trials))
            if not values:
                return
            self._ask(search, values)

    def _ask(self, search: SearchState, values: Sequence[dict[str, Any]]) -> None:
        """Write trials down, before anything of them is submitted."""
        start = len(search.trials)
        trials = [
            Trial(number, one, exp_id(self.sweep.experiment(one)))
            for number, one in enumerate(values, start=start)
        ]
        if trials:
            self.record.append(*asked(trials))
            search.trials += trials

    def _promoted(self, search: SearchState, rung: int) -> list[Trial]:
        """The trials that go on beyond a rung: the best of those that came to it."""
        ranked = search.ranked(rung)
        came = sum(rung in trial.scores for trial in search.trials)
        best = ranked[: self.sweep.search.survivors(came)]
        numbers = [trial.number for trial in best]
        if search.promoted.get(rung) != numbers:
            self.record.append({"event": "promoted", "rung": rung, "trials": numbers})
            search.promoted[rung] = numbers
            shown = ", ".join(str(number + 1) for number in numbers)
            log.info("step %d: %d of %d go on: trials %s", rung, len(best), came, shown)
        return best

    # One rung
    # ----------------------------------------------------------------------------------------------

    def _train(
        self, search: SearchState, trials: Sequence[Trial], rung: int, *, is_last: bool
    ) -> None:
        """Train these trials to a rung: each is submitted once, and its score written down when it
        has come there. A trial that fails has none.
        """
        until = None if is_last else rung
        while waiting := [one for one in trials if rung not in one.scores and not one.has_failed]:
            names = [one.exp_id for one in waiting]
            base, backend_of = self.request.base, self.request.backend_of
            rows = {row.exp_id: row for row in survey(base, only=names, backend_of=backend_of)}
            idle: list[Trial] = []
            for trial in waiting:
                row = rows.get(trial.exp_id)
                if row is not None and row.is_live:
                    continue
                if self._has_come(trial, until):
                    self._tell(search, trial, rung, self._score(search, trial, until))
                else:
                    idle.append(trial)
            if idle:
                request = self._request(idle, until, of=len(search.trials))
                results = {result.exp_id: result for result in submit(request)}
                for trial in idle:
                    self._judge(search, trial, rung, rows.get(trial.exp_id), results[trial.exp_id])
            is_here = self.request.backend.traits.runs_here
            pause_s = self.poll_s if self.poll_s is not None else POLL_S if is_here else FAR_POLL_S
            if not self.request.backend.traits.is_in_process:
                time.sleep(pause_s)

    def _has_come(self, trial: Trial, until: int | None) -> bool:
        """Whether a run that does not run now has come to a step, or to its end (None)."""
        status = read_json(self.request.base.run(trial.exp_id).status) or {}
        step: Any = status.get("step")
        if status.get("state") == "paused" and until is not None:
            return type(step) is int and step >= until
        return status.get("state") == "succeeded"

    def _score(self, search: SearchState, trial: Trial, until: int | None) -> float | None:
        """The score of the last evaluation up to a step; None where it was not finite. A run that
        an earlier search has trained further may have none so early: then that of its first one.
        """
        every = list(evaluations(self.request.base.run(trial.exp_id)))
        early = [one for one in every if until is None or one.get("step", 0) <= until]
        of_step = early[-1:] or every[:1]
        return of_step[0].get(search.metric) if of_step else None

    def _tell(
        self, search: SearchState, trial: Trial, rung: int, score: float | None, why: str = ""
    ) -> None:
        reason = {"reason": why or f"no {search.metric}"} if score is None else {}
        event = {"event": "told", "trial": trial.number, "rung": rung, "score": score, **reason}
        self.record.append(event)
        trial.scores[rung] = score
        shown = f"{search.metric} {score:.6g}" if score is not None else f"out: {reason['reason']}"
        log.info("step %d: trial %d (%s): %s", rung, trial.number + 1, self.shown(trial), shown)

    def _judge(
        self, search: SearchState, trial: Trial, rung: int, row: Row | None, result: ActionResult
    ) -> None:
        """Take a trial out that has ended and will not be run again. SomeFailed where nothing of it
        could be sent, for then a person must act.
        """
        folder = self.request.base.run(trial.exp_id)
        is_refused = result.action == "send" and result.is_bad and result.state == "pending"
        if is_refused or (result.action == "failed" and not result.is_transient):
            raise SomeFailed(
                f"trial {trial.number + 1} ({trial.exp_id}): {result.text}. Once that is mended, "
                "the same command goes on."
            )
        if result.action == "send" and self.request.backend.traits.is_in_process:
            if result.state == "preempted":
                raise SomeFailed("a trial was stopped. The same command goes on with it.")
            return
        is_over = row is not None and row.state in (*ENDED_BADLY, "preempted")
        if result.action != "skip" or not is_over or LATER in result.text:
            return
        if training_now(folder, was_sent=True) is None:
            self._tell(search, trial, rung, None, why=result.text)

    def _request(self, trials: Sequence[Trial], until: int | None, *, of: int) -> Request:
        """The request for these trials, up to a step or to their end."""
        stop = [] if until is None else [f"--until={until}"]
        names = {
            one.exp_id: f"{self.group} {one.number + 1}/{of} {self.shown(one)}" for one in trials
        }
        return replace(
            self.request,
            experiments=[self.sweep.experiment(one.values) for one in trials],
            flags=[*self.request.flags, *stop],
            shown=names,
        )

    def shown(self, trial: Trial) -> str:
        """The values of a trial: "lr=0.0003 r=8"."""
        return as_text(trial.values)


def as_text(values: Mapping[str, Any]) -> str:
    """Values by dotted keys as a person reads them: "lr=0.0003 r=8"."""
    names = short_names(list(values))
    return " ".join(
        f"{name}={written(value)}" for name, value in zip(names, values.values(), strict=True)
    )
