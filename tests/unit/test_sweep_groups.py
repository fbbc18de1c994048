"""Groups with `sweep`: what they stand for, what they cost, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exp_configs import CAUSAL_LM_TINY, experiments_of, vary
from jobs.commands.sweep import cost_lines
from jobs.search.record import SearchState as Begun
from trainer.config import groups
from trainer.config.sweeps.sweep import SweepGroup, group_of
from trainer.errors import ConfigError

LR = {"optim.lr": [1e-4, 3e-4]}


def made(sweep: Any, **search: Any) -> SweepGroup:
    return group_of({**CAUSAL_LM_TINY, "sweep": sweep, "search": search})


def refused(sweep: Any, **search: Any) -> str:
    with pytest.raises(ConfigError) as error:
        made(sweep, **search)
    return str(error.value)


def test_a_grid_is_every_combination_with_the_last_key_fastest() -> None:
    group = made({**LR, "train.seed": {"choice": [1, 2]}})
    picked = [(one["optim"]["lr"], one["train"]["seed"]) for one in group]
    assert picked == [(1e-4, 1), (1e-4, 2), (3e-4, 1), (3e-4, 2)]
    assert all("sweep" not in one and "search" not in one for one in group)
    assert group[0]["optim"]["betas"] == CAUSAL_LM_TINY["optim"]["betas"]
    assert "seed" not in CAUSAL_LM_TINY["train"]


def test_a_key_may_stand_in_a_block_that_the_dictionary_lacks() -> None:
    (one,) = made({"lora.r": [8]})
    assert one["lora"] == {"r": 8}


def test_a_random_search_draws_the_same_trials_from_the_same_seed() -> None:
    ranges = {
        "optim.lr": {"log_uniform": [1e-5, 1e-2]},
        "optim.weight_decay": {"uniform": [0.0, 0.1]},
        "lora.r": {"integer": [1, 8]},
    }
    first = made(ranges, how="random", trials=20)
    assert list(first) == list(made(ranges, how="random", trials=20))
    assert list(first) == list(made(ranges, how="random", trials=30))[:20]
    assert list(first) != list(made(ranges, how="random", trials=20, seed=1))
    rates = sorted(one["optim"]["lr"] for one in first)
    assert 1e-5 <= rates[0] < 1e-4
    assert 1e-3 < rates[-1] <= 1e-2
    assert {one["lora"]["r"] for one in first} <= set(range(1, 9))
    assert all(float(f"{rate:.4g}") == rate for rate in rates)
    more = made({**ranges, "train.seed": [1, 2]}, how="random", trials=20)
    assert [one["optim"] for one in more] == [one["optim"] for one in first]


def test_a_random_search_takes_no_trial_twice() -> None:
    group = made({"train.seed": [1, 2, 3]}, how="random", trials=3)
    assert sorted(one["train"]["seed"] for one in group) == [1, 2, 3]
    assert "gave only 3 that differ" in refused({"train.seed": [1, 2, 3]}, how="random", trials=4)


@pytest.mark.parametrize("form", ["python", "yaml", "json", "list"])
def test_a_group_of_a_file_may_be_a_sweep(form: str, tmp_path: Path) -> None:
    swept: Any = {**CAUSAL_LM_TINY, "sweep": {**LR, "train.seed": [1, 2]}}
    file = tmp_path / f"groups.{ {'python': 'py', 'list': 'py'}.get(form, form) }"
    content = {"tuned": [swept] if form == "list" else swept}
    text = json.dumps(content)  # which is YAML, too
    if file.suffix == ".py":
        file.write_text(f"import json\nEXP_GROUPS = json.loads({text!r})\n")
    else:
        file.write_text(text)
    experiments = experiments_of("tuned", file, 7)
    assert [one["optim"]["lr"] for one in experiments] == [1e-4, 1e-4, 3e-4, 3e-4]
    assert {one["train"]["steps"] for one in experiments} == {7}


MISTAKES = [
    ({}, {}, "sweep: got an empty dict, want a dictionary"),
    ([1], {}, "sweep: got a list, want a dictionary"),
    ({"optim.lr": []}, {}, "sweep['optim.lr']: got an empty list, want at least one value"),
    ({"optim.lr": 1e-4}, {}, "sweep['optim.lr']: got a float, want a list of values"),
    ({"optim.lr": [1e-4, 1e-4]}, {}, "got 0.0001 twice"),
    ({"optim.lr": {"chioce": [1]}}, {}, "Did you mean 'choice'?"),
    ({"optim.lr": {"choice": [1], "uniform": [1, 2]}}, {}, "want exactly one of choice"),
    ({"optim.lr": {"log_uniform": [1e-3, 1e-5]}}, {"how": "random", "trials": 3}, "the lower one"),
    ({"optim.lr": {"log_uniform": [0, 1]}}, {"how": "random", "trials": 3}, "want numbers above 0"),
    ({"lora.r": {"integer": [1, 2.5]}}, {"how": "random", "trials": 3}, "want whole numbers"),
    ({"optim.lr": {"uniform": [0, 1]}}, {}, "got a range, and a grid wants values"),
    ({"task.name": [1]}, {}, "task is 'causal_lm' in the dictionary, want a block"),
    ({"optim..lr": [1]}, {}, "want a dotted one"),
    (LR, {"trials": 4}, "search.trials: got 4 for a grid"),
    (LR, {"how": "random"}, 'search.trials: got none, and "how": "random" wants a number'),
    (LR, {"hwo": "grid"}, "how"),
    (LR, {"rungs": [10, 5]}, "want steps in rising order"),
    (LR, {"rungs": [10, 61]}, "got 61, a rung beyond the run, whose last step is 60"),
    ({"train.steps": [10, 20]}, {"rungs": [5]}, "trials of several lengths cannot be compared"),
    (LR, {"rungs": [5], "reduction": 1}, "reduction"),
]


@pytest.mark.parametrize(("sweep", "search", "words"), MISTAKES)
def test_a_mistake_is_named_with_what_is_wanted(sweep: Any, search: Any, words: str) -> None:
    assert words in refused(sweep, **search)


def test_rungs_of_a_run_in_epochs_are_refused() -> None:
    values = {**CAUSAL_LM_TINY, "sweep": LR, "search": {"rungs": [5]}}
    values["train"] = {key: one for key, one in values["train"].items() if key != "steps"}
    values["train"]["epochs"] = 2
    with pytest.raises(ConfigError, match="this dictionary states epochs"):
        group_of(values)


def test_an_unknown_key_is_one_mistake_and_not_one_for_each_trial(tmp_path: Path) -> None:
    file = tmp_path / "groups.json"
    swept = vary(CAUSAL_LM_TINY, sweep={"optim.lrr": [1, 2, 3]})
    file.write_text(json.dumps({"tuned": swept}))
    with pytest.raises(ConfigError) as error:
        experiments_of("tuned", file, None)
    assert str(error.value).startswith("-e tuned: the first trial of its sweep: 1 mistake(s)")
    assert "optim.lrr" in str(error.value)


def test_a_sweep_stands_alone_in_its_group_and_optuna_has_no_list(tmp_path: Path) -> None:
    file = tmp_path / "groups.json"
    swept = vary(CAUSAL_LM_TINY, sweep=LR)
    file.write_text(json.dumps({"two": [swept, CAUSAL_LM_TINY]}))
    with pytest.raises(ConfigError, match="Want the sweep alone in its group"):
        groups.read(file)
    chosen = vary(swept, search={"how": "optuna", "trials": 5})
    file.write_text(json.dumps({"tuned": chosen}))
    with pytest.raises(ConfigError, match=r"Start it by `lathe sweep -e tuned`"):
        experiments_of("tuned", file, None)


def test_a_search_costs_what_its_rungs_cost() -> None:
    swept = {"optim.lr": [1e-4, 3e-4, 1e-3], "train.seed": [1, 2, 3], "lora.r": [2, 4, 8]}
    sweep = made(swept, rungs=[4, 12, 36]).sweep
    sweep.parent["train"]["steps"] = 36
    begun = Begun(metric="valid/loss", steps=36)
    assert list(cost_lines("tuned", sweep, begun)) == [
        "tuned: 27 trials (grid), the lowest valid/loss is best",
        "     27 to step 4: 108 steps",
        "      9 to step 12: 72 steps",
        "      3 to step 36: 72 steps",
        "  252 steps in all; every trial to its end would be 972 (26%)",
    ]
