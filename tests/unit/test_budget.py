"""train.hours: what is kept for the end of a run, over all its starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.telemetry.goodput import KEY, Goodput
from trainer.training.choice.budget import Budget

HOUR = 3600.0


def budget(hours: float, longest: dict[str, float], steps: list[float]) -> tuple[Budget, Any]:
    """A budget whose clock tells these seconds of steps, one after another."""
    clock = SimpleNamespace(longest=longest, now=0.0)
    clock.stepped_s = lambda: clock.now
    clock.used_s = lambda: clock.now
    made = Budget(hours, clock)

    def ask() -> list[bool]:
        answers = []
        for clock.now in steps:
            answers.append(made.is_spent())
        return answers

    return made, ask


def test_time_is_left_for_an_evaluation_a_save_two_exports_and_two_steps() -> None:
    longest = {"evaluation": 100.0, "saving": 40.0, "export": 30.0}
    # of 3600 s, 250 s are kept for the ending, and twice the longest step
    _, ask = budget(1.0, longest, [0.0, 10.0, 3329.0, 3329.5])
    assert ask() == [False, False, True, True]
    _, ask = budget(1.0, longest, [10.0 * step for step in range(340)])
    assert ask().index(True) == 334, "3340 + 20 + 250 > 3600, and 3330 + 20 + 250 is not"


def test_what_was_never_measured_gets_a_twentieth_of_the_whole_time() -> None:
    made, _ = budget(1.0, {}, [])
    assert made.ending_s() == 4 * 0.05 * HOUR * 1.25
    made, _ = budget(1.0, {"evaluation": 8.0}, [])
    assert made.ending_s() == pytest.approx((8.0 + 3 * 0.05 * HOUR) * 1.25)


def test_time_and_costs_go_on_in_the_next_start(tmp_path: Path) -> None:
    first = Goodput(0.0)
    first.begin_steps()
    first.seconds |= {"startup": 5.0, "evaluation": 7.0, "saving": 2.0, "steps": 100.0, "lost": 3.0}
    first.took("evaluation", 4.0)
    first.took("evaluation", 3.0)
    first.took("export", 1.5)
    assert 117.0 <= first.used_s() < 118.0
    (tmp_path / "status.json").write_text(json.dumps({"step": 10, KEY: first.now()}))
    again = Goodput.of(tmp_path)
    again.resume(5)
    assert 117.0 <= again.used_s() < 118.5, "lost steps count as well"
    assert again.longest == {"evaluation": 4.0, "export": 1.5}


def test_status_of_an_earlier_version_knows_no_costs(tmp_path: Path) -> None:
    values = Goodput(0.0).now()
    del values["longest"]
    (tmp_path / "status.json").write_text(json.dumps({"step": 0, KEY: values}))
    assert Goodput.of(tmp_path).longest == {}
