"""The verifier's losses: scoring terms per group of statements, contrastive terms per statement.

The statements of all groups stand in one list, in any order; no group is padded. Training minimises
`corrected_sums`: sums that are divided once, by their counts over all ranks, so that the loss does
not depend on the number of ranks or micro-batches. `original` computes the loss of the published
program, which can be infinite. Source: Liu et al. 2023, Vera, sec. 3.2, and the program published
with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.runtime import distributed

# A anchors, D width, G groups, K keys, S statements

LossName = Literal["margin", "bce", "mce", "mce+bce"]
# 0: no contrastive term. 1, 3: a statement is contrasted with those of the other class. 2, 4: the
# other statements of its class are contrasted with all others. 1, 2: by dot product. 3, 4: by
# cosine.
ContrastiveType = Literal[0, 1, 2, 3, 4]
# The number that divides the sum of cross-entropies. mc: that of the multiple-choice groups of all
# ranks. all_problems: that of all groups of all ranks. rank_mc: that of the multiple-choice groups
# of this batch; the means of all batches are then averaged.
CrossEntropyNorm = Literal["mc", "all_problems", "rank_mc"]

COSINE_EPSILON = 1e-8  # the default of torch.nn.functional.cosine_similarity


@dataclass(frozen=True)
class Statements:
    """The statements of G groups. Every group has exactly one statement of column 0."""

    logits_S: Tensor
    hidden_SD: Tensor  # pooled, before the head
    group_S: Tensor  # int64, 0 .. G-1
    # int64; 0: the gold, or the first distractor of a group that has none; 1 and above: the others
    column_S: Tensor
    is_gold_S: Tensor
    is_multiple_choice_G: Tensor

    @property
    def num_groups(self) -> int:
        return len(self.is_multiple_choice_G)

    def members(self, *, columns: Literal["first", "others", "all"]) -> Tensor:
        """(G, S) bool: which statements a group has in these columns."""
        groups_G = torch.arange(self.num_groups, device=self.group_S.device)
        is_member_GS = groups_G[:, None] == self.group_S
        if columns == "all":
            return is_member_GS
        return is_member_GS & ((self.column_S == 0) == (columns == "first"))


# Scoring
# --------------------------------------------------------------------------------------------------


def margin(statements: Statements) -> Tensor:
    """(G,): the sum over a group's other statements of relu(1 - (first logit - other logit))."""
    logits_S = _precise(statements.logits_S)
    short_GS = F.relu(1 - (_first(statements, logits_S)[:, None] - logits_S))
    return _sum_groups(short_GS, statements.members(columns="others"))


def bce(statements: Statements) -> Tensor:
    """(G,): the binary cross-entropy of a group's first statement, plus the mean binary
    cross-entropy of its other statements, if any.
    """
    logits_S = _precise(statements.logits_S)
    is_other_GS = statements.members(columns="others")
    terms_S = F.binary_cross_entropy_with_logits(
        logits_S, statements.is_gold_S.to(logits_S.dtype), reduction="none"
    )
    others_G = _sum_groups(terms_S, is_other_GS) / is_other_GS.sum(-1).clamp(min=1)
    return _first(statements, terms_S) + others_G


def cross_entropy(statements: Statements) -> Tensor:
    """(G,): -log softmax of the first statement over its group; 0 for groups that are not
    multiple-choice.
    """
    logits_S = _precise(statements.logits_S)
    ahead_GS = logits_S - _first(statements, logits_S)[:, None]
    terms_G = ahead_GS.masked_fill(~statements.members(columns="all"), -torch.inf).logsumexp(-1)
    return torch.where(statements.is_multiple_choice_G, terms_G, 0.0)


def _first(statements: Statements, values_S: Tensor) -> Tensor:
    return _sum_groups(values_S, statements.members(columns="first"))


def _sum_groups(values: Tensor, mask_GS: Tensor) -> Tensor:
    # a dense sum, because on CUDA a scattered sum adds in another order in every run
    return torch.where(mask_GS, values, 0.0).sum(-1)


def _precise(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# Contrastive
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keys:
    """The statements that anchors are compared with. Every anchor is one of them."""

    hidden_KD: Tensor
    class_K: Tensor  # int64 or bool; classes are only compared for equality
    own_A: Tensor  # int64: the index of an anchor among the keys


@dataclass(frozen=True)
class Weighted:
    """Contrastive terms and their weights."""

    terms_A: Tensor
    weights_A: Tensor  # int64, 0 or 1


def keys_by_label(statements: Statements) -> Keys:
    """The statements as keys, of which each is an anchor; their classes: true (gold) and false."""
    return _keys(statements, statements.is_gold_S)


def keys_by_column(statements: Statements) -> Keys:
    """The statements as keys, of which each is an anchor; their classes: the first of its group,
    even if it is false, and the others.
    """
    return _keys(statements, statements.column_S > 0)


def contrastive(
    hidden_AD: Tensor, *, keys: Keys, contrastive_type: ContrastiveType, temperature: float
) -> Weighted:
    """The contrastive term of every anchor; it is 0 and has no gradient where the weight is 0 (see
    `anchor_weights`).

    A term is -log(sum over the positives / sum over the candidates) of exp(similarity /
    temperature). Types 2 and 4: the positives are the other keys of the anchor's class, and the
    candidates are all other keys. Types 1 and 3: the positive is the anchor itself, and the
    candidates are the anchor and the keys of other classes.
    """
    weights_A = anchor_weights(keys.class_K, own_A=keys.own_A, contrastive_type=contrastive_type)
    if contrastive_type == 0:
        return Weighted(_precise(hidden_AD).new_zeros(len(hidden_AD)), weights_A)
    terms_A = _contrast(hidden_AD, keys, contrastive_type, temperature)
    return Weighted(torch.where(weights_A.bool(), terms_A, 0.0), weights_A)


def anchor_weights(class_K: Tensor, *, own_A: Tensor, contrastive_type: ContrastiveType) -> Tensor:
    """(A,) int64: 1 for an anchor that has something to contrast, else 0; only classes decide.

    Types 2 and 4 need another key of the anchor's class. Types 1 and 3 need a key of another class:
    without one the term is 0.
    """
    if contrastive_type == 0:
        return torch.zeros_like(own_A)
    candidates_AK, positives_AK = _candidates(class_K, own_A, contrastive_type)
    if contrastive_type in (1, 3):
        return (candidates_AK.sum(-1) > 1).long()
    return positives_AK.any(-1).long()


def _contrast(
    hidden_AD: Tensor, keys: Keys, contrastive_type: ContrastiveType, temperature: float
) -> Tensor:
    """(A,) terms; infinite, and without gradient, for an anchor without positives."""
    candidates_AK, positives_AK = _candidates(keys.class_K, keys.own_A, contrastive_type)
    is_alone_A = ~positives_AK.any(-1)
    # Masking a whole row would give inf - inf, and nan in the gradient. So an anchor without
    # positives keeps all its keys, and its term is replaced below.
    left_out_AK = ~(candidates_AK | is_alone_A[:, None])
    unlike_AK = ~(positives_AK | is_alone_A[:, None])
    anchors_AD, keys_KD = _precise(hidden_AD), _precise(keys.hidden_KD)
    if contrastive_type in (3, 4):
        anchors_AD = F.normalize(anchors_AD, dim=-1, eps=COSINE_EPSILON)
        keys_KD = F.normalize(keys_KD, dim=-1, eps=COSINE_EPSILON)
    scores_AK = anchors_AD @ keys_KD.T / temperature
    log_shares_AK = scores_AK.masked_fill(left_out_AK, -torch.inf).log_softmax(-1)
    terms_A = -log_shares_AK.masked_fill(unlike_AK, -torch.inf).logsumexp(-1)
    return terms_A.masked_fill(is_alone_A, torch.inf)


def _candidates(
    class_K: Tensor, own_A: Tensor, contrastive_type: ContrastiveType
) -> tuple[Tensor, Tensor]:
    """(A, K) bool: the candidates of each anchor, and its positives."""
    is_self_AK = own_A[:, None] == torch.arange(len(class_K), device=class_K.device)
    is_same_AK = class_K[own_A][:, None] == class_K
    if contrastive_type in (1, 3):
        return is_self_AK | ~is_same_AK, is_self_AK
    return ~is_self_AK, is_same_AK & ~is_self_AK


def _keys(statements: Statements, class_S: Tensor) -> Keys:
    return Keys(statements.hidden_SD, class_S, torch.arange(len(class_S), device=class_S.device))


# The loss to train with
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """One batch's part of a mean. The sums of all batches and ranks are added and then divided
    once, by the sum of their counts.
    """

    sum: Tensor  # ()
    count: Tensor  # () int64


_TERMS: dict[str, Callable[[Statements], Tensor]] = {
    "margin": margin,
    "bce": bce,
    "cross_entropy": cross_entropy,
}
_PARTS: dict[LossName, tuple[str, ...]] = {
    "margin": ("margin",),
    "bce": ("bce",),
    "mce": ("cross_entropy",),
    "mce+bce": ("cross_entropy", "bce"),
}


def corrected_sums(
    statements: Statements,
    *,
    loss_fn: LossName,
    ce_norm: CrossEntropyNorm,
    contrastive_type: ContrastiveType,
    temperature: float,
    keys: Keys | None = None,
) -> dict[str, Share]:
    """The terms of `loss_fn` (margin, bce, cross_entropy) by name, and "contrastive" unless its
    type is 0.

    keys: what the statements, as anchors, are compared with; None: keys_by_label of the statements.
    The loss is the sum of the means of all shares, the contrastive one times its coefficient. A
    share whose global count is 0 has sum 0, so divide by at least 1.
    """
    shares: dict[str, Share] = {}
    for name in _PARTS[loss_fn]:
        terms_G = _TERMS[name](statements)
        shares[name] = Share(terms_G.sum(), _count(len(terms_G), terms_G))
    if "cross_entropy" in shares:
        is_multiple_choice_G, total = statements.is_multiple_choice_G, shares["cross_entropy"].sum
        if ce_norm == "rank_mc":
            total = total / is_multiple_choice_G.sum().clamp(min=1)
        shares["cross_entropy"] = Share(
            total, cross_entropy_count(is_multiple_choice_G, norm=ce_norm)
        )
    if contrastive_type:
        keys = keys or keys_by_label(statements)
        contrast = contrastive(
            statements.hidden_SD,
            keys=keys,
            contrastive_type=contrastive_type,
            temperature=temperature,
        )
        shares["contrastive"] = Share(contrast.terms_A.sum(), contrast.weights_A.sum())
    return shares


def cross_entropy_count(is_multiple_choice_G: Tensor, *, norm: CrossEntropyNorm) -> Tensor:
    """() int64: what a batch adds to the number that divides the cross-entropies. No forward pass
    is needed to know it.
    """
    if norm == "mc":
        return is_multiple_choice_G.sum()
    return _count(len(is_multiple_choice_G) if norm == "all_problems" else 1, is_multiple_choice_G)


def _count(number: int, like: Tensor) -> Tensor:
    return torch.full((), number, dtype=torch.int64, device=like.device)


# The published program
# ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gathered:
    """The statements of all ranks as keys without gradient, and the weight of this rank's
    contrastive term.
    """

    keys: Keys
    weight: float  # this rank's statements per group over those of all ranks


@dataclass(frozen=True)
class Original:
    """The published loss of one batch on one rank: scoring + coefficient * contrastive, each ()."""

    loss: Tensor
    scoring: Tensor
    contrastive: Tensor


def original(
    statements: Statements,
    *,
    loss_fn: LossName,
    contrastive_type: ContrastiveType,
    temperature: float,
    coefficient: float,
    gathered: Gathered | None = None,
    is_infinite: bool = True,
) -> Original:
    """The loss of the published program, which averages the gradients of its ranks.

    Cross-entropy is averaged over this batch's multiple-choice groups, other terms over all its
    groups. The classes are those of keys_by_column. An anchor without a positive makes the loss
    infinite and adds nothing to the gradient; is_infinite=False counts its term as 0 instead, with
    the same gradient. gathered: see `gather`; None: one process, whose keys have a gradient too.
    """
    num_multiple_choice = statements.is_multiple_choice_G.sum().clamp(min=1)
    scoring = torch.zeros((), device=statements.logits_S.device)
    for name in _PARTS[loss_fn]:
        divisor = num_multiple_choice if name == "cross_entropy" else statements.num_groups
        scoring = scoring + _TERMS[name](statements).sum() / divisor
    if contrastive_type == 0:
        return Original(scoring, scoring, torch.zeros_like(scoring))
    keys = gathered.keys if gathered else keys_by_column(statements)
    terms_A = _contrast(statements.hidden_SD, keys, contrastive_type, temperature)
    contrast = (terms_A if is_infinite else terms_A.masked_fill(terms_A.isinf(), 0.0)).mean()
    contrast = contrast * gathered.weight if gathered else contrast
    return Original(scoring + coefficient * contrast, scoring, contrast)


@torch.no_grad()
def gather(statements: Statements) -> Gathered:
    """The statements of all ranks in rank order. Every rank calls it."""
    counts = distributed.gather([len(statements.column_S), statements.num_groups])
    sizes = [size for size, _ in counts]
    rank, own, num_all = distributed.rank(), len(statements.column_S), sum(sizes)
    start = sum(sizes[:rank])

    def everywhere(own_S: Tensor) -> Tensor:
        placed_K = own_S.new_zeros(num_all, *own_S.shape[1:])
        placed_K[start : start + own] = own_S
        # the sum is exact: each row comes from one rank, the others add zeros
        return distributed.total(placed_K).to(own_S.dtype)

    keys = keys_by_column(statements)
    weight = (own / statements.num_groups) / (num_all / sum(groups for _, groups in counts))
    everyone = Keys(everywhere(keys.hidden_KD), everywhere(keys.class_K), keys.own_A + start)
    return Gathered(everyone, weight)
