"""Where each row of a file of JSON lines begins."""

from __future__ import annotations

import bisect
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

_BLOCK = 8 << 20  # bytes that are looked at together
_BRACE, _END = ord("{"), ord("\n")


def write_offsets(path: Path, offsets: Path) -> tuple[int, list[int], str]:
    """Write the int64 byte offset of every line that is not blank to a new file.

    Returns their number, the numbers of the blank lines (from 1), and the sha256 of the content.
    """
    blanks: list[int] = []
    sha = hashlib.sha256()
    num_rows = num_lines = place = 0
    begun = b""  # the line that the last block has cut
    with path.open("rb") as file, offsets.open("wb") as out, ThreadPoolExecutor(1) as hasher:
        while block := file.read(_BLOCK):
            hashed = hasher.submit(sha.update, block)
            whole = begun + block
            end = whole.rfind(b"\n") + 1
            starts = _starts(whole, end)
            rows = _not_blank(whole, starts, end)
            (starts[rows] + place).astype("<i8").tofile(out)
            blanks += (num_lines + 1 + np.flatnonzero(~rows)).tolist()
            num_rows, num_lines = num_rows + int(rows.sum()), num_lines + len(starts)
            place, begun = place + end, whole[end:]
            hashed.result()
        if begun.strip():
            np.array([place], "<i8").tofile(out)
            num_rows += 1
        out.flush()
        os.fsync(out.fileno())
    return num_rows, blanks, sha.hexdigest()


def _starts(block: bytes, end: int) -> np.ndarray:
    """Where the lines of block[:end] begin; it ends with a line."""
    if not end:
        return np.zeros(0, np.int64)
    ends = np.flatnonzero(np.frombuffer(block, np.uint8, end) == _END)
    return np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])


def _not_blank(block: bytes, starts: np.ndarray, end: int) -> np.ndarray:
    """(lines,) bool. Most rows begin with a brace, and only other lines are looked at."""
    if not end:
        return np.zeros(0, bool)
    rows = np.frombuffer(block, np.uint8, end)[starts] == _BRACE
    for line in np.flatnonzero(~rows):
        stop = starts[line + 1] if line + 1 < len(starts) else end
        rows[line] = bool(block[starts[line] : stop].strip())
    return rows


def line_of(row: int, blanks: list[int]) -> int:
    """The number of the line (from 1) of a row (from 0), given the numbers of the blank lines."""
    # blank line b, the j-th (from 0), has b - 1 - j rows before it
    before = bisect.bisect_right(range(len(blanks)), row, key=lambda j: blanks[j] - 1 - j)
    return row + 1 + before
