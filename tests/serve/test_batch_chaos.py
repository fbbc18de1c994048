"""A server that is killed again and again answers every request of a batch once, and tells its end."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs.serve.batches.folder import ids_of_lines
from tests.serve.answering import line, stand_in, tuned_model
from tests.serve.conftest import Stub, jsonl, serving, wait_until
from tests.serve.test_batches import lines_of
from tests.serve.test_service_chaos import ROOT, KilledServer, free_port
from tests.serve.test_webhooks import SECRET, receiving

LINES, KILLS = 1500, 8
# Answers come from a stand-in, and what ended is told at once.
PROGRAM = """
import sys
from pathlib import Path
from jobs.serve.answers import workers
from jobs.serve.webhooks import sender
workers.PROJECT = Path(sys.argv.pop(1))
sender.LOOK_S, sender.PAUSES_S = 0.1, (0.2,)
from jobs.serve.app import program
program()
"""


@dataclass
class AnsweringServer(KilledServer):
    """A server whose models are stand-ins."""

    standin: Path = Path()
    config: Path = Path()

    def start(self) -> None:
        argv = [sys.executable, "-c", PROGRAM, str(self.standin), "-sb", str(self.base)]
        argv += ["--port", str(self.port), "--python_binary", str(self.python), "--allow-dirty"]
        argv += ["--service_config", str(self.config)]
        log = (self.base.parent / "server.log").open("ab")
        self.process = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_batch_survives_eight_kills_of_its_server(
    tmp_path: Path, stub: Stub, queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin = stand_in(tmp_path / "standin", monkeypatch)
    base = tmp_path / "base"
    with serving(base, python=stub.python) as running:
        model = tuned_model(running)
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    config = tmp_path / "service_of_test.py"
    with receiving() as hook:
        webhooks = [{"url": hook.url, "secret_file": str(secret)}]
        config.write_text(
            f"from service import SERVICE\nSERVICE = {{**SERVICE, 'webhooks': {webhooks!r}}}\n"
        )
        server = AnsweringServer(base, stub.python, free_port(), standin=standin.folder)
        server.config = config
        server.start()
        wait_until(server.is_up, bool, within_s=120)
        rows = [line(number, model, f"k{number}") for number in range(LINES)]
        file = server.client.files.create(file=("b.jsonl", jsonl(rows)), purpose="batch")
        batch = server.client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        output = base / "_service/batches" / batch.id / "output.jsonl"
        chance, before = random.Random(5), 0
        with standin.slowed():
            for _ in range(KILLS):
                wait_until(lambda before=before: num_answers(output) > before, bool, within_s=120)
                time.sleep(chance.uniform(0.0, 0.3))
                server.kill()
                before = len(ids_of_lines(output)) if output.exists() else LINES
                server.start()
        assert before < LINES, "each kill came in the middle"
        wait_until(server.is_up, bool, within_s=120)
        end = wait_until(
            lambda: server.client.batches.retrieve(batch.id),
            lambda one: one.status == "completed",
            within_s=300,
        )
        wait_until(hook.told, bool, within_s=60)
        answers = lines_of(server.client, end.output_file_id)
        server.kill()
    assert server.kills == KILLS + 1
    assert end.request_counts is not None
    assert (end.request_counts.completed, end.request_counts.failed) == (LINES, 0)
    names = [one["custom_id"] for one in answers]
    assert sorted(names) == sorted(row["custom_id"] for row in rows)
    for one in answers:
        content = one["response"]["body"]["choices"][0]["message"]["content"]
        assert content == f"you said k{one['custom_id'].removeprefix('row-')}"
    assert {*hook.told()} == {f"batch.completed {batch.id}"}
    assert len({*hook.ids()}) == 1


def num_answers(output: Path) -> int:
    """How many lines there are; all of them once the file has moved to its place."""
    return output.read_bytes().count(b"\n") if output.exists() else 0
