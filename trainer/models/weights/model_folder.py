"""Writes model folders that transformers 4.57 and 5 both load, with the same results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.files import safetensors_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TRIED = ("4.57.6", "5.23.0")
"""Versions of transformers that load every export with the same logits: make test-long."""
_TIED, _SHARED, _HEAD = "tie_word_embeddings", "shared.weight", "lm_head.weight"
_FULL, _WINDOW = "full_attention", "sliding_attention"
# What transformers 4 calls the thetas of layers that see all, and of layers that see a window.
_THETAS = {"modernbert": ("global_rope_theta", "local_rope_theta")}
_OTHER_THETAS = ("rope_theta", "rope_local_base_freq")
# They want this name of the kind, and no other key than its own.
_STRICT = ("olmo", "olmo2", "olmo3", "phi3")
_NO_SCALING = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def write(
    folder: Path, config: PretrainedConfig, tokenizer: Any, weights: dict[str, torch.Tensor]
) -> None:
    """Write a model folder that from_pretrained loads: config.json, model.safetensors, tokenizer
    files.
    """
    write_config(folder, config)
    weights = _with_output_layer(weights, json.loads((folder / "config.json").read_text()))
    # safetensors' own writer gives the file permissions of its owner alone
    safetensors_file.write_tensors(folder, "model.safetensors", weights)
    write_tokenizer(folder, tokenizer)


def write_config(folder: Path, config: PretrainedConfig) -> None:
    """Write config.json as save_pretrained does, with what transformers 4 reads beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(for_all_versions(values), indent=2, sort_keys=True) + "\n")


def write_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Write a tokenizer's files as save_pretrained does, in names that transformers 4 knows too."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text())
    if values.get("tokenizer_class") == "TokenizersBackend":
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(values.get("extra_special_tokens"), list):
        # transformers 4 wants a dictionary under the new name; 5 reads the earlier one, too
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    values.pop("truncation_side", None)  # every task cuts texts at their end, which is the default
    # 4 takes token_type_ids, too, where nothing is said
    values.setdefault("model_input_names", list(tokenizer.model_input_names))
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _with_output_layer(
    weights: dict[str, torch.Tensor], config: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """The weights of a T5, with its output layer by name where the config calls it untied.

    transformers 5 shares the embedding where the file lacks the layer, or holds the same values; 4
    draws what the file lacks.
    """
    kind = (config.get("architectures") or [""])[0]
    is_untied = kind.endswith("ForConditionalGeneration") and not config.get(_TIED, True)
    writes_text = any(name.startswith("decoder.") for name in weights)  # not a verifier's encoder
    if not is_untied or not writes_text or _SHARED not in weights:
        return weights
    return {_HEAD: weights[_SHARED].clone(), **weights}


def for_all_versions(config: dict[str, Any]) -> dict[str, Any]:
    """What a config.json of transformers 5 says, and the same in the words of transformers 4.

    - A T5: tie_word_embeddings=false says "the decoder's output is not scaled" to every version.
      save_pretrained of 5 writes tie_word_embeddings=true and scale_decoder_outputs=false instead,
      which 4 takes for a T5 v1.0. An mT5's output is never scaled.
    - Rotations: 4 reads rope_theta and rope_scaling, 5 reads rope_parameters. 4 does not warn of a
      missing rope_theta: it takes 10,000.
    """
    values = {
        key: for_all_versions(value) if isinstance(value, dict) else value
        for key, value in config.items()
    }
    if "scale_decoder_outputs" in values:
        values[_TIED] = values.pop("scale_decoder_outputs")
    if values.get("model_type") == "mt5":  # 4 scales the decoder's output where it is true
        values[_TIED] = False
    rotations = values.get("rope_parameters")
    if isinstance(rotations, dict):
        values |= _earlier_rotations(rotations, str(values.get("model_type")))
    return values


def _earlier_rotations(rotations: dict[str, Any], model_type: str) -> dict[str, Any]:
    """rope_theta, rope_scaling and what else transformers 4 reads instead of rope_parameters."""
    of_full, of_window = rotations.get(_FULL), rotations.get(_WINDOW)
    if of_full is None and of_window is None:
        return _of_one(rotations, "rope_theta", model_type)
    full, window = _THETAS.get(model_type, _OTHER_THETAS)
    earlier = {} if of_full is None else _of_one(of_full, full, model_type)
    return earlier if of_window is None else earlier | {window: of_window["rope_theta"]}


def _of_one(rotation: dict[str, Any], theta: str, model_type: str) -> dict[str, Any]:
    earlier: dict[str, Any] = {}
    if rotation.get("rope_theta") is not None:
        earlier[theta] = rotation["rope_theta"]
    if rotation.get("partial_rotary_factor") is not None:
        earlier["partial_rotary_factor"] = rotation["partial_rotary_factor"]
    kind = rotation.get("rope_type", "default")
    if kind == "default":
        return earlier
    more = {key: value for key, value in rotation.items() if key not in _NO_SCALING}
    name = "rope_type"
    if kind in ("linear", "dynamic"):
        more = {"factor": float(rotation["factor"])}
    if kind == "longrope" and model_type == "phi3":
        more = {key: rotation[key] for key in ("short_factor", "long_factor")}
    if model_type in _STRICT:
        name = "type"
    return {**earlier, "rope_scaling": {name: kind, **more}}
