"""Dropout whose random numbers are a function of a seed and a place. They are the same on every
device, and no generator draws them one after the other, so that a backward pass computes the same
numbers again, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A queries, H heads, L keys

# Odd multipliers of hashes of 32 bits whose output bits each depend on every input bit. Source:
# lowbias32 of Chris Wellons' hash-prospector, public domain.
FIRST, SECOND, SHIFT = 0x7FEB352D, 0x846CA68B, 15
_WORD = (1 << 32) - 1


@dataclass(frozen=True)
class Dropout:
    """Which shares of an attention are dropped."""

    rate: float
    seed: Tensor  # (2,) int64, on the device: the host does not wait for it

    @classmethod
    def with_seed(cls, rate: float, device: torch.device) -> Dropout:
        """Dropout with a seed that torch's generator draws."""
        return cls(rate, torch.randint(1 << 32, (2,), device=device))

    @property
    def threshold(self) -> int:
        """A place is dropped if its int32 number is below this one."""
        return round(self.rate * 2**32) - 2**31

    def keys(self, queries_A: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        """Two (A, H) int32 hashes of the seed, a query's place in the stream, and a head."""
        heads = torch.arange(num_heads, device=queries_A.device)
        places_AH = queries_A[:, None].long() * num_heads + heads
        # a hash of each word of 32 bits, computed in int64
        words = places_AH ^ self.seed[:, None, None]
        words = ((words ^ (words >> 16)) * FIRST) & _WORD
        words = ((words ^ (words >> 15)) * SECOND) & _WORD
        words = words ^ (words >> 16)
        signed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
        first, second = signed.unbind()
        return first, second

    def places(self, queries_A: Tensor, num_heads: int, num_keys: int, of: slice) -> Tensor:
        """(H, A, L) bool for these heads: True where the share of a key of the row is dropped."""
        first, second = (x_AH.t()[of, :, None] for x_AH in self.keys(queries_A, num_heads))
        keys_L = torch.arange(num_keys, dtype=torch.int32, device=queries_A.device)
        numbers = torch.bitwise_xor(first, keys_L)
        numbers *= FIRST
        shifted = numbers >> SHIFT
        shifted &= (1 << (32 - SHIFT)) - 1  # torch's >> fills with the sign bit
        numbers ^= shifted
        numbers += second
        numbers *= SECOND - (1 << 32)
        return numbers < self.threshold
