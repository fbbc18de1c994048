"""The records of a run: console, metrics.jsonl, score_list.json, status.json, wandb and others.

Every rank makes a `RunRecord` and calls the same methods; ranks other than 0 write nothing.
"""

from __future__ import annotations

import json
import logging
import math
import pickle
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.console import Console
from torch import Tensor

from trainer.errors import EXIT_OK, EXIT_PREEMPTED, LatheError, RankLostError, StorageError
from trainer.files import survival_events as events
from trainer.files.atomic import overwrite_json, read_json, refusals, replace_file, write_json
from trainer.run_changes import note_change
from trainer.runtime import distributed, process, watch
from trainer.telemetry.chain import PROOF
from trainer.telemetry.console import Bar, Lines, Number, screen
from trainer.telemetry.goodput import KEY, Goodput
from trainer.telemetry.metrics_file import MetricsFile
from trainer.telemetry.startup import Startup
from trainer.telemetry.wandb_run import ANSWERS, WandbRun, WandbSettings

State = Literal["queued", "running", "succeeded", "failed", "preempted", "paused", "cancelled"]
METRICS, SCORES, HAVEN_SCORES, STATUS = (
    "metrics.jsonl",
    "score_list.json",
    "score_list.pkl",
    "status.json",
)
DATA = "data.json"  # the digests of data and base (trainer/launch/run_folder.py)
RANK = "rank"  # key of status.json: the rank that failed, if it is not 0
MAX_ERROR = 2000  # characters of an error that fit into the old status.json of a full disk
HEARTBEAT_S = 15.0  # at most this long between a log line and the status.json that knows of it

log = logging.getLogger(__name__)


class Sink(Protocol):
    """A place that scalars go to."""

    def log(self, step: int, scalars: Mapping[str, Number]) -> None: ...

    def close(self, exit_code: int) -> None: ...


class RunRecord:
    """The record of one run in its folder. Only rank 0 writes; on other ranks calls do nothing."""

    def __init__(
        self,
        folder: Path,
        *,
        total: int,
        wandb: WandbSettings | None = None,
        name: str = "",
        console: Console | None = None,
        began_at: float | None = None,
        others: Callable[[], Sequence[Sink]] = tuple,
    ) -> None:
        """began_at: of Startup. others: makes more sinks for the scalars; it is called on rank 0
        only.
        """
        self.folder, self.total, self.step = folder, total, 0
        self._name = name
        self._bad_steps: list[int] = []
        self._proof = self._early = ""
        self.goodput, self.startup = Goodput.of(folder), Startup(began_at)
        # steps against their prediction (trainer/launch/late.py), once they are done
        self.time: dict[str, Any] | None = None
        self._state: State = "running"
        self._told_state: State | None = None  # of the last status.json that the log of changes has
        self._status_at = 0.0
        self._is_writer = distributed.is_main()
        watch.record_by(self.fail)
        self._sinks: list[Sink] = []
        self._unfit: set[str] = set()
        self._wandb: WandbRun | None = None
        if not self._is_writer:
            return
        with refusals(folder):
            folder.mkdir(parents=True, exist_ok=True)
        own = console or screen()
        self._screen = (Bar if own.is_terminal else Lines)(own, total)
        self._sinks = [MetricsFile(folder / METRICS), self._screen]
        if wandb is not None:
            self._wandb = WandbRun(wandb, folder)
            self._sinks.append(self._wandb)
        self._sinks += others()

    def prove(self, proof: str) -> None:
        """Put this proof of the steps so far into the next line of metrics.jsonl (chain.py)."""
        self._proof = proof

    def log(self, step: int, **scalars: Number) -> None:
        """Write the same keys, in this order, to the console, metrics.jsonl and wandb.

        A value that is not finite (a metric over nothing) is left out everywhere, with one warning
        for each key.
        """
        self.step = max(self.step, step)
        if not self._is_writer:
            return
        finite = self._finite(scalars)
        proof, self._proof = self._proof, ""
        for sink in self._sinks:
            if proof and isinstance(sink, MetricsFile):
                sink.log(step, {**finite, PROOF: proof})
            else:
                sink.log(step, finite)
        if time.monotonic() - self._status_at > HEARTBEAT_S:
            self.status("running")

    def move(self, step: int) -> None:
        """Say that `step` is done, to the progress bar of a terminal and to the next status.json;
        nothing is logged.
        """
        self.step = max(self.step, step)
        if self._is_writer:
            self.startup.end()
            self._screen.move(step)

    def say(self, step: int, **scalars: Number) -> None:
        """Write a line to the console only."""
        if self._is_writer:
            self._screen.log(step, self._finite(scalars))

    def gradients(self, step: int, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Write the gradient norm of each parameter to metrics.jsonl, and histograms to wandb; the
        console gets nothing.

        Every rank calls it and all of `gradients` is consumed: under ZeRO each item is gathered
        from all ranks.
        """
        norms: dict[str, Number] = {}
        for name, gradient in gradients:
            if not self._is_writer:
                continue
            norms[f"grad_norm/{name}"] = float(gradient.float().norm())
            if self._wandb is not None:
                self._wandb.histogram(f"gradients/{name}", gradient)
        finite = self._finite(norms)
        for sink in self._sinks:
            if isinstance(sink, (MetricsFile, WandbRun)):
                sink.log(step, finite)

    def bad_step(
        self, step: int, kind: str, steps: Sequence[int], numbers: Mapping[str, Number]
    ) -> None:
        """Record a step whose update was skipped: a line in metrics.jsonl and wandb, and bad_steps
        in status.json from now on. kind: loss, gradient or spike; steps: all bad steps of the run.
        """
        self._bad_steps = list(steps)
        log.warning("step %d: update left out (%s)", step, kind)
        for sink in self._sinks:
            if isinstance(sink, MetricsFile):
                sink.log(step, {"bad_step": kind, **numbers, "bad_steps": len(steps)})
            elif isinstance(sink, WandbRun):
                sink.log(step, {**numbers, "bad_steps": len(steps)})

    def score(self, step: int, **scores: Number) -> None:
        """Add one evaluation to score_list.json, and to score_list.pkl as haven reads it.

        An evaluation of a step that is already listed replaces that entry.
        """
        if not self._is_writer:
            return
        earlier = [entry for entry in _read_scores(self.folder / SCORES) if entry["step"] != step]
        self._write_scores([*earlier, {"step": step, **self._finite(scores)}])

    def answers(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write generated answers, all with the same keys, to answers/step-<n>.jsonl; with the next
        `log` to wandb.
        """
        if not self._is_writer:
            return
        path = self.folder / ANSWERS / f"step-{step}.jsonl"
        with refusals(path):
            path.parent.mkdir(exist_ok=True)
        replace_file(
            path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        )
        if self._wandb is not None:
            self._wandb.table(ANSWERS, [{"step": step, **row} for row in rows])

    def end_early(self, why: str) -> None:
        """Say why the run ends before its last step: in the log, and in status.json as `early`."""
        self._early = why
        if self._is_writer:
            log.info("%s", why)

    def use_data(self, digests: Mapping[str, str], place: Path | None) -> None:
        """Tell wandb which data and base the run began with, by digest, and where the data lie."""
        if self._wandb is not None:
            self._wandb.use_data(digests, self.folder / DATA, place)

    def log_model(self, folder: Path, record: str) -> None:
        """Tell wandb where an exported folder lies, and give it the record in there."""
        if self._wandb is not None:
            self._wandb.log_model(folder, record)

    def status(self, state: State, *, step: int | None = None, error: str | None = None) -> None:
        """Replace status.json: state, step (the last one done, unless given), total, checkpoint
        (the step that the run would go on from; None: the beginning), host, updated_at, error,
        process.
        """
        self.step, self._state = self.step if step is None else step, state
        self._status_at = time.monotonic()
        if not self._is_writer:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        # a folder of this name is a whole checkpoint: it is renamed when all of it is on the disk
        names = [path.name.removeprefix("step-") for path in self.folder.glob("checkpoints/step-*")]
        values = {
            "state": state,
            "step": self.step,
            "total": self.total,
            "checkpoint": max((int(name) for name in names if name.isdigit()), default=None),
            "host": socket.gethostname(),
            "updated_at": now,
            "error": error,
            "process": process.facts(),
            KEY: self.goodput.now(),
            "startup": {name: round(took, 3) for name, took in self.startup.seconds.items()},
        }
        if self.time is not None:
            values["time"] = self.time
        recoveries = events.summary(self.folder)
        if recoveries is not None:
            values[events.KEY] = recoveries
        if self._bad_steps:
            values["bad_steps"] = self._bad_steps
        if self._name:
            values["name"] = self._name
        if self._early:
            values["early"] = self._early
        try:
            write_json(self.folder / STATUS, values)
        except StorageError:
            if state == "running":
                raise
            # A full disk holds no second file, but the room that this one has is its own.
            overwrite_json(self.folder / STATUS, values | {"error": error and error[:MAX_ERROR]})
        if state != self._told_state:
            self._told_state = state
            note_change(self.folder.absolute().parent, self.folder.name)

    def fail(self, error: BaseException) -> None:
        """Record that `error` of this rank ends the run.

        Rank 0 prefers the error of another rank in status.json when it only lost the connection to
        that rank. Another rank writes its error itself, because rank 0 may be stuck.
        """
        error, path = watch.cause_of(error), self.folder / STATUS
        text = f"{type(error).__name__}: {error}"
        with refusals(path):
            status = read_json(path) or {}
        if self._is_writer:
            is_of_now = RANK in status and status.get("process") == process.facts()
            is_lost = isinstance(error, RankLostError) or not isinstance(error, LatheError)
            # two ranks that lost each other have the same error
            has_cause = is_of_now and is_lost and RankLostError.__name__ not in status["error"]
            self.status("failed", error=status["error"] if has_cause else text)
        elif status.get("state") == "running":
            rank = distributed.rank()
            write_json(
                path, status | {"state": "failed", "error": f"rank {rank}: {text}", RANK: rank}
            )

    def resume(self, step: int, bad_steps: Sequence[int] = ()) -> None:
        """Cut metrics.jsonl, score_list and answers/ back to `step`.

        Afterwards they continue like those of an undisturbed run. bad_steps: skipped before `step`.
        """
        self.step, self._bad_steps = step, list(bad_steps)
        self.goodput.resume(step)
        if not self._is_writer:
            return
        lines = self._sinks[0]
        assert isinstance(lines, MetricsFile), "metrics.jsonl is the first sink"
        lines.cut(step)
        scores = self._scores_on_disk(lines)
        if scores or (self.folder / SCORES).exists():
            self._write_scores([entry for entry in scores if entry["step"] <= step])
        for path in (self.folder / ANSWERS).glob("step-*.jsonl"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()

    def logged_scores(self, step: int) -> dict[str, Number] | None:
        """The evaluation of a step that an earlier attempt logged; None if it logged none. Adds it
        to score_list.json. Only rank 0 calls it.
        """
        lines = self._sinks[0]
        assert isinstance(lines, MetricsFile), "metrics.jsonl is the first sink"
        for entry in lines.evaluations():
            if entry.pop("step") == step:
                self.score(step, **entry)
                return entry
        return None

    def close(self) -> None:
        """End the progress bar, close the files and let wandb finish in the last state.

        Calling it twice is fine.
        """
        goes_on = dict.fromkeys(("preempted", "paused"), EXIT_PREEMPTED)
        exit_code = {**goes_on, "failed": 1, "cancelled": 1}.get(self._state, EXIT_OK)
        for sink in self._sinks:
            sink.close(exit_code)
        self._sinks = []
        watch.record_by(None)

    def _finite(self, scalars: Mapping[str, Number]) -> dict[str, Number]:
        unfit = {name for name, value in scalars.items() if not math.isfinite(value)}
        for name in sorted(unfit - self._unfit):
            log.warning(
                "%s is %s: left out of the log whenever it is not finite", name, scalars[name]
            )
        self._unfit |= unfit
        return {name: _plain(value) for name, value in scalars.items() if name not in unfit}

    def _scores_on_disk(self, lines: MetricsFile) -> list[dict[str, Number]]:
        """The evaluations of score_list.json; if it is torn or missing, of metrics.jsonl."""
        path = self.folder / SCORES
        try:
            scores = _read_scores(path)
            is_ours = all(type(entry["step"]) is int for entry in scores)
            if is_ours and path.exists():
                return scores
        except (OSError, ValueError, TypeError, KeyError):
            pass
        logged = lines.evaluations()
        if logged or path.exists():
            log.warning("%s: not as a run writes it; made again from metrics.jsonl", path)
        return logged

    def _write_scores(self, scores: list[dict[str, Number]]) -> None:
        text = json.dumps(scores, indent=1) + "\n"
        replace_file(self.folder / SCORES, text.encode())
        # Only haven reads it. It is made from the parsed text, because the bytes of a pickle depend
        # on which keys are the same object.
        replace_file(self.folder / HAVEN_SCORES, pickle.dumps(json.loads(text), protocol=4))


def _plain(value: Number) -> Number:
    """A numpy or torch number as a builtin one."""
    return int(value) if isinstance(value, Integral) else float(value)


def _read_scores(path: Path) -> list[dict[str, Number]]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return []
