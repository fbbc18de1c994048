"""NEFTune: in training, noise is added to the embeddings of the tokens that a model reads.

Each number of the noise is uniform between -s and s, where s = alpha / sqrt(L * D): L real tokens
of a row, D numbers of an embedding. Source: Jain et al. 2023 (arXiv 2310.05914), algorithm 1.

No random state is used. A number follows from the row's draw (protocol/task.py), the place of the
token in its row, and the place in the embedding, by whole-number arithmetic that every device does
alike. So a row gets the same noise in a step whatever it is batched or packed with, on any number
of ranks, and after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.protocol.task import DRAW

if TYPE_CHECKING:
    from trainer.protocol.task import Batch

# M tokens of all rows of a stream, B rows, T tokens with pads, D width

_KEYS, _SCALES = "noise_keys", "noise_scales"
NOISE_FIELDS = (_KEYS, _SCALES)


def noise_fields(
    rows: Sequence[Mapping[str, Any]],
    lengths: Sequence[int],
    alpha: float | None,
    *,
    width: int | None = None,
) -> Batch:
    """What a batch says of its noise: a number for each token, and alpha / sqrt(L). {} for rows of
    an evaluation, and without an alpha.

    lengths: of each row, in the order of the batch. Tensors are (M,), or with a width (B, T) for
    rows padded on the right, T = width.
    """
    if alpha is None or DRAW not in rows[0]:
        return {}
    counts = np.asarray(lengths, dtype=np.int64)
    draws = np.array([int(row[DRAW][0]) for row in rows], dtype=np.uint64)
    row = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(counts.sum()) - (np.cumsum(counts) - counts)[row]
    # splitmix64 (Steele et al. 2014), of which 32 bits are kept
    state = draws[row] + (place.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    fields = {
        _KEYS: (state >> np.uint64(32)).astype(np.uint32).view(np.int32),
        _SCALES: (alpha / np.sqrt(np.maximum(counts, 1)))[row].astype(np.float32),
    }
    if width is not None:
        is_real_BT = np.arange(width) < counts[:, None]
        for name, values in fields.items():
            fields[name] = np.zeros(is_real_BT.shape, values.dtype)
            fields[name][is_real_BT] = values
    return {name: torch.from_numpy(values) for name, values in fields.items()}


def without_noise(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch without what noise_fields added, for models that take no tensor they do not
    know.
    """
    return {name: tensor for name, tensor in batch.items() if name not in NOISE_FIELDS}


@contextmanager
def noisy(embedding: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the first result of an embedding, (..., D), gets the noise that the batch states, if
    any.

    Only the first: an encoder and a decoder may share the layer, and the encoder comes first.
    """
    if _KEYS not in batch:
        yield
        return

    def add(_module: nn.Module, _arguments: Any, hidden: Tensor) -> Tensor:
        handle.remove()
        noise = noise_of(batch[_KEYS], batch[_SCALES], hidden.shape[-1])
        return hidden + noise.view(hidden.shape).to(hidden.dtype)

    handle = embedding.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def noise_of(keys: Tensor, scales: Tensor, width: int) -> Tensor:
    """(..., D) fp32 noise of tokens with these keys and scales, D = width."""
    columns_D = torch.arange(1, width + 1, dtype=torch.int32, device=keys.device)
    bits = _mix(keys[..., None] + _mix(columns_D * -0x61C88647))
    bits = bits.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)  # 24 bits: exact in fp32
    return (bits.float().mul_(2.0**-23).sub_(1.0)).mul_(scales[..., None] / math.sqrt(width))


def _mix(words: Tensor) -> Tensor:
    """int32 -> int32, in place; products wrap. Source: lowbias32 (Wellons, "Prospecting for hash
    functions", 2018).
    """
    words.bitwise_xor_(words.bitwise_right_shift(16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    words.bitwise_xor_(words.bitwise_right_shift(15).bitwise_and_(0x1FFFF)).mul_(-0x7B935975)
    return words.bitwise_xor_(words.bitwise_right_shift(16).bitwise_and_(0xFFFF))
