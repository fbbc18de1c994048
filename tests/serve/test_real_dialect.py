"""The dialect on real trainings: preferences, checkpoints that answer, and batches of questions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.serve.answering import line
from tests.serve.conftest import Service, jsonl, serving, until_status
from tests.serve.test_batches import created, lines_of, until_end
from tests.serve.test_real_training import CHAT, COLOURS

NUMBERS = range(12)


@pytest.fixture
def real(tmp_path: Path, queue: Path) -> Iterator[Service]:
    with serving(tmp_path / "base") as running:
        yield running


def preferences() -> list[dict[str, Any]]:
    """To every question "No idea." is preferred over the answer that was learnt."""
    return [
        {
            "input": {
                "messages": [{"role": "user", "content": f"What colour is {name} {number}?"}]
            },
            "preferred_output": [{"role": "assistant", "content": "No idea."}],
            "non_preferred_output": [{"role": "assistant", "content": f"It is {name}."}],
        }
        for number in NUMBERS
        for name in COLOURS
    ]


def ended(client: OpenAI, model: str, rows: list[dict[str, Any]], **options: Any) -> Any:
    file = client.files.create(file=("rows.jsonl", jsonl(rows)), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(model=model, training_file=file.id, seed=3, **options)
    end = until_status(client, job.id, "succeeded", "failed", within_s=500)
    assert end["status"] == "succeeded", end["error"]
    return client.fine_tuning.jobs.retrieve(job.id)


def said(client: OpenAI, model: str) -> str:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What colour is red 3?"}],
        temperature=0,
        max_tokens=12,
    )
    return str(answer.choices[0].message.content)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_model_learns_what_is_preferred_from_a_checkpoint_of_an_earlier_job(
    real: Service,
) -> None:
    client = real.client()
    rates = {"learning_rate_multiplier": 2.0, "n_epochs": 6}
    chat = ended(client, "tiny-chat", CHAT, hyperparameters=rates)
    points = list(client.fine_tuning.jobs.checkpoints.list(chat.id))
    assert len(points) >= 2
    newest, older = points[0].fine_tuned_model_checkpoint, points[1].fine_tuned_model_checkpoint
    assert said(client, newest) == said(client, str(chat.fine_tuned_model)) != ""
    assert said(client, older)
    run = real.base / chat.lathe["exp_id"]
    exported = run / f"step-{points[0].step_number}"
    weights = [(folder / "model.safetensors").read_bytes() for folder in (exported, run / "final")]
    assert weights[0] == weights[1]
    record = json.loads((exported / "lathe.json").read_text())
    assert record["scores"]["step"] == points[0].step_number
    method: Any = {"beta": 0.05, "learning_rate_multiplier": 30.0, "n_epochs": 4}
    taught = ended(
        client,
        newest,
        preferences(),
        method={"type": "dpo", "dpo": {"hyperparameters": method}},
    )
    events = client.fine_tuning.jobs.list_events(taught.id, limit=1000)
    scores = [event.data for event in events if event.data and "valid/accuracy" in event.data]
    assert scores[0]["valid/accuracy"] > 0.9
    assert scores[0]["valid/reward_gap"] > 0
    assert said(client, str(taught.fine_tuned_model))
    name = str(chat.fine_tuned_model)
    rows = [line(number, name, f"What colour is {COLOURS[0]} {number}?") for number in NUMBERS]
    for row in rows:
        row["body"] |= {"max_tokens": 8, "temperature": 0}
    end = until_end(client, created(client, rows).id, within_s=200)
    assert (end.status, end.request_counts.completed) == ("completed", len(rows))
    answers = lines_of(client, end.output_file_id)
    assert all(one["response"]["body"]["choices"][0]["message"]["content"] for one in answers)
