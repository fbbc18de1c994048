"""Files of a checkpoint: tensors as safetensors, the rest as JSON.

They are written once, and fsynced and checksummed on the way.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import CheckpointError
from trainer.files.atomic import refusals

Block = bytes | memoryview
# bytes written and hashed at a time: small enough for the cache that hashing and writing share
BLOCK = 4 * 2**20
DTYPES = {  # how a safetensors header spells them (its README, "Format")
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class WrittenFile:
    """One file of a checkpoint as its manifest lists it."""

    name: str
    size: int  # bytes
    sha256: str


def bytes_needed(*shards: Mapping[str, Tensor]) -> int:
    """Bytes that `write_tensors` puts on the disk for these dictionaries, headers included."""
    return sum(
        len(_header(tensors)) + sum(t.nbytes for t in tensors.values()) for tensors in shards
    )


def write_tensors(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> WrittenFile:
    """Write a safetensors file (`write_blocks`).

    One tensor at a time is brought to the CPU: safetensors' own `save` would first build the whole
    file in memory, its `save_file` would need a second pass to hash.
    """
    return write_blocks(folder / name, blocks_of(tensors))


def write_json(folder: Path, name: str, value: Mapping[str, Any]) -> WrittenFile:
    """Write `value` as indented JSON, fsynced."""
    return write_blocks(folder / name, [(json.dumps(value, indent=1) + "\n").encode()])


def blocks_of(tensors: Mapping[str, Tensor]) -> Iterator[Block]:
    """The bytes of a safetensors file."""
    blocks = (
        tensors[key].detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
        for key in _order(tensors)
    )
    return itertools.chain([_header(tensors)], blocks)


def write_blocks(path: Path, blocks: Iterable[Block]) -> WrittenFile:
    """Write a new file, fsynced. The checksum is computed during the writing, from the bytes that
    go to the disk.
    """
    digest, size = hashlib.sha256(), 0
    with refusals(path), path.open("xb") as file, ThreadPoolExecutor(1) as hasher:
        for block in map(memoryview, blocks):
            for start in range(0, len(block), BLOCK):
                piece = block[start : start + BLOCK]
                hashed = hasher.submit(digest.update, piece)
                file.write(piece)
                hashed.result()
            size += len(block)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(path.name, size, digest.hexdigest())


def tensors_of(path: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, CPU tensor) of one safetensors file, views of it; CheckpointError when unreadable."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}. Use another checkpoint.") from error


def checksum_of(parts: Sequence[Tensor]) -> int:
    """CRC-32 over the bytes of some tensors."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part.contiguous().reshape(-1).view(torch.uint8).numpy().data, crc)
    return crc


def checksum_problem(folder: Path, record: WrittenFile) -> str | None:
    """How a file's content differs from its record; None if it does not."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(BLOCK, max(record.size, 1))))
    try:
        with (folder / record.name).open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        return f"{record.name}: cannot be read ({error.strerror})"
    got = digest.hexdigest()
    return (
        None
        if got == record.sha256
        else f"{record.name}: checksum {got[:12]}, want {record.sha256[:12]}"
    )


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    # transformers refuses a file without it
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in _order(tensors):
        tensor = tensors[key]
        start, end = end, end + tensor.nbytes
        entries[key] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start on an 8-byte boundary
    return len(text).to_bytes(8, "little") + text


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Wide types first, so that tensors stay aligned without holes (which the format forbids)."""
    return sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
