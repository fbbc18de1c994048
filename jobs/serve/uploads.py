"""Files that clients upload: received block by block, checked, stored, listed, deleted.

Nothing remains of a file that was cut off or refused.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import anyio
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from jobs.record.times import now
from jobs.serve.index import may_lag
from jobs.serve.job_view import seconds
from jobs.serve.limits.quotas import bytes_kept, refuse_bytes, room_for_file
from jobs.serve.requests import Refusal, quote, shares_of
from jobs.serve.rows import checks as rows
from jobs.serve.tickets import ReceivedUpload, Upload, UploadFolder

if TYPE_CHECKING:
    from jobs.serve.access import Client
    from jobs.serve.keeper import Keeper

FINE_TUNE, BATCH = "fine-tune", "batch"
PURPOSES = (FINE_TUNE, BATCH)  # of what clients upload
MAX_FIELD, MAX_HEADER, MAX_PARTS = 1024, 4096, 8  # bytes, bytes, parts
MAX_NAME = 255
LOOK_BYTES = 8 << 20  # between two checks of the free disk
OTHER_BYTES = 64 << 10  # of an upload's body besides the file


@dataclass
class Parts:
    """The parts of a form while it arrives: small fields in memory, the file in `file`."""

    file: IO[bytes]
    max_file: int
    fields: dict[str, str] = field(default_factory=dict[str, str])
    filename: str | None = None
    size: int = 0
    is_whole: bool = False
    purpose: str = FINE_TUNE
    digest: Any = field(default_factory=hashlib.sha256)
    _header: dict[str, bytes] = field(default_factory=lambda: {"name": b"", "value": b""})
    _headers: dict[str, bytes] = field(default_factory=dict[str, bytes])
    _name: str = ""
    _text: bytes = b""
    _is_file: bool = False
    _count: int = 0

    def parser(self, content_type: str) -> MultipartParser:
        """The parser of a body. Refusal when the body is no multipart form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= 70:
            raise Refusal(415, f"Content-Type: got {quote(content_type)}, want a multipart form.")
        callbacks: Any = {
            "on_part_begin": self._begin,
            "on_header_field": partial(self._add_to_header, "name"),
            "on_header_value": partial(self._add_to_header, "value"),
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_content,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._whole,
        }
        return MultipartParser(boundary, callbacks)

    def checked_filename(self) -> str:
        """The name of the file in a complete form with the right fields; else Refusal."""
        if not self.is_whole:
            raise Refusal(400, "The form ends in the middle. Send it again.")
        if self.filename is None:
            raise Refusal(400, "file: required, but not given.", param="file")
        purpose = self.fields.pop("purpose", None)
        if purpose not in PURPOSES:
            want = " or ".join(map(repr, PURPOSES))
            raise Refusal(400, f"purpose: got {quote(purpose)}, want {want}.", param="purpose")
        self.purpose = purpose
        if self.fields:
            name = next(iter(self.fields))
            raise Refusal(400, f"{quote(name)}: there is no such parameter. Remove it.", param=name)
        name = self.filename
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            want = f"1 to {MAX_NAME} printable letters"
            raise Refusal(400, f"filename: got {quote(name)}, want {want}.")
        return name

    def _begin(self) -> None:
        self._count += 1
        if self._count > MAX_PARTS:
            raise Refusal(400, f"The form has more than {MAX_PARTS} parts. Send file and purpose.")
        self._headers, self._text = {}, b""

    def _add_to_header(self, part: str, data: bytes, start: int, end: int) -> None:
        self._header[part] += data[start:end]
        self._bound(self._header[part], MAX_HEADER)

    def _end_header(self) -> None:
        self._headers[self._header["name"].decode("latin-1").lower()] = self._header["value"]
        self._header = {"name": b"", "value": b""}
        if len(self._headers) > MAX_PARTS:
            raise Refusal(400, "A part of the form has too many headers.")

    def _begin_content(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition", b""))
        try:
            self._name = options.get(b"name", b"").decode()
            filename = options.get(b"filename")
            name = None if filename is None else filename.decode()
        except UnicodeDecodeError:
            raise Refusal(400, "A name in the form is not UTF-8.") from None
        self._is_file = self._name == "file"
        if self._is_file and (self.filename is not None or name is None):
            raise Refusal(400, "file: want one part of this name, with a filename.", param="file")
        if self._is_file:
            self.filename = name
        elif self._name in self.fields:
            raise Refusal(400, f"{quote(self._name)} stands twice.", param=self._name)

    def _data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            self._text += data[start:end]
            self._bound(self._text, MAX_FIELD)
            return
        block = data[start:end]
        self.size += len(block)
        if self.size > self.max_file:
            raise Refusal(413, f"file: more than {self.max_file} bytes.", param="file")
        self.digest.update(block)
        self.file.write(block)

    def _end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._text.decode(errors="replace")

    def _whole(self) -> None:
        self.is_whole = True

    def _bound(self, text: bytes, most: int) -> None:
        if len(text) > most:
            raise Refusal(400, f"A field or header of the form has more than {most} bytes.")


async def receive(request: Request, keeper: Keeper, client: Client) -> Upload:
    """Receive and store a file. Refusal, and nothing remains, when it is refused or cut off."""
    header = request.headers.get("content-length", "0")
    size = int(header) if header.isascii() and header.isdigit() else 0
    if size > keeper.config.max_file + OTHER_BYTES:
        raise Refusal(413, f"{size} bytes: at most {keeper.config.max_file} are allowed.")
    shares = shares_of(request)
    arrival = Arrival(client, await run_in_threadpool(_num_bytes, keeper, client), shares.arriving)
    refuse_bytes(client, arrival.kept, size - OTHER_BYTES)
    refuse_on_full_disk(keeper, size)
    with keeper.folder.receiving() as received, arrival.counted():
        parts = await _parts(request, keeper, received, arrival)
        filename = parts.checked_filename()
        # one file of an owner at a time: the files of another owner do not wait for all of his
        async with shares.turn("check", client.name), shares.checks:
            check = rows.check if parts.purpose == FINE_TUNE else rows.count
            report = await run_in_threadpool(check, received.content)
        upload = Upload(
            id=received.id,
            created_at=now(),
            owner=client.name,
            filename=filename,
            purpose=parts.purpose,
            bytes=parts.size,
            sha256=parts.digest.hexdigest(),
            num_rows=report.num_rows,
            kind=report.kind,
            num_mistakes=report.num_mistakes,
            mistakes=[str(mistake) for mistake in report.mistakes],
            places={str(place): count for place, count in sorted(report.places.items())},
        )
        async with shares.turn("keep", client.name):
            await run_in_threadpool(_keep, keeper, client, received, upload)
    return upload


def _num_bytes(keeper: Keeper, client: Client) -> int:
    return 0 if client.quota.bytes is None else bytes_kept(keeper, client.name)


def _keep(keeper: Keeper, client: Client, received: ReceivedUpload, upload: Upload) -> None:
    with room_for_file(keeper, client, upload.bytes):
        received.keep(upload)
    created = seconds(upload.created_at)
    with may_lag():
        keeper.index.write_upload(upload.shown(), owner=upload.owner, created=created)


@dataclass
class Arrival:
    """The bytes of an upload in progress, which its owner's quota bounds while they arrive.

    kept: the bytes of the owner's files when it began. all_of: owner -> bytes of all uploads in
    progress.
    """

    client: Client
    kept: int
    all_of: Counter[str]
    size: int = 0

    @contextmanager
    def counted(self) -> Generator[None]:
        """Inside, its bytes count among those of all uploads in progress."""
        try:
            yield
        finally:
            self.all_of[self.client.name] -= self.size

    def grow_to(self, size: int) -> None:
        """Count what has arrived since. Refusal when it is above the quota."""
        self.all_of[self.client.name] += size - self.size
        self.size = size
        refuse_bytes(self.client, self.kept, self.all_of[self.client.name])


def refuse_on_full_disk(keeper: Keeper, size: int) -> None:
    """Return if so many bytes can be written and the reserve stays free; else Refusal (507)."""
    free = shutil.disk_usage(keeper.folder.base.path).free
    if free - size <= keeper.config.reserve:
        text = (
            f"The disk has {free >> 20} MiB free, of which {keeper.config.reserve >> 20} are kept "
            "for running jobs. Delete files, or ask whoever runs the service for room."
        )
        raise Refusal(507, text, code="insufficient_storage")


async def _parts(
    request: Request, keeper: Keeper, received: ReceivedUpload, arrival: Arrival
) -> Parts:
    with received.content.open("r+b") as file:
        parts = Parts(file, keeper.config.max_file)
        parser = parts.parser(request.headers.get("content-type", ""))
        blocks, total, looked = request.stream().__aiter__(), 0, 0
        try:
            while True:
                with anyio.fail_after(keeper.config.silence_s):
                    block = await anext(blocks)
                parser.write(block)
                arrival.grow_to(parts.size)
                total += len(block)
                if total > keeper.config.max_file + OTHER_BYTES:
                    raise Refusal(413, f"More than {keeper.config.max_file} bytes.", param="file")
                if total - looked > LOOK_BYTES:
                    looked = total
                    refuse_on_full_disk(keeper, 0)
        except StopAsyncIteration:
            return parts
        except MultipartParseError as error:
            raise Refusal(400, f"The form is malformed: {quote(str(error))}.") from None
        except TimeoutError:
            text = f"Nothing came for {keeper.config.silence_s:.0f} s: the upload is aborted."
            raise Refusal(408, text) from None
        except ClientDisconnect:
            raise Refusal(400, "The upload was cut off.") from None


def places_of(keeper: Keeper, upload: Upload) -> dict[int, int]:
    """How many rows of a file have each place (RowReport)."""
    if upload.places is None:
        return dict(rows.check(keeper.folder.uploads / upload.id / "content").places)
    return {int(place): count for place, count in upload.places.items()}


def remove(folder: UploadFolder) -> None:
    """Delete a file. A job whose files were checked has its own copy of the rows."""
    aside = folder.path.with_name(f".{folder.path.name}.tmp")
    os.rename(folder.path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def unreadable(file_id: str, reason: str, at: float, known: Mapping[str, Any] | None) -> Upload:
    """What is shown of a file whose facts cannot be read: an error, and what was known of it.

    at: seconds since 1970.
    """
    created_at = datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds")
    nothing = {"id": file_id, "created_at": created_at, "owner": "", "filename": "unknown"}
    facts: dict[str, Any] = {"purpose": FINE_TUNE, "bytes": 0, "sha256": "", "num_rows": 0}
    facts |= {**nothing, "kind": None, **(known or {})}
    mistake = f"its facts cannot be read: {reason}"
    return Upload.model_validate({**facts, "num_mistakes": 1, "mistakes": [mistake]})


def file_object(upload: Upload) -> dict[str, Any]:
    """The file in the format of the OpenAI API. Source: openai 3.54, types/file_object.py."""
    details = None
    if upload.num_mistakes:
        mistakes = "\n".join(upload.mistakes)
        details = f"{upload.num_mistakes} mistake(s)\n{mistakes}"
    return {
        "id": upload.id,
        "object": "file",
        "bytes": upload.bytes,
        "created_at": int(seconds(upload.created_at)),
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": "error" if details else "processed",
        "status_details": details,
        "expires_at": None,
    }
