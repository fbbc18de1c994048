"""A request of a batch, answered by the routes that answer people, without a socket.

They are an application of its own: its workers are other processes than those that people ask, and
its shares are nobody's. So a batch takes nothing of what people may use at one time.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.types import Message

from jobs.serve.access import Client
from jobs.serve.answers import routes as answer_routes
from jobs.serve.answers.workers import GONE, MAX_TOGETHER, Workers
from jobs.serve.limits.disclosure import Veil
from jobs.serve.limits.shares import Shares

if TYPE_CHECKING:
    from jobs.serve.batches.folder import Batch
    from jobs.serve.keeper import Keeper

log = logging.getLogger(__name__)
TOGETHER = MAX_TOGETHER  # requests of a batch in progress: what one forward answers


@dataclass(frozen=True)
class LineAnswer:
    """The answer to a request: an HTTP status, and the JSON beside it."""

    status: int
    body: dict[str, Any]

    @property
    def is_good(self) -> bool:
        return self.status < 400

    @property
    def may_pass(self) -> bool:
        """Whether the same request may be answered later: the server is busy, or has a fault."""
        return self.status in (408, 429) or self.status >= 500

    @property
    def has_ended_worker(self) -> bool:
        """Whether the model's process ended, perhaps because of another request beside it."""
        error: Mapping[str, Any] = self.body.get("error") or {}
        return not self.is_good and GONE in str(error.get("message"))

    def line(self, custom_id: str) -> dict[str, Any]:
        """The line of a file, in the format of the OpenAI API."""
        digits = secrets.token_hex(12)
        response = {"status_code": self.status, "request_id": f"req_{digits}", "body": self.body}
        name = f"batch_req_{digits}"
        return {"id": name, "custom_id": custom_id, "response": response, "error": None}


@dataclass
class Asking:
    """What answers the requests of batches. handlers: of errors, as the server has them."""

    keeper: Keeper
    handlers: Mapping[Any, Any]
    veil: Veil
    app: Starlette = field(init=False)
    workers: Workers = field(init=False)

    def __post_init__(self) -> None:
        config = self.keeper.config
        self.workers = Workers(self.keeper.folder.cache, max(config.batch_models, 1))
        self.app = Starlette(routes=answer_routes.ROUTES, exception_handlers=self.handlers)
        most = TOGETHER * max(config.batch_models, 1)
        limits = config.model_copy(update={"answers_at_once": most})
        self.app.state.keeper, self.app.state.shares = self.keeper, Shares(limits)
        self.app.state.workers = self.workers

    def _shown(self, batch: Batch, answer: bytes) -> bytes:
        """An answer as the door lets it out: where files lie is said to operators alone."""
        is_operator = Client(batch.owner, batch.role).is_operator
        return answer if is_operator else self.veil.clear(answer)

    async def ask(self, batch: Batch, body: Mapping[str, Any]) -> LineAnswer:
        """The answer to one request, as if the owner of the batch had sent it."""
        # no longer than in its line, whose length was checked
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        headers = {"content-type": "application/json", "content-length": str(len(content))}
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": batch.endpoint,
            "raw_path": batch.endpoint.encode(),
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": None,
            "server": None,
            "state": {"client": Client(batch.owner, batch.role)},
        }
        status, parts = 500, list[bytes]()

        async def receive() -> Message:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        try:
            await self.app(scope, receive, send)
            answer = b"".join(parts)
            return LineAnswer(status, json.loads(self._shown(batch, answer)))
        except Exception:  # of any kind: the other requests of the batch are answered all the same
            log.exception("a request of %s failed", batch.id)
            error = {"message": "The server failed. Its log says why.", "type": "server_error"}
            return LineAnswer(500, {"error": error})
