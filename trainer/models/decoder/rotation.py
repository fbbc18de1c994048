"""Rotary positions: how far each pair of a head is turned, in the layout of transformers (a head's
first half with its second). Source: Su et al. 2021.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# B batch, T tokens, K head size, F frequencies = K / 2


class Rotation(NamedTuple):
    """How the halves of a head are turned at each position: rotary embeddings."""

    cos_B1TK: Tensor
    sin_B1TK: Tensor


def rotation(positions_BT: Tensor, frequencies_F: Tensor, *, scale: float = 1.0) -> Rotation:
    """(B, T) positions -> their rotation, (B, 1, T, K) fp32.

    scale: of the result, where a base's rope type has one.
    """
    angles_BTF = positions_BT[..., None].float() * frequencies_F
    angles_B1TK = torch.cat((angles_BTF, angles_BTF), dim=-1)[:, None]
    return Rotation(angles_B1TK.cos() * scale, angles_B1TK.sin() * scale)
