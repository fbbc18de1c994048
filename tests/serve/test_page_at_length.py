"""The live page under axe-core, in light and dark, wide and narrow, and beside real trainings."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from jobs.serve.offers import Offer
from service import TINY_CHAT
from tests.serve.browser import NARROW, WIDE, Browser
from tests.serve.conftest import CHAT, Service, jsonl, own_queue, serving, until_status
from tests.serve.page_world import experiment, live_world, opened
from trainer.config.identity import exp_id

pytestmark = [pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def world(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with live_world(tmp_path_factory.mktemp("live")) as running:
        yield running


def axe(folder: Path) -> str:
    """The source of axe-core, from npm; skips where npm, or its registry, is not reached."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not here: axe-core cannot be fetched")
    done = subprocess.run(
        ["npm", "pack", "axe-core@4", "--silent"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        pytest.skip(f"npm cannot be reached: {done.stderr[-200:]}")
    with tarfile.open(folder / done.stdout.split()[-1]) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


def violations(browser: Browser) -> list[str]:
    """What axe-core finds wrong with the page as it is, with the first place of each."""
    script = "const found = await axe.run(); return found.violations.map(one => `${one.id}: ${one.help} ${one.nodes[0].html} ${one.nodes[0].failureSummary}`)"
    return browser.run(script)


@pytest.mark.long
def test_axe_finds_nothing_wrong_in_light_or_dark(
    browser: Browser, world: Service, tmp_path: Path
) -> None:
    source = axe(tmp_path)
    client = world.client()
    run = next(
        job for job in client.fine_tuning.jobs.list() if job.lathe["suffix"] == "slow"
    ).lathe["exp_id"]
    hand = exp_id(experiment("hand-3", 3))
    ready = {
        "/": "return document.querySelectorAll('.runs tbody tr').length > 4",
        f"/run/{run}": "return document.querySelectorAll('.plot svg, #other').length > 1",
        f"/compare/{run},{hand}": "return document.querySelectorAll('td.mono').length > 0",
        "/new": "return !!document.querySelector('#rows-file')",
        "/queue": "return document.body.innerText.includes('good')",
        "/api": "return document.body.innerText.includes('/lathe/v1/status')",
    }
    try:
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            for place, is_ready in ready.items():
                opened(browser, world, place)
                browser.until(is_ready)
                browser.run(f"{source}; window.axe = axe")
                for width in (WIDE, NARROW):
                    browser.resize(width)
                    assert violations(browser) == [], (scheme, place, width)
                    right = browser.run("return document.documentElement.scrollWidth")
                    assert right <= width, (place, width)
        browser.press("Runs")
        opened(browser, world, f"/run/{run}")
        browser.press("Copy with changes")
        browser.until("return !!document.getElementById('clone-seed')")
        browser.run(f"{source}; window.axe = axe")
        assert violations(browser) == []
    finally:
        browser.prefer("light")
        browser.cdp("Emulation.clearDeviceMetricsOverride", {})


def saved_chat(folder: Path) -> Offer:
    """An offer whose base is a folder, so that it can be asked, too."""
    config = dict(TINY_CHAT["base"]["config"])
    family = config.pop("model_type")
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    made.save_pretrained(folder)
    return Offer(experiment={**TINY_CHAT, "base": str(folder)}, epochs=60, device="h200")


def shoot(browser: Browser, name: str) -> None:
    """Pictures of the page, light and dark, wide and narrow. LATHE_SHOTS names their folder."""
    folder = os.environ.get("LATHE_SHOTS")
    if folder is None:
        return
    for scheme in ("dark", "light"):
        browser.prefer(scheme)
        for width in (WIDE, NARROW):
            browser.shoot(Path(folder) / f"{name}_{width}_{scheme}.png", width)


@pytest.mark.long
def test_a_training_is_started_followed_and_asked_on_the_page(
    browser: Browser, tmp_path: Path
) -> None:
    browser.complaints()  # of the tests before
    models = {"saved-chat": saved_chat(tmp_path / "model")}
    with own_queue(tmp_path / "queue"), serving(tmp_path / "base", models=models) as real:
        opened(browser, real)
        shoot(browser, "empty")
        browser.press("Start a run of an offered model")
        browser.until("return !!document.querySelector('#rows-file')")
        browser.choose_file("#rows-file", "rows.jsonl", jsonl(CHAT * 4).decode())
        browser.until("return document.querySelectorAll('mark').length === 2", within_s=300)
        assert all("It is" in text for text in browser.texts("mark"))
        browser.until("return document.querySelectorAll('.plan li').length === 3", within_s=300)
        steps, memory, time = browser.texts(".plan li")
        assert steps.endswith("steps: 60 epochs, 8 rows a step")
        assert memory.endswith("fits on h200")
        assert time.endswith("on h200")
        shoot(browser, "new_run")
        browser.press("Start")
        count = "return document.querySelector('.chartbox polyline')?.points.length"
        first = browser.until(count, within_s=300)
        later = browser.until(f"const it = {count[7:]}; return it > {first} && it", within_s=300)
        (job,) = real.client().fine_tuning.jobs.list()
        until_status(real.client(), job.id, "succeeded", within_s=600)
        browser.until("return document.querySelector('h1').innerText.includes('succeeded')")
        browser.until(
            "return document.querySelector('section[aria-label=Log] pre').innerText.includes('finished')"
        )
        assert later <= browser.run(count)
        browser.until("return !!document.getElementById('talk-message')")
        browser.run("document.getElementById('talk-message').value = 'What is 3?'")
        browser.press("Ask both")
        is_told = "document.querySelectorAll('.answer').length === 2 && !document.querySelector('[aria-busy]')"
        browser.until(f"return {is_told}", within_s=300)
        tuned, base = browser.texts(".answer")
        assert tuned.startswith("It is")
        assert tuned != base
        shoot(browser, "run")
        browser.press("Runs")
        browser.until("return document.querySelectorAll('.runs tbody tr').length === 1")
        shoot(browser, "overview")
        assert not browser.complaints()
