"""The next trials of a search that Optuna makes: ask and tell, without a storage of Optuna's own.

What Optuna knows is rebuilt from our record each time, and its sampler is seeded by the number of
trials so far: the next question is a function of the seed and of the record, so a killed search
asks what an undisturbed one would have asked.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from trainer.config.sweeps.axes import Axis, Choice
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from jobs.search.record import SearchState
    from trainer.config.sweeps.sweep import Sweep

_MOST_REPEATS = 30  # of values that an earlier trial has, before Optuna is not asked again


def ask(sweep: Sweep, search: SearchState, count: int) -> list[dict[str, Any]]:
    """The values of up to `count` more trials, which no earlier trial has. Fewer where Optuna keeps
    to what it has tried.
    """
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(
            "optuna is not installed. It comes with the extra: pip install -e '.[optuna]'."
        )
    optuna: Any = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    number = len(search.trials)
    sampler = optuna.samplers.TPESampler(
        seed=(sweep.search.seed * 1_000_003 + number) % 2**32, constant_liar=True
    )
    direction = "minimize" if search.is_least_best else "maximize"
    study = optuna.create_study(direction=direction, sampler=sampler)
    distributions = {key: _distribution(optuna, one) for key, one in sweep.axes.items()}
    rung = search.first_rung
    for trial in search.trials:
        score = None if rung is None else trial.scores.get(rung)
        state = optuna.trial.TrialState.FAIL if score is None else optuna.trial.TrialState.COMPLETE
        params = {key: _to_param(sweep.axes[key], value) for key, value in trial.values.items()}
        study.add_trial(
            optuna.trial.create_trial(
                state=state, value=score, params=params, distributions=distributions
            )
        )
    known = [trial.values for trial in search.trials]
    fresh: list[dict[str, Any]] = []
    repeats = 0
    while len(fresh) < count and repeats < _MOST_REPEATS:
        params = study.ask(distributions).params
        values = {key: _to_value(one, params[key]) for key, one in sweep.axes.items()}
        if values in known:
            repeats += 1
            continue
        known.append(values)
        fresh.append(values)
    return fresh


def _distribution(optuna: Any, one: Axis) -> Any:
    """What Optuna draws a key from; of values to choose from, their places in the list, because
    Optuna takes no lists and dictionaries.
    """
    if isinstance(one, Choice):
        return optuna.distributions.CategoricalDistribution(range(len(one.values)))
    if one.is_whole:
        return optuna.distributions.IntDistribution(int(one.low), int(one.high))
    return optuna.distributions.FloatDistribution(one.low, one.high, log=one.is_log)


def _to_param(one: Axis, value: Any) -> Any:
    return one.values.index(value) if isinstance(one, Choice) else value


def _to_value(one: Axis, param: Any) -> Any:
    if isinstance(one, Choice):
        return one.values[param]
    return int(param) if one.is_whole else one.rounded(float(param))
