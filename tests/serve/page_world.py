"""What the tests of the live page look at: a service with jobs, and runs started by hand."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.serve.browser import Browser
from tests.serve.conftest import CHAT, Service, Stub, jsonl, own_queue, serving, until_status
from trainer.config.identity import exp_id
from trainer.runtime.process import facts

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


@contextmanager
def live_world(folder: Path) -> Iterator[Service]:
    """A job that has succeeded, one that stands in its training, and runs started by hand."""
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


def preview_of_commands(
    words: list[str], experiments: list[dict[str, Any]], folder: Path, *, within_s: float
) -> subprocess.CompletedProcess[str]:
    """What `stats --json` and `plan --json` say, in short."""
    lines = (folder / "train.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert first in CHAT or {"prompt", "chosen", "rejected"} == first.keys()
    segments = [{"text": "What is 1?", "in_loss": False}, {"text": HOSTILE, "in_loss": True}]
    texts = [{"input": segments}, {"input": [{"text": "It is 1.", "in_loss": True}]}]
    counts = {"rows": len(lines), "fields": {"length": {"tokens": 99}}, "truncated_rows": 0}
    train = {**counts, "examples": [{"length": 9, "texts": one} for one in texts]}
    time = {"total_s": 3600.0, "step_s": 1.0, "world": 8, "device": "h200"}
    phases = [{"name": "training", "peak": {"weights": 2**30, "activations": 2**29}}]
    told = {"splits": {"train": train, "valid": counts}}
    if "plan" in words:
        told = {"plan": {"phases": phases}, "time": time}
    return subprocess.CompletedProcess(words, 0, json.dumps(told), "")


# Answers with which weights it was asked, and the last message. The word "wait" comes when there is a file `go`.
ANSWERS = """
import json, sys, time
from pathlib import Path

def say(**piece):
    print(json.dumps(piece), flush=True)

say(ready=True)
for line in sys.stdin:
    for of, one in enumerate(json.loads(line)["many"]):
        said = one["messages"][-1]["content"]
        say(of=of, text=f"{sys.argv[3]} answers {len(one['messages'])}: ")
        while said == "wait" and not Path(__file__).with_name("go").exists():
            time.sleep(0.01)
        say(of=of, text=said)
        say(of=of, finish="stop", prompt_tokens=1, tokens=1, cut_tokens=1234)
    say(done=True)
"""
