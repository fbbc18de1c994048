"""How well sparse queries find their passages among all passages of a split, and how many words
they and the passages have.

Ranks gather one table of numbers, in which a text takes as many rows as its words need.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.tasks.retriever.metrics import (
    KEYS,
    PASSAGE,
    QUERY,
    RELEVANT,
    integers,
    measures,
    relevant_pairs,
    rows_of,
)

WORDS = 64  # of a row of the table, each with its weight

# N texts, Q queries, P passages, R pairs of a query and a relevant passage, V vocabulary, K words


def table_of(batch: Mapping[str, Tensor], queries_QV: Tensor, passages_PV: Tensor) -> Tensor:
    """(rows, KEYS + 2 * WORDS) fp32: the table rows of a batch (batches.py), given the weights of
    its texts. A word and its weight are 0 where a text has no more of them.
    """
    numbers, ids = batch["numbers"], batch["identities"]
    numbers_R = torch.repeat_interleave(numbers, batch["positive_counts"])
    no_words_R = queries_QV.new_zeros(len(numbers_R), 2 * WORDS)
    return torch.cat(
        [
            _rows(QUERY, numbers, torch.zeros_like(numbers), queries_QV),
            _rows(PASSAGE, torch.zeros_like(ids), ids, passages_PV),
            rows_of(RELEVANT, numbers=numbers_R, ids=batch["positive_ids"], vectors=no_words_R),
        ]
    )


def _rows(kind: float, numbers: Tensor, ids: Tensor, weights_NV: Tensor) -> Tensor:
    most = int((weights_NV > 0).sum(1).max())
    rows_of_text = max(1, -(-most // WORDS))
    weights_NK, words_NK = weights_NV.topk(most, dim=1)
    room = (0, rows_of_text * WORDS - most)
    padded = [torch.nn.functional.pad(one.float(), room) for one in (words_NK, weights_NK)]
    pairs = torch.cat([one.view(-1, WORDS) for one in padded], dim=1)
    of_rows = [one.repeat_interleave(rows_of_text) for one in (numbers, ids)]
    return rows_of(kind, numbers=of_rows[0], ids=of_rows[1], vectors=pairs)


def sparse_metrics(table: Tensor, *, vocabulary: int, temperature: float) -> dict[str, float]:
    """The metrics of retriever/metrics.py over all queries and passages of the table, without
    duplicates; and

    - query_words, passage_words: the mean number of words whose weight is above 0.
    - flops: the mean number of words that a query and a passage share, over all pairs of them: so
      many products a search by an inverted index takes for each. Source: Paria et al. 2020.
    """
    of_kind = {kind: table[table[:, 0] == kind] for kind in (QUERY, PASSAGE, RELEVANT)}
    numbers_Q, queries = _texts(of_kind[QUERY], slice(1, 4), vocabulary)
    ids_P, passages = _texts(of_kind[PASSAGE], slice(4, 8), vocabulary)
    is_relevant_QP = relevant_pairs(of_kind[RELEVANT], numbers_Q, ids_P)
    shares = [_counts(texts, vocabulary) / texts.shape[0] for texts in (queries, passages)]

    def scores_of(some: slice) -> Tensor:
        first, stop, _ = some.indices(queries.shape[0])
        rows = torch.arange(first, stop)
        return torch.sparse.mm(passages, queries.index_select(0, rows).to_dense().T).T

    return {
        **measures(scores_of, is_relevant_QP, temperature=temperature),
        "query_words": float(shares[0].sum()),
        "passage_words": float(shares[1].sum()),
        "flops": float((shares[0] * shares[1]).sum()),
    }


def _texts(rows: Tensor, key: slice, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The (N,) keys of the texts in a table, in ascending order, each once; and their (N, V) fp64
    weights, sparse.
    """
    keys, text = integers(rows[:, key]).unique(sorted=True, return_inverse=True)
    words, weights = rows[:, KEYS:].split(WORDS, dim=1)
    is_word = weights > 0
    places = torch.stack([text[:, None].expand(words.shape)[is_word], words[is_word].long()])
    flat = places[0] * vocabulary + places[1]
    # a passage that several rows of the split bring has its words so many times
    order = flat.argsort(stable=True)
    is_first = torch.ones_like(order, dtype=torch.bool)
    is_first[1:] = flat[order][1:] != flat[order][:-1]
    kept = order[is_first]
    shape = (len(keys), vocabulary)
    of_texts = torch.sparse_coo_tensor(
        places[:, kept],
        weights[is_word][kept].double(),
        shape,
        check_invariants=True,
        is_coalesced=True,
    )
    return keys, of_texts


def _counts(texts_NV: Tensor, vocabulary: int) -> Tensor:
    """(V,) fp64: how many texts have each word."""
    return texts_NV.indices()[1].bincount(minlength=vocabulary).double()
