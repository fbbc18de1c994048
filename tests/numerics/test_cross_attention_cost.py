"""What a training step of the cross-attention model computes: the formula's operations, and nothing
twice.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.numerics.tiny_cross_attention import (
    NUM_BLOCKS,
    VOCABULARY,
    build,
    counted_calls,
    every_layout,
    gradients,
    inputs,
    without,
)
from tests.tolerance import assert_equal_step
from trainer.tasks.cross_attention.config import Layers
from trainer.tasks.cross_attention.decoder.model import CrossAttentionModel


def ideal_flops(
    model: CrossAttentionModel, *, rows: int, tokens: int, context: int, num_scored: int
) -> dict[str, int]:
    """Floating-point operations of one step by part; two for a multiply-add. Source: the formula of
    the paper spec.

    A frozen matrix costs one product forward and one backward; a trained one costs two backward;
    below the first added layer there is no backward at all, and nothing flows into the context
    states.
    """
    config, k = model.base.config, model.layers.count
    d, n, inner = config.n_embd, config.n_layer, config.n_inner or 4 * config.n_embd
    c = model.layers.width or d
    f = model.indices[0] + model.layers.after
    key_value_width = 2 * (d // config.n_head if config.multi_query else d)
    block = d * (d + key_value_width) + d * d + 2 * d * inner
    num_projected = (
        1 if model.layers.shared_weights else k
    )  # shared weights project the states once
    decoder, contexts = rows * tokens, rows * context
    scores = 4 * rows * tokens**2 * d
    cross_scores = 4 * rows * tokens * context * c * k
    head = 2 * config.vocab_size * d * num_scored
    return {
        "encode": n * (2 * block * contexts + 4 * rows * context**2 * d),
        "forward": n * (2 * block * decoder + scores)
        + head
        + 20 * k * d * c * decoder
        + 4 * num_projected * d * c * contexts
        + cross_scores,
        "backward": (n - f) * (2 * block * decoder + 2 * scores)
        + head
        + 40 * k * d * c * decoder
        + 4 * num_projected * d * c * contexts
        + 2 * cross_scores,
    }


FLOP_LAYOUTS = {
    "after": Layers(count=2, stride=2, width=32, heads=4),
    "before": Layers(count=2, stride=2, width=32, heads=4, after=False),
    "every_block": Layers(count=6, stride=1),
    "shared": Layers(count=3, stride=2, shared_weights=True, shared_projections=True),
}


def measured_flops(model: CrossAttentionModel, batch: dict[str, Any]) -> tuple[int, int]:
    """Operations of forward and backward as torch counts them, with attention as plain products."""
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = model(**batch).loss
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("layers", FLOP_LAYOUTS.values(), ids=FLOP_LAYOUTS.keys())
@pytest.mark.parametrize("encodes", [False, True], ids=["cached_states", "encodes"])
def test_a_step_costs_what_the_formula_says(layers: Layers, encodes: bool) -> None:
    rows, tokens, context = 2, 12, 20
    model = build(layers, n_embd=64, n_layer=6)
    ids = torch.randint(1, VOCABULARY, (rows, tokens))
    batch: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.clone(),
    }
    batch["labels"][:, :4] = -100
    if encodes:
        batch["context_input_ids"] = torch.randint(1, VOCABULARY, (rows, context))
    else:
        batch["encoder_hidden_states"] = torch.randn(rows, context, 64)
    want = ideal_flops(
        model, rows=rows, tokens=tokens, context=context, num_scored=rows * (tokens - 4)
    )
    forward, backward = measured_flops(model, batch)
    assert forward == pytest.approx(want["forward"] + encodes * want["encode"], rel=0.01)
    assert backward == pytest.approx(want["backward"], rel=0.01)


@every_layout
def test_blocks_below_the_first_added_layer_keep_no_graph(layers: Layers) -> None:
    model, record = build(layers), {}
    model(**inputs(), record=record)
    below = [record[f"block_out.{i}"].requires_grad for i in range(NUM_BLOCKS)][
        : model.num_blocks_below
    ]
    assert not any(below)
    assert record[f"cross_block_out.{model.indices[0]}"].requires_grad


@every_layout
def test_checkpointing_changes_neither_the_loss_nor_the_gradients_under_dropout(
    layers: Layers,
) -> None:
    model, batch = (
        build(layers.model_copy(update={"key_dropout": 0.3}), dropout=0.2).train(),
        inputs(),
    )
    torch.manual_seed(11)
    want = gradients(model, **batch)
    model.recompute_every = 1
    torch.manual_seed(11)
    got = gradients(model, **batch)
    assert_equal_step(got, want)


@every_layout
def test_checkpointing_recomputes_the_blocks_above_the_first_added_layer_and_none_below(
    layers: Layers,
) -> None:
    model, batch = build(layers).train(), inputs()
    states, mask = model.encode(batch["context_input_ids"], batch["context_attention_mask"])
    plain = without(batch, "context_input_ids", "context_attention_mask")
    model.recompute_every = 1
    with counted_calls(model) as calls:
        gradients(model, **plain, encoder_hidden_states=states, encoder_attention_mask=mask)
    blocks = [calls[f"base.transformer.h.{i}"] for i in range(NUM_BLOCKS)]
    below = model.num_blocks_below
    assert blocks == [1] * below + [2] * (NUM_BLOCKS - below)
