"""Self-attention of stock transformers models on a stream of real tokens.

The models run as they are on one long row; only their attention knows where rows begin. It is a
function registered with transformers, and gets the layout as an argument that the models hand on
untouched (transformers 5.23).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import varlen
from transformers.modeling_utils import AttentionInterface

from trainer.models.families import family_of
from trainer.models.packed.layout import grids_of
from trainer.models.packed.rectangles import in_rectangles, in_stream
from trainer.models.packed.replaced import replaced
from trainer.models.processor import row_attention
from trainer.models.stretches import exchange

# M tokens of all rows, N rows of a rectangle, L its length, H heads, G key-value heads, C width of
# a head

NAME = "lathe_packed"  # under this name transformers knows the function
REPLACED = (
    None,
    "sdpa",
)  # attention implementations that it stands in for: what a base has unless it says otherwise
# What flash attention takes: these numbers, heads so wide, this capability of a GPU (torch 2.13).
_HALVES, _WIDEST, _AMPERE = (torch.bfloat16, torch.float16), 256, (8, 0)
_KNOWS_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


@dataclass(eq=False)
class Rows:
    """Where each row of a stream begins, and where each token lies in rectangles of rows of like
    length. It never changes. It is not frozen, because torch 2.11 looks into a frozen dataclass and
    compiles a block again if a rectangle has a single row.
    """

    starts: Tensor  # (rows + 1,) int32, and where the last one ends
    cells_M: Tensor
    grids: list[Tensor]  # (N, L) bool of each rectangle, True where there is a token
    ranks: int = 1  # that share the stream, each with an equal stretch of it
    _masks: dict[tuple[int, int | None, bool], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Mapping[str, Tensor], prefix: str = "") -> Rows:
        """The rows of layout.pack."""
        grids = grids_of(batch, f"{prefix}grid_")
        stretches = batch.get(f"{prefix}stretches")
        ranks = 1 if stretches is None else len(stretches) - 1
        return cls(batch[f"{prefix}starts"], batch[f"{prefix}cells"], grids, ranks)

    @property
    def longest(self) -> int:
        """No row has more tokens. The host knows the number without waiting for the device."""
        return max(grid.shape[1] for grid in self.grids)

    @functools.cached_property
    def pieces(self) -> list[row_attention.Piece]:
        """On a processor: the rows, neighbours of equal length together."""
        return row_attention.pieces_of(self.starts)

    def mask(self, number: int, window: int | None, *, is_causal: bool) -> Tensor | None:
        """The keys that are seen in rectangle `number`: (L, L) or (N, 1, L, L) bool, made once for
        all blocks. None: all keys up to the query's own place.

        window: a key at this distance, or farther away, is not seen.
        """
        grid_NL = self.grids[number]
        length = grid_NL.shape[1]
        if window is not None and window >= length:
            window = None
        if is_causal and window is None:
            return None
        key = (number, window, is_causal)
        if key not in self._masks:
            places = torch.arange(length, device=grid_NL.device)
            distance_LL = places[:, None] - places
            seen_NLL = grid_NL[:, None]
            if is_causal:
                self._masks[key] = (distance_LL >= 0) & (distance_LL < (window or length))
            elif window is None:
                self._masks[key] = seen_NLL[:, None]
            else:
                # a pad sees itself: a softmax over no key has no gradient
                seen_NLL = (seen_NLL & (distance_LL.abs() < window)) | (distance_LL == 0)
                self._masks[key] = seen_NLL[:, None]
        return self._masks[key]


@torch.compiler.disable  # see models/fused.py
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Rows | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    rows: Rows | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """(1, H, M, C) queries, (1, G, M, C) keys and values -> (1, M, H, C), each token mixed from
    those of its row that it sees. In a causal model the pads of a rectangle stand after all tokens,
    so that causality hides them.

    rows: None if they are passed as the mask. softcap: scores are kept within +- this (Gemma 2); no
    fused kernel of torch does that. Of a stream that ranks share, M are the tokens of this rank.
    """
    rows = attention_mask if rows is None else rows
    assert rows is not None, "a model on a stream hands on where rows begin"
    how: dict[str, Any] = {
        "is_causal": bool(module.is_causal),
        "dropout": dropout,
        "scaling": scaling,
        "softcap": softcap,
        "sliding_window": sliding_window,
    }
    if rows.ranks == 1:
        return _attend(query, key, value, rows, **how), None
    repeats = exchange.repeats(key.shape[1], rows.ranks)
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    q, k, v = (exchange.to_heads(x, rows.ranks) for x in (query, key, value))
    return exchange.to_tokens(_attend(q, k, v, rows, **how), rows.ranks), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Rows,
    *,
    is_causal: bool,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sliding_window: int | None,
) -> Tensor:
    """(1, M, H, C): `attention` to all tokens of the rows."""
    if softcap is None and not dropout and _has_kernel(query, key):
        how: dict[str, Any] = {"is_causal": is_causal, "window": sliding_window, "scale": scaling}
        return _where_they_lie(query, key, value, rows, **how)
    reaches_all = sliding_window is None or sliding_window >= rows.longest
    if softcap is None and not dropout and reaches_all and row_attention.is_here(query):
        q, k, v = (_of_tokens(x) for x in (query, key, value))
        how = {"is_causal": is_causal, "scale": scaling}
        return row_attention.attend(q, k, v, rows.pieces, **how)[None]
    sizes = [grid.numel() for grid in rows.grids]
    laid_out = [in_rectangles(_of_tokens(x), rows.cells_M, sizes) for x in (query, key, value)]
    mixed: list[Tensor] = []
    for number, qkv in enumerate(zip(*laid_out, strict=True)):
        shape = rows.grids[number].shape
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in qkv)  # (N, H or G, L, C)
        mask = rows.mask(number, sliding_window, is_causal=is_causal)
        if softcap is not None:
            capped = _attend_capped(
                q, k, v, mask, softcap=softcap, scaling=scaling, dropout=dropout
            )
            mixed.append(capped.transpose(1, 2).flatten(0, 1))
            continue
        is_grouped = k.shape[1] != q.shape[1]
        # with a mask, torch 2.13 has no kernel for groups but the unfused one
        if is_grouped and mask is not None:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            is_grouped = False
        how = {"dropout_p": dropout, "scale": scaling, "enable_gqa": is_grouped}
        mixed_NHLC = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, **how
        )
        mixed.append(mixed_NHLC.transpose(1, 2).flatten(0, 1))
    return in_stream(mixed, rows.cells_M)[None]


def _of_tokens(x_1HMC: Tensor) -> Tensor:
    """(M, H, C) without a copy. The backward pass makes none, either; that of x[0] would."""
    return x_1HMC.squeeze(0).transpose(0, 1)


def _has_kernel(query_1HMC: Tensor, key_1GMC: Tensor) -> bool:
    """Whether torch can attend to rows in place, as they lie in a stream. On a GPU flash attention
    can; it has no dropout, and before torch 2.12 it had no grouped queries.
    """
    width, is_grouped = query_1HMC.shape[-1], query_1HMC.shape[1] != key_1GMC.shape[1]
    device = query_1HMC.device
    return (
        device.type != "cpu"
        and query_1HMC.dtype in _HALVES
        and width <= _WIDEST
        and width % 8 == 0
        and (not is_grouped or _KNOWS_GROUPS)
        and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= _AMPERE)
    )


def _where_they_lie(
    query_1HMC: Tensor,
    key_1GMC: Tensor,
    value_1GMC: Tensor,
    rows: Rows,
    *,
    is_causal: bool,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """(1, M, H, C): the result of `attention`, computed without rectangles."""
    reach = -1 if window is None else window - 1  # keys so far away are seen, and no farther ones
    groups: dict[str, Any] = (
        {"enable_gqa": True} if query_1HMC.shape[1] != key_1GMC.shape[1] else {}
    )
    mixed_MHC: Any = varlen.varlen_attn(
        _of_tokens(query_1HMC),
        _of_tokens(key_1GMC),
        _of_tokens(value_1GMC),
        rows.starts,
        rows.starts,
        rows.longest,
        rows.longest,
        scale=scale,
        window_size=(reach, 0 if is_causal else reach),
        **groups,
    )
    return mixed_MHC[None]


def _attend_capped(
    q_NHLC: Tensor,
    k_NGLC: Tensor,
    v_NGLC: Tensor,
    mask: Tensor | None,
    *,
    softcap: float,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    """(N, H, L, C) mixed values, from scores that are capped before the softmax."""
    group = q_NHLC.shape[1] // k_NGLC.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k_NGLC, v_NGLC))
    scale = q_NHLC.shape[-1] ** -0.5 if scaling is None else scaling
    scores_NHLL = torch.tanh(q_NHLC @ k.transpose(-1, -2) * (scale / softcap)) * softcap
    if mask is None:
        mask = torch.ones_like(scores_NHLL[0, 0], dtype=torch.bool).tril()
    scores_NHLL = scores_NHLL.masked_fill(~mask, torch.finfo(scores_NHLL.dtype).min)
    shares = scores_NHLL.softmax(-1, dtype=torch.float32).to(q_NHLC.dtype)
    return F.dropout(shares, dropout) @ v


AttentionInterface.register(NAME, attention)


def on_streams(config: Any) -> AbstractContextManager[None]:
    """Inside, the blocks of `config` attend on a stream."""
    return replaced(config, "_attn_implementation", NAME)


def attending(config: Any, mask: Any) -> AbstractContextManager[None]:
    """Inside, the blocks of `config` attend on a stream if their mask is the layout of one, else as
    usual.
    """
    return on_streams(config) if isinstance(mask, Rows) else nullcontext()


def encode(body: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """(M, D) states that a stock body without a head gives the tokens of a packed batch
    (layout.pack). Each row is read by itself. types (M,), if there: BERT's, 0 in the first text of
    a row and 1 in the second.
    """
    config = body.config
    first = config.pad_token_id + 1 if family_of(config).positions_follow_pad else 0
    options: dict[str, Any] = {"use_cache": False} if hasattr(config, "use_cache") else {}
    if "types" in batch:
        options["token_type_ids"] = batch["types"][None]
    with on_streams(config):
        return body(
            input_ids=batch["tokens"][None],
            position_ids=batch["position"][None] + first,
            rows=Rows.of(batch),
            **options,
        ).last_hidden_state[0]
