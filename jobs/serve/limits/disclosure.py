"""What answers say of the server's own places: everything to its operators, nothing to tenants.

An operator is a client of the role admin. For everybody else two things happen. Texts that the
server has of schedulers and trainings lose absolute paths where they are shown (`for_client`),
and the folders of the server itself are cleared from every answer, whatever route gives it (Veil).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from starlette.datastructures import MutableHeaders
from starlette.types import Message
from starlette.types import Send as SendMessage

from jobs.errors import HIDDEN, for_client

RANK = r"(?:\[[^\]]{1,40}\]:? ?)*"  # "[rank0]: ", in front of each line of a rank
TRACEBACK = re.compile(rf'{RANK}(?:Traceback \(most recent call last\)| *File ".*", line \d)')
INSIDE = re.compile(rf"{RANK}(?:  |\t|$)")
# Kinds of answers that the server writes itself; files that a client has uploaded stay as they are.
CLEARED = ("application/json", "text/event-stream", "text/plain")
# In front of a path: the beginning of a text, or what JSON writes for a control character.
BEFORE = rb"(?:(?<!\w)|(?<=\\[bfnrt])|(?<=\\u[0-9a-f]{4}))"


def for_tenant(value: Any, base: Path) -> Any:
    """A JSON value in which every text is as clients may read it (errors.for_client)."""
    if isinstance(value, str):
        return for_client(value, base)
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {name: for_tenant(one, base) for name, one in items}
    if isinstance(value, list | tuple):
        return [for_tenant(one, base) for one in cast("Sequence[Any]", value)]
    return value


def row_of_tenant(row: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """A row of `status` for a client that is no operator: its folder is its id."""
    return {**for_tenant(row, base), "folder": row["exp_id"], "sync_hint": None}


def log_of_tenant(lines: Iterable[str], base: Path) -> Iterator[str]:
    """Lines of a log as clients may read them, and of a traceback its last line alone."""
    is_inside = False
    for line in lines:
        is_inside = bool(TRACEBACK.match(line) or (is_inside and INSIDE.match(line)))
        if not is_inside:
            yield for_client(line, base)


@dataclass(frozen=True)
class Veil:
    """Clears answers of some folders. base: the savedir_base, below which paths are relative.
    others: folders of which nothing is shown.
    """

    base: re.Pattern[bytes]
    others: re.Pattern[bytes]

    @classmethod
    def of(cls, base: Path, others: Iterable[Path]) -> Veil:
        """The veil over these folders, their real paths included."""
        home = Path(os.path.expanduser("~"))
        others = {*others, home, Path(sys.prefix), Path(sys.base_prefix)}
        return cls(_pattern([base]), _pattern(others))

    def clear(self, content: bytes) -> bytes:
        """Some JSON or text without these folders."""
        content = self.base.sub(lambda match: b"" if match[0].endswith(b"/") else b".", content)
        return self.others.sub(lambda match: HIDDEN.encode(), content)

    def over(self, send: SendMessage) -> SendMessage:
        """`send`, for a client from whom these folders are hidden."""
        start: Message | None = None
        is_cleared = False

        async def send_cleared(message: Message) -> None:
            nonlocal start, is_cleared
            if message["type"] == "http.response.start":
                kind = MutableHeaders(scope=message).get("content-type", "")
                is_cleared = kind.startswith(CLEARED)
                if is_cleared:  # its length is known when it has been cleared
                    start = message
                    return
            elif message["type"] == "http.response.body" and is_cleared:
                message = {**message, "body": self.clear(message.get("body", b""))}
                if start is not None:
                    headers = MutableHeaders(scope=start)
                    if "content-length" in headers and not message.get("more_body"):
                        headers["content-length"] = str(len(message["body"]))
                    await send(start)
                    start = None
            await send(message)

        return send_cleared


def _pattern(folders: Iterable[Path]) -> re.Pattern[bytes]:
    """What any of these folders is in JSON or in plain text, with the slash behind it."""
    paths = {str(path) for path in folders} | {os.path.realpath(path) for path in folders}
    texts = {text.rstrip("/") for text in paths if text.startswith("/")} - {""}
    forms = {text.encode(errors="surrogateescape") for text in texts}
    for is_ascii in (True, False):
        dumped = (json.dumps(text, ensure_ascii=is_ascii) for text in texts)
        forms |= {text[1:-1].encode(errors="surrogateescape") for text in dumped}
    longest_first = sorted(forms, key=len, reverse=True)
    names = rb"|".join(re.escape(form) for form in longest_first) or rb"(?!)"
    return re.compile(BEFORE + rb"(?:" + names + rb")(?:/|(?![\w\-]|\.\w))")
