"""Clients as people have them, unmodified, against a server that trains and answers: what works, and
what is refused by name, is the table of docs/clients.md (LATHE_WRITE_PAGES=1 writes it).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exp_configs import vary
from jobs.serve.offers import Offer
from service import TINY_CHAT, TINY_RETRIEVER
from tests.clients import table
from tests.clients.environments import environment
from tests.serve.conftest import jsonl, own_queue, serving, until_status

pytest.importorskip("llguidance", reason="the extra schema is not installed")
PROGRAMS = Path(__file__).with_name("programs")
TEMPLATE = Path(__file__).with_name("hermes.jinja")
# By what the page calls a client: its environment, and the program that uses it.
CLIENTS = {
    "openai 3.54": ("openai-3", "openai_python.py"),
    "openai 2.54": ("openai-2", "openai_python.py"),
    "openai 1.40": ("openai-1", "openai_python.py"),
    "openai 7 (node)": ("node", "openai_node.mjs"),
    "LangChain 1.7": ("openai-3", "langchain_calls.py"),
    "LlamaIndex 0.8": ("openai-2", "llamaindex_calls.py"),
    "LiteLLM 1.110": ("openai-2", "litellm_calls.py"),
    "DSPy 3.4": ("openai-2", "dspy_calls.py"),
    "instructor 1.17": ("openai-2", "instructor_calls.py"),
    "wandb 0.31": ("openai-3", "wandb_sync.py"),
}
COLOURS = ("red", "blue", "green", "black")
ROWS = [
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"What colour is {name} {number}?"},
            {"role": "assistant", "content": f"It is {name}."},
        ]
    }
    for number in range(12)
    for name in COLOURS
]
TRIPLES = [
    {"query": f"which is {name}", "positive": f"a {name} thing", "negative": f"no {other} thing"}
    for name in COLOURS
    for other in COLOURS
    if name != other
]


def offers() -> dict[str, Offer]:
    """A chat model whose template knows tools and whose positions suffice for long prompts, and a
    retriever.
    """
    config = {**TINY_CHAT["base"]["config"], "n_positions": 2048}
    data = {"chat_template": str(TEMPLATE), "max_tokens": 1024}
    chat = vary(TINY_CHAT, base={"config": config}, data=data)
    return {
        "tiny-chat": Offer(experiment=chat, epochs=20),
        "tiny-retriever": Offer(experiment=TINY_RETRIEVER, epochs=2),
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the programs are told: the server, its tuned models, and a file of rows."""
    folder = tmp_path_factory.mktemp("clients")
    with own_queue(folder / "queue"), serving(folder / "base", models=offers()) as service:
        client = service.client()
        jobs: dict[str, Any] = {}
        for model, rows in (("tiny-chat", ROWS), ("tiny-retriever", TRIPLES)):
            file = client.files.create(file=("rows.jsonl", jsonl(rows)), purpose="fine-tune")
            jobs[model] = client.fine_tuning.jobs.create(model=model, training_file=file.id, seed=1)
        done = {
            model: until_status(client, job.id, "succeeded", "failed", within_s=500)
            for model, job in jobs.items()
        }
        assert {one["status"] for one in done.values()} == {"succeeded"}
        few = folder / "rows.jsonl"
        few.write_bytes(jsonl(ROWS[:8]))
        yield {
            "url": f"{service.url}/v1",
            "chat": done["tiny-chat"]["fine_tuned_model"],
            "vectors": done["tiny-retriever"]["fine_tuned_model"],
            "job": jobs["tiny-chat"].id,
            "model": "tiny-chat",
            "rows": str(few),
        }


def results_of(client: str, world: dict[str, Any], folder: Path) -> dict[str, str]:
    """By call, how it ended: "works", "refused: why" or "fails: why"."""
    name, program = CLIENTS[client]
    home = environment(name)
    path, words = PROGRAMS / program, [str(home / "bin" / "python")]
    if name == "node":
        words, path = ["node"], home / program  # it looks for packages beside the program
        shutil.copy(PROGRAMS / program, path)
    own = {
        **{"OPENAI_BASE_URL": world["url"], "OPENAI_API_KEY": "none", "HOME": str(folder)},
        **{"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "DSPY_CACHEDIR": str(folder)},
        **{"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONDONTWRITEBYTECODE": "1"},
    }
    own |= {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
    done = subprocess.run(
        [*words, str(path), json.dumps(world)],
        cwd=folder,
        env=own,
        capture_output=True,
        text=True,
        timeout=900,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"call"')]
    assert done.returncode == 0, done.stderr[-3000:]
    return {one["call"]: one["result"] for one in map(json.loads, lines)}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_does_what_the_page_says(
    client: str, world: dict[str, Any], tmp_path: Path
) -> None:
    results = results_of(client, world, tmp_path)
    assert results
    failed = {call: one for call, one in results.items() if one.startswith("fails")}
    assert not failed
    told = {call: one.partition(":")[0] for call, one in results.items()}
    reasons: dict[str, str] = {}
    if client == next(iter(CLIENTS)):
        found = {call: one for call, one in results.items() if one.startswith("refused")}
        reasons = {call: without_names(one) for call, one in found.items()}
    if os.environ.get("LATHE_WRITE_PAGES"):
        table.write(client, told, reasons, [*CLIENTS])
    columns, why = table.read()
    assert columns[client] == told
    assert {call: why.get(call) for call in reasons} == reasons


def without_names(reason: str) -> str:
    """A refusal as anybody gets it: without the name of the model that was just trained."""
    said = re.sub(r"^refused: \w+: (Error code: \d+ - )?", "", reason)
    return re.sub(r"ft:[\w:-]+", "MODEL", said)
