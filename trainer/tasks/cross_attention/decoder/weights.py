"""Reads the added layers' weights from exports and published checkpoints, under the published
names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import ConfigError
from trainer.models.frozen.freezing import load_into
from trainer.models.weights import weight_files

if TYPE_CHECKING:
    from trainer.tasks.cross_attention.decoder.model import CrossAttentionModel

PREFIX = "cross_attn_layers."
_INDEXED = re.compile(r"cross_attn_layers\.(\d+)\.(.+)")


def added_weights(model: CrossAttentionModel) -> dict[str, Tensor]:
    """The added layers' tensors by published name, detached and not copied. A shared layer stands
    once, under its lowest index.
    """
    return {
        PREFIX + name: tensor.detach()
        for name, tensor in model.cross_attn_layers.named_parameters()
    }


def load_added(
    model: CrossAttentionModel, tensors: Mapping[str, Tensor], *, source: str = "added weights"
) -> None:
    """Copy added weights into `model`, before an engine takes the model.

    Tensors of the base are left alone. With shared weights, published files list the one layer
    under every index; all of them must agree. Raises ConfigError that lists every missing, surplus
    and misshaped name.
    """
    own_tensors: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _INDEXED.fullmatch(name)
        if match is None:
            continue
        index = int(match[1])
        is_shared = model.layers.shared_weights and index in model.indices
        own_name = f"{model.indices[0] if is_shared else index}.{match[2]}"
        if own_name in own_tensors and not torch.equal(own_tensors[own_name], tensor):
            raise ConfigError(
                f"{source}: {name} differs from {PREFIX}{own_name}, but layers.shared_weights=True "
                "wants one layer in "
                "every slot. Set layers.shared_weights=False, or load another file."
            )
        own_tensors[own_name] = tensor
    load_into(model.cross_attn_layers, own_tensors, source=source)


def read_added(folder: Path) -> dict[str, Tensor]:
    """The cross_attn_layers.* tensors (CPU) of an export or a published checkpoint folder; the base
    is not read.

    Understands model.safetensors, pytorch_model.bin, and shards of either kind with their index.
    Raises ConfigError when the folder holds none of these, an unreadable one, or no added layer.
    """
    files = _files_with_added(folder)
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as content:
                    names = _added_names(content.keys())
                    tensors |= {name: content.get_tensor(name) for name in names}
            else:
                tensors |= _read_pickle(file)
        except UnpicklingError as error:
            raise ConfigError(
                f"{file}: got a pickle of more than tensors, which could run code; want tensors."
            ) from error
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"{file}: cannot be read ({error}). Copy the checkpoint again."
            ) from error
    if not tensors:
        raise ConfigError(
            f"{folder}: got weights without any {PREFIX}*, want those of a cross-attention "
            "experiment."
        )
    return tensors


def _files_with_added(folder: Path) -> list[Path]:
    for single in weight_files.KINDS:
        if (folder / single).is_file():
            return [folder / single]
        index = folder / f"{single}.index.json"
        if index.is_file():
            shards: dict[str, str] = json.loads(index.read_text())["weight_map"]
            return [
                folder / shard for shard in sorted({shards[name] for name in _added_names(shards)})
            ]
    legal = ", ".join(f"{single} or {single}.index.json" for single in weight_files.KINDS)
    raise ConfigError(f"{folder}: holds no weights, want {legal}. Give the folder of a checkpoint.")


def _added_names(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(PREFIX)]


def _read_pickle(file: Path) -> dict[str, Tensor]:
    tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return {name: tensors[name].clone() for name in _added_names(tensors)}
