"""Asks a service over HTTP, with one token, and says what went wrong in one sentence."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, quote, urlencode, urlsplit

from jobs.errors import Unreachable
from trainer.errors import ConfigError, LatheError

WAIT_S = 630.0  # a dry run may take ten minutes
MOST_BYTES = 16 << 20  # of an answer
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ServiceRefusal(LatheError):
    """The service refused a request. The message is the service's own."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to another address."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        return None


@dataclass(frozen=True)
class ServiceClient:
    """A service at `url`, such as http://127.0.0.1:8100, asked with `token` where it wants one.

    ConfigError for an address that is none, and for a token that would cross a network unencrypted.
    """

    url: str
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = _parts(self.url)
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"--url: got {self.url!r}, want the address that `lathe serve` prints, such as "
                "http://127.0.0.1:8100."
            )
        if self.token and parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            raise ConfigError(
                f"--url {self.url}: the token would cross the network unencrypted. Give the "
                "https:// address, or a tunnel: ssh -L 8100:127.0.0.1:8100 HOST, then "
                "--url http://127.0.0.1:8100."
            )
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError("LATHE_TOKEN: got letters that no token has. Copy the token again.")

    def get(self, path: str, **query: Any) -> Any:
        """The JSON of a GET. Parameters that are None are left out. See `ask`."""
        parameters = {name: value for name, value in query.items() if value is not None}
        return self.ask("GET", path + (f"?{urlencode(parameters)}" if parameters else ""), None)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of a POST. See `ask`."""
        return self.ask("POST", path, json.dumps(body or {}).encode())

    def ask(self, method: str, path: str, body: bytes | None) -> Any:
        """The JSON of an answer. ServiceRefusal when the service says no, Unreachable when what
        answers is no service, or nothing does.
        """
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(
            self.url.rstrip("/") + path, data=body, headers=headers, method=method
        )
        opener = urllib.request.build_opener(_NoRedirect)
        try:
            with opener.open(request, timeout=WAIT_S) as answer:
                content = answer.read(MOST_BYTES + 1)
                if answer.length and len(content) <= MOST_BYTES:
                    raise http.client.IncompleteRead(content, answer.length)
        except urllib.error.HTTPError as error:
            with error:
                raise ServiceRefusal(_message(error)) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise Unreachable(f"{self.url}: no service answers ({reason}).") from error
        if len(content) > MOST_BYTES:
            raise ServiceRefusal(
                f"{path}: the answer has more than {MOST_BYTES >> 20} MiB. Ask for less."
            )
        try:
            return json.loads(content)
        except ValueError:
            raise Unreachable(
                f"{self.url}: it answers, and not in JSON. Is it a service of Lathe?"
            ) from None


def _parts(url: str) -> SplitResult | None:
    """The parts of an address; None for what no request can be sent to."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # ValueError for a port that is none
    except ValueError:
        return None
    return parts if url.isascii() and not any(map(str.isspace, url)) else None


def of_run(exp_id: str, part: str = "") -> str:
    """The path of a run, or of a part of it, in the service's API."""
    return f"/lathe/v1/runs/{quote(exp_id, safe='')}" + (f"/{part}" if part else "")


def _message(error: urllib.error.HTTPError) -> str:
    """The service's own words, or the status where there are none."""
    try:
        text = json.loads(error.read(1 << 16))["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        text = error.reason
    if error.code == 401:
        text = f"{text} Set LATHE_TOKEN to a token of the service (`lathe token` makes one)."
    return f"{error.code}: {text}"
