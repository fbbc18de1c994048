"""A run that one word of a command names: by its id, by its folder, or by an exported folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.identity import exp_id
from trainer.errors import ConfigError
from trainer.evaluation.predict import export_of
from trainer.evaluation.run import Question
from trainer.exports import record
from trainer.files.atomic import read_json

_RECORD = "exp_dict.json"
_LISTED = 5  # runs that an error names
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


def dictionary_of(savedir_base: Path, text: str, *, command: str = "judge") -> dict[str, Any]:
    """The dictionary of a run, by its id, the beginning of that, or its folder. ConfigError where
    that is none, or more than one.

    command: the word that was typed before it, for messages.
    """
    folder = _folder_of(savedir_base, text.strip(), command)
    path = folder / _RECORD
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{command} {text}: {path} cannot be read ({error}).") from None
    if not isinstance(values, dict) or exp_id(values) != folder.name:
        raise ConfigError(
            f"{command} {text}: {path} holds no dictionary with the id {folder.name}. Put it back "
            "from a copy."
        )
    return values


def _folder_of(savedir_base: Path, text: str, command: str) -> Path:
    if "/" in text and Path(text).is_dir():
        folder = Path(text).resolve()
        if folder.parent != savedir_base.resolve():
            raise ConfigError(
                f"{command} {text}: got a run below {folder.parent}, want one below "
                f"{savedir_base}. Use -sb {folder.parent}."
            )
        return savedir_base / folder.name
    runs = sorted(one.parent.name for one in savedir_base.glob(f"*/{_RECORD}"))
    matches = [name for name in runs if text and name.startswith(text)]
    if len(matches) == 1:
        return savedir_base / matches[0]
    wrong = "fits several runs" if matches else "is no run"
    some = ", ".join((matches or runs)[:_LISTED]) or "none"
    raise ConfigError(
        f"{command} {text}: {wrong} in {savedir_base}. Give an id, or its beginning: {some}."
    )
