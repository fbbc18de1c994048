"""What an address is to be told, as files, so that a server that was killed goes on telling it.

<savedir_base>/_service/webhooks/<digest of the address>/
    since.json             since when it is told of each event: what ended before is not told
    waiting/<id>.json      a message that has not arrived yet, with its tries
    told/<id>.json         one that has arrived, or was given up after GIVE_UP_S
    lock                   held by the server that sends

The id of a message follows from the address, the event and its time: every server makes the same,
and a repeated message has the same `webhook-id`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.record.paths import is_there
from jobs.record.times import now
from jobs.serve.tickets import Time, alone, read_model
from trainer.config.block import Strict
from trainer.errors import LatheError
from trainer.files.atomic import create_json, refusals, write_json

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WebhookEvent:
    """Something that ended. type: as OpenAI calls it. at: seconds since 1970."""

    type: str
    object_id: str
    at: int

    @property
    def id(self) -> str:
        """The id of the event, the same for every address."""
        text = f"{self.type}\0{self.object_id}\0{self.at}"
        return f"evt_{hashlib.sha256(text.encode()).hexdigest()[:24]}"


class WebhookMessage(Strict):
    """A message to one address. after_s: seconds since 1970, from which on it is sent again."""

    id: str
    created_at: Time
    event_id: str
    event: str
    object_id: str
    ended_at: int
    tries: int = 0
    after_s: float = 0.0
    error: str | None = None  # of the last try
    arrived_at: Time | None = None
    given_up_at: Time | None = None

    def payload(self) -> str:
        """The body of the request, in the format of the OpenAI API."""
        values: dict[str, Any] = {
            "id": self.event_id,
            "object": "event",
            "created_at": self.ended_at,
            "type": self.event,
            "data": {"id": self.object_id},
        }
        return json.dumps(values)


class FirstAsked(Strict):
    """Since when an address is told of each event, in seconds since 1970."""

    events: dict[str, int]


@dataclass(frozen=True)
class Outbox:
    """The messages to one address."""

    path: Path

    @property
    def waiting(self) -> Path:
        return self.path / "waiting"

    @property
    def told(self) -> Path:
        return self.path / "told"

    def make(self) -> None:
        """Make the folders. StorageError."""
        with refusals(self.path):
            for folder in (self.waiting, self.told):
                folder.mkdir(parents=True, exist_ok=True)

    def since(self, events: Iterable[str], at: int) -> dict[str, int]:
        """event -> when the address was first to be told of it: at, if that is new. LatheError,
        StorageError.
        """
        path = self.path / "since.json"
        known = read_model(path, FirstAsked) or FirstAsked(events={})
        times = {event: known.events.get(event, at) for event in events}
        if times.keys() - known.events.keys():
            write_json(path, {"events": {**known.events, **times}})
        return times

    def add(self, event: WebhookEvent) -> None:
        """Write a message about what ended, unless there is one, or was. StorageError."""
        digest = hashlib.sha256(f"{self.path.name}\0{event.id}".encode()).hexdigest()[:24]
        name = f"wh_{digest}"
        if is_there(self.told / f"{name}.json"):
            return
        message = WebhookMessage(
            id=name,
            created_at=now(),
            event_id=event.id,
            event=event.type,
            object_id=event.object_id,
            ended_at=event.at,
        )
        create_json(self.waiting / f"{name}.json", message.model_dump(mode="json"))

    def messages(self) -> tuple[list[WebhookMessage], bool]:
        """The messages that have not arrived, the oldest first, and whether all could be read. One
        that is no message is removed, to be written again. OSError.
        """
        messages: list[WebhookMessage] = []
        are_all = True
        for name in sorted(os.listdir(self.waiting)):
            if not name.endswith(".json"):
                continue
            path = self.waiting / name
            try:
                message = read_model(path, WebhookMessage)
            except LatheError as error:
                log.warning("%s", error)
                path.unlink(missing_ok=True)
                are_all = False
                continue
            if message is not None:
                messages.append(message)
        messages.sort(key=lambda message: (message.ended_at, message.id))
        return messages, are_all

    def write(self, message: WebhookMessage) -> None:
        """Write down how the last try of a message went. StorageError."""
        path = self.waiting / f"{message.id}.json"
        write_json(path, message.model_dump(mode="json"))
        if message.arrived_at or message.given_up_at:
            with refusals(path):
                os.replace(path, self.told / path.name)

    def alone(self) -> AbstractContextManager[bool]:
        """Whether no other server sends to this address; then none does inside. StorageError."""
        return alone(self.path / "lock")
