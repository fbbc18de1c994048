"""A folder that from_pretrained of every version of transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.files import safetensors_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def write(
    folder: Path, config: PretrainedConfig, tokenizer: Any, weights: dict[str, torch.Tensor]
) -> None:
    """Write a model folder that from_pretrained loads: config.json, model.safetensors, tokenizer
    files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    _write_scaling_for_all_versions(folder / "config.json")
    # safetensors' own writer gives the file permissions of its owner alone
    safetensors_file.write_tensors(folder, "model.safetensors", weights)
    tokenizer.save_pretrained(folder)


def _write_scaling_for_all_versions(path: Path) -> None:
    """Write whether a T5 scales its decoder's output as all versions of transformers read it.

    tie_word_embeddings=false says "unscaled" to every version. save_pretrained of 5.x writes
    tie_word_embeddings=true and scale_decoder_outputs=false instead, which 4.x takes for a T5 v1.0.
    """
    config = json.loads(path.read_text())
    if "scale_decoder_outputs" in config:
        config["tie_word_embeddings"] = config.pop("scale_decoder_outputs")
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
