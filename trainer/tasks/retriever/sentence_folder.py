"""Writes the files that sentence-transformers needs beside the weights to make the same vectors:
modules.json and a folder for each module.

They have the form of its version 2, which later versions read as well (6.2 is tested).
"""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.files import safetensors_file

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.tasks.retriever.config import Config, Encoder

MODULES = "modules.json"
_KEYS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "eos": "pooling_mode_lasttoken",
}
_POOLING, _DENSE, _NORMALIZE = "1_Pooling", "2_Dense", "{}_Normalize"

_log = logging.getLogger(__name__)


def can_say(cfg: Config) -> bool:
    """Whether sentence-transformers can express this retriever: one whole encoder for both sides,
    its projection included, with the tokenizer's own special tokens.
    """
    projection = cfg.encoder.projection
    is_one = cfg.encoder.tied and (projection is None or projection.tied is not False)
    return is_one and not cfg.exports_adapters and not cfg.data.append_eos


def with_pad(tokenizer: Any) -> Any:
    """The tokenizer with a token to pad with, which sentence-transformers wants even for one text.
    Pads are masked, so the one that ends or begins texts will do.
    """
    if tokenizer.pad_token is not None:
        return tokenizer
    padding = copy.deepcopy(tokenizer)
    padding.pad_token = tokenizer.eos_token or tokenizer.bos_token
    return padding


def write(folder: Path, cfg: Config, *, width: int, pooler: dict[str, Tensor]) -> None:
    """Write the modules of a retriever whose states have `width` numbers.

    pooler: its weights by name (linear_q.weight, linear_q.bias), or an empty dictionary. The
    prefixes of queries and passages become the prompts of encode_query and encode_document. The
    longer of the two limits is written for both sides. The temperature is left out, for it does not
    change a vector.
    """
    how, data = cfg.encoder, cfg.data
    dense = {f"linear.{name.partition('.')[2]}": values for name, values in pooler.items()}
    _write_json(
        folder / "sentence_bert_config.json",
        {"max_seq_length": max(data.query_tokens, data.passage_tokens), "do_lower_case": False},
    )
    _write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": {"query": data.query_prefix, "document": data.passage_prefix},
            "default_prompt_name": None,
            "similarity_fn_name": "dot",
        },
    )
    pooling = {key: name == how.pooling for name, key in _KEYS.items()}
    _write_json(folder / _POOLING / "config.json", {"word_embedding_dimension": width, **pooling})
    modules = [("", "Transformer"), (_POOLING, "Pooling")]
    if dense:
        out_width, in_width = dense["linear.weight"].shape
        (folder / _DENSE).mkdir(exist_ok=True)
        _write_json(
            folder / _DENSE / "config.json",
            {
                "in_features": in_width,
                "out_features": out_width,
                "bias": "linear.bias" in dense,
                "activation_function": "torch.nn.modules.linear.Identity",
            },
        )
        safetensors_file.write_tensors(folder / _DENSE, "model.safetensors", dense)
        modules.append((_DENSE, "Dense"))
    if how.normalize:
        place = _NORMALIZE.format(len(modules))
        (folder / place).mkdir(exist_ok=True)
        modules.append((place, "Normalize"))
    _write_json(
        folder / MODULES,
        [
            {
                "idx": index,
                "name": str(index),
                "path": place,
                "type": f"sentence_transformers.models.{kind}",
            }
            for index, (place, kind) in enumerate(modules)
        ],
    )


def warn_of_another(folder: Path, how: Encoder) -> None:
    """Log a warning when an experiment's pooling or normalisation differs from what a
    sentence-transformers folder, its base, was trained with.
    """
    settings = _settings_of(folder)
    ours = {"pooling": how.pooling, "normalize": how.normalize}
    other = {name: value for name, value in settings.items() if value != ours[name]}
    if other:
        _log.warning(
            "%s was trained with %s, this experiment says %s: what it learnt may be lost",
            folder,
            ", ".join(f"encoder.{name}={value!r}" for name, value in other.items()),
            ", ".join(f"{name}={ours[name]!r}" for name in other),
        )


def _settings_of(folder: Path) -> dict[str, Any]:
    """pooling and normalize of a folder that sentence-transformers wrote; {} for another folder.
    A pooling that we do not have is left out.
    """
    try:
        modules = json.loads((folder / MODULES).read_text())
        kinds = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
        config = json.loads((folder / kinds["Pooling"] / "config.json").read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    names = [name for name, key in _KEYS.items() if config.get(key)]
    mode = {"lasttoken": "eos"}.get(config.get("pooling_mode"), config.get("pooling_mode"))
    pooling = names[0] if len(names) == 1 else mode
    keys = {"pooling": pooling} if pooling in _KEYS else {}
    return {**keys, "normalize": "Normalize" in kinds}


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")
