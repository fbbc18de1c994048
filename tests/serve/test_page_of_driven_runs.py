"""Driven runs on the live page in a headless browser: what it shows, its buttons, under axe-core."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.browser import NARROW, WIDE, Browser
from tests.serve.conftest import Service, own_queue, serving, wait_until
from tests.serve.driven_stub import DrivenStub
from tests.serve.driving import Driver, driver
from tests.serve.page_world import opened
from tests.serve.test_driven_runs import exp_id_of, row_of, some_loop
from tests.serve.test_page_at_length import axe, violations
from tests.serve.test_steps_dialect import offers

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.long]

World = tuple[Service, Driver, str]
TEXT = "return document.querySelector('section[aria-label=\"{}\"]').innerText"
BUTTONS = "return [...document.querySelectorAll('.buttons button')].map(one => one.innerText)"


@pytest.fixture(scope="module")
def world(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("driven")
    stub = DrivenStub(folder / "stub")
    stub.says(json.dumps({"work_s": 0.02}))
    with (
        own_queue(folder / "queue"),
        serving(folder / "base", python=stub.python, models=offers()) as running,
    ):
        client = driver(running)
        model = some_loop(client)
        yield running, client, model
        client.finish(model)


def test_operations_their_driver_and_what_is_saved_are_shown_as_text(
    browser: Browser, world: World
) -> None:
    service, client, model = world
    run = exp_id_of(service, model)
    browser.complaints()  # of the tests before
    opened(browser, service, f"/run/{run}")
    browser.until(f"{TEXT.format('Operations')}.includes('7 done')")
    shown = browser.run(TEXT.format("Operations"))
    assert "1 of them failed, 0 wait" in shown
    assert "working" in shown
    assert "loss_fn: got 'crossentropy'" in shown
    assert "the client's" in shown
    who = browser.run(TEXT.format("Who drives it"))
    assert "local" in who
    assert model in who
    assert "onerror" in who  # of the session's name, its tags and its metadata
    assert "</script>" in who
    saved = browser.run(TEXT.format("Saved states and weights of samplers"))
    assert f"tinker://{model}/weights/one" in saved
    assert f"tinker://{model}/sampler_weights/two" in saved
    assert browser.run("return window.taken ?? document.querySelector('img')") is None
    # it follows the run
    client.result(client.rows(model, 7))
    browser.until(f"{TEXT.format('Operations')}.includes('8 done')")
    assert not browser.complaints()


def test_axe_finds_nothing_wrong_with_a_driven_run(
    browser: Browser, world: World, tmp_path: Path
) -> None:
    service, _, model = world
    source = axe(tmp_path)
    try:
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            opened(browser, service, f"/run/{exp_id_of(service, model)}")
            browser.until(f"{TEXT.format('Operations')}.includes(' done')")
            browser.run(f"{source}; window.axe = axe")
            for width in (WIDE, NARROW):
                browser.resize(width)
                assert violations(browser) == [], (scheme, width)
                assert browser.run("return document.documentElement.scrollWidth") <= width
    finally:
        browser.prefer("light")
        browser.cdp("Emulation.clearDeviceMetricsOverride", {})


def press(browser: Browser, name: str) -> None:
    """Press a button of the run, and the one of the dialog that asks."""
    browser.press(name)
    browser.until("return !!document.querySelector('dialog[open]')")
    browser.run("document.querySelector('dialog[open] .strong').click()")


def test_a_run_is_put_aside_woken_paused_cancelled_and_deleted_by_its_buttons(
    browser: Browser, world: World
) -> None:
    service, client, _ = world
    model = client.run(client.session())
    run = exp_id_of(service, model)
    opened(browser, service, f"/run/{run}")
    browser.until(f"{BUTTONS}.includes('Put aside')")
    assert browser.run(BUTTONS) == ["Pause", "Put aside", "Cancel"]
    browser.press("Put aside")
    browser.press("Go back")  # it asks first
    assert row_of(service, run).state == "running"
    press(browser, "Put aside")
    wait_until(lambda: row_of(service, run), lambda row: row.state == "paused")
    browser.until("return document.querySelector('.facts .why')?.innerText.includes('put aside')")
    client.result(client.rows(model, 1))  # which wakes it
    browser.until(f"{BUTTONS}.includes('Put aside')")
    press(browser, "Pause")
    browser.until(f"{BUTTONS}.includes('Resume')")
    press(browser, "Resume")
    browser.until(f"{BUTTONS}.includes('Pause')")
    press(browser, "Cancel")
    browser.until(f"{BUTTONS}.includes('Delete')")
    press(browser, "Delete")
    browser.until("return document.querySelector('.message').innerText.includes('Delete: done')")
    assert not (service.base / run / "operations").exists()
    browser.until(f"{BUTTONS}.length === 0")
    browser.until(
        "return !document.querySelector('section[aria-label=Operations]').checkVisibility()"
    )


def test_who_only_reads_sees_a_driven_run_and_no_button(
    browser: Browser, world: World, token_file: tuple[Path, dict[str, str]]
) -> None:
    service, _, model = world
    path, tokens = token_file
    with serving(service.base, tokens=path, has_keeper=False, models=offers()) as guarded:
        browser.open("about:blank")
        browser.open(f"{guarded.url}/live#/run/{exp_id_of(service, model)}")
        browser.until("return !!document.getElementById('token')")
        enter = "document.getElementById('token').value = args[0]; document.querySelector('dialog .strong').click()"
        browser.run(enter, tokens["rita"])
        browser.until(f"{TEXT.format('Operations')}.includes(' done')")
        assert browser.run(BUTTONS) == []
