"""A run in TensorBoard and in MLflow, two extras that get the same scalars as metrics.jsonl."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.differences import flatten
from trainer.config.flags import names_of_trackers, unknown_tracker
from trainer.errors import EXIT_OK, EXIT_PREEMPTED, ConfigError
from trainer.files.packages import require

if TYPE_CHECKING:
    from trainer.telemetry.console import Number

TENSORBOARD_FOLDER = "tensorboard"
_ID_TAG = "lathe.exp_id"  # the tag by which a resumed run finds itself in MLflow
_LONGEST_PARAM = 6000  # characters that MLflow accepts

log = logging.getLogger(__name__)


def tracker_names(text: str | None) -> tuple[str, ...]:
    """The trackers of a flag, "tensorboard,mlflow". ConfigError for one that does not exist or is
    not installed.
    """
    names = names_of_trackers(text)
    for problem in unknown_tracker(text):
        raise ConfigError(problem)
    for name in names:
        require(name, name)
    return names


def tracked_runs(
    names: Sequence[str], folder: Path, *, name: str, exp_id: str, values: Mapping[str, Any]
) -> list[TrackedRun]:
    """A run in each of the trackers. Only one rank calls it."""
    runs: list[TrackedRun] = []
    if "tensorboard" in names:
        runs.append(TensorBoardRun(folder))
    if "mlflow" in names:
        runs.append(MlflowRun(name or exp_id, exp_id, values))
    return runs


class TrackedRun(ABC):
    """A run somewhere else. Whatever goes wrong there costs one warning, never the training."""

    def __init__(self) -> None:
        self._is_lost = False

    def log(self, step: int, scalars: Mapping[str, Number]) -> None:
        self._tolerate(lambda: self.write(step, scalars))

    def close(self, exit_code: int) -> None:
        self._tolerate(lambda: self.end(exit_code))
        self._is_lost = True

    @abstractmethod
    def write(self, step: int, scalars: Mapping[str, Number]) -> None: ...

    @abstractmethod
    def end(self, exit_code: int) -> None: ...

    def _tolerate(self, act: Callable[[], None]) -> None:
        if self._is_lost:
            return
        try:
            act()
        except Exception as error:  # any error: the server or the disk is not ours
            name = type(self).__name__
            log.warning(
                "%s: %s: %s. Training goes on without it.", name, type(error).__name__, error
            )
            self._is_lost = True


class TensorBoardRun(TrackedRun):
    """Scalars as event files in the run folder. After a resume, TensorBoard hides the events of
    later steps of the earlier attempt.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder / TENSORBOARD_FOLDER
        self._writer: Any = None

    def write(self, step: int, scalars: Mapping[str, Number]) -> None:
        if self._writer is None:  # the first step is known only now
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self, exit_code: int) -> None:
        del exit_code
        if self._writer is not None:
            self._writer.close()


class MlflowRun(TrackedRun):
    """Scalars and the dictionary in MLflow, on the server and in the experiment that MLflow's own
    variables name (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME). A resumed run continues there.
    """

    def __init__(self, name: str, exp_id: str, values: Mapping[str, Any]) -> None:
        super().__init__()
        self._name, self._exp_id, self._values = name, exp_id, values
        self._client: Any = None
        self._run_id = ""
        self._tolerate(self._begin)

    def _begin(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient()
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        present = client.get_experiment_by_name(title)
        experiment = (
            present.experiment_id if present is not None else client.create_experiment(title)
        )
        earlier = client.search_runs([experiment], f"tags.`{_ID_TAG}` = '{self._exp_id}'")
        if earlier:
            self._run_id = earlier[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {_ID_TAG: self._exp_id}
            self._run_id = client.create_run(experiment, run_name=self._name, tags=tags).info.run_id
            pairs = flatten(self._values).items()
            params = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in pairs]
            client.log_batch(self._run_id, params=params)
        self._client = client
        log.info("mlflow: run %s of experiment %r", self._run_id, title)

    def write(self, step: int, scalars: Mapping[str, Number]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, step) for name, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def end(self, exit_code: int) -> None:
        status = {EXIT_OK: "FINISHED", EXIT_PREEMPTED: "KILLED"}.get(exit_code, "FAILED")
        self._client.set_terminated(self._run_id, status)
