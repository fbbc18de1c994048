"""What plain transformers needs beside the added layers: config.json, the file of code that it
names, and how answers are generated.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from trainer.config.block import validate
from trainer.config.schema import RandomBase
from trainer.data import vocabulary
from trainer.models import adapters
from trainer.models.decoder.backbone import backbone_of
from trainer.models.weights import generation_file, model_folder
from trainer.tasks.cross_attention import modeling_cross_attention
from trainer.tasks.cross_attention.config import Data, Layers
from trainer.tasks.cross_attention.decoder.shape import added_indices, layer_shape
from trainer.tasks.cross_attention.text import templates

_CONFIG = modeling_cross_attention.LatheCrossAttentionConfig
CODE = Path(modeling_cross_attention.__file__)
_QUESTION = "{question}"  # stands where the question does


def write(
    folder: Path,
    content: Mapping[str, Any],
    stock: Any,
    *,
    source: str | RandomBase,
    tokenizer: Any,
    ends: int | list[int],
) -> None:
    """Add those files to an export.

    content: its cross_attention.json. stock: the base, perhaps on the meta device. source: where it
    is, as base_source.resolve says, or "./base". ends: the tokens that end an answer.
    """
    shutil.copyfile(CODE, folder / CODE.name)
    layers = validate(Layers, content["layers"], source="layers")
    data = validate(Data, content["data"], source="data")
    ids: dict[str, Any] = {
        "eos_token_id": vocabulary.eos_id(tokenizer),
        "pad_token_id": vocabulary.pad_id(tokenizer),
    }
    of_base = stock.config.to_dict()
    of_base.pop("_name_or_path", None)
    config = {
        "model_type": _CONFIG.model_type,
        "architectures": ["LatheCrossAttentionForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{CODE.stem}.LatheCrossAttentionConfig",
            "AutoModelForCausalLM": f"{CODE.stem}.LatheCrossAttentionForCausalLM",
        },
        "base": source.model_dump() if isinstance(source, RandomBase) else source,
        "base_config": model_folder.for_all_versions(of_base),
        "layers": _layers(layers, stock),
        "text": _text(data, tokenizer),
        "has_adapters": adapters.are_in(folder),
        "dtype": {"bf16": "bfloat16", "fp16": "float16"}.get(content["precision"], "float32"),
        **ids,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    most = data.answer_tokens
    ids["eos_token_id"] = ends
    generation_file.write(folder, stock.config, **ids, max_new_tokens=most, do_sample=False)


def _layers(layers: Layers, stock: Any) -> dict[str, Any]:
    backbone = backbone_of(stock, advice="")
    shape = layer_shape(layers, backbone)
    rotary = shape.rotary
    values = asdict(shape)
    for name in ("rotary", "attention_dropout", "residual_dropout"):
        del values[name]
    return values | {
        "indices": added_indices(layers, len(backbone.blocks)),
        "after": layers.after,
        "shared_weights": layers.shared_weights,
        "kv_heads": shape.heads if rotary is None else rotary.key_value_heads,
        "rope_theta": None if rotary is None else rotary.theta,
        "attention_bias": rotary is None or rotary.has_bias,
    }


def _text(data: Data, tokenizer: Any) -> dict[str, Any]:
    """How questions and contexts are written."""
    header = templates.context_text(
        _QUESTION, [""], data.template, question_on_context=data.question_on_context
    )
    return {
        "prompt": templates.prompt(_QUESTION, data.template),
        "context": header,
        "before_answer": templates.answer("", data.template) if data.template == "bare" else "",
        "question_on_context": data.question_on_context,
        "chunked": data.chunked,
        "decoder_tokens": data.decoder_tokens,
        "context_tokens": data.context_tokens,
        "opening": vocabulary.opening_of(tokenizer),
    }


# so that the tokenizer beside it is read here without running the folder's code
AutoConfig.register(_CONFIG.model_type, _CONFIG, exist_ok=True)
