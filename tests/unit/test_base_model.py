"""Bases and tokenizers that cannot be used: one ConfigError each, and no code that comes with them
is run.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.facts import LLAMA, write_facts
from tests.wording import refused, says
from trainer.config.identity import exp_id
from trainer.config.schema import ExperimentBase
from trainer.data import vocabulary
from trainer.errors import ConfigError
from trainer.models import base_model, base_source
from trainer.protocol.task import Places


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, a Llama, and tokenizer/."""
    folder = write_facts(tmp_path_factory.mktemp("facts"), train=8, valid=2)
    config = dict(LLAMA["config"])
    family = config.pop("model_type")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config)).save_pretrained(
        folder / "base"
    )
    return folder


def changed(folder: Path, file: str, values: dict[str, Any]) -> Path:
    """The folder, whose JSON file `file` says something else; beside it lies code that leaves a
    file when it is run.
    """
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | values))
    (folder / "mine.py").write_text(f"open({str(folder / 'was_run')!r}, 'w').close()\n")
    return folder


def refusal_of_base(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        base_model.load(
            str(folder), Places(None, folder / "cache", folder / "runs"), precision="fp32"
        )
    assert caught.value.exit_code == 2
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_code_that_comes_with_a_base_or_a_tokenizer_is_never_run_and_nobody_is_asked(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    own = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    base = shutil.copytree(saved / "base", tmp_path / "base")
    changed(base, "config.json", {"model_type": "mine", "auto_map": own})
    says("code_refused", refusal_of_base(base))
    tokenizer = shutil.copytree(saved / "tokenizer", tmp_path / "tokenizer")
    own_tokenizer = {
        "tokenizer_class": "Mine",
        "auto_map": {"AutoTokenizer": ["mine.Tokenizer", None]},
    }
    changed(tokenizer, "tokenizer_config.json", own_tokenizer)
    with refused("code_refused"):
        vocabulary.load_tokenizer(str(tokenizer), data_path=None, cache_dir=tmp_path)
    assert not list(tmp_path.rglob("was_run"))


@pytest.mark.parametrize(
    ("quantization", "method"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq"}, "gptq"),
    ],
)
def test_a_base_whose_weights_are_packed_already_is_refused(
    quantization: dict[str, Any], method: str, saved: Path, tmp_path: Path
) -> None:
    values = {"quantization_config": {"bits": 4, **quantization}}
    base = changed(shutil.copytree(saved / "base", tmp_path / "base"), "config.json", values)
    text = refusal_of_base(base)
    says("base_packed_already", text, method=method, key="train.base_bits")


def test_weights_that_are_no_tensors_torn_or_missing_are_refused(
    saved: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(saved / "base", tmp_path / "base")
    (base / "model.safetensors").write_bytes(b"torn")
    says("weights_unreadable", refusal_of_base(base))
    (base / "model.safetensors").unlink()
    says("base_without_weights", refusal_of_base(base))
    torch.save({"lm_head.weight": Path("no tensor")}, base / "pytorch_model.bin")
    says("base_pickle", refusal_of_base(base))


def test_a_base_may_be_the_best_model_of_another_experiment(tmp_path: Path) -> None:
    """Its last one is the default; either is there only once the run has finished."""
    before = {"task": "vera", "label": "stage A"}
    places, run = Places(None, tmp_path, tmp_path), tmp_path / exp_id(before)
    (run / "best").mkdir(parents=True)
    (run / "best" / "config.json").write_text("{}")
    best = ExperimentBase(experiment=before, model="best")
    with refused("base_run_unfinished"):
        base_source.resolve(best, places)
    (run / "final").mkdir()
    (run / "final" / "config.json").write_text("{}")
    assert base_source.resolve(best, places) == str(run / "best")
    assert base_source.resolve(ExperimentBase(experiment=before), places) == str(run / "final")
    (run / "best" / "config.json").unlink()
    with refused("base_run_without_best", folder=str(run / "best")):
        base_source.resolve(best, places)
