"""Where a run's time went, over its attempts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from trainer.telemetry import goodput
from trainer.telemetry.goodput import Goodput
from trainer.telemetry.meter import Meter


class Clock:
    """Both clocks, which stand still until they are moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.now + 5e8)


def attempt(clock: Clock, folder: Path, *, behind: int, steps: int, step: int) -> dict[str, float]:
    """An attempt that starts up for 10 s, and makes so many steps of 2 s, a pause of 3 s besides;
    `step` is the last one that status.json knows of. The seconds by kind.
    """
    ledger = Goodput.of(folder)
    clock.now += 10
    ledger.resume(behind)
    ledger.begin_steps()
    clock.now += 2 * steps
    with Meter(ledger).pause("saving"):
        clock.now += 3
    found = ledger.now()
    (folder / "status.json").write_text(json.dumps({"step": step, goodput.KEY: found}))
    return {"share": found["share"], **found["seconds"]}


def test_the_time_of_all_attempts_is_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    first = attempt(clock, tmp_path, behind=0, steps=20, step=20)
    assert first == {
        "share": round(40 / 53, 4),
        **{"steps": 40, "lost": 0, "startup": 10, "evaluation": 0, "saving": 3, "waiting": 0},
    }
    clock.now += 100  # in a queue
    second = attempt(clock, tmp_path, behind=15, steps=5, step=20)
    assert second == {
        "share": round(40 / 176, 4),
        **{
            "steps": 40,
            "lost": 10,
            "startup": 20,
            "evaluation": 0,
            "saving": 6,
            "waiting": 100,
        },
    }


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"goodput": 3}', '{"goodput": {"seconds": 1}}'])
def test_a_status_without_it_begins_anew(text: str, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(text)
    found = Goodput.of(tmp_path).now()
    assert found["seconds"]["lost"] == 0
    assert found["first_start"] == pytest.approx(time.time(), abs=5)
