"""One base in memory whose adapters are exchanged in place: samples of a run that trains are asked
of new weights every few seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer import tasks
from trainer.commands.texts.samples import sample
from trainer.commands.texts.wishes import WrongWish
from trainer.errors import LatheError
from trainer.evaluation.predict import OpenExport
from trainer.evaluation.run import Question, check_weights, open_model
from trainer.models import adapters, base_source
from trainer.runtime import distributed
from trainer.training.options import Options


@dataclass
class ExchangedWeights:
    """The model of an experiment with the weights that the last question named.

    values: of the experiment.
    """

    values: dict[str, Any]
    options: Options
    _now: OpenExport | None = field(default=None, init=False)
    _weights: str | None = field(default=None, init=False)

    def answers(self, questions: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The samples of each question, with its number. Questions of the same weights are answered
        one after another.

        questions: {"sample": as samples.sample takes it, "weights": the folder of an export, or ""
        for the base itself}.
        """
        order = sorted(range(len(questions)), key=lambda number: questions[number]["weights"])
        for number in order:
            one = questions[number]
            try:
                model = self._with(one["weights"])
                yield {"of": number, **sample(model.task, model.model.base, one["sample"])}
            except WrongWish as error:
                yield {"of": number, "error": str(error), "param": error.param}
            except LatheError as error:
                yield {"of": number, "error": str(error)}
            except torch.OutOfMemoryError:  # the next question may be one of somebody else
                yield {"of": number, "error": _too_large(one["sample"]), "param": "num_samples"}

    def _with(self, weights: str) -> OpenExport:
        """The model with some weights."""
        if weights == self._weights and self._now is not None:
            return self._now
        now = self._now
        if now is not None and weights and self._weights and _are_alike(now.folder, Path(weights)):
            self._weights = None  # neither, if what follows fails
            self._exchange(now, Path(weights))
            self._now = OpenExport(now.task, now.model, Path(weights))
        else:
            self._now = now = None  # before the next one is read: two may not fit into memory
            self._now = self._read(weights)
        self._weights = weights
        return self._now

    def _read(self, weights: str) -> OpenExport:
        if weights:
            return OpenExport(*open_model(Question(self.values, model=weights), self.options))
        # adapters that nothing has trained add nothing to their base
        task: Any = tasks.load(tasks.parse(self.values), self.options.places)
        return OpenExport(task, task.model().to(distributed.device()).eval(), Path())

    def _exchange(self, now: OpenExport, folder: Path) -> None:
        cfg, places = now.task.cfg, self.options.places
        adapters.check_base(folder, base_source.fingerprint(cfg.base, places))
        adapters.load(now.model.get_submodule(now.task.base_name), folder)
        check_weights(now.model, cfg, folder, places)


def _too_large(one: Mapping[str, Any]) -> str:
    """What is told of a question for which the device has no memory."""
    return (
        f"num_samples={one['num_samples']} of {one['max_tokens']} tokens behind a prompt of "
        f"{len(one['prompt'])} do not fit into the memory of the device. Ask for fewer samples or "
        "tokens at once."
    )


def _are_alike(one: Path, other: Path) -> bool:
    """Whether two folders hold adapters that are made in the same way."""
    how = adapters.read(one) if adapters.are_in(one) and adapters.are_in(other) else None
    return how is not None and adapters.read(other) == how
