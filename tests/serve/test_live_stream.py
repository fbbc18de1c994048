"""What the live page is told: lines that changed, once, to those who may see them; and curves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from jobs.record.status import survey
from jobs.record.times import now
from jobs.serve import offers
from jobs.serve.app import make_keeper
from jobs.serve.keeper import Keeper, Send
from jobs.serve.live.series import MOST_LINES, answers_of, curves_of, lines_since, place_of
from jobs.serve.live.stream import Watch
from trainer.config.identity import digest, exp_id


@pytest.fixture
def keeper(tmp_path: Path) -> Keeper:
    (tmp_path / "base").mkdir()
    return make_keeper(tmp_path / "base", offers.read(None), Send("local"), every_s=1)


def sent(base: Path, seed: int) -> Path:
    """A run of the group "sweep" that was sent once and cancelled before it began."""
    values = {"task": "causal_lm", "train": {"steps": 4, "seed": seed}}
    folder = base / exp_id(values)
    folder.mkdir()
    (folder / "exp_dict.json").write_text(json.dumps(values))
    made = {"event": "created", "exp_id": folder.name, "digest": digest(values), "group": "sweep"}
    (folder / "job.jsonl").write_text(json.dumps({**made, "nonce": "abcdef", "at": now()}) + "\n")
    return folder


def board(watch: Watch) -> dict[str, Any] | None:
    """What the page is told of runs and jobs, if anything."""
    texts = [text for text in watch.news() if text.startswith("event: board")]
    return json.loads(texts[0].partition("data: ")[2]) if texts else None


def test_a_line_is_told_when_it_changes_and_not_again(keeper: Keeper) -> None:
    base = keeper.folder.base
    first, watch = sent(base.path, 1), Watch(keeper, None, -1, {})
    keeper.turn()
    told = board(watch)
    assert told is not None
    assert [run["id"] for run in told["runs"]] == [first.name]
    keeper.turn()
    assert board(watch) is None
    second = sent(base.path, 2)
    keeper.turn()
    told = board(watch)
    assert told is not None
    # a sibling has come: now both have what tells them apart
    names = {run["id"]: run["name"] for run in told["runs"]}
    assert names == {first.name: "seed=1", second.name: "seed=2"}
    assert told["num_runs"] == 2
    rows = survey(base, backend_of=keeper.backend_of)
    kept = [json.loads(text) for _, text in keeper.index.runs(None)]
    assert {row["exp_id"]: row["name"] for row in kept} == {row.exp_id: row.name for row in rows}
    (second / "job.jsonl").unlink()
    for path in second.iterdir():
        path.unlink()
    second.rmdir()
    keeper.turn()
    told = board(watch)
    assert told is not None
    assert (told["runs"], told["num_runs"]) == ([], 1)
    assert board(Watch(keeper, "anna", -1, {})) == {**told, "num_runs": 0}


def line(step: int, **values: float) -> str:
    at = f"2026-11-23T07:{step // 60:02d}:{step % 60:02d}+00:00"
    return json.dumps({"step": step, **values, "at": at}) + "\n"


def test_curves_hold_every_spike_and_go_on_where_they_were_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert curves_of(path)["series"] == {}
    text = "".join(line(step, loss=90.0 if step == 777 else 1.0) for step in range(1, 1001))
    path.write_text(
        text
        + line(1000, **{"valid/loss": 2.5, "grad_norm/w": 1.0})
        + line(1000, **{"valid/loss": 2.5})
        + '{"torn'
    )
    found = curves_of(path)
    points = found["series"]["loss"]
    assert len(points) <= 400
    assert max(point[4] for point in points) == 90.0
    assert found["series"]["valid/loss"] == [[1000, 999.0, 2.5, 2.5, 2.5]]
    place = place_of(found["place"])
    assert lines_since(path, place) == ([], place)
    with path.open("a") as file:
        file.write('": 1}\n' + line(1001, loss=3.0))
    lines, later = lines_since(path, place)
    assert lines is not None
    assert [one.get("loss") for one in lines][-1] == 3.0
    assert lines_since(path, later)[0] == []
    with path.open("a") as file:
        file.write(line(1, loss=1.0) * (MOST_LINES + 1))
    assert lines_since(path, later)[0] is None
    other = tmp_path / "other"
    other.write_text(text * 2)
    os.replace(other, path)  # as a run that resumes does
    assert lines_since(path, later)[0] is None


def test_answers_are_those_of_the_last_step_unless_another_is_wanted(tmp_path: Path) -> None:
    assert answers_of(tmp_path, None) == {"steps": [], "step": None, "rows": []}
    (tmp_path / "answers").mkdir()
    for step in (9, 10):
        row = json.dumps({"prediction": "x" * 5000, "references": [step]}) + "\n"
        (tmp_path / "answers" / f"step-{step}.jsonl").write_text(row * 201)
    last = answers_of(tmp_path, None)
    assert (last["steps"], last["step"], len(last["rows"])) == ([9, 10], 10, 200)
    assert len(last["rows"][0]["prediction"]) == 4001
    assert answers_of(tmp_path, 9)["rows"][0]["references"] == "[9]"
    assert answers_of(tmp_path, 11)["rows"] == []
