"""Opens files to read, compressed (.gz) or not, and stops at a file that unpacks without end.

A few kilobytes of gzip can hold gigabytes of one repeated byte. Real texts are a third to a
fiftieth of their size when packed, so what unpacks to more than MAX_RATIO times its size is
refused, once it has unpacked to FREE_BYTES. A large corpus is read whatever its size.
"""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import IO, Any, cast

from trainer.errors import DataError

FREE_BYTES = 256 << 20  # that any file may unpack to
MAX_RATIO = 250  # of unpacked to packed bytes, beyond that; gzip itself reaches 1030
MAX_LINE = 256 << 20  # bytes of a line; a row of a file is held in memory
_BUFFER = 1 << 20
_OTHER_PACKINGS = (".bz2", ".xz", ".zst", ".zip", ".7z", ".lz4", ".z", ".tgz", ".tar")


def open_file(path: Path) -> io.BufferedReader:
    """A file's unpacked bytes. Reading on raises DataError for what unpacks without end, and what
    gzip raises for a torn file.
    """
    if path.suffix.lower() != ".gz":
        return path.open("rb")
    return io.BufferedReader(_Unpacked(path), _BUFFER)


def packing(name: str) -> str | None:
    """The suffix of a packing that is not read (.bz2, .xz, ...); None for any other name."""
    suffix = Path(name).suffix.lower()
    return suffix if suffix in _OTHER_PACKINGS else None


class _Unpacked(io.RawIOBase):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._packed = path.open("rb")
        self._content = cast("IO[bytes]", gzip.GzipFile(fileobj=self._packed))
        self._unpacked_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._content.read(len(buffer))
        buffer[: len(content)] = content
        self._unpacked_bytes += len(content)
        packed_bytes = self._packed.tell()
        if self._unpacked_bytes > max(FREE_BYTES, MAX_RATIO * packed_bytes):
            raise DataError(
                f"{self._path}: its first {packed_bytes:,} bytes unpack to more than "
                f"{self._unpacked_bytes:,}, {MAX_RATIO} times as many; want a file of texts. "
                "Unpack it (gunzip) if this is right, and name the unpacked file."
            )
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._content.close()
            self._packed.close()
        super().close()
