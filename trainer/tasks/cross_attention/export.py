"""The trained layers as a folder: added weights alone, the base by reference with a fingerprint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer import base_model, shards
from trainer.config import Base, Strict, validate
from trainer.errors import ConfigError, ResumeError
from trainer.task import Places
from trainer.tasks.cross_attention.config import Config, Layers
from trainer.tasks.cross_attention.model import CrossAttentionModel
from trainer.tasks.cross_attention.weights import load_added, read_added

DESCRIPTION = "cross_attention.json"


class Reference(Strict):
    """The base model that an export names."""

    base: Base


def write(folder: Path, weights: Mapping[str, Tensor], cfg: Config, *, fingerprint: str, tokenizer: Any) -> None:
    """Write model.safetensors (published names), cross_attention.json and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    shards.write_tensors(folder, "model.safetensors", weights)
    described = cfg.model_dump(mode="json")
    content = {"base": described["base"], "base_fingerprint": fingerprint, "layers": described["layers"]}
    (folder / DESCRIPTION).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.save_pretrained(folder)


def load(folder: Path, places: Places, *, precision: str = "fp32") -> CrossAttentionModel:
    """The base that `folder` refers to with its added layers, in evaluation mode.

    Raises ConfigError when the folder is no export, ResumeError when the base is not the one that was trained on.
    """
    path = folder / DESCRIPTION
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}. Give a best/ or final/ folder of a cross_attention run.") from None
    base = validate(Reference, {"base": content["base"]}, source=str(path)).base
    found, wanted = base_model.fingerprint(base, places), content["base_fingerprint"]
    if found != wanted:
        raise ResumeError(
            f"{folder}: its layers were trained on base {wanted}, but {content['base']!r} is now {found}.\n"
            "Put the old base back: these layers mean nothing on another one."
        )
    layers = validate(Layers, content["layers"], source=str(path))
    model = CrossAttentionModel(base_model.load(base, places, precision=precision), layers)
    load_added(model, read_added(folder), source=str(folder))
    return model.eval()
