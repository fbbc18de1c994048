"""Converts verifiers from and to the form of the public releases, which store the head, its bias
and the temperature in unused rows of the embedding.

Source: the model cards of liujch1998/vera and vera-*. Row 32099 of the embedding is the head,
column 0 of row 32098 is its bias, and column 0 of row 32097 is the temperature, 1.0 without
calibration.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.data import vocabulary
from trainer.errors import ConfigError
from trainer.files import safetensors_file
from trainer.files.atomic import new_folder, refuse_existing
from trainer.models.head import HEAD_FILE, write_head
from trainer.models.weights import absent, model_folder
from trainer.tasks.vera.model import read_temperature, write_description

log = logging.getLogger(__name__)

HEAD_ROW, BIAS_ROW, TEMPERATURE_ROW = 32099, 32098, 32097
_SHARED, _WEIGHTS, _CONFIG = "shared.weight", "model.safetensors", "config.json"


def import_model(source: Path, *, out: Path, tokenizer: str | None = None) -> None:
    """Read a public verifier's folder and write ours: the encoder, head.safetensors and the
    temperature in vera.json.

    tokenizer: a folder or Hub id whose tokenizer is written instead of the source's. ConfigError
    when the folder is no packed verifier, or `out` exists; `out` is written whole or not at all.
    """
    refuse_existing(out)
    config, tensors = _read(source)
    shared = tensors[_SHARED].float()
    temperature = float(shared[TEMPERATURE_ROW, 0])
    if not temperature > 0:
        raise ConfigError(
            f"{source}: row {TEMPERATURE_ROW} of its embedding begins with {temperature}, want a "
            "temperature above 0. "
            "This is a plain T5, not a packed verifier: name it as an experiment's base instead."
        )
    head = {"weight": shared[HEAD_ROW].unsqueeze(0), "bias": shared[BIAS_ROW, :1]}
    head = {name: tensor.to(tensors[_SHARED].dtype).contiguous() for name, tensor in head.items()}
    with new_folder(out) as folder:
        _write(folder, config, tensors)
        write_head(folder, head)
        write_description(folder, temperature)
        _copy_tokenizer(source, folder, tokenizer)
    log.info("wrote %s (temperature %.4f)", out, temperature)


def export_model(folder: Path, *, out: Path) -> None:
    """Pack a verifier of ours as the public releases are, for programs that unpack them.

    ConfigError when the folder holds no verifier, its vocabulary has no such rows, or `out` exists.
    """
    if not (folder / HEAD_FILE).is_file():
        raise ConfigError(
            f"{folder} holds no {HEAD_FILE}, so it is no trained verifier. Give a best/ or "
            "final/ folder."
        )
    from safetensors.torch import load_file

    refuse_existing(out)
    config, tensors = _read(folder)
    head = load_file(folder / HEAD_FILE)
    shared = tensors[_SHARED].clone()
    shared[HEAD_ROW] = head["weight"][0].to(shared.dtype)
    shared[BIAS_ROW, 0] = head["bias"][0].to(shared.dtype)
    shared[TEMPERATURE_ROW, 0] = read_temperature(folder)
    with new_folder(out) as new:
        _write(new, {**config, "architectures": ["T5EncoderModel"]}, {**tensors, _SHARED: shared})
        _copy_tokenizer(folder, new, None)
    log.info("wrote %s", out)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the encoder's tensors, the embedding under its name in every T5."""
    from transformers import AutoConfig, T5EncoderModel

    if not (folder / _CONFIG).is_file():
        raise ConfigError(f"{folder} holds no {_CONFIG}. Give the folder of a model.")
    config = json.loads((folder / _CONFIG).read_text())
    if config.get("model_type") != "t5" or int(config.get("vocab_size", 0)) <= HEAD_ROW:
        raise ConfigError(
            f"{folder}: a {config.get('model_type')} of {config.get('vocab_size')} ids; the "
            f"packing wants a t5 of more than {HEAD_ROW}."
        )
    build: Any = T5EncoderModel
    model, report = build.from_pretrained(
        folder,
        config=AutoConfig.from_pretrained(folder, trust_remote_code=False),
        dtype="auto",
        output_loading_info=True,
    )
    absent.refuse_named(report["missing_keys"], str(folder))
    return config, {name: tensor.detach() for name, tensor in model.named_parameters()}


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    safetensors_file.write_tensors(folder, _WEIGHTS, tensors)


def _copy_tokenizer(source: Path, folder: Path, tokenizer: str | None) -> None:
    if tokenizer is not None:
        loaded = vocabulary.load_tokenizer(tokenizer, data_path=None, cache_dir=folder)
        model_folder.write_tokenizer(folder, loaded)
        return
    for name in vocabulary.FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
