"""Fewer vectors for a passage: similar ones are replaced by their mean.

Source: Clavie, Chaffin & Adams 2024 (arXiv 2409.14683), hierarchical pooling with Ward's linkage;
as HierarchicalTokenPooling of sentence-transformers 6.2 does it.
"""

from __future__ import annotations

import numpy as np

# K vectors, E numbers


def pooled(vectors_KE: np.ndarray, factor: float) -> np.ndarray:
    """(1 + max(1, (K - 1) // factor), E): the first vector as it is, of [CLS], then the means of
    clusters of the others, of length 1 again.

    vectors_KE: of length 1. factor: 1 changes nothing.
    """
    others, wanted = vectors_KE[1:], max(1, int((len(vectors_KE) - 1) // factor))
    if factor == 1 or wanted >= len(others):
        return vectors_KE
    clusters = _clusters(others, wanted)
    means = np.stack([others[members].mean(axis=0) for members in clusters])
    lengths = np.linalg.norm(means, axis=1, keepdims=True)
    return np.concatenate([vectors_KE[:1], means / np.maximum(lengths, 1e-12)])


def _clusters(vectors_KE: np.ndarray, wanted: int) -> list[list[int]]:
    """The members of `wanted` clusters: the two nearest are joined until no more are left. The
    distance of two vectors is 1 less their cosine; that of clusters follows from Ward's formula, as
    Lance & Williams 1967 write it.
    """
    distances = np.clip(1 - vectors_KE @ vectors_KE.T, 0, 2).astype(np.float64)
    squares = np.square(distances)
    np.fill_diagonal(squares, np.inf)
    members = [[place] for place in range(len(vectors_KE))]
    sizes = np.ones(len(vectors_KE))
    for _ in range(len(vectors_KE) - wanted):
        first, second = sorted(divmod(int(squares.argmin()), len(squares)))
        both = sizes[first] + sizes[second]
        joined = (
            (sizes + sizes[first]) * squares[first]
            + (sizes + sizes[second]) * squares[second]
            - sizes * squares[first, second]
        ) / (sizes + both)
        is_gone = ~np.isfinite(squares).any(axis=0)
        joined[is_gone | (np.arange(len(sizes)) == first)] = np.inf
        squares[first], squares[:, first] = joined, joined
        squares[second], squares[:, second] = np.inf, np.inf
        sizes[first] = both
        members[first] += members[second]
        members[second] = []
    return [sorted(one) for one in members if one]
