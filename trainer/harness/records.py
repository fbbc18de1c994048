"""What published tasks found, as a file of the run and as lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.files.atomic import read_json, write_json

if TYPE_CHECKING:
    from trainer.verdict.paired import Difference

_ENTRIES = "evaluations"
_MODELS = ("best", "final", "base")


@dataclass(frozen=True)
class TaskScore:
    """A metric of a task."""

    value: float
    stderr: float | None = None  # the standard error as the program states it; None: it states none
    is_told: bool = True  # on the console and in wandb, besides the file


@dataclass(frozen=True)
class TaskScores:
    """What a program says of a model on a task."""

    version: Any  # of the task
    rows: int | None  # that were evaluated
    scores: Mapping[str, TaskScore]  # by metric
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what else the file says

    def as_json(self) -> dict[str, Any]:
        scores = {
            name: {"value": one.value, "stderr": one.stderr} for name, one in self.scores.items()
        }
        return {"version": self.version, "rows": self.rows, **self.more, "scores": scores}


@dataclass(frozen=True)
class Gain:
    """A metric of a model less that of another one, on the same rows."""

    value: float
    paired: Difference | None = None  # row by row; None: the metric is no mean over rows

    def as_json(self) -> dict[str, Any]:
        one = self.paired
        if one is None:
            return {"value": self.value, "low": None, "high": None}
        about: dict[str, Any] = {"value": self.value, "low": one.low, "high": one.high, "p": one.p}
        if one.mcnemar is not None:
            about |= {"broken": one.mcnemar.broken, "mended": one.mcnemar.mended}
        return about

    def __str__(self) -> str:
        one = self.paired
        if one is None:
            return f"{self.value:+.6f} (no interval)"
        return f"{self.value:+.6f} (95%: {one.low:+.6f} to {one.high:+.6f}, p {one.p:.4g})"


@dataclass(frozen=True)
class ModelScores:
    """The tasks of a model."""

    model: str  # as the command calls it
    folder: Path
    weights: str  # a digest
    tasks: Mapping[str, TaskScores]

    def as_json(self) -> dict[str, Any]:
        tasks = {name: one.as_json() for name, one in self.tasks.items()}
        about = {"model": self.model, "folder": str(self.folder), "weights": self.weights}
        return {**about, "tasks": tasks}

    def scalars(self) -> dict[str, float]:
        """By task and metric: "hellaswag/acc"."""
        return {
            f"{task}/{metric}": score.value
            for task, of_task in self.tasks.items()
            for metric, score in of_task.scores.items()
            if score.is_told
        }


@dataclass(frozen=True)
class Evaluation:
    """A model on tasks, and perhaps another one that it is compared with."""

    of: ModelScores
    against: ModelScores | None = None
    gains: Mapping[str, Mapping[str, Gain]] = field(
        default_factory=dict[str, dict[str, Gain]]
    )  # by task and metric

    def lines(self) -> Iterator[str]:
        """A line for each metric of each task."""
        for task, of_task in self.of.tasks.items():
            for metric in [name for name, one in of_task.scores.items() if one.is_told]:
                score = of_task.scores[metric]
                line = f"{task}/{metric} {_text_of(score)}"
                if self.against is not None and metric in self.gains[task]:
                    other = self.against.tasks[task].scores[metric]
                    line += f"; {self.against.model} {_text_of(other)}; difference "
                    line += str(self.gains[task][metric])
                yield line

    def as_json(self) -> dict[str, Any]:
        entry = self.of.as_json()
        if self.against is not None:
            entry["against"] = self.against.as_json()
            entry["differences"] = {
                task: {metric: one.as_json() for metric, one in of_task.items()}
                for task, of_task in self.gains.items()
            }
        return entry


def _text_of(score: TaskScore) -> str:
    error = "" if score.stderr is None else f" (stderr {score.stderr:.6f})"
    return f"{score.value:.6f}{error}"


def model_name(model: str, folder: Path) -> str:
    """What people call the model of a question: best, final, base, or the name of its folder."""
    return model if model in _MODELS else folder.name


def add(path: Path, evaluation: Evaluation, about: Mapping[str, Any]) -> None:
    """Add an evaluation to a file, the newest last. It replaces one of the same weights by the same
    question, if that was compared with the same weights, or with none.

    about: versions of programs, and under "how" what was asked.
    """
    entry: dict[str, Any] = {**about, **evaluation.as_json()}
    entries: list[Any] = (read_json(path) or {}).get(_ENTRIES, [])
    others = [one for one in entries if _question(one) != _question(entry)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {_ENTRIES: [*others, entry]})


def _question(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two entries of one question have in common: the newer one counts."""
    return entry.get("weights"), entry.get("how"), entry.get("against", {}).get("weights")
