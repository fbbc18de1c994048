"""The server: `python -m jobs.serve.app -sb BASE`, with its gate, routes and keeper thread.

`lathe-jobs serve` starts this program in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
import typer
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope
from starlette.types import Send as SendMessage

from jobs import backends
from jobs.options import BackendName, Base, PythonBinary, report_errors
from jobs.record.paths import BaseFolder, check_base
from jobs.serve import lathe_routes, offers
from jobs.serve.access import Client, Gate, gate, read_tokens
from jobs.serve.answers import routes as answer_routes
from jobs.serve.answers.workers import Workers
from jobs.serve.batches import routes as batch_routes
from jobs.serve.batches.asking import Asking
from jobs.serve.batches.folder import BatchFolders
from jobs.serve.batches.runner import BatchRunner
from jobs.serve.dialect import checkpoints as checkpoint_routes
from jobs.serve.dialect import files as file_routes
from jobs.serve.dialect import jobs as job_routes
from jobs.serve.dialect import models as model_routes
from jobs.serve.faults import HANDLERS
from jobs.serve.keeper import Keeper, Send
from jobs.serve.limits.connections import Connection, IdleConnections, raise_file_limit
from jobs.serve.limits.disclosure import Veil
from jobs.serve.limits.handshakes import Handshake
from jobs.serve.limits.shares import THREADS, Kind, Shares, holder_of
from jobs.serve.live import routes as live_routes
from jobs.serve.preview import routes as preview_routes
from jobs.serve.requests import Refusal
from jobs.serve.steps import dialect as steps_dialect
from jobs.serve.steps.upkeep.expiry import sweep_always
from jobs.serve.tickets import ServiceFolder
from jobs.serve.webhooks.sender import Webhooks
from jobs.submit.prepare import PROJECT
from trainer.errors import ConfigError

MAX_HEADERS = 16 << 10  # bytes, of the request line and all headers
MOST_NAMES = 100  # of folders that cannot be read, in one answer
ONCE = (
    *("host", "authorization", "origin", "content-length", "content-type", "content-encoding"),
    *("idempotency-key", "x-api-key", "x-idempotency-key"),
)
# A page loads nothing from other servers, no page may frame it, only our own files are scripts.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

log = logging.getLogger(__name__)


class Door:
    """Admits or refuses requests by their headers, and adds our headers to every answer."""

    def __init__(self, app: ASGIApp, gate: Gate, shares: Shares, veil: Veil) -> None:
        self.app, self.gate, self.shares, self.veil = app, gate, shares, veil
        self.idle = IdleConnections(shares.config.idle_connections, shares.config.head_s)

    async def __call__(self, scope: Scope, receive: Receive, send: SendMessage) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_ours(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["path"] == PROBE:  # its answer needs no thread, no file and no token
            await self.app(scope, receive, send_ours)
            return
        with contextlib.ExitStack() as stack:
            try:
                holder = self._admit(scope)
                kind: Kind = "requests"
                if scope["path"].startswith(steps_dialect.PREFIX):
                    kind = "operations"
                if scope["path"] in (live_routes.STREAM, *steps_dialect.WAITING):
                    kind = "streams"
                stack.enter_context(self.shares.hold(kind, holder))
            except Refusal as error:
                await error.response()(scope, receive, send_ours)
                return
            client: Client | None = scope["state"]["client"]
            is_operator = client is not None and client.is_operator
            await self.app(scope, receive, send_ours if is_operator else self.veil.over(send_ours))

    def _admit(self, scope: Scope) -> str:
        """Whose share the request uses. Refusal."""
        headers = Headers(scope=scope)
        for name in ONCE:
            if len(headers.getlist(name)) > 1:
                raise Refusal(400, f"{name} stands twice among the headers.")
        if not self.gate.is_our_host(headers.get("host")):
            raise Refusal(421, "Host: this server has another name. `hosts` of its file lists it.")
        if not self.gate.is_our_origin(headers):
            raise Refusal(403, "Origin: a page of another site may not call this server.")
        is_of_steps = scope["path"].startswith(steps_dialect.PREFIX)
        authorization = headers.get("authorization")
        if is_of_steps and authorization is None:
            authorization = steps_dialect.authorization(headers.get("x-api-key"))
        try:
            client = self.gate.client(authorization)
        except (OSError, ConfigError) as error:  # it is being replaced, or somebody has to mend it
            log.warning("%s", error)
            text = "The server cannot read its tokens now. Ask again."
            raise Refusal(503, text, code="overloaded", retry_after_s=5) from None
        holder, state = holder_of(scope, client), scope.setdefault("state", {})
        config = self.shares.config
        most = config.operations_per_minute if is_of_steps else self.gate.requests_per_minute
        who = f"steps of {holder}" if is_of_steps else holder
        wait_s = self.gate.wait_s(who, has_token=client is not None, per_minute=most)
        if wait_s:
            text = f"Too many requests: at most {most} a minute."
            raise Refusal(429, text, code="rate_limit_exceeded", retry_after_s=wait_s)
        is_page = scope["path"] in PUBLIC_PATHS or scope["path"].startswith(PUBLIC_STARTS)
        if client is None and not is_page:
            text = "Authorization: want a token of this server: Bearer lathe-..."
            raise Refusal(401, text, code="invalid_api_key")
        state["client"] = client
        connection: Connection | None = state.get("connection")
        if connection is not None and client is not None:
            connection.holder, connection.has_token = holder, True
        return holder


class Server(uvicorn.Server):
    """A server that counts connections from their TLS handshake on, and that ends the event streams
    first, because uvicorn waits for every answer to end.
    """

    def __init__(self, options: uvicorn.Config, keeper: Keeper, greeting: str = "") -> None:
        """greeting: printed once the server listens."""
        super().__init__(options)
        self._keeper, self._greeting = keeper, greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        context, self.config.ssl = self.config.ssl, None
        if context is not None:
            self.config.http_protocol_class = functools.partial(Handshake, context)  # type: ignore[assignment]
        await super().startup(sockets)
        if self._greeting and self.started:
            typer.echo(self._greeting)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._keeper.stop()
        await super().shutdown(sockets)


# A cluster restarts a server whose probe is refused. It asks by the address of a pod, and before a
# token file may be there, so nothing in the headers of a probe is looked at.
PROBE = "/healthz"
PUBLIC_PATHS = ("/", "/live")  # they hold no data: the page itself is empty
PUBLIC_STARTS = ("/live/", steps_dialect.SIGNED)  # an address that is signed needs no token


async def health(request: Request) -> Response:
    """Answers probes: the server is up. It names the folders that it cannot read, and what it could
    not do when it last tried; the reasons are in its log and on the page, because whoever asks here
    needs no token.
    """
    keeper = lathe_routes.keeper_of(request)
    folders, parts = list(keeper.unreadable.reasons), list(keeper.reader.failing.reasons)
    if not folders and not parts:
        return Response("ok\n", media_type="text/plain")
    counts = [f"{len(folders)} folder(s) cannot be read"] if folders else []
    counts += [f"{len(parts)} thing(s) could not be done"] if parts else []
    lines = [f"degraded: {', '.join(counts)}, all others are served"]
    names = folders + parts
    lines += names[:MOST_NAMES] + (["..."] if len(names) > MOST_NAMES else [])
    return Response("\n".join(lines) + "\n", media_type="text/plain")


def make_app(keeper: Keeper, gate: Gate, *, has_keeper: bool = True) -> Door:
    """The application. has_keeper: a thread of the server looks after the jobs."""

    @contextlib.asynccontextmanager
    async def life(app: Starlette) -> AsyncGenerator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
        thread = threading.Thread(target=keeper.run, name="keeper", daemon=True)
        tasks: list[asyncio.Task[None]] = []
        if has_keeper:
            thread.start()
            tasks.append(asyncio.create_task(app.state.batch_runner.run()))
            tasks.append(asyncio.create_task(sweep_always(app.state.steps)))
            webhooks.start()
        yield
        keeper.stop()
        webhooks.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await app.state.workers.stop()
        await app.state.steps.stop()

    routes = [Route(PROBE, health), *lathe_routes.ROUTES]
    routes += [*file_routes.ROUTES, *job_routes.ROUTES, *checkpoint_routes.ROUTES]
    routes += [*model_routes.ROUTES, *batch_routes.ROUTES]
    routes += [*answer_routes.ROUTES, *preview_routes.ROUTES]
    routes += steps_dialect.ROUTES
    routes += [*live_routes.PAGE_ROUTES, *live_routes.ROUTES]
    app = Starlette(routes=routes, exception_handlers=HANDLERS, lifespan=life)
    app.router.redirect_slashes = False
    shares = Shares(keeper.config)
    app.state.keeper, app.state.shares = keeper, shares
    app.state.workers = Workers(keeper.folder.cache, keeper.config.loaded_models)
    app.state.steps = steps_dialect.make(keeper, gate)
    veil = Veil.of(keeper.folder.base.path, [PROJECT])
    app.state.batches = BatchFolders(keeper.folder, keeper.unreadable)
    webhooks = Webhooks.of(keeper, app.state.batches)
    app.state.batch_runner = BatchRunner(keeper, app.state.batches, Asking(keeper, HANDLERS, veil))
    return Door(app, gate, shares, veil)


def options_of(door: Door, **where: Any) -> uvicorn.Config:
    """How uvicorn serves an application. where: its address and its certificate."""
    return uvicorn.Config(
        door,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADERS,
        http=Connection,
        loop="asyncio",
        ws="none",
        **where,
    )


def make_keeper(base: Path, config: offers.ServiceConfig, send: Send, every_s: float) -> Keeper:
    """The keeper of a savedir_base; makes its folders. ConfigError, StorageError."""
    if backends.load(send.backend).traits.is_in_process:
        raise ConfigError(
            f"-j {send.backend}: it runs jobs in the server itself. Use -j local for this machine."
        )
    folder = ServiceFolder(BaseFolder(base.absolute()))
    folder.make()
    return Keeper(folder, config, send, every_s)


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Return if the certificate and the key belong together, or both are None; else ConfigError."""
    if cert is None and key is None:
        return
    if cert is None or key is None:
        raise ConfigError("--tls_cert and --tls_key: give both, or none.")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key)
    except OSError as error:  # this includes SSLError
        reason = error.strerror or "want PEM files that belong together"
        raise ConfigError(f"--tls_cert {cert}, --tls_key {key}: {reason}. Give others.") from None


@report_errors
def serve(
    savedir_base: Base,
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8100,
    job_scheduler: BackendName = "local",
    service_config: Annotated[
        Path | None, typer.Option("--service_config", help="Python file with SERVICE.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token_file", help="The tokens that are admitted: `lathe-jobs token`."),
    ] = None,
    python_binary: PythonBinary = "",
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Run uncommitted code, with its patch.")
    ] = False,
    every: Annotated[
        float, typer.Option("--every_s", min=0.05, help="Seconds between two looks at the jobs.")
    ] = 1.0,
    tls_cert: Annotated[Path | None, typer.Option("--tls_cert", help="PEM file.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls_key", help="PEM file.")] = None,
) -> None:
    """A fine-tuning service over the run folders of a savedir_base, for OpenAI's clients."""
    check_base(savedir_base)
    config = offers.read(service_config)
    check_tls(tls_cert, tls_key)
    entrance = gate(
        host=host,
        port=port,
        token_file=token_file,
        names=config.hosts,
        origins=config.origins,
        requests_per_minute=config.requests_per_minute,
    )
    send = Send(job_scheduler, python_binary, allow_dirty)
    keeper = make_keeper(savedir_base, config, send, every)
    options = options_of(
        make_app(keeper, entrance),
        host=host,
        port=port,
        ssl_certfile=None if tls_cert is None else str(tls_cert),
        ssl_keyfile=None if tls_key is None else str(tls_key),
    )
    raise_file_limit()
    server = Server(options, keeper, _greeting(options, savedir_base, token_file))
    with contextlib.suppress(KeyboardInterrupt):
        server.run()


def _greeting(options: uvicorn.Config, base: Path, token_file: Path | None) -> str:
    """The address, who is admitted, and the folder, as `serve` prints them."""
    name = f"[{options.host}]" if ":" in options.host else options.host
    scheme = "https" if options.ssl_certfile is not None else "http"
    who = "no token is needed: whoever reaches this address may do everything"
    if token_file is not None:
        how = f"`lathe-jobs token --token_file {token_file} --name NAME` makes one more"
        who = f"{len(read_tokens(token_file))} token(s) of {token_file} are admitted; {how}"
    lines = [
        f"open {scheme}://{name}:{options.port}/",
        f"OpenAI's clients: base_url {scheme}://{name}:{options.port}/v1",
        who,
        f"runs of {base.absolute()}; Ctrl-C stops the server, and no training",
    ]
    return "\n".join(lines)


program = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
program.command()(serve)

if __name__ == "__main__":
    program(prog_name="lathe-jobs serve")
