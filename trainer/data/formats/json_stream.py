"""The items of a JSON list, one at a time, for files that do not fit into memory."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any, cast

import ijson

from trainer.data.formats.json_text import TOO_DEEP, BadJson, is_too_deep

_HIGH, _LOW = rb"[dD][89abAB][0-9a-fA-F]{2}", rb"[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = re.compile(rb"\\u(?:%s(?!\\u%s)|(?<!\\u%s\\u)%s)" % (_HIGH, _LOW, _HIGH, _LOW))
_FIRST_HALF = re.compile(rb"\\u" + _HIGH)
_PAIR_BYTES = 12  # \ud83d\ude00
_MAX_OPEN = 5000  # brackets more than are closed in one item; ijson crashes beyond 70,000 levels


def json_items(file: io.BufferedReader, prefix: str = "item") -> Iterator[Any]:
    """The items under a prefix of ijson, "item" for those of a list.

    BadJson for malformed JSON, and for what json_text.py refuses. A byte order mark is skipped.
    """
    repeated: list[str] = []  # keys of the items that were read, which may be further on

    class Object(dict[str, Any]):
        twice: str | None = None

        def __setitem__(self, key: str, value: Any) -> None:
            if key in self:
                repeated.append(key)
                self.twice = key
            dict.__setitem__(self, key, value)

        def __reduce__(self) -> Any:
            return dict, (dict(self),)

    how: dict[str, Any] = {"use_float": True, "map_type": Object}
    try:
        stream = checked(file)
        for item in ijson.items(stream, prefix, **how):
            stream.num_open = 0
            if is_too_deep(item):
                raise BadJson(TOO_DEEP)
            if repeated and (key := _repeated_key(item)) is not None:
                raise BadJson(f"the key {key!a} stands twice in one object; leave one")
            yield item
    except (ijson.JSONError, UnicodeDecodeError) as error:
        reason = str(error).strip().split("\n", 1)[0].rstrip(".")
        raise BadJson(
            f"malformed JSON ({reason}); write one list of objects. NaN is no JSON, and an integer "
            "beyond 64 bits is wanted as text"
        ) from None


def checked(file: io.BufferedReader) -> Any:
    """The same bytes for ijson: BadJson for half of a surrogate pair, which it would read as a
    question mark, and for nesting without end, at which it would crash. Give ijson use_float=True:
    without it a number of thousands of digits crashes it, too (ijson 3.4).
    """
    if file.peek(3).startswith(b"\xef\xbb\xbf"):
        file.read(3)
    return _Checked(file)


def _repeated_key(value: Any) -> str | None:
    """A key that stood twice in an object of an item; None when there is none."""
    waiting: list[Any] = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if (key := getattr(one, "twice", None)) is not None:  # pyright: ignore[reportUnknownArgumentType]
                return key
            waiting += cast("dict[str, Any]", one).values()
        elif isinstance(one, list):
            waiting += cast("list[Any]", one)
    return None


class _Checked:
    """A file for ijson."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._rest = b""  # the begun escape at the end of what was read
        self._line = 1
        self.num_open = 0  # brackets, those in texts too, since the last item that was whole

    def read(self, size: int = -1) -> bytes:
        """The next bytes; b"" at the end."""
        if size == 0:
            return b""  # ijson asks so whether the file is one of bytes
        seen, end = self._rest, 0
        while not end:
            content = self._file.read(size)
            seen += content
            end = _end_of_escapes(seen) if content else len(seen)
            if not content:
                break
        self._rest, seen = seen[end:], seen[:end]
        for match in _HALF.finditer(seen) if b"\\ud" in seen or b"\\uD" in seen else ():
            before = seen[: match.start()]
            if (len(before) - len(before.rstrip(b"\\"))) % 2:
                continue  # a backslash, and letters behind it
            line = self._line + before.count(b"\n")
            raise BadJson(
                f"{match[0].decode()} in line {line} is half of a surrogate pair, as of an emoji "
                "that was cut in two; take it out"
            )
        self._line += seen.count(b"\n")
        self.num_open += seen.count(b"[") + seen.count(b"{") - seen.count(b"]") - seen.count(b"}")
        if self.num_open > _MAX_OPEN:
            raise BadJson(TOO_DEEP)
        return seen


def _end_of_escapes(seen: bytes) -> int:
    """Where the last bytes begin that may be a part of an escape."""
    end = seen.find(b"\\", max(0, len(seen) - _PAIR_BYTES))
    if end < 0:
        return len(seen)
    if _FIRST_HALF.fullmatch(seen, max(0, end - 6), end):
        end -= 6
    while end > 0 and seen[end - 1 : end] == b"\\":
        end -= 1
    return end
