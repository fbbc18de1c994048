"""Jobs, checkpoints and batches through three versions of OpenAI's client, each unchanged."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.environments import environment
from tests.serve.answering import line, stand_in, tuned_model
from tests.serve.conftest import CHAT, Service, Stub, jsonl, own_queue, serving
from tests.serve.test_preference_jobs import preferences

HERE = Path(__file__).parent
ENVIRONMENTS = ("openai-1", "openai-2", "openai-3")
STEPS = ["supervised", "dpo", "checkpoints", "batches", "refusals"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, str]]:
    folder = tmp_path_factory.mktemp("service")
    stub = Stub(folder / "stub")
    with pytest.MonkeyPatch.context() as patch:
        stand_in(folder / "standin", patch)
        with own_queue(folder / "queue"), serving(folder / "base", python=stub.python) as running:
            yield running, tuned_model(running)


@pytest.mark.long
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_version_of_the_client_does_all_of_it_by_its_own_types(
    world: tuple[Service, str], name: str, tmp_path: Path
) -> None:
    running, model = world
    client = running.client()
    job = next(one for one in client.fine_tuning.jobs.list() if one.fine_tuned_model == model)
    files = {
        "rows": CHAT,
        "preferences": preferences(),
        "lines": [line(at, model, f"{at}") for at in range(3)],
    }
    for file, rows in files.items():
        (tmp_path / file).write_bytes(jsonl(rows))
    python = environment(name) / "bin" / "python"
    words = [running.url, model, job.id, *(str(tmp_path / file) for file in files)]
    without = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python, HERE / "openai_jobs.py", *words], capture_output=True, text=True, env=without
    )
    assert done.stdout.split() == STEPS, done.stderr
