"""A run that one word of a command names: by its id, by its folder, or by an exported folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.identity import exp_id
from trainer.evaluation.predict import export_of
from trainer.evaluation.run import Question
from trainer.exports import record
from trainer.files.atomic import read_json
from trainer.judging.sides import dictionary_of

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

    word: an id in savedir_base or its beginning, a run folder, best/ or final/ in one, or another
    exported folder.
    """
    path = Path(word)
    if not path.is_dir():
        values = dictionary_of(savedir_base, word, command="evaluate")
        return experiment_run(values, savedir_base)
    export = None if (path / _RECORD).is_file() else path
    folder = path.resolve() if export is None else path.resolve().parent
    of_run = read_json(folder / _RECORD)
    if of_run is not None:
        return NamedRun(of_run, folder.parent, folder, export)
    own, export = export_of(path)
    about = record.read(export)
    values = own if about is None else about.experiment
    return NamedRun(values, savedir_base, export, export, own)
