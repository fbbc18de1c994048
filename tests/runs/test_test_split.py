"""Whole runs with --test, named validation sets, metrics of the user's own and a limit of time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.facts import experiment, facts, write_facts
from tests.ranks import run_on_ranks
from tests.wording import says
from trainer.config.identity import exp_id

MINE = """
def style(predictions, references, rows):
    assert [row["answers"] for row in rows] == references
    return {"rows": len(predictions), "letters": sum(map(len, predictions)) / len(rows)}
"""
FAILS_LATER = """
def style(predictions, references, rows):
    if len(rows) > 8:
        raise RuntimeError("too many")
    return {"length": 1}
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = write_facts(tmp_path / "data", train=24, valid=6)
    for name, start, stop in (("test", 30, 41), ("hard", 41, 45)):
        rows = "".join(json.dumps(row) + "\n" for row in facts(start, stop))
        (folder / f"{name}.jsonl").write_text(rows)
    return folder


def values_of(data: Path, task: str = "fid", **changes: Any) -> dict[str, Any]:
    train = {"steps": 2, "eval_every": 1, "answers": "all", **changes.pop("train", {})}
    own: Any = {"data": {"valid_sets": {"hard": "hard.jsonl"}}, **changes}
    return dict(experiment(task, data, train=train, **own))


def _train(values: dict[str, Any], data: Path, savedir: Path, is_tested: bool = False) -> int:
    from trainer.launch.group import run_group
    from trainer.runtime import distributed
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    options = Options(savedir, data_path=data, cache_dir=data / "cache", test=is_tested)
    planned = plan(values, options, world=distributed.world(), rank=distributed.rank())
    return run_group([planned], options)


def _killed_in_the_test(values: dict[str, Any], data: Path, savedir: Path) -> int:
    """A run that dies in its test, and is started again."""
    from trainer.evaluation import test_split

    good = test_split.evaluated
    test_split.evaluated = lambda *args, **how: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        _train(values, data, savedir, True)
    test_split.evaluated = good
    return _train(values, data, savedir, True)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_sets_own_metrics_and_the_test_split_are_the_same_on_two_ranks(
    data: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    values = values_of(
        data,
        metrics=f"{tmp_path}/mine.py:style",
        train={
            "best": ["valid_hard/em", "valid/style/letters", "valid/loss"],
            "best_is": {"valid/style/letters": "max"},
        },
    )
    folders = {world: tmp_path / str(world) / exp_id(values) for world in (1, 2)}
    for world, folder in folders.items():
        codes = run_on_ranks(world, _train, values, data, folder.parent, True)
        assert set(codes) == {0}
    one, two = (lines_of(folder) for folder in folders.values())
    evaluations = [line for line in one if "valid/loss" in line]
    assert [line["valid/style/rows"] for line in evaluations] == [6, 6]
    assert [line["valid_hard/style/rows"] for line in evaluations] == [4, 4]
    assert all({"valid_hard/loss", "valid_hard/em"} <= set(line) for line in evaluations)
    for line, other in zip(one, two, strict=True):
        for key, value in line.items():
            if key.startswith(("valid", "test")) and key != "test/seconds":
                assert other[key] == pytest.approx(value, abs=1e-5), key
    found = json.loads((folders[1] / "test.json").read_text())
    assert (found["model"], found["rows"]) == ("best", 11)
    assert found["scores"]["style/rows"] == {"value": 11.0, "low": None, "high": None}
    f1 = found["scores"]["f1"]
    assert f1["low"] <= f1["value"] <= f1["high"]
    last = one[-1]
    assert (last["step"], last["test/rows"], last["test/f1_low"]) == (2, 11, f1["low"])
    record = json.loads((folders[1] / "final" / "lathe.json").read_text())
    assert record["metrics"].keys() == {"mine.py"}
    assert record["data"].keys() == {"train", "valid", "valid_hard"}


def test_scores_in_a_torn_line_are_not_taken_for_logged(tmp_path: Path) -> None:
    from trainer.telemetry.metrics_file import has_line

    path, line = tmp_path / "metrics.jsonl", '{"step": 4, "test/loss": 1.5, "test/rows": 9}'
    path.write_text(f"{line[:-1]}")  # a full disk has torn it
    assert not has_line(path, 4, "test/rows")
    path.write_text(f"{line}\n")
    assert has_line(path, 4, "test/rows")
    assert not has_line(path, 5, "test/rows")


def test_a_test_that_is_killed_or_asked_for_later_is_made_once(data: Path, tmp_path: Path) -> None:
    values = values_of(data, "causal_lm", train={"answers": None})
    values["data"] = {**values["data"], "valid_sets": {}}
    folder = tmp_path / "killed" / exp_id(values)
    assert run_on_ranks(1, _killed_in_the_test, values, data, folder.parent) == [0]
    later = tmp_path / "later" / exp_id(values)
    status = ""
    for is_tested in (False, True, True):
        assert run_on_ranks(1, _train, values, data, later.parent, is_tested) == [0]
        now = (later / "status.json").read_text()
        assert status in ("", now), "a finished run stays as it is"
        status = now
    tests = [[line for line in lines_of(one) if "test/loss" in line] for one in (folder, later)]
    assert [len(one) for one in tests] == [1, 1]
    for key in ("test/loss", "test/loss_low", "test/loss_high", "test/rows"):
        assert tests[0][0][key] == tests[1][0][key], key
    assert tests[0][0]["test/loss_low"] < tests[0][0]["test/loss"] < tests[0][0]["test/loss_high"]


def _refusals(every: list[dict[str, Any]], data: Path, savedir: Path, is_tested: bool) -> list[str]:
    """Why each of these is refused."""
    from trainer.errors import UserError

    found: list[str] = []
    for values in every:
        try:
            _train(values, data, savedir, is_tested)
        except UserError as error:
            found.append(str(error))
    return found


def test_bad_metrics_are_refused_before_a_folder_is_made(data: Path, tmp_path: Path) -> None:
    mine, runs = tmp_path / "mine.py", tmp_path / "runs"
    mine.write_text("def style(predictions, references, rows):\n    return {'length': 'long'}\n")
    spec = f"{mine}:style"
    every = [
        values_of(data, metrics=spec),
        values_of(data, metrics=spec, train={"answers": None}),
        values_of(data, "causal_lm", metrics=spec, train={"answers": None}),
    ]
    of_text, unanswered, silent = run_on_ranks(1, _refusals, every, data, runs, False)[0]
    says("own_metric_fails", of_text, spec=spec, what="returned 'length': 'long'")
    says("own_metric_unanswered", unanswered)
    says("own_metric_of_task", silent, task="causal_lm")
    assert not list(runs.glob("[!.]*"))


def test_a_test_split_that_is_not_there_is_refused_before_the_first_step(
    data: Path, tmp_path: Path
) -> None:
    (data / "test.jsonl").unlink()
    values = values_of(data, train={"answers": None})
    [absent] = run_on_ranks(1, _refusals, [values], data, tmp_path, True)[0]
    assert "test" in absent
    assert not lines_of(tmp_path / exp_id(values))


def test_a_metric_that_fails_later_is_told_and_the_run_goes_on(data: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(FAILS_LATER)
    rows = "".join(json.dumps(row) + "\n" for row in facts(24, 36))
    (data / "valid.jsonl").write_text(rows)
    values = values_of(data, metrics=f"{mine}:style")
    assert run_on_ranks(1, _train, values, data, tmp_path) == [0]
    evaluations = [line for line in lines_of(tmp_path / exp_id(values)) if "valid/loss" in line]
    assert len(evaluations) == 2
    assert all("valid_hard/style/length" in line for line in evaluations)
    assert not any("valid/style/length" in line for line in evaluations)
