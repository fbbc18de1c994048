"""The cross-attention model against its slow twin and against itself: padding, chunks, dropout,
initialisation.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM, GPTNeoConfig, GPTNeoForCausalLM

from tests.numerics.cross_attention_twin import twin_gradients, twin_logits, twin_loss, twin_states
from tests.numerics.tiny_cross_attention import (
    LAYOUTS,
    LOGITS,
    NUM_BLOCKS,
    STEP,
    VOCABULARY,
    WIDTH,
    build,
    every_layout,
    gradients,
    inputs,
    padded_left,
    without,
)
from tests.tolerance import assert_close, assert_same_step, depth_of
from tests.wording import refused
from trainer.models.losses import next_token_loss, token_cross_entropy
from trainer.tasks.cross_attention.config import Layers
from trainer.tasks.cross_attention.decoder.attention import KeyMask
from trainer.tasks.cross_attention.decoder.model import (
    CrossAttentionModel,
    positions,
)
from trainer.tasks.cross_attention.decoder.shape import added_indices

# Against the twin
# --------------------------------------------------------------------------------------------------

BASES: dict[str, dict[str, Any]] = {
    "mqa": {},
    "mha": {"multi_query": False},
    "exact_gelu": {"activation_function": "gelu"},
}


@every_layout
@pytest.mark.parametrize("base", BASES.values(), ids=BASES.keys())
def test_loss_and_gradients_equal_those_of_the_twin(layers: Layers, base: dict[str, Any]) -> None:
    model, batch = build(layers, **base), inputs()
    states = torch.randn(layers.count, 3, 11, WIDTH, generator=torch.Generator().manual_seed(5))
    kept = batch["context_attention_mask"].bool()
    plain = without(batch, "context_input_ids", "context_attention_mask")
    got = gradients(model, **plain, encoder_hidden_states=list(states), encoder_attention_mask=kept)

    def twin(weights: dict[str, Tensor]) -> Tensor:
        return twin_logits(
            weights,
            model.base.config,
            layers,
            ids=batch["input_ids"],
            mask=batch["attention_mask"],
            states=list(states),
            kept=[kept] * layers.count,
        )

    want = twin_gradients(model, batch["labels"], twin)
    assert_same_step(got, want, depth=depth_of(model), **STEP)


def test_chunked_contexts_equal_chunks_read_one_by_one_and_joined() -> None:
    layers = LAYOUTS["after"]
    model, batch = build(layers), without(inputs(), "labels")
    generator = torch.Generator().manual_seed(9)
    chunks = torch.randint(1, VOCABULARY, (3, 4, 6), generator=generator)
    chunk_mask = torch.ones_like(chunks)
    chunk_mask[0, 1, 3:], chunk_mask[2, 0, :2], chunk_mask[1, 3] = (
        0,
        0,
        0,
    )  # right, left, a row with a chunk less
    got = model(
        **(batch | {"context_input_ids": chunks, "context_attention_mask": chunk_mask})
    ).logits
    weights = dict(model.named_parameters())
    states = [
        twin_states(weights, model.base.config, chunks[:, n], chunk_mask[:, n]) for n in range(4)
    ]
    want = twin_logits(
        weights,
        model.base.config,
        layers,
        ids=batch["input_ids"],
        mask=batch["attention_mask"],
        states=[torch.cat(states, dim=1)] * 2,
        kept=[torch.cat(list(chunk_mask.unbind(1)), dim=1).bool()] * 2,
    )
    rows = batch["attention_mask"].bool()
    assert_close(got[rows], want[rows], depth=depth_of(model), **LOGITS)


def test_a_sample_whose_keys_are_all_hidden_attends_uniformly_with_the_right_gradient() -> None:
    layers = LAYOUTS["after"]
    model, batch = build(layers), inputs()
    kept = torch.ones(3, 11, dtype=torch.bool)
    kept[1] = False
    got = gradients(model, **batch, key_masks={2: kept, 4: kept})
    visible = kept & batch["context_attention_mask"].bool()

    def twin(weights: dict[str, Tensor]) -> Tensor:
        context = twin_states(
            weights, model.base.config, batch["context_input_ids"], batch["context_attention_mask"]
        ).detach()
        return twin_logits(
            weights,
            model.base.config,
            layers,
            ids=batch["input_ids"],
            mask=batch["attention_mask"],
            states=[context] * 2,
            kept=[visible] * 2,
        )

    want = twin_gradients(model, batch["labels"], twin)
    assert_same_step(got, want, depth=depth_of(model), **STEP)


def test_next_token_loss_is_the_sum_of_the_twins_terms_and_its_head_sees_scored_positions_only() -> (
    None
):
    generator = torch.Generator().manual_seed(3)
    hidden, matrix = (
        torch.randn(2, 6, 8, generator=generator),
        torch.randn(8, 12, generator=generator),
    )
    labels = torch.tensor([[-100, -100, 4, 5, -100, 7], [3, 1, 2, -100, -100, -100]])
    seen: list[int] = []

    def loss_of(rows_ND: Tensor, targets_N: Tensor) -> Tensor:
        seen.append(len(rows_ND))
        return token_cross_entropy(rows_ND @ matrix, targets_N)

    got = next_token_loss(hidden, labels, loss_of)
    assert seen == [5]
    want = 5 * twin_loss(hidden @ matrix, labels)
    assert_close(got, want, what="sum of 5 terms", depth=8 + 12 + 5, margin=0.6)


def test_next_token_loss_of_nothing_is_zero_and_still_calls_the_head() -> None:
    hidden, calls = torch.randn(2, 6, 8, requires_grad=True), []

    def loss_of(rows_ND: Tensor, targets_N: Tensor) -> Tensor:
        calls.append(1)
        return token_cross_entropy(rows_ND, targets_N)

    loss = next_token_loss(hidden, torch.full((2, 6), -100), loss_of)
    loss.backward()
    assert loss.item() == 0.0
    assert calls == [1]


def test_next_token_loss_is_summed_in_fp32_for_a_bf16_model() -> None:
    hidden, labels = torch.randn(1, 40, 16, dtype=torch.bfloat16), torch.randint(0, 16, (1, 40))
    assert next_token_loss(hidden, labels, token_cross_entropy).dtype == torch.float32


# Initialisation
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [LAYOUTS["after"], LAYOUTS["before"], LAYOUTS["shared"]])
def test_zero_initialisation_keeps_the_logits_of_the_base_bit_for_bit(layers: Layers) -> None:
    model, batch = build(layers, randomise=False), without(inputs(), "labels")
    mask = batch["attention_mask"]
    want = model.base(batch["input_ids"], attention_mask=mask, position_ids=positions(mask)).logits
    assert torch.equal(model(**batch).logits, want)


def test_published_initialisation_draws_every_matrix_and_zeroes_every_bias() -> None:
    layers = Layers(count=1, stride=1, width=64, initialisation="published")
    layer = build(layers, randomise=False).added_layer(NUM_BLOCKS - 1)
    matrices = torch.cat([p.flatten() for p in layer.parameters() if p.ndim == 2])
    assert matrices.std().item() == pytest.approx(0.02, rel=0.03)
    assert all(not p.any() for name, p in layer.named_parameters() if name.endswith("bias"))


def test_equal_seeds_give_equal_layers_and_leave_the_random_state_alone() -> None:
    base = GPTBigCodeForCausalLM(
        GPTBigCodeConfig(n_embd=8, n_layer=2, n_head=2, n_positions=8, vocab_size=10)
    )
    layers = Layers(count=2, stride=1)
    torch.manual_seed(0)
    first = CrossAttentionModel(base, layers, seed=4).cross_attn_layers.state_dict()
    state = torch.get_rng_state()
    torch.rand(3)
    second = CrossAttentionModel(base, layers, seed=4).cross_attn_layers.state_dict()
    other = CrossAttentionModel(base, layers, seed=5).cross_attn_layers.state_dict()
    torch.manual_seed(0)
    assert torch.equal(state, torch.get_rng_state())
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["0.mlp.c_fc.weight"], other["0.mlp.c_fc.weight"])


def test_an_added_layer_has_the_published_number_of_parameters() -> None:
    d, c = WIDTH, 16
    layer = build(LAYOUTS["after"]).added_layer(2)
    assert sum(p.numel() for p in layer.parameters()) == 12 * d * c + 7 * c + 6 * d
    shared = build(LAYOUTS["after"].model_copy(update={"shared_projections": True})).added_layer(2)
    assert sum(p.numel() for p in shared.parameters()) == 11 * d * c + 6 * c + 6 * d


# Against itself
# --------------------------------------------------------------------------------------------------


@every_layout
def test_left_and_right_padding_give_the_same_loss_and_gradients(layers: Layers) -> None:
    model, batch = build(layers), inputs()
    want, got = gradients(model, **batch), gradients(model, **padded_left(batch))
    assert_same_step(got, want, depth=depth_of(model), **STEP)


def test_training_mode_reaches_the_added_layers_only() -> None:
    model = build(LAYOUTS["after"]).train()
    training = {name for name, module in model.named_modules() if module.training and name}
    assert training == {
        name for name, _ in model.named_modules() if name.startswith("cross_attn_layers")
    }


def drawn_masks(model: CrossAttentionModel, batch: dict[str, Tensor]) -> list[Tensor]:
    """The (B, L) keys that each added layer saw in one forward, bottom-up."""
    seen: list[Tensor] = []

    def note(_module: Any, arguments: tuple[Any, ...]) -> None:
        mask: KeyMask = arguments[2]
        seen.append(mask.mask_B11L[:, 0, 0])

    layers = {id(layer): layer for layer in map(model.added_layer, model.indices)}.values()
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    model(**batch)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("shared", [False, True])
def test_key_dropout_draws_its_own_mask_for_each_layer_and_sample_and_hides_no_more_than_it_should(
    shared: bool,
) -> None:
    layers = Layers(count=2, stride=2, key_dropout=0.4, shared_weights=shared)
    model, batch = build(layers, n_positions=1024).train(), inputs()
    batch["context_input_ids"] = torch.ones(3, 1000, dtype=torch.int64)
    batch["context_attention_mask"] = torch.ones_like(batch["context_input_ids"])
    batch["context_attention_mask"][:, 900:] = 0
    torch.manual_seed(0)
    lower, upper = drawn_masks(model, batch)
    distinct = {tuple(row.tolist()) for row in [*lower, *upper]}
    assert len(distinct) == 6
    assert not lower[:, 900:].any()
    assert lower[:, :900].float().mean().item() == pytest.approx(0.6, abs=0.04)


def test_nothing_is_dropped_in_evaluation() -> None:
    model, batch = build(Layers(count=2, stride=2, key_dropout=0.4), dropout=0.5), inputs()
    assert torch.equal(model(**batch).loss, model(**batch).loss)


def test_dropout_draws_are_replayed_from_the_ordinary_random_state() -> None:
    model, batch = build(Layers(count=2, stride=2, key_dropout=0.4), dropout=0.2).train(), inputs()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second = model(**batch).loss, model(**batch).loss
    torch.set_rng_state(state)
    assert torch.equal(model(**batch).loss, first)
    assert not torch.equal(first, second)


def test_fp32_layers_work_on_a_bf16_base() -> None:
    model = build(LAYOUTS["after"])
    model.base.bfloat16()
    loss, found = gradients(model, **inputs())
    assert torch.isfinite(loss)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}


# What is refused
# --------------------------------------------------------------------------------------------------


def test_a_stride_that_does_not_fit_is_refused_and_the_documented_6x6_on_36_blocks_is_not() -> None:
    assert added_indices(Layers(count=6, stride=6), 36) == [5, 11, 17, 23, 29, 35]
    with refused("layers_above_blocks", count=6, stride=7, blocks=42, has=36, most=5):
        added_indices(Layers(count=6, stride=7), 36)


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with refused(
        "heads_of_width",
        key="heads",
        value=5,
        other="width",
        other_value=16,
        choices="1, 2, 4, 8, 16",
    ):
        build(Layers(count=1, stride=1, width=16, heads=5))


def test_lengths_beyond_the_positions_are_refused_before_and_in_the_forward() -> None:
    model, batch = build(LAYOUTS["after"]), inputs()
    with refused("tokens_above_positions", key="context_tokens", value=49, positions=48):
        model.check_lengths(48, 49)
    long = torch.ones(3, 49, dtype=torch.int64)
    with refused("tokens_above_positions", key="decoder_tokens", value=49):
        model(**(batch | {"input_ids": long, "attention_mask": long}))


def test_another_family_is_refused_with_the_supported_ones() -> None:
    config = GPTNeoConfig(
        hidden_size=8,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global"], 2]],
        vocab_size=8,
        intermediate_size=8,
    )
    with refused(
        "family_unknown",
        family="gpt_neo",
        families=re.compile("'gpt_bigcode', 'llama', 'mistral'.*"),
    ):
        CrossAttentionModel(GPTNeoForCausalLM(config), LAYOUTS["after"])
