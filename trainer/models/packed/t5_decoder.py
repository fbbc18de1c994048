"""A stock T5 decoder on streams: its tokens in one, those that it reads in another, and no pad in
either. The modules stay as transformers made them, and are called in the same order on every rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from trainer.models import recomputation
from trainer.models.fused import apart, of_blocks
from trainer.models.packed import absorbed
from trainer.models.packed.attention import Attend, in_rows, in_short_rows
from trainer.models.packed.stream_attention import RowStarts, attend
from trainer.models.packed.t5_encoder import LONG_BY_ROWS, within_fp16
from trainer.models.processor import row_attention
from trainer.models.processor.row_attention import is_wide

# T target tokens of all rows, S source tokens of all rows, D width, I width of all heads together


def decode(
    decoder: Any,
    tokens_T: Tensor,
    states_SD: Tensor,
    rows: RowStarts,
    *,
    texts: Tensor | None = None,
    few: absorbed.FewQueries | None = None,
    recompute_every: int | None = None,
) -> Tensor:
    """(T, D) states of a decoder under teacher forcing, after the final norm and dropout.

    decoder: a T5Stack, MT5Stack or UMT5Stack; blocks of FiDO's may lack cross-attention. tokens_T:
    what each row's decoder is given. states_SD: what rows read. rows: of the targets, with the
    tokens that each reads as its keys. texts: where each text begins, and where the last one ends,
    if a row has several, which know nothing of each other. few: the same as rectangles, where rows
    have so few targets that their states need no keys and values. recompute_every: as the
    encoder's.
    """
    hidden_TD = decoder.dropout(decoder.embed_tokens(tokens_T))
    starts = rows.queries if texts is None else texts
    own = replace(rows, queries=starts, keys=starts, is_causal=True)
    # In umT5 every block has a table of position biases; in other models the first block's serves
    # all.
    is_shared = not decoder.block[-1].layer[0].SelfAttention.has_relative_attention_bias
    first = decoder.block[0].layer[0].SelfAttention
    shared = _by_biases(first, own) if is_shared else None
    run, every = of_blocks(_decoder_block), recompute_every if decoder.training else None
    for number, block in enumerate(decoder.block):
        arguments = (block, hidden_TD, states_SD, shared, own, rows, few)
        hidden_TD = recomputation.run(run, *arguments, number=number, every=every)
    return decoder.dropout(decoder.final_layer_norm(hidden_TD))


def _by_biases(heads: Any, own: RowStarts) -> Attend:
    """Causal attention in rows with the biases of a T5Attention that has a table."""
    rate = heads.dropout if heads.training else 0.0
    if (
        is_wide(next(heads.relative_attention_bias.parameters()))
        and own.longest_piece < LONG_BY_ROWS
    ):
        return in_short_rows(heads, own, dropout=rate)
    return in_rows(heads, own, dropout=rate)


def _decoder_block(
    block: Any,
    hidden_TD: Tensor,
    states_SD: Tensor,
    shared: Attend | None,
    own: RowStarts,
    rows: RowStarts,
    few: absorbed.FewQueries | None,
) -> Tensor:
    """One block on tokens without an order or a batch; only attention knows which belong
    together.
    """
    first, second, feed_forward = block.layer
    heads, normed_TD = first.SelfAttention, first.layer_norm(hidden_TD)
    mixed = apart(_by_biases, heads, own) if shared is None else shared
    mixed_TI = apart(mixed, heads.q(normed_TD), heads.k(normed_TD), heads.v(normed_TD))
    hidden_TD = within_fp16(hidden_TD + first.dropout(heads.o(mixed_TI)))
    if hasattr(second, "EncDecAttention"):
        heads, normed_TD = second.EncDecAttention, second.layer_norm(hidden_TD)
        if few is not None:
            mixed_TI = apart(absorbed.attend, heads, few, normed_TD)
        else:
            projected = (heads.q(normed_TD), heads.k(states_SD), heads.v(states_SD))
            mixed_TI = apart(_across, heads, rows, *projected)
        hidden_TD = within_fp16(hidden_TD + second.dropout(heads.o(mixed_TI)))
    return within_fp16(feed_forward(hidden_TD))


def _across(heads: Any, rows: RowStarts, q_TI: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(T, I): cross-attention. Where all heads share their keys, every head's query is one more
    query of the one head.
    """
    width = q_TI.shape[1] // heads.n_heads
    q, k, v = (x.unflatten(-1, (-1, width)) for x in (q_TI, k, v))
    if k.shape[1] != q.shape[1]:
        q = q.flatten(0, 1).unsqueeze(1)
        more = {"queries": rows.queries * heads.n_heads, "longest": rows.longest * heads.n_heads}
        rows = replace(rows, **more)
    rate = getattr(heads.dropout, "p", heads.dropout) if heads.training else 0.0
    if not rate and row_attention.is_here(q):
        return row_attention.attend(q, k, v, rows.pieces, scale=1.0).reshape(q_TI.shape)
    return attend(q, k, v, rows, dropout=rate).reshape(q_TI.shape)
