"""Which runs are compared, under which gate, and what becomes of an earlier comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.facts import experiment
from tests.wording import refused
from trainer.config.identity import exp_id
from trainer.config.scores.judged import Bound
from trainer.files.atomic import write_json
from trainer.judging.compare import keep_earlier
from trainer.judging.sides import compared


def run_of(folder: Path, seed: int, judge: dict[str, Any] | None = None) -> dict[str, Any]:
    """The dictionary of a run whose folder has a final/."""
    values = dict(experiment("causal_lm", folder, train={"seed": seed}))
    if judge is not None:
        values["judge"] = judge
    run_folder = folder / exp_id(values)
    (run_folder / "final").mkdir(parents=True)
    write_json(run_folder / "exp_dict.json", values)
    return values


def test_a_run_is_no_seed_beside_itself_and_nothing_to_compare_itself_with(tmp_path: Path) -> None:
    one, other = run_of(tmp_path, 1), run_of(tmp_path, 2)
    first, second = exp_id(one), exp_id(other)
    assert compared(tmp_path, [one], {"against": second}).before.experiments == [other]
    with refused("judged_seed_twice", run=first):
        compared(tmp_path, [one, one], {})
    with refused("judged_seed_twice", run=second):
        compared(tmp_path, [one], {"against": f"{second},{second[:8]}"})
    with refused("judged_against_itself", run=first):
        compared(tmp_path, [other, one], {"against": first[:9]})


@pytest.mark.parametrize(
    ("stated", "holds"),
    [
        ({}, True),
        ({"against": "base", "split": "test"}, True),
        ({"split": "valid", "keep": None}, False),
        ({"against": "other"}, False),
    ],
)
def test_the_gate_of_a_dictionary_is_for_the_comparison_that_stands_there(
    tmp_path: Path, stated: dict[str, Any], holds: bool
) -> None:
    gate = {"keep/loss": {"gain": -0.1}}
    values, other = run_of(tmp_path, 1, {"gate": gate}), run_of(tmp_path, 2)
    if "against" in stated and stated["against"] != "base":
        stated = {**stated, "against": exp_id(other)}
    how = compared(tmp_path, [values], stated).how
    assert how.gate == ({"keep/loss": Bound(gain=-0.1)} if holds else {})
    assert compared(tmp_path, [values], {"against": exp_id(other), "gate": gate}).how.gate


def test_an_earlier_comparison_of_something_else_is_moved_aside(tmp_path: Path) -> None:
    facts = {"against": "a", "split": "test", "limit": None}
    names = ("judge.json", "judge.md", "judge_answers.jsonl")
    keep_earlier(tmp_path, facts)
    for name in names:
        (tmp_path / name).write_text(json.dumps({**facts, "rows": 3}))
    keep_earlier(tmp_path, facts)
    assert sorted(one.name for one in tmp_path.iterdir()) == [*names], "it is the same comparison"
    (tmp_path / "judge.md").rename(tmp_path / "votes.jsonl")  # as after a death in the middle
    keep_earlier(tmp_path, {**facts, "limit": 10})
    (earlier,) = (tmp_path / "judge_earlier").iterdir()
    assert sorted(one.name for one in earlier.iterdir()) == [names[0], names[2]]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["judge_earlier", "votes.jsonl"]
