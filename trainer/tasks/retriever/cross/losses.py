"""The losses of a cross-encoder over lists: the passages of one query, of which some are relevant.

Each gives (Q,) one number for each list, so that their sum does not depend on how micro-batches and
ranks share the lists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.tasks.retriever.config import Cross

# Q lists, N passages of the longest one, P passages of all of them


@dataclass(frozen=True)
class Lists:
    """Scores and labels of Q lists; where is_there_QN is False, a list has no passage."""

    scores_QN: Tensor
    labels_QN: Tensor  # 1 of a relevant passage, else 0; other numbers from 0 are grades
    is_there_QN: Tensor

    @property
    def counts_Q(self) -> Tensor:
        """The number of passages of each list."""
        return self.is_there_QN.sum(-1)

    @property
    def pairs_QNN(self) -> Tensor:
        """True at (i, j) where passage i is more relevant than passage j."""
        both = self.is_there_QN[:, :, None] & self.is_there_QN[:, None, :]
        return both & (self.labels_QN[:, :, None] > self.labels_QN[:, None, :])

    @property
    def gaps_QNN(self) -> Tensor:
        """How far the score of passage i is above that of passage j."""
        return self.scores_QN[:, :, None] - self.scores_QN[:, None, :]


def lists_of(scores_P: Tensor, batch: dict[str, Tensor]) -> Lists:
    """The lists of a batch (task.py), given the scores of its pairs."""
    grid = scores_P.new_zeros(batch["relevance"].numel())
    # into a grid and not by masked_scatter, whose gradient waits for the device
    scores_QN = grid.index_copy(0, batch["slots"], scores_P).view_as(batch["relevance"])
    return Lists(scores_QN, batch["relevance"].to(scores_P.dtype), batch["is_there"])


def of_lists(lists: Lists, how: Cross) -> Tensor:
    """(Q,) the loss of each list."""
    if how.loss == "pointwise":
        return pointwise(lists)
    if how.loss == "softmax":
        return softmax(lists)
    if how.loss == "lambda":
        return lambda_loss(lists, how)
    gaps, pairs = lists.gaps_QNN, lists.pairs_QNN
    if how.loss == "margin":
        return _mean(F.relu(how.margin - gaps), pairs)
    return _mean(F.softplus(-how.sigma * gaps), pairs)  # Burges et al. 2005 (RankNet), eq. 3


def pointwise(lists: Lists) -> Tensor:
    """(Q,) the mean over a list's passages of the binary cross-entropy of their scores."""
    losses_QN = F.binary_cross_entropy_with_logits(
        lists.scores_QN, lists.labels_QN, reduction="none"
    )
    return losses_QN.masked_fill(~lists.is_there_QN, 0.0).sum(-1) / lists.counts_Q


def softmax(lists: Lists) -> Tensor:
    """(Q,) the cross-entropy of the softmax over a list's scores; its target is shared by the
    relevant passages. Source: Gao et al. 2021, "Rethink Training of BERT Rerankers", eq. 4.
    """
    scores_QN = lists.scores_QN.masked_fill(~lists.is_there_QN, float("-inf"))
    logps_QN = scores_QN.log_softmax(-1).masked_fill(~lists.is_there_QN, 0.0)
    targets_QN = lists.labels_QN / lists.labels_QN.sum(-1, keepdim=True)
    return -(targets_QN * logps_QN).sum(-1)


def lambda_loss(lists: Lists, how: Cross) -> Tensor:
    """(Q,) the mean over pairs of -log2 sigmoid of their gap, weighted. Pairs are those of which
    one passage is more relevant, and with `top` those of which a passage ranks so high; with the
    weights ndcg1 all pairs of the list are counted.

    Source: Wang et al. 2018, "The LambdaLoss Framework for Ranking Metric Optimization", sec. 4 and
    5; the mean over pairs as sentence-transformers takes it.
    """
    is_there_QN, num_ranks = lists.is_there_QN, lists.is_there_QN.shape[1]
    # a passage that is not there ranks below all others
    order = lists.scores_QN.detach().masked_fill(~is_there_QN, float("-inf"))
    by_rank = order.argsort(dim=-1, descending=True, stable=True)
    ranked = Lists(*(x.gather(1, by_rank) for x in (lists.scores_QN, lists.labels_QN, is_there_QN)))
    first = how.top or num_ranks
    ranks_N = torch.arange(1, num_ranks + 1, device=order.device)
    discounts_N = torch.log2(1.0 + ranks_N)
    gains_QN = (2**ranked.labels_QN - 1).masked_fill(~ranked.is_there_QN, 0.0)
    ideal_QN = gains_QN.sort(dim=-1, descending=True).values
    best_Q1 = (ideal_QN / discounts_N)[:, :first].sum(-1, keepdim=True).clamp(min=1e-10)
    weights_QNN = _weights(gains_QN / best_Q1, discounts_N, how)
    pairs_QNN = ranked.pairs_QNN
    if how.weights == "ndcg1":
        pairs_QNN = ranked.is_there_QN[:, :, None] & ranked.is_there_QN[:, None, :]
    is_first_N = ranks_N <= first
    pairs_QNN = pairs_QNN & (is_first_N[:, None] | is_first_N)
    losses_QNN = F.softplus(-how.sigma * ranked.gaps_QNN) / math.log(2)
    return _mean(weights_QNN * losses_QNN, pairs_QNN)


def _weights(gains_QN: Tensor, discounts_N: Tensor, how: Cross) -> Tensor:
    """(Q, N, N), or a shape that spreads to it: the published weight of each pair of ranks."""
    if how.weights == "ndcg1":
        return (gains_QN / discounts_N)[:, :, None]
    gaps_QNN = (gains_QN[:, :, None] - gains_QN[:, None, :]).abs()
    inverse_N = 1 / discounts_N
    of_ranks_NN = (inverse_N[:, None] - inverse_N).abs()
    if how.weights == "lambdarank":
        return of_ranks_NN * gaps_QNN
    # what the discount falls by between the two ranks that the distance of the pair names
    ranks_N = torch.arange(len(discounts_N), device=discounts_N.device)
    distance_NN = (ranks_N[:, None] - ranks_N).abs()
    steps_N = (inverse_N - 1 / torch.log2(ranks_N + 3.0)).roll(1)
    of_distance_NN = steps_N[distance_NN].masked_fill(distance_NN == 0, 0.0)
    if how.weights == "ndcg2":
        return of_distance_NN * gaps_QNN
    return (how.mu * of_distance_NN + of_ranks_NN) * gaps_QNN


def _mean(losses_QNN: Tensor, is_pair_QNN: Tensor) -> Tensor:
    """(Q,) the mean over the pairs of each list; 0 for a list without a pair."""
    sums_Q = losses_QNN.masked_fill(~is_pair_QNN, 0.0).sum((1, 2))
    return sums_Q / is_pair_QNN.sum((1, 2)).clamp(min=1)
