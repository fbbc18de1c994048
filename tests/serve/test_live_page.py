"""The live page in a headless browser: what it shows, what grows, what its buttons do, who may."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.browser import Browser
from tests.serve.conftest import (
    CHAT,
    Service,
    Stub,
    jsonl,
    own_queue,
    serving,
    until_status,
)
from trainer.config.identity import exp_id
from trainer.runtime.process import facts

pytestmark = [pytest.mark.xdist_group("browser")]
HOSTILE = "</script><img src=x onerror=\"window.taken=1\"><svg onload='window.taken=1'>\u202e${1}"


def experiment(label: str, seed: int) -> dict[str, Any]:
    return {"task": "causal_lm", "label": label, "train": {"steps": 100, "seed": seed}}


def by_hand(base: Path, label: str, seed: int, state: str = "succeeded", name: str = "") -> Path:
    """The folder of a run as trainval.py leaves it, of this process."""
    values = experiment(label, seed)
    folder = base / exp_id(values)
    folder.mkdir(parents=True)
    (folder / "exp_dict.json").write_text(json.dumps(values))
    status = {"state": state, "step": 2, "total": 100, "host": "here", "process": facts()}
    status |= {"updated_at": "2026-11-23T07:00:00+00:00", "name": name or label}
    (folder / "status.json").write_text(json.dumps(status))
    for step in (1, 2):
        log(
            folder, step, loss=float(seed), **{"valid/loss": seed + step / 10, "tokens_per_s": 99.5}
        )
    return folder


def log(folder: Path, step: int, **values: float) -> None:
    """One more line of a run's metrics."""
    line = {"step": step, **values, "at": f"2026-11-23T07:00:{step % 60:02d}+00:00"}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.fixture(scope="module")
def world(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A job that has succeeded, one that stands in its training, and runs started by hand."""
    folder = tmp_path_factory.mktemp("live")
    stub, base = Stub(folder / "stub"), folder / "base"
    for seed in (3, 4):
        by_hand(base, f"hand-{seed}", seed)
    hostile = by_hand(base, HOSTILE, 9, name=HOSTILE)
    log(hostile, 3, **{f"valid/{HOSTILE}": 1.0})
    (hostile / "answers").mkdir()
    (hostile / "answers" / "step-3.jsonl").write_text(json.dumps({HOSTILE: HOSTILE}) + "\n")
    with own_queue(folder / "queue"), serving(base, python=stub.python) as running:
        client = running.client()
        file = client.files.create(file=("a.jsonl", jsonl(CHAT)), purpose="fine-tune")
        make = client.fine_tuning.jobs.create
        first = make(model="tiny-chat", training_file=file.id, suffix="done")
        until_status(client, first.id, "succeeded")
        stub.says("slow")
        second = make(model="tiny-chat", training_file=file.id, suffix="slow")
        until_status(client, second.id, "running")
        yield running
        client.fine_tuning.jobs.cancel(second.id)


def opened(browser: Browser, world: Service, place: str = "/") -> None:
    """Load a part of the page anew."""
    browser.open("about:blank")
    browser.open(f"{world.url}/live#{place}")
    browser.until("return document.querySelector('#link').innerText === 'live'")


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
    browser.press("Lay 2 runs over each other")
    browser.until("return document.querySelectorAll('td.mono').length > 0")
    assert browser.texts("td.mono") == ["label", "train.seed"]
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
        browser.until("return document.activeElement.innerText === 'Leave it'")
        browser.run(f"{dialog}all.find(one => one.innerText === args[0]).click()", name)
        browser.until(
            "return document.querySelector('.message').innerText === args[0]", f"{name}: done."
        )
        assert client.fine_tuning.jobs.retrieve(slow.id).lathe["is_paused"] is is_paused
    browser.press("Clone with changes")
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
    for _ in range(12):
        browser.keys("\ue004")  # Tab
        reached.append(
            browser.run(
                "return document.activeElement.className || document.activeElement.innerText"
            )
        )
    assert reached[:5] == ["skip", "home", "Runs", "Queue", "API"]
    assert "plot" in reached
    browser.run("document.querySelector('.plot').focus()")
    browser.keys("\ue012", "\ue012")  # left, twice
    assert "at step 1" in browser.texts(".readout")[0]


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
                "return !document.getElementById('token') || document.body.innerText.includes('not known')"
            )
        browser.until("return document.getElementById('who').innerText === 'rita (read)'")
        browser.until("return document.querySelectorAll('.runs tbody tr').length > 3")
        browser.run("location.hash = '#/run/' + args[0]", exp_id(experiment("hand-3", 3)))
        browser.until("return !!document.querySelector('.plot')")
        assert browser.texts(".buttons button") == []
        kept = "return [document.cookie, localStorage.length, sessionStorage.length]"
        assert browser.run(kept) == ["", 0, 0]


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
                assert violations(browser) == [], (scheme, place)
        browser.press("Runs")
        opened(browser, world, f"/run/{run}")
        browser.press("Clone with changes")
        browser.until("return !!document.getElementById('clone-seed')")
        browser.run(f"{source}; window.axe = axe")
        assert violations(browser) == []
    finally:
        browser.prefer("light")


@pytest.mark.long
def test_a_real_training_is_watched_in_light_and_dark(browser: Browser, tmp_path: Path) -> None:
    """LATHE_SHOTS names a folder for the pictures."""
    browser.complaints()  # of the tests before
    shots = Path(os.environ.get("LATHE_SHOTS", tmp_path))
    with own_queue(tmp_path / "queue"), serving(tmp_path / "base") as real:
        client = real.client()
        file = client.files.create(file=("a.jsonl", jsonl(CHAT * 4)), purpose="fine-tune")
        options: Any = {"hyperparameters": {"n_epochs": 60}, "suffix": "watched"}
        job = client.fine_tuning.jobs.create(model="tiny-chat", training_file=file.id, **options)
        run = client.fine_tuning.jobs.retrieve(job.id).lathe["exp_id"]
        opened(browser, real)
        browser.until("return document.body.innerText.includes('running')", within_s=120)
        browser.run("location.hash = '#/run/' + args[0]", run)
        count = "return document.querySelector('.chartbox polyline')?.points.length"
        seen: list[int] = []
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            before = seen[-1] if seen else 0
            seen.append(
                browser.until(f"const it = {count[7:]}; return it > {before} && it", within_s=120)
            )
            browser.shoot(shots / f"training_{scheme}.png")
        until_status(client, job.id, "succeeded", within_s=300)
        browser.until("return document.querySelector('h1').innerText.includes('succeeded')")
        browser.until(
            "return document.querySelector('section[aria-label=Log] pre').innerText.includes('finished')"
        )
        assert 0 < seen[0] < seen[1] <= browser.run(count)
        browser.shoot(shots / "ended.png")
        browser.prefer("light")
        browser.press("Runs")
        browser.until("return document.querySelectorAll('.runs tbody tr').length === 1")
        browser.shoot(shots / "overview.png")
        assert not browser.complaints()
