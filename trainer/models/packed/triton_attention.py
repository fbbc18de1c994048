# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""Triton's kernels for attention of streams: stream_kernels.py launches them.

A program has one block of a row's queries, or of its keys, and one head; it goes through the other
side block by block, so no two programs add to one number: equal inputs give equal bits.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from trainer.models.packed.dropped import FIRST, SECOND, SHIFT

# Q queries and L keys of a program's blocks, C width of a head

_FIRST, _SECOND = tl.constexpr(FIRST), tl.constexpr(SECOND - (1 << 32))
_SHIFT = tl.constexpr(SHIFT)
# Triton 3.9: its interpreter keeps bf16 as integers and multiplies those.
_WIDENS = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _dot(left, right):
    """left @ right in fp32, from the dtype that both have."""
    if _WIDENS:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _tile(x, places, is_there, head, num_heads, width, BLOCK_C: tl.constexpr):
    """(BLOCK, C) of one head of the tokens at `places`; 0 where there is none."""
    channels = tl.arange(0, BLOCK_C)
    at = (places[:, None].to(tl.int64) * num_heads + head) * width + channels[None, :]
    return tl.load(x + at, mask=is_there[:, None] & (channels < width)[None, :], other=0.0)


@triton.jit
def _write(x, values, places, is_there, head, num_heads, width, BLOCK_C: tl.constexpr):
    channels = tl.arange(0, BLOCK_C)
    at = (places[:, None].to(tl.int64) * num_heads + head) * width + channels[None, :]
    mask = is_there[:, None] & (channels < width)[None, :]
    tl.store(x + at, values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _scores(
    q_QC, k_LC, of_queries, of_keys, is_seen, biases, head,
    LARGEST: tl.constexpr, HAS_BIASES: tl.constexpr,
):  # fmt: skip
    """(Q, L) fp32, with biases, -inf where a key is not seen."""
    scores = _dot(q_QC, tl.trans(k_LC))
    if HAS_BIASES:
        distance = of_keys[None, :] - of_queries[:, None]
        at = tl.minimum(tl.maximum(distance, -LARGEST), LARGEST) + LARGEST
        scores += tl.load(biases + head * (2 * LARGEST + 1) + at)
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def _is_kept(first, second, places, is_there, of_keys, head, num_heads, threshold):
    """(Q, L): the same function as Dropout.places."""
    at = places.to(tl.int64) * num_heads + head
    numbers = tl.load(first + at, mask=is_there, other=0)[:, None] ^ of_keys[None, :]
    numbers = numbers * _FIRST
    shifted = numbers.to(tl.uint32, bitcast=True) >> _SHIFT
    numbers = numbers ^ shifted.to(tl.int32, bitcast=True)
    numbers = (numbers + tl.load(second + at, mask=is_there, other=0)[:, None]) * _SECOND
    return numbers >= threshold


@triton.jit
def forward(
    q, k, v, mixed, log_sums, query_starts, key_starts, biases, bucket_of, first, second,
    num_heads, width, threshold, rescaled,
    LARGEST: tl.constexpr, BUCKETS: tl.constexpr, HAS_BIASES: tl.constexpr, DROPS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_BUCKETS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Mixed values of one block of queries."""
    block, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query_start, key_start = tl.load(query_starts + row), tl.load(key_starts + row)
    num_queries = tl.load(query_starts + row + 1) - query_start
    num_keys = tl.load(key_starts + row + 1) - key_start
    if block * BLOCK >= num_queries:
        return
    of_queries = block * BLOCK + tl.arange(0, BLOCK)
    places, is_query = query_start + of_queries, of_queries < num_queries
    q_QC = _tile(q, places, is_query, head, num_heads, width, BLOCK_C)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    out = tl.zeros([BLOCK, BLOCK_C], tl.float32)
    end = num_keys
    if IS_CAUSAL:
        end = tl.minimum(num_keys, (block + 1) * BLOCK)
    for start in range(0, end, BLOCK):
        of_keys = start + tl.arange(0, BLOCK)
        is_key = of_keys < num_keys
        k_LC = _tile(k, key_start + of_keys, is_key, head, num_heads, width, BLOCK_C)
        is_seen = is_query[:, None] & is_key[None, :]
        if IS_CAUSAL:
            is_seen = is_seen & (of_keys[None, :] <= of_queries[:, None])
        scores = _scores(
            q_QC, k_LC, of_queries, of_keys, is_seen, biases, head, LARGEST, HAS_BIASES
        )
        higher = tl.maximum(largest, tl.max(scores, 1))
        higher = tl.where(is_query, higher, 0.0)  # a query beyond the row's end sees no key
        shares = tl.exp(scores - higher[:, None])
        fading = tl.exp(largest - higher)
        sums = sums * fading + tl.sum(shares, 1)
        if DROPS:
            is_kept = _is_kept(first, second, places, is_query, of_keys, head, num_heads, threshold)
            shares = tl.where(is_kept, shares, 0.0)
        v_LC = _tile(v, key_start + of_keys, is_key, head, num_heads, width, BLOCK_C)
        out = out * fading[:, None]
        out += _dot(shares.to(v_LC.dtype), v_LC)
        largest = higher
    sums = tl.where(is_query, sums, 1.0)
    out = out * rescaled / sums[:, None]
    _write(mixed, out, places, is_query, head, num_heads, width, BLOCK_C)
    at = places.to(tl.int64) * num_heads + head
    tl.store(log_sums + at, largest + tl.log(sums), mask=is_query)


@triton.jit
def _gradients(
    q_QC, k_LC, v_LC, own_QC, log_sums_Q, means_Q, places, of_queries, is_query, of_keys, is_key,
    biases, first, second, head, num_heads, threshold, rescaled,
    LARGEST: tl.constexpr, HAS_BIASES: tl.constexpr, DROPS: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """(Q, L) shares after dropout, and the gradients of the scores."""
    is_seen = is_query[:, None] & is_key[None, :]
    if IS_CAUSAL:
        is_seen = is_seen & (of_keys[None, :] <= of_queries[:, None])
    scores = _scores(q_QC, k_LC, of_queries, of_keys, is_seen, biases, head, LARGEST, HAS_BIASES)
    shares = tl.exp(scores - log_sums_Q[:, None])
    of_shares = _dot(own_QC, tl.trans(v_LC))
    used = shares
    if DROPS:
        is_kept = _is_kept(first, second, places, is_query, of_keys, head, num_heads, threshold)
        of_shares = tl.where(is_kept, of_shares * rescaled, 0.0)
        used = tl.where(is_kept, shares * rescaled, 0.0)
    return used, shares * (of_shares - means_Q[:, None])


@triton.jit
def of_queries(
    q, k, v, gradient, log_sums, means, of_q, of_table, query_starts, key_starts, biases, bucket_of,
    first, second, num_heads, width, threshold, rescaled,
    LARGEST: tl.constexpr, BUCKETS: tl.constexpr, HAS_BIASES: tl.constexpr, DROPS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_BUCKETS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of queries, and what it adds to the gradient of the table."""
    block, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query_start, key_start = tl.load(query_starts + row), tl.load(key_starts + row)
    num_queries = tl.load(query_starts + row + 1) - query_start
    num_keys = tl.load(key_starts + row + 1) - key_start
    if block * BLOCK >= num_queries:
        return
    of_queries = block * BLOCK + tl.arange(0, BLOCK)
    places, is_query = query_start + of_queries, of_queries < num_queries
    at = places.to(tl.int64) * num_heads + head
    q_QC = _tile(q, places, is_query, head, num_heads, width, BLOCK_C)
    own_QC = _tile(gradient, places, is_query, head, num_heads, width, BLOCK_C)
    log_sums_Q = tl.load(log_sums + at, mask=is_query, other=0.0)
    means_Q = tl.load(means + at, mask=is_query, other=0.0)
    buckets = tl.arange(0, BLOCK_BUCKETS)
    sums = tl.zeros([BLOCK_BUCKETS], tl.float32)
    out = tl.zeros([BLOCK, BLOCK_C], tl.float32)
    end = num_keys
    if IS_CAUSAL:
        end = tl.minimum(num_keys, (block + 1) * BLOCK)
    for start in range(0, end, BLOCK):
        of_keys = start + tl.arange(0, BLOCK)
        is_key = of_keys < num_keys
        k_LC = _tile(k, key_start + of_keys, is_key, head, num_heads, width, BLOCK_C)
        v_LC = _tile(v, key_start + of_keys, is_key, head, num_heads, width, BLOCK_C)
        _, of_scores = _gradients(
            q_QC, k_LC, v_LC, own_QC, log_sums_Q, means_Q, places, of_queries, is_query, of_keys,
            is_key, biases, first, second, head, num_heads, threshold, rescaled,
            LARGEST, HAS_BIASES, DROPS, IS_CAUSAL,
        )  # fmt: skip
        out += _dot(of_scores.to(k_LC.dtype), k_LC)
        if HAS_BIASES:
            nearest = start - (block + 1) * BLOCK + 1  # the least distance in this pair of blocks
            furthest = start + BLOCK - 1 - block * BLOCK
            if (nearest >= LARGEST) | (furthest <= -LARGEST):  # all are in one bucket
                edge = tl.where(nearest >= LARGEST, 2 * LARGEST, 0)
                sums += tl.where(buckets == tl.load(bucket_of + edge), tl.sum(of_scores), 0.0)
            else:
                distance = of_keys[None, :] - of_queries[:, None]
                which = tl.minimum(tl.maximum(distance, -LARGEST), LARGEST) + LARGEST
                bucket = tl.load(bucket_of + which)
                for number in range(BUCKETS):
                    total = tl.sum(tl.where(bucket == number, of_scores, 0.0))
                    sums += tl.where(buckets == number, total, 0.0)
    _write(of_q, out, places, is_query, head, num_heads, width, BLOCK_C)
    if HAS_BIASES:
        program = (block * tl.num_programs(1) + row) * num_heads + head
        tl.store(of_table + program * BUCKETS + buckets, sums, mask=buckets < BUCKETS)


@triton.jit
def of_keys(
    q, k, v, gradient, log_sums, means, of_k, of_v, query_starts, key_starts, biases, bucket_of,
    first, second, num_heads, width, threshold, rescaled,
    LARGEST: tl.constexpr, BUCKETS: tl.constexpr, HAS_BIASES: tl.constexpr, DROPS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_BUCKETS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and of their values."""
    block, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query_start, key_start = tl.load(query_starts + row), tl.load(key_starts + row)
    num_queries = tl.load(query_starts + row + 1) - query_start
    num_keys = tl.load(key_starts + row + 1) - key_start
    if block * BLOCK >= num_keys:
        return
    of_keys = block * BLOCK + tl.arange(0, BLOCK)
    is_key = of_keys < num_keys
    k_LC = _tile(k, key_start + of_keys, is_key, head, num_heads, width, BLOCK_C)
    v_LC = _tile(v, key_start + of_keys, is_key, head, num_heads, width, BLOCK_C)
    out_k = tl.zeros([BLOCK, BLOCK_C], tl.float32)
    out_v = tl.zeros([BLOCK, BLOCK_C], tl.float32)
    begin = 0
    if IS_CAUSAL:
        begin = block * BLOCK
    for start in range(begin, num_queries, BLOCK):
        of_queries = start + tl.arange(0, BLOCK)
        places, is_query = query_start + of_queries, of_queries < num_queries
        at = places.to(tl.int64) * num_heads + head
        q_QC = _tile(q, places, is_query, head, num_heads, width, BLOCK_C)
        own_QC = _tile(gradient, places, is_query, head, num_heads, width, BLOCK_C)
        log_sums_Q = tl.load(log_sums + at, mask=is_query, other=0.0)
        means_Q = tl.load(means + at, mask=is_query, other=0.0)
        used, of_scores = _gradients(
            q_QC, k_LC, v_LC, own_QC, log_sums_Q, means_Q, places, of_queries, is_query, of_keys,
            is_key, biases, first, second, head, num_heads, threshold, rescaled,
            LARGEST, HAS_BIASES, DROPS, IS_CAUSAL,
        )  # fmt: skip
        out_v += _dot(tl.trans(used).to(own_QC.dtype), own_QC)
        out_k += _dot(tl.trans(of_scores).to(q_QC.dtype), q_QC)
    _write(of_k, out_k, key_start + of_keys, is_key, head, num_heads, width, BLOCK_C)
    _write(of_v, out_v, key_start + of_keys, is_key, head, num_heads, width, BLOCK_C)
