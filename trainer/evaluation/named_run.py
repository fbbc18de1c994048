"""A run that one word of a command names: by its id, by its folder, or by an exported folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.identity import exp_id
from trainer.errors import ConfigError
from trainer.evaluation.predict import export_of
from trainer.evaluation.run import Question
from trainer.files.atomic import read_json

_RECORD = "exp_dict.json"
UNTRAINED, _EXPORTS = "base", ("best", "final")


@dataclass(frozen=True)
class NamedRun:
    """A run, or an export that has left its run."""

    values: dict[str, Any]  # the experiment that was trained
    savedir_base: Path
    folder: Path  # into which results are written: that of the run, else that of the export
    export: Path | None = None  # the exported folder that the word names
    # of an export that has left its run: what replaces values, so that it alone is read
    own: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def question(self, model: str, **more: Any) -> Question:
        """The evaluation of one of its models: best, final, base, or an exported folder. A word
        that names an exported folder replaces best and final.
        """
        if model == UNTRAINED:
            return Question(self.values, model=model, **more)
        if self.export is not None and model in _EXPORTS:
            return Question({**self.values, **self.own}, model=str(self.export), **more)
        here = self.folder / model
        is_here = model in _EXPORTS and here.is_dir()
        return Question(self.values, model=str(here) if is_here else model, **more)


def experiment_run(values: dict[str, Any], savedir_base: Path) -> NamedRun:
    """The run of an experiment."""
    return NamedRun(values, savedir_base, savedir_base / exp_id(values))


def named_run(word: str, savedir_base: Path) -> NamedRun:
    """The run that a word names. ConfigError when there is none.

    word: an id in savedir_base, a run folder, best/ or final/ in one, or another exported folder.
    """
    for folder in (savedir_base / word, Path(word)):
        values: Any = read_json(folder / _RECORD)
        if isinstance(values, dict):
            return NamedRun(values, folder.resolve().parent, folder)
    export = Path(word)
    values = read_json(export.resolve().parent / _RECORD)
    if export.is_dir() and isinstance(values, dict):
        run_folder = export.resolve().parent
        return NamedRun(values, run_folder.parent, run_folder, export)
    if not export.is_dir():
        raise ConfigError(
            f"{word}: got neither the id of a run in {savedir_base} nor a folder. Give the id or "
            "the folder of a run, or an exported folder; -sb says where the runs are."
        )
    own, folder = export_of(export)
    values = (read_json(folder / "lathe.json") or {}).get("experiment", own)
    return NamedRun(values, savedir_base, folder, folder, own)
