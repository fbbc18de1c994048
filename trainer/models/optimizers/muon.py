"""Muon: the momentum of every hidden matrix, made orthogonal, is its step.

The gradient is clipped before, as with every other optimizer, and all ranks take the same step at
any stage of ZeRO. DeepSpeed 0.19.8 has a Muon, too. At stages 1 and 2 it makes gradients orthogonal
while they are gathered, before they are measured and clipped: then gradient_clipping bounds the
orthogonal matrices, whose norm is the root of their rank, and slows every step
(tests/numerics/test_muon.py shows it). Here momenta are part of the flat vectors that ZeRO divides,
and only a matrix that is cut between ranks is put together for its step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.models.optimizers.beside_adamw import BesideAdamW
from trainer.runtime import distributed

if TYPE_CHECKING:
    from trainer.config.schema import Optim

# Jordan et al. 2024 (kellerjordan.github.io/posts/muon): a quintic whose five steps bring singular
# values to between 0.7 and 1.2, in bf16; torch.optim.Muon has the same constants.
COEFFICIENTS, NUM_STEPS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
# Liu et al. 2025 (arXiv 2502.16982, sec. 2.2): steps of this size are as large as AdamW's, so that
# both go by one learning rate.
RMS_OF_ADAMW = 0.2


@dataclass(frozen=True)
class Piece:
    """The part of a matrix that lies in a flat vector."""

    start: int  # the first of its elements that is here
    at: int  # its place in the flat vector
    count: int


class Muon(BesideAdamW):
    """Muon for matrices, AdamW for the other weights. A matrix has a `momentum_buffer`."""

    def __init__(self, groups: list[dict[str, Any]], optim: Optim) -> None:
        super().__init__(groups, optim)
        self._momentum, self._nesterov = optim.momentum or 0.0, bool(optim.nesterov)
        # By flat vector, in the same order on all ranks: a piece of each matrix, or None where this
        # rank has none of it; and which matrices are cut.
        self._pieces: dict[Tensor, list[tuple[Piece | None, torch.Size, bool]]] = {}

    def lay_out(self, flats: Mapping[Tensor, Sequence[tuple[Piece | None, torch.Size]]]) -> None:
        """Tell which matrices lie where in ZeRO's flat vectors. A collective."""
        for flat, pieces in flats.items():
            own = [p is not None and p.count < shape.numel() for p, shape in pieces]
            is_cut = [any(of_ranks) for of_ranks in zip(*distributed.gather(own), strict=True)]
            self._pieces[flat] = [
                (piece, shape, cut) for (piece, shape), cut in zip(pieces, is_cut, strict=True)
            ]

    def step_own(self, group: dict[str, Any]) -> None:
        """Step matrices, or flat vectors that hold parts of matrices: then a collective."""
        for weight in group["params"]:
            if weight.grad is None:
                continue
            if not self._momentum:
                update = weight.grad
            else:
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                buffer = state["momentum_buffer"]
                buffer.lerp_(weight.grad, 1 - self._momentum)
                update = weight.grad.lerp(buffer, self._momentum) if self._nesterov else buffer
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            if weight not in self._pieces:
                weight.add_(orthogonal(update), alpha=-_rate(group["lr"], weight.shape))
                continue
            for piece, shape, is_cut in self._pieces[weight]:
                matrix = _whole(update, piece, shape) if is_cut else _part(update, piece)
                if piece is not None and matrix is not None:
                    place = weight[piece.at : piece.at + piece.count]
                    # it has no name, which would keep it beside the next matrix
                    place.add_(
                        orthogonal(matrix.view(shape)).reshape(-1)[piece.start :][: piece.count],
                        alpha=-_rate(group["lr"], shape),
                    )


def orthogonal(matrix: Tensor) -> Tensor:
    """U V^T of a matrix (N, M) = U S V^T, about: in bf16, with singular values of 0.7 to 1.2."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    x_NM = matrix.bfloat16()
    x_NM = x_NM.T if is_tall else x_NM
    x_NM = x_NM / x_NM.norm().clamp(min=EPS)  # its largest singular value is now at most 1
    for _ in range(NUM_STEPS):
        gram_NN = x_NM @ x_NM.T
        polynomial_NN = torch.addmm(gram_NN, gram_NN, gram_NN, beta=b, alpha=c)
        x_NM = torch.addmm(x_NM, polynomial_NN, x_NM, beta=a)
    return x_NM.T if is_tall else x_NM


def _rate(lr: float, shape: torch.Size) -> float:
    return lr * (RMS_OF_ADAMW * math.sqrt(max(shape)))


def _part(update: Tensor, piece: Piece | None) -> Tensor | None:
    return None if piece is None else update[piece.at : piece.at + piece.count]


def _whole(update: Tensor, piece: Piece | None, shape: torch.Size) -> Tensor:
    """A matrix that is cut, as one vector: each rank gives its part. A collective."""
    whole = update.new_zeros(shape.numel())
    part = _part(update, piece)
    if piece is not None and part is not None:
        whole[piece.start : piece.start + piece.count] = part
    return distributed.joined(whole)
