"""The two models that the repository offers, trained for real through OpenAI's client."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.serve.conftest import Service, jsonl, serving, until_status, wait_until
from tests.wording import says

COLOURS = ("red", "blue", "green", "black")
CHAT = [
    {
        "messages": [
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


@pytest.fixture
def real(tmp_path: Path, queue: Path) -> Iterator[Service]:
    with serving(tmp_path / "base") as running:
        yield running


def tuned(client: OpenAI, model: str, rows: list[dict[str, Any]], **options: Any) -> Any:
    """A job that was just made."""
    file = client.files.create(file=("rows.jsonl", jsonl(rows)), purpose="fine-tune")
    return client.fine_tuning.jobs.create(model=model, training_file=file.id, seed=3, **options)


def run_of(service: Service, job: Any) -> Path:
    return service.base / job.lathe["exp_id"]


def losses(client: OpenAI, job_id: str) -> list[float]:
    events = client.fine_tuning.jobs.list_events(job_id, limit=1000)
    found = [event.data for event in events if event.type == "metrics"]
    return [data["train_loss"] for data in reversed(found) if "train_loss" in data]


@pytest.mark.long
def test_the_tiny_chat_model_learns_and_everything_of_it_is_there(real: Service) -> None:
    client = real.client()
    made = tuned(client, "tiny-chat", CHAT, hyperparameters={"learning_rate_multiplier": 2.0})
    done = until_status(client, made.id, "succeeded", "failed", within_s=400)
    assert done["status"] == "succeeded", done["error"]
    told = losses(client, made.id)
    assert (
        len(told) == done["lathe"]["total"] == 16
    )  # 3 epochs of 41 rows, 8 at a time; 7 are held out
    assert told[-1] < told[0] - 1
    points = list(client.fine_tuning.jobs.checkpoints.list(made.id))
    assert points[0].step_number == 16
    assert points[0].metrics.valid_loss is not None
    assert (run_of(real, made) / "final" / "model.safetensors").exists()
    assert done["trained_tokens"] > 0
    steps = client.files.content(done["result_files"][0]).text.splitlines()
    assert len(steps) == 17
    it_answers(client, done["fine_tuned_model"])
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=done["fine_tuned_model"], input="a")
    says("makes_none", caught.value, things="vectors")


def it_answers(client: OpenAI, model: str) -> None:
    """Whole and streamed, as a chat and as a text, the same."""
    asked: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 12}
    messages: Any = [{"role": "user", "content": "What colour is red 1?"}]
    whole = client.chat.completions.create(messages=messages, **asked)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage is not None
    assert whole.choices[0].finish_reason == (
        "length" if whole.usage.completion_tokens == 12 else "stop"
    )
    chunks = list(client.chat.completions.create(messages=messages, stream=True, **asked))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    prompt = "User: What colour is red 1?\nAssistant:"
    plain = client.completions.create(prompt=prompt, **asked)
    assert plain.choices[0].text.removeprefix(" ") == text
    cut = client.completions.create(prompt=prompt, stop=text[1:3], **asked)
    assert cut.choices[0].text == plain.choices[0].text.partition(text[1:3])[0]
    drawn = {"model": model, "prompt": prompt, "seed": 5, "max_tokens": 12}

    def draw(_: int) -> str:
        return client.completions.create(**drawn).choices[0].text

    with ThreadPoolExecutor(5) as pool:  # those that wait are answered together, each as if alone
        assert set(pool.map(draw, range(5))) == {draw(0)}


@pytest.mark.long
def test_the_tiny_retriever_learns(real: Service) -> None:
    client = real.client()
    made = tuned(client, "tiny-retriever", TRIPLES, hyperparameters={"n_epochs": 8})
    done = until_status(client, made.id, "succeeded", "failed", within_s=400)
    assert done["status"] == "succeeded", done["error"]
    told = losses(client, made.id)
    assert told[-1] < told[0]
    assert (run_of(real, made) / "final").is_dir()
    asked: dict[str, Any] = {"model": done["fine_tuned_model"], "input": ["which is red", "a"]}
    plain = client.embeddings.create(encoding_format="float", **asked)
    # base64, which a client without a wish asks for, is no list of numbers to a strict one
    usual = OpenAI(base_url=f"{real.url}/v1", api_key="none")
    vectors = [one.embedding for one in usual.embeddings.create(**asked).data]
    assert vectors == [pytest.approx(one.embedding, rel=1e-6) for one in plain.data]
    assert math.hypot(*vectors[0]) == pytest.approx(1, rel=1e-5)  # its offer normalises
    assert plain.usage.prompt_tokens > 2
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=done["fine_tuned_model"], prompt="a")
    says("makes_none", caught.value, things="texts")


@pytest.mark.long
def test_a_paused_job_goes_on_bit_for_bit(real: Service) -> None:
    client = real.client()
    options: dict[str, Any] = {"hyperparameters": {"n_epochs": 100}}
    whole = tuned(client, "tiny-chat", CHAT, **options)
    until_status(client, whole.id, "succeeded", within_s=500)
    parted = tuned(client, "tiny-chat", CHAT, **options)
    jobs = client.fine_tuning.jobs
    wait_until(
        lambda: jobs.retrieve(parted.id).lathe["step"] or 0, lambda step: step > 5, within_s=200
    )
    jobs.pause(parted.id)
    until_status(client, parted.id, "queued", "succeeded", within_s=200)
    assert jobs.retrieve(parted.id).lathe["state"] == "paused"
    assert not (run_of(real, parted) / "final").exists()
    jobs.resume(parted.id)
    until_status(client, parted.id, "succeeded", within_s=500)
    assert jobs.retrieve(parted.id).lathe["attempts"] == 2
    files = [run_of(real, job) / "final" / "model.safetensors" for job in (whole, parted)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert losses(client, whole.id) == losses(client, parted.id)
