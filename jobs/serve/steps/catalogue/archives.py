"""Downloads of saved weights: the files one by one, or all in one archive.

Whoever has an address that was signed may read the one file for an hour, without a token, as the
SDK's own command does. The key is made when it is first needed and never leaves the server's disk.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import tarfile
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import quote as quote_url

from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from jobs.serve.requests import PlainJSON, Refusal
from jobs.serve.steps.catalogue.checkpoints import size_of
from jobs.serve.steps.context import Steps, steps_of, visible_weights
from jobs.serve.steps.futures import API
from jobs.serve.steps.names import WeightsPath, absent, checkpoint_path
from jobs.serve.steps.sessions import RunFacts, SavedFacts
from jobs.serve.uploads import refuse_on_full_disk
from trainer.files.atomic import refusals

VALID_S = 3600
FILES = f"{API}/files/"  # needs no token
_FILE = FILES + "{run}/{kind}/{name}/{file:path}"


def external_urls(request: Request) -> Response:
    """An address for each file of saved weights, valid for an hour."""
    params = request.path_params
    path = checkpoint_path(params["run"], f"{params['kind']}/{params['name']}")
    run, facts = visible_weights(request, path, writes=True)  # who only reads sees no content
    steps, expires = steps_of(request), int(time.time()) + VALID_S
    folder, key = steps.folder_of(run, facts), _key(steps)
    urls: dict[str, str] = {}
    for file in sorted(one for one in folder.rglob("*") if one.is_file()):
        name = file.relative_to(folder).as_posix()
        sign = _sign(key, path, name, expires)
        place = f"{FILES}{path.run}/{path.kind}/{path.name}/{quote_url(name)}"
        urls[name] = f"{str(request.base_url).rstrip('/')}{place}?expires={expires}&sign={sign}"
    at = datetime.fromtimestamp(expires, timezone.utc).isoformat()
    return PlainJSON({"urls": urls, "expires": at})


def file_of_weights(request: Request) -> Response:
    """One file of saved weights, for whoever has its signed address."""
    params, query, steps = request.path_params, request.query_params, steps_of(request)
    path = checkpoint_path(params["run"], f"{params['kind']}/{params['name']}")
    text = query.get("expires", "")
    expires = int(text) if text.isascii() and text.isdigit() and len(text) < 13 else 0
    sign = _sign(_key(steps), path, params["file"], expires)
    is_ours = hmac.compare_digest(sign.encode(), query.get("sign", "").encode())
    if not is_ours or expires < time.time():
        raise Refusal(403, "The address was not signed by this server, or its hour is over.")
    run, facts = _any_weights(steps, path)
    folder = steps.folder_of(run, facts).resolve()
    file = (folder / params["file"]).resolve()
    if not file.is_relative_to(folder) or not file.is_file():
        raise absent("file", params["file"])
    return FileResponse(file, media_type="application/octet-stream", filename=file.name)


async def archive(request: Request) -> Response:
    """All files of saved weights in one tar archive."""
    params = request.path_params
    path = checkpoint_path(params["run"], f"{params['kind']}/{params['name']}")
    run, facts = await run_in_threadpool(visible_weights, request, path, writes=True)
    file = await run_in_threadpool(_archive, steps_of(request), run, facts)
    remove = BackgroundTask(os.unlink, file)
    name = f"{path.name}.tar"
    return FileResponse(file, media_type="application/x-tar", filename=name, background=remove)


def _archive(steps: Steps, run: RunFacts, facts: SavedFacts) -> Path:
    """A tar file of saved weights; the caller removes it."""
    folder = steps.folder_of(run, facts)
    refuse_on_full_disk(steps.keeper, size_of(folder))
    with refusals(steps.sessions.root):
        descriptor, name = tempfile.mkstemp(prefix=".archive-", dir=steps.sessions.root)
        try:
            _write_archive(descriptor, folder)
        except BaseException:  # a full disk has room again at once
            os.unlink(name)
            raise
    return Path(name)


def _write_archive(descriptor: int, folder: Path) -> None:
    with os.fdopen(descriptor, "wb") as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for file in sorted(one for one in folder.rglob("*") if one.is_file()):
            tar.add(file, arcname=file.relative_to(folder).as_posix(), recursive=False)


def _any_weights(steps: Steps, path: WeightsPath) -> tuple[RunFacts, SavedFacts]:
    run = steps.sessions.run(path.run)
    saved = None
    if run is not None:
        saved = steps.sessions.saved(path, lambda one: steps.has_saved(one, run))
    if run is None or saved is None:
        raise absent("saved weights", str(path))
    return run, saved


def _sign(key: bytes, path: WeightsPath, file: str, expires: int) -> str:
    return hmac.new(key, f"{path}\0{file}\0{expires}".encode(), hashlib.sha256).hexdigest()


def _key(steps: Steps) -> bytes:
    """The key that signs addresses, the same for all servers of a folder."""
    path = steps.sessions.root / "key"
    with refusals(path):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            steps.sessions.root.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".key-", dir=path.parent)  # mode 0600
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(secrets.token_bytes(32))
            stream.flush()
            os.fsync(stream.fileno())
        try:
            os.link(name, path)  # fails where another server was first
        except FileExistsError:
            pass
        finally:
            os.unlink(name)
        return path.read_bytes()


ONE = f"{API}/training_runs/{{run}}/checkpoints/{{kind}}/{{name}}"
ROUTES = [
    Route(f"{ONE}/external_weights_urls", external_urls),
    Route(f"{ONE}/archive", archive),
    Route(_FILE, file_of_weights),
]
