"""The passages that share words with a question, by the sum over these words of the product of
their weights: exactly, by an inverted index that is made of one block of passages at a time.

Only the postings of a question's own words are read, and each score is added up word by word in
fp32, so that it depends on no block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.errors import ConfigError
from trainer.retrieval.exact_search import NO_HIT, Hits, best_with_block, hits_of
from trainer.retrieval.sparse.word_weights import WordWeights, scipy_sparse
from trainer.runtime import distributed

# Q questions, P passages of a block, V vocabulary, K depth

PASSAGE_BLOCK, QUERY_BLOCK = 8192, 256  # scores of a block: 8 MiB


@dataclass(frozen=True)
class WordHits:
    """What a search found, and what it cost."""

    hits: Hits  # a passage that shares no word with a question is none of its hits
    flops: float  # the mean number of words that a question and a passage share


def search(
    queries: WordWeights,
    corpora: Sequence[WordWeights],
    *,
    depth: int,
    passage_block: int = PASSAGE_BLOCK,
    query_block: int = QUERY_BLOCK,
) -> WordHits:
    """The `depth` passages with the highest scores; equal ones in the passages' order. Memory: the
    questions, their hits, a shard and a block. A collective: every rank searches its share, and all
    get the same hits.
    """
    if depth < 1:
        raise ConfigError(f"--depth {depth}: want at least 1.")
    widths = sorted({stored.dim for stored in (queries, *corpora)})
    if len(widths) > 1:
        raise ConfigError(
            f"weights of {widths[0]} and of {widths[1]} words: encode both sides by one model."
        )
    questions_QV = scipy_sparse().vstack([*queries.matrices()], format="csr")
    keys_QK = torch.full((questions_QV.shape[0], depth), NO_HIT)
    counts_V = np.zeros(widths[0], dtype=np.int64)
    for first, block_PV in _share(corpora, passage_block):
        index = block_PV.tocsc()  # by word, the passages that have it
        counts_V += np.diff(index.indptr)
        for at in range(0, questions_QV.shape[0], query_block):
            own = slice(at, at + query_block)
            scores_PQ = (index @ questions_QV[own].T.tocsc()).toarray()
            scores_QP = torch.from_numpy(np.ascontiguousarray(scores_PQ.T))
            keys_QK[own] = best_with_block(keys_QK[own], scores_QP, first)
    hits = _with_words(hits_of(keys_QK.to(distributed.device())))
    counts_V = distributed.total(torch.from_numpy(counts_V).to(distributed.device())).cpu().numpy()
    passages = sum(corpus.plan.count for corpus in corpora)
    asked_V = np.bincount(questions_QV.indices, minlength=widths[0])
    pairs = max(1, questions_QV.shape[0] * passages)
    return WordHits(hits, float((asked_V.astype(np.float64) * counts_V).sum() / pairs))


def _with_words(hits: Hits) -> Hits:
    """The hits without passages of score 0, which share no word."""
    is_hit = hits.scores > 0
    return Hits(np.where(is_hit, hits.rows, -1), np.where(is_hit, hits.scores, np.float32("-inf")))


def _share(corpora: Sequence[WordWeights], block: int) -> Iterator[tuple[int, Any]]:
    """(position of the first, weights) of this rank's blocks of passages, every world-th one."""
    world, rank = distributed.world(), distributed.rank()
    start = number = 0
    for corpus in corpora:
        for matrix in corpus.matrices():
            for first in range(0, matrix.shape[0], block):
                if number % world == rank:
                    yield start + first, matrix[first : first + block]
                number += 1
            start += matrix.shape[0]
