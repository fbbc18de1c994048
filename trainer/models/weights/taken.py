"""Weights that a base takes over from a folder of another task, by their names."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.models.weights import weight_files
from trainer.runtime import distributed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHOWN = 12  # kinds of names that are listed before "and n more"
log = logging.getLogger(__name__)


@torch.no_grad()
def take(base: PreTrainedModel, folder: str) -> None:
    """Copy into a base every weight of a folder that has a name and the shape of one of its own,
    and log which were taken and which were not. The base may be partitioned (ZeRO-3).

    A name fits with or without the name of the body in front, as transformers names a body alone
    and inside a model. ConfigError when the folder holds no weights, or none that fits.
    """
    if not Path(folder).is_dir() or not weight_files.of(folder):
        raise ConfigError(
            f"init_from={folder!r}: it is no folder with weights. Give best/ or final/ of a run, "
            "or another folder of a whole model."
        )
    ours = dict(base.named_parameters())
    by_name = {one: name for name in ours for one in _names(name, base.base_model_prefix)}
    names: list[str] = []
    unused: list[str] = []
    for name, values in _tensors(folder):
        own = by_name.get(name)
        # of a partitioned weight `shape` is that of a part
        if own is None or getattr(ours[own], "ds_shape", ours[own].shape) != values.shape:
            size = "" if own is None else f" of shape {tuple(values.shape)}"
            unused.append(f"{name}{size}")
            continue
        _fill(ours[own], values)
        names.append(own)
    rest = sorted(set(ours) - set(names))
    if not names:
        raise ConfigError(
            f"init_from={folder!r}: none of its {len(unused)} weights fits this base: it has "
            f"{_list_of(unused)}, and want {_list_of(rest)}. Give a folder of the same kind of "
            "model, or leave init_from out."
        )
    if distributed.is_main():
        log.info("init_from %s: %d weights are taken: %s", folder, len(names), _list_of(names))
        log.info("init_from: not taken of it: %s", _list_of(unused))
        log.info("init_from: as the base has them: %s", _list_of(rest))


def _names(name: str, body: str) -> Iterator[str]:
    yield name
    if body:
        yield f"{body}.{name}"
        yield name.removeprefix(f"{body}.")


def _tensors(folder: str) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files.of(folder):
        if path.suffix != ".safetensors":
            yield from weight_files.read_pickle(path).items()
            continue
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)


def _fill(parameter: nn.Parameter, values: Tensor) -> None:
    part = getattr(parameter, "ds_tensor", None)
    if part is None:
        parameter.copy_(values)
        return
    start = distributed.rank() * part.numel()  # each rank keeps an equal piece, the last one padded
    piece = values.flatten()[start : start + part.numel()]
    part[: piece.numel()].copy_(piece)


def _list_of(names: Iterable[str]) -> str:
    """Names with * for numbers, and how many each stands for."""
    kinds = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    labels = [f"{name} ({count})" if count > 1 else name for name, count in kinds.items()]
    more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
    return f"{', '.join(labels[:_SHOWN])}{more}" if labels else "nothing"
