"""No answer tells a tenant where the server's files lie, what its Python threw, or who else is
there.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import without_places
from jobs.serve.access import add_token
from jobs.serve.answers.workers import CannotAnswer, Worker
from jobs.serve.limits.disclosure import Veil, log_of_tenant
from jobs.serve.live import stream
from tests.jobs.odd_folders import text_at
from tests.serve.conftest import Stub
from tests.serve.poisoned import KINDS, World, new_world, withdraw
from tests.serve.test_turns import until_all_ended

# Kinds of jobs that fail: each says in its own way which file it could not read.
POISONS = (
    "a record that is a folder",
    "a ticket that is a folder",
    "facts of a file that are a pipe",
    "content that is a folder",
    "metrics that are a loop",
    "an offer that is gone",
    "half of an emoji in a row",
)
QUERIES = {
    "/lathe/v1/runs/{exp_id}/logs": ("?err=1", "", "?attempt=9"),
    "/lathe/v1/runs/{exp_id}/answers": ("?step=1",),
    "/lathe/v1/differences": ("?runs={exp_id}", "?runs=none"),
}
TOLD = re.compile(r"Traceback|File \"|KeyError")


@pytest.fixture
def world(tmp_path: Path, stub: Stub, queue: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = new_world(tmp_path, stub)
    world.tokens["rita"] = add_token(tmp_path / "tokens.json", "rita", "read", {})
    monkeypatch.setattr(stream, "LONGEST_S", 0.1)
    monkeypatch.setattr(stream, "EVERY_S", 0.05)

    async def refuse(worker: Worker) -> Any:
        raise CannotAnswer(f"{worker.run} holds no model, and neither does /models/llama/final")

    monkeypatch.setattr(Worker, "_ready_process", refuse)
    return world


def talkative(world: World, exp_id: str) -> None:
    """Let every file of a run that is shown name places of the server."""
    run, place = world.keeper.folder.base.run(exp_id), str(world.base / "_service" / "x.jsonl")
    error = f"{place}: gone, and so is /models/llama/config.json"
    text_at("status.json", json.dumps({"state": "failed", "step": 2, "error": error}))(run)
    text_at("memory_plan.json", json.dumps({"cache": place}))(run)
    text_at("answers/step-1.jsonl", json.dumps({"source": place}) + "\n")(run)
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": 2, "loss": 1.0, "note": f"from\n{place}"}) + "\n")
    unsent = run.path / "wandb" / "offline-run-20260101_000000-abc"
    unsent.mkdir(parents=True)
    (unsent / "run-abc.wandb").touch()
    trace = [
        "[rank0]: Traceback (most recent call last):",
        f'[rank0]:   File "{world.base}/_jobs/code/tree/trainer/a.py", line 3, in read',
        "[rank0]:     raise ValueError(place)",
        f"[rank0]: ValueError: {place}",
    ]
    for file in (run.attempt(1).logs, run.attempt(1).err):
        file.write_text("\n".join([f"reading {place}", *trace]) + "\n")


def requests(world: World, ids: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """(method, path) of every route of the server, for each of these values of its parameters."""
    for route in world.client.app.app.routes:  # type: ignore[attr-defined]
        for method in sorted(route.methods - {"HEAD"}):
            for query in QUERIES.get(route.path, ("",)):
                path = f"{route.path}{query}".replace(":path}", "}")
                needed = list(dict.fromkeys(re.findall(r"{(\w+)}", path)))
                for values in itertools.product(*(ids[name] for name in needed)):
                    yield method, path.format(**dict(zip(needed, values, strict=True)))


def test_no_answer_tells_a_tenant_of_places_tracebacks_or_others(
    tmp_path: Path, world: World, stub: Stub
) -> None:
    good = world.asked("anna")
    until_all_ended(world)
    stub.says("7")
    failed = world.asked("anna")
    others = [world.asked("ben"), world.asked("carl")]
    until_all_ended(world)
    talkative(world, failed["lathe"]["exp_id"])
    bad: list[dict[str, Any]] = []
    for name in POISONS:
        bad.append(world.asked("anna", KINDS[name]))
        world.poison(bad[-1], KINDS[name])
    withdraw(world.keeper)
    jobs = until_all_ended(world)
    tuned = jobs[good["id"]]["fine_tuned_model"]
    everything = [good, failed, *bad[:4], others[0]]
    session = f"sess-{'0' * 24}"
    ids = {
        "job_id": [job["id"] for job in everything],
        "exp_id": [job["lathe"]["exp_id"] for job in everything],
        "file_id": [job["training_file"] for job in everything] + jobs[good["id"]]["result_files"],
        "model": ["tiny-chat", tuned],
        "name": ["index.html", "page.js", "none"],
        "checkpoint": [f"{tuned}:ckpt-step-1", "none"],
        "permission_id": ["none"],
        "batch_id": ["batch_none"],
        "session": [session],
        "run": [f"{session}:train:0"],
        "sampler": [f"{session}:sample:0"],
        "kind": ["weights"],
        "file": ["adapter_config.json"],
    }
    bodies: list[Any] = [
        {},
        {"model": tuned, "input": "a"},
        {"model": tuned, "prompt": "a"},
        {"model": tuned, "messages": [{"role": "user", "content": "a"}]},
        {"model": "tiny-chat", "training_file": bad[2]["training_file"]},
        {"group": "none"},
    ]
    # what is deleted is deleted last
    asked = sorted(requests(world, ids), key=lambda one: one[0] == "DELETE")
    told: dict[int, int] = {}
    for who in ("rita", "anna", ""):
        headers = {"authorization": f"Bearer {world.tokens[who]}"} if who else {}
        for method, path in asked:
            is_of_one = any(value in path for values in ids.values() for value in values)
            for body in [None] if method != "POST" else bodies[:1] if is_of_one else bodies:
                answer = world.client.request(method, path, headers=headers, json=body)
                told[answer.status_code] = told.get(answer.status_code, 0) + 1
                texts = [answer.text, *answer.headers.values()]
                for text in texts:
                    case = f"{who} {method} {path}: {text}"
                    assert str(tmp_path) not in text, case
                    assert "/models/" not in text, case
                    assert not TOLD.search(text), case
                    if who != "rita":  # who reads everything sees whose it is
                        assert not re.search(r"\b(ben|carl|adam)\b", text), case
    assert told.keys() >= {200, 400, 401, 403, 404}
    assert len(asked) > 100

    folder = str(world.base / failed["lathe"]["exp_id"])
    rows = {row["exp_id"]: row for row in world.ask("GET", "/lathe/v1/status")}
    assert rows[failed["lathe"]["exp_id"]]["folder"] == folder  # the operator sees it
    own = {row["exp_id"]: row for row in world.ask("GET", "/lathe/v1/status", "anna")}
    assert own[failed["lathe"]["exp_id"]]["folder"] == failed["lathe"]["exp_id"]
    assert str(world.base) in rows[failed["lathe"]["exp_id"]]["sync_hint"]
    assert own[failed["lathe"]["exp_id"]]["sync_hint"] is None
    unread = bad[0]["lathe"]["exp_id"]
    assert f"{world.base}/{unread}/job.jsonl" in rows[unread]["reason"]
    assert own[unread]["reason"].startswith(f"its folder cannot be read: {unread}/job.jsonl")


def test_a_log_keeps_of_a_traceback_its_last_line() -> None:
    lines = [
        "step 1",
        "Traceback (most recent call last):",
        '  File "/opt/lathe/a.py", line 1, in f',
        "    f()",
        "    ^^^",
        "KeyError: 'x'",
        "",
        '[rank1]:   File "/opt/lathe/b.py", line 2, in g',  # the log was cut in its middle
        "[rank1]:     g()",
        "[rank1]: OSError: /data/rows.jsonl: gone",
        "  indented, and no traceback",
    ]
    assert list(log_of_tenant(lines, Path("/data"))) == [
        "step 1",
        "KeyError: 'x'",
        "",
        "[rank1]: OSError: rows.jsonl: gone",
        "  indented, and no traceback",
    ]


def test_absolute_paths_lose_their_folders_and_nothing_else_does() -> None:
    kept = "https://host/a/b and meta-llama/Llama at 1/2/3, w/o POST x:/a/b"
    assert without_places(kept) == kept
    text = "'/models/llama/x' in ~/cache/y, file:///srv/z and (/a/b): /root"
    wanted = "'.../x' in .../y, file://.../z and (.../b): /root"
    assert without_places(text) == wanted


def test_a_veil_clears_every_form_of_a_folder(tmp_path: Path) -> None:
    base = tmp_path / "ré sults"
    base.mkdir()
    link = tmp_path / "link"
    link.symlink_to(base)
    veil = Veil.of(link, [Path("/opt/lathe")])
    for place in (base, link):
        for is_ascii in (True, False):
            value = {
                "a": f"x\n{place}/b",
                "c": f"in {place}.",
                "d": "/opt/lathe/e",
                "f": f"{place}-2",
            }
            content = json.dumps(value, ensure_ascii=is_ascii).encode()
            cleared = json.loads(veil.clear(content))
            assert cleared == {"a": "x\nb", "c": "in ..", "d": ".../e", "f": f"{place}-2"}
