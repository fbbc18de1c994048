"""Which weight trains by which rule, at which learning rate, with which decay, and when: the groups
of parameters that an optimizer is given.

ZeRO lays the weights of a group into one flat vector, so all that tells weights apart has to be a
group of its own.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.config.optimizer.freeze import Freeze
    from trainer.config.schema import Optim

OWN = "own"  # the rule of the optimizer that the dictionary names
ADAMW = "adamw"  # the rule of what Muon and 8-bit AdamW leave to AdamW
FROZEN_BY_NAME = "is_frozen_by_name"  # an attribute of weights that train.freeze never lets train
# Modules whose matrices are no hidden layers: Muon leaves them to AdamW (Jordan et al. 2024).
_HEADS = {"head", "lm_head", "score", "classifier"}
# bitsandbytes keeps moments of smaller weights in 32 bits (0.50: min_8bit_size).
_FEWEST_IN_8_BITS = 4096
_SECOND_OF_ADAPTER = ("lora_B", "lora_embedding_B")
_SHOWN = 3


@dataclass(frozen=True)
class TrainedAs:
    """How one weight trains."""

    share: float  # of optim.lr
    weight_decay: float
    rule: str
    freeze: Freeze | None


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """The full shape of a parameter, also while it is partitioned (ZeRO-3)."""
    return parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape  # pyright: ignore


def first_match(name: str, patterns: Sequence[Any]) -> Any | None:
    """The first entry (with a `match`) that names this weight; None when none does."""
    return next((one for one in patterns if fnmatch.fnmatchcase(name, one.match)), None)


def refuse_idle_patterns(key: str, patterns: Sequence[Any], names: Iterable[str]) -> None:
    """ConfigError for entries of the list `key` that name no weight, with the nearest names."""
    names, problems = list(names), []
    for one in patterns:
        if any(fnmatch.fnmatchcase(name, one.match) for name in names):
            continue
        bare = one.match.strip("*").strip(".")
        parts = {part: name for name in names for part in _ends_of(name)}
        close = difflib.get_close_matches(bare, parts, n=_SHOWN, cutoff=0.5)
        close = list(dict.fromkeys(parts[part] for part in close)) or names[:_SHOWN]
        problems.append(
            f'{key}: match="{one.match}" names none of the {len(names)} weights that train. Near: '
            f"{', '.join(close)}. * stands for any text."
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _ends_of(name: str) -> list[str]:
    """The beginnings and the ends of a dotted name: of "a.b.c" a, a.b, a.b.c, b.c, c."""
    parts = name.split(".")
    begins = [".".join(parts[: k + 1]) for k in range(len(parts))]
    return begins + [".".join(parts[k:]) for k in range(1, len(parts))]


def freeze_whole(model: nn.Module, freeze: Sequence[Freeze]) -> list[str]:
    """Freeze the weights that train in no step; returns their names. ConfigError for an entry that
    names no weight which trains.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    refuse_idle_patterns("train.freeze", freeze, parameters)
    frozen = [name for name in parameters if (one := first_match(name, freeze)) and one.is_whole]
    for name in frozen:
        parameters[name].requires_grad_(False)
        setattr(parameters[name], FROZEN_BY_NAME, True)
    return frozen


def frozen_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that freeze_whole froze, by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if getattr(parameter, FROZEN_BY_NAME, False)
    }


def rules(model: nn.Module, optim: Optim) -> dict[str, str]:
    """The rule of every weight that trains, by name."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if optim.name == "adamw8bit":
        return {
            name: OWN
            if len(shape_of(p)) >= 2 and shape_of(p).numel() >= _FEWEST_IN_8_BITS
            else ADAMW
            for name, p in parameters.items()
        }
    if optim.name != "muon":
        return dict.fromkeys(parameters, OWN)
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return {
        name: ADAMW
        if len(shape_of(p)) != 2 or id(p) in tables or _HEADS & set(name.split("."))
        else OWN
        for name, p in parameters.items()
    }


def places(
    model: nn.Module, optim: Optim, *, plus: float, freeze: Sequence[Freeze]
) -> dict[str, TrainedAs]:
    """How every weight of `model` that trains does so, by name.

    plus: lora.plus. ConfigError for an entry of optim.groups that names no weight.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    refuse_idle_patterns("optim.groups", optim.groups, parameters)
    heights = _heights(model, parameters) if optim.layer_decay < 1 else {}
    own_rules = rules(model, optim)
    by_name: dict[str, TrainedAs] = {}
    for name, parameter in parameters.items():
        share = optim.layer_decay ** heights.get(name, 0)
        if any(part in _SECOND_OF_ADAPTER for part in name.split(".")):
            share *= plus
        decays = optim.decay == "all" or len(shape_of(parameter)) >= 2
        weight_decay = optim.weight_decay if decays else 0.0
        group = first_match(name, optim.groups)
        if group is not None and group.lr is not None:
            share = group.lr / optim.lr
        if group is not None and group.weight_decay is not None:
            weight_decay = group.weight_decay
        by_name[name] = TrainedAs(share, weight_decay, own_rules[name], first_match(name, freeze))
    return by_name


def param_groups(
    model: nn.Module, places: Mapping[str, TrainedAs], optim: Optim
) -> list[dict[str, Any]]:
    """The groups of parameters: those that `optim.decay` names first, then in the model's order.

    "share": of the step's rate; "freeze": when they stand still, or None.
    """
    fewest_axes = 2 if optim.decay == "matrices" else 0
    parameters = dict(model.named_parameters())
    every = list(places.items())
    every.sort(key=lambda item: len(shape_of(parameters[item[0]])) < fewest_axes)  # a stable sort
    groups: dict[tuple[bool, TrainedAs], dict[str, Any]] = {}
    for name, place in every:
        is_vector = len(shape_of(parameters[name])) < fewest_axes
        group = groups.setdefault(
            (is_vector, place),
            {
                "params": [],
                "weight_decay": place.weight_decay,
                "share": place.share,
                "rule": place.rule,
                "freeze": place.freeze,
            },
        )
        group["params"].append(parameters[name])
    return list(groups.values())


def _heights(model: nn.Module, named: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """How many times layer_decay applies to each weight: once to those of the last block of a
    stack, and once more for each block below. Embeddings lie below the longest stack.

    Source: BEiT's layer-wise decay (Bao et al. 2022), whose head has the full rate.
    """
    modules = dict(model.named_modules())
    tables = {
        id(p) for m in modules.values() if isinstance(m, nn.Embedding) for p in m.parameters()
    }
    stacks = {n: len(m) for n, m in modules.items() if isinstance(m, nn.ModuleList) and len(m) > 1}
    heights: dict[str, int] = {}
    outside: list[str] = []
    for name in named:
        parts = name.split(".")
        outer = [k for k in range(1, len(parts)) if ".".join(parts[:k]) in stacks]
        if outer:
            heights[name] = stacks[".".join(parts[: outer[0]])] - int(parts[outer[0]])
        else:
            outside.append(name)
    if not heights:
        raise ConfigError(
            "optim.layer_decay: the model has no stack of blocks that train, so that no weight "
            "lies below another. Leave it out."
        )
    lowest = max(heights.values()) + 1
    return heights | {name: lowest for name in outside if id(named[name]) in tables}
