"""Files of a base that transformers would follow, build or read in its own way: read as it reads
them, or refused with their name.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.bases import DECODERS, SEQ2SEQ
from tests.facts import LLAMA, write_facts
from tests.wording import fault, refused, says
from trainer.config.schema import RandomBase
from trainer.data import vocabulary
from trainer.data.chat.chat_template import ChatTemplate
from trainer.errors import ConfigError
from trainer.models import base_model, base_source
from trainer.models.weights import unsound
from trainer.protocol.task import Places

HERE = Places(None, Path("unused"), Path("unused"))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# as transformers 4 wrote them
EARLIER = {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "torch_dtype": "bfloat16"}
EARLIER |= {"transformers_version": "4.45.0", "mlp_scale_of_a_fork": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, a Llama, and tokenizer/."""
    folder = write_facts(tmp_path_factory.mktemp("facts"), train=8, valid=2)
    config = dict(LLAMA["config"])
    family = config.pop("model_type")
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    made.save_pretrained(folder / "base")
    return folder


def random_base(**changes: Any) -> RandomBase:
    return RandomBase(config={**LLAMA["config"], **changes})


def refusal(base: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        base_model.skeleton(base, HERE)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_dictionary_that_transformers_4_wrote_says_what_its_file_says(tmp_path: Path) -> None:
    stated = random_base(**EARLIER)
    (tmp_path / "config.json").write_text(json.dumps(stated.config))
    of_file, of_dictionary = AutoConfig.from_pretrained(tmp_path), base_source.random_config(stated)
    assert of_dictionary.rope_parameters == of_file.rope_parameters
    assert of_dictionary.rope_parameters["rope_theta"] == 500000.0
    assert of_dictionary.rope_parameters["rope_type"] == "llama3"
    assert of_dictionary.dtype == of_file.dtype == torch.bfloat16
    assert stated.config["rope_scaling"] == LLAMA3, "the dictionary is as it was"


def test_a_gemma_3_that_transformers_4_wrote_has_both_its_rotations() -> None:
    family, values = DECODERS["gemma3"]
    own = {key: value for key, value in values.items() if key != "rope_parameters"}
    earlier = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "model_type": family}
    config = base_source.random_config(RandomBase(config={**own, **earlier}))
    thetas = {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()}
    assert thetas == {"sliding_attention": 1e4, "full_attention": 1e6}


def test_a_key_of_rotations_in_a_family_that_rotates_nothing_is_refused() -> None:
    family, values = SEQ2SEQ["t5"]
    stated = RandomBase(config={**values, "model_type": family, "rope_theta": 1e4})
    assert "base.config.rope_theta: no such key" in refusal(stated)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, want at most"),
        ({"hidden_size": -32}, "hidden_size=-32, want at least 1"),
        ({"intermediate_size": -1}, "intermediate_size=-1, want at least 1"),
        ({"hidden_size": 10**12, "head_dim": 10**12}, "calculation overflowed"),
        ({"num_attention_heads": 0}, "zero"),
        ({"dtype": "float99"}, "dtype='float99' is no dtype of torch"),
        ({"torch_dtype": "nn"}, "torch_dtype='nn' is no dtype of torch"),
        ({"hidden_act": "none_such"}, "none_such"),
        ({"rope_scaling": {"rope_type": "none_such", "factor": 2.0}}, "none_such"),
    ],
)
def test_a_config_that_no_model_can_have_is_refused(
    changes: dict[str, Any], words: str, saved: Path, tmp_path: Path
) -> None:
    assert words in refusal(random_base(**changes))
    base = shutil.copytree(saved / "base", tmp_path / "base")
    content = json.loads((base / "config.json").read_text()) | changes
    (base / "config.json").write_text(json.dumps(content))
    assert words in refusal(str(base))


def test_sizes_of_a_part_are_looked_at() -> None:
    family, values = SEQ2SEQ["t5gemma"]
    inner = {**values, "decoder": {**values["decoder"], "num_hidden_layers": 10**9}}
    text = refusal(RandomBase(config={**inner, "model_type": family}))
    assert "base.config.decoder.num_hidden_layers" in text


@pytest.mark.parametrize("name", ["../../x.safetensors", "/etc/x.safetensors", 3])
def test_an_index_that_leads_out_of_its_folder_is_refused(
    name: Any, saved: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(saved / "base", tmp_path / "base")
    (base / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    is_path = isinstance(name, str)
    said = fault("index_leads_out", file=name) if is_path else fault("index_unreadable")
    with refused(said, index="model.safetensors.index.json"):
        base_model.load(str(base), HERE, precision="fp32")


def test_a_chat_template_that_calls_itself_without_an_end_is_refused(saved: Path) -> None:
    tokenizer = vocabulary.load_tokenizer(str(saved / "tokenizer"), data_path=None, cache_dir=saved)
    tokenizer.chat_template = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"
    with refused("template_endless"):
        ChatTemplate.of(tokenizer, None, None).opened(
            {"messages": [{"role": "user", "content": "a"}]}
        )


@pytest.mark.parametrize("named", [None, "GPT2Tokenizer", "Qwen2Tokenizer", "TokenizersBackend"])
@pytest.mark.parametrize("family", ["gpt_bigcode", "llama", "mistral", "phi3", "qwen3", "gemma2"])
def test_a_vocabulary_and_merges_without_tokenizer_json_load(
    family: str, named: str | None, saved: Path, tmp_path: Path
) -> None:
    content = json.loads((saved / "tokenizer" / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    end = "<|endoftext|>"
    said = {"eos_token": end, "bos_token": end, "unk_token": end}
    said |= {} if named is None else {"tokenizer_class": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    whole, parts = (
        vocabulary.load_tokenizer(str(folder), data_path=None, cache_dir=tmp_path)
        for folder in (saved / "tokenizer", tmp_path)
    )
    text = "Where does Ada keep the red key? Überall."
    assert parts(text)["input_ids"] == whole(text)["input_ids"]
    assert vocabulary.eos_id(parts) == 0


def test_weights_that_are_no_finite_numbers_are_named_with_their_file(
    saved: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(saved / "base", tmp_path / "base")
    name, other = "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(base / "model.safetensors")
    how = {"happened": "The scores are not finite"}
    unsound.refuse([str(base)], torch.float16, **how)
    weights[name][0, 0], weights[other][0, 0] = float("nan"), 1e6
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with refused("weight_not_finite", at=base / "model.safetensors", name=name) as caught:
        unsound.refuse([str(base)], torch.float16, **how)
    says("weights_not_finite", caught.value, **how)
    says("weight_too_large", caught.value, name=other, dtype="float16")
    with pytest.raises(ConfigError) as caught:
        unsound.refuse([str(base)], torch.bfloat16, **how)
    assert other not in str(caught.value)
