"""Webhooks: what ended is told once it ended, signed, again until it is taken, and to nobody else."""

from __future__ import annotations

import base64
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from openai import InvalidWebhookSignatureError, OpenAI

from jobs.serve import offers
from jobs.serve.webhooks import sender
from jobs.serve.webhooks.endpoints import EVERY_EVENT, Webhook
from jobs.serve.webhooks.outbox import Outbox, WebhookEvent, WebhookMessage
from jobs.serve.webhooks.sender import after_try
from tests.serve.answering import line, stand_in, tuned_model
from tests.serve.conftest import CHAT, Service, Stub, jsonl, serving, until_status, wait_until
from tests.serve.test_batches import created, until_end
from tests.wording import refused
from trainer.errors import ConfigError

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()


@dataclass
class Receiver:
    """An address. status: of its answers."""

    url: str
    status: int = 200
    messages: list[tuple[dict[str, str], str]] = field(default_factory=list)

    def told(self) -> list[str]:
        """The events that came, as OpenAI's client reads them; it refuses a wrong signature."""
        client = OpenAI(api_key="none", webhook_secret=SECRET)
        events = [client.webhooks.unwrap(body, headers) for headers, body in self.messages]
        assert all(event.object == "event" for event in events)
        return [f"{event.type} {event.data.id}" for event in events]

    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in self.messages]


@contextmanager
def receiving(status: int = 200, moved_to: str = "") -> Iterator[Receiver]:
    receiver = Receiver("", status)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            headers = {name.lower(): value for name, value in self.headers.items()}
            receiver.messages.append((headers, body))
            self.send_response(receiver.status)
            if moved_to:
                self.send_header("location", moved_to)
            self.send_header("content-length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            receiver.messages.append(({}, "GET"))

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}/hook?of=lathe"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


DEAD = ("webhooks[2]", "webhooks[3]")


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "LOOK_S", 0.05)
    monkeypatch.setattr(sender, "PAUSES_S", (0.1,))


def job_of(service: Service) -> Any:
    client = service.client()
    file = client.files.create(file=("chat.jsonl", jsonl(CHAT)), purpose="fine-tune")
    return client.fine_tuning.jobs.create(model="tiny-chat", training_file=file.id)


@pytest.mark.long
def test_jobs_and_batches_that_ended_are_told_and_the_client_verifies_them(
    tmp_path: Path,
    stub: Stub,
    queue: Path,
    secret_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(tmp_path / "standin", monkeypatch)
    base = tmp_path / "base"
    with serving(base, python=stub.python) as running:  # what ended before is not told
        tuned_model(running)
    time.sleep(1.1)  # times of events are whole seconds
    with receiving() as all_of, receiving() as failures, receiving(302, "") as gone:
        gone.status = 500
        webhooks = [
            Webhook(url=all_of.url, secret_file=str(secret_file)),
            Webhook(
                url=failures.url, secret_file=str(secret_file), events=["fine_tuning.job.failed"]
            ),
            Webhook(url=gone.url, secret_file=str(secret_file)),
            Webhook(url="http://127.0.0.1:9/", secret_file=str(secret_file)),
        ]
        with serving(base, python=stub.python, webhooks=webhooks) as running:
            client = running.client()
            model = tuned_model(running)
            stub.says("9")
            bad = job_of(running)
            until_status(client, bad.id, "failed")
            batch = created(client, [line(0, model, "a")])
            until_end(client, batch.id)
            wait_until(all_of.told, lambda told: len(told) >= 3)
            good = next(job for job in client.fine_tuning.jobs.list() if job.status == "succeeded")
            assert sorted(all_of.told()) == sorted(
                [
                    f"fine_tuning.job.succeeded {good.id}",
                    f"fine_tuning.job.failed {bad.id}",
                    f"batch.completed {batch.id}",
                ]
            )
            wait_until(failures.told, bool)
            wait_until(gone.ids, lambda ids: len(ids) > 6)
            failing = running.keeper.reader.failing
            wait_until(lambda: {*failing.reasons}, lambda told: told == {*DEAD})
        assert failures.told() == [f"fine_tuning.job.failed {bad.id}"]
        assert len({*gone.ids()}) == 3  # each is repeated with its own id
        gone.status = 200
        before = len(gone.ids())
        with serving(base, python=stub.python, webhooks=webhooks) as running:
            wait_until(gone.ids, lambda ids: len(ids) >= before + 3)
            time.sleep(0.3)
        assert {*gone.ids()[before:]} == {*gone.ids()[:before]}
        assert len(gone.ids()) == before + 3
        assert len(all_of.told()) == 3


def test_a_redirect_is_not_followed_and_no_proxy_is_asked(
    secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as other, receiving() as proxy, receiving(307, other.url) as listed:
        monkeypatch.setenv("http_proxy", proxy.url)
        webhook = Webhook(url=listed.url, secret_file=str(secret_file))
        error = sender.post(webhook, message())
        assert error is not None
        assert "307" in error
        assert len(listed.messages) == 1
        assert not other.messages
        assert not proxy.messages


def message(**changes: Any) -> WebhookMessage:
    values: dict[str, Any] = {
        "id": "wh_1",
        "created_at": "2026-01-01T00:00:00.000+00:00",
        "event_id": "evt_1",
        "event": "batch.completed",
        "object_id": "batch_1",
        "ended_at": 1767225600,
    }
    return WebhookMessage(**{**values, **changes})


def test_a_message_is_one_that_the_client_verifies(secret_file: Path) -> None:
    with receiving() as listed:
        assert sender.post(Webhook(url=listed.url, secret_file=str(secret_file)), message()) is None
        assert listed.told() == ["batch.completed batch_1"]
        assert listed.ids() == ["wh_1"]


def test_a_signature_of_another_secret_is_refused_by_the_client(secret_file: Path) -> None:
    with receiving() as listed:
        secret_file.write_text("whsec_" + base64.b64encode(b"x" * 32).decode())
        assert sender.post(Webhook(url=listed.url, secret_file=str(secret_file)), message()) is None
        with pytest.raises(InvalidWebhookSignatureError):
            listed.told()


def test_tries_are_further_and_further_apart_and_end_after_three_days(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender, "PAUSES_S", (5.0, 30.0, 3600.0))
    one = message()
    start = sender.seconds(one.created_at)
    pauses = []
    for _ in range(5):
        one = after_try(one, "no answer", start)
        pauses.append(one.after_s - start)
    assert pauses == [pytest.approx(pause, rel=0.11) for pause in (5, 30, 3600, 3600, 3600)]
    assert (one.tries, one.error, one.given_up_at) == (5, "no answer", None)
    assert after_try(one, "no answer", start + 73 * 3600).given_up_at is not None
    arrived = after_try(one, None, start + 73 * 3600)
    assert (arrived.given_up_at, arrived.error) == (None, None)
    assert arrived.arrived_at is not None


def test_a_message_is_written_once_whatever_comes_of_it(tmp_path: Path) -> None:
    outbox, ending = Outbox(tmp_path / "box"), WebhookEvent("batch.completed", "batch_1", 5)
    outbox.make()
    assert outbox.since(["batch.failed"], 3) == {"batch.failed": 3}
    assert outbox.since(["batch.failed"], 9) == {"batch.failed": 3}
    outbox.add(ending)
    outbox.add(ending)
    ((one,), _) = outbox.messages()
    outbox.write(after_try(one, None, 6.0))
    outbox.add(ending)
    assert outbox.messages() == ([], True)
    with outbox.alone() as is_ours, outbox.alone() as is_theirs:
        assert (is_ours, is_theirs) == (True, False)
    outbox.add(WebhookEvent("batch.completed", "batch_1", 6))
    assert len(outbox.messages()[0]) == 1


def test_an_event_that_is_added_to_an_address_is_told_from_then_on(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "box")
    outbox.make()
    outbox.since(["batch.failed"], 3)
    assert outbox.since(["batch.failed", "batch.expired"], 9) == {
        "batch.failed": 3,
        "batch.expired": 9,
    }
    assert outbox.since(["batch.expired"], 12) == {"batch.expired": 9}


def test_a_message_that_is_broken_on_the_disk_is_written_again_and_stops_no_other(
    tmp_path: Path, secret_file: Path
) -> None:
    endings = [WebhookEvent("batch.completed", f"batch_{number}", 5) for number in range(2)]

    @dataclass
    class Endings:
        looks: int = 0

        def new(self) -> list[WebhookEvent]:
            self.looks += 1
            return endings if self.looks == 1 else []

        def forget(self) -> None:
            self.looks = 0

    with receiving() as listed:
        webhook = Webhook(url=listed.url, secret_file=str(secret_file))
        outbox = Outbox(tmp_path / "box")
        outbox.make()
        outbox.since(webhook.events, 0)
        outbox.add(endings[0])
        (broken,) = outbox.waiting.iterdir()
        broken.write_text('{"id": ')
        one = sender.WebhookSender("webhooks[0]", webhook, outbox, Endings())  # type: ignore[arg-type]
        assert [one.turn() for _ in range(3)] == [None] * 3
        assert sorted(listed.told()) == ["batch.completed batch_0", "batch.completed batch_1"]


def test_an_address_is_named_as_long_as_one_message_has_not_arrived(
    tmp_path: Path, secret_file: Path
) -> None:
    with receiving() as listed:
        webhook = Webhook(url=listed.url, secret_file=str(secret_file))
        outbox = Outbox(tmp_path / "box")
        outbox.make()
        one = sender.WebhookSender("webhooks[0]", webhook, outbox, None)  # type: ignore[arg-type]
        late = message(error="no answer", after_s=time.time() + 60)
        outbox.write(late)
        assert one._send([late, message(id="wh_2")]) == "no answer"
        assert listed.ids() == ["wh_2"]


def test_a_secret_that_others_may_read_or_that_is_none_is_refused(
    secret_file: Path, tmp_path: Path
) -> None:
    webhook = Webhook(url="https://a.org/x", secret_file=str(secret_file))
    assert len(webhook.secret()) == 32
    secret_file.chmod(0o644)
    with refused("webhook_secret_mode", ConfigError, mode="0o644"):
        webhook.secret()
    secret_file.chmod(0o600)
    for text in ("whsec_c2hvcnQ=", "0123456789abcdef0123456789abcdef", "whsec_%%%"):
        secret_file.write_text(text)
        with refused("webhook_secret_none", ConfigError):
            webhook.secret()
    with refused("webhook_secret_unreadable", ConfigError, reason=re.compile("[^.]*No such.*")):
        Webhook(url="https://a.org/x", secret_file=str(tmp_path / "none")).secret()


@pytest.mark.parametrize(
    "entry",
    [
        {"url": "ftp://a.org/"},
        {"url": "https:///x"},
        {"url": "https://me:word@a.org/"},
        {"url": "https://a.org:99999/"},
        {"url": f"https://{'a' * 64}.org/"},
        {"url": "https://a.org/a b"},
        {"url": "https://a.org/\n"},
        {"url": "https://\u00fc.org/"},
        {"events": ["job.done"]},
        {"events": []},
    ],
)
def test_a_webhook_of_a_service_file_is_checked(entry: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "service.py"
    webhook = {"url": "https://a.org/", "secret_file": "secret", **entry}
    path.write_text(f"SERVICE = {{'models': {{}}, 'webhooks': [{webhook!r}]}}\n")
    (key,) = entry
    with pytest.raises(ConfigError) as caught:
        offers.read(path)
    assert f"webhooks[0].{key}" in str(caught.value) or f"webhooks.0.{key}" in str(caught.value)


def test_an_address_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "service.py"
    webhooks = [
        {"url": "https://a.org/", "secret_file": "secret", "events": [event]}
        for event in ("batch.failed", "batch.expired")
    ]
    path.write_text(f"SERVICE = {{'models': {{}}, 'webhooks': {webhooks!r}}}\n")
    with refused("webhook_twice", ConfigError):
        offers.read(path)


def test_every_event_is_one_that_openai_knows() -> None:
    from openai.types.webhooks import unwrap_webhook_event

    known = str(unwrap_webhook_event.UnwrapWebhookEvent)
    for event in EVERY_EVENT:
        name = "".join(part.title() for part in re.split(r"[._]", event))
        assert f"{name}WebhookEvent" in known
