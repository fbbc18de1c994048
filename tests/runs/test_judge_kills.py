"""A run that is killed anywhere in its comparison goes on, and its files are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_on_ranks
from tests.runs.test_judge import data, train_run, values_of
from trainer.config.identity import exp_id

__all__ = ["data"]  # the fixture

pytestmark = pytest.mark.long

# Where a start dies: a function that is called in the comparison or behind it, and whether the
# process ends before it or after it.
PLACES = [
    ("end_of_run.run_judge", "after"),
    ("end_of_run.judge_record.record", "after"),
    ("end_of_run._promote", "after"),
    ("end_of_run._link", "after"),
    ("compare._pairs_of_answers", "before"),
]


def _train_dying(
    values: dict[str, Any], data: Path, savedir: Path, place: str, when: str
) -> int | None:
    from trainer.judging import compare, end_of_run

    class Killed(BaseException):
        pass

    owner: Any = {"compare": compare, "end_of_run": end_of_run}[place.partition(".")[0]]
    *between, name = place.split(".")[1:]
    for one in between:
        owner = getattr(owner, one)
    good = getattr(owner, name)

    def dying(*args: Any, **how: Any) -> Any:
        if when == "after":
            good(*args, **how)
        raise Killed

    setattr(owner, name, dying)
    try:
        return train_run(values, data, savedir)
    except Killed:
        return None
    finally:
        setattr(owner, name, good)


def _all(values: dict[str, Any], data: Path, savedir: Path, best: bool) -> list[str]:
    faults: list[str] = []
    for number, (place, when) in enumerate(PLACES):
        savedir_of_place = savedir / str(number)
        folder = savedir_of_place / exp_id(values)
        died = _train_dying(values, data, savedir_of_place, place, when)
        if died is not None and (best or place != "end_of_run._link"):
            faults.append(f"{place}: nothing died")
        if (
            json.loads((folder / "status.json").read_text())["state"] == "succeeded"
            and died is None
        ):
            faults.append(f"{place}: it has died and says that it succeeded")
        for start in range(2):
            if train_run(values, data, savedir_of_place) != 0:
                faults.append(f"{place}: start {start} fails")
        names = sorted(one.name for one in folder.iterdir())
        if not (folder / "final" / "lathe.json").is_file() or "candidate" in names:
            faults.append(f"{place}: {names}")
        if any(name.endswith(".tmp") for name in names):
            faults.append(f"{place}: left {names}")
        for name in ("judge.json", "gate.json"):
            json.loads((folder / name).read_text())
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        judged = [line for line in lines if "judge/worse_slices" in line]
        if len(judged) != 1:
            faults.append(f"{place}: {len(judged)} lines of the comparison")
    return faults


@pytest.mark.parametrize("best", [True, False])
def test_a_run_that_dies_anywhere_in_its_comparison_goes_on(
    best: bool, data: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {} if best else {"train": {"best": None}}
    values = values_of(data, {"gate": {"loss": {"gain": 0.0}}}, **changes)
    assert run_on_ranks(1, _all, values, data, tmp_path, best)[0] == []
