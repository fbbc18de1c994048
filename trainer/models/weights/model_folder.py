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
    # tie_word_embeddings=false tells every version of transformers that a T5 does not scale its
    # decoder's output. save_pretrained of 5.x writes tie_word_embeddings=true and
    # scale_decoder_outputs=false instead, which 4.x takes for a T5 v1.0.
    path = folder / "config.json"
    content = json.loads(path.read_text())
    if "scale_decoder_outputs" in content:
        content["tie_word_embeddings"] = content.pop("scale_decoder_outputs")
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    # safetensors' own writer gives the file permissions of its owner alone
    safetensors_file.write_tensors(folder, "model.safetensors", weights)
    tokenizer.save_pretrained(folder)
