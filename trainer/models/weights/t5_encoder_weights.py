"""Extracts the encoder of a T5 checkpoint, which is all that a verifier or a retriever reads.

google/t5-v1_1-xxl is one pickle of 44.5 GB, of which the encoder is 19.0 GB; every rank of a
machine would read all of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.files import safetensors_file
from trainer.files.build_once import build_once
from trainer.models.weights import weight_files

log = logging.getLogger(__name__)

_WEIGHTS = "model.safetensors"


def encoder_source(source: str, cache_dir: Path) -> str:
    """`source` (a folder or Hub id) when its weights are safetensors, which are read tensor by
    tensor; else a folder of `cache_dir` with the encoder's weights as safetensors, made once
    however many ranks ask at the same time.

    ConfigError when the pickle holds more than tensors, or no T5 encoder.
    """
    files = weight_files.of(source)
    if not files or files[0].suffix == ".safetensors":
        return source  # from_pretrained says what is missing
    config = weight_files.find_file(source, "config.json")
    if config is None:
        return source
    facts = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def build(temporary: Path) -> None:
        log.info("taking the encoder out of %s (once)", ", ".join(file.name for file in files))
        (temporary / "config.json").write_bytes(config.read_bytes())
        tensors: dict[str, Tensor] = {}
        for file in files:
            tensors |= {
                name: tensor
                for name, tensor in weight_files.read_pickle(file).items()
                if name == "shared.weight" or name.startswith("encoder.")
            }
        if "shared.weight" not in tensors:
            tensors["shared.weight"] = tensors.pop("encoder.embed_tokens.weight", torch.empty(0))
        tensors.pop("encoder.embed_tokens.weight", None)  # the same tensor under another name
        if not tensors["shared.weight"].numel() or len(tensors) == 1:
            raise ConfigError(
                f"{files[0]}: holds no T5 encoder (shared.weight, encoder.block...). Use a T5 "
                "checkpoint."
            )
        safetensors_file.write_tensors(temporary, _WEIGHTS, tensors)

    folder = cache_dir / "encoders" / f"{Path(source).name}-{key}"
    return str(build_once(folder, build, is_whole=lambda folder: (folder / _WEIGHTS).is_file()))
