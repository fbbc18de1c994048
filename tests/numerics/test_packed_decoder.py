"""A packed step of the cross-attention model is the padded one: same loss, same gradients, no token
seen elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from tests.facts import experiment, write_facts
from tests.numerics.test_engine import ds_for
from tests.numerics.tiny_cross_attention import (
    LAYOUTS,
    NUM_BLOCKS,
    ROTARY,
    ROTARY_LAYOUTS,
    VOCABULARY,
    WIDTH,
    build,
)
from tests.ranks import run_on_ranks
from tests.tolerance import assert_close, assert_equal_step, assert_same_step, depth_of
from tests.wording import refused
from trainer import tasks
from trainer.data.padding import pad_right
from trainer.models.losses import IGNORED
from trainer.protocol.task import DRAW, Batch, Places
from trainer.recipes.cross_attention import preparation
from trainer.tasks.cross_attention.decoder.attention import CrossAttention, KeyMask
from trainer.tasks.cross_attention.decoder.model import CrossAttentionModel
from trainer.tasks.cross_attention.decoder.packed_batch import context_stream, decoder_stream
from trainer.tasks.cross_attention.decoder.rotary import RotaryCrossAttention
from trainer.tasks.cross_attention.text.contexts import token_batch

# The model
# --------------------------------------------------------------------------------------------------

DECODERS = [
    1,
    70,
    5,
    33,
    34,
    40,
    2,
]  # tokens of each row: several grids, and rows of one length or nearly
CHUNKS = [[3], [40, 9], [1, 1, 1], [70], [8], [33, 1], [80, 12]]  # of each row's context
MODELS: dict[str, Callable[[], CrossAttentionModel]] = {
    "multi-query": lambda: build(LAYOUTS["after"], n_positions=128),
    "multi-head": lambda: build(LAYOUTS["before"], n_positions=128, multi_query=False),
    "shared": lambda: build(LAYOUTS["shared"], n_positions=128),
    "llama": lambda: _rotary("grouped", "llama"),
    "llama as its base": lambda: _rotary("as_base", "llama", num_key_value_heads=2),
    "mistral with a window of 4": lambda: _rotary("before_shared", "mistral"),
    "mistral without a window": lambda: _rotary("after", "mistral", sliding_window=None),
}


# Margins, as tests/tolerance.py means them.
STEP: dict[str, Any] = {"loss": 0.12, "gradients": 1.5}
LOSSES = {"what": "loss", "margin": STEP["loss"]}


def _rotary(layout: str, family: str, **base: Any) -> CrossAttentionModel:
    """As tiny_cross_attention.build_rotary, with positions for longer rows."""
    config = {"llama": LlamaConfig, "mistral": MistralConfig}[family](
        hidden_size=WIDTH,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=128,
        vocab_size=VOCABULARY,
        **(ROTARY[family] | base),
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = CrossAttentionModel(
            AutoModelForCausalLM.from_config(config), ROTARY_LAYOUTS[layout]
        ).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_norm = name.endswith("weight") and ("ln_" in name or "norm" in name)
                parameter.normal_(mean=float(is_norm), std=0.3)
    return model


def drawn_rows(seed: int = 3) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Random ids of rows and of the chunks of their contexts."""
    random = np.random.default_rng(seed)
    decoders = [random.integers(1, VOCABULARY, length).tolist() for length in DECODERS]
    chunks = [
        [random.integers(1, VOCABULARY, length).tolist() for length in lengths]
        for lengths in CHUNKS
    ]
    return decoders, chunks


def padded_of(
    decoders: Sequence[list[int]], chunks: Sequence[list[list[int]]], labels_from: Sequence[int]
) -> Batch:
    ids, mask = pad_right(decoders, 0)
    labels = ids.masked_fill(mask == 0, IGNORED)
    for row, start in enumerate(labels_from):
        labels[row, :start] = IGNORED
    encoded = [
        {"c": [i for chunk in row for i in chunk], "c_lengths": list(map(len, row))}
        for row in chunks
    ]
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        **token_batch(encoded, "c", pad=0, is_chunked=True),
    }


def packed_of(
    decoders: Sequence[list[int]], chunks: Sequence[list[list[int]]], labels_from: Sequence[int]
) -> Batch:
    return decoder_stream(decoders, labels_from) | context_stream(
        chunks, [len(ids) for ids in decoders], cache=None
    )


def stepped(model: CrossAttentionModel, **batch: Any) -> tuple[float, dict[str, Tensor]]:
    """The mean loss and its gradients."""
    model.zero_grad()
    labels = batch["packed"]["labels"] if "packed" in batch else batch["labels"][:, 1:]
    loss = model(**batch).loss / (labels != IGNORED).sum()
    loss.backward()
    return float(loss.detach()), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "labels_from", [[0] * 7, [0, 66, 4, 1, 33, 20, 1]], ids=["every token", "answers only"]
)
def test_packed_loss_and_gradients_are_the_padded_ones(name: str, labels_from: list[int]) -> None:
    model, rows = MODELS[name](), drawn_rows()
    packed = packed_of(*rows, labels_from)
    assert len([key for key in packed if key.startswith("grid_")]) >= 3
    assert len([key for key in packed if key.startswith("keys_grid_")]) >= 3
    want = stepped(model, **padded_of(*rows, labels_from))
    assert_same_step(stepped(model, packed=packed), want, depth=depth_of(model), **STEP)
    assert model.base.config._attn_implementation == "sdpa", "put back after every block"


@pytest.mark.parametrize("name", ["multi-query", "llama"])
def test_prepared_states_as_a_stream_give_the_step_of_the_padded_ones(name: str) -> None:
    model, (decoders, chunks) = MODELS[name](), drawn_rows()
    padded = padded_of(decoders, chunks, [0] * 7)
    states, kept = model.encode(
        padded.pop("context_input_ids"), padded.pop("context_attention_mask")
    )
    names = ("context_input_ids", "context_position", "context_cells")
    packed = {key: x for key, x in packed_of(decoders, chunks, [0] * 7).items() if key not in names}
    packed["encoder_hidden_states"] = states[kept]
    want = stepped(model, **padded, encoder_hidden_states=states, encoder_attention_mask=kept)
    assert_same_step(stepped(model, packed=packed), want, depth=depth_of(model), **STEP)


@pytest.mark.parametrize("name", ["multi-query", "shared", "llama", "mistral with a window of 4"])
def test_hidden_keys_are_those_of_the_padded_step(name: str) -> None:
    model, rows = MODELS[name](), drawn_rows()
    padded = padded_of(*rows, [0] * 7)
    real = padded["context_attention_mask"].flatten(1).bool()
    generator = torch.Generator().manual_seed(8)
    kept = {index: torch.rand(real.shape, generator=generator) < 0.6 for index in model.indices}
    for mask in kept.values():
        mask[:, 0] = True  # a padded row that keeps no key attends to its pads too
    in_stream = {index: mask[real][None] for index, mask in kept.items()}
    packed = stepped(model, packed=packed_of(*rows, [0] * 7), key_masks=in_stream)
    assert_same_step(
        packed, stepped(model, **padded, key_masks=kept), depth=depth_of(model), **STEP
    )
    assert abs(packed[0] - stepped(model, packed=packed_of(*rows, [0] * 7))[0]) > 1e-4, (
        "the masks hide something"
    )


def test_a_row_whose_keys_are_all_hidden_attends_to_its_own_keys_uniformly() -> None:
    model = MODELS["multi-query"]()
    decoders, chunks = drawn_rows()
    decoders, chunks = (
        [decoders[1]],
        [chunks[1]],
    )  # alone, and unchunked: no pads in the padded row either
    joined = [[[*chunks[0][0], *chunks[0][1]]]]
    none = {index: torch.zeros(1, 49, dtype=torch.bool) for index in model.indices}
    want = stepped(model, **padded_of(decoders, joined[0:1], [0]), key_masks=none)
    got = stepped(model, packed=packed_of(decoders, joined, [0]), key_masks=none)
    assert_same_step(got, want, depth=depth_of(model), **STEP)


@pytest.mark.parametrize("kernels", ["1", "0"])  # rows one by one, or on grids
@pytest.mark.parametrize("name", MODELS)
def test_no_row_sees_another_rows_tokens_or_context(
    name: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATHE_CPU_KERNELS", kernels)
    model, (decoders, chunks) = MODELS[name](), drawn_rows()
    together = model(packed=packed_of(decoders, chunks, [0] * 7)).loss
    rows = [i for i in range(7) if len(decoders[i]) > 1]
    alone = [model(packed=packed_of([decoders[i]], [chunks[i]], [0])).loss for i in rows]
    assert_close(together, torch.stack(alone).sum(), depth=depth_of(model), **LOSSES)


def test_a_layout_with_a_wrong_row_boundary_gives_another_loss() -> None:
    model, rows = MODELS["multi-query"](), drawn_rows()
    right = packed_of(*rows, [0] * 7)
    want = float(model(packed=right).loss.detach())
    moved = {**right, "starts": right["starts"].clone()}
    moved["starts"][1] += 1
    # few tokens change their row: a small difference, beyond a hundred roundings
    rounding = torch.finfo(torch.float32).eps * want
    assert abs(float(model(packed=moved).loss.detach()) - want) > 100 * rounding
    second = int((right["keys_position"] == 0).nonzero()[1])
    of_keys = {**right, "keys_position": right["keys_position"].clone()}
    of_keys["keys_position"][[second, second + 40]] = torch.tensor([1, 0])
    assert abs(float(model(packed=of_keys).loss.detach()) - want) > 100 * rounding


@pytest.mark.parametrize("name", ["multi-query", "mistral with a window of 4"])
def test_a_layout_with_a_wrong_grid_gives_another_loss(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATHE_CPU_KERNELS", "0")  # on grids
    model, rows = MODELS[name](), drawn_rows()
    right = packed_of(*rows, [0] * 7)
    want = float(model(packed=right).loss.detach())
    joined = packed_of([[i for row in rows[0] for i in row]], [[[1]]], [0])
    as_one_row = {key: x for key, x in right.items() if not key.startswith(("grid_", "cells"))}
    as_one_row |= {key: x for key, x in joined.items() if key.startswith(("grid_", "cells"))}
    assert abs(float(model(packed=as_one_row).loss.detach()) - want) > 1e-3 * want
    swapped = {**right, "keys_cells": right["keys_cells"].flip(0)}
    assert abs(float(model(packed=swapped).loss.detach()) - want) > 1e-3 * want


@pytest.mark.parametrize("name", ["multi-query", "mistral with a window of 4"])
def test_recomputing_in_backward_changes_neither_loss_nor_gradients_under_dropout(
    name: str,
) -> None:
    model = MODELS[name]()
    model.layers = model.layers.model_copy(update={"key_dropout": 0.3})
    for module in model.modules():
        if isinstance(module, (CrossAttention, RotaryCrossAttention)):
            module.dropout = 0.2
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    batch = packed_of(*drawn_rows(), [0] * 7)
    found = []
    for every in (None, 1):
        model.train().recompute_every = every
        torch.manual_seed(4)
        found.append(stepped(model, packed=batch))
    assert_equal_step(found[1], found[0])
    assert abs(found[0][0] - stepped(model.eval(), packed=batch)[0]) > 1e-4, "something was dropped"


def test_key_dropout_hides_the_share_that_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(LAYOUTS["after"].model_copy(update={"key_dropout": 0.3}), n_positions=128).train()
    seen: list[list[KeyMask]] = []
    for layer in model.cross_attn_layers.values():
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[2].masks))
    model(packed=packed_of(*drawn_rows(), [0] * 7))
    shares = [sum(int(mask.mask_B11L.sum()) for mask in masks) / 261 for masks in seen]
    assert len(set(shares)) == 2, "each layer draws for itself"
    assert all(0.55 < share < 0.85 for share in shares), shares


# The task
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Facts whose questions and contexts have very different lengths; every third has two
    contexts.
    """
    made = write_facts(tmp_path_factory.mktemp("facts"), train=16, valid=8)
    for split in ("train", "valid"):
        rows = [json.loads(line) for line in (made / f"{split}.jsonl").read_text().splitlines()]
        for number, row in enumerate(rows):
            context = row.pop("context") * (1 + number % 5)
            row["contexts"] = (
                [context, "Elsewhere there is nothing."] if number % 3 == 0 else [context]
            )
            row["useful_contexts"] = [1, 0] if number % 3 == 0 else [1]
        (made / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


LLAMA = {
    "config": {
        "model_type": "llama",
        "vocab_size": 384,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "seed": 1,
}
_DATA = {"decoder_tokens": 96, "context_tokens": 96, "state_dtype": "fp32"}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "answers only": {"data": {"loss_on": "answer"}},
    "chunked": {"data": {"chunked": True}},
    "contexts too": {"data": {"include_context_ids": True, "fim_rate": 0.5, "chunked": True}},
    "llama": {"base": LLAMA, "data": {"question_on_context": True}},
    "recomputed": {"train": {"gradient_checkpointing": True}},
}


def loaded(
    folder: Path, changes: dict[str, Any], *, data_path: Path | None = None, **data: Any
) -> Any:
    values = experiment(
        "cross_attention",
        folder,
        **{**changes, "data": {**_DATA, **changes.get("data", {}), **data}},
    )
    return tasks.load(tasks.parse(values), Places(data_path or folder, folder / "cache", folder))


def rows_of(task: Any, split: str = "train") -> list[dict[str, Any]]:
    rows = list(task.rows(split))
    found = [{name: np.asarray(ids) for name, ids in task.encode(row).items()} for row in rows]
    return [{**row, DRAW: np.array([7 * number])} for number, row in enumerate(found)]


def summed(task: Any, model: Any, rows: list[dict[str, Any]]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    batch = task.collate(rows)
    (loss,) = task.losses(model, [batch])
    units = task.units(batch)
    (loss / units).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach() / units), gradients


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_packed_task_trains_as_the_padded_one(folder: Path, variant: str) -> None:
    padded, packed = (
        loaded(folder, VARIANTS[variant], packed=is_packed) for is_packed in (False, None)
    )
    model, rows = packed.model().train(), rows_of(packed)
    batches = padded.collate(rows), packed.collate(rows)
    assert "input_ids" in batches[0]
    assert "tokens" in batches[1]
    assert int(padded.units(batches[0])) == int(packed.units(batches[1]))
    assert padded.encoding_id() == packed.encoding_id()
    assert_same_step(
        summed(packed, model, rows), summed(padded, model, rows), depth=depth_of(model), **STEP
    )


def test_a_packed_task_on_prepared_states_trains_as_the_padded_one_that_encodes(
    folder: Path, tmp_path: Path
) -> None:
    online = loaded(folder, VARIANTS["chunked"], packed=False)
    wanted = preparation.Preparation(tmp_path / "out", {})
    preparation.write_rows(online.cfg, online.places, wanted)
    preparation.write_states(online.cfg, online.places, wanted)
    cached = loaded(folder, VARIANTS["chunked"], data_path=tmp_path / "out", encode="cached")
    model, rows = online.model().train(), rows_of(online)
    batch = cached.collate(rows)
    assert batch["encoder_hidden_states"].shape[0] == sum(len(row["context"]) for row in rows), (
        "real tokens only"
    )
    assert_same_step(
        summed(cached, model, rows), summed(online, model, rows), depth=depth_of(model), **STEP
    )


def test_packed_scores_are_the_padded_ones_under_both_contexts(folder: Path) -> None:
    padded, packed = (
        loaded(folder, VARIANTS["chunked"], packed=is_packed) for is_packed in (False, True)
    )
    model, rows = packed.model().eval(), rows_of(packed, "valid")
    with torch.no_grad():
        for parameter in model.cross_attn_layers.parameters():
            parameter.mul_(8.0)  # a context that counts
        want, got = (task.scores(model, task.collate(rows)) for task in (padded, packed))
    assert got.keys() == want.keys() == {"loss", "shuffled_loss"}
    for name, score in want.items():
        assert_close(got[name].num, score.num, of=name, depth=depth_of(model), **LOSSES)
        assert int(got[name].den) == int(score.den)
    assert float(want["loss"].num) != pytest.approx(float(want["shuffled_loss"].num), rel=1e-4)


def test_a_batch_with_an_empty_context_stays_padded_and_trains(folder: Path) -> None:
    padded, packed = (loaded(folder, {}, packed=is_packed) for is_packed in (False, True))
    rows = rows_of(packed)[:4]
    rows[2] = {**rows[2], "context": np.zeros(0, dtype=np.int64), "context_lengths": np.array([0])}
    assert "tokens" not in packed.collate(rows)
    model = packed.model().train()
    assert_equal_step(summed(packed, model, rows), summed(padded, model, rows))


def test_another_attention_implementation_of_the_base_keeps_the_padded_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.models import base_source

    config_of = base_source.config_of

    def eager(*args: Any) -> Any:
        config = config_of(*args)
        config._attn_implementation = "eager"
        return config

    monkeypatch.setattr(base_source, "config_of", eager)
    task = loaded(folder, {})
    assert "input_ids" in task.collate(rows_of(task)[:2])
    task = loaded(folder, {}, packed=True)
    rows = rows_of(task)[:2]
    with refused("packed_attention", attention="eager", wanted="sdpa"):
        task.collate(rows)


# Ranks
# --------------------------------------------------------------------------------------------------


def trained(
    folder: Path, changes: dict[str, Any], stage: int, sizes: list[int]
) -> tuple[float, dict[str, Tensor]]:
    """Loss and full gradients of 12 rows cut into these micro-batches over the ranks."""
    from trainer.config.schema import Optim
    from trainer.runtime import distributed
    from trainer.training import engine

    task = loaded(folder, changes)
    rows, world = rows_of(task)[:12], distributed.world()
    live = engine.Engine(task.model(), ds_for(stage, "fp32", world), Optim(lr=0.1, clip=0.0))
    live.train()
    starts, share = np.cumsum([0, *sizes]), len(sizes) // world
    mine = range(distributed.rank() * share, (distributed.rank() + 1) * share)
    window = [task.collate(rows[starts[i] : starts[i + 1]]) for i in mine]
    assert all("tokens" in batch for batch in window)
    units = int(sum(task.units(task.collate([row])) for row in rows))
    total = torch.zeros((), dtype=torch.float64)
    for loss in task.losses(live.model, window):
        live.backward(loss / units)
        total += (loss / units).detach()
    found: dict[str, Tensor] = {}
    live.step(
        0.1, watch=lambda named: found.update({name: gradient.clone() for name, gradient in named})
    )
    live.destroy()
    return float(distributed.total(total)), found


def several(folder: Path, changes: dict[str, Any], asked: list[tuple[int, list[int]]]) -> list[Any]:
    return [trained(folder, changes, stage, sizes) for stage, sizes in asked]


@pytest.mark.parametrize("variant", ["contexts too", "llama"])
def test_one_rank_two_ranks_and_zero_3_have_one_loss_and_one_gradient(
    folder: Path, variant: str
) -> None:
    changes = VARIANTS[variant]
    wanted, *others = run_on_ranks(1, several, folder, changes, [(0, [12]), (0, [5, 1, 6])])[0]
    others += run_on_ranks(2, several, folder, changes, [(0, [1, 4, 2, 5]), (3, [1, 4, 2, 5])])[0]
    assert wanted[1]
    for found in others:
        assert_same_step(found, wanted, depth=depth_of(loaded(folder, changes).model()), **STEP)


# Layouts
# --------------------------------------------------------------------------------------------------


def test_every_token_of_a_layout_has_a_cell_of_its_own_in_its_row() -> None:
    decoders, chunks = drawn_rows()
    batch = packed_of(decoders, chunks, [0] * 7)
    for name, lengths in (
        ("queries_", DECODERS),
        ("keys_", [sum(row) for row in CHUNKS]),
        ("", DECODERS),
    ):
        cells_M = batch[f"{name}cells"]
        grids = [grid for key, grid in batch.items() if key.startswith(f"{name}grid_")]
        assert sorted(cells_M.tolist()) == sorted(set(cells_M.tolist()))
        assert int(cells_M.max()) < sum(grid.numel() for grid in grids)
        firsts = np.cumsum([0, *lengths])[:-1]
        steps = cells_M.diff() == 1
        assert all(steps[i] for i in range(sum(lengths) - 1) if i + 1 not in firsts), (
            "a row lies in one piece"
        )
