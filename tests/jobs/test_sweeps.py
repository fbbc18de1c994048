"""A search from rung to rung, with a stand-in for the training: what is submitted, and how often."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jobs.cli import app
from jobs.record.paths import BaseFolder
from jobs.search.record import SearchRecord, SearchState
from tests.wording import Fault, fault, says

GROUPS = """
from exp_configs import CAUSAL_LM_TINY, vary

KEYS = {"optim.lr": [1e-4, 3e-4, 1e-3], "train.seed": [1, 2, 3]}
RANGES = {"optim.lr": {"log_uniform": [1e-5, 1e-2]}, "train.seed": [1, 2]}
PARENT = vary(CAUSAL_LM_TINY, train={"steps": 36, "best": "valid/loss"})
EXP_GROUPS = {
    "tuned": vary(PARENT, sweep=KEYS, search={"rungs": [4, 12]}),
    "in_epochs": vary(CAUSAL_LM_TINY, train={"steps": None, "epochs": 2}, sweep=KEYS),
    "asked": vary(PARENT, sweep=RANGES, search={"how": "optuna", "trials": 7, "rungs": [4], "at_once": 3}),
}
"""

# A training in 30 ms: one line in `starts`, then a score that depends on the dictionary and the step.
STUB = """#!{python} -S
import json, math, os, sys
flags = dict(word[2:].split("=", 1) for word in sys.argv[2:] if word.startswith("--") and "=" in word)
base, exp_id = flags["savedir_base"], flags["exp_id"]
folder = os.path.join(base, exp_id)
values = json.load(open(os.path.join(folder, "exp_dict.json")))
until = flags.get("until")
with open(os.path.join(base, "starts"), "a") as file:
    file.write(exp_id + " " + (until or "-") + "\\n")
lr, seed = values["optim"]["lr"], values["train"].get("seed", 0)
if (lr, seed) == (1e-4, 3):
    sys.exit(1)
step = int(until or values["train"].get("steps") or 36)
loss = abs(math.log10(lr) + 3) + 0.01 * seed + 1 / step
path = os.path.join(folder, "score_list.json")
scores = json.load(open(path)) if os.path.exists(path) else []
scores.append({{"step": step, "valid/loss": loss}})
json.dump(scores, open(path, "w"))
state = "succeeded" if until is None else "paused"
json.dump({{"state": state, "step": step, "total": 36}}, open(os.path.join(folder, "status.json"), "w"))
sys.exit(0 if until is None else 10)
"""


class Killed(BaseException):
    """As kill -9 ends a process: nothing is written after it."""


class Place:
    """A savedir_base with groups and a stand-in for the training."""

    def __init__(self, root: Path) -> None:
        self.base, self.groups, self.python = root / "base", root / "groups.py", root / "python"
        self.groups.write_text(GROUPS)
        self.python.write_text(STUB.format(python=sys.executable))
        self.python.chmod(0o755)

    def sweep(self, group: str, *words: str, command: str = "sweep") -> Any:
        common = ["-e", group, "-sb", str(self.base), "--exp_configs", str(self.groups)]
        own = ["-j", "inline", "--python_binary", str(self.python)] if command == "sweep" else []
        done = CliRunner().invoke(app, [command, *common, *own, *words])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    def starts(self) -> Counter[str]:
        path = self.base / "starts"
        return Counter(path.read_text().splitlines() if path.exists() else [])

    def record(self, group: str) -> SearchState:
        search = SearchRecord.of(self.base, group).read()
        assert search is not None
        return search


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def told(search: SearchState) -> list[Any]:
    return [search.promoted, search.best, [(one.values, one.scores) for one in search.trials]]


def test_a_search_trains_the_best_further_and_each_rung_of_a_trial_once(place: Place) -> None:
    done = place.sweep("tuned")
    assert done.exit_code == 0, done.output
    search = place.record("tuned")
    by_rung = Counter(line.split()[1] for line in place.starts())
    assert by_rung == {"4": 9, "12": 3, "-": 1}
    assert set(place.starts().values()) == {1}
    # log10(1e-3) + 3 is 0: the three trials of that rate are best, the lowest seed first
    assert search.promoted == {4: [6, 7, 8], 12: [6]}
    assert search.best == 6
    assert search.trials[2].has_failed, "it ended with code 1"
    assert search.trials[6].scores == {
        4: 0.26,
        12: pytest.approx(0.01 + 1 / 12),
        36: pytest.approx(0.01 + 1 / 36),
    }
    assert f"the best: {place.base / search.trials[6].exp_id / 'final'}" in done.output
    again = place.sweep("tuned", "--json")
    assert json.loads(again.stdout)[0]["values"] == {"optim.lr": 1e-3, "train.seed": 1}
    assert set(place.starts().values()) == {1}, "a search that is done sends nothing"


def test_a_trial_that_diverges_before_a_rung_is_not_judged_by_an_earlier_score(
    place: Place,
) -> None:
    scored = '{"step": step, "valid/loss": loss}'
    diverged = '{"step": step} if (lr, seed, step) == (1e-3, 1, 12) else ' + scored
    place.python.write_text(place.python.read_text().replace(scored, diverged))
    assert place.sweep("tuned").exit_code == 0
    search = place.record("tuned")
    assert search.trials[6].scores == {4: 0.26, 12: None}
    assert search.promoted == {4: [6, 7, 8], 12: [7]}
    assert search.best == 7


def test_trials_in_epochs_are_trained_to_their_ends(place: Place) -> None:
    done = place.sweep("in_epochs")
    assert done.exit_code == 0, done.output
    assert "known when the rows of its epochs are counted" in done.output
    assert place.record("in_epochs").best == 6
    assert place.starts().total() == 9


@pytest.mark.long
def test_a_search_that_is_killed_everywhere_ends_as_an_undisturbed_one(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start of it is killed at its third line: before that is written, or after."""
    (tmp_path / "calm").mkdir()
    calm = Place(tmp_path / "calm")
    calm.sweep("tuned")
    append = SearchRecord.append
    kills = 0
    for attempt in range(60):
        count = 0

        def dying(self: SearchRecord, *events: Any, after: bool = attempt % 2 == 0) -> None:
            nonlocal count
            count += 1
            if count == 3 and not after:
                raise Killed
            append(self, *events)
            if count == 3:
                raise Killed

        monkeypatch.setattr(SearchRecord, "append", dying)
        try:
            place.sweep("tuned")
            break
        except Killed:
            kills += 1
    assert kills > 5
    assert told(place.record("tuned")) == told(calm.record("tuned"))
    assert place.starts() == calm.starts()


@pytest.mark.long
def test_a_torn_last_line_is_written_again(place: Place) -> None:
    place.sweep("tuned")
    record = SearchRecord.of(place.base, "tuned")
    before, content = place.record("tuned"), record.path.read_bytes()
    record.path.write_bytes(content[:-20])
    assert place.sweep("tuned").exit_code == 0
    assert told(place.record("tuned")) == told(before)


def test_another_sweep_under_the_same_name_is_refused_and_nothing_changes(place: Place) -> None:
    place.sweep("tuned")
    record = SearchRecord.of(place.base, "tuned")
    content, starts = record.path.read_bytes(), place.starts()
    place.groups.write_text(GROUPS.replace('"rungs": [4, 12]', '"rungs": [6, 12]'))
    done = place.sweep("tuned")
    assert done.exit_code == 2
    says("search_changed", done.output)
    assert (record.path.read_bytes(), place.starts()) == (content, starts)


@pytest.mark.long
def test_a_search_that_begins_anew_takes_the_trials_that_were_trained_further(place: Place) -> None:
    assert place.sweep("tuned").exit_code == 0
    starts, record = place.starts(), SearchRecord.of(place.base, "tuned")
    place.groups.write_text(GROUPS.replace("[4, 12]", "[2, 12]"))
    record.path.unlink()
    done = place.sweep("tuned")
    assert done.exit_code == 0, done.output
    search = place.record("tuned")
    assert (search.promoted, search.best) == ({2: [6, 7, 8], 12: [6]}, 6)
    assert place.starts() == starts, "nothing is trained twice"

    path = place.base / search.trials[6].exp_id / "score_list.json"
    scores = json.loads(path.read_text())
    del scores[-1]["valid/loss"]  # as of an evaluation whose loss is not finite
    path.write_text(json.dumps(scores))
    record.path.unlink()
    ended = place.sweep("tuned")
    assert ended.exit_code == 3, ended.output
    assert place.record("tuned").trials[6].scores[36] is None


def test_a_search_says_what_it_costs_before_it_starts_and_a_dry_run_sends_nothing(
    place: Place,
) -> None:
    done = place.sweep("tuned", "--dry_run")
    assert done.exit_code == 0
    assert "84 steps in all; every trial to its end would be 324 (26%)" in done.output
    assert not place.starts()
    assert not SearchRecord.of(place.base, "tuned").path.exists()


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        (["--steps", "10"], fault("rung_late", rung=12, steps=10)),
        (["--", "--until", "4"], fault("until_of_search")),
    ],
)
def test_what_a_search_refuses(place: Place, words: list[str], mistake: Fault) -> None:
    done = place.sweep("tuned", *words)
    assert done.exit_code == 2, done.output
    says(mistake, done.output)
    assert not place.starts()


@pytest.mark.long
def test_a_rung_is_paused_and_a_later_until_or_none_goes_on(place: Place) -> None:
    def submit(*words: str) -> str:
        common = ["-j", "inline", "--python_binary", str(place.python), "--only", exp_id]
        return place.sweep("tuned", *common, *words, command="submit").output

    place.sweep("tuned")
    worst = place.record("tuned").trials[0]
    exp_id = worst.exp_id
    (row,) = [
        one
        for one in json.loads(
            CliRunner().invoke(app, ["status", "-sb", str(place.base), "--json"]).stdout
        )
        if one["exp_id"] == exp_id
    ]
    assert (row["state"], row["step"], row["total"]) == ("paused", 4, 36)
    assert "a submission with a later --until, or with none, goes on" in row["reason"]
    assert "skip" in submit("--", "--until", "4")
    assert "send" in submit("--", "--until", "5")
    assert "send" in submit()
    assert "skip" in submit()
    says("until_late", submit("--", "--until", "37"), until=37, steps=36)


@pytest.mark.skipif(importlib.util.find_spec("optuna") is not None, reason="optuna is installed")
def test_optuna_is_named_where_it_is_missing(place: Place) -> None:
    done = place.sweep("asked")
    assert done.exit_code == 2
    assert "pip install -e '.[optuna]'" in done.output


@pytest.mark.long
def test_optuna_asks_the_same_after_a_kill(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")
    (tmp_path / "calm").mkdir()
    calm = Place(tmp_path / "calm")
    assert calm.sweep("asked").exit_code == 0
    search = calm.record("asked")
    assert len(search.trials) == 7
    assert Counter(line.split()[1] for line in calm.starts()) == {"4": 7, "-": 2}
    append = SearchRecord.append
    left = [3]

    def dying(self: SearchRecord, *events: Any) -> None:
        append(self, *events)
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    monkeypatch.setattr(SearchRecord, "append", dying)
    for _ in range(20):
        left[0] = 3
        try:
            place.sweep("asked")
            break
        except Killed:
            continue
    assert told(place.record("asked")) == told(search)
    assert place.starts() == calm.starts()


def test_the_record_of_a_group_of_any_name_has_a_folder_of_its_own(tmp_path: Path) -> None:
    names = ["a/b", "..", "a b", "é"]
    paths = {SearchRecord.of(tmp_path, name).path.parent for name in names}
    assert len(paths) == 4
    assert not BaseFolder(tmp_path).runs()
