"""Cached greedy decoding against recomputing everything for every token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.numerics.tiny_cross_attention import (
    LAYOUTS,
    Batch,
    build,
    counted_calls,
    every_layout,
    inputs,
    padded_left,
    without,
)
from trainer.errors import ConfigError
from trainer.tasks.cross_attention.config import Layers
from trainer.tasks.cross_attention.generation import greedy
from trainer.tasks.cross_attention.model import CrossAttentionModel


def prompts() -> Batch:
    return without(padded_left(inputs()), "labels")


def recomputed(model: CrossAttentionModel, batch: Batch, max_new_tokens: int) -> Tensor:
    """Greedy decoding that runs everything again for every token, and never stops."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    for _ in range(max_new_tokens):
        logits = model(**(batch | {"input_ids": ids, "attention_mask": mask})).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return ids[:, -max_new_tokens:]


@every_layout
def test_cached_greedy_decoding_equals_recomputing_everything(layers: Layers) -> None:
    model, batch = build(layers), prompts()
    made = greedy(model, **batch, max_new_tokens=9, pad_token_id=0).tokens_BG
    assert torch.equal(made, recomputed(model, batch, 9))
    assert len(made.unique()) > 3


@every_layout
def test_greedy_encodes_and_projects_a_context_once(layers: Layers) -> None:
    model = build(layers)
    with counted_calls(model) as calls:
        greedy(model, **prompts(), max_new_tokens=6, pad_token_id=0)
    first = f"cross_attn_layers.{model.indices[0]}"
    assert calls["base.transformer.h.0"] == 1 + 6  # the context, then the prompt and five single tokens
    assert calls[f"{first}.crossattention.v_attn"] == 1


def test_a_row_stops_at_the_end_token_and_is_padded_behind_it() -> None:
    model, batch = build(LAYOUTS["after"]), prompts()
    free = greedy(model, **batch, max_new_tokens=8, pad_token_id=0).tokens_BG
    end = int(free[1, 2])
    made = greedy(model, **batch, max_new_tokens=8, pad_token_id=0, eos_token_id=end).tokens_BG
    for row, full in zip(made.tolist(), free.tolist(), strict=True):
        stop = full.index(end) + 1 if end in full else len(full)
        assert row == (full[:stop] + [0] * 8)[: len(row)]


def test_greedy_makes_every_forward_when_ranks_must_agree() -> None:
    model, batch = build(LAYOUTS["after"]), {name: tensor[:1] for name, tensor in prompts().items()}
    end = int(greedy(model, **batch, max_new_tokens=1, pad_token_id=0).tokens_BG[0, 0])
    lengths = []
    for always in (False, True):
        made = greedy(model, **batch, max_new_tokens=5, pad_token_id=0, eos_token_id=end, always_steps=always)
        lengths.append(made.tokens_BG.shape[1])
    assert lengths == [1, 5]


def test_prompts_padded_on_the_right_are_refused() -> None:
    with pytest.raises(ConfigError, match="padded on the right"):
        greedy(build(LAYOUTS["after"]), **without(inputs(), "labels"), max_new_tokens=2, pad_token_id=0)
