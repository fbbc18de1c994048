"""Counts the FLOPs of one training step while it runs."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

_LOG = logging.getLogger(__name__)
_Shape = tuple[int, ...]
aten = torch.ops.aten


class StepFlops(FlopCounterMode):
    """Counts the FLOPs of the operators inside, with torch's formulas and our own (_FORMULAS).

    If a formula raises, only the counting ends: `total` is then 0, and the log says why.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_FORMULAS)
        self._is_broken = False

    @property
    def total(self) -> int:
        """FLOPs so far; 0 when they could not be counted."""
        return 0 if self._is_broken else self.get_total_flops()

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        """torch 2.11 to 2.13 call this once after each operator (flop_counter.py)."""
        if self._is_broken:
            return out
        try:
            return super()._count_flops(func_packet, out, args, kwargs)
        except Exception as error:
            self._is_broken = True
            _LOG.warning("mfu is not reported: torch cannot count %s: %s", func_packet, error)
            return out


def _product(one: _Shape, other: _Shape, *_: Any, **__: Any) -> int:
    """torch 2.13's own formula mistakes the third argument of bmm(a, b, out_dtype) for a shape."""
    return 2 * math.prod(one) * other[-1]


def _attention(query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    """Two products. torch 2.11's own formula refuses keys of fewer heads than queries."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(
    _gradient: _Shape, query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any
) -> int:
    """Five products: the scores again, and the gradients of scores, query, key and value."""
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


_FORMULAS = {aten.bmm: _product} | {
    getattr(aten, f"_scaled_dot_product_{kernel}_attention{way}"): formula
    for kernel in ("flash", "efficient", "cudnn")
    for way, formula in (("", _attention), ("_backward", _attention_backward))
}
