"""A run in wandb. The only importer of wandb."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from netrc import NetrcParseError, netrc
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import torch
from torch import Tensor

from trainer.errors import EXIT_OK, EXIT_PREEMPTED

if TYPE_CHECKING:
    from trainer.telemetry.console import Number

ANSWERS = "answers"
JOB_TYPE = "train"  # an evaluation adds to the run that trained the model
HISTOGRAM_BINS = 64  # what wandb.watch draws
FINISH_S = 120
LONGEST_TAG = 64  # characters that wandb accepts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WandbSettings:
    """Where a run appears in wandb. A resumed run has the same id and continues the curves."""

    entity: str | None
    project: str | None
    name: str
    id: str
    config: Mapping[str, Any]
    group: str | None = None
    tags: Sequence[str] = ()
    notes: str | None = None
    keeps_artifacts: bool = True  # the data by digest, and final/, by reference
    init_timeout_s: float = 30.0  # after this time the run continues offline


class WandbRun:
    """The run in wandb. An error of wandb gives one warning and never stops the training."""

    def __init__(self, settings: WandbSettings, folder: Path) -> None:
        self._run = _start_wandb(settings, folder)
        self._keeps_artifacts = settings.keeps_artifacts
        self._pending: dict[str, Any] = {}

    def log(self, step: int, scalars: Mapping[str, Number]) -> None:
        if self._run is not None:
            pending, self._pending = self._pending, {}
            with self._tolerate():
                # no step= argument: wandb would drop every row whose step is not past the last one
                # it saw
                self._run.log({"step": step, **scalars, **pending})

    def summarise(self, scalars: Mapping[str, Number]) -> None:
        """Log numbers and the kept tables without a step."""
        if self._run is not None:
            with self._tolerate():
                self._run.log({**scalars, **self._pending})

    def histogram(self, name: str, values: Tensor) -> None:
        """Keep a histogram of the finite `values` for the next `log`."""
        finite = values.detach().float().flatten()
        finite = finite[torch.isfinite(finite)].cpu()
        if self._run is not None and finite.numel():
            import wandb

            counts, edges = torch.histogram(finite, bins=HISTOGRAM_BINS)
            with self._tolerate():
                self._pending[name] = wandb.Histogram(np_histogram=(counts.numpy(), edges.numpy()))

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep a table of `rows`, all with the same keys, for the next `log`."""
        if self._run is not None and rows:
            import wandb

            with self._tolerate():
                cells: list[Any] = [list(row.values()) for row in rows]
                self._pending[name] = wandb.Table(columns=list(rows[0]), data=cells)

    def use_data(self, digests: Mapping[str, str], file: Path, place: Path | None) -> None:
        """Log the digests of the data and of the base as an artifact that this run uses: a
        reference to `file`, which holds them.

        place: the folder of the data, which is named and not read; None where there is none.
        """
        if self._run is not None and self._keeps_artifacts:
            import wandb

            with self._tolerate():
                about = {**digests, "folder": place and f"{gethostname()}:{place.absolute()}"}
                name = f"data-{digests.get('train', '')[:12]}"
                artifact = wandb.Artifact(name, "dataset", metadata=about)
                artifact.add_reference(file.absolute().as_uri(), file.name)
                # wandb 0.31 refuses use_artifact offline
                use = self._run.log_artifact if self._run.offline else self._run.use_artifact
                use(artifact)

    def log_model(self, folder: Path, record: str) -> None:
        """Log an exported folder as an artifact: its files by reference, so that no weight is
        uploaded, and its record, a file that names them by digest.
        """
        if self._run is not None and self._keeps_artifacts:
            import wandb

            with self._tolerate():
                artifact = wandb.Artifact(f"model-{self._run.id}", "model")
                artifact.add_file(str(folder / record))
                # checksum: the record has better ones, and to read the weights again takes long
                artifact.add_reference(folder.absolute().as_uri(), folder.name, checksum=False)
                self._run.log_artifact(artifact)

    def close(self, exit_code: int) -> None:
        """End the run in wandb; waits at most FINISH_S for a slow upload."""
        if self._run is not None:
            with self._tolerate():
                if exit_code == EXIT_PREEMPTED:
                    self._run.mark_preempting()
                self._run.finish(exit_code=exit_code)
        self._run = None

    @contextmanager
    def _tolerate(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # any: wandb documents no error tree for a lost service or network
            log.warning("wandb: %s: %s. Training goes on without it.", type(error).__name__, error)
            broken: Any = self._run
            self._run = None
            with suppress(
                Exception
            ):  # of wandb 0.31: else each later line costs an error of its own
                broken._restore()


def tell_wandb(
    settings: WandbSettings,
    folder: Path,
    split: str,
    scores: Mapping[str, Number],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Add the scores of a trained model to its run, as evaluate/<split>/<name>, and a table of
    answers.

    folder: for wandb's own files. rows: of the table, all with the same keys; without rows there is
    no table. Only one rank calls it.
    """
    run = WandbRun(settings, folder)
    prefix = f"evaluate/{split}"
    run.table(f"{prefix}/{ANSWERS}", rows)
    run.summarise({f"{prefix}/{name}": value for name, value in scores.items()})
    run.close(EXIT_OK)


def _start_wandb(settings: WandbSettings, folder: Path) -> Any:
    """A wandb run; None when wandb cannot start one.

    The mode is WANDB_MODE; without it, online if there is a key, else offline.
    """
    first = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
    for mode in dict.fromkeys((first, "offline")):
        try:
            import wandb  # takes 2 s, which only runs with wandb pay

            # after a failed start its service holds on to the id (0.31: "run ID ... is in use")
            wandb.teardown()
            run = wandb.init(
                entity=settings.entity,
                project=settings.project,
                name=settings.name,
                id=settings.id,
                config=dict(settings.config),
                **_about(settings),
                dir=folder,
                resume="allow",
                mode=cast(Any, mode),
                settings=wandb.Settings(
                    silent=True,
                    init_timeout=settings.init_timeout_s,
                    # without a network the rows stay on the disk, for `wandb sync`
                    finish_timeout=FINISH_S,
                    # its default of 15 s loses a preempted run's last rows (0.31)
                    x_transaction_log_flush_interval=2,
                ),
            )
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            log.info("wandb: %s", _where(run))
            return run
        except Exception as error:  # any: see WandbRun._tolerate
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            rest = "without it" if mode == "offline" else "with wandb offline"
            log.warning("wandb: %s. Training goes on %s.", text.rstrip("."), rest)
    return None


def _about(settings: WandbSettings) -> dict[str, Any]:
    """What sorts the run among others. wandb's own variables count more, and add tags."""
    own_tags = [tag.strip() for tag in os.environ.get("WANDB_TAGS", "").split(",")]
    tags = [tag[:LONGEST_TAG] for tag in (*settings.tags, *own_tags) if tag]
    values = {
        "WANDB_RUN_GROUP": ("group", settings.group),
        "WANDB_JOB_TYPE": ("job_type", JOB_TYPE),
        "WANDB_NOTES": ("notes", settings.notes),
    }
    about: dict[str, Any] = {
        key: value for name, (key, value) in values.items() if not os.environ.get(name)
    }
    return {**about, "tags": list(dict.fromkeys(tags))}


def _where(run: Any) -> str:
    """The page of an online run; for an offline run the command that uploads it."""
    if run.offline or not run.url:
        return f"offline: `wandb sync {Path(run.dir).parent}` uploads it"
    return str(run.url)


def _has_key() -> bool:
    """Whether wandb would find a key without asking: in the environment or the netrc file."""
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
