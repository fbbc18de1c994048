"""What the report says of a search: the figure, the best trial, what mattered."""

from __future__ import annotations

import itertools
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.record.paths import BaseFolder
from jobs.report.matter import mattering
from jobs.report.parallel import searches
from jobs.search.record import SearchRecord, SearchState, Trial, asked

LRS, DECAYS, SEEDS = [1e-4, 3e-4, 1e-3], [0.0, 0.1, 0.2], [1, 2, 3]
STEPS = 36


def search_of(score: Any, *, count: int = 27) -> SearchState:
    """A search over three keys, whose score is a function of their values."""
    keys = ("optim.lr", "optim.weight_decay", "train.seed")
    search = SearchState("digest", keys, "valid/loss", True, STEPS)
    for number, point in enumerate(list(itertools.product(LRS, DECAYS, SEEDS))[:count]):
        trial = Trial(number, dict(zip(keys, point, strict=True)), f"{number:032x}")
        trial.scores[4] = score(*point)
        search.trials.append(trial)
    return search


def by_key(search: SearchState) -> dict[str, float | None]:
    return {one.key: one.share for one in mattering(search).shares}


def test_the_share_of_a_key_is_eta_squared_of_the_ranks_less_chance() -> None:
    search = search_of(lambda lr, decay, seed: math.log(lr) + 3 * decay + 0.3 * math.sin(7 * seed))
    shares = by_key(search)
    scores = np.array([trial.scores[4] for trial in search.trials])
    ranks = scores.argsort().argsort() + 1.0
    for key in search.keys:
        groups: dict[Any, list[float]] = {}
        for trial, rank in zip(search.trials, ranks, strict=True):
            groups.setdefault(trial.values[key], []).append(rank)
        within = sum(np.var(own) * len(own) for own in groups.values())
        expected = 1 - (within / (len(ranks) - len(groups))) / (np.var(ranks, ddof=1))
        assert shares[key] == pytest.approx(max(expected, 0.0), abs=1e-12)
    assert next(iter(shares)) == "optim.lr", "the strongest first"


def test_a_key_that_alone_orders_the_trials_has_nearly_all_and_another_nothing() -> None:
    shares = by_key(search_of(lambda lr, decay, seed: lr))
    assert shares["optim.lr"] == pytest.approx(1.0)
    assert shares["train.seed"] == 0.0
    assert by_key(search_of(lambda lr, decay, seed: 5.0)) == dict.fromkeys(shares, 0.0)


def test_many_numbers_are_taken_in_thirds() -> None:
    search = search_of(lambda lr, decay, seed: 0.0)
    for trial in search.trials:
        trial.values["optim.lr"] = 1e-5 * (trial.number + 1)
        trial.scores[4] = float(trial.number)
    (share,) = [one for one in mattering(search).shares if one.key == "optim.lr"]
    assert share.groups == 3
    assert share.share is not None
    assert share.share > 0.85


def test_too_few_trials_are_told_nothing_about() -> None:
    told = mattering(search_of(lambda lr, decay, seed: lr, count=8))
    assert told.shares == ()
    assert "8 trials have a score, and it takes 9 or more" in told.problem
    search = search_of(lambda lr, decay, seed: lr, count=12)
    for trial in search.trials:
        trial.values["train.seed"] = f"seed {trial.number % 6}"
    assert by_key(search)["train.seed"] is None, "six values want eighteen trials"


class Page(HTMLParser):
    """The links of a page with their labels, and the ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.labels: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "a" and "aria-label" in values:
            self.labels.append((str(values["href"]), str(values["aria-label"])))


def test_the_figure_is_a_list_of_links_the_best_first_that_a_screen_reader_can_read(
    tmp_path: Path,
) -> None:
    search = search_of(lambda lr, decay, seed: 100 * (1e-3 - lr) + decay + 1.25 * seed)
    record = SearchRecord.of(tmp_path, "tuned")
    record.append(
        {
            "event": "begun",
            "digest": "digest",
            "keys": list(search.keys),
            "metric": "valid/loss",
            "is_least_best": True,
            "steps": STEPS,
        },
        *asked(search.trials),
        *(
            {"event": "told", "trial": one.number, "rung": 4, "score": one.scores[4]}
            for one in search.trials
        ),
    )
    told = searches(BaseFolder(tmp_path), ["other", "tuned"])
    assert "the search has not ended yet" in told
    record.append({"event": "told", "trial": 18, "rung": 36, "score": 2.5})
    record.append({"event": "told", "trial": 19, "rung": 36, "score": None, "reason": "<b>"})
    record.append({"event": "ended", "trial": 18})
    page = searches(BaseFolder(tmp_path), ["tuned"])
    assert "<script" not in page
    assert 'role="group"' in page
    assert '<g aria-hidden="true">' in page
    labels = Page(page).labels
    assert len(labels) == 27
    assert labels[0] == (
        f"#x{18:032x}",
        "trial 19, the best: lr 0.001, weight_decay 0.0, seed 1; valid/loss 1.250 at step 4; "
        "valid/loss 2.500 at step 36",
    )
    assert labels[1][1].startswith("trial 10: "), "of those at step 4 the best"
    failed = [words for _, words in labels if words.endswith("; failed")]
    assert [words.partition(":")[0] for words in failed] == ["trial 20"]
    lines = re.findall(r'points="([^"]+)"', page)
    assert {len(line.split()) for line in lines} == {5}, "three keys, a score, the step"
    assert "<h3>What mattered</h3>" in page
    assert page.count("<tr>") == 27 + 1 + 3 + 1


def test_a_record_that_was_altered_hides_no_other_group(tmp_path: Path) -> None:
    record = SearchRecord.of(tmp_path, "tuned")
    record.append({"event": "begun"})
    assert "an event is malformed (KeyError" in searches(BaseFolder(tmp_path), ["tuned"])


def test_texts_of_a_sweep_are_escaped(tmp_path: Path) -> None:
    search = search_of(lambda lr, decay, seed: lr)
    for trial in search.trials:
        trial.values["train.seed"] = "<script>alert(1)</script>"
    record = SearchRecord.of(tmp_path, "<i>")
    begun = {"event": "begun", "digest": "", "keys": list(search.keys), "metric": "<u>"}
    record.append({**begun, "is_least_best": True, "steps": 36}, *asked(search.trials))
    record.append({"event": "told", "trial": 0, "rung": 4, "score": 1.0})
    page = searches(BaseFolder(tmp_path), ["<i>"])
    assert not re.search(r"<(script|u|i)>", page)
