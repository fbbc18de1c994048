"""The passages whose token vectors score highest with a question's, by late interaction: exactly,
in bounded memory.

Passages are read once, block by block, for all questions. Questions are scored a few at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.errors import ConfigError
from trainer.models.lean.maxsim import maxsim
from trainer.retrieval.exact_search import NO_HIT, Hits, best_with_block, hits_of
from trainer.retrieval.late.token_embeddings import TokenEmbeddings
from trainer.runtime import distributed

# Q questions, T vectors of all of them, P passages of a block, M vectors of all of them, K depth


@dataclass(frozen=True)
class SearchBudget:
    """The most numbers that each array of a search may have, but for the questions and their hits.
    A passage that alone has more is a block of its own.
    """

    vectors: int  # of a block of passages
    products: int  # of vectors with vectors
    questions: int  # at the same time


ON_CPU = SearchBudget(vectors=2**16, products=2**24, questions=64)  # 64 MiB of products
ON_GPU = SearchBudget(vectors=2**18, products=2**28, questions=256)  # 1 GiB


def search(
    queries: TokenEmbeddings,
    corpora: Sequence[TokenEmbeddings],
    *,
    depth: int,
    device: torch.device | None = None,
    budget: SearchBudget | None = None,
) -> Hits:
    """The `depth` passages with the highest scores, computed in fp32; equal ones in the passages'
    order. A collective: every rank searches its share, and all get the same hits.
    """
    device = device or distributed.device()
    budget = budget or (ON_CPU if device.type == "cpu" else ON_GPU)
    if depth < 1:
        raise ConfigError(f"--depth {depth}: want at least 1.")
    vectors_TE = _tensor(np.concatenate(queries.vectors), device)
    lengths_Q = torch.from_numpy(np.diff(queries.offsets)).to(device)
    starts = queries.offsets
    keys_QK = torch.full((len(lengths_Q), depth), NO_HIT, device=device)
    for first, block, lengths in _share(corpora, budget.vectors):
        passages = (_tensor(block, device), torch.from_numpy(lengths).to(device))
        for at in range(0, len(lengths_Q), budget.questions):
            own = slice(at, at + budget.questions)
            last = min(at + budget.questions, len(lengths_Q))
            few_TE, of_few = vectors_TE[starts[at] : starts[last]], lengths_Q[own]
            scores_QP = maxsim(few_TE, of_few, *passages, budget=budget.products)
            if queries.plan.mean:
                scores_QP = scores_QP / of_few[:, None]
            keys_QK[own] = best_with_block(keys_QK[own], scores_QP, first)
    return hits_of(keys_QK)


def _tensor(stored: np.ndarray, device: torch.device) -> torch.Tensor:
    """fp32 on a device. A copy: torch takes no memory that is read-only."""
    return torch.from_numpy(np.array(stored, dtype=np.float32)).to(device)


def _share(
    corpora: Sequence[TokenEmbeddings], most: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(position of the first, vectors, lengths) of this rank's blocks of passages, which are every
    world-th one.
    """
    world, rank = distributed.world(), distributed.rank()
    for number, block in enumerate(_blocks(corpora, most)):
        if number % world == rank:
            yield block


def _blocks(
    corpora: Sequence[TokenEmbeddings], most: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Blocks of whole passages of one shard, of at most so many vectors, or of one passage."""
    position = 0
    for corpus in corpora:
        for shard, vectors in enumerate(corpus.vectors):
            lengths = corpus.lengths(shard)
            ends = np.cumsum(lengths)
            first = 0
            while first < len(lengths):
                start = int(ends[first] - lengths[first])
                last = max(first + 1, int(np.searchsorted(ends, start + most, side="right")))
                stop = int(ends[last - 1])
                yield position + first, vectors[start:stop], lengths[first:last]
                first = last
            position += len(lengths)
