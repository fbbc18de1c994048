"""Summed losses: the loop divides once, by the units of all micro-batches on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.models.distillation import Lesson, divergences
from trainer.models.processor.row_attention import is_here

if TYPE_CHECKING:
    from trainer.config.schema import Train

# B batch, T tokens, D width, N labelled positions, V vocabulary, R rank of adapters

IGNORED = -100  # the label of a position that is not scored
# Bytes of a chunk's logits in fp32, and the fewest positions in a chunk: a product with fewer is
# slow. Source: docs/log.md, and TRL's pull request 5575, which takes 256 positions.
CHUNK_BYTES, CHUNK_POSITIONS = 32 * 2**20, 256


@dataclass(frozen=True)
class Terms:
    """What a training loss over a vocabulary is besides the cross-entropy."""

    smoothing: float = 0.0
    z_loss: float = 0.0

    @classmethod
    def of(cls, train: Train) -> Terms:
        """As the experiment states them."""
        return cls(train.label_smoothing, train.z_loss)


PLAIN = Terms()  # of every evaluation


def token_cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, *, smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """() fp32: the SUM of cross-entropies, in nats, over the targets that are not IGNORED; 0 when
    there is none.

    smoothing: this share of each loss is the mean loss over all tokens of the vocabulary. Source:
    Szegedy et al. 2016, sec. 7, with a uniform distribution over all V. z_loss: so often the square
    of log Z is added, where Z is the sum of the exponentials of a target's logits. Source: PaLM
    (Chowdhery et al. 2022, sec. 5), where it is 1e-4.
    """
    terms = Terms(smoothing, z_loss)
    if _kept.get() is None:
        return _cross_entropy(logits_NV, targets_N, terms, reduction="sum")
    return _sum_of(_cross_entropy(logits_NV, targets_N, terms, reduction="none"))


def _cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, terms: Terms, *, reduction: Literal["sum", "none"]
) -> Tensor:
    """() or (N,) fp32: token_cross_entropy, or the losses of single targets."""
    logits_NV = logits_NV.float()
    loss = F.cross_entropy(
        logits_NV,
        targets_N,
        ignore_index=IGNORED,
        reduction=reduction,
        label_smoothing=terms.smoothing,
    )
    if terms.z_loss:
        squares_N = logits_NV.logsumexp(-1).square().masked_fill(targets_N == IGNORED, 0.0)
        loss = loss + terms.z_loss * (squares_N.sum() if reduction == "sum" else squares_N)
    return loss


def student_loss(
    logits_NV: Tensor, targets_N: Tensor, lesson: Lesson, terms: Terms = PLAIN
) -> Tensor:
    """() fp32: the SUM over the targets of (1 - weight) x cross-entropy + weight x temperature^2 x
    divergence from the teacher (distillation.divergences). No target is IGNORED.
    """
    weight, scale = lesson.how.weight, lesson.how.temperature**2
    losses_N = weight * scale * divergences(logits_NV, lesson)
    if weight < 1:
        hard_N = _cross_entropy(logits_NV, targets_N, terms, reduction="none")
        losses_N = losses_N + (1 - weight) * hard_N
    return _sum_of(losses_N)


def _sum_of(losses_N: Tensor) -> Tensor:
    """() the sum of single losses, which keeping_losses() gets."""
    parts = _kept.get()
    if parts is not None:
        parts.append(losses_N.detach())
    return losses_N.sum()


def target_losses(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """(N,) fp32: the cross-entropy of each target, in nats: minus its log-probability."""
    return F.cross_entropy(logits_NV.float(), targets_N, reduction="none")


def is_narrow(hidden: Tensor) -> bool:
    """Whether a loss of these states is computed in the tensor of their logits: on a processor,
    where each pass over all logits waits for memory, in 32 bits; where row_attention is chosen.
    """
    return is_here(hidden) and hidden.dtype == torch.float32


_log_softmax: Any = torch.ops.aten._log_softmax.out  # in place, if the result is its input
_kept: ContextVar[list[Tensor] | None] = ContextVar("kept", default=None)


@contextmanager
def keeping_losses(keeps: bool = True) -> Iterator[list[Tensor]]:
    """Inside, the losses of single targets are appended to the list that this yields, (N,) fp32 for
    each call of token_cross_entropy or student_loss. keeps: with False none is.
    """
    losses: list[Tensor] = []
    token = _kept.set(losses if keeps else None)
    try:
        yield losses
    finally:
        _kept.reset(token)


def scored_before(labels_BT: Tensor) -> Tensor:
    """(N,) int64: the positions of the flat (B * T,) whose next position has a label.

    Collation computes it on the host: on a GPU, the step would wait for how many there are.
    """
    is_scored_BT = torch.nn.functional.pad(labels_BT[:, 1:] != IGNORED, (0, 1))
    return is_scored_BT.flatten().nonzero()[:, 0]


def next_token_loss(
    hidden_BTD: Tensor,
    labels_BT: Tensor,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    *,
    scored_N: Tensor | None = None,
) -> Tensor:
    """() fp32: the SUM of next-token cross-entropies; position t is scored against the label of t +
    1.

    loss_of: (N, D) states, (N,) targets -> (). It sees the scored positions only, so prompts and
    pads cost no logits. It is called even when nothing is scored, because under ZeRO-3 every rank
    must make the same calls. scored_N: scored_before(labels_BT), where it is known.
    """
    if scored_N is None:
        scored_N = scored_before(labels_BT)
    targets_N = labels_BT.flatten().index_select(0, scored_N + 1)
    return loss_of(hidden_BTD.flatten(0, 1).index_select(0, scored_N), targets_N)


# In chunks
# --------------------------------------------------------------------------------------------------


def positions_of_chunk(vocabulary: int) -> int:
    """How many positions have their logits at once: as many as fill CHUNK_BYTES in fp32, and
    CHUNK_POSITIONS at least.
    """
    return max(CHUNK_POSITIONS, CHUNK_BYTES // (4 * vocabulary))


@dataclass(frozen=True)
class Scoring:
    """What logits are compared with, and how."""

    targets_N: Tensor
    chunk: int  # positions
    # what a family does to its logits, element by element; None: nothing
    finish: Callable[[Tensor], Tensor] | None
    terms: Terms = PLAIN
    by_target: bool = False  # the losses of single targets are wanted, not their sum
    lesson: Lesson | None = None  # what a teacher says of the same positions

    @property
    def is_plain(self) -> bool:
        """Whether the loss is the cross-entropy of the logits as they are, and nothing else."""
        has_more = self.finish or self.lesson or self.by_target or _kept.get() is not None
        return not has_more and self.terms == PLAIN

    def loss(self, logits_CV: Tensor, rows: slice) -> Tensor:
        """() fp32: the summed loss of some of the positions."""
        logits_CV, targets_C = self.finished(logits_CV), self.targets_N[rows]
        if self.lesson is None:
            return token_cross_entropy(logits_CV, targets_C, **vars(self.terms))
        return student_loss(logits_CV, targets_C, self.lesson.part(rows), self.terms)

    def finished(self, logits_CV: Tensor) -> Tensor:
        return logits_CV if self.finish is None else self.finish(logits_CV)


@dataclass(frozen=True)
class Scorer:
    """A linear output layer, with adapters or without.

    Its logits are states @ weight.T + bias + low @ low_weight.T.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    low_NR: Tensor | None = None
    low_weight_VR: Tensor | None = None


def chunked_cross_entropy(hidden_ND: Tensor, scorer: Scorer, scoring: Scoring) -> Tensor:
    """token_cross_entropy of a layer's logits, of which only those of one chunk exist at a time;
    with Scoring.lesson student_loss, with Scoring.by_target (N,) target_losses.

    The gradients of a chunk are computed right after its logits, so that nothing is computed twice.
    In fp16 they wait for the loss scale, and by target for the gradient of each loss: the logits
    are then computed again. backward() may be called once.
    """
    inputs = (scorer.weight_VD, scorer.bias_V, scorer.low_NR, scorer.low_weight_VR)
    if scoring.by_target:
        return _ChunkedByTarget.apply(scoring, hidden_ND, *inputs)  # pyright: ignore[reportReturnType]
    return _Chunked.apply(scoring, torch.is_grad_enabled(), hidden_ND, *inputs)  # pyright: ignore[reportReturnType]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, scoring: Scoring, has_graph: bool, *inputs: Tensor | None
    ) -> Tensor:
        needed = ctx.needs_input_grad[2:] if has_graph else (False,) * len(inputs)
        ctx.scoring, ctx.needed = scoring, needed
        # fp16 has too few exponents for gradients that nobody has scaled
        ctx.waits = any(needed) and inputs[0] is not None and inputs[0].dtype == torch.float16
        if ctx.waits:
            ctx.save_for_backward(*inputs)
            needed = (False,) * len(inputs)
        work = _Gradients(inputs, needed, leaves_weight=True)
        total = work.run(scoring)
        ctx.gradients = None if ctx.waits else work.finished()
        ctx.kept = work.kept()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.waits:
            work = _Gradients(ctx.saved_tensors, ctx.needed)
            with keeping_losses(False):  # they were kept in forward
                work.run(ctx.scoring, gradient)
            return None, None, *work.finished()
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "its gradients are given away by the first backward()"
        for each in gradients:
            if each is not None:
                each.mul_(gradient)
        kept, ctx.kept = ctx.kept, None
        if kept is not None:  # the weight's: a pass over the states is shorter than one over it
            of_logits_NV, hidden_ND = kept
            of_weight = of_logits_NV.t() @ (hidden_ND * gradient)
            return None, None, gradients[0], of_weight, *gradients[2:]
        return None, None, *gradients


class _ChunkedByTarget(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scoring: Scoring, *inputs: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.scoring = scoring
        ctx.save_for_backward(*inputs)
        return _Gradients(inputs, (False,) * len(inputs)).losses(scoring)

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        work = _Gradients(ctx.saved_tensors, ctx.needs_input_grad[1:])
        work.run(ctx.scoring, gradient_N)
        return None, *work.finished()


def chunks_of(num_rows: int, size: int) -> Iterator[slice]:
    """The rows of one chunk after the other."""
    return (slice(start, start + size) for start in range(0, num_rows, size))


class _Gradients:
    """Sums over chunks: the loss, and the gradients of those inputs that need one.

    The gradient of a weight is a sum over all positions. Either the products of all chunks are
    added up in fp32, or the gradient of all logits is kept and multiplied once after the last
    chunk. The second way is taken if it needs no more bytes; in 16 bits, if it needs at most twice
    as many.
    """

    def __init__(
        self,
        inputs: tuple[Tensor | None, ...],
        needed: tuple[bool, ...],
        *,
        leaves_weight: bool = False,
    ) -> None:
        """leaves_weight: where it is cheaper, whoever asks multiplies what `kept` gives."""
        hidden, weight, _, low, _ = self._inputs = inputs
        assert hidden is not None
        assert weight is not None
        self._hidden_ND, self._weight_VD, self._needed = hidden, weight, needed
        self._sums: list[Tensor | None] = [None] * len(inputs)
        for place, rows in ((0, hidden), (3, low)):
            if needed[place] and rows is not None:
                self._sums[place] = torch.empty_like(rows)
        # bytes for each word of the vocabulary; in 16 bits, each chunk's product costs one more
        # tensor and one more pass over the sum
        of_kept, of_sum = hidden.element_size() * len(hidden), 4 * hidden.shape[1]
        keeps = needed[1] and of_kept <= (of_sum if hidden.element_size() == 4 else 2 * of_sum)
        self._kept_NV = hidden.new_empty(len(hidden), len(weight)) if keeps else None
        # whether the weight's gradient is left to the backward pass
        self._is_late = leaves_weight and keeps and is_narrow(hidden) and low is None

    def losses(self, scoring: Scoring) -> Tensor:
        """(N,) fp32: the losses of single targets, without gradients."""
        parts = [
            target_losses(scoring.finished(self._logits(rows)), scoring.targets_N[rows])
            for rows in chunks_of(max(1, len(self._hidden_ND)), scoring.chunk)
        ]
        return torch.cat(parts)

    def run(self, scoring: Scoring, factor: Tensor | None = None) -> Tensor:
        """() fp32: the loss. factor: the gradients are multiplied with it; by target (N,), each
        target's with its own.
        """
        total = self._hidden_ND.new_zeros((), dtype=torch.float32)
        # at least one chunk: a rank without labels has gradients, too, of 0, and ZeRO waits for
        # them
        for rows in chunks_of(max(1, len(self._hidden_ND)), scoring.chunk):
            total += self._chunk(rows, scoring, factor)
        if self._kept_NV is not None:
            self._add(self._kept_NV, slice(None))
        return total

    def kept(self) -> tuple[Tensor, Tensor] | None:
        """(N, V) the gradient of all logits and (N, D) their states, if their product, which is the
        weight's gradient, is still to be computed.
        """
        is_kept = self._is_late and self._kept_NV is not None
        return (self._kept_NV, self._hidden_ND) if is_kept else None  # pyright: ignore[reportReturnType]

    def finished(self) -> tuple[Tensor | None, ...]:
        """The gradients in the dtypes of the inputs."""
        pairs = zip(self._sums, self._inputs, strict=True)
        return tuple(s if s is None or x is None else s.to(x.dtype) for s, x in pairs)

    def _chunk(self, rows: slice, scoring: Scoring, factor: Tensor | None) -> Tensor:
        has_gradient = any(self._needed)
        if has_gradient and factor is None and scoring.is_plain and is_narrow(self._hidden_ND):
            return self._in_place(rows, scoring.targets_N[rows])
        leaf_CV = self._logits(rows).requires_grad_(has_gradient)
        with torch.set_grad_enabled(has_gradient):
            if scoring.by_target:
                assert factor is not None, "its gradients are computed in backward alone"
                logits_CV, targets_C = scoring.finished(leaf_CV), scoring.targets_N[rows]
                loss = (target_losses(logits_CV, targets_C) * factor[rows]).sum()
                factor = None
            else:
                loss = scoring.loss(leaf_CV, rows)
        if has_gradient:
            (gradient_CV,) = torch.autograd.grad(loss, leaf_CV, factor)
            del leaf_CV
            if self._kept_NV is None:
                self._add(gradient_CV, rows)
            else:
                self._kept_NV[rows] = gradient_CV
        return loss.detach()

    def _in_place(self, rows: slice, targets_C: Tensor) -> Tensor:
        """The same, with logits, log-probabilities and gradient one after the other in one
        tensor.
        """
        out = None if self._kept_NV is None else self._kept_NV[rows]
        values_CV = self._logits(rows, out)
        _log_softmax(values_CV, -1, False, out=values_CV)
        loss = F.nll_loss(values_CV, targets_C, ignore_index=IGNORED, reduction="sum")
        values_CV.exp_()
        is_scored_C = targets_C != IGNORED
        places_C1 = targets_C.clamp(min=0)[:, None]
        values_CV.scatter_add_(1, places_C1, -is_scored_C[:, None].to(values_CV.dtype))
        if not is_scored_C.all():
            values_CV.mul_(is_scored_C[:, None])
        if self._kept_NV is None:
            self._add(values_CV, rows)
        return loss

    def _logits(self, rows: slice, out: Tensor | None = None) -> Tensor:
        """(C, V) of some positions. out: where they are written."""
        _, _, bias_V, low_NR, low_weight_VR = self._inputs
        states_CD = self._hidden_ND[rows]
        if out is None or bias_V is not None:
            logits_CV = F.linear(states_CD, self._weight_VD, bias_V)
            logits_CV = logits_CV if out is None else out.copy_(logits_CV)
        else:
            logits_CV = torch.mm(states_CD, self._weight_VD.t(), out=out)
        if low_NR is None or low_weight_VR is None:
            return logits_CV
        return logits_CV.add_(F.linear(low_NR[rows], low_weight_VR))

    def _add(self, gradient_CV: Tensor, rows: slice) -> None:
        """From the gradient of the logits of `rows`, add up those of the inputs and the weights."""
        _, _, _, low_NR, low_weight_VR = self._inputs
        for place, weight in ((0, self._weight_VD), (3, low_weight_VR)):
            of_rows = self._sums[place]
            if of_rows is not None and weight is not None:
                torch.mm(gradient_CV, weight, out=of_rows[rows])
        for place, states in ((1, self._hidden_ND), (4, low_NR)):
            is_now = self._needed[place] and not (place == 1 and self._is_late)
            if is_now and states is not None:
                left, right, total = gradient_CV.t(), states[rows], self._sums[place]
                if total is None:
                    product = left @ right
                    self._sums[place] = product if self._kept_NV is not None else product.float()
                elif total.dtype == left.dtype:
                    total.addmm_(left, right)
                else:
                    total += left @ right
        if self._needed[2]:
            of_bias, sums = self._sums[2], gradient_CV.sum(0, dtype=torch.float32)
            self._sums[2] = sums if of_bias is None else of_bias.add_(sums)
