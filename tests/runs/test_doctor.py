"""`python -m trainer doctor`: an engine that is sound, and one that is not."""

from __future__ import annotations

import functools
from typing import Any

from tests.forked import TRAINER, run_ranks


def _lose_a_micro_batch() -> None:
    """From now on the second backward of a step adds nothing."""
    from trainer.training.engine import Engine

    backward, step, calls = Engine.backward, Engine.step, []

    def losing(self: Any, loss: Any) -> None:
        calls.append(1)
        backward(self, loss * 0.0 if len(calls) == 2 else loss)

    def stepping(self: Any, *args: Any) -> None:
        calls.clear()
        step(self, *args)

    Engine.backward, Engine.step = losing, stepping


def test_the_engine_that_is_installed_is_sound() -> None:
    for done in run_ranks(2, *TRAINER, "doctor"):
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_micro_batch_that_is_lost_is_noticed_where_there_are_several() -> None:
    first = functools.partial(_lose_a_micro_batch)
    done = run_ranks(2, *TRAINER, "doctor", first=first)[0]
    assert done.returncode == 1
    (told,) = [line for line in done.stderr.splitlines() if "does not do what plain torch" in line]
    for case in ("accumulation", "GradCache", "uneven ranks"):
        assert f"{case}, weights " in told
    assert "plain, " not in told
    assert "clipping, " not in told
    for stage in range(4):
        assert f"ZeRO-{stage}" in told
