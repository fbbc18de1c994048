"""The items of a JSON list, one at a time, for files that do not fit into memory."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, cast

import ijson

from trainer.data.formats.json_text import INFINITE, TOO_DEEP, TOO_LONG, BadJson, is_too_deep

_HIGH, _LOW = rb"[dD][89abAB][0-9a-fA-F]{2}", rb"[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = re.compile(rb"\\u(?:%s(?!\\u%s)|(?<!\\u%s\\u)%s)" % (_HIGH, _LOW, _HIGH, _LOW))
_FIRST_HALF = re.compile(rb"\\u" + _HIGH)
_PAIR_BYTES = 12  # \ud83d\ude00
_MAX_OPEN = 5000  # open brackets; ijson crashes beyond 70,000, and is quadratic in their number
_MAX_NUMBER = 40  # bytes of a number or a word at the end of what was read, which may go on
# ijson looks at all of a text again whenever more of it is read, so that the time grows with the
# square of its length unless readings grow as it does. Up to here: about 5 copies are made.
_MAX_READING = 1 << 25
_WORD = b"+-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
# a text, to its end or that of what was read, or a word that is no JSON and that Python writes
_TEXT_OR_CONSTANT = re.compile(
    rb'(?P<text>"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z))|NaN|-?Infinity', re.DOTALL
)


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
            if is_too_deep(item):
                raise BadJson(TOO_DEEP)
            if repeated and (key := _repeated_key(item)) is not None:
                raise BadJson(f"the key {key!a} stands twice in one object; leave one")
            yield item
    except (ijson.JSONError, UnicodeDecodeError) as error:
        reason = str(error).strip().split("\n", 1)[0].rstrip(".")
        if reason.endswith("overflow"):
            raise BadJson(TOO_LONG if "integer" in reason else INFINITE) from None
        raise BadJson(f"malformed JSON ({reason}); write one list of objects") from None


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
    """A file for ijson, whose NaN are null."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._rest = b""  # the begun escape, number or word at the end of what was read
        self._line = 1
        self._num_open = 0  # brackets, outside of texts
        self._is_in_text = False
        self._num_of_text = 0  # bytes of a text that goes on, as far as it was read
        self._problem: str | None = None  # of what stands behind the bytes that were given out

    def read(self, size: int = -1) -> bytes:
        """The next bytes; b"" at the end."""
        if size == 0:
            return b""  # ijson asks so whether the file is one of bytes
        if self._problem is not None:
            raise BadJson(self._problem)
        block, end = self._rest, 0
        while not end:
            content = self._file.read(max(size, min(self._num_of_text, _MAX_READING)))
            block += content
            end = _end_of_whole(block) if content else len(block)
            if not content:
                break
        self._rest, block = block[end:], block[:end]
        for match in _HALF.finditer(block) if b"\\ud" in block or b"\\uD" in block else ():
            before = block[: match.start()]
            if (len(before) - len(before.rstrip(b"\\"))) % 2:
                continue  # a backslash, and letters behind it
            line = self._line + before.count(b"\n")
            raise BadJson(
                f"{match[0].decode()} in line {line} is half of a surrogate pair, as of an emoji "
                "that was cut in two; take it out"
            )
        self._line += block.count(b"\n")
        if b"NaN" in block or b"Infinity" in block:
            block = self._without_constants(block)
        self._look_at_brackets(block)
        return block

    def _look_at_brackets(self, seen: bytes) -> None:
        """Follow texts and brackets; BadJson where too many are open."""
        # what was read begins at no half of an escape, so that pairs are told from the left
        parts = seen.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._is_in_text :: 2]).translate(None, _NO_BRACKETS)
        self._is_in_text ^= len(parts) % 2 == 0
        is_same_text = self._is_in_text and len(parts) == 1
        self._num_of_text = self._num_of_text + len(seen) if is_same_text else 0
        opened = outside.count(b"[") + outside.count(b"{")
        if self._num_open + opened > _MAX_OPEN:
            steps = map(_STEPS.__getitem__, outside)
            if max(accumulate(steps, initial=self._num_open)) > _MAX_OPEN:
                raise BadJson(TOO_DEEP)
        self._num_open += 2 * opened - len(outside)

    def _without_constants(self, seen: bytes) -> bytes:
        """What was read with null for NaN outside of texts, up to an infinite number."""
        begun = b'"' if self._is_in_text else b""
        parts, place = [], 0
        for match in _TEXT_OR_CONSTANT.finditer(begun + seen):
            parts.append(match.string[place : match.start()])
            if match["text"] is None and match[0] != b"NaN":
                self._problem = INFINITE
                return b"".join(parts)[len(begun) :]
            parts.append(b"null" if match["text"] is None else match[0])
            place = match.end()
        parts.append((begun + seen)[place:])
        return b"".join(parts)[len(begun) :]


def _end_of_whole(seen: bytes) -> int:
    """Where the last bytes begin that may be a part of an escape, of a number or of a word."""
    last = seen[-_MAX_NUMBER:]
    begun = len(last) - len(last.rstrip(_WORD))
    stop = len(seen) - begun if begun < _MAX_NUMBER else len(seen)
    end = seen.find(b"\\", max(0, stop - _PAIR_BYTES), stop)
    if end < 0:
        return stop
    if _FIRST_HALF.fullmatch(seen, max(0, end - 6), end):
        end -= 6
    before = len(seen[:end].rstrip(b"\\"))
    return end - (end - before) % 2
