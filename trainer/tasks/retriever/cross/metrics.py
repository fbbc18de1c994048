"""How well a cross-encoder orders the passages of each query."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.metrics.mergeable import Ratio
from trainer.tasks.retriever.cross.losses import Lists

DEPTH = 10

# Q lists, N passages of the longest one


def of_lists(lists: Lists) -> dict[str, Ratio]:
    """Means over lists: mrr@10 and ndcg@10 (1 for a relevant passage), recall@1: whether the first
    passage is relevant.

    Equal scores count against the model: a relevant passage ranks below all others of its score.
    """
    is_relevant_QN = (lists.labels_QN > 0) & lists.is_there_QN
    ranks_QN = _ranks(lists.scores_QN.double(), is_relevant_QN, lists.is_there_QN)
    best_Q = ranks_QN.masked_fill(~is_relevant_QN, torch.iinfo(torch.int64).max).amin(-1)
    reciprocal_Q = torch.where(best_Q <= DEPTH, 1.0 / best_Q.double(), 0.0)
    gains_QN = (1 / torch.log2(1.0 + ranks_QN.double())).masked_fill(
        ~is_relevant_QN | (ranks_QN > DEPTH), 0.0
    )
    places = torch.arange(1, DEPTH + 1, device=best_Q.device)
    ideal_QK = (1 / torch.log2(1.0 + places.double())) * (
        places <= is_relevant_QN.sum(-1, keepdim=True)
    )
    ndcg_Q = gains_QN.sum(-1) / ideal_QK.sum(-1)
    count = best_Q.new_tensor(len(best_Q))
    return {
        f"mrr@{DEPTH}": Ratio(reciprocal_Q.sum(), count),
        f"ndcg@{DEPTH}": Ratio(ndcg_Q.sum(), count),
        "recall@1": Ratio((best_Q == 1).double().sum(), count),
    }


def _ranks(scores_QN: Tensor, is_relevant_QN: Tensor, is_there_QN: Tensor) -> Tensor:
    """(Q, N) the rank of each passage from 1: passages with a higher score stand above it, and of
    those with the same score the ones that are not relevant; a relevant one stands below them all
    and in the order of the list.
    """
    higher_QNN = scores_QN[:, None, :] > scores_QN[:, :, None]
    equal_QNN = scores_QN[:, None, :] == scores_QN[:, :, None]
    place = torch.arange(scores_QN.shape[1], device=scores_QN.device)
    is_earlier_NN = place[None, :] < place[:, None]
    above_QNN = higher_QNN | (equal_QNN & (~is_relevant_QN[:, None, :] | is_earlier_NN))
    itself = torch.eye(len(place), dtype=torch.bool, device=place.device)
    return 1 + (above_QNN & is_there_QN[:, None, :] & ~itself).sum(-1)
