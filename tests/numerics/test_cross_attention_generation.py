"""Cached decoding, greedy and by beams, against recomputing everything for every token; and
draws.
"""

from __future__ import annotations

import pytest
import torch

from tests.numerics.tiny_cross_attention import (
    LAYOUTS,
    VOCABULARY,
    Batch,
    build,
    build_rotary,
    counted_calls,
    every_layout,
    inputs,
    padded_left,
    recomputed,
    without,
)
from tests.wording import refused
from trainer.protocol.abilities import Search
from trainer.tasks.cross_attention.config import Layers
from trainer.tasks.cross_attention.decoder.generation import greedy, search_beams
from trainer.tasks.cross_attention.decoder.model import CrossAttentionModel


def prompts() -> Batch:
    return without(padded_left(inputs()), "labels")


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
    assert (
        calls["base.transformer.h.0"] == 1 + 6
    )  # the context, then the prompt and five single tokens
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
        made = greedy(
            model, **batch, max_new_tokens=5, pad_token_id=0, eos_token_id=end, always_steps=always
        )
        lengths.append(made.tokens_BG.shape[1])
    assert lengths == [1, 5]


def test_prompts_padded_on_the_right_are_refused() -> None:
    with refused("prompts_padded_right"):
        greedy(
            build(LAYOUTS["after"]), **without(inputs(), "labels"), max_new_tokens=2, pad_token_id=0
        )


# Beams and draws, by transformers
# ------------------------------------------------------------------------------------


@every_layout
def test_one_beam_of_transformers_equals_our_greedy_loop_on_prompts_padded_on_the_left(
    layers: Layers,
) -> None:
    model, batch = build(layers), prompts()
    want = greedy(model, **batch, max_new_tokens=9, pad_token_id=0, eos_token_id=3).tokens_BG
    got = search_beams(model, batch, Search(), max_new_tokens=9, pad_token_id=0, eos_token_id=3)
    assert torch.equal(got, want[:, : got.shape[1]])
    assert not want[:, got.shape[1] :].any()


@pytest.mark.parametrize("family", ["gpt_bigcode", "llama", "mistral"])
def test_beams_find_the_continuation_that_recomputing_every_beam_finds(family: str) -> None:
    model = (
        build(LAYOUTS["after"])
        if family == "gpt_bigcode"
        else build_rotary(LAYOUTS["after"], family)
    )
    batch = prompts()
    got = search_beams(
        model, batch, Search(num_beams=3, num_answers=3), max_new_tokens=4, pad_token_id=0
    )
    for row in range(3):
        alone = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        assert got[3 * row : 3 * row + 3].tolist() == beams_recomputed(
            model, alone, num_beams=3, max_new_tokens=4
        )


def beams_recomputed(
    model: CrossAttentionModel, batch: Batch, *, num_beams: int, max_new_tokens: int
) -> list[list[int]]:
    """The best continuations of one row, from whole forwards over every beam."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(max_new_tokens):
        grown: list[tuple[float, list[int]]] = []
        for score, tokens in beams:
            ids = torch.cat([batch["input_ids"], torch.tensor([tokens], dtype=torch.int64)], dim=1)
            mask = torch.cat(
                [batch["attention_mask"], torch.ones(1, len(tokens), dtype=torch.int64)], dim=1
            )
            logits = model(**(batch | {"input_ids": ids, "attention_mask": mask})).logits[0, -1]
            grown += [
                (score + p, [*tokens, t]) for t, p in enumerate(logits.log_softmax(-1).tolist())
            ]
        beams = sorted(grown, reverse=True)[:num_beams]
    return [tokens for _, tokens in beams]


@pytest.mark.parametrize(
    "search", [Search(num_beams=3), Search(temperature=1.0, num_answers=3)], ids=["beams", "draws"]
)
@every_layout
def test_generate_encodes_and_projects_a_context_once_however_many_beams_and_tokens(
    layers: Layers, search: Search
) -> None:
    model = build(layers)
    with counted_calls(model) as calls:
        search_beams(model, prompts(), search, max_new_tokens=6, pad_token_id=0)
    assert (
        calls["base.transformer.h.0"] == 1 + 6
    )  # the context, then the prompt and five single tokens
    for index in model.indices[: 1 if layers.shared_weights else None]:
        assert calls[f"cross_attn_layers.{index}.crossattention.v_attn"] == 1


def test_draws_follow_the_probabilities_of_the_model() -> None:
    model = build(LAYOUTS["after"])
    batch = {name: tensor[:1] for name, tensor in prompts().items()}
    wanted = model(**batch).logits[0, -1].div(0.5).softmax(-1)
    torch.manual_seed(0)
    search = Search(temperature=0.5, num_answers=2000)
    drawn = search_beams(model, batch, search, max_new_tokens=1, pad_token_id=0)
    counts = torch.bincount(drawn[:, 0], minlength=VOCABULARY) / 2000
    assert (counts - wanted).abs().max().item() < 0.04


def test_a_small_top_p_leaves_the_most_likely_token_alone() -> None:
    model, batch = build(LAYOUTS["after"]), prompts()
    drawn = search_beams(
        model, batch, Search(temperature=5.0, top_p=1e-6), max_new_tokens=5, pad_token_id=0
    )
    assert torch.equal(drawn, greedy(model, **batch, max_new_tokens=5, pad_token_id=0).tokens_BG)


def test_contexts_that_do_not_divide_the_rows_are_refused() -> None:
    model, batch = build(LAYOUTS["after"]), prompts()
    batch |= {name: batch[name][:2] for name in ("context_input_ids", "context_attention_mask")}
    with refused("contexts_for_rows", rows=3, contexts=2):
        model(**batch)
