"""A group that is one dictionary with `sweep`: which of its keys take which values, and `search`:
how the experiments are chosen among them. Imports no torch.

    "tuned": vary(MINE, sweep={"optim.lr": [1e-4, 3e-4], "lora.r": {"choice": [8, 16]}})
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from trainer.config.block import Positive, Strict, validate
from trainer.config.identity import exp_id
from trainer.config.sweeps.axes import Axis, Choice, Range, axis
from trainer.config.userfile import kind
from trainer.errors import ConfigError

Values = dict[str, Any]
_MOST_DRAWS = 100  # for one trial that differs from those before it


class SearchRules(Strict):
    """The block `search` of a group: how trials are chosen, and how far each is trained."""

    how: Literal["grid", "random", "optuna"] = "grid"
    """grid: every combination; random: `trials` of them, drawn by `seed`; optuna: `trials`, each
    chosen by what the scores of those before it say (needs the package optuna)."""
    trials: Positive | None = None
    """How many; random and optuna need it, and a grid has as many as it has combinations."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the draws: the same seed makes the same trials."""
    rungs: list[Positive] = Field(default_factory=list)
    """Steps at which only the best trials go on; the last step of the run need not be named. []:
    every trial is trained to its end."""
    reduction: Annotated[int, Field(ge=2)] = 3
    """After each rung one in so many trials goes on, at least one."""
    at_once: Positive = 4
    """optuna: so many trials are chosen before the scores of the ones before them count."""

    def rungs_of(self, steps: int) -> list[int]:
        """The steps at which the trials are compared; the last one is the end of the run."""
        return [*(rung for rung in self.rungs if rung < steps), steps]

    def survivors(self, count: int) -> int:
        """How many of so many trials go on."""
        return max(count // self.reduction, 1)

    def cost(self, count: int, steps: int) -> list[RungCost]:
        """What each rung of a search with so many trials costs."""
        parts: list[RungCost] = []
        before = 0
        for rung in self.rungs_of(steps):
            parts.append(RungCost(rung, count, count * (rung - before)))
            before, count = rung, self.survivors(count)
        return parts


@dataclass(frozen=True)
class RungCost:
    """How many trials are trained to the step of a rung, and the steps that they make for it,
    counted from the rung before.
    """

    rung: int
    trials: int
    steps: int


@dataclass(frozen=True)
class Sweep:
    """One dictionary, what its keys can be, and how trials are chosen."""

    parent: Values
    axes: Mapping[str, Axis]
    search: SearchRules
    stated: Values  # `sweep` and `search` as they were written

    def experiment(self, values: Mapping[str, Any]) -> Values:
        """The dictionary of a trial: the parent with a value for each key of the sweep."""
        result = copy.deepcopy(self.parent)
        for key, value in values.items():
            *blocks, name = key.split(".")
            place: Any = result
            for block in blocks:
                place = place.setdefault(block, {})
            place[name] = copy.deepcopy(value)
        return result

    def specimen(self) -> Values:
        """A trial whose dictionary has every key of the sweep."""
        return self.experiment({key: one.at(0.0) for key, one in self.axes.items()})

    def trials(self) -> list[Values]:
        """The values of every trial of a grid, or of a random search: {"optim.lr": 1e-4}. []: they
        are known only while Optuna asks.
        """
        if self.search.how == "grid":
            choices = [cast("Choice", one).values for one in self.axes.values()]
            points = itertools.product(*choices)
            return [dict(zip(self.axes, point, strict=True)) for point in points]
        if self.search.how == "optuna":
            return []
        every: list[Values] = []
        for number in range(self.search.trials or 0):
            every.append(self._draw(number, every))
        return every

    def _draw(self, number: int, earlier: list[Values]) -> Values:
        """The values of trial `number`, which differ from those before. Each value is a function of
        the seed, the number and the key: more trials, or one more key, leave the others as they
        are.
        """
        for again in range(_MOST_DRAWS):
            values = {
                key: one.at(random.Random(f"{self.search.seed}/{number}/{again}/{key}").random())
                for key, one in self.axes.items()
            }
            if values not in earlier:
                return values
        raise ConfigError(
            f"search: got trials={self.search.trials}, but the sweep gave only {len(earlier)} that "
            'differ. Give fewer trials, or "how": "grid", which takes each combination once.'
        )


class SweepGroup(list[Values]):
    """The experiments of a sweep; [] where Optuna chooses them."""

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep.experiment(values) for values in sweep.trials())
        self.sweep = sweep


def group_of(form: Values) -> SweepGroup:
    """The group that a dictionary with `sweep` stands for. ConfigError with what is wrong in it."""
    parent = {key: value for key, value in form.items() if key not in ("sweep", "search")}
    stated: Any = form["sweep"]
    if not isinstance(stated, dict) or not stated:
        raise ConfigError(
            f"sweep: got {kind(stated)}, want a dictionary: key -> its values, such as "
            '{"optim.lr": [1e-4, 3e-4]}.'
        )
    block: Any = form.get("search", {})
    if not isinstance(block, dict):
        raise ConfigError(f'search: got {kind(block)}, want a dictionary: {{"how": "random"}}.')
    search = validate(SearchRules, cast("Values", block), source="search")
    axes: dict[str, Axis] = {}
    mistakes: list[str] = []
    for key, one in cast("dict[Any, Any]", stated).items():
        try:
            _refuse_place(parent, key)
            axes[key] = axis(key, one)
        except ConfigError as error:
            mistakes.append(str(error))
    mistakes += _mistakes(search, axes, parent)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    blocks = {"sweep": cast("Values", stated), "search": cast("Values", block)}
    group = SweepGroup(Sweep(parent, axes, search, blocks))
    ids = [exp_id(values) for values in group]
    if len(set(ids)) < len(ids):
        raise ConfigError("sweep: two of its trials are the same experiment. Remove one value.")
    return group


def _refuse_place(parent: Values, key: Any) -> None:
    """ConfigError for a key that is no dotted path into the dictionary."""
    if not isinstance(key, str) or not all(key.split(".")):
        raise ConfigError(
            f'sweep: got the key {key!r}, want a dotted one such as "optim.lr", or "task".'
        )
    place: Any = parent
    *blocks, _ = key.split(".")
    for depth, block in enumerate(blocks, start=1):
        place = place.get(block, {})
        if not isinstance(place, dict):
            path = ".".join(blocks[:depth])
            raise ConfigError(
                f"sweep[{key!r}]: {path} is {place!r} in the dictionary, want a block of keys. "
                f"Sweep {path} as a whole."
            )


def _mistakes(search: SearchRules, axes: Mapping[str, Axis], parent: Values) -> Iterable[str]:
    """What does not fit together."""
    ranges = [key for key, one in axes.items() if isinstance(one, Range)]
    if search.how == "grid" and ranges:
        yield (
            f"sweep[{ranges[0]!r}]: got a range, and a grid wants values. Give a list, or "
            '"search": {"how": "random", "trials": 20}.'
        )
    if search.how == "grid" and search.trials is not None:
        yield (
            f"search.trials: got {search.trials} for a grid, which has as many trials as "
            'combinations. Leave it out, or give "how": "random".'
        )
    if search.how != "grid" and search.trials is None:
        yield f'search.trials: got none, and "how": "{search.how}" wants a number. Give one.'
    if search.rungs != sorted(set(search.rungs)):
        yield f"search.rungs: got {search.rungs}, want steps in rising order, each once."
    lengths = sorted({"train", "train.steps", "train.epochs"} & set(axes))
    if search.rungs and lengths:
        yield (
            f"search.rungs: {lengths[0]} is swept, and trials of several lengths cannot be "
            "compared at the same steps. Leave one of the two out."
        )
    elif search.rungs:
        train = parent.get("train")
        block = cast("Values", train) if isinstance(train, dict) else {}
        yield from late_rungs(search.rungs, block.get("steps"))


def late_rungs(rungs: list[int], steps: Any) -> Iterable[str]:
    """The problem of rungs that are not among the steps of a run."""
    if type(steps) is not int:
        yield (
            "search.rungs: they are steps, and this dictionary states epochs. Give train.steps, or "
            "leave rungs out."
        )
    elif rungs[-1] > steps:
        yield (
            f"search.rungs: got {rungs[-1]}, a rung beyond the run, whose last step is {steps}. "
            f"Give rungs up to {steps}, or more train.steps."
        )
