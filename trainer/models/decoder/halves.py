"""Makes an encoder-decoder of a decoder-only base: both halves begin with its weights.

Two halves with random weights would first have to learn that a token of a document and the same
token of a summary are the same; two halves of one language model know it (docs/log.md). Source:
T5Gemma 2 (arXiv 2512.14856), which begins with a Gemma 3 in both halves. The end of the encoder is
our own: its last block begins as the identity, and its last norm is that block's first norm, so
that the decoder's last block finds in the document what it used to find in the text before it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.files import safetensors_file
from trainer.files.build_once import build_once
from trainer.models.families import FAMILIES, HALVES
from trainer.models.weights import weight_files

if TYPE_CHECKING:
    from trainer.config.schema import Adapted

log = logging.getLogger(__name__)

_WEIGHTS = "model.safetensors"
_RENAMED = {
    "pre_self_attn_layernorm": "input_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
}
# A T5Gemma 2 reads pictures, too. Here it gets none, so that part is as small as possible, and its
# weights are 0.
NO_PICTURES: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def adapted_source(source: str, adapted: Adapted, cache_dir: Path) -> str:
    """A folder of `cache_dir` with the T5Gemma 2 whose halves begin with the weights of `source`
    (the folder of a model of families.HALVES), made once however many ranks ask.

    ConfigError when the base is of another family, or its weights are not safetensors.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    if config.model_type not in HALVES:
        names = " or a ".join(FAMILIES[model_type].name for model_type in HALVES)
        raise ConfigError(
            f"base.adapted: a {config.model_type} ({source}), want a {' or a '.join(HALVES)}. "
            f"Leave `adapted` out, or take a {names} for texts."
        )
    files = weight_files.of(source)
    if not files or files[0].suffix != ".safetensors":
        raise ConfigError(
            f"base.adapted: {source} holds no safetensors. Save its weights with "
            "model.save_pretrained(FOLDER)."
        )
    facts = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    made_from = json.dumps([facts, adapted.model_dump()])
    key = hashlib.sha256(made_from.encode()).hexdigest()[:16]

    def build(temporary: Path) -> None:
        log.info("making a T5Gemma 2 out of %s (once)", source)
        for file in Path(source).iterdir():
            if file.is_file() and file.name not in {"config.json", *(f.name for f in files)}:
                shutil.copy(file, temporary)  # the tokenizer
        from transformers import T5Gemma2Config, T5Gemma2DecoderConfig

        keys = T5Gemma2DecoderConfig().to_dict().keys() - {"model_type"}
        side = {key: value for key, value in config.to_dict().items() if key in keys}
        side["sliding_window"] = adapted.window or config.sliding_window
        ends = {key: side[key] for key in ("eos_token_id", "pad_token_id", "bos_token_id")}
        no_token = config.vocab_size  # an id beyond the vocabulary: no token stands for a picture
        whole = T5Gemma2Config(
            encoder={
                "text_config": side,
                "vision_config": NO_PICTURES,
                "mm_tokens_per_image": 4,
                "eoi_token_index": no_token,
                "initializer_range": config.initializer_range,
            },
            decoder=side,
            image_token_index=no_token + 1,
            initializer_range=config.initializer_range,
            architectures=["T5Gemma2ForConditionalGeneration"],
            **ends,
        )
        whole.save_pretrained(temporary)
        safetensors_file.write_tensors(temporary, _WEIGHTS, _weights(whole, source))

    folder = cache_dir / "adapted" / key
    return str(build_once(folder, build, is_whole=lambda folder: (folder / _WEIGHTS).is_file()))


def _weights(config: Any, source: str) -> dict[str, Tensor]:
    """Every weight of the encoder-decoder by its name; those that read pictures are zero."""
    from transformers import T5Gemma2ForConditionalGeneration

    with torch.device("meta"):
        model = T5Gemma2ForConditionalGeneration(config)
    tied = set(model.all_tied_weights_keys)
    last = config.decoder.num_hidden_layers - 1
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    origins = {name: _origin(name, last) for name in weights}
    of_source = weight_files.tensors(source, {name for name in origins.values() if name})
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        origin = origins[name]
        tensors[name] = torch.zeros(tensor.shape) if origin is None else of_source[origin].clone()
        if ".encoder." in name and f".layers.{last}.post_" in name:
            tensors[name] = torch.full_like(tensors[name], -1.0)  # its norms multiply by 1 + weight
    return tensors


def _origin(name: str, last: int) -> str | None:
    """The weight of the source that `name` begins with; None if `name` reads pictures."""
    if "vision" in name or "multi_modal" in name or "eoi" in name:
        return None
    _, _, of_layer = name.partition(".layers.")
    if of_layer:
        for theirs, own in _RENAMED.items():
            of_layer = of_layer.replace(theirs, own)
        return f"model.layers.{of_layer}"
    if name.endswith("embed_tokens.weight"):
        return "model.embed_tokens.weight"
    if ".encoder." in name:
        return f"model.layers.{last}.input_layernorm.weight"
    return "model.norm.weight"
