"""Contexts as tensors for the model: token ids, which it encodes itself, or prepared states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.data import vocabulary
from trainer.data.padding import pad_right, unflat
from trainer.models import base_source
from trainer.tasks.cross_attention.encoder_states.layout import Identity, folder_name
from trainer.tasks.cross_attention.encoder_states.reading import StateCache, open_states, pad_states

if TYPE_CHECKING:
    from trainer.protocol.task import Batch, Places
    from trainer.tasks.cross_attention.config import Config

# Fields of an encoded row. "other" is another row's context, which evaluation reads instead.
FIELDS = ("context", "other")
STATES = "states"  # the folder of prepared states, below --data_path or --cache_dir

# B batch, C chunks of a context, L tokens, D width


def token_batch(
    rows: Sequence[Mapping[str, Any]], field: str, *, pad: int, is_chunked: bool
) -> Batch:
    """context_input_ids and context_attention_mask, (B, L), or (B, C, L) when chunked."""
    per_row = [unflat(row, field) for row in rows]
    num_chunks = max(len(chunks) for chunks in per_row)
    flat = [chunk for chunks in per_row for chunk in [*chunks, *[[]] * (num_chunks - len(chunks))]]
    ids, mask = pad_right(flat, pad)
    if is_chunked:
        ids, mask = ids.view(len(rows), num_chunks, -1), mask.view(len(rows), num_chunks, -1)
    return {"context_input_ids": ids, "context_attention_mask": mask}


def state_batch(rows: Sequence[Mapping[str, Any]], field: str, cache: StateCache) -> Batch:
    """encoder_hidden_states (B, L, D) and encoder_attention_mask (B, L).

    Chunks follow one another without pads.
    """
    states, mask = pad_states(
        [[cache.states(chunk) for chunk in unflat(row, field)] for row in rows]
    )
    return {"encoder_hidden_states": states, "encoder_attention_mask": mask}


def identity(cfg: Config, places: Places, tokenizer: Any) -> Identity:
    """Everything that the states of a context depend on, except its token ids."""
    data, bits = cfg.data, cfg.train.base_bits
    return {
        **({} if bits is None else {"base_bits": bits}),
        "base": base_source.fingerprint(cfg.base, places),
        "tokenizer": vocabulary.tokenizer_id(tokenizer),
        "template": data.template,
        "context_tokens": data.context_tokens,
        "precision": cfg.train.precision,  # of the forward pass that computes the states
        "dtype": data.state_dtype,
    }


def open_cache(cfg: Config, places: Places, tokenizer: Any) -> StateCache:
    """The prepared states of an experiment, below --data_path or --cache_dir.

    ConfigError when there are none.
    """
    roots = [root / STATES for root in (places.data_path, places.cache_dir) if root is not None]
    expected = identity(cfg, places, tokenizer)
    cache_root = next((root for root in roots if (root / folder_name(expected)).is_dir()), roots[0])
    return open_states(cache_root, expected)


def encoded_states(model: Any, chunks: Sequence[Any], pad: int) -> list[Tensor]:
    """The (L, D) states of each chunk of token ids, on the CPU, computed by the frozen base of
    `model`, a CrossAttentionModel.
    """
    device = next(model.parameters()).device
    ids, mask = pad_right(chunks, pad)
    with torch.no_grad():
        states, _ = model.encode(ids.to(device), mask.to(device))
    return [row[: len(chunk)] for row, chunk in zip(states.cpu(), chunks, strict=True)]
