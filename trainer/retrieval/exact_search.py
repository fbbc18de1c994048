"""The passages whose vectors have the largest dot product with a question's: exactly, in bounded
memory.

Passages are read once, block by block, for all questions. Of a block only the scores above a
question's k-th best so far become candidates.

A hit is packed into one int64 key: the score in the upper 32 bits, as an integer of the same order,
and the passage's position, counted backwards, in the lower 32 bits. So the largest keys are the
best hits, all keys differ, and equal scores stand in the order of the passages.
"""

# Q questions, P passages of a block, D width, K depth, C candidates

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from trainer import devices
from trainer.errors import ConfigError
from trainer.retrieval import stored_forms
from trainer.runtime import distributed

# The scores of a block are at most 8 MiB, which a processor's cache still holds; a block of fewer
# questions has more passages. What has to be made fp32 first is at most 96 MiB of 768 numbers each.
QUERY_BLOCK, BLOCK_SCORES, LARGEST_CONVERTED_BLOCK = 256, 2**21, 32_768
FEW_QUERIES, FEW_FOR_INTEL = 8, 32
ROWS_OF_A_THREAD = 4096  # fewer are computed before a thread has begun
GPU_QUERY_BLOCK, GPU_PASSAGE_BLOCK = 2048, 65_536
NO_HIT = torch.iinfo(torch.int64).min  # below every key
_LOW = 2**32 - 1  # the bits of a key that hold the position


@dataclass(frozen=True)
class Hits:
    """The best passages of every question, best first."""

    rows: np.ndarray  # (Q, K) int64: positions among the passages; -1 where there are fewer than K
    scores: np.ndarray  # (Q, K) float32; -inf where there are fewer


def search(
    queries: np.ndarray,
    passages: Sequence[np.ndarray],
    *,
    depth: int,
    device: torch.device | None = None,
    query_block: int | None = None,
    passage_block: int | None = None,
) -> Hits:
    """The `depth` passages with the largest dot products, computed in fp32; equal ones in the
    passages' order.

    queries: (Q, D). passages: vectors in any stored form, perhaps memory-mapped. Memory: the
    queries, their hits, and a few blocks of vectors and scores. A collective: every rank searches
    its share, and all get the same hits.
    """
    device = device or distributed.device()
    is_gpu = device.type != "cpu"
    query_block = query_block or (GPU_QUERY_BLOCK if is_gpu else QUERY_BLOCK)
    if passage_block is None:
        in_block = BLOCK_SCORES // min(query_block, max(1, len(queries)))
        is_fp32 = all(shard.dtype == np.float32 for shard in passages)
        most = in_block if is_fp32 else LARGEST_CONVERTED_BLOCK
        passage_block = GPU_PASSAGE_BLOCK if is_gpu else min(most, in_block)
    check(queries, passages, depth)
    queries_QD = torch.from_numpy(np.asarray(queries, dtype=np.float32)).to(device)
    blocks = _share(passages, passage_block)
    is_small = len(queries) <= query_block and depth < sum(map(len, passages)) <= passage_block
    if is_small and not is_gpu and distributed.world() == 1:
        parts = [_products(queries_QD, _on_device(block, device)) for _, block in blocks]
        scores_QP = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return _best_of_all(scores_QP.contiguous().numpy(), depth)
    keys_QK = torch.full((len(queries), depth), NO_HIT, device=device)
    for start, block in blocks:
        block_PD = _on_device(block, device)
        for first in range(0, len(queries), query_block):
            own = slice(first, first + query_block)
            scores_QP = _products(queries_QD[own], block_PD)
            keys_QK[own] = best_with_block(keys_QK[own], scores_QP, start)
    return hits_of(keys_QK)


def hits_of(keys_QK: Tensor) -> Hits:
    """The hits of all ranks, of which each has found keys among its passages. A collective."""
    parts, depth = distributed.gather_rows(keys_QK), keys_QK.shape[1]
    keys_QK = torch.cat(parts, dim=1).topk(depth, dim=1).values if len(parts) > 1 else keys_QK
    is_hit = keys_QK != NO_HIT
    rows = torch.where(is_hit, _LOW - (keys_QK & _LOW), -1)
    scores = torch.where(is_hit, _scores(torch.where(is_hit, keys_QK, 0)), -torch.inf)
    return Hits(rows.cpu().numpy(), scores.cpu().numpy())


def check(queries: np.ndarray, passages: Sequence[np.ndarray], depth: int) -> None:
    """ConfigError unless a search of this depth is possible: equal widths, and fewer passages than
    positions.
    """
    if depth < 1:
        raise ConfigError(f"--depth {depth}: want at least 1.")
    if sum(map(len, passages)) >= _LOW:
        raise ConfigError(
            f"{sum(map(len, passages))} passages, want fewer than {_LOW}. Search them in parts."
        )
    widths = sorted({stored_forms.width(vectors) for vectors in (queries, *passages)})
    if len(widths) > 1:
        raise ConfigError(
            f"vectors of {widths[0]} and of {widths[1]} numbers: encode both sides by one model."
        )


def _share(passages: Sequence[np.ndarray], block: int) -> Iterable[tuple[int, np.ndarray]]:
    """(position of the first, vectors) of this rank's blocks, which are every world-th one."""
    starts = accumulate((len(shard) for shard in passages), initial=0)
    blocks = (
        (start + first, shard[first : first + block])
        for start, shard in zip(starts, passages, strict=False)
        for first in range(0, len(shard), block)
    )
    world, rank = distributed.world(), distributed.rank()
    return (block for number, block in enumerate(blocks) if number % world == rank)


def _on_device(stored: np.ndarray, device: torch.device) -> Tensor:
    """(P, D) fp32 vectors, of a block in any stored form."""
    numbers = stored_forms.floats(stored) if stored.dtype.names else stored
    numbers = numbers if numbers.flags.writeable else np.array(numbers)
    return torch.from_numpy(numbers).to(device).float()


def _products(queries_QD: Tensor, block_PD: Tensor) -> Tensor:
    """(Q, P) dot products in fp32; on a processor perhaps a transposed view, with the passages on
    the left.

    Each library is the fastest for some number of questions (one core, numpy 2.4, torch 2.13). On
    an AMD EPYC: for many, OpenBLAS with the passages on the left takes 20% less time than with the
    questions there, and than MKL; for up to FEW_QUERIES, MKL takes 40 to 70% of OpenBLAS's time;
    for one, numpy's vecdot takes 40% of it, and MKL longer than either. On an Intel Xeon MKL takes
    60 to 85% of OpenBLAS's time, with the passages on the left for up to FEW_FOR_INTEL questions,
    and with the questions there for more; for one, OpenBLAS takes 90% of MKL's and of vecdot's.
    """
    if queries_QD.device.type != "cpu":
        return queries_QD @ block_PD.T
    is_intel = devices.of_processor("vendor_id") == "GenuineIntel"
    if len(queries_QD) == 1:
        query_D, passages_PD = queries_QD[0].numpy(), block_PD.numpy()
        one_P = passages_PD @ query_D if is_intel else _products_of_one(query_D, passages_PD)
        return torch.from_numpy(one_P)[None]
    if len(queries_QD) <= (FEW_FOR_INTEL if is_intel else FEW_QUERIES):
        return (block_PD @ queries_QD.T).T
    if is_intel:
        return queries_QD @ block_PD.T
    return torch.from_numpy(block_PD.numpy() @ queries_QD.numpy().T).T


def _products_of_one(query_D: np.ndarray, block_PD: np.ndarray) -> np.ndarray:
    """(P,) dot products, in as many threads as torch has: vecdot itself computes in one."""
    workers = min(torch.get_num_threads(), len(block_PD) // ROWS_OF_A_THREAD)
    if workers < 2:
        return np.vecdot(block_PD, query_D)
    with ThreadPoolExecutor(workers) as pool:
        parts = pool.map(lambda part: np.vecdot(part, query_D), np.array_split(block_PD, workers))
        return np.concatenate(list(parts))


def _best_of_all(scores_QP: np.ndarray, depth: int) -> Hits:
    """The hits of a small search, whose scores are all known. It makes no keys: with cold caches
    these take as long as the products of one question with 10,000 passages.
    """
    rows_QK = np.empty((len(scores_QP), depth), np.int64)
    scores_QK = np.empty((len(scores_QP), depth), np.float32)
    for number, scores_P in enumerate(scores_QP):
        least = np.partition(scores_P, -depth)[-depth]
        rows = (scores_P >= least).nonzero()[0]  # those that tie with the last one too
        found = scores_P[rows]
        order = (-found).argsort(kind="stable")[:depth]
        rows_QK[number], scores_QK[number] = rows[order], found[order]
    return Hits(rows_QK, scores_QK + np.float32(0))  # -0.0 counts as 0.0


def best_with_block(keys_QK: Tensor, scores_QP: Tensor, start: int) -> Tensor:
    """The keys of the best hits so far, updated by a block of passages.

    scores_QP: of the block, whose first passage has the position `start`.
    """
    depth, width = keys_QK.shape[1], scores_QP.shape[1]
    has_depth_hits = bool((keys_QK[:, -1] != NO_HIT).all())
    if has_depth_hits:
        # of equal scores the earlier passage is better, so only scores above the K-th best count
        candidates = _candidates(scores_QP, _scores(keys_QK[:, -1:]), is_tie_one=False)
        count = len(candidates.rows)
        if not count:
            return keys_QK
        if count <= depth * len(keys_QK) or width <= depth:
            return _merge(keys_QK, scores_QP, candidates, start)
    if width > depth:
        # the block's own K best, and all that tie with the last of them: the keys decide
        least_Q1 = _kth_best(scores_QP, depth)
    else:
        least_Q1 = scores_QP.new_full((len(scores_QP), 1), -torch.inf)
    return _merge(keys_QK, scores_QP, _candidates(scores_QP, least_Q1, is_tie_one=True), start)


def _kth_best(scores_QP: Tensor, depth: int) -> Tensor:
    """(Q, 1): the `depth`-th largest score of each row. On a processor numpy needs a third of
    torch's time, the copy into rows included.
    """
    if scores_QP.device.type != "cpu":
        return scores_QP.topk(depth, dim=1).values[:, -1:]
    rows_QP = scores_QP.contiguous().numpy()  # torch copies in a quarter of numpy's time
    return torch.from_numpy(np.partition(rows_QP, -depth, axis=1)[:, -depth, None])


@dataclass(frozen=True)
class _Candidates:
    """Places in (Q, P) scores, in the order of the rows."""

    rows: Tensor  # (N,) int64
    columns: Tensor  # (N,) int64


def _candidates(scores_QP: Tensor, least_Q1: Tensor, *, is_tie_one: bool) -> _Candidates:
    """The scores that are above the least of their row (or, with is_tie_one, equal to it). On a
    processor numpy needs 1/8 of torch's time, and reads the scores in the order in which they lie.
    """
    if scores_QP.device.type == "cpu":
        compare = np.greater_equal if is_tie_one else np.greater
        if scores_QP.is_contiguous():
            beats_QP = compare(scores_QP.numpy(), least_Q1.numpy())
            rows, columns = np.divmod(np.flatnonzero(beats_QP), scores_QP.shape[1])
            return _Candidates(torch.from_numpy(rows), torch.from_numpy(columns))
        beats_PQ = compare(scores_QP.numpy().T, least_Q1.numpy().T)
        columns, rows = np.divmod(np.flatnonzero(beats_PQ), len(scores_QP))
        order = np.argsort(rows, kind="stable")
        return _Candidates(torch.from_numpy(rows[order]), torch.from_numpy(columns[order]))
    beats_QP = scores_QP >= least_Q1 if is_tie_one else scores_QP > least_Q1
    return _Candidates(*beats_QP.nonzero(as_tuple=True))


def _merge(keys_QK: Tensor, scores_QP: Tensor, candidates: _Candidates, start: int) -> Tensor:
    """The keys of the best among the hits so far and the candidates."""
    rows, columns = candidates.rows, candidates.columns
    counts = rows.bincount(minlength=len(keys_QK))
    places = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    candidates_QC = keys_QK.new_full((len(keys_QK), int(counts.max())), NO_HIT)
    candidates_QC[rows, places] = _keys(scores_QP[rows, columns], columns + start)
    return (
        torch.cat([keys_QK, candidates_QC], dim=1).topk(keys_QK.shape[1], dim=1, sorted=True).values
    )


def _keys(scores: Tensor, positions: Tensor) -> Tensor:
    """int64 keys: a higher score gives a larger key, and of equal scores the earlier position does.

    -0.0 counts as 0.0. A position of -1 gives NO_HIT.
    """
    bits = (scores.float() + 0.0).view(torch.int32).long()
    # of negative floats those with larger bits are smaller
    ordered = torch.where(bits < 0, -(2**31) - 1 - bits, bits)
    return torch.where(positions < 0, NO_HIT, ordered * 2**32 + (_LOW - positions))


def _scores(keys: Tensor) -> Tensor:
    """The float32 scores that keys were made of."""
    ordered = keys >> 32
    bits = torch.where(ordered < 0, -(2**31) - 1 - ordered, ordered)
    return bits.to(torch.int32).view(torch.float32)
