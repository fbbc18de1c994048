"""Faults of groups on one base: rows that change the others, and steps that are not the run's own."""

from __future__ import annotations

from tests.mutants.fault import Fault

STEPS = "tests/unit/test_shared_steps.py"
RUNS = "tests/runs/test_trained_together.py"
FAULTS = [
    Fault(
        "trainer/driven/together/step_packs.py",
        "if step >= self.end:",
        "if step > self.end:",
        why="rows of an experiment that has ended stand in packs, and a resumed group has others",
        tests=f"{STEPS} -k lengths_of_a_step",
    ),
    Fault(
        "trainer/driven/together/trained_adapters.py",
        "gradient * scale.to(gradient.dtype)",
        "gradient",
        why="the gradient is that of a sum, and not of the mean over all labels",
        tests=f"{STEPS} -k gradients_that_they_are_given",
    ),
    Fault(
        "trainer/driven/together/shared_steps.py",
        "summed(sums[name].gradients, own_gradients)",
        "summed(None, own_gradients)",
        why="an experiment learns from the last pack of its step alone",
        tests=f"{RUNS} -k two_experiments",
    ),
]
