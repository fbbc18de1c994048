"""The results of a group, and the report made of them."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jobs.job_state import JobState
from jobs.record import events as record
from jobs.record.events import Sent
from jobs.record.paths import BaseFolder, RunFolder
from jobs.record.row import Row, Start
from jobs.report import curves
from jobs.report import scores as results
from jobs.report.curves import Point, thin
from jobs.report.html import MOST_CARDS, report
from jobs.report.page import SCRIPT
from jobs.report.scores import Results, gather
from jobs.report.test_scores import best_test
from jobs.report.text import number_text
from trainer.config.differences import short_names

IDS = [f"{number:032x}" for number in range(1, 6)]
HOSTILE = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "</pre></style><svg onload=alert(1)>",
    "javascript:alert(1)",
    "&amp;&#60;",
    "\x1b]0;title\x07\u202etxt.exe",
    "line\nbreak\0",
    "\ud800",
    "日本語 émoji 🎉",
]


def experiment(base: BaseFolder, exp_id: str, values: dict[str, Any]) -> RunFolder:
    folder = base.run(exp_id)
    folder.path.mkdir(parents=True)
    folder.exp_dict.write_text(json.dumps(values))
    return folder


def scored(folder: RunFolder, scores: Sequence[dict[str, float]]) -> None:
    (folder.path / "score_list.json").write_text(json.dumps(scores))


def logged(folder: RunFolder, lines: Sequence[dict[str, float]]) -> None:
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def base(tmp_path: Path) -> BaseFolder:
    return BaseFolder(tmp_path / "results")


def cells(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


# ---------------------------------------------------------------- hyper-parameters


def test_only_the_hyper_parameters_that_differ_become_columns(base: BaseFolder) -> None:
    experiment(
        base, IDS[0], {"task": "t", "optim": {"lr": 1e-4, "eps": 1e-8}, "data": {"files": [1, 2]}}
    )
    experiment(
        base, IDS[1], {"task": "t", "optim": {"lr": 3e-4, "eps": 1e-8}, "data": {"files": [1, 2]}}
    )
    assert gather(base).parameters == ("optim.lr",)


def test_a_key_that_only_some_have_is_a_difference(base: BaseFolder) -> None:
    experiment(base, IDS[0], {"base": "t5", "schedule": {}})
    experiment(base, IDS[1], {"base": {"config": {"d": 8}}, "schedule": {"shape": "linear"}})
    found = gather(base)
    assert found.parameters == ("base", "schedule", "base.config.d", "schedule.shape")
    assert cells(results.as_csv(found))[1]["base"] == ""


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (1, "1"), (1, 1.0), (None, "null"), ([], {}), (0, False)]
)
def test_values_of_other_types_are_other_values(one: Any, other: Any) -> None:
    assert results.differing([{"key": one}, {"key": other}]) == ("key",)


def test_short_names_are_as_long_as_they_must_be() -> None:
    keys = ("optim.lr", "train.steps", "head.optim.wd", "body.optim.wd", "seed")
    assert short_names(keys) == ["lr", "steps", "head.optim.wd", "body.optim.wd", "seed"]
    assert short_names(("lr", "optim.lr", "a.optim.lr")) == ["lr", "optim.lr", "a.optim.lr"]


# ---------------------------------------------------------------- many experiments


def listed(base: BaseFolder, exp_id: str, group: str, seed: int) -> RunFolder:
    """An experiment of a group that was sent."""
    folder = experiment(base, exp_id, {"task": "t", "train": {"seed": seed}})
    record.create(folder, exp_id=exp_id, digest="d", group=group)
    return folder


def test_results_are_of_the_experiments_that_status_lists(base: BaseFolder) -> None:
    listed(base, IDS[1], "b", 1)
    listed(base, IDS[0], "a", 2)
    by_hand = experiment(base, IDS[2], {"task": "t"})
    by_hand.status.write_text('{"state": "succeeded"}')
    experiment(base, IDS[3], {"task": "t"})  # it has not begun, and nobody has sent it
    (listed(base, IDS[4], "b", 3).exp_dict).write_text("torn")

    def ids(group: str | None, members: Sequence[str] = ()) -> list[str]:
        found = results.gather_listed(base, group, lambda: members)
        return [] if found is None else [one.exp_id for one in found.results]

    assert ids(None) == [IDS[2], IDS[0], IDS[1]]
    assert ids("b") == [IDS[1]]
    assert ids("b", [IDS[2]]) == [IDS[2], IDS[1]]
    assert ids("c") == []
    found = results.gather_listed(base, "b", list)
    assert found is not None
    assert list(found.unreadable) == [IDS[4]]
    assert results.gather_listed(base, "c", list) is None
    assert results.gather_listed(base, "a", list) == replace(gather(base, [IDS[0]]), unreadable={})


def test_each_file_of_a_run_is_read_once_for_the_results(
    base: BaseFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, exp_id in enumerate(IDS):
        logged(listed(base, exp_id, "a", number), [{"step": 1, "loss": 2.0}])
        scored(base.run(exp_id), [{"step": 1, "valid/loss": 1.0}])
    opened: list[str] = []
    open_file = os.open

    def counted(path: Any, *more: Any, **other: Any) -> int:
        opened.append(str(path))
        return open_file(path, *more, **other)

    monkeypatch.setattr(os, "open", counted)
    assert results.gather_listed(base, None, list) is not None
    of_runs = [path for path in opened if path.startswith(str(base.path))]
    assert len(of_runs) == len(set(of_runs)) > 3 * len(IDS)


def test_a_table_of_many_shows_the_best_in_their_order(base: BaseFolder) -> None:
    for number, exp_id in enumerate(IDS):
        folder = experiment(base, exp_id, {"task": "t", "seed": number})
        scored(folder, [{"step": 1, "valid/loss": abs(number - 3.0), "valid/kl": 1.0}])
    found = gather(base)
    shown = results.best_of(found, 2)
    assert [one.exp_id for one in shown.results] == [IDS[2], IDS[3]]
    assert shown.metrics == found.metrics
    assert results.best_of(found) == found
    nobody_knows = replace(found, metrics=("valid/kl",))
    assert [one.exp_id for one in results.best_of(nobody_knows, 2).results] == IDS[:2]


# ---------------------------------------------------------------- scores


def test_best_and_last_of_every_validation_metric(base: BaseFolder) -> None:
    folder = experiment(base, IDS[0], {"task": "t"})
    scored(
        folder,
        [
            {"step": 1, "valid/loss": 3.0, "valid/f1": 0.1},
            {"step": 2, "valid/loss": 1.0, "valid/f1": 0.3},
            {"step": 3, "valid/loss": 2.0, "valid/f1": 0.2, "train/x": 1.0},
        ],
    )
    (result,) = gather(base).results
    assert result.scores["valid/loss"] == results.Score(1.0, 2, 2.0, 3, True)
    assert result.scores["valid/f1"] == results.Score(0.3, 2, 0.2, 3, False)
    assert set(result.scores) == {"valid/loss", "valid/f1"}


def test_a_metric_of_which_nobody_knows_what_is_better_has_no_best(base: BaseFolder) -> None:
    for exp_id, value in zip(IDS, (1.0, 3.0), strict=False):
        folder = experiment(base, exp_id, {"task": "t"})
        scored(folder, [{"step": 1, "valid/kl": 9.0}, {"step": 2, "valid/kl": value}])
    found = gather(base)
    assert found.results[0].scores["valid/kl"] == results.Score(1.0, 2, 1.0, 2, None)
    assert results.best_value(found, "valid/kl") is None
    experiment(base, IDS[2], {"task": "t", "train": {"best": "valid/kl", "best_is": "min"}})
    scored(base.run(IDS[2]), [{"step": 1, "valid/kl": 0.5}, {"step": 2, "valid/kl": 2.0}])
    assert gather(base).results[2].scores["valid/kl"].best == 0.5
    assert results.best_value(gather(base), "valid/kl") is None  # of the others it is not known


def test_the_experiment_itself_says_which_way_its_metric_is_best(base: BaseFolder) -> None:
    folder = experiment(base, IDS[0], {"train": {"best": "valid/entropy", "best_is": "min"}})
    scored(folder, [{"step": 1, "valid/entropy": 1.0}, {"step": 2, "valid/entropy": 5.0}])
    assert gather(base).results[0].scores["valid/entropy"].best == 1.0


@pytest.mark.parametrize("content", [None, "", "{}", "[", "[]"])
def test_without_a_score_list_the_evaluations_are_those_of_the_metrics(
    base: BaseFolder, content: str | None
) -> None:
    folder = experiment(base, IDS[0], {"task": "t"})
    logged(
        folder, [{"step": 1, "loss": 9.0}, {"step": 1, "valid/loss": 4.0}, {"step": 2, "loss": 8.0}]
    )
    if content is not None:
        (folder.path / "score_list.json").write_text(content)
    found = gather(base)
    assert found.results[0].scores["valid/loss"].best == 4.0
    assert found.results[0].steps == 2


def test_experiments_without_or_with_other_metrics_stand_in_one_table(base: BaseFolder) -> None:
    scored(experiment(base, IDS[0], {"seed": 1}), [{"step": 1, "valid/loss": 1.0}])
    scored(experiment(base, IDS[1], {"seed": 2}), [{"step": 1, "valid/em": 0.5}])
    experiment(base, IDS[2], {"seed": 3})
    found = gather(base)
    assert found.metrics == ("valid/loss", "valid/em")
    console = Console(file=io.StringIO(), width=100)
    console.print(results.as_table(found))
    rows = cells(results.as_csv(found))
    assert [row["valid/loss best"] for row in rows] == ["1.0", "", ""]
    assert [sorted(each["metrics"]) for each in results.as_json(found)] == [
        ["valid/loss"],
        ["valid/em"],
        [],
    ]


def test_a_narrow_terminal_gets_fewer_parameters_and_is_told_so(base: BaseFolder) -> None:
    for number, exp_id in enumerate(IDS[:2]):
        values = {f"parameter_{letter}": f"{letter}{number}" * 5 for letter in "abcdefgh"}
        scored(experiment(base, exp_id, values), [{"step": 1, "valid/loss": 1.0 + number}])
    found = gather(base)
    for width, num_shown in ((60, 2), (80, 3), (200, 8)):
        console = Console(file=io.StringIO(), width=width)
        console.print(results.as_table(found, width=width))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert text.count("parameter_") == num_shown
        assert (f"{8 - num_shown} more parameters differ" in text) == (num_shown < 8)
        assert "1.000" in text or "1 " in text
        assert max(map(len, text.splitlines())) <= width


def test_the_order_asked_for_is_kept_and_unknown_ids_are_left_out(base: BaseFolder) -> None:
    for exp_id in IDS[:3]:
        experiment(base, exp_id, {"task": "t"})
    found = gather(base, [IDS[2], "f" * 32, IDS[0], IDS[2]])
    assert [result.exp_id for result in found.results] == [IDS[2], IDS[0]]


def test_wall_time_is_that_of_all_starts(base: BaseFolder) -> None:
    folder = experiment(base, IDS[0], {"task": "t"})
    record.create(folder, exp_id=IDS[0], digest="d", group="g")
    record.append(folder, record.intent(1, "token", name="token", index=None, backend="local"))
    attempt = folder.attempt(1)
    attempt.folder.mkdir(parents=True)
    attempt.start_file(1).write_text('{"at": "2026-01-01T00:00:00+00:00"}')
    attempt.start_file(2).write_text('{"at": "2026-01-01T02:00:00+00:00"}')
    (attempt.folder / "exit-1.json").write_text('{"at": "2026-01-01T01:00:00+00:00", "code": 75}')
    attempt.exit.write_text('{"at": "2026-01-01T02:30:00+00:00", "code": 0, "start": 2}')
    (result,) = gather(base).results
    assert (result.group, result.wall_s) == ("g", 5400.0)


def test_seconds_of_a_step_and_tflops_are_those_of_the_last_line(base: BaseFolder) -> None:
    speeds = {"step_s": 0.5, "tflops": 402.25}
    first = {"step": 10, "loss": 2.0, "step_s": 9.0}
    logged(experiment(base, IDS[0], {"seed": 1}), [first, {"step": 20, "loss": 1.0, **speeds}])
    logged(experiment(base, IDS[1], {"seed": 2}), [{"step": 20, "loss": 1.0}])
    found = gather(base)
    assert [(each.step_s, each.tflops) for each in found.results] == [(0.5, 402.25), (None, None)]
    one, other = cells(results.as_csv(found))
    assert (one["step_s"], one["tflops"], other["tflops"]) == ("0.5", "402.25", "")
    assert [each["tflops"] for each in results.as_json(found)] == [402.25, None]
    console = Console(file=io.StringIO(), width=120)
    console.print(results.as_table(found))
    assert "TFLOP/s" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", " =1", "＝1"])
def test_no_cell_of_the_csv_is_a_formula(base: BaseFolder, text: str) -> None:
    experiment(base, IDS[0], {text.strip() or "k": "x", "value": text})
    experiment(base, IDS[1], {"value": -0.5})
    lines = list(csv.reader(io.StringIO(results.as_csv(gather(base)))))
    assert "'" + text in lines[1]
    assert not any(
        cell.strip(" ").startswith(("=", "@", "+", "\t", "\r", "＝"))
        for line in lines
        for cell in line
    )
    assert "-0.5" in lines[2]  # a number stays one


def test_an_experiment_is_one_line_of_the_csv_whatever_its_texts(base: BaseFolder) -> None:
    experiment(base, IDS[0], {"name": 'a\r=1\n=2\u2028\ud800,"'})
    experiment(base, IDS[1], {"name": "b"})
    text = results.as_csv(gather(base))
    assert len(text.splitlines()) == 3
    assert cells(text)[0]["name"] == 'a␍=1␊=2\\u2028\\ud800,"'
    text.encode()


@given(value=st.floats(min_value=-1e99, max_value=1e99))
def test_a_number_in_four_digits_is_near_the_number(value: float) -> None:
    assert float(number_text(value)) == pytest.approx(value, rel=0.051)


# ---------------------------------------------------------------- curves


def test_thinning_loses_no_spike() -> None:
    points = [Point(step, 0.0, 100.0 if step == 7777 else 1.0) for step in range(10_000)]
    buckets = thin(points, 400)
    assert len(buckets) == 400
    assert max(bucket.high for bucket in buckets) == 100.0
    assert min(bucket.low for bucket in buckets) == 1.0


def test_of_a_long_file_every_evaluation_is_read_and_some_training_lines(
    base: BaseFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "SIZE_READ_WHOLE", 100)
    folder = experiment(base, IDS[0], {"seed": 1})
    lines = [{"step": step, "loss": 1.0} for step in range(50)]
    lines += [{"step": step, "valid/loss": 2.0} for step in range(50)]
    logged(folder, lines)
    points = curves.read_curves(folder.metrics).points
    assert 0 < len(points["loss"]) < 25
    assert len(points["valid/loss"]) == 50


# ---------------------------------------------------------------- the report


class Page(HTMLParser):
    """What a browser would see: tags, attributes that load or run something, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def row(base: BaseFolder, exp_id: str, state: JobState = "succeeded", **facts: Any) -> Row:
    return Row(exp_id, facts.pop("group", "g"), state, str(base.run(exp_id).path), **facts)


def test_the_report_asks_for_nothing_from_outside(base: BaseFolder) -> None:
    logged(
        experiment(base, IDS[0], {"seed": 1}),
        [{"step": step, "loss": 1 / (step + 1)} for step in range(20)],
    )
    html = report(base, [row(base, IDS[0])], gather(base))
    page = Page(html)
    assert not {name for name, _ in page.attributes} & {
        "src",
        "srcset",
        "action",
        "data",
        "xlink:href",
    }
    assert all((value or "").startswith("#") for name, value in page.attributes if name == "href")
    assert not {"link", "iframe", "img", "object", "embed", "base"} & set(page.tags)
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_markup(base: BaseFolder, text: str) -> None:
    folder = experiment(base, IDS[0], {"name": text, text.replace(".", ""): 1})
    experiment(base, IDS[1], {"name": "x"})
    logged(folder, [{"step": 1, "loss": 1.0, f"valid/{text}": 2.0}])
    attempt = folder.attempt(1)
    attempt.folder.mkdir(parents=True)
    attempt.err.write_text(text, errors="replace")
    sent = Sent(
        1, "t", "n", None, text, "2026-01-01T00:00:00+00:00", id=text, state="failed", host=text
    )
    start = Start(1, 1, "2026-01-01T00:00:00+00:00", "2026-01-01T01:00:00+00:00", text, 1, 1)
    facts = {
        "group": text,
        "name": text,
        "reason": text,
        "host": text,
        "attempt": 1,
        "history": (sent,),
        "starts": (start,),
    }
    html = report(
        base,
        [row(base, IDS[0], "failed", unseen_since=text, unseen_reason=text, **facts)],
        gather(base),
    )
    plain = report(
        base, [row(base, IDS[0], "failed", **{**facts, "group": "g"})], Results((), (), ())
    )
    assert Page(html).tags.count("script") == Page(plain).tags.count("script") == 1
    assert not {"img"} & set(Page(html).tags)
    assert not [name for name, _ in Page(html).attributes if name.startswith("on")]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", html)
    html.encode()


def test_the_report_says_what_people_call_an_experiment(base: BaseFolder) -> None:
    for number, exp_id in enumerate(IDS[:2], start=1):
        experiment(base, exp_id, {"seed": number})
    rows = [row(base, IDS[0], name="sweep 1/2 seed=1"), row(base, IDS[1], group="of old")]
    page = Page(report(base, rows, gather(base)))
    assert "sweep 1/2 seed=1" in page.text
    assert ("title", "sweep 1/2 seed=1") in page.attributes
    assert "of old" in page.text


def test_a_failed_experiment_shows_why_and_the_end_of_its_log(base: BaseFolder) -> None:
    folder = experiment(base, IDS[0], {"seed": 1})
    attempt = folder.attempt(2)
    attempt.folder.mkdir(parents=True)
    attempt.err.write_text(
        "".join(f"line {number}\n" for number in range(1000)) + "\x1b[31mValueError: bad\x1b[0m\n"
    )
    page = Page(
        report(base, [row(base, IDS[0], "failed", reason="exit code 1", attempt=2)], gather(base))
    )
    assert "exit code 1" in page.text
    assert "line 999\nValueError: bad" in page.text
    assert "line 900\n" not in page.text


def test_a_key_that_a_failed_training_printed_is_not_in_the_page(base: BaseFolder) -> None:
    attempt = experiment(base, IDS[0], {"seed": 1}).attempt(1)
    attempt.folder.mkdir(parents=True, exist_ok=True)
    attempt.err.write_text("wandb.login(key='" + "0a1b2c3d4e" * 4 + "')\nValueError: no\n")
    page = report(base, [row(base, IDS[0], "failed", attempt=1)], gather(base))
    assert "ValueError: no" in page
    assert "0a1b2c3d4e" not in page


def test_experiments_past_the_limit_are_in_the_table_and_said_to_be_left_out(
    base: BaseFolder,
) -> None:
    rows = [row(base, f"{number:032x}") for number in range(MOST_CARDS + 50)]
    html = report(base, rows, Results((), (), ()))
    page = Page(html)
    assert page.tags.count("article") == MOST_CARDS
    assert page.tags.count("tr") == MOST_CARDS + 51
    assert "the other 50 are in the table" in page.text


def test_the_report_of_long_runs_stays_small(base: BaseFolder) -> None:
    logged(
        experiment(base, IDS[0], {"seed": 1}),
        [
            {"step": step, "loss": 5 - step / 5000, "valid/loss": 5 - step / 6000}
            for step in range(20_000)
        ],
    )
    assert len(report(base, [row(base, IDS[0])], gather(base))) < 60_000


def test_what_has_not_begun_says_so(base: BaseFolder) -> None:
    experiment(base, IDS[0], {"seed": 1})
    assert "has not begun" in report(base, [row(base, IDS[0], "queued")], gather(base))


def test_the_script_builds_no_markup_from_text() -> None:
    assert not {"innerHTML", "eval(", "document.write", "insertAdjacentHTML"} & set(
        re.findall(r"\w+\(?", SCRIPT)
    )
    assert not re.search(r"^(import|export) ", SCRIPT, flags=re.MULTILINE)


# ---------------------------------------------------------------- the test split


def write_test(folder: RunFolder, scores: dict[str, Any], **more: Any) -> None:
    document = {"model": "best", "rows": 300, "seconds": 12.5, "scores": scores, **more}
    (folder.path / "test.json").write_text(json.dumps(document))


def test_the_test_split_stands_beside_the_evaluations_with_its_intervals(base: BaseFolder) -> None:
    for exp_id, em, low, high in ((IDS[0], 0.5, 0.44, 0.56), (IDS[1], 0.625, 0.57, 0.68)):
        folder = experiment(base, exp_id, {"seed": exp_id[-1]})
        scored(folder, [{"step": 1, "valid/em": em, "valid_hard/em": em / 2}])
        of_em = {"value": em, "low": low, "high": high}
        write_test(folder, {"em": of_em, "auroc/all": {"value": em, "low": None, "high": None}})
    scored(experiment(base, IDS[2], {"seed": "3"}), [{"step": 1, "valid/em": 0.1}])
    found = gather(base)
    assert found.metrics == ("valid/em", "valid_hard/em")
    assert found.test_metrics == ("test/auroc/all", "test/em")
    console = Console(file=io.StringIO(), width=160, color_system=None)
    console.print(results.as_table(found, width=160))
    table = results.as_test_table(found)
    assert table is not None
    console.print(table)
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    lines = [line.split() for line in text.splitlines()]
    of_run = ["300", "12.5", "best"]
    assert ["em", IDS[0][:8], IDS[0][-1], "0.5000", "0.4400", "0.5600", *of_run] in lines
    assert [IDS[1][:8], IDS[1][-1], "0.6250", "0.5700", "0.6800", *of_run] in lines
    assert [IDS[1][:8], IDS[1][-1], "0.6250", "–", "–", *of_run] in lines
    rows = cells(results.as_csv(found))
    assert [row["test/em"] for row in rows] == ["0.5", "0.625", ""]
    assert [row["test/em low"] for row in rows] == ["0.44", "0.57", ""]
    assert [row["test/auroc/all high"] for row in rows] == ["", "", ""]
    documents = results.as_json(found)
    assert documents[0]["test"]["scores"]["test/em"]["high"] == 0.56
    assert documents[2]["test"] is None
    tests = [result.test for result in found.results]
    assert best_test(tests, "test/em") == 0.625
    assert best_test(tests[:1], "test/em") is None


def test_scores_of_named_sets_give_way_where_a_terminal_is_narrow(base: BaseFolder) -> None:
    names = [f"valid{of_set}/{name}" for of_set in ("", "_hard") for name in ("em", "f1", "recall")]
    scored(experiment(base, IDS[0], {"seed": 1}), [{"step": 1, **dict.fromkeys(names, 0.125)}])
    found = gather(base)
    wide, narrow = results.as_table(found, width=150), results.as_table(found, width=50)
    assert len(wide.columns) - len(narrow.columns) == 3
    assert narrow.caption == "3 more scores of named sets: --csv, --json or --html shows all"
    assert wide.caption is None


@pytest.mark.parametrize(
    "content", ["", "[]", "3", '{"scores": 3}', '{"scores": {"em": 3}}', '{"scores": {"em": {}}}']
)
def test_a_test_that_no_run_has_written_so_is_left_out(base: BaseFolder, content: str) -> None:
    folder = experiment(base, IDS[0], {"seed": 1})
    (folder.path / "test.json").write_text(content)
    found = gather(base)
    assert found.test_metrics == ()
    assert not found.unreadable
    table = results.as_test_table(found)
    assert table is None or not table.row_count


def test_a_stated_direction_holds_on_the_test_split_too(base: BaseFolder) -> None:
    for exp_id, value in zip(IDS, (1.0, 3.0), strict=False):
        train = {"best": ["valid/em", "valid/mine/x"], "best_is": {"valid/mine/x": "min"}}
        folder = experiment(base, exp_id, {"seed": exp_id, "train": train})
        write_test(folder, {"mine/x": {"value": value, "low": None, "high": None}})
    tests = [result.test for result in gather(base).results]
    assert best_test(tests, "test/mine/x") == 1.0
