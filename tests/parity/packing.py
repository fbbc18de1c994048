"""The recordings of this clone: a folder of packed files, and the folder that they are unpacked to.

NAME.planes.xz holds the bytes of NAME in four groups: every first byte of four, every second, third
and fourth, so that the exponents of fp32 numbers stand together, which is all of them that
compresses. NAME.xz holds the bytes as they are, and any other file is what it is. same.json names
files that are equal to another one: {"K/x.safetensors": "H/x.safetensors"}.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import lzma
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

PACKED = Path(__file__).parent / "recorded"
SAME = "same.json"
_PLANES, _PLAIN = ".planes.xz", ".xz"
_WIDTH = 4  # bytes of an fp32 number
# Neither the neighbours nor the place of a byte say anything of it.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 0, "pb": 0}]


def packed_numbers(content: bytes) -> bytes:
    """The content of NAME.planes.xz."""
    planes = b"".join(content[start::_WIDTH] for start in range(_WIDTH))
    return lzma.compress(planes, filters=_FILTERS)


def unpacked_numbers(packed: bytes) -> bytes:
    """The content of NAME, out of that of NAME.planes.xz."""
    planes = lzma.decompress(packed)
    content, start = bytearray(len(planes)), 0
    for place in range(_WIDTH):
        size = len(range(place, len(planes), _WIDTH))
        content[place::_WIDTH] = planes[start : start + size]
        start += size
    return bytes(content)


def write_packed(path: Path, content: bytes) -> None:
    """Write `content` packed, beside where `path` would be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        path.with_name(path.name + _PLANES).write_bytes(packed_numbers(content))
    elif len(content) > 1200:  # what is shorter is worth reading as it is
        path.with_name(path.name + _PLAIN).write_bytes(lzma.compress(content, preset=9))
    else:
        path.write_bytes(content)


@cache
def unpacked_folder() -> Path:
    """The recordings of this clone as plain files, below the folder for temporary files.

    It is made once for every content, so that processes that start one another share it.
    """
    files = sorted(path for path in PACKED.rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(PACKED)).encode() + path.read_bytes())
    name = f"lathe-recorded-{os.getuid()}-{digest.hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    with open(f"{folder}.lock", "w") as held:
        # without it, a process that comes second removes what the first one reads
        fcntl.flock(held, fcntl.LOCK_EX)
        if not _is_complete(folder, files):
            made = Path(tempfile.mkdtemp(prefix=name))
            _unpack(files, made)
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return folder


def _plain_name(path: Path) -> Path:
    name = str(path.relative_to(PACKED))
    return Path(name.removesuffix(_PLANES).removesuffix(_PLAIN))


def _same_files() -> dict[str, str]:
    return json.loads((PACKED / SAME).read_text())


def _is_complete(folder: Path, files: list[Path]) -> bool:
    """Whether this user's folder holds every file: programs that clean up remove single ones."""
    if not folder.is_dir() or folder.stat().st_uid != os.getuid():
        return False
    names = [_plain_name(path) for path in files] + [Path(name) for name in _same_files()]
    return all((folder / name).is_file() for name in names)


def _unpack(files: list[Path], folder: Path) -> None:
    for path in files:
        target = folder / _plain_name(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.name.endswith(_PLANES):
            target.write_bytes(unpacked_numbers(path.read_bytes()))
        elif path.name.endswith(_PLAIN):
            target.write_bytes(lzma.decompress(path.read_bytes()))
        else:
            shutil.copyfile(path, target)
    for name, source in _same_files().items():
        shutil.copyfile(folder / source, folder / name)
