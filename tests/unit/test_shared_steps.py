"""Steps of a group on one base: their packs, what replaces a model, and what is refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import trainval
from tests.facts import LLAMA, TINY_BASE, experiment, with_dropout, write_facts
from tests.wording import refused, says
from trainer import tasks
from trainer.data.order import Sharding, Sizes, window_rows
from trainer.driven.passes import PassLayout
from trainer.driven.together.rounds import Slot
from trainer.driven.together.shared_base import SharedBase
from trainer.driven.together.step_packs import StepRows, filler_row, packs_of, rows_of
from trainer.driven.together.trained_adapters import TrainedAdapters, given
from trainer.errors import EXIT_BAD_INPUT
from trainer.launch import ending
from trainer.launch.together import run_together
from trainer.launch.together.refusals import refuse
from trainer.proof.replay import refuse_together
from trainer.protocol.task import Places
from trainer.training.options import Options
from trainer.training.run_plan import plan

BLOOM: dict[str, Any] = {"model_type": "bloom", "vocab_size": 384, "hidden_size": 32, "n_layer": 1}
BLOOM |= {"n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 1}
BASES: dict[str, Any] = {"packed": LLAMA, "padded": {"config": BLOOM, "seed": 1}}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=8, valid=2)


def values_of(facts: Path, **changes: Any) -> dict[str, Any]:
    blocks: dict[str, Any] = {"base": LLAMA, "lora": {"r": 2, "dropout": 0.0}, **changes}
    return experiment("causal_lm", facts, **blocks)


def task_of(values: dict[str, Any]) -> Any:
    return tasks.load(tasks.parse(values), Places(None, Path("unread"), Path("unread")))


def test_packs_hold_the_rows_of_all_in_their_order_up_to_a_limit() -> None:
    packs = packs_of({"a": [5, 4], "b": [], "c": [3, 30, 2]}, most_tokens=12)
    assert packs == [
        [Slot("a", 0, 5), Slot("a", 1, 4), Slot("c", 0, 3)],
        [Slot("c", 1, 30)],
        [Slot("c", 2, 2)],
    ]


def test_the_lengths_of_a_step_are_those_of_its_window_and_none_after_the_last() -> None:
    lengths = np.arange(3, 13)
    sizes = Sizes(lengths[:, None], np.zeros(10, np.int32), is_packed=True)
    sharding = Sharding(4, 1, world=2, rank=1)
    rows = StepRows(sizes, sharding, seed=3, end=6)
    window = window_rows(5, lengths=sizes, sharding=sharding, seed=3)
    assert rows.lengths(5) == lengths[np.concatenate(window)].tolist()
    assert len(rows.lengths(5)) == 2
    assert rows.lengths(6) == []


@pytest.mark.parametrize("base", [*BASES])
def test_rows_of_a_window_are_packed_anew_as_they_were(base: str, facts: Path) -> None:
    task = task_of(values_of(facts, base=BASES[base]))
    assert task.is_packed is (base == "packed")
    rows = [
        {"ids": np.arange(2, 2 + size), "scored": np.arange(size) % 3 > 0} for size in (6, 3, 4)
    ]
    again = rows_of([task.collate(rows[:1]), task.collate(rows[1:])])
    whole, packed_anew = task.collate(rows), task.collate(again)
    assert whole.keys() == packed_anew.keys()
    assert all(torch.equal(one, packed_anew[name]) for name, one in whole.items())
    assert len(task.collate([rows[0], filler_row(5)])["scored"]) == task.num_labels(rows[0])


def test_adapters_give_the_gradients_that_they_are_given(facts: Path) -> None:
    task = task_of(values_of(facts))
    layout = PassLayout(1000, task.is_packed, task.pad)
    base = SharedBase(task.loaded(task.cfg.base, None), task.base_name, layout)
    adapters = TrainedAdapters(base.draw(task.cfg.lora, seed=1), base)
    gradients = [torch.randn_like(weight) for weight in adapters.parameters()]
    loss = adapters(**given(torch.tensor(float("inf")), gradients))["loss"]
    (loss / 4).backward()
    assert loss.isinf()
    for weight, gradient in zip(adapters.parameters(), gradients, strict=True):
        assert torch.equal(weight.grad, gradient * 0.25)  # pyright: ignore[reportArgumentType]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lora": None}, 'got no lora, want adapters beside a frozen base ("lora": {})'),
    ({"lora": {"dora": True}}, "got lora.dora=True"),
    ({"lora": {"init": "pissa"}}, "got lora.init='pissa'"),
    ({"lora": {"tokens": [3]}}, "got lora.tokens=[3]"),
    ({"lora": {"modules_to_save": ["lm_head"]}}, "got lora.modules_to_save=['lm_head']"),
    (
        {"train": {"precision": "fp16"}, "deepspeed": "zero1"},
        "got train.precision='fp16', want 'bf16' or 'fp32'",
    ),
    ({"train": {"neftune_alpha": 5.0}}, "got train.neftune_alpha=5.0, want it left out"),
    (
        {"train": {"gradient_checkpointing": True, "activation_offload": True}},
        "got train.activation_offload=True, want it left out",
    ),
    ({"train": {"ema": 0.9}}, "got train.ema=0.9, want it left out"),
    ({"train": {"hours": 1.0}}, "got train.hours=1.0, want it left out"),
    ({"train": {"on_bad_step": "rollback"}}, "got train.on_bad_step='rollback'"),
    ({"train": {"micro_batch": "auto"}}, "got train.micro_batch='auto', want a value"),
    ({"deepspeed": "zero3"}, "got ZeRO-3, want stage 0, 1 or 2"),
    ({"data": {"stream": True}}, "got data.stream, want rows"),
    ({"base": TINY_BASE}, "got another base.config"),
    ({"train": {"gradient_checkpointing": True}}, "got another train.gradient_checkpointing"),
]


@pytest.mark.parametrize(("changes", "problem"), REFUSED)
def test_what_cannot_share_a_base_is_refused_by_name(
    changes: dict[str, Any], problem: str, facts: Path
) -> None:
    options = Options(Path("unread"), cache_dir=Path("unread"))
    every = [values_of(facts), values_of(facts, **changes)]
    plans = [plan(values, options, world=1, rank=0) for values in every]
    with refused("together_refused") as caught:
        refuse(plans, options)
    assert f"{plans[1].id}: " in str(caught.value)
    assert problem in str(caught.value)


def test_ranks_that_share_rows_are_refused_together(facts: Path, tmp_path: Path) -> None:
    file = {"zero_optimization": {"stage": 2}, "sequence_parallel_size": 2}
    (tmp_path / "shared.json").write_text(json.dumps(file))
    options = Options(Path("unread"), cache_dir=Path("unread"))
    values = {**values_of(facts), "deepspeed": str(tmp_path / "shared.json")}
    with refused("together_refused") as caught:
        refuse([plan(values, options, world=2, rank=0)], options)
    says("together_of_sharing", caught.value, count=2)


def test_another_task_and_flags_of_one_run_are_refused_together(facts: Path) -> None:
    options = Options(Path("unread"), cache_dir=Path("unread"), test=True)
    values = experiment("cross_attention", facts)
    problem = f"{plan(values, options, world=1, rank=0).id}: got task='cross_attention'"
    with refused("together_refused") as caught:
        refuse([plan(values, options, world=1, rank=0)], options)
    assert problem in str(caught.value)
    of_flag = "--test: want it left out"
    assert of_flag in str(caught.value)


def test_a_base_with_dropout_is_refused(facts: Path) -> None:
    options = Options(Path("unread"), cache_dir=Path("unread"))
    values = with_dropout(values_of(facts, base=TINY_BASE))
    with refused("together_unsharable", what="transformer.drop"):
        refuse([plan(values, options, world=1, rank=0)], options)


@pytest.mark.parametrize(
    "flags", [["-j", "local"], ["--survive", "2"], ["--exp_id", "0" * 32], ["--continue", "0" * 32]]
)
def test_flags_of_one_run_do_not_go_with_together(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "leave", sys.exit)
    group = [] if "--continue" in flags or "--exp_id" in flags else ["-e", "causal_lm_tiny"]
    flags = [*group, "-sb", str(tmp_path), "--together", "100", *flags]
    done = CliRunner().invoke(trainval.app, flags)
    assert done.exit_code == EXIT_BAD_INPUT
    says("together_foreign", done.output, flags=flags[-2])


def test_a_replay_of_a_run_that_shared_its_base_is_refused(tmp_path: Path) -> None:
    refuse_together(tmp_path)
    (tmp_path / run_together.FILE).write_text("{}")
    with refused("together_replay"):
        refuse_together(tmp_path)
