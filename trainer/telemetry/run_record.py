"""What a run tells: console, metrics.jsonl, score_list.json, status.json and wandb; its speed, and
the signal to stop.

The only importer of wandb. Every rank makes a `Run` and calls the same methods; ranks other than 0
write nothing.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from netrc import NetrcParseError, netrc
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, Protocol, cast
from urllib.parse import urlsplit

import torch
from rich.console import Console
from torch import Tensor

from trainer.errors import EXIT_OK, EXIT_PREEMPTED, StorageError
from trainer.files.atomic import overwrite_json, refusals, replace_file, write_json
from trainer.runtime import distributed
from trainer.telemetry.console import Bar, Lines, Number
from trainer.telemetry.metrics_file import MetricsFile

State = Literal["queued", "running", "succeeded", "failed", "preempted", "cancelled"]
METRICS, SCORES, HAVEN_SCORES, STATUS = (
    "metrics.jsonl",
    "score_list.json",
    "score_list.pkl",
    "status.json",
)
ANSWERS = "answers"
HISTOGRAM_BINS = 64  # what wandb.watch draws
MAX_ERROR = 2000  # characters of an error in the block that a full disk still has
HEARTBEAT_S = 15.0  # at most this long between a log line and the status.json that knows of it
FINISH_S = 120

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WandbSettings:
    """Where a run appears in wandb. A resumed run has the same id and so continues the same
    curves.
    """

    entity: str | None
    project: str | None
    name: str
    id: str
    config: Mapping[str, Any]
    tags: tuple[str, ...] = ()
    init_timeout_s: float = 30.0  # then the run goes on offline


class Sink(Protocol):
    """A place that scalars go to."""

    def log(self, step: int, scalars: Mapping[str, Number]) -> None: ...

    def close(self, exit_code: int) -> None: ...


class Run:
    """The record of one run in its folder. Only rank 0 writes; elsewhere the same calls do
    nothing.
    """

    def __init__(
        self,
        folder: Path,
        *,
        total: int,
        wandb: WandbSettings | None = None,
        console: Console | None = None,
    ) -> None:
        self.folder, self.total, self.step = folder, total, 0
        self._state: State = "running"
        self._status_at = 0.0
        self._is_writer = distributed.is_main()
        self._sinks: list[Sink] = []
        self._unfit: set[str] = set()
        self._wandb: _Wandb | None = None
        if not self._is_writer:
            return
        with refusals(folder):
            folder.mkdir(parents=True, exist_ok=True)
        screen = console or Console()
        self._sinks = [
            MetricsFile(folder / METRICS),
            (Bar if screen.is_terminal else Lines)(screen, total),
        ]
        if wandb is not None:
            self._wandb = _Wandb(wandb, folder)
            self._sinks.append(self._wandb)

    def log(self, step: int, **scalars: Number) -> None:
        """The same keys, in the order given, on the console, in metrics.jsonl and in wandb.

        A value that is not finite (a metric over nothing) is left out everywhere, with one warning
        for each key.
        """
        self.step = max(self.step, step)
        if not self._is_writer:
            return
        finite = self._finite(scalars)
        for sink in self._sinks:
            sink.log(step, finite)
        if time.monotonic() - self._status_at > HEARTBEAT_S:
            self.status("running")

    def gradients(self, step: int, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Norms of the gradients by parameter in metrics.jsonl, and their histograms in wandb; not
        on the console.

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
            if isinstance(sink, (MetricsFile, _Wandb)):
                sink.log(step, finite)

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

    def status(self, state: State, *, step: int | None = None, error: str | None = None) -> None:
        """Replace status.json: state, step (the last one logged, unless given), total, host,
        updated_at, error.
        """
        self.step, self._state = self.step if step is None else step, state
        self._status_at = time.monotonic()
        if not self._is_writer:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        values = {
            "state": state,
            "step": self.step,
            "total": self.total,
            "host": socket.gethostname(),
            "updated_at": now,
            "error": error,
        }
        try:
            write_json(self.folder / STATUS, values)
        except StorageError:
            if state == "running":
                raise
            # A full disk holds no second file, but the room that this one has is its own.
            overwrite_json(self.folder / STATUS, values | {"error": error and error[:MAX_ERROR]})

    def resume(self, step: int) -> None:
        """Cut metrics.jsonl, score_list and answers/ back to `step`, so that they go on as an
        undisturbed run's.
        """
        self.step = step
        if not self._is_writer:
            return
        lines = self._sinks[0]
        assert isinstance(lines, MetricsFile), "metrics.jsonl is the first sink"
        lines.cut(step)
        if (self.folder / SCORES).exists():
            self._write_scores(
                [entry for entry in _read_scores(self.folder / SCORES) if entry["step"] <= step]
            )
        for path in (self.folder / ANSWERS).glob("step-*.jsonl"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()

    def close(self) -> None:
        """End the progress bar, close the files and let wandb finish in the last state. Twice is
        fine.
        """
        exit_code = {"preempted": EXIT_PREEMPTED, "failed": 1, "cancelled": 1}.get(
            self._state, EXIT_OK
        )
        for sink in self._sinks:
            sink.close(exit_code)
        self._sinks = []

    def _finite(self, scalars: Mapping[str, Number]) -> dict[str, Number]:
        unfit = {name for name, value in scalars.items() if not math.isfinite(value)}
        for name in sorted(unfit - self._unfit):
            log.warning(
                "%s is %s: left out of the log whenever it is not finite", name, scalars[name]
            )
        self._unfit |= unfit
        return {name: _plain(value) for name, value in scalars.items() if name not in unfit}

    def _write_scores(self, scores: list[dict[str, Number]]) -> None:
        text = json.dumps(scores, indent=1) + "\n"
        replace_file(self.folder / SCORES, text.encode())
        # for haven, never read here; of the text, because pickle's bytes tell which keys are one
        # object
        replace_file(self.folder / HAVEN_SCORES, pickle.dumps(json.loads(text), protocol=4))


def _plain(value: Number) -> Number:
    """A builtin number of a numpy or torch one."""
    return int(value) if isinstance(value, Integral) else float(value)


def _read_scores(path: Path) -> list[dict[str, Number]]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return []


class _Wandb:
    """The run in wandb. Whatever goes wrong there costs one warning, never the training."""

    def __init__(self, settings: WandbSettings, folder: Path) -> None:
        self._run = _start_wandb(settings, folder)
        self._pending: dict[str, Any] = {}

    def log(self, step: int, scalars: Mapping[str, Number]) -> None:
        if self._run is not None:
            pending, self._pending = self._pending, {}
            with self._tolerated():
                # no step= argument: wandb would drop every row whose step is not past the last one
                # it saw
                self._run.log({"step": step, **scalars, **pending})

    def summarise(self, scalars: Mapping[str, Number]) -> None:
        """Numbers, and the tables that are kept, that belong to no step."""
        if self._run is not None:
            with self._tolerated():
                self._run.log({**scalars, **self._pending})

    def histogram(self, name: str, values: Tensor) -> None:
        """Keep a histogram of the finite `values` for the next `log`."""
        finite = values.detach().float().flatten()
        finite = finite[torch.isfinite(finite)].cpu()
        if self._run is not None and finite.numel():
            import wandb

            counts, edges = torch.histogram(finite, bins=HISTOGRAM_BINS)
            with self._tolerated():
                self._pending[name] = wandb.Histogram(np_histogram=(counts.numpy(), edges.numpy()))

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep a table of `rows`, all with the same keys, for the next `log`."""
        if self._run is not None and rows:
            import wandb

            with self._tolerated():
                cells: list[Any] = [list(row.values()) for row in rows]
                self._pending[name] = wandb.Table(columns=list(rows[0]), data=cells)

    def close(self, exit_code: int) -> None:
        """End the run there, waiting for a slow upload at most FINISH_S."""
        if self._run is not None:
            with self._tolerated():
                if exit_code == EXIT_PREEMPTED:
                    self._run.mark_preempting()
                self._run.finish(exit_code=exit_code)
        self._run = None

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        try:
            yield
        except (
            Exception
        ) as error:  # any: wandb documents no error tree for a lost service or network
            log.warning("wandb: %s: %s. Training goes on without it.", type(error).__name__, error)
            self._run = None


def tell_wandb(
    settings: WandbSettings,
    folder: Path,
    split: str,
    scores: Mapping[str, Number],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Add what a trained model was measured to be to its run: evaluate/<split>/<name>, and a table
    of answers.

    folder: for wandb's own files. rows: of the table, all with the same keys; none, no table. On
    one rank only.
    """
    run = _Wandb(settings, folder)
    prefix = f"evaluate/{split}"
    run.table(f"{prefix}/{ANSWERS}", rows)
    run.summarise({f"{prefix}/{name}": value for name, value in scores.items()})
    run.close(EXIT_OK)


def _start_wandb(settings: WandbSettings, folder: Path) -> Any:
    """A wandb run: online with a key or as WANDB_MODE says, else offline; None when neither
    works.
    """
    first = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
    for mode in dict.fromkeys((first, "offline")):
        try:
            return _init_wandb(settings, folder, mode)
        except Exception as error:  # any: see _Wandb._tolerated
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            rest = "without it" if mode == "offline" else "with wandb offline"
            log.warning("wandb: %s. Training goes on %s.", text.rstrip("."), rest)
    return None


def _has_key() -> bool:
    """Whether wandb would find a key without asking for one: in the environment, or in the netrc
    file.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return (
            netrc(os.environ.get("NETRC") or Path.home() / ".netrc").authenticators(host)
            is not None
        )
    except (OSError, NetrcParseError):
        return False


def _init_wandb(settings: WandbSettings, folder: Path, mode: str) -> Any:
    import wandb  # 2 s that runs without it do not pay

    # after a failed start its service holds on to the id (0.31: "run ID ... is in use")
    wandb.teardown()
    run = wandb.init(
        entity=settings.entity,
        project=settings.project,
        name=settings.name,
        id=settings.id,
        config=dict(settings.config),
        tags=settings.tags,
        dir=folder,
        resume="allow",
        mode=cast(Any, mode),
        settings=wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_save_requirements=False,
            init_timeout=settings.init_timeout_s,
            finish_timeout=FINISH_S,  # without a network; the rows are on the disk for `wandb sync`
            # its default of 15 s loses a preempted run's last rows (0.31)
            x_transaction_log_flush_interval=2,
        ),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


class Preemption:
    """Whether this process was asked to stop: SIGTERM and SIGUSR1 set a flag, and nothing else,
    however often.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before = {
            number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGUSR1)
        }

    def _ask(self, number: int, frame: Any) -> None:
        self.requested = True

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}
