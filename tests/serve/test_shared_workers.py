"""Driven runs on one base share a worker: the service chooses the host, and moves its guests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.job_state import ENDED
from jobs.serve.offers import Offer
from jobs.serve.steps.experiments import Driven
from service import TINY_CHAT
from tests.serve.conftest import Service, serving, wait_until
from tests.serve.driven_stub import DrivenStub
from tests.serve.driving import Driver, driver
from trainer.errors import EXIT_OK, EXIT_PAUSED
from trainer.operations.guests import Guests


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[DrivenStub]:
    """Workers that take up no guests: the test does it in their place."""
    with DrivenStub(tmp_path / "stub") as stand_in:
        yield stand_in


def offers(together: int, **driven: Any) -> dict[str, Offer]:
    own = Driven(max_tokens=64, together=together, **driven)
    return {"tiny-chat": Offer(experiment=TINY_CHAT, driven=own)}


def begin(client: Driver, service: Service, session: str, number: int) -> str:
    """Begin a run, and return the id of its experiment."""
    answer = client.post("create_model", client.create(session, number))
    assert answer.status_code == 200, answer.text
    facts = service.base / "_service/steps" / session / f"train-{number}.json"
    return json.loads(facts.read_text())["exp_id"]


def row_of(service: Service, exp_id: str) -> Any:
    return service.keeper.reader.rows([exp_id]).get(exp_id)


def state_of(service: Service, exp_id: str) -> str:
    row = row_of(service, exp_id)
    return "unsent" if row is None else row.state


def guest_of(service: Service, host: str, exp_id: str) -> str:
    """The token with which a run waits for a host, as soon as it does."""
    guests = Guests.of(service.base / host)
    found = wait_until(
        lambda: [one["token"] for one in guests.arrivals() if one["id"] == exp_id],
        lambda tokens: bool(tokens),
    )
    return found[0]


def test_runs_of_an_offer_share_workers_and_go_on_when_a_host_ends(
    tmp_path: Path, queue: Path, stub: DrivenStub
) -> None:
    with serving(tmp_path / "base", python=stub.python, models=offers(3)) as service:
        client = driver(service)
        session, other = client.session(), client.session()
        first = begin(client, service, session, 0)
        wait_until(stub.starts, lambda starts: starts == [first])
        second, third = (begin(client, service, other, number) for number in (0, 1))
        guests = Guests.of(service.base / first)
        tokens = [guest_of(service, first, name) for name in (second, third)]
        fourth = begin(client, service, other, 2)  # the worker is full
        wait_until(stub.starts, lambda starts: starts == [first, fourth])
        assert state_of(service, second) == "queued"
        for token in tokens:
            guests.let_in(token)
        wait_until(lambda: state_of(service, second), lambda state: state == "running")
        guests.let_out(tokens[1], EXIT_OK)
        wait_until(lambda: state_of(service, third), lambda state: state == "succeeded")
        client.finish(f"{session}:train:0")  # the host ends
        wait_until(lambda: state_of(service, first), lambda state: state == "succeeded")
        guest_of(service, fourth, second)
        assert stub.starts() == [first, fourth]
        assert [one.state for one in row_of(service, second).history][:1] == ["preempted"]


def test_a_guest_that_was_put_aside_or_cancelled_is_one_no_more(
    tmp_path: Path, queue: Path, stub: DrivenStub
) -> None:
    with serving(tmp_path / "base", python=stub.python, models=offers(8)) as service:
        client = driver(service)
        session, other = client.session(), client.session()
        host = begin(client, service, session, 0)
        wait_until(stub.starts, lambda starts: starts == [host])
        guests = Guests.of(service.base / host)
        aside, lost = (begin(client, service, other, number) for number in (0, 1))
        token = guest_of(service, host, aside)
        guests.let_in(token)
        guests.let_out(token, EXIT_PAUSED)
        again = wait_until(
            lambda: [one["token"] for one in guests.arrivals() if one["id"] == aside],
            lambda tokens: tokens not in ([], [token]),
        )  # its `create` has no result: it is woken at once, and asks the host anew
        assert again == [token[:-1] + "2"]
        waiting = guest_of(service, host, lost)
        row = row_of(service, lost)
        service.keeper.backend_of(row.backend).cancel(row.job_id)
        assert waiting in guests.stops()
        wait_until(lambda: len(row_of(service, lost).history), lambda count: count == 2)
        assert row_of(service, lost).history[0].state in ENDED
