"""Clusters of texts, by their words or by vectors of a model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

# N texts, M tokens of all of them, C clusters, W different tokens, D numbers of a vector

_WIDTH = 256  # of vectors that stand for TF-IDF
_ROUNDS = 20  # of k-means; later ones move few rows
_AT_ONCE = 4096  # texts whose similarities to all clusters are in memory


def words_of(tokens: np.ndarray, starts: np.ndarray, *, seed: int) -> Tensor:
    """(N, D) fp32 vectors of length 1 whose dot products are about those of the texts' TF-IDF
    vectors.

    tokens (M,), starts (N + 1,): the ids of text i are tokens[starts[i]:starts[i + 1]]. A token
    counts 1 + log of its occurrences, times log(N / texts that have it), so that one that all texts
    have counts nothing. Each token has a random direction; the product of two of them is near 0.

    Sources: Salton & Buckley 1988 (TF-IDF), Achlioptas 2003 (projections of +1 and -1).
    """
    num_texts = len(starts) - 1
    text = np.repeat(np.arange(num_texts), np.diff(starts))
    different, token = np.unique(tokens, return_inverse=True)
    pairs, counts = np.unique(text * len(different) + token, return_counts=True)
    text, token = np.divmod(pairs, len(different))
    rarity_W = np.log(num_texts / np.bincount(token))
    weights = rarity_W[token] * (1 + np.log(counts))
    bits = np.random.PCG64(np.random.SeedSequence([seed, 1])).random_raw(len(different) * _WIDTH)
    signs_WD = np.where(bits.reshape(-1, _WIDTH) >> np.uint64(63), np.float32(1), np.float32(-1))
    vectors_ND = torch.zeros(num_texts, _WIDTH)
    for start in range(0, len(text), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        added = weights[some, None].astype(np.float32) * signs_WD[token[some]]
        vectors_ND.index_add_(0, torch.from_numpy(text[some]), torch.from_numpy(added))
    return normalize(vectors_ND, dim=-1)


def clusters_of(vectors_ND: Tensor, count: int, *, seed: int) -> np.ndarray:
    """(N,) int64 the cluster of each vector, 0 and on: k-means by the angle, from `count` vectors
    that are drawn. A cluster that loses all its vectors is no more.

    Source: Dhillon & Modha 2001 (spherical k-means).
    """
    vectors_ND = normalize(vectors_ND.float(), dim=-1)
    draws = np.random.PCG64(np.random.SeedSequence([seed, 2])).random_raw(len(vectors_ND))
    centres_CD = vectors_ND[torch.from_numpy(np.argsort(draws, kind="stable")[:count])]
    clusters_N = torch.zeros(len(vectors_ND), dtype=torch.int64)
    for _ in range(_ROUNDS):
        nearest = [(some @ centres_CD.T).argmax(1) for some in vectors_ND.split(_AT_ONCE)]
        before_N, (_, clusters_N) = clusters_N, torch.cat(nearest).unique(return_inverse=True)
        if torch.equal(clusters_N, before_N):
            break
        sums_CD = torch.zeros(int(clusters_N.max()) + 1, vectors_ND.shape[1], dtype=torch.float64)
        for some, of_some in zip(
            vectors_ND.split(_AT_ONCE), clusters_N.split(_AT_ONCE), strict=True
        ):
            sums_CD.index_add_(0, of_some, some.double())
        centres_CD = normalize(sums_CD, dim=-1).float()
    return clusters_N.numpy()
