"""The addresses that are told what ended, and the signatures by which they know us.

Signatures are those of Standard Webhooks (standardwebhooks.com), as OpenAI's are:
its client verifies them so.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import stat
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from trainer.config.block import Strict
from trainer.errors import ConfigError
from trainer.files.atomic import open_file

EventType = Literal[
    "fine_tuning.job.succeeded",
    "fine_tuning.job.failed",
    "fine_tuning.job.cancelled",
    "batch.completed",
    "batch.failed",
    "batch.cancelled",
    "batch.expired",
]
EVERY_EVENT: tuple[EventType, ...] = EventType.__args__  # pyright: ignore[reportAttributeAccessIssue]
SECRET = "whsec_"
LEAST_BYTES = 24  # of a secret, as Standard Webhooks wants


def _address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("want a whole address, https://HOST/PATH")
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise ValueError("want an address as it is sent: ASCII without spaces (%20, xn--...)")
    if parts.username or parts.password or parts.fragment:
        raise ValueError("want an address without a user, a password or a #fragment")
    _ = parts.port, parts.hostname.encode("idna")  # ValueError for what is no port, and no name
    return url


class Webhook(Strict):
    """One address that is told what ended."""

    url: Annotated[str, AfterValidator(_address)]
    secret_file: str  # holds whsec_..., and is read by its owner alone
    events: Annotated[list[EventType], Field(min_length=1)] = list(EVERY_EVENT)  # noqa: RUF012

    @property
    def digest(self) -> str:
        """The name of its folder: an address may hold what is not to be seen."""
        return hashlib.sha256(self.url.encode()).hexdigest()[:24]

    def secret(self) -> bytes:
        """The key of its signatures. ConfigError for a file that others may read, or that holds
        none.
        """
        path = Path(self.secret_file)
        source = f"webhooks: secret_file {path}"
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            with open_file(path) as file:
                text = file.read(4096).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: {error}. {HOW}") from None
        if mode & 0o037:  # a group may read it: Kubernetes mounts a Secret this way
            raise ConfigError(f"{source}: mode {mode:#o}, want 0o600. chmod 600 {path}")
        try:
            key = base64.b64decode(text.removeprefix(SECRET), validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if not text.startswith(SECRET) or len(key) < LEAST_BYTES:
            raise ConfigError(
                f"{source}: it holds no secret, want {SECRET} and the base64 of at least "
                f"{LEAST_BYTES} bytes. {HOW}"
            )
        return key


def _each_once(webhooks: list[Webhook]) -> list[Webhook]:
    urls = [webhook.url for webhook in webhooks]
    if len({*urls}) < len(urls):  # both would send the messages of one outbox
        raise ValueError("want each url once: an address stands twice. Put its events together")
    return webhooks


WebhookList = Annotated[list[Webhook], AfterValidator(_each_once)]
HOW = 'Make one: (umask 077; echo "whsec_$(openssl rand -base64 32)" > FILE).'


def signature(key: bytes, message_id: str, timestamp: int, payload: str) -> str:
    """The value of the header webhook-signature."""
    content = f"{message_id}.{timestamp}.{payload}".encode()
    return "v1," + base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
