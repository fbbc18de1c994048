"""A stand-in for the processes that answer for models, and a service with a tuned model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from jobs.serve import exported_step
from jobs.serve.answers import workers
from tests.serve.conftest import CHAT, Service, jsonl, until_status

# It answers with the last message and notes each question in `asked`. "die" ends the process, and
# "wait" is answered when the file `go` is there; while the file `slow` is there, questions that are
# asked together take a tenth of a second.
STANDIN = """
import json, os, sys, time

def say(**piece):
    print(json.dumps(piece), flush=True)

with open("asked", "a") as file:
    file.write("start " + sys.argv[3] + "\\n")
if sys.argv[3].startswith("step-"):  # of which it makes a model
    folder = os.path.join(sys.argv[1], sys.argv[3])
    os.makedirs(folder, exist_ok=True)
    for name in ("config.json", "lathe.json"):
        open(os.path.join(folder, name), "w").write("{}")
say(ready=True)
for line in sys.stdin:
    many = json.loads(line)["many"]
    said = [one["messages"][-1]["content"] if "messages" in one else "" for one in many]
    others = [(one.get("prompts") or one.get("texts") or [""])[0] for one in many]
    texts = [text or other for text, other in zip(said, others)]
    with open("asked", "a") as file:
        file.write("".join(text + "\\n" for text in texts))
    if "die" in texts:
        sys.exit(1)
    while "wait" in texts and not os.path.exists("go"):
        time.sleep(0.01)
    if os.path.exists("slow"):
        time.sleep(0.1)
    for of, text in enumerate(texts):
        if "texts" in many[of]:
            say(of=of, vectors=["AACAPwAAAEA="], tokens=1)  # [1.0, 2.0] in fp32
            continue
        say(of=of, text="you said " + text)
        say(of=of, finish="stop", prompt_tokens=1, tokens=3)
    say(done=True)
"""


@dataclass(frozen=True)
class StandIn:
    """The folder in which `python -m trainer.commands.answer` is a stand-in."""

    folder: Path

    def asked(self) -> list[str]:
        """The questions so far."""
        path = self.folder / "asked"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if not line.startswith("start ")]

    def starts(self) -> list[str]:
        """Which model of a run each process had."""
        path = self.folder / "asked"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.removeprefix("start ") for line in lines if line.startswith("start ")]

    @contextmanager
    def slowed(self) -> Iterator[None]:
        """Inside, no batch is done before somebody could look."""
        (self.folder / "slow").touch()
        yield
        (self.folder / "slow").unlink()

    def go(self) -> None:
        """Answer what waits."""
        (self.folder / "go").touch()


def stand_in(folder: Path, patch: pytest.MonkeyPatch) -> StandIn:
    """Answer for every model by a stand-in."""
    package = folder / "trainer" / "commands"
    package.mkdir(parents=True)
    (package / "answer.py").write_text(STANDIN)
    for one in (package, package.parent):
        (one / "__init__.py").touch()  # or a trainer elsewhere on the path comes first
    for module in (workers, exported_step):
        patch.setattr(module, "PROJECT", folder)
    return StandIn(folder)


def tuned_model(service: Service, client: OpenAI | None = None) -> str:
    """The name of a model that a job has just tuned."""
    client = client or service.client()
    file = client.files.create(file=("chat.jsonl", jsonl(CHAT)), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(model="tiny-chat", training_file=file.id)
    until_status(client, job.id, "succeeded")
    return str(client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model)


def line(number: int, model: str, text: str, **changes: Any) -> dict[str, Any]:
    """A line of a batch."""
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    values = {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions"}
    return {**values, "body": body, **changes}
