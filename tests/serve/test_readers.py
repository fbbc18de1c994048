"""Readers, a summariser and a verifier, tuned through the service for real and then asked."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

import exp_configs
from jobs.serve.offers import Offer
from tests.serve.conftest import Service, jsonl, own_queue, serving, until_status
from tests.wording import says

NAMES = ("red", "blue", "green", "black", "white", "grey")
QUESTIONS = [
    {
        "question": f"What colour is the {thing}?",
        "contexts": [f"The {thing} is {name}.", "Nothing else is known."],
        "answers": [name],
    }
    for thing in ("car", "house", "hat", "ship")
    for name in NAMES
]
ROWS = {
    "cross_attention": QUESTIONS,
    "fid": QUESTIONS,
    "summariser": [
        {"document": f"A {name} day. It was {name} all day.", "summary": f"A {name} day."}
        for name in NAMES * 4
    ],
    "vera": [
        {"statement": f"The {name} hat is {other}.", "label": name == other}
        for name in NAMES
        for other in NAMES
    ],
}
BASES = {
    "cross_attention": exp_configs.CROSSATTN_TINY,
    "fid": exp_configs.FID_TINY,
    "summariser": exp_configs.SUMMARISE_TINY,
    "vera": exp_configs.VERA_TINY,
}


def offer(task: str) -> Offer:
    train = {"global_batch": 8, "micro_batch": 8, "log_every": 1, "answers": None}
    train["best"] = "valid/loss" if task == "vera" else None
    schedule = {"warmup_steps": None, "warmup_ratio": 0.1}
    values = exp_configs.vary(
        BASES[task], tokenizer={"vocab_size": 512}, train=train, schedule=schedule
    )
    values["train"] = {key: one for key, one in values["train"].items() if key != "best_is"}
    return Offer(experiment=values, epochs=1, evaluations=1)


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Service, OpenAI, dict[str, str]]]:
    """A service, its client, and the tuned model of each task."""

    folder = tmp_path_factory.mktemp("readers")
    offers = {f"tiny-{task}": offer(task) for task in ROWS}
    with own_queue(folder / "queue"), serving(folder / "base", models=offers) as service:
        client = service.client()
        made: dict[str, Any] = {}
        for task, rows in ROWS.items():
            file = client.files.create(file=("rows.jsonl", jsonl(rows)), purpose="fine-tune")
            made[task] = client.fine_tuning.jobs.create(
                model=f"tiny-{task}", training_file=file.id, seed=1
            )
        ended = {
            task: until_status(client, job.id, "succeeded", "failed", within_s=500)
            for task, job in made.items()
        }
        assert {job["status"] for job in ended.values()} == {"succeeded"}, [
            job["error"] for job in ended.values()
        ]
        yield service, client, {task: job["fine_tuned_model"] for task, job in ended.items()}


@pytest.mark.long
@pytest.mark.parametrize("task", ["cross_attention", "fid"])
def test_a_reader_answers_from_contexts(models: Any, task: str) -> None:
    _, client, names = models
    more = {"contexts": ["The hat is red.", "Nothing else is known."]}
    asked: Any = {
        "model": names[task],
        "messages": [{"role": "user", "content": "What colour is the hat?"}],
    }
    whole = client.chat.completions.create(**asked, extra_body=more)
    parts = client.chat.completions.create(**asked, extra_body=more, stream=True)
    assert whole.choices[0].message.content == "".join(
        part.choices[0].delta.content or "" for part in parts
    )
    assert whole.usage.prompt_tokens > 5
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked)
    says("contexts_wanted", caught.value)
    # those that wait are answered together, each as if alone
    texts = [f"What colour is the {thing}?" for thing in ("car", "house", "hat")]

    def ask(text: str) -> str:
        done = client.completions.create(model=names[task], prompt=text, extra_body=more)
        return done.choices[0].text

    alone = [ask(text) for text in texts]
    with ThreadPoolExecutor(9) as pool:
        assert list(pool.map(ask, texts * 3)) == alone * 3


@pytest.mark.long
def test_a_summariser_sums_up_its_prompt(models: Any) -> None:
    _, client, names = models
    done = client.completions.create(model=names["summariser"], prompt="A red day. All day.")
    assert isinstance(done.choices[0].text, str)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            model=names["summariser"], prompt="A", extra_body={"contexts": ["b"]}
        )
    says("contexts_unread", caught.value)


@pytest.mark.long
def test_a_verifier_scores_statements(models: Any) -> None:
    service, client, names = models
    body = {"model": names["vera"], "statements": ["The red hat is red.", "The red hat is blue."]}
    answer = httpx2.post(f"{service.url}/lathe/v1/score", json=body, timeout=300)
    scores = answer.json()["scores"]
    assert len(scores) == 2
    assert all(0 <= score <= 1 for score in scores)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=names["vera"], prompt="a")
    says("makes_none", caught.value, things="texts")
