"""Rows of several runs in one pack: each run gets what it computes alone, to the same bits whatever
the others' rows hold.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.driven_runs import driven_values, rows_of_seed
from tests.facts import LLAMA, write_facts
from tests.wording import refused
from trainer import tasks
from trainer.driven.packs import batch_of, inputs_of
from trainer.driven.passes import PassLayout
from trainer.driven.together.adapter_set import AdapterSet
from trainer.driven.together.rounds import filler
from trainer.driven.together.shared_base import PackPart, SharedBase
from trainer.protocol.task import Places

BLOOM = {"model_type": "bloom", "vocab_size": 384, "hidden_size": 32, "n_layer": 2, "n_head": 4}
BLOOM |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0}
BASES: dict[str, dict[str, Any]] = {
    "packed": LLAMA,
    "tied": {**LLAMA, "config": {**LLAMA["config"], "tie_word_embeddings": True}},
    "padded": {"config": {**BLOOM, "pad_token_id": 1}, "seed": 1},
}
RUNS: list[dict[str, Any]] = [
    {"r": 4, "alpha": 8, "parts": ["attention"]},
    {"r": 2, "alpha": 6, "parts": ["attention", "mlp", "output"]},
    {"r": 8, "alpha": 8, "parts": ["mlp"], "rslora": True},
]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=3, valid=2)


def task_of(facts: Path, base: dict[str, Any], lora: dict[str, Any], seed: int) -> Any:
    values = driven_values(facts, lora={"dropout": 0.0, **lora}, train={"seed": seed})
    return tasks.load(
        tasks.parse({**values, "base": base}), Places(None, Path("unread"), Path("unread"))
    )


def shared_base(task: Any) -> SharedBase:
    layout = PassLayout(10**6, task.is_packed, task.pad)
    return SharedBase(task.loaded(task.cfg.base, None), task.base_name, layout)


def adapters_of(base: SharedBase, task: Any, seed: int) -> AdapterSet:
    """New adapters whose second matrices are not zero."""
    adapters = base.draw(task.cfg.lora, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapters.named_parameters():
            if ".lora_B." in name:
                weight.normal_(std=0.1, generator=generator)
    return adapters


def computed(base: SharedBase, rows: list[Any], parts: list[PackPart]) -> list[Any]:
    """The log-probabilities and the gradients of each part; the loss is that of cross_entropy."""
    logps = base.logps(rows, parts, with_backward=True)
    own = [rows[part.start : part.start + part.count] for part in parts]
    losses = [
        -(logp * inputs_of(some)["weights"]).sum() for logp, some in zip(logps, own, strict=True)
    ]
    gradients = base.gradients(losses, parts)
    return [(one.detach(), gradient) for one, gradient in zip(logps, gradients, strict=True)]


def computed_alone(task: Any, weights: dict[str, Tensor], rows: list[Any]) -> Any:
    """The same by the model of one run, whose adapters peft applies."""
    model = task.model()
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert own.keys() == weights.keys()
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(weights[name])
    logps = model(**batch_of(rows, is_packed=task.is_packed, pad=task.pad))["logprobs"]
    (-(logps * inputs_of(rows)["weights"]).sum()).backward()
    return logps.detach(), [weight.grad for weight in own.values()]


@pytest.mark.parametrize("name", BASES)
def test_each_run_of_a_pack_gets_what_it_computes_alone(name: str, facts: Path) -> None:
    every = [task_of(facts, BASES[name], lora, seed) for seed, lora in enumerate(RUNS)]
    base = shared_base(every[0])
    rows = [rows_of_seed(seed, 2) for seed in range(len(RUNS))]
    sets = [adapters_of(base, task, seed) for seed, task in enumerate(every)]
    parts = [PackPart(one, 2 * number, 2, None) for number, one in enumerate(sets)]
    found = computed(base, [*itertools.chain(*rows)], parts)
    for task, one, own, (logps, gradients) in zip(every, sets, rows, found, strict=True):
        weights = {name: weight.detach() for name, weight in one.named_parameters()}
        expected, expected_gradients = computed_alone(task, weights, own)
        torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
        for got, want in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_new_adapters_are_those_that_a_run_alone_begins_with(facts: Path) -> None:
    task = task_of(facts, LLAMA, RUNS[1], 3)
    base = shared_base(task)
    base.draw(task_of(facts, LLAMA, RUNS[0], 1).cfg.lora, seed=1)  # of another run, before
    drawn = dict(base.draw(task.cfg.lora, seed=3).named_parameters())
    alone = {name: p for name, p in task.model().named_parameters() if p.requires_grad}
    assert list(drawn) == list(alone)
    assert all(torch.equal(drawn[name], alone[name]) for name in alone)
    assert not any("lora" in name for name, _ in base.base.named_parameters())


def test_ten_runs_hold_one_base_in_memory(facts: Path) -> None:
    task = task_of(facts, LLAMA, RUNS[1], 0)
    base = shared_base(task)
    places = {weight.data_ptr() for weight in base.base.parameters()}
    sets = [base.draw(task.cfg.lora, seed=seed) for seed in range(10)]
    assert {weight.data_ptr() for weight in base.base.parameters()} == places
    (small, *_), whole = [_bytes(one) for one in sets], _bytes(task.model())
    assert sum(map(_bytes, [base.base, *sets])) == whole + 9 * small < 2.5 * whole


def _bytes(model: torch.nn.Module) -> int:
    return sum(weight.nbytes for weight in model.parameters())


@pytest.mark.parametrize("name", ["packed", "padded"])
def test_the_bits_of_a_run_depend_on_no_row_of_another(name: str, facts: Path) -> None:
    lora = {**RUNS[1], "dropout": 0.3}
    every = [task_of(facts, BASES[name], lora, seed) for seed in range(3)]
    base = shared_base(every[0])
    sets = [adapters_of(base, task, seed) for seed, task in enumerate(every)]
    rows = [row for seed in range(3) for row in rows_of_seed(seed, 2)]
    rows[0].inputs["weights"][:] = np.nan  # a run that has gone wrong
    parts = [PackPart(one, 2 * number, 2, (number, 5)) for number, one in enumerate(sets)]
    together = computed(base, rows, parts)
    for number, part in enumerate(parts):
        own = slice(part.start, part.start + part.count)
        alone = [filler(len(row.tokens)) for row in rows]
        alone[own] = rows[own]
        ((logps, gradients),) = computed(base, alone, [part])
        assert torch.equal(logps, together[number][0])
        for one, other in zip(gradients, together[number][1], strict=True):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    assert together[0][1][0].isnan().any()
    assert all(one.isfinite().all() for _, gradients in together[1:] for one in gradients)


def test_a_base_in_which_rows_change_each_other_is_refused(facts: Path) -> None:
    dropping = {**LLAMA, "config": {**LLAMA["config"], "attention_dropout": 0.1}}
    with refused("shared_unsharable", what="attention_dropout"):
        shared_base(task_of(facts, dropping, RUNS[0], 0))
