"""What an export says in the words of transformers 4, and that today's version reads both alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from tests.bases import DECODERS, ENCODERS, LLAMA3_ROPE, SEQ2SEQ
from tests.facts import write_facts
from trainer.models.weights import model_folder


def written(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """config.json of an export of this family."""
    family, values = (DECODERS | ENCODERS | SEQ2SEQ)[name]
    config = AutoConfig.for_model(family, **(values | changes))
    model_folder.write_config(folder, config)
    again = AutoConfig.from_pretrained(folder)
    assert _rotations(again) == _rotations(config)
    return json.loads((folder / "config.json").read_text())


def _rotations(config: Any) -> Any:
    """rope_parameters without the name that transformers 4 has for the kind."""
    stated = getattr(config, "rope_parameters", None) or {}
    return json.loads(json.dumps(stated), object_hook=lambda d: {k: d[k] for k in d if k != "type"})


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma2", "phi3"])
def test_the_theta_of_rotations_is_written_for_both_versions(name: str, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    said = written(tmp_path, name, rope_parameters=rope)
    assert said["rope_theta"] == said["rope_parameters"]["rope_theta"] == 5e5
    assert "rope_scaling" not in said


def test_scaled_rotations_are_written_for_both_versions(tmp_path: Path) -> None:
    said = written(tmp_path, "llama 3.2", rope_parameters=LLAMA3_ROPE | {"rope_theta": 5e5})
    assert said["rope_theta"] == 5e5
    assert said["rope_scaling"] == {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}


def test_part_of_a_head_that_rotates_is_written_for_both_versions(tmp_path: Path) -> None:
    assert written(tmp_path, "phi3")["partial_rotary_factor"] == 0.5


def test_rotations_of_two_kinds_of_layers_are_written_for_both_versions(tmp_path: Path) -> None:
    gemma = written(tmp_path / "gemma", "gemma3")
    assert (gemma["rope_theta"], gemma["rope_local_base_freq"]) == (1e4, 100.0)
    assert gemma["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    bert = written(tmp_path / "bert", "modernbert")
    assert (bert["global_rope_theta"], bert["local_rope_theta"]) == (160000.0, 10000.0)


def test_the_rotations_of_both_sides_of_a_t5gemma_are_written(tmp_path: Path) -> None:
    said = written(tmp_path, "t5gemma")
    assert said["encoder"]["rope_theta"] == said["decoder"]["rope_theta"] == 1e4


def test_olmo_2_gets_the_two_keys_that_transformers_4_allows(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
    assert written(tmp_path, "olmo2", rope_parameters=rope)["rope_scaling"] == {
        "type": "linear",
        "factor": 8.0,
    }


def test_an_mt5_is_untied_to_every_version(tmp_path: Path) -> None:
    assert written(tmp_path, "mt5")["tie_word_embeddings"] is False


def test_a_tokenizer_names_nothing_that_only_transformers_5_knows(tmp_path: Path) -> None:
    folder = write_facts(tmp_path / "facts", train=8, valid=2)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>"]})
    model_folder.write_tokenizer(tmp_path / "out", tokenizer)
    said = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert said["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "extra_special_tokens" not in said
    assert said["additional_special_tokens"] == ["<|turn|>"]
    assert said["model_input_names"] == ["input_ids", "attention_mask"]
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.extra_special_tokens == tokenizer.extra_special_tokens
    assert again("Ada<|turn|>")["input_ids"] == tokenizer("Ada<|turn|>")["input_ids"]


def test_an_encoder_alone_gets_no_output_layer() -> None:
    config = {"architectures": ["T5ForConditionalGeneration"], "tie_word_embeddings": False}
    shared = {"shared.weight": torch.ones(4, 8)}
    assert set(model_folder._with_output_layer(shared, config)) == set(shared)
    whole = {**shared, "decoder.final_layer_norm.weight": torch.ones(8)}
    assert set(model_folder._with_output_layer(whole, config)) == {*whole, "lm_head.weight"}
