"""Votes on the live page in a headless browser: blind, by mouse and by keyboard, under axe-core."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.browser import NARROW, WIDE, Browser
from tests.serve.conftest import Service, serving
from tests.serve.page_world import HOSTILE, by_hand, opened
from tests.serve.test_page_at_length import axe, violations
from tests.unit.test_votes import write_answers
from trainer.judging.votes import ANSWERS, OTHERS, VOTES

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.long]

PART = "document.querySelector('section[aria-label=\"Which answer is better?\"]')"
TEXT = f"return {PART}.innerText"
LEFT = f"{PART}.querySelector('[aria-label=\"Left answer\"]').innerText"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that was judged, by hand, with five pairs of answers."""
    folder = by_hand(tmp_path / "base", "judged", 41)
    write_answers(folder)
    return folder


@pytest.fixture
def world(folder: Path) -> Iterator[Service]:
    with serving(folder.parent) as running:
        yield running


def votes(folder: Path, name: str = VOTES) -> list[dict[str, str]]:
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_person_votes_by_mouse_and_keyboard_and_is_told_the_win_rate_on_request(
    browser: Browser, world: Service, folder: Path
) -> None:
    browser.complaints()  # of the tests before
    opened(browser, world, f"/run/{folder.name}")
    browser.until(f"{TEXT}.includes('You voted on 0 of 5')")
    shown = browser.run(TEXT)
    assert "Show the result" not in shown
    assert not [word for word in ("before", "after", "base", "final") if word in shown]
    first = browser.run(f"return {LEFT}")
    browser.press("Left is better")
    browser.until(f"{TEXT}.includes('You voted on 1 of 5')")
    (vote,) = votes(folder)
    assert vote["chosen"] == first
    # the focus is in the part: keys vote
    browser.run(f"{PART}.querySelector('[aria-keyshortcuts=ArrowLeft]').focus()")
    second = browser.run(f"return {LEFT}")
    browser.keys("s")
    browser.until(f"return {LEFT} !== args[0]", second)
    third = browser.run(f"return {LEFT}")
    browser.keys("\ue014")  # arrow right
    browser.until(f"{TEXT}.includes('You voted on 2 of 5')")
    assert votes(folder)[1]["rejected"] == third
    browser.keys("=")
    browser.until(f"{TEXT}.includes('You voted on 3 of 5')")
    assert len(votes(folder, OTHERS)) == 1
    # one that was passed over comes last
    browser.keys("\ue012")
    browser.until(f"{TEXT}.includes('You voted on 4 of 5')")
    assert browser.run(f"return {LEFT}") == second
    browser.press("Show the result so far")
    browser.until(f"{TEXT}.includes('4 votes of 1 person')")
    browser.run(f"{PART}.querySelector('[aria-keyshortcuts=ArrowLeft]').focus()")
    browser.keys("\ue012")
    browser.until(f"{TEXT}.includes('You voted on all 5')")
    assert browser.run("return document.activeElement.innerText") == "Show the result so far"
    browser.keys("\ue007")  # Enter
    browser.until(f"{TEXT}.includes('% of 5 pairs (95%:')")
    assert "1 equal" in browser.run(TEXT)
    assert len(votes(folder)) == 4
    # keys elsewhere vote on nothing, and a reload shows the same
    opened(browser, world, f"/run/{folder.name}")
    browser.until(f"{TEXT}.includes('You voted on all 5')")
    assert not browser.complaints()


def test_a_run_without_answers_has_no_such_part_until_it_is_judged(
    browser: Browser, world: Service, folder: Path
) -> None:
    other = by_hand(folder.parent, "unjudged", 42, state="running")
    opened(browser, world, f"/run/{other.name}")
    browser.until("return document.querySelectorAll('.chartbox').length > 0")
    assert not browser.run(f"return {PART}.checkVisibility()")
    write_answers(other)
    status = json.loads((other / "status.json").read_text())
    (other / "status.json").write_text(json.dumps({**status, "state": "succeeded"}))
    browser.until(f"return {PART}.checkVisibility()")


def test_answers_made_anew_are_told_and_shown(
    browser: Browser, world: Service, folder: Path
) -> None:
    opened(browser, world, f"/run/{folder.name}")
    browser.until(f"{TEXT}.includes('You voted on 0 of 5')")
    line = {"row": 1, "prompt": "New?", "references": ["right"], "before": "x", "after": "y"}
    (folder / ANSWERS).write_text(json.dumps(line) + "\n")
    browser.press("Right is better")
    browser.until(f"{TEXT}.includes('it was judged anew')")
    assert "New?" in browser.run(TEXT)
    assert not votes(folder)
    browser.press("Right is better")
    browser.until(f"{TEXT}.includes('You voted on all 1')")


def test_answers_are_never_a_script_and_axe_finds_nothing_wrong(
    browser: Browser, world: Service, folder: Path, tmp_path: Path
) -> None:
    long = "a sentence that goes on. " * 400
    line = {"row": 1, "prompt": [{"role": "user", "content": HOSTILE}], "references": [HOSTILE]}
    (folder / ANSWERS).write_text(json.dumps({**line, "before": HOSTILE, "after": long}) + "\n")
    source = axe(tmp_path)
    try:
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            opened(browser, world, f"/run/{folder.name}")
            browser.until(f"{TEXT}.includes('onerror')")
            assert browser.run("return window.taken ?? document.querySelector('img')") is None
            browser.run(f"{source}; window.axe = axe")
            for width in (WIDE, NARROW):
                browser.resize(width)
                assert violations(browser) == [], (scheme, width)
                assert browser.run("return document.documentElement.scrollWidth") <= width
        browser.press("They are equal")
        browser.until(f"{TEXT}.includes('You voted on all 1')")
        browser.press("Show the result so far")
        browser.until(f"{TEXT}.includes('1 vote of 1 person')")
        assert violations(browser) == []
    finally:
        browser.prefer("light")
        browser.cdp("Emulation.clearDeviceMetricsOverride", {})


def test_who_only_reads_is_shown_the_result_and_no_buttons(
    browser: Browser, folder: Path, token_file: tuple[Path, dict[str, str]], world: Service
) -> None:
    path, tokens = token_file
    opened(browser, world, f"/run/{folder.name}")
    browser.press("Left is better")
    browser.until(f"{TEXT}.includes('You voted on 1 of 5')")
    with serving(folder.parent, tokens=path, has_keeper=False) as guarded:
        browser.open("about:blank")
        browser.open(f"{guarded.url}/live#/run/{folder.name}")
        browser.until("return !!document.getElementById('token')")
        enter = "document.getElementById('token').value = args[0]; document.querySelector('dialog .strong').click()"
        browser.run(enter, tokens["rita"])
        browser.until(f"{TEXT}.includes('people gave 1 vote')")
        visible = f"return [...{PART}.querySelectorAll('button')].filter(one => one.checkVisibility()).map(one => one.innerText)"
        assert browser.run(visible) == ["Show the result so far"]
        browser.press("Show the result so far")
        browser.until(f"{TEXT}.includes('1 vote of 1 person')")
