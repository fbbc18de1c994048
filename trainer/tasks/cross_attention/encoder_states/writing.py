"""States written shard by shard over ranks, restartable after a kill."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.data.shard_folder import FORMAT
from trainer.errors import DivergedError
from trainer.files.safetensors_file import blocks_of, checksum_of
from trainer.tasks.cross_attention.encoder_states.layout import (
    KEY_BYTES,
    TORCH,
    Dtype,
    StatesPlan,
    key_of,
    quantise,
    shard_bounds,
    shards_in,
)

logger = logging.getLogger(__name__)

Place = tuple[int, ...]  # where a context stands in the data
# token ids of contexts -> their (L, D) states, on the CPU
Encoder = Callable[[Sequence[np.ndarray]], list[Tensor]]


@dataclass(frozen=True)
class Contexts:
    """Every distinct context of some data, in the order in which they are met first."""

    keys: np.ndarray  # (E,) 32 bytes each
    lengths: np.ndarray  # (E,) int64, tokens
    ids: Callable[[int], np.ndarray]  # of one of them
    met: int  # contexts before repeated ones were left out

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class Missing:
    """What is still to be written, over all ranks."""

    shards: list[int]
    contexts: int
    tokens: int
    bytes: int


def distinct(
    met: Iterable[tuple[Place, np.ndarray]], ids_at: Callable[[Place], np.ndarray]
) -> Contexts:
    """The distinct contexts among all that are met.

    Their ids are not kept, but read again where they stand.
    """
    visited: set[bytes] = set()
    keys: list[bytes] = []
    lengths: list[int] = []
    places: list[Place] = []
    count = 0
    for place, ids in met:
        count += 1
        key = key_of(ids)
        if key not in visited:
            visited.add(key)
            keys.append(key)
            lengths.append(len(ids))
            places.append(place)
    table = np.asarray(places, dtype=np.int64)
    return Contexts(
        np.frombuffer(b"".join(keys), dtype=f"V{KEY_BYTES}"),
        np.asarray(lengths, dtype=np.int64),
        lambda entry: ids_at(tuple(table[entry].tolist())),
        count,
    )


def missing(folder: Path, contexts: Contexts, plan: StatesPlan) -> Missing:
    """What a folder still lacks of its plan."""
    bounds = shard_bounds(contexts.lengths, plan.shard_tokens)
    shards = shards_in(folder).missing(len(bounds))
    entries = sum(len(bounds[number]) for number in shards)
    tokens = sum(int(contexts.lengths[bounds[n].start : bounds[n].stop].sum()) for n in shards)
    size = plan.bytes_needed(contexts=entries, tokens=tokens, shards=len(shards))
    return Missing(shards, entries, tokens, size)


def refuse_small_disk(folder: Path, lacking: Missing) -> None:
    """StorageError when the disk of `folder` has no room for what is still to be written."""
    advice = (
        "Free some space, write elsewhere with --out, or take data.state_dtype='int8' or a lower "
        "data.context_tokens."
    )
    shards_in(folder).refuse_small_disk(lacking.bytes, "states", advice)


def gib(size: int) -> str:
    """A number of bytes as a person reads it."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"


def begun(folder: Path, plan: StatesPlan) -> StatesPlan:
    """The plan that the folder was begun with, which is `plan` for a new one. A collective.

    ConfigError when it was begun with other contexts.
    """
    stated = {"format": FORMAT, **asdict(plan)}
    return StatesPlan(**shards_in(folder).begin(stated, choice="shard_tokens"))


def write(
    folder: Path,
    contexts: Contexts,
    encode: Encoder,
    *,
    plan: StatesPlan,
    batch_tokens: int,
    tell: Callable[[int], None] = lambda _: None,
) -> None:
    """Write every shard that is missing of a folder that was `begun`; of the missing ones, rank r
    takes every r-th.

    A collective. batch_tokens: padded tokens that `encode` gets at a time, at most, but for a
    longer context. tell: is called with the number of contexts of this rank that were encoded just
    now.
    """
    bounds = shard_bounds(contexts.lengths, plan.shard_tokens)
    shards = shards_in(folder)
    for number in shards.own_missing(len(bounds)):
        states = _encode_shard(contexts, bounds[number], encode, plan, batch_tokens, tell)
        keys = contexts.keys[bounds[number].start : bounds[number].stop]
        shards.write_shard(number, blocks_of(_tensors(keys, states, plan.dtype)))
        logger.debug("%s: %d contexts", shards.shard(number), len(states))
    shards.finish(len(bounds))


def _encode_shard(
    contexts: Contexts,
    entries: range,
    encode: Encoder,
    plan: StatesPlan,
    batch_tokens: int,
    tell: Callable[[int], None],
) -> list[Tensor]:
    """(L, D) states of the contexts of one shard, in their order, on the CPU. Batches never cross
    shards.
    """
    states: dict[int, Tensor] = {}
    for batch in _batches(entries, contexts.lengths, batch_tokens):
        for entry, states_LD in zip(
            batch, encode([contexts.ids(entry) for entry in batch]), strict=True
        ):
            shape = (int(contexts.lengths[entry]), plan.width)
            assert tuple(states_LD.shape) == shape, (
                f"states of {tuple(states_LD.shape)}, want {shape}"
            )
            if not torch.isfinite(states_LD).all():
                raise DivergedError(
                    "a state holds NaN or infinity. Use train.precision='bf16' or 'fp32', or "
                    "another base."
                )
            states[entry] = states_LD
        tell(len(batch))
    return [states[entry] for entry in entries]


def _batches(entries: range, lengths: np.ndarray, batch_tokens: int) -> list[list[int]]:
    """Contexts of like length, the longest first, as many as the budget takes."""
    batches: list[list[int]] = []
    room = 0
    for entry in sorted(entries, key=lambda entry: (-lengths[entry], entry)):
        if room < 1:
            batches.append([])
            room = max(1, batch_tokens // max(1, int(lengths[entry])))
        batches[-1].append(entry)
        room -= 1
    return batches


def _tensors(keys: np.ndarray, states: list[Tensor], dtype: Dtype) -> dict[str, Tensor]:
    lengths = torch.tensor([len(states_LD) for states_LD in states])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    joined = torch.cat(states)
    tensors = {
        "offsets": offsets,
        "keys": torch.frombuffer(bytearray(keys.tobytes()), dtype=torch.uint8),
    }
    tensors["keys"] = tensors["keys"].view(len(states), KEY_BYTES)
    if dtype == "int8":
        tensors["states"], tensors["scales"] = quantise(joined)
    else:
        tensors["states"] = joined.to(TORCH[dtype])
    spans = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    parts = [tensors[field] for field in ("states", "scales") if field in tensors]
    tensors["checksums"] = torch.tensor(
        [checksum_of([part[a:b] for part in parts]) for a, b in spans]
    )
    return tensors
