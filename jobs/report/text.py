"""Text for people: without control characters, and with short numbers and times."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

COLOUR = re.compile(r"(\x1b\[[0-9;:]{0,32}m)")
HALF = re.compile(r"[\ud800-\udfff]")  # of a surrogate pair
CONCEAL = "8"  # the one ANSI "colour" that hides text

# C0 but tab, DEL, C1, and the marks that reorder letters (CVE-2021-42574); lone surrogates cannot
# be printed at all
CONTROL = re.compile(
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def visible(text: str, *, keep_colours: bool = False) -> str:
    """`text` with every control character but the tab made visible: ESC as ␛, others as \\x9b or
    \\u202e.

    keep_colours: ANSI colours stay and are reset at the end of the text; otherwise they are
    removed.
    """
    if not CONTROL.search(text):
        return text
    pieces = COLOUR.split(text)
    pieces[::2] = [CONTROL.sub(_picture, piece) for piece in pieces[::2]]
    pieces[1::2] = [_colour(piece, keep=keep_colours) for piece in pieces[1::2]]
    safe = "".join(pieces)
    return f"{safe}\x1b[0m" if "\x1b" in safe else safe


def json_lines(rows: Sequence[Any]) -> str:
    """A list as JSON, a row a line: thousands of rows are written by the fast encoder, which knows
    no indents.
    """
    return f"[{','.join(chr(10) + json.dumps(row) for row in rows)}\n]"


def plain(value: Any) -> Any:
    """A JSON value of other people's files as every reader of JSON takes it: half of a surrogate
    pair becomes U+FFFD, and what is no finite number null.
    """
    if isinstance(value, str):
        return HALF.sub("\ufffd", value) if HALF.search(value) else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {plain(name): plain(one) for name, one in items}
    if isinstance(value, list | tuple):
        return [plain(one) for one in cast("Sequence[Any]", value)]
    return value


def printable(text: str) -> str:
    """`text` of several lines, each made `visible`, so that it cannot control the terminal."""
    return "\n".join(visible(line) for line in text.split("\n"))


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's control pictures
    if code == 0x7F:
        return "␡"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _colour(sequence: str, *, keep: bool) -> str:
    if CONCEAL in {number.lstrip("0") for number in re.split("[;:]", sequence[2:-1])}:
        return CONTROL.sub(_picture, sequence)
    return sequence if keep else ""


def number_text(value: float) -> str:
    """A number in four digits: 5.123, 0.03120, 3.0e-05, 12000; whole ones in full."""
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:#.4g}".rstrip(".") if abs(value) < 1e4 else f"{value:.0f}"
    return f"{value:.1e}"


def duration(seconds: float) -> str:
    """Seconds as a short text: 45 s, 12 min, 3 h 05, 2 d 4 h."""
    minutes = round(seconds / 60)
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d}" if hours < 24 else f"{hours // 24} d {hours % 24} h"
