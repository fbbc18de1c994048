"""Who may do what: tokens and their roles, the names under which the server answers, rates.

A token's file holds names, roles and the sha256 of each token, never a token. Without a file the
server answers on the loopback only, and whoever reaches it there is "local", an admin.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.config.schema import Positive, Strict, validate
from trainer.errors import ConfigError
from trainer.files.atomic import replace_file

Role = Literal["read", "run", "admin"]
MAX_CLIENTS = 10_000  # whose rates are remembered
TOKEN_PREFIX = "lathe-"


class Quota(Strict):
    """How much a token may use. None: as much as there is."""

    jobs: Positive | None = None  # that have not ended
    gpu_hours: Annotated[float, Field(gt=0)] | None = None  # no new job above it
    bytes: Positive | None = None  # of files


class Token(Strict):
    """One token of the file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    role: Role
    quota: Quota = Quota()


class TokenFile(Strict):
    """The whole file."""

    tokens: list[Token]


@dataclass(frozen=True)
class Client:
    """Who sent a request."""

    name: str
    role: Role
    quota: Quota = Quota()  # noqa: RUF009 (frozen)

    @property
    def owner(self) -> str | None:
        """Whose things it sees: its own, or everybody's (None)."""
        return self.name if self.role == "run" else None

    def sees(self, owner: str) -> bool:
        """Whether it may look at what belongs to `owner`."""
        return self.owner in (None, owner)

    def may_change(self, owner: str) -> bool:
        """Whether it may change what belongs to `owner`."""
        return self.role == "admin" or (self.role == "run" and owner == self.name)


LOCAL = Client("local", "admin")


@dataclass
class Gate:
    """Decides about a request by its headers alone.

    hosts: values of Host that are ours, lower case. token_file: None for the loopback without.
    """

    hosts: frozenset[str]
    origins: frozenset[str]
    token_file: Path | None
    requests_per_minute: int
    _tokens: tuple[Token, ...] = ()
    _read_at: tuple[int, int] | None = None
    _rates: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_our_host(self, host: str | None) -> bool:
        """Whether a request is meant for this server. A page elsewhere whose name was bound to our
        address (DNS rebinding) sends its own.
        """
        return host is not None and host.lower() in self.hosts

    def is_our_origin(self, headers: Mapping[str, str]) -> bool:
        """Whether no page of another site sent a request. Programs send no Origin."""
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site") in (None, "same-origin", "none")
        own = {f"{scheme}://{host}" for scheme in ("http", "https") for host in self.hosts}
        return origin.lower() in own | self.origins

    def client(self, authorization: str | None) -> Client | None:
        """Who a request is from; None for nobody that is known. Takes as long for any token."""
        if self.token_file is None:
            return LOCAL
        scheme, _, text = (authorization or "").partition(" ")
        sent = hashlib.sha256(text.strip().encode(errors="surrogateescape")).hexdigest()
        found: Token | None = None
        for token in self._known():
            if hmac.compare_digest(token.sha256, sent):
                found = token
        if found is None or scheme.lower() != "bearer":
            return None
        return Client(found.name, found.role, found.quota)

    def _known(self) -> tuple[Token, ...]:
        """The tokens of the file as it is now: one that is taken out is refused at once."""
        assert self.token_file is not None, "asked for by `client`"
        facts = self.token_file.stat()
        now = (facts.st_mtime_ns, facts.st_ino)
        if now != self._read_at:
            self._tokens, self._read_at = tuple(read_tokens(self.token_file)), now
        return self._tokens

    def wait_s(self, who: str) -> float:
        """How long a client has to wait until its next request; 0 when it may come now."""
        per_s, now = self.requests_per_minute / 60, time.monotonic()
        with self._lock:
            if len(self._rates) > MAX_CLIENTS:
                self._rates.clear()
            left, at = self._rates.get(who, (float(self.requests_per_minute), now))
            left = min(left + (now - at) * per_s, float(self.requests_per_minute))
            is_free = left >= 1
            self._rates[who] = (left - 1 if is_free else left, now)
        return 0.0 if is_free else (1 - left) / per_s


def gate(
    *,
    host: str,
    port: int,
    token_file: Path | None,
    names: Sequence[str],
    origins: Sequence[str],
    requests_per_minute: int,
) -> Gate:
    """The gate of a server at an address. ConfigError for an open address without tokens.

    names: other values of Host under which it is reached.
    """
    if token_file is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: anybody could start jobs there. Give --token_file FILE (`lathe-jobs "
            "token` makes one), or --host 127.0.0.1."
        )
    if token_file is not None:
        read_tokens(token_file)
    own = {host, "localhost", "127.0.0.1", "[::1]"} if is_loopback(host) else {host}
    own = {f"[{name}]" if ":" in name and not name.startswith("[") else name for name in own}
    hosts = {f"{name}:{port}" for name in own} | set(names)
    if port in (80, 443):
        hosts |= own
    return Gate(
        frozenset(name.lower() for name in hosts),
        frozenset(origin.lower().rstrip("/") for origin in origins),
        token_file,
        requests_per_minute,
    )


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_tokens(path: Path) -> list[Token]:
    """The tokens of a file. ConfigError when others may write it, or it is not as wanted."""
    try:
        facts = path.stat()
        values: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token_file {path}: {error}. `lathe-jobs token` makes one.") from None
    mode = stat.S_IMODE(facts.st_mode)
    if mode & 0o037:  # a group may read it: a Secret of Kubernetes is mounted so
        raise ConfigError(
            f"--token_file {path}: mode {mode:#o}, want 0o600: others could add their own token. "
            f"chmod 600 {path}"
        )
    tokens = validate(TokenFile, values, source=f"--token_file {path}").tokens
    names = [token.name for token in tokens]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"--token_file {path}: {', '.join(twice)} stands twice. Keep one.")
    return tokens


def add_token(path: Path, name: str, role: str, quota: Mapping[str, Any]) -> str:
    """Add a new token to a file and return it: it is kept nowhere. ConfigError, StorageError."""
    tokens = read_tokens(path) if path.exists() else []
    text = TOKEN_PREFIX + secrets.token_urlsafe(32)
    entry = {
        "name": name,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "role": role,
        "quota": {key: value for key, value in quota.items() if value is not None},
    }
    if any(token.name == name for token in tokens):
        raise ConfigError(f"{path}: there is a token {name!r}. Take it out, or use another name.")
    new = validate(Token, entry, source=f"token {name!r}")
    content = TokenFile(tokens=[*tokens, new]).model_dump_json(indent=1)
    before = os.umask(0o077)
    try:
        replace_file(path, content.encode() + b"\n")
    finally:
        os.umask(before)
    return text
