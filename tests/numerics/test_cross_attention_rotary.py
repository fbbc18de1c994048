"""Cross-attention layers in a Llama or Mistral base: against the slow twin, positions, and what
does not fit.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.numerics.cross_attention_rotary_twin import rotary_twin_logits
from tests.numerics.cross_attention_twin import twin_gradients
from tests.numerics.tiny_cross_attention import (
    LOGITS,
    ROTARY_LAYOUTS,
    STEP,
    VOCABULARY,
    WIDTH,
    build,
    build_rotary,
    every_rotary_family,
    every_rotary_layout,
    gradients,
    inputs,
    padded_left,
    recomputed,
    without,
)
from tests.tolerance import assert_close, assert_same_step, depth_of
from tests.wording import Fault, fault, refused
from trainer.tasks.cross_attention.config import Layers
from trainer.tasks.cross_attention.decoder.attention import positions
from trainer.tasks.cross_attention.decoder.generation import greedy

AFTER = ROTARY_LAYOUTS["after"]


@every_rotary_family
@every_rotary_layout
def test_loss_and_gradients_equal_those_of_the_twin(layers: Layers, family: str) -> None:
    model, batch = build_rotary(layers, family), inputs()
    states = torch.randn(layers.count, 3, 11, WIDTH, generator=torch.Generator().manual_seed(5))
    kept = batch["context_attention_mask"].bool()
    plain = without(batch, "context_input_ids", "context_attention_mask")
    got = gradients(model, **plain, encoder_hidden_states=list(states), encoder_attention_mask=kept)

    def twin(weights: dict[str, Tensor]) -> Tensor:
        return rotary_twin_logits(
            weights,
            model.base.config,
            layers,
            ids=batch["input_ids"],
            mask=batch["attention_mask"],
            places=positions(batch["attention_mask"]),
            states=list(states),
            kept=kept,
            context_places=positions(kept),
        )

    want = twin_gradients(model, batch["labels"], twin)
    assert_same_step(got, want, depth=depth_of(model), **STEP)


@every_rotary_family
def test_left_and_right_padding_of_decoder_and_context_give_the_same_loss_and_gradients(
    family: str,
) -> None:
    model, batch = build_rotary(AFTER, family), inputs()
    want, got = gradients(model, **batch), gradients(model, **padded_left(batch))
    assert_same_step(got, want, depth=depth_of(model), **STEP)


def test_chunks_follow_one_another_without_counting_pads() -> None:
    """What a row gives must not depend on how long the chunks of the others in its batch are."""
    model, batch = (
        build_rotary(AFTER),
        without(inputs(rows=1), "labels", "context_input_ids", "context_attention_mask"),
    )
    chunks = torch.randint(1, VOCABULARY, (1, 2, 6), generator=torch.Generator().manual_seed(9))
    padded, mask = torch.zeros(1, 3, 9, dtype=torch.int64), torch.zeros(1, 3, 9, dtype=torch.int64)
    padded[:, :2, :6], mask[:, :2, :6] = chunks, 1
    want = model(**batch, context_input_ids=chunks).logits
    got = model(**batch, context_input_ids=padded, context_attention_mask=mask).logits
    assert_close(got, want, depth=depth_of(model), **LOGITS)


def test_the_order_of_a_context_matters_to_its_positions_alone() -> None:
    model, batch = (
        build_rotary(AFTER),
        without(inputs(), "labels", "context_input_ids", "context_attention_mask"),
    )
    states = torch.randn(3, 11, WIDTH, generator=torch.Generator().manual_seed(5))
    order = torch.randperm(11, generator=torch.Generator().manual_seed(6))
    places = torch.arange(11).expand(3, 11)
    want = model(**batch, encoder_hidden_states=states).logits
    shuffled = model(
        **batch, encoder_hidden_states=states[:, order], context_position_ids=places[:, order]
    ).logits
    assert_close(shuffled, want, depth=depth_of(model), **LOGITS)
    assert not torch.allclose(
        model(**batch, encoder_hidden_states=states[:, order]).logits, want, atol=1e-3
    )


def test_casting_the_base_to_bf16_leaves_the_angles_of_late_positions_right() -> None:
    model = build_rotary(AFTER)
    late = torch.tensor([[4001]])
    mask = torch.ones(1, 1, dtype=torch.int64)
    before = model.backbone.surroundings(torch.zeros(1, 1, WIDTH), mask, late, None)
    model.base.bfloat16()
    after = model.backbone.surroundings(torch.zeros(1, 1, WIDTH), mask, late, None)
    turns = (found["position_embeddings"][None] for found in (after, before))
    for got, want in zip(*turns, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "layers", [AFTER, ROTARY_LAYOUTS["before_shared"], ROTARY_LAYOUTS["as_base"]]
)
@every_rotary_family
def test_zero_initialisation_keeps_the_logits_of_the_base(layers: Layers, family: str) -> None:
    model, batch = build_rotary(layers, family, randomise=False), without(inputs(), "labels")
    mask = batch["attention_mask"]
    want = model.base(batch["input_ids"], attention_mask=mask, position_ids=positions(mask)).logits
    assert torch.equal(model(**batch).logits, want)


def test_an_added_layer_has_the_published_number_of_parameters() -> None:
    d, c = WIDTH, 16
    layer = build_rotary(AFTER).added_layer(2)
    assert sum(p.numel() for p in layer.parameters()) == 16 * d * c + 4 * d
    as_base = build_rotary(ROTARY_LAYOUTS["as_base"], "mistral").added_layer(3)
    assert (
        sum(p.numel() for p in as_base.parameters()) == 3 * d * d + 12 * d * 8 + 4 * d
    )  # two of four key-value heads


@every_rotary_family
@every_rotary_layout
def test_cached_greedy_decoding_equals_recomputing_everything_on_prompts_padded_on_the_left(
    layers: Layers, family: str
) -> None:
    model, batch = build_rotary(layers, family), without(padded_left(inputs()), "labels")
    made = greedy(model, **batch, max_new_tokens=9, pad_token_id=0).tokens_BG
    assert torch.equal(made, recomputed(model, batch, 9))
    assert len(made.unique()) > 3


# What is refused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"shared_projections": True},
            fault("layers_of_family", keys="layers.shared_projections=True", family="llama"),
        ),
        (
            {"heads": 4, "kv_heads": 3},
            fault(
                "heads_of_width",
                key="kv_heads",
                value=3,
                other="heads",
                other_value=4,
                choices="1, 2, 4",
            ),
        ),
        ({"width": 12, "heads": 4}, fault("head_width_odd", width=3)),
        (
            {"base_attention": True, "heads": 2},
            fault("heads_of_base", heads=2, has=4),
        ),
    ],
)
def test_layers_that_do_not_fit_a_rotary_base_are_refused(
    changes: dict[str, object], complaint: Fault
) -> None:
    with refused(complaint):
        build_rotary(Layers(count=1, stride=1).model_copy(update=changes))


def test_layers_of_a_rotary_base_are_refused_by_gptbigcode() -> None:
    with refused(
        "layers_of_family",
        keys="layers.kv_heads=2, layers.base_attention=True",
        family="gpt_bigcode",
    ):
        build(Layers(count=1, stride=1, kv_heads=2, base_attention=True))
