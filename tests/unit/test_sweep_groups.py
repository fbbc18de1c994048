"""Groups with `sweep`: what they stand for, what they cost, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exp_configs import CAUSAL_LM_TINY, experiments_of, vary
from jobs.commands.sweep import cost_lines
from jobs.search.record import SearchState as Begun
from tests.wording import Fault, fault, refused
from trainer.config import groups
from trainer.config.sweeps.sweep import SweepGroup, group_of

LR = {"optim.lr": [1e-4, 3e-4]}


def made(sweep: Any, **search: Any) -> SweepGroup:
    return group_of({**CAUSAL_LM_TINY, "sweep": sweep, "search": search})


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
    with refused("trials_too_many", count=3):
        made({"train.seed": [1, 2, 3]}, how="random", trials=4)


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


DRAWN = {"how": "random", "trials": 3}
MISTAKES = [
    ({}, {}, fault("sweep_kind", kind="an empty dict")),
    ([1], {}, fault("sweep_kind", kind="a list")),
    ({"optim.lr": []}, {}, fault("swept_empty", key="optim.lr")),
    ({"optim.lr": 1e-4}, {}, fault("axis_kind", key="optim.lr", kind="a float")),
    ({"optim.lr": [1e-4, 1e-4]}, {}, fault("axis_twice", value="0.0001")),
    ({"optim.lr": {"chioce": [1]}}, {}, fault("axis_form", nearest="choice")),
    ({"optim.lr": {"choice": [1], "uniform": [1, 2]}}, {}, fault("axis_form")),
    ({"optim.lr": {"log_uniform": [1e-3, 1e-5]}}, DRAWN, fault("axis_bounds")),
    ({"optim.lr": {"log_uniform": [0, 1]}}, DRAWN, fault("axis_not_positive", bounds="[0, 1]")),
    ({"lora.r": {"integer": [1, 2.5]}}, DRAWN, fault("axis_not_whole", bounds="[1, 2.5]")),
    ({"optim.lr": {"uniform": [0, 1]}}, {}, fault("grid_of_range", key="optim.lr")),
    ({"task.name": [1]}, {}, fault("sweep_no_block", path="task", value="'causal_lm'")),
    ({"optim..lr": [1]}, {}, fault("sweep_key", key="optim..lr")),
    (LR, {"trials": 4}, fault("trials_of_grid", count=4)),
    (LR, {"how": "random"}, fault("trials_missing")),
    (LR, {"hwo": "grid"}, fault("key_unknown", key="hwo")),
    (LR, {"rungs": [10, 5]}, fault("rungs_order", rungs="[10, 5]")),
    (LR, {"rungs": [10, 61]}, fault("rung_late", rung=61, steps=60)),
    ({"train.steps": [10, 20]}, {"rungs": [5]}, fault("rungs_of_lengths")),
]


@pytest.mark.parametrize(("sweep", "search", "mistake"), MISTAKES)
def test_a_mistake_is_named_with_what_is_wanted(sweep: Any, search: Any, mistake: Fault) -> None:
    with refused(mistake):
        made(sweep, **search)


def test_rungs_of_a_run_in_epochs_are_refused() -> None:
    values = {**CAUSAL_LM_TINY, "sweep": LR, "search": {"rungs": [5]}}
    values["train"] = {key: one for key, one in values["train"].items() if key != "steps"}
    values["train"]["epochs"] = 2
    with refused("rungs_of_epochs"):
        group_of(values)


def test_an_unknown_key_is_one_mistake_and_not_one_for_each_trial(tmp_path: Path) -> None:
    file = tmp_path / "groups.json"
    swept = vary(CAUSAL_LM_TINY, sweep={"optim.lrr": [1, 2, 3]})
    file.write_text(json.dumps({"tuned": swept}))
    with refused("key_unknown", key="optim.lrr") as error:
        experiments_of("tuned", file, None)
    assert str(error.value).count("lrr") == 1


def test_a_sweep_stands_alone_in_its_group_and_optuna_has_no_list(tmp_path: Path) -> None:
    file = tmp_path / "groups.json"
    swept = vary(CAUSAL_LM_TINY, sweep=LR)
    file.write_text(json.dumps({"two": [swept, CAUSAL_LM_TINY]}))
    with refused("sweep_not_alone"):
        groups.read(file)
    chosen = vary(swept, search={"how": "optuna", "trials": 5})
    file.write_text(json.dumps({"tuned": chosen}))
    with refused("optuna_chooses"):
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
