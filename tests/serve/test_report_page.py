"""The report of `lathe-jobs results --html` in a headless browser: its charts and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.record.paths import BaseFolder
from jobs.record.row import Row
from jobs.report.html import report
from jobs.report.scores import gather
from tests.serve.browser import Browser

pytestmark = [pytest.mark.xdist_group("browser")]
HOSTILE = 'valid/</script><img src=x onerror="window.taken=1">\'&quot;\u202e'

# Each of these once made a chart wrong or endless, or is a case of its own.
VALUES = {
    "one": [3.0],
    "equal": [2.0, 2.0, 2.0],
    "equal but for rounding": [1.0, 1.0000000000000002],
    "quotient overflows": [1.0, 2.225073858507203e-309],
    "smallest floats": [5e-324, 1e-323],
    "largest": [-1e99, 1e99],
    "logarithmic": [400.0, 0.003, 1.0],
    "many": [100.0 if step == 777 else 1 + step / 1000 for step in range(2000)],
}


def run(base: BaseFolder, number: int, lines: list[dict[str, Any]]) -> Row:
    folder = base.run(f"{number:032x}")
    folder.path.mkdir(parents=True)
    folder.exp_dict.write_text(json.dumps({"seed": number}))
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Row(folder.path.name, "g", "succeeded", str(folder.path))


def open_report(browser: Browser, path: Path, base: BaseFolder, rows: list[Row]) -> None:
    path.write_text(report(base, rows, gather(base)))
    browser.complaints()  # of the tests before
    browser.open(path.as_uri())


def test_any_curve_is_drawn_within_its_chart(browser: Browser, tmp_path: Path) -> None:
    base = BaseFolder(tmp_path / "base")
    rows = [
        run(base, number, [{"step": start + at, "loss": v} for at, v in enumerate(values)])
        for start in (0, 10**9)
        for number, values in enumerate(VALUES.values(), start=start + 1)
    ]
    open_report(browser, tmp_path / "report.html", base, rows)
    assert len(browser.run("return [...document.querySelectorAll('svg.chart')]")) == len(rows)
    outside = """
        const places = [...document.querySelectorAll('svg.chart polyline, svg.chart polygon')].map(one => one.getAttribute('points'));
        return places.join(' ').split(' ').filter(place => {
          const [x, y] = place.split(',').map(Number);
          return !(x >= 0 && x <= 460 && y >= 0 && y <= 190);
        })"""
    assert browser.run(outside) == []
    labels = "return [...document.querySelectorAll('svg.chart')].map(one => one.querySelectorAll('text').length)"
    assert all(2 <= count < 20 for count in browser.run(labels))
    spike = "return document.querySelectorAll('svg.chart')[args[0]].querySelector('polygon.band').points.length"
    assert browser.run(spike, list(VALUES).index("many")) > 400
    assert browser.complaints() == []


def test_a_report_shows_losses_and_scores_and_reads_values_by_key(
    browser: Browser, tmp_path: Path
) -> None:
    base = BaseFolder(tmp_path / "base")
    lines: list[dict[str, Any]] = [{"step": step, "loss": 10.0 - step} for step in range(1, 5)]
    lines += [{"step": step, "valid/loss": 8.5 - step, "valid/f1": step / 4} for step in (2, 4)]
    lines += [{"step": 4, HOSTILE: 1.0}]
    rows = [run(base, 1, lines), run(base, 2, [{"step": 1, "valid/loss": 9.5}])]
    open_report(browser, tmp_path / "report.html", base, rows)
    assert browser.texts(".readout")[0].split() == ["loss", "6", "valid/loss", "4.500"]
    assert browser.run("return document.querySelectorAll('svg.spark polyline').length") == 2
    browser.run("document.querySelector('.plot').focus()")
    browser.keys("\ue012", "\ue012")  # left, twice
    assert "at step 3" in browser.texts(".readout")[0]
    column = "return [...document.querySelectorAll('th')].findIndex(one => one.innerText.startsWith('valid/loss'))"
    place = browser.run(column)
    assert place == 2, "scores stand before settings"
    states = []
    for _ in range(2):
        browser.run("document.querySelectorAll('th button')[args[0]].click()", place)
        states.append(browser.texts(f"tbody td:nth-child({place + 1})")[0])
    assert [text.split()[0] for text in states] == ["4.500", "9.500"]
    assert browser.run("return window.taken ?? document.querySelector('img')") is None
    assert browser.complaints() == []


def test_ticks_are_round_and_few(browser: Browser, tmp_path: Path) -> None:
    base = BaseFolder(tmp_path / "base")
    open_report(browser, tmp_path / "report.html", base, [])
    assert browser.run("return ticks(0.8, 9.3, 4)") == [2, 4, 6, 8]
    assert browser.run("return ticks(0, 2000, 5)") == [0, 500, 1000, 1500, 2000]
    steps = [{"step": step, "loss": value} for step, value in enumerate((0.003, 1.0, 400.0))]
    open_report(browser, tmp_path / "report.html", base, [run(base, 1, steps)])
    labels = "return [...document.querySelectorAll('text[text-anchor=end]')].map(one => one.textContent).slice(0, 3)"
    assert browser.run(labels) == ["0", "100", "200"]
    browser.press("logarithmic axes")
    assert browser.run(labels) == ["0.01", "1", "100"]
