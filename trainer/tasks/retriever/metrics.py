"""How well queries find their passages among all passages of a split, out of a table that ranks can
gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A row of the table is one of three things, told by its first column:
QUERY, PASSAGE, RELEVANT = (
    0.0,
    1.0,
    2.0,
)  # (query number, vector), (passage id, vector), (query number, passage id)
# columns before the vector: kind, 3 of the number, 4 of the id: 16 bits each, for fp32 holds 24
KEYS = 8
DEPTHS = (1, 5, 20)
MRR_DEPTH = 10
_TOGETHER = 256  # queries scored at a time

# Q queries, P passages, R pairs of a query and a relevant passage, E width of a vector


def rows_of(kind: float, *, numbers: Tensor, ids: Tensor, vectors: Tensor) -> Tensor:
    """(N, KEYS + E) fp32 rows of one kind. numbers, ids: (N,) int64."""
    columns = [torch.full_like(numbers, int(kind))]
    columns += [numbers >> shift & 0xFFFF for shift in (32, 16, 0)] + [
        ids >> shift & 0xFFFF for shift in (48, 32, 16, 0)
    ]
    return torch.cat([torch.stack(columns, -1).float(), vectors.float()], -1)


def retrieval_metrics(table: Tensor, *, temperature: float) -> dict[str, float]:
    """loss: mean over queries and their relevant passages of -log softmax over every passage of the
    split, of which the query's other relevant ones are left out. mrr@10 by the best relevant
    passage; recall@1, @5, @20: the share of the relevant passages in the first so many. A tie
    counts against the retriever.
    """
    of_kind = {kind: table[table[:, 0] == kind] for kind in (QUERY, PASSAGE, RELEVANT)}
    numbers_Q, order = _integer(of_kind[QUERY][:, 1:4]).sort()
    queries_QE = of_kind[QUERY][order, KEYS:].double()
    ids_P, passages_PE = _distinct(of_kind[PASSAGE])
    pairs = of_kind[RELEVANT]
    is_relevant_QP = torch.zeros(len(queries_QE), len(ids_P), dtype=torch.bool)
    row_R, column_R = _integer(pairs[:, 1:4]), _integer(pairs[:, 4:8])
    is_relevant_QP[torch.searchsorted(numbers_Q, row_R), torch.searchsorted(ids_P, column_R)] = True
    losses, best, shares = [], [], []
    for start in range(0, len(queries_QE), _TOGETHER):
        relevant = is_relevant_QP[start : start + _TOGETHER]
        scores = queries_QE[start : start + _TOGETHER] @ passages_PE.T
        ranks = _ranks(scores, relevant)
        losses.append(_losses(scores / temperature, relevant))
        best.append(ranks.min(-1).values)
        shares.append(
            torch.stack(
                [(ranks <= depth).sum(-1) / relevant.sum(-1) for depth in DEPTHS], -1
            ).double()
        )
    best_Q, recall = torch.cat(best), torch.cat(shares).mean(0)
    reciprocal_Q = torch.where(best_Q <= MRR_DEPTH, 1.0 / best_Q.double(), 0.0)
    found = {
        "loss": float(torch.cat(losses).mean()),
        f"mrr@{MRR_DEPTH}": float(reciprocal_Q.mean()),
    }
    return found | {
        f"recall@{depth}": float(value) for depth, value in zip(DEPTHS, recall, strict=True)
    }


def _ranks(scores_QP: Tensor, relevant_QP: Tensor) -> Tensor:
    """(Q, P) the place of each relevant passage, from 1; a number beyond all places elsewhere."""
    found = torch.full(scores_QP.shape, torch.iinfo(torch.int64).max)
    order = torch.where(relevant_QP, float("inf"), scores_QP).sort(descending=False, dim=-1).values
    for row, column in relevant_QP.nonzero().tolist():
        score = scores_QP[row, column]
        others = order[row, : int((~relevant_QP[row]).sum())]
        above = len(others) - int(torch.searchsorted(others, score))
        found[row, column] = above + 1 + int((scores_QP[row][relevant_QP[row]] > score).sum())
    return found


def _losses(scores_QP: Tensor, relevant_QP: Tensor) -> Tensor:
    """(Q,) the mean over a query's relevant passages of -log softmax among itself and what is not
    relevant.
    """
    others_Q1 = scores_QP.masked_fill(relevant_QP, float("-inf")).logsumexp(-1, keepdim=True)
    surprise_QP = torch.logaddexp(scores_QP, others_Q1) - scores_QP
    return surprise_QP.masked_fill(~relevant_QP, 0.0).sum(-1) / relevant_QP.sum(-1)


def _distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Ids in rising order, and the vector of each: whatever the order in which batches came."""
    ids, place = _integer(rows[:, 4:8]).sort(stable=True)
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[1:] = ids[1:] != ids[:-1]
    return ids[is_first], rows[place[is_first], KEYS:].double()


def _integer(columns: Tensor) -> Tensor:
    """(N, K) 16-bit numbers, the highest first -> (N,) int64."""
    total = torch.zeros(len(columns), dtype=torch.int64)
    for column in columns.long().T:
        total = (total << 16) | column
    return total
