"""Access to the service: tokens and roles, host names and origins, rates of requests.

The token file holds names, roles and the sha256 of each token, never a token. Without a file the
server listens on the loopback only, and every client is "local", an admin.
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
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.config.block import Positive, Strict, validate
from trainer.errors import ConfigError
from trainer.files.atomic import open_file, replace_file

Role = Literal["read", "run", "admin"]
# Of tokens, and of addresses: name -> (requests that are left, when), the least recent first.
Rates = tuple[OrderedDict[str, tuple[float, float]], OrderedDict[str, tuple[float, float]]]
MAX_CLIENTS = 10_000  # with a rate in memory: tokens, and addresses beside them
TOKEN_PREFIX = "lathe-"


class Quota(Strict):
    """How much a token may use. None: no limit."""

    jobs: Positive | None = None  # that have not ended, at one time
    gpu_hours: Annotated[float, Field(gt=0)] | None = None  # after so many no new job starts
    bytes: Positive | None = None  # of files; and of the operations and weights of driven runs
    tokens: Positive | None = None  # of rows that driven runs are sent, in all


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
    def is_operator(self) -> bool:
        """Whether it runs this server."""
        return self.role == "admin"

    @property
    def owner(self) -> str | None:
        """The owner of the jobs and files that this client sees; None: it sees everybody's."""
        return self.name if self.role == "run" else None

    def sees(self, owner: str) -> bool:
        """Whether it sees the jobs and files of `owner`."""
        return self.owner in (None, owner)

    def may_change(self, owner: str) -> bool:
        """Whether it may change the jobs and files of `owner`."""
        return self.role == "admin" or (self.role == "run" and owner == self.name)


LOCAL = Client("local", "admin")


@dataclass
class Gate:
    """Admits or refuses a request by its headers alone.

    hosts: the server's own values of the Host header, in lower case. token_file: None only on the
    loopback.
    """

    hosts: frozenset[str]
    origins: frozenset[str]
    token_file: Path | None
    requests_per_minute: int
    _tokens: tuple[Token, ...] = ()
    _read_at: tuple[int, int] | None = None
    _rates: Rates = field(default_factory=lambda: (OrderedDict(), OrderedDict()))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_our_host(self, host: str | None) -> bool:
        """Whether the Host header names this server. A foreign page whose name was bound to our
        address (DNS rebinding) sends its own name.
        """
        return host is not None and host.lower() in self.hosts

    def is_our_origin(self, headers: Mapping[str, str]) -> bool:
        """Whether a request comes from our own page or from a program, which sends no Origin."""
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site") in (None, "same-origin", "none")
        own = {f"{scheme}://{host}" for scheme in ("http", "https") for host in self.hosts}
        return origin.lower() in own | self.origins

    def client(self, authorization: str | None) -> Client | None:
        """The client of a request; None for an unknown token. Takes the same time for any token."""
        if self.token_file is None:
            return LOCAL
        scheme, _, text = (authorization or "").partition(" ")
        digest = hashlib.sha256(text.strip().encode(errors="surrogateescape")).hexdigest()
        facts = self.token_file.stat()
        now = (facts.st_mtime_ns, facts.st_ino)
        if now != self._read_at:  # a token that was removed is refused at once
            self._tokens, self._read_at = tuple(read_tokens(self.token_file)), now
        match: Token | None = None
        for token in self._tokens:
            if hmac.compare_digest(token.sha256, digest):
                match = token
        if match is None or scheme.lower() != "bearer":
            return None
        return Client(match.name, match.role, match.quota)

    def wait_s(self, who: str, *, has_token: bool = True, per_minute: int | None = None) -> float:
        """Seconds until a token, or an address without one, may send its next request; 0 when it
        may now. per_minute: requests; None: requests_per_minute.
        """
        most = float(per_minute or self.requests_per_minute)
        per_s, now = most / 60, time.monotonic()
        rates = self._rates[0 if has_token else 1]  # many addresses push out no token
        with self._lock:
            budget, at = rates.pop(who, (most, now))
            budget = min(budget + (now - at) * per_s, most)
            is_free = budget >= 1
            rates[who] = (budget - 1 if is_free else budget, now)
            if len(rates) > MAX_CLIENTS:
                rates.popitem(last=False)
        return 0.0 if is_free else (1 - budget) / per_s


def gate(
    *,
    host: str,
    port: int,
    token_file: Path | None,
    names: Sequence[str],
    origins: Sequence[str],
    requests_per_minute: int,
) -> Gate:
    """The gate of a server at an address. ConfigError for an address beyond the loopback without
    tokens.

    names: further values of the Host header under which clients reach it.
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
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_tokens(path: Path) -> list[Token]:
    """The tokens of a file. ConfigError when others may read or write it, or it is malformed."""
    try:
        facts = path.stat()
        with open_file(path) as file:
            values: Any = json.loads(file.read().decode())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token_file {path}: {error}. `lathe-jobs token` makes one.") from None
    mode = stat.S_IMODE(facts.st_mode)
    if mode & 0o037:  # a group may read it: Kubernetes mounts a Secret this way
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
    """Add a new token to a file, which keeps only its hash, and return it. ConfigError,
    StorageError.
    """
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
