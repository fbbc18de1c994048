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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.data import vocabulary
from trainer.errors import ConfigError
from trainer.files import safetensors_file
from trainer.files.atomic import new_folder, refuse_existing
from trainer.models.head import HEAD_FILE, write_head
from trainer.models.weights import absent, model_folder
from trainer.models.weights.pickled import unpickle
from trainer.tasks.vera.model import read_temperature, write_description

log = logging.getLogger(__name__)

HEAD_ROW, BIAS_ROW, TEMPERATURE_ROW = 32099, 32098, 32097
_EMBEDDING_TWICE = "encoder.embed_tokens.weight"  # the same tensor as shared.weight
_SHARED, _WEIGHTS, _CONFIG = "shared.weight", "model.safetensors", "config.json"


def import_model(source: Path, *, out: Path, tokenizer: str | None = None) -> None:
    """Read a public verifier's folder, or a checkpoint of the published run.py (.pth), and write
    ours: the encoder, head.safetensors and the temperature in vera.json.

    tokenizer: a folder or Hub id whose tokenizer is written instead of the source's; a checkpoint
    holds none. ConfigError when the source is no verifier, or `out` exists; `out` is written whole
    or not at all.
    """
    refuse_existing(out)
    if source.is_file():
        _import_checkpoint(source, out, tokenizer)
        return
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


def _import_checkpoint(file: Path, out: Path, tokenizer: str | None) -> None:
    """Write the model of a file that run.py saved: {"model": the encoder's state, "linear": the
    head's, "step", "eval_accs"}. It is not calibrated: its temperature is 1.
    """
    content: Any = unpickle(file)
    is_ours = isinstance(content, dict) and {"model", "linear"} <= content.keys()
    if not is_ours or not all(isinstance(content[name], dict) for name in ("model", "linear")):
        raise ConfigError(
            f"{file}: got no checkpoint of Vera's run.py, want a pickle of {{'model', 'linear', "
            "'step', 'eval_accs'}. Give such a file, or the folder of a public verifier."
        )
    tensors, head = content["model"], content["linear"]
    if _SHARED not in tensors or not {"weight", "bias"} <= head.keys():
        raise ConfigError(
            f"{file}: holds no T5 encoder ({_SHARED}, encoder.block...) with a head. Checkpoints "
            "of the T5 are read, not those of a LLaMA."
        )
    tensors = {name: one for name, one in tensors.items() if name != _EMBEDDING_TWICE}
    with new_folder(out) as folder:
        _write(folder, _config_of(tensors, file), tensors)
        write_head(folder, {name: head[name].contiguous() for name in ("weight", "bias")})
        write_description(folder, 1.0)
        if tokenizer is not None:
            _copy_tokenizer(file.parent, folder, tokenizer)
    log.info("wrote %s (step %s)", out, content.get("step"))
    if tokenizer is None:
        log.info("the file holds no tokenizer: name that of its T5 in the experiment's tokenizer")


def _config_of(tensors: Mapping[str, Tensor], file: Path) -> dict[str, Any]:
    """The config.json of an encoder: sizes by the tensors' shapes, all else as T5 v1.1 has it."""
    block = "encoder.block.0.layer."
    names = [
        _SHARED,
        f"{block}0.SelfAttention.relative_attention_bias.weight",
        f"{block}0.SelfAttention.q.weight",
        f"{block}1.DenseReluDense.wo.weight",
    ]
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ConfigError(f"{file}: a whole T5 encoder is wanted, but {missing[0]} is missing.")
    (vocabulary_size, width), (buckets, heads), (inner, _), (_, hidden) = (
        tensors[name].shape for name in names
    )
    blocks = {name.split(".")[2] for name in tensors if name.startswith("encoder.block.")}
    is_gated = f"{block}1.DenseReluDense.wi_0.weight" in tensors
    return {
        "model_type": "t5",
        "architectures": ["T5EncoderModel"],
        "vocab_size": vocabulary_size,
        "d_model": width,
        "d_kv": inner // heads,
        "d_ff": hidden,
        "num_layers": len(blocks),
        "num_decoder_layers": 0,
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "gated-gelu" if is_gated else "relu",
        "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-6,
        "is_encoder_decoder": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }


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
