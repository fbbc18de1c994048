"""Jobs that learn from preferences (method dpo), asked by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from jobs.serve import offers
from jobs.serve.requests import CreateJob
from tests.serve.conftest import CHAT, Service, Stub, jsonl, own_queue, serving, until_status
from tests.wording import refused, says
from trainer import tasks
from trainer.errors import ConfigError


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def preferences(count: int = 10) -> list[dict[str, Any]]:
    return [
        {
            "input": {"messages": [{"role": "user", "content": f"What is {number}?"}]},
            "preferred_output": answer(f"It is {number}."),
            "non_preferred_output": answer("Who knows?"),
        }
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    stub = Stub(folder / "stub")
    with own_queue(folder / "queue"), serving(folder / "base", python=stub.python) as service:
        yield service


def uploaded(client: openai.OpenAI, rows: list[dict[str, Any]]) -> str:
    return client.files.create(file=("rows.jsonl", jsonl(rows)), purpose="fine-tune").id


def dpo(**numbers: Any) -> Any:
    return {"type": "dpo", "dpo": {"hyperparameters": numbers}}


def experiment_of(service: Service, job_id: str) -> dict[str, Any]:
    folder = service.keeper.folder.ticket(job_id)
    ticket = folder and folder.read()
    assert ticket is not None
    return ticket.experiment


def test_a_dpo_job_trains_the_offers_base_on_preferences_and_begins_with_an_earlier_job(
    running: Service,
) -> None:
    client = running.client()
    first = client.fine_tuning.jobs.create(
        model="tiny-chat", training_file=uploaded(client, CHAT), method={"type": "supervised"}
    )
    tuned = until_status(client, first.id, "succeeded")["fine_tuned_model"]
    file = uploaded(client, preferences())
    method = dpo(beta=0.3, batch_size=4, learning_rate_multiplier=0.5, n_epochs=2)
    job = client.fine_tuning.jobs.create(model="tiny-chat", training_file=file, method=method)
    assert job.method is not None
    assert job.method.type == "dpo"
    assert job.method.dpo is not None
    used = job.method.dpo.hyperparameters
    assert used is not None
    assert (used.beta, used.batch_size, used.n_epochs) == (0.3, 4, 2)
    made, offer = experiment_of(running, job.id), offers.read(None).models["tiny-chat"].experiment
    assert (made["task"], made["preference"]) == ("preference", {"loss": "dpo", "beta": 0.3})
    assert (made["base"], made["tokenizer"]) == (offer["base"], offer["tokenizer"])
    assert made["optim"]["lr"] == offer["optim"]["lr"] / 10 * 0.5
    ended = until_status(client, job.id, "succeeded", "failed")
    assert ended["status"] == "succeeded", ended["error"]
    folder = running.base / "_service/tickets" / job.id / "data"
    (row,) = [json.loads(line) for line in (folder / "valid.jsonl").read_text().splitlines()]
    assert set(row) == {"prompt", "chosen", "rejected"}
    later = client.fine_tuning.jobs.create(model=tuned, training_file=file, method=dpo())
    begun = experiment_of(running, later.id)
    assert begun["base"]["experiment"] == experiment_of(running, first.id)
    assert begun["preference"] == {"loss": "dpo"}
    assert (later.model, later.method and later.method.type) == (tuned, "dpo")
    until_status(client, later.id, "succeeded")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"preferred_output": answer("Who knows?")}, "got two equal answers"),
    ({"preferred_output": []}, "got preferred_output=[]"),
    ({"input": {"tools": []}}, "got input={'tools': []}"),
    ({"input": {"messages": [{"role": "human"}]}}, "got input.messages[0].content=None"),
    ({"non_preferred_output": [{"role": "x", "content": "a"}]}, "got non_preferred_output[0].role"),
    ({"non_preferred_output": None}, "got non_preferred_output=None"),
]


@pytest.mark.parametrize(("change", "told"), BAD)
def test_a_mistake_in_a_row_of_preferences_says_line_got_and_want(
    running: Service, change: dict[str, Any], told: str
) -> None:
    rows = preferences(3)
    rows[1] |= change
    client = running.client()
    file = client.files.create(file=("rows.jsonl", jsonl(rows)), purpose="fine-tune")
    assert file.status == "error"
    first = str(file.status_details).splitlines()[1]
    assert first.startswith(f"line 2: {told}")
    assert ", want " in first
    if "equal" in told:
        says("answers_equal", first, line=2)


def test_a_row_without_an_answer_is_of_no_kind(running: Service) -> None:
    rows = preferences(2)
    del rows[1]["non_preferred_output"]
    client = running.client()
    job = client.fine_tuning.jobs.create(
        model="tiny-chat", training_file=uploaded(client, rows), method=dpo()
    )
    error = until_status(client, job.id, "failed")["error"]
    says("row_keys_unknown", error["message"], line=2)


def test_an_offer_says_what_is_other_when_it_learns_from_preferences() -> None:
    offer = offers.read(None).models["tiny-chat"]
    own = {"optim": {"lr": 1e-6}, "preference": {"beta": 0.2}, "train": {"micro_batch": 1}}
    made = offers.offer_for(offer.model_copy(update={"dpo": own}), "m", "dpo").experiment
    assert made["optim"] == {**offer.experiment["optim"], "lr": 1e-6}
    assert (made["preference"], made["train"]["micro_batch"]) == ({"beta": 0.2}, 1)
    assert tasks.parse(made).task == "preference"
    with refused("method_not_taken", ConfigError, model="m", name="dpo"):
        offers.offer_for(offer.model_copy(update={"dpo": None}), "m", "dpo")
    taught = offer.model_copy(update={"experiment": made})
    assert offers.offer_for(taught, "m", "dpo") is taught
    with refused("dpo_alone", ConfigError, model="m"):
        offers.offer_for(taught, "m", "supervised")


def test_what_a_service_file_says_of_preferences_is_checked_when_it_is_read(tmp_path: Path) -> None:
    def read(text: str) -> None:
        path = tmp_path / "service.py"
        path.write_text(f"from service import TINY_CHAT\nSERVICE = {{'models': {{'m': {text}}}}}\n")
        offers.read(path)

    read("{'experiment': TINY_CHAT, 'dpo': None}")
    with refused("method_not_taken", ConfigError, model="m", name="dpo"):
        read("{'experiment': TINY_CHAT, 'dpo': {'optim': {'rate': 1.0}}}")
    taught = "{**TINY_CHAT, 'task': 'preference', 'preference': {'loss': 'ipo'}}"
    with refused("dpo_loss", ConfigError, loss="ipo"):
        read(f"{{'experiment': {taught}}}")


def test_a_request_of_before_has_the_digest_of_before() -> None:
    """A key that an earlier version has seen is the same job, not a conflict."""
    of_method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}}
    values = {"model": "m", "training_file": "f", "seed": 3, "method": of_method}
    digest = "b69bf57c2a478b42672359440be6567d6c8a18371f03d160e5bf58612daa660e"
    assert CreateJob.model_validate(values).digest() == digest
