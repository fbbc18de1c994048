"""How well queries find their passages among all passages of a split.

Ranks gather one table of numbers, and the metrics are computed from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

# The first column says what a row of the table is:
QUERY = 0.0  # a query: its number and vector
PASSAGE = 1.0  # a passage: its id and vector
RELEVANT = 2.0  # the number of a query and the id of a passage that is relevant to it
# Columns before the vector: 1 of the kind, 3 of the number and 4 of the id. Each holds 16 bits, for
# fp32 holds integers exactly up to 24 bits only.
KEYS = 8
DEPTHS = (1, 5, 20)
MRR_DEPTH = 10
_QUERIES_AT_ONCE = 256

# Q queries, P passages, R pairs of a query and a relevant passage, E width of a vector


def rows_of(kind: float, *, numbers: Tensor, ids: Tensor, vectors: Tensor) -> Tensor:
    """(N, KEYS + E) fp32 rows of one kind. numbers, ids: (N,) int64."""
    columns = [torch.full_like(numbers, int(kind))]
    columns += [numbers >> shift & 0xFFFF for shift in (32, 16, 0)] + [
        ids >> shift & 0xFFFF for shift in (48, 32, 16, 0)
    ]
    return torch.cat([torch.stack(columns, -1).float(), vectors.float()], -1)


def table_of(batch: Mapping[str, Tensor], queries_QE: Tensor, passages_PE: Tensor) -> Tensor:
    """The table rows of a batch (batches.py), given the vectors of its texts."""
    numbers, ids = batch["numbers"], batch["identities"]
    numbers_R = torch.repeat_interleave(numbers, batch["positive_counts"])
    no_ids, no_numbers = torch.zeros_like(numbers), torch.zeros_like(ids)
    no_vectors_RE = queries_QE.new_zeros(len(numbers_R), queries_QE.shape[1])
    table = [
        rows_of(QUERY, numbers=numbers, ids=no_ids, vectors=queries_QE),
        rows_of(PASSAGE, numbers=no_numbers, ids=ids, vectors=passages_PE),
        rows_of(RELEVANT, numbers=numbers_R, ids=batch["positive_ids"], vectors=no_vectors_RE),
    ]
    return torch.cat(table)


def retrieval_metrics(table: Tensor, *, temperature: float) -> dict[str, float]:
    """Metrics of all queries of the table over all its passages, without duplicates.

    - loss: the mean, over queries and their relevant passages, of -log softmax over all passages
      except the query's other relevant ones.
    - mrr@10: the mean of 1 / rank of the best relevant passage, 0 below rank 10.
    - recall@1, @5, @20: the share of the relevant passages in the top k.

    Equal scores count against the retriever: the relevant passage gets the lowest of their ranks.
    """
    of_kind = {kind: table[table[:, 0] == kind] for kind in (QUERY, PASSAGE, RELEVANT)}
    numbers_Q, order = integers(of_kind[QUERY][:, 1:4]).sort()
    queries_QE = of_kind[QUERY][order, KEYS:].double()
    # passages without duplicates, by ascending id: the batches' order changes nothing
    rows = of_kind[PASSAGE]
    ids, place = integers(rows[:, 4:8]).sort(stable=True)
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[1:] = ids[1:] != ids[:-1]
    ids_P, passages_PE = ids[is_first], rows[place[is_first], KEYS:].double()
    is_relevant_QP = relevant_pairs(of_kind[RELEVANT], numbers_Q, ids_P)
    return measures(
        lambda some: queries_QE[some] @ passages_PE.T, is_relevant_QP, temperature=temperature
    )


def relevant_pairs(pairs: Tensor, numbers_Q: Tensor, ids_P: Tensor) -> Tensor:
    """(Q, P) whether a passage is relevant to a query, by the rows of a table of kind RELEVANT.
    numbers_Q, ids_P: int64, in ascending order.
    """
    is_relevant_QP = torch.zeros(len(numbers_Q), len(ids_P), dtype=torch.bool)
    row_R, column_R = integers(pairs[:, 1:4]), integers(pairs[:, 4:8])
    is_relevant_QP[torch.searchsorted(numbers_Q, row_R), torch.searchsorted(ids_P, column_R)] = True
    return is_relevant_QP


def measures(
    scores_of: Callable[[slice], Tensor], is_relevant_QP: Tensor, *, temperature: float
) -> dict[str, float]:
    """The metrics of retrieval_metrics. scores_of: some of the Q queries -> (Q, P) fp64 scores of
    all passages.
    """
    losses, best, shares = [], [], []
    for start in range(0, len(is_relevant_QP), _QUERIES_AT_ONCE):
        some = slice(start, start + _QUERIES_AT_ONCE)
        relevant, scores = is_relevant_QP[some], scores_of(some)
        ranks = _ranks(scores, relevant)
        # (Q,) the mean of -log softmax over a query's relevant passages. Each one's softmax is over
        # itself and all passages that are not relevant.
        scaled = scores / temperature
        others_Q1 = scaled.masked_fill(relevant, float("-inf")).logsumexp(-1, keepdim=True)
        surprise_QP = torch.logaddexp(scaled, others_Q1) - scaled
        losses.append(surprise_QP.masked_fill(~relevant, 0.0).sum(-1) / relevant.sum(-1))
        best.append(ranks.min(-1).values)
        recalls = [(ranks <= depth).sum(-1) / relevant.sum(-1) for depth in DEPTHS]
        shares.append(torch.stack(recalls, -1).double())
    best_Q, recall = torch.cat(best), torch.cat(shares).mean(0)
    reciprocal_Q = torch.where(best_Q <= MRR_DEPTH, 1.0 / best_Q.double(), 0.0)
    values = {
        "loss": float(torch.cat(losses).mean()),
        f"mrr@{MRR_DEPTH}": float(reciprocal_Q.mean()),
    }
    for depth, value in zip(DEPTHS, recall, strict=True):
        values[f"recall@{depth}"] = float(value)
    return values


def _ranks(scores_QP: Tensor, relevant_QP: Tensor) -> Tensor:
    """(Q, P) the rank of each relevant passage, from 1; the largest integer for all others."""
    ranks_QP = torch.full(scores_QP.shape, torch.iinfo(torch.int64).max)
    order = torch.where(relevant_QP, float("inf"), scores_QP).sort(descending=False, dim=-1).values
    for row, column in relevant_QP.nonzero().tolist():
        score = scores_QP[row, column]
        others = order[row, : int((~relevant_QP[row]).sum())]
        above = len(others) - int(torch.searchsorted(others, score))
        ranks_QP[row, column] = above + 1 + int((scores_QP[row][relevant_QP[row]] > score).sum())
    return ranks_QP


def integers(columns: Tensor) -> Tensor:
    """(N, K) 16-bit numbers, the highest first -> (N,) int64."""
    total = torch.zeros(len(columns), dtype=torch.int64)
    for column in columns.long().T:
        total = (total << 16) | column
    return total
