"""What benchmarks/step_resume.py makes of the records of a loop that was killed and resumed."""

from __future__ import annotations

from benchmarks.step_resume import Line, Outcome

QUIET: list[Line] = [
    {"step": step, "rows": [step, step + 1], "loss": 1.0 / step} for step in range(1, 9)
]


def test_a_loop_that_goes_on_where_it_was_has_lost_nothing() -> None:
    outcome = Outcome.of(QUIET, QUIET[:5], QUIET[5:])
    assert outcome.cells() == ["0", "0", "none", "all equal"]


def test_steps_that_are_run_twice_left_out_or_other_ones_are_counted() -> None:
    after = [dict(line) for line in QUIET[3:6]]
    after[1]["rows"], after[2]["loss"] = [0, 0], QUIET[5]["loss"] + 0.25
    outcome = Outcome.of(QUIET, QUIET[:5], after)
    assert outcome.cells() == ["2", "2", "1 of 3", "1 of 3 differ, by up to 0.25"]
