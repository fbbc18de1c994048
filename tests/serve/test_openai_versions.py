"""Jobs, checkpoints and batches through three versions of OpenAI's client, each unchanged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from filelock import FileLock

from tests.serve.answering import line, stand_in, tuned_model
from tests.serve.conftest import CHAT, Service, Stub, jsonl, own_queue, serving
from tests.serve.test_preference_jobs import preferences

HERE = Path(__file__).parent
# The oldest one asks for a transport without the argument that its successor dropped.
VERSIONS = {"1.40.8": ["httpx<0.28"], "2.54.0": []}
STEPS = ["supervised", "dpo", "checkpoints", "batches", "refusals"]


def client_python(number: str) -> Path:
    """The interpreter of an environment with one version of the client, which is made where it is
    not there yet: below LATHE_OPENAI_CLIENTS, else in this environment.
    """
    said = os.environ.get("LATHE_OPENAI_CLIENTS")
    place = Path(said or sys.prefix) / f"openai-{number}"
    interpreter = place / "bin" / "python"
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(place.with_suffix(".lock")):
        if (place / "made").is_file():
            return interpreter
        shutil.rmtree(place, ignore_errors=True)
        venv.create(place, with_pip=True)
        pip = [str(interpreter), "-m", "pip", "install", "-q", "--retries", "0"]
        done = subprocess.run(
            [*pip, f"openai=={number}", *VERSIONS[number]], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"pip cannot install openai {number}: {done.stderr.strip()[-300:]}")
        (place / "made").touch()
    return interpreter


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, str]]:
    folder = tmp_path_factory.mktemp("service")
    stub = Stub(folder / "stub")
    with pytest.MonkeyPatch.context() as patch:
        stand_in(folder / "standin", patch)
        with own_queue(folder / "queue"), serving(folder / "base", python=stub.python) as running:
            yield running, tuned_model(running)


@pytest.mark.long
@pytest.mark.parametrize("number", [*VERSIONS, "ours"])
def test_a_version_of_the_client_does_all_of_it_by_its_own_types(
    world: tuple[Service, str], number: str, tmp_path: Path
) -> None:
    running, model = world
    client = running.client()
    job = next(one for one in client.fine_tuning.jobs.list() if one.fine_tuned_model == model)
    files = {
        "rows": CHAT,
        "preferences": preferences(),
        "lines": [line(at, model, f"{at}") for at in range(3)],
    }
    for name, rows in files.items():
        (tmp_path / name).write_bytes(jsonl(rows))
    python = Path(sys.executable) if number == "ours" else client_python(number)
    words = [running.url, model, job.id, *(str(tmp_path / name) for name in files)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, HERE / "openai_jobs.py", *words], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split() == STEPS, done.stderr
    assert version("openai").startswith("3.54")
