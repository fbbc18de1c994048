"""The weights of the vocabulary's words in each text, from the states of its tokens: log(1 +
relu(logit)), pooled over the tokens. The logits of a chunk of tokens alone exist at a time.

A text's largest weight is that of its largest logit. So the backward pass needs no logits: it
knows, for each text and word, which token gave the largest one. A sum needs them all, and computes
those of a chunk again.
"""

# N texts, C cells of all rectangles (pads among them), B texts of a chunk, L tokens of each of
# them, D width of a state, V vocabulary

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.models import losses
from trainer.models.packed.layout import grids_of

Pooling = Literal["max", "sum"]


@dataclass(frozen=True)
class CellChunk:
    """Cells whose logits exist together: of some rows of a rectangle, from one column on."""

    texts: slice | Tensor  # (B,) their numbers
    first: int  # the column that it begins with
    is_part: bool  # it has some columns of one text, not all
    cells: slice
    is_there_BL: Tensor  # False at a pad


@dataclass(frozen=True)
class TextCells:
    """Where the tokens of N texts lie in padded rectangles, which the host knows the shapes of."""

    grids: list[Tensor]  # (rows, length) bool, True where there is a token
    # (N,) the number of the text in each row, in the order of the rectangles; None: rows are texts
    # in their order
    texts_N: Tensor | None = None
    # (M,) the cell of each token of a stream; None: the states are cells already
    cells_M: Tensor | None = None

    @classmethod
    def of_stream(cls, stream: Mapping[str, Tensor]) -> TextCells:
        """Of a packed batch (layout.pack)."""
        grids, cells_M = grids_of(stream), stream["cells"]
        rows: list[Tensor] = []
        for grid in grids:
            first = sum(len(one) for one in grids[: len(rows)])
            numbers = torch.arange(first, first + len(grid), device=cells_M.device)
            rows.append(numbers[:, None].expand(grid.shape).flatten())
        row_N = torch.cat(rows)[cells_M[stream["starts"][:-1].long()]]
        texts_N = torch.empty_like(row_N)
        texts_N[row_N] = torch.arange(len(row_N), device=row_N.device)
        return cls(grids, texts_N, cells_M)

    @property
    def num_texts(self) -> int:
        return sum(len(grid) for grid in self.grids)

    def cells(self, states_MD: Tensor) -> Tensor:
        """(C, D) the states as they lie in the rectangles; 0 where there is no token."""
        if self.cells_M is None:
            return states_MD
        count = sum(grid.numel() for grid in self.grids)
        flat = states_MD.new_zeros(count, states_MD.shape[1])
        return flat.index_copy(0, self.cells_M, states_MD)

    def chunks(self, positions: int) -> Iterator[CellChunk]:
        """All cells, at most so many positions at a time; of a longer text, so many of its own."""
        row, cell = 0, 0
        for grid in self.grids:
            length = grid.shape[1]
            at_once = max(1, positions // length)
            width = length if at_once > 1 else min(length, positions)
            for of_rows in losses.chunks_of(len(grid), at_once):
                is_there = grid[of_rows]
                rows = slice(row + of_rows.start, row + of_rows.start + len(is_there))
                texts = rows if self.texts_N is None else self.texts_N[rows]
                start = cell + of_rows.start * length
                for first in range(0, length, width):
                    is_there_BL = is_there[:, first : first + width]
                    cells = slice(start + first, start + first + is_there_BL.numel())
                    yield CellChunk(texts, first, width < length, cells, is_there_BL)
            row, cell = row + len(grid), cell + grid.numel()


def pooled(
    states_MD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, places: TextCells, how: Pooling
) -> Tensor:
    """(N, V) fp32 weights of texts whose tokens have these states, 0 or more; fp64 of fp64 states.

    Source: Formal et al. 2021, "SPLADE v2", eq. 1 (sum) and 6 (max). backward() may be called once.
    """
    flat_CD = places.cells(states_MD)
    function = _Largest if how == "max" else _Summed
    return function.apply(places, flat_CD, weight_VD, bias_V)  # pyright: ignore[reportReturnType]


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _logits(chunk: CellChunk, flat_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """(B, L, V) of the tokens of a chunk."""
    logits = F.linear(flat_CD[chunk.cells], weight_VD, bias_V)
    return logits.view(*chunk.is_there_BL.shape, -1)


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, places: TextCells, flat_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None
    ) -> Tensor:
        shape, positions = (places.num_texts, len(weight_VD)), _positions(weight_VD)
        longest = max(grid.shape[1] for grid in places.grids)
        small = torch.int16 if longest < 2**15 else torch.int32
        place_NV = flat_CD.new_empty(shape, dtype=small)
        best_NV: Tensor | None = None
        for chunk in places.chunks(positions):
            logits = _logits(chunk, flat_CD, weight_VD, bias_V)
            logits = logits.masked_fill_(~chunk.is_there_BL[..., None], float("-inf"))
            best, place = logits.max(1)
            del logits
            if best_NV is None:
                best_NV = best.new_empty(shape)
            if chunk.first:
                is_more = best > best_NV[chunk.texts]
                best = torch.where(is_more, best, best_NV[chunk.texts])
                place = torch.where(is_more, place + chunk.first, place_NV[chunk.texts].long())
            best_NV[chunk.texts] = best
            place_NV[chunk.texts] = place.to(small)
        assert best_NV is not None
        weights_NV = _wide(best_NV).relu().log1p()
        ctx.places = places
        ctx.save_for_backward(flat_CD, weight_VD, bias_V, weights_NV, place_NV)
        return weights_NV

    @staticmethod
    def backward(ctx: Any, gradient_NV: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        flat_CD, weight_VD, bias_V, weights_NV, place_NV = ctx.saved_tensors
        work = _Sums(flat_CD, weight_VD, bias_V, ctx.needs_input_grad[1:])
        for chunk in ctx.places.chunks(_positions(weight_VD)):
            weights, place = weights_NV[chunk.texts], place_NV[chunk.texts].long() - chunk.first
            # 1 / (1 + logit) is exp(-weight); a weight of 0 has none
            slopes = (gradient_NV[chunk.texts] * (-weights).exp()).masked_fill(weights <= 0, 0.0)
            length = chunk.is_there_BL.shape[1]
            if chunk.is_part:
                is_here = (place >= 0) & (place < length)
                slopes = slopes.masked_fill(~is_here, 0.0)
                place = place.clamp(0, length - 1)
            of_cells = flat_CD.new_zeros(len(weights), length, weights.shape[1])
            of_cells.scatter_(1, place[:, None], slopes[:, None].to(flat_CD.dtype))
            work.add(chunk.cells, of_cells.flatten(0, 1))
            del of_cells  # before those of the next chunk are there
        return None, *work.finished()


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, places: TextCells, flat_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None
    ) -> Tensor:
        ctx.places = places
        ctx.save_for_backward(flat_CD, weight_VD, bias_V)
        weights_NV = _wide(flat_CD[:0]).new_zeros(places.num_texts, len(weight_VD))
        for chunk in places.chunks(_positions(weight_VD)):
            logits = _wide(_logits(chunk, flat_CD, weight_VD, bias_V)).relu_().log1p_()
            weights_NV[chunk.texts] += logits.mul_(chunk.is_there_BL[..., None]).sum(1)
            del logits  # before those of the next chunk are there
        return weights_NV

    @staticmethod
    def backward(ctx: Any, gradient_NV: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        flat_CD, weight_VD, bias_V = ctx.saved_tensors
        work = _Sums(flat_CD, weight_VD, bias_V, ctx.needs_input_grad[1:])
        for chunk in ctx.places.chunks(_positions(weight_VD)):
            logits = _wide(_logits(chunk, flat_CD, weight_VD, bias_V))
            is_active = (logits > 0) & chunk.is_there_BL[..., None]
            slopes = logits.add_(1).reciprocal_().mul_(gradient_NV[chunk.texts][:, None])
            of_cells = slopes.masked_fill_(~is_active, 0.0).to(flat_CD.dtype)
            work.add(chunk.cells, of_cells.flatten(0, 1))
            del logits, is_active, slopes, of_cells
        return None, *work.finished()


class _Sums:
    """The gradients of states, weight and bias, added up over chunks; of the weight in fp32."""

    def __init__(
        self, flat_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, needed: tuple[bool, ...]
    ) -> None:
        self._flat_CD, self._weight_VD, self._bias_V = flat_CD, weight_VD, bias_V
        self._needed = needed
        self._of_flat = torch.empty_like(flat_CD) if needed[0] else None
        self._of_weight: Tensor | None = None
        self._of_bias: Tensor | None = None

    def add(self, cells: slice, of_logits: Tensor) -> None:
        """Add what the gradient of the logits of some cells, (cells, V), gives each of them."""
        if self._of_flat is not None:
            torch.mm(of_logits, self._weight_VD, out=self._of_flat[cells])
        if self._needed[1]:
            left, states = of_logits.t(), self._flat_CD[cells]
            if self._of_weight is None:
                self._of_weight = _wide(left @ states)
            elif self._of_weight.dtype == left.dtype:
                self._of_weight.addmm_(left, states)
            else:
                self._of_weight += left @ states
        if self._needed[2]:
            sums = _wide(of_logits).sum(0)
            self._of_bias = sums if self._of_bias is None else self._of_bias.add_(sums)

    def finished(self) -> tuple[Tensor | None, ...]:
        """In the dtypes of what they belong to."""
        of_weight, of_bias = self._of_weight, self._of_bias
        return (
            self._of_flat,
            None if of_weight is None else of_weight.to(self._weight_VD.dtype),
            None if of_bias is None or self._bias_V is None else of_bias.to(self._bias_V.dtype),
        )


def _positions(weight_VD: Tensor) -> int:
    return losses.positions_of_chunk(len(weight_VD))
