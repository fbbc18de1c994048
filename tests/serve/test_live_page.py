"""The live page in a headless browser: what it shows, what grows, what its buttons do, who may."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.serve.answers import workers
from jobs.serve.preview import routes as preview
from tests.serve.browser import NARROW, Browser
from tests.serve.conftest import CHAT, Service, jsonl, serving
from tests.serve.page_world import (
    ANSWERS,
    HOSTILE,
    by_hand,
    experiment,
    live_world,
    log,
    opened,
    preview_of_commands,
)
from trainer.config.identity import exp_id

pytestmark = [pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def world(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with live_world(tmp_path_factory.mktemp("live")) as running:
        yield running


def names(browser: Browser) -> list[str]:
    return browser.texts(".runs tbody td:nth-child(2) a")


def test_the_overview_lists_filters_searches_and_sorts(browser: Browser, world: Service) -> None:
    opened(browser, world)
    browser.until("return document.querySelectorAll('.runs tbody tr').length === 5")
    assert {"hand-3", "hand-4", "tiny-chat · done", "tiny-chat · slow"} < set(names(browser))
    browser.press("1 running")
    assert names(browser) == ["tiny-chat · slow"]
    browser.press("1 running")
    pick = "const it = document.getElementById(args[0]); it.value = args[1]; it.dispatchEvent(new Event('change'))"
    browser.run(pick, "sort", "valid/loss")
    assert names(browser)[:3] == ["hand-3", "hand-4", names(browser)[2]]
    browser.run(pick.replace("'change'", "'input'"), "search", "HAND-4 succeeded")
    assert names(browser) == ["hand-4"]
    address = browser.run("return location.hash")
    opened(browser, world, address.removeprefix("#"))
    browser.until("return document.querySelectorAll('.runs tbody tr').length === 1")
    assert names(browser) == ["hand-4"]
    browser.run(pick.replace("'change'", "'input'"), "search", "")
    browser.run(pick, "group", "=service")
    assert sorted(names(browser)) == ["tiny-chat · done", "tiny-chat · slow"]


def test_a_folder_that_cannot_be_read_is_a_line_of_the_page_until_it_is_mended(
    browser: Browser, world: Service
) -> None:
    folder = by_hand(world.base, "broken", 8)
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to("metrics.jsonl")
    opened(browser, world)
    read = "return document.querySelector('#content details').innerText"
    browser.until(f"{read}.includes('1 folder cannot be read')")
    line = browser.run(read)
    assert folder.name in line
    assert "metrics.jsonl: Too many levels of symbolic links" in line
    shutil.rmtree(folder)
    browser.until("return document.querySelector('#content details').hidden")


def test_curves_grow_while_a_run_is_watched(browser: Browser, world: Service) -> None:
    folder = by_hand(world.base, "growing", 7, state="running")
    opened(browser, world, f"/run/{folder.name}")
    read = "return document.querySelector('.chartbox .readout')?.innerText"
    browser.until(f"{read}?.startsWith('loss 7')")
    assert "99.50 tokens/s" in browser.run("return document.querySelector('.facts').innerText")
    for step in (3, 4):
        log(folder, step, loss=1.25 * step)
    browser.until(f"{read}?.startsWith('loss 5 ') || {read[7:]}?.startsWith('loss 5')")
    browser.until("return document.querySelector('.chartbox polyline').points.length === 4")
    # a run that resumes cuts its file back
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "new").write_text("".join(lines[:2]))
    os.replace(folder / "new", folder / "metrics.jsonl")
    browser.until("return document.querySelector('.chartbox polyline').points.length === 2")
    log(folder, 3, loss=6.5)
    browser.until(f"{read}?.startsWith('loss 6.5')")
    browser.press("over time")
    assert "2 s" in browser.run("return document.querySelector('.chartbox svg').textContent")


def test_a_run_that_is_opened_before_its_folder_exists_appears_by_itself(
    browser: Browser, world: Service
) -> None:
    seeds = (21, 22)
    ids = [exp_id(experiment(f"early-{seed}", seed)) for seed in seeds]
    opened(browser, world, f"/run/{ids[0]}")
    missing = "return document.querySelector('[role=alert]')?.innerText.includes('No such run')"
    browser.until(missing)
    by_hand(world.base, "early-21", 21)
    browser.until("return document.querySelector('h1').innerText.startsWith('early-21')")
    browser.until("return document.querySelectorAll('.chartbox polyline').length > 0")
    assert not browser.run(missing)
    opened(browser, world, f"/compare/{','.join(ids)}")
    browser.until(missing)
    by_hand(world.base, "early-22", 22)
    browser.until("return document.querySelectorAll('.chartbox polyline').length > 1")
    assert not browser.run(missing)


def test_runs_are_laid_over_each_other_and_told_apart(browser: Browser, world: Service) -> None:
    ids = [exp_id(experiment(f"hand-{seed}", seed)) for seed in (3, 4)]
    opened(browser, world)
    for name in ids:
        browser.until("return !!document.querySelector(`[aria-label$='${args[0]}']`)", name[:8])
        browser.run("document.querySelector(`[aria-label$='${args[0]}']`).click()", name[:8])
    browser.press("Compare 2 runs")
    browser.until("return document.querySelectorAll('td.mono').length > 0")
    assert browser.texts("td.mono") == ["label", "train.seed"]
    assert browser.texts(".chartbox figcaption .under")[0] == "Loss"
    lines = "return document.querySelector('.chartbox').querySelectorAll('polyline').length"
    browser.until(lines.replace(".querySelectorAll", "?.querySelectorAll") + " === 2")
    assert browser.texts(".chartbox .readout")[0].split() == ["hand-3", "3", "hand-4", "4"]


def test_everything_of_a_run_is_shown(browser: Browser, world: Service) -> None:
    client = world.client()
    done = next(job for job in client.fine_tuning.jobs.list() if job.status == "succeeded")
    run = done.lathe["exp_id"]
    plan = {
        "plan": {"phases": [{"name": "training", "peak": {"weights": 2**30, "activations": 2**29}}]}
    }
    (world.base / run / "memory_plan.json").write_text(json.dumps({**plan, "measured": 2**30}))
    opened(browser, world, f"/run/{run}")
    body = "return document.body.innerText"
    browser.until(f"{body}.includes('1.50 GiB') && {body[7:]}.includes('67 % of the plan')")
    assert "succeeded" in browser.run(
        "return document.querySelector('section[aria-label=Attempts]').innerText"
    )
    browser.until(
        "return document.querySelector('section[aria-label=Log] pre').innerText === 'Nothing was printed yet.'"
    )
    browser.until(
        "return document.querySelector('#other option[value]')?.parentNode.options.length > 3"
    )
    choose = "const it = document.getElementById('other'); it.value = args[0]; it.dispatchEvent(new Event('change'))"
    browser.run(choose, exp_id(experiment("hand-3", 3)))
    browser.until(
        "return [...document.querySelectorAll('td.mono')].some(one => one.innerText === 'train.seed')"
    )
    browser.press("Queue")
    browser.until("return document.body.innerText.includes('tiny-chat · slow')")
    browser.until("return document.body.innerText.includes('good')")
    assert "tiny-chat · done" not in browser.run(body)
    browser.press("API")
    browser.until("return document.body.innerText.includes('/lathe/v1/runs/{exp_id}/metrics')")


def test_a_run_is_started_from_the_page_and_followed(
    browser: Browser, world: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "look", preview_of_commands)
    opened(browser, world, "/new")
    browser.until("return !!document.querySelector('#rows-file')")
    assert "messages (chat)" in browser.run("return document.querySelector('.new').innerText")
    text = "return document.querySelector('.new').innerText"
    browser.choose_file("#rows-file", "bad.jsonl", '{"messages": 3}\n')
    browser.until(f"{text}.includes('1 mistake')")
    can_start = "return !document.querySelector('.new .strong').disabled"
    assert not browser.run(can_start)
    rows = "".join(json.dumps(row) + "\n" for row in CHAT)
    browser.choose_file("#rows-file", "good.jsonl", rows)
    browser.until(f"{text}.includes('about 1 h 00 on 8 x h200')")
    assert browser.texts("mark") == [HOSTILE.replace("\u202e", "\\u202e"), "It is 1."]
    assert "10 rows of the kind chat" in browser.run(text)
    assert "peak memory of a device 1.50 GiB" in browser.run(text)
    fill = "const it = document.getElementById(args[0]); it.value = args[1]; it.dispatchEvent(new Event('change'))"
    browser.run(fill, "new-suffix", "by-page")
    browser.run(fill, "new-n_epochs", "many")
    browser.until(f"{text}.includes('Epochs: got many')")
    browser.run(fill, "new-n_epochs", "3")
    browser.until(can_start)
    browser.press("Start")
    browser.until("return location.hash.startsWith('#/run/')")
    browser.until("return document.querySelector('h1').innerText.includes('by-page')")
    (made,) = [
        job for job in world.client().fine_tuning.jobs.list() if job.lathe["suffix"] == "by-page"
    ]
    assert made.hyperparameters.n_epochs == 3
    # the stand-in for the training stands at its third step
    browser.until("return document.querySelectorAll('.chartbox polyline').length > 0")
    world.client().fine_tuning.jobs.cancel(made.id)


def test_a_run_that_learns_from_preferences_is_started_from_the_page(
    browser: Browser, world: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "look", preview_of_commands)
    opened(browser, world, "/new")
    browser.until("return !!document.querySelector('#method')")
    change = "const it = document.getElementById(args[0]); it.value = args[1]; it.dispatchEvent(new Event('change'))"
    ways = "return [...document.querySelectorAll('#method option')].map(one => one.value)"
    browser.run(change, "model", "tiny-retriever")
    assert browser.run(ways) == ["supervised"]
    browser.run(change, "model", "tiny-chat")
    assert browser.run(ways) == ["supervised", "dpo"]
    browser.run(change, "method", "dpo")
    browser.run(change, "new-suffix", "liked")
    assert "non_preferred_output" in browser.run("return document.querySelector('.new').innerText")
    turn = {"role": "assistant", "content": "yes"}
    rows = [
        {
            "input": {"messages": [{"role": "user", "content": f"Is it {number}?"}]},
            "preferred_output": [turn],
            "non_preferred_output": [{**turn, "content": "no"}],
        }
        for number in range(10)
    ]
    browser.choose_file("#rows-file", "pairs.jsonl", jsonl(rows).decode())
    browser.until("return !document.querySelector('.new .strong').disabled")
    browser.press("Start")
    browser.until("return location.hash.startsWith('#/run/')")
    jobs = world.client().fine_tuning.jobs
    (made,) = [job for job in jobs.list() if job.lathe["suffix"] == "liked"]
    assert made.method.type == "dpo"
    jobs.cancel(made.id)


def test_a_finished_run_is_asked_beside_its_base(
    browser: Browser, world: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = tmp_path / "trainer" / "commands"
    commands.mkdir(parents=True)
    (commands / "answer.py").write_text(ANSWERS)
    for package in (commands, commands.parent):
        (package / "__init__.py").touch()
    monkeypatch.setattr(workers, "PROJECT", tmp_path)
    jobs = list(world.client().fine_tuning.jobs.list())
    (done,) = [job for job in jobs if job.lathe["suffix"] == "done"]
    opened(browser, world, f"/run/{done.lathe['exp_id']}")
    browser.until("return !!document.getElementById('talk-message')")
    ask = "document.getElementById('talk-message').value = args[0]; document.querySelector('section[aria-label=\"Ask it\"] .strong').click()"
    answers = "return [...document.querySelectorAll('.answer')].map(one => one.innerText)"
    browser.run(ask, HOSTILE)
    shown = HOSTILE.replace("\u202e", "\\u202e")
    is_over = "return !document.querySelector('[aria-busy]')"
    browser.until(f"{is_over} && ({answers[7:]}).length === 2")
    assert browser.run(answers) == [f"{name} answers 1: {shown}" for name in ("final", "base")]
    browser.run(ask, "and then?")
    browser.until(f"{answers}.length === 4")
    browser.until(f"{is_over} && ({answers[7:]})[3] === 'base answers 3: and then?'")
    assert "1,234 tokens of it were not read" in browser.texts(".side")[1]
    browser.run(ask, "wait")
    parts = ["final answers 5:", "base answers 5:"]  # what is there already is shown
    shown_now = (
        f"return ({answers[7:]}).map(one => one.trim()).filter(one => one.includes(' 5:')).join()"
    )
    browser.until(f"{shown_now} === args[0]", ",".join(parts))
    (commands / "go").touch()
    browser.until(f"{shown_now} === args[0]", ",".join(f"{part} wait" for part in parts))
    opened(browser, world, f"/run/{exp_id(experiment('hand-3', 3))}")
    browser.until("return !!document.getElementById('talk-message')")
    assert browser.run("return window.taken") is None


def test_the_table_shows_reasons_and_the_columns_that_a_person_chose(
    browser: Browser, world: Service
) -> None:
    folder = by_hand(world.base, "broke", 31, state="failed")
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "error": "DataError: line 7"}))
    opened(browser, world, "/?text=broke")
    browser.until("return document.querySelector('.reason')?.innerText === 'DataError: line 7'")
    heads = "return [...document.querySelectorAll('.runs th')].map(one => one.innerText)"
    assert browser.run(heads)[1:] == [
        *("run", "group", "state", "progress", "loss", "valid/loss", "GPU-h", "when")
    ]
    browser.run("document.querySelector('.columns').open = true")
    browser.press("group")
    browser.until(f"{heads}.join() === 'Chosen,run,state,progress,loss,valid/loss,GPU-h,when'")
    opened(browser, world, "/?text=broke")
    browser.until(f"{heads}.join() === 'Chosen,run,state,progress,loss,valid/loss,GPU-h,when'")
    browser.run("localStorage.clear()")
    try:
        browser.resize(NARROW)
        seen = "return [...document.querySelectorAll('.runs td')].filter(one => one.checkVisibility()).map(one => one.className)"
        assert browser.run(seen) == ["box", "text name", "pill state s-failed", "steps", "num loss"]
        assert browser.run("return document.documentElement.scrollWidth") <= NARROW
    finally:
        browser.cdp("Emulation.clearDeviceMetricsOverride", {})
        shutil.rmtree(folder)


def test_an_empty_folder_says_how_to_begin(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path / "runs", has_keeper=False) as empty:
        opened(browser, empty)
        browser.until("return !!document.querySelector('.commands')?.checkVisibility()")
        text = browser.run("return document.querySelector('.commands').innerText")
        assert text.splitlines()[1] == "lathe train causal_lm.py --data_path data -sb runs"
        assert not browser.run("return document.querySelector('.runs').checkVisibility()")


def test_what_a_run_says_is_never_a_script(browser: Browser, world: Service) -> None:
    name = exp_id(experiment(HOSTILE, 9))
    browser.complaints()  # of the tests before
    opened(browser, world)
    browser.until("return document.body.innerText.includes('onerror')")
    opened(browser, world, f"/run/{name}")
    browser.until("return document.querySelectorAll('.panel td.wrap').length > 0")
    text = browser.run("return document.body.innerText")
    assert "</script><img src=x onerror=" in text
    assert "\u202e" not in text
    other = exp_id(experiment("hand-3", 3))
    opened(browser, world, f"/compare/{name},{other}")
    browser.until("return document.querySelectorAll('td.mono').length > 0")
    assert browser.run("return window.taken ?? document.querySelector('img, svg[onload]')") is None
    browser.run("try { document.body.innerHTML = '<b>x</b>' } catch { return }; window.taken = 1")
    assert browser.run("return window.taken") is None
    stopped = [text for text in browser.complaints() if "TrustedHTML" not in text]
    assert not stopped


def test_buttons_ask_first_and_then_do_it(browser: Browser, world: Service) -> None:
    client = world.client()
    (slow,) = [job for job in client.fine_tuning.jobs.list() if job.lathe["suffix"] == "slow"]
    opened(browser, world, f"/run/{slow.lathe['exp_id']}")
    browser.press("Pause")
    browser.keys("\ue00c")  # Escape
    browser.until("return !document.querySelector('dialog')")
    assert not client.fine_tuning.jobs.retrieve(slow.id).lathe["is_paused"]
    dialog = "const all = [...document.querySelectorAll('dialog[open] button')]; "
    for name, is_paused in (("Pause", True), ("Resume", False)):
        browser.press(name)
        browser.until("return document.activeElement.innerText === 'Go back'")
        browser.run(f"{dialog}all.find(one => one.innerText === args[0]).click()", name)
        browser.until(
            "return document.querySelector('.message').innerText === args[0]", f"{name}: done."
        )
        assert client.fine_tuning.jobs.retrieve(slow.id).lathe["is_paused"] is is_paused
    browser.press("Copy with changes")
    browser.until("return !!document.getElementById('clone-seed')")
    browser.run(
        "document.getElementById('clone-seed').value = '77'; document.getElementById('clone-suffix').value = 'again'"
    )
    browser.run(f"{dialog}all.find(one => one.innerText === 'Start it').click()")
    browser.until(
        "return document.querySelector('.message').innerText.startsWith('Started ftjob-')"
    )
    (made,) = [job for job in client.fine_tuning.jobs.list() if job.lathe["suffix"] == "again"]
    assert (made.seed, made.training_file) == (77, slow.training_file)
    client.fine_tuning.jobs.cancel(made.id)


def test_the_keyboard_reaches_everything(browser: Browser, world: Service) -> None:
    opened(browser, world, f"/run/{exp_id(experiment('hand-3', 3))}")
    browser.until("return !!document.querySelector('.plot svg')")
    reached: list[str] = []
    for _ in range(16):
        browser.keys("\ue004")  # Tab
        reached.append(
            browser.run(
                "return document.activeElement.className || document.activeElement.innerText"
            )
        )
    assert reached[:5] == ["skip", "home", "Runs", "New run", "Queue"]
    assert "plot" in reached
    browser.run("document.querySelector('.plot').focus()")
    browser.keys("\ue012", "\ue012")  # left, twice
    assert "at step 1" in browser.texts(".readout")[0]


@pytest.mark.long
def test_a_token_is_asked_for_and_stays_in_memory(
    browser: Browser, world: Service, tmp_path: Path, token_file: tuple[Path, dict[str, str]]
) -> None:
    path, tokens = token_file
    with serving(world.base, tokens=path, has_keeper=False) as guarded:
        browser.open("about:blank")
        browser.open(f"{guarded.url}/live")
        enter = "document.getElementById('token').value = args[0]; document.querySelector('dialog .strong').click()"
        for text in ("lathe-wrong", tokens["rita"]):
            browser.until("return !!document.getElementById('token')")
            browser.run(enter, text)
            browser.until(
                "return !document.getElementById('token') || document.body.innerText.includes('does not know')"
            )
        browser.until("return document.getElementById('who').innerText === 'rita (read)'")
        browser.until("return document.querySelectorAll('.runs tbody tr').length > 3")
        browser.run("location.hash = '#/run/' + args[0]", exp_id(experiment("hand-3", 3)))
        browser.until("return !!document.querySelector('.plot')")
        assert browser.texts(".buttons button") == ["Ask both"], "who reads changes nothing"
        assert not browser.run("return document.querySelector('#new').checkVisibility()")
        kept = "return [document.cookie, localStorage.length, sessionStorage.length]"
        assert browser.run(kept) == ["", 0, 0]
