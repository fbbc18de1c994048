"""A weight that the files of a base lack begins with random numbers: it may, where it trains."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests.facts import LLAMA, TINY_BERT, experiment, write_facts
from tests.wording import refused
from trainer import tasks
from trainer.errors import ConfigError
from trainer.models.weights import absent
from trainer.protocol.task import Places

LOST = "model.layers.0.mlp.down_proj.weight"
LORA = {"r": 4, "targets": "all-linear"}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, tokenizer/, and whole bases: llama/ and bert/."""
    folder = write_facts(tmp_path_factory.mktemp("facts"), train=8, valid=2)
    for name, stated, build in (
        ("llama", LLAMA, AutoModelForCausalLM),
        ("bert", TINY_BERT, AutoModel),
    ):
        config = dict(stated["config"])
        made: Any = build.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
        made.save_pretrained(folder / name)
        shutil.copytree(folder / "tokenizer", folder / name, dirs_exist_ok=True)
    return folder


def without(base: Path, copy: Path, *names: str) -> Path:
    """A copy of a base whose file lacks these weights."""
    shutil.copytree(base, copy)
    weights = load_file(copy / "model.safetensors")
    for name in names:
        del weights[name]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def task_of(name: str, facts: Path, base: Path, **changes: Any) -> Any:
    values = experiment(name, facts, base=str(base), tokenizer=None, **changes)
    return tasks.load(tasks.parse(values), Places(facts, facts / "cache", facts))


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        action()
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("causal_lm", {"lora": LORA}),
        ("cross_attention", {"layers": {"stride": 1}}),
        ("retriever", {"lora": LORA}),
    ],
)
def test_a_frozen_weight_that_the_files_lack_is_refused_by_name(
    task: str, changes: dict[str, Any], facts: Path, tmp_path: Path
) -> None:
    if task == "retriever":
        changes = {**changes, "encoder": {"pooling": "mean"}}
    base = without(facts / "llama", tmp_path / "base", LOST)
    text = refusal(task_of(task, facts, base, **changes).model)
    assert str(base) in text
    assert LOST.removeprefix("model.") in text
    assert task_of(task, facts, facts / "llama", **changes).model() is not None


def test_a_weight_that_trains_may_be_new_but_not_in_a_model_that_is_evaluated(
    facts: Path, tmp_path: Path
) -> None:
    base = without(facts / "llama", tmp_path / "base", LOST)
    task = task_of("causal_lm", facts, base)
    assert task.model() is not None
    assert LOST in refusal(lambda: task.load_export(base))
    assert task.load_export(facts / "llama") is not None


def test_adapters_in_a_base_that_lacks_a_weight_are_refused(facts: Path, tmp_path: Path) -> None:
    whole = task_of("causal_lm", facts, facts / "llama", lora=LORA)
    weights = dict(whole.model().named_parameters())
    trained = {name: weight.detach() for name, weight in weights.items() if weight.requires_grad}
    whole.export(trained, tmp_path / "adapters")
    (tmp_path / "adapters" / "adapter_base.json").unlink()  # as peft writes adapters
    base = without(facts / "llama", tmp_path / "base", LOST)
    task = task_of("causal_lm", facts, base, lora=LORA)
    assert LOST in refusal(lambda: task.load_export(tmp_path / "adapters"))
    assert whole.load_export(tmp_path / "adapters") is not None


def test_a_pooler_that_no_task_reads_may_be_absent(facts: Path, tmp_path: Path) -> None:
    poolers = ("pooler.dense.weight", "pooler.dense.bias")
    base = without(facts / "bert", tmp_path / "base", *poolers)
    assert task_of("retriever", facts, base, lora=LORA).model() is not None
    plain = {"encoder": {"projection": None}}
    assert task_of("retriever", facts, base, **plain).load_export(base) is not None
    absent.refuse_named(poolers, "of a family that always has one")
    with refused("base_lacks_weights", source="squeezed", names="bert.poolers.weight"):
        absent.refuse_named(["bert.poolers.weight", "bert.pooler.dense.bias"], "squeezed")
