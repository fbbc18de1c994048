"""A thread for each address, which tells it what ended, again and again until it answers 2xx.

A redirect is no answer and is not followed, no proxy of the environment is asked, and an address
that does not answer keeps none but itself waiting.
"""

from __future__ import annotations

import http.client
import logging
import random
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from jobs.record.times import now
from jobs.serve.job_view import seconds
from jobs.serve.webhooks.endpoints import Webhook, signature
from jobs.serve.webhooks.outbox import Outbox, WebhookEvent, WebhookMessage

if TYPE_CHECKING:
    from jobs.serve.batches.folder import BatchFolders
    from jobs.serve.keeper import Keeper

# Between two tries, the last one again and again; a tenth more or less, by chance.
PAUSES_S = (5.0, 30.0, 120.0, 600.0, 1800.0, 3600.0)
GIVE_UP_S = 72 * 3600.0  # as OpenAI does
ANSWER_S = 15.0
LOOK_S = 1.0
STOP_S = 1.0

log = logging.getLogger(__name__)


@dataclass
class Webhooks:
    """The threads of one server."""

    senders: list[WebhookSender]
    threads: list[threading.Thread] = field(default_factory=list[threading.Thread])

    @classmethod
    def of(cls, keeper: Keeper, batches: BatchFolders) -> Webhooks:
        """A sender for each address of the configuration. ConfigError for a bad secret."""
        senders: list[WebhookSender] = []
        for number, webhook in enumerate(keeper.config.webhooks):
            webhook.secret()
            outbox = Outbox(keeper.folder.webhooks / webhook.digest)
            source = NewEvents(keeper, batches)
            senders.append(WebhookSender(f"webhooks[{number}]", webhook, outbox, source))
        return cls(senders)

    def start(self) -> None:
        """Start the threads. They end with the process, or with `stop`."""
        for sender in self.senders:
            thread = threading.Thread(target=sender.run, name=sender.name, daemon=True)
            thread.start()
            self.threads.append(thread)

    def stop(self) -> None:
        """End the threads after what they do now; one that waits for an answer ends later."""
        for sender in self.senders:
            sender.stopped.set()
        until = time.monotonic() + STOP_S
        for thread in self.threads:
            thread.join(max(until - time.monotonic(), 0))


@dataclass
class NewEvents:
    """What has ended, job or batch, since it was last looked at."""

    keeper: Keeper
    batches: BatchFolders
    _tick: int = 0
    _batches: set[str] = field(default_factory=set[str])

    def new(self) -> Iterator[WebhookEvent]:
        """What has ended since the last look; everything at the first one. sqlite3.Error."""
        tick = self.keeper.index.tick()
        if tick < self._tick:  # the index was deleted, and is made again
            self._tick = 0
        for body in self.keeper.index.ended_jobs(self._tick):
            at = body["finished_at"] or body["created_at"]
            yield WebhookEvent(f"fine_tuning.job.{body['status']}", body["id"], at)
        for batch, end in self.batches.ended():
            if batch.id not in self._batches:
                yield WebhookEvent(f"batch.{end.status}", batch.id, int(seconds(end.at)))
                self._batches.add(batch.id)
        self._tick = tick

    def forget(self) -> None:
        """Tell everything again at the next look."""
        self._tick = 0
        self._batches.clear()


@dataclass
class WebhookSender:
    """Tells one address. name: its place in the configuration; an address may hold secrets."""

    name: str
    webhook: Webhook
    outbox: Outbox
    source: NewEvents
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Look and send every LOOK_S seconds, until it is stopped."""
        failing = self.source.keeper.reader.failing
        while not self.stopped.wait(LOOK_S):
            try:
                error = self.turn()
            except Exception as problem:  # of any kind: it is tried again
                self.source.forget()
                error = f"{type(problem).__name__}: {problem}"
            if error is None:
                failing.end(self.name)
            else:
                failing.note(self.name, error, kind=self.name, is_transient=True)

    def turn(self) -> str | None:
        """Write down what is to be told, and send what is due; returns what went wrong first."""
        self.outbox.make()
        with self.outbox.alone() as is_ours:
            if not is_ours:
                self.source.forget()
                return None
            since = self.outbox.since(self.webhook.events, int(time.time()))
            for event in self.source.new():
                if event.type in since and event.at >= since[event.type]:
                    self.outbox.add(event)
            messages, are_all = self.outbox.messages()
            if not are_all:
                self.source.forget()
            return self._send(messages)

    def _send(self, messages: Iterable[WebhookMessage]) -> str | None:
        first = None
        for message in messages:
            error = message.error
            if message.after_s <= time.time():
                if self.stopped.is_set():
                    break
                error = post(self.webhook, message)
                after = after_try(message, error, time.time())
                self.outbox.write(after)
                if after.given_up_at:
                    log.warning("%s: %s is given up: %s", self.name, message.id, error)
            first = first or error
        return first


def after_try(message: WebhookMessage, error: str | None, at: float) -> WebhookMessage:
    """The message after a try that ended with an error, or without one. at: seconds since 1970."""
    changes: dict[str, object] = {"tries": message.tries + 1, "error": error}
    if error is None:
        changes["arrived_at"] = now()
    elif at - seconds(message.created_at) > GIVE_UP_S:
        changes["given_up_at"] = now()
    else:
        pause_s = PAUSES_S[min(message.tries, len(PAUSES_S) - 1)]
        changes["after_s"] = at + pause_s * random.uniform(0.9, 1.1)
    return message.model_copy(update=changes)


def post(webhook: Webhook, message: WebhookMessage) -> str | None:
    """Send a message to its address; returns what went wrong, or None when it answers 2xx."""
    parts, payload, timestamp = urlsplit(webhook.url), message.payload(), int(time.time())
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
    headers = {
        "content-type": "application/json",
        "user-agent": "Lathe-Webhooks/1",
        "webhook-id": message.id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(webhook.secret(), message.id, timestamp, payload),
    }
    connection = kinds[parts.scheme](str(parts.hostname), parts.port, timeout=ANSWER_S)
    try:
        connection.request("POST", path, payload.encode(), headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"no answer ({type(error).__name__}), want one of 2xx. Is the receiver there?"
    finally:
        connection.close()
    if 200 <= status < 300:
        return None
    return f"got HTTP {status}, want one of 2xx. Look at the receiver; redirects are not followed."
