"""A trained model of late interaction as a folder: the body as transformers saves it, how texts
become vectors, and the modules of a MultiVectorEncoder of sentence-transformers (6.2), of which the
projection is one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.config.block import validate
from trainer.errors import ConfigError
from trainer.files import safetensors_file
from trainer.files.atomic import write_json
from trainer.models.weights import weight_files
from trainer.tasks.retriever.config import Late
from trainer.tasks.retriever.export import DESCRIBED_DATA, OF_LATE
from trainer.tasks.retriever.sentence_folder import MODULES

if TYPE_CHECKING:
    from trainer.tasks.retriever.config import Config

DENSE = "1_Dense"
_MASK, _NORMALIZE = "2_MultiVectorMask", "3_Normalize"
_WEIGHT = "linear.weight"  # of a Dense module, and of the ColBERT of its authors
_CLASSES = {
    "": "base.modules.transformer.Transformer",
    DENSE: "base.modules.dense.Dense",
    _MASK: "multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
    _NORMALIZE: "base.modules.normalize.Normalize",
}


def can_say(cfg: Config) -> bool:
    """Whether sentence-transformers can express this model: whole, with the tokenizer's own special
    tokens.
    """
    return not cfg.exports_adapters and not cfg.data.append_eos


def write(folder: Path, cfg: Config, projection_EW: Tensor, *, skipped_words: list[str]) -> None:
    """Add to a body's folder what this form has besides. skipped_words: passages' tokens without a
    vector.
    """
    said = {name: cfg.data.model_dump()[name] for name in DESCRIBED_DATA}
    write_json(folder / OF_LATE, {**said, **cfg.late.model_dump(mode="json")})
    (folder / DENSE).mkdir(exist_ok=True)
    width, in_width = projection_EW.shape
    write_json(
        folder / DENSE / "config.json",
        {
            "in_features": in_width,
            "out_features": width,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
            "module_input_name": "token_embeddings",
            "module_output_name": "token_embeddings",
        },
    )
    safetensors_file.write_tensors(folder / DENSE, "model.safetensors", {_WEIGHT: projection_EW})
    if can_say(cfg):
        _write_modules(folder, cfg, skipped_words)


def _write_modules(folder: Path, cfg: Config, skipped_words: list[str]) -> None:
    data, how = cfg.data, cfg.late
    expansion = {"strategy": "fixed", "attend": how.attend, "length": data.query_tokens}
    write_json(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "query_length": data.query_tokens,
            "document_length": data.passage_tokens,
            "query_expansion": {**expansion, "token": None} if how.expand else None,
        },
    )
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "MultiVectorEncoder",
            "prompts": {"query": data.query_prefix, "document": data.passage_prefix},
            "default_prompt_name": None,
            "similarity_fn_name": "meanmaxsim" if how.mean else "maxsim",
        },
    )
    token_level = {"module_input_name": "token_embeddings"}
    for name, values in {
        _MASK: {"skiplist_words": skipped_words, "skiplist_tasks": ["document"]},
        _NORMALIZE: {**token_level, "module_output_name": "token_embeddings"},
    }.items():
        (folder / name).mkdir(exist_ok=True)
        write_json(folder / name / "config.json", values)
    write_json(
        folder / MODULES,
        [  # pyright: ignore[reportArgumentType] (a list is JSON, too)
            {
                "idx": index,
                "name": str(index),
                "path": path,
                "type": f"sentence_transformers.{kind}",
            }
            for index, (path, kind) in enumerate(_CLASSES.items())
        ],
    )


def read_description(folder: Path) -> tuple[dict[str, Any], Late] | None:
    """The keys of `data` (DESCRIBED_DATA) and of `late` that the model in a folder was trained
    with; None where the folder does not say. ConfigError when it is malformed.
    """
    path = folder / OF_LATE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
        data = {name: values.pop(name) for name in DESCRIBED_DATA}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: {error!r}. Export the model again.") from None
    return data, validate(Late, values, source=str(path))


@torch.no_grad()
def fill_head(head: nn.Linear, source: str) -> bool:
    """Fill the projection from a folder or Hub id: of ours, of sentence-transformers or PyLate, or
    of ColBERT's authors; False where it has none. ConfigError for one that does something else than
    ours, or of another size.
    """
    weight = _of_dense(source)
    if weight is None:
        weight = weight_files.tensors(source, {_WEIGHT}).get(_WEIGHT)
    if weight is None:
        return False
    if weight.shape != head.weight.shape:
        raise ConfigError(
            f"late.width={head.weight.shape[0]}: got a base, {source}, whose projection makes "
            f"vectors of {weight.shape[0]} numbers from {weight.shape[1]}. Say "
            f"late.width={weight.shape[0]}, or take a base without a projection."
        )
    head.weight.copy_(weight)
    return True


def _of_dense(source: str) -> Tensor | None:
    """The weight of the Dense module on the vectors of tokens, which must be the only one."""
    from safetensors.torch import load_file

    is_ours = weight_files.find_file(source, OF_LATE) is not None
    paths = [DENSE] if is_ours else _dense_layers(source)
    if not paths:
        return None
    file = weight_files.find_file(source, f"{paths[0]}/model.safetensors")
    if file is None and not is_ours:
        raise ConfigError(
            f"base: {source} projects its vectors, and {paths[0]} holds no model.safetensors, want "
            "its weights there. Save it with safetensors, or copy it again."
        )
    if file is None:
        return None
    config = weight_files.find_file(source, f"{paths[0]}/config.json")
    values: dict[str, Any] = {} if config is None else json.loads(config.read_text())
    others = {name: values.get(name) for name in ("bias", "use_residual") if values.get(name)}
    if not str(values.get("activation_function", "")).endswith("Identity"):
        others["activation_function"] = values.get("activation_function")
    if others or len(paths) > 1:
        got = f"{len(paths)} layers" if len(paths) > 1 else ", ".join(map(str, others.items()))
        raise ConfigError(
            f"base: {source} projects its vectors with {got}, want a single linear layer for "
            'form="late". Take another base.'
        )
    return load_file(file).get(_WEIGHT)


def _dense_layers(source: str) -> list[str]:
    """The folders of the Dense modules that sentence-transformers puts on the vectors of tokens."""
    listed = weight_files.find_file(source, MODULES)
    modules: list[Mapping[str, Any]] = [] if listed is None else json.loads(listed.read_text())
    kinds = [one["type"].rpartition(".")[2] for one in modules]
    if "Pooling" in kinds:  # then they are on one vector for a text
        return []
    return [one["path"] for one, kind in zip(modules, kinds, strict=True) if kind == "Dense"]
