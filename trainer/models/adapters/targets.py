"""Which layers of a base get adapters, of which rank, and what trains whole beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer.errors import ConfigError, nearest
from trainer.models.adapters.names import ROWS, is_adapter

if TYPE_CHECKING:
    from trainer.config.optimizer.lora import Lora

# The linear layers in a block of a Llama-like decoder; a base that has all of them gets adapters
# there.
_LLAMA = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
_ATTENTION = re.compile(r"(?:^|\.)[^.]*(?:attn|attention)[^.]*(?:\.|$)", re.IGNORECASE)
_BLOCK = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Targets:
    """The layers that get adapters, as peft takes them, and those of another rank or scale by their
    whole names.
    """

    names: list[str] | str
    ranks: dict[str, int]
    alphas: dict[str, int]


def targets_of(base: Any, how: Lora, peft: Any) -> Targets:
    """The layers to adapt. ConfigError names what does not exist: a target, block or pattern."""
    targets: list[str] | str = (
        _targets(base, how.targets, peft) if how.parts is None else _names_of_parts(base, how, peft)
    )
    if how.layers is None and not how.patterns:
        return Targets(targets, {}, {})
    names = [
        name for name in adapted_names(base, targets) if not _is_inside(name, how.modules_to_save)
    ]
    if how.layers is not None:
        blocks = sorted({number for name in names if (number := _block(name)) is not None})
        absent = sorted(set(how.layers) - set(blocks))
        if absent:
            raise ConfigError(
                f"lora.layers={how.layers}: there is no block {', '.join(map(str, absent))}. The "
                f"blocks of a {base.config.model_type} that have such layers are {blocks[0]} to "
                f"{blocks[-1]}."
                if blocks
                else f"lora.layers={how.layers}: no target lies in a block. Leave layers out."
            )
        names = [name for name in names if _block(name) in how.layers]
        targets = names
    ranks, alphas = _patterns(names, how)
    return Targets(targets, ranks, alphas)


def _names_of_parts(base: Any, how: Lora, peft: Any) -> list[str]:
    """The whole names of the layers of lora.parts, and of those that targets names. ConfigError for
    a part that the base does not have, or that could not be merged.
    """
    output = base.get_output_embeddings()
    names: dict[str, list[str]] = {"attention": [], "mlp": [], "output": []}
    for name, module in base.named_modules():
        if is_linear(module) and module is output:
            names["output"].append(name)
        elif is_linear(module) and _block(name) is not None:
            names["attention" if _ATTENTION.search(name) else "mlp"].append(name)
    parts = how.parts or []
    absent = [part for part in parts if not names[part]]
    if absent:
        raise ConfigError(
            f"lora.parts={parts}: {_of(base)} has no linear layers of {' and '.join(absent)}. "
            "Leave that out, or name layers in lora.targets."
        )
    if "output" in parts and how.export == "merged" and _is_tied(base, output):
        raise ConfigError(
            f'lora.parts={parts} with lora.export="merged": the output layer of {_of(base)} shares '
            'its matrix with the embedding, which merged adapters would change, too. Use "adapter".'
        )
    named = _targets(base, how.targets, peft) if how.targets is not None else []
    more = adapted_names(base, named)
    return list(dict.fromkeys([*(name for part in parts for name in names[part]), *more]))


def _patterns(names: list[str], how: Lora) -> tuple[dict[str, int], dict[str, int]]:
    ranks: dict[str, int] = {}
    alphas: dict[str, int] = {}
    for number, pattern in enumerate(how.patterns):
        fitting = [name for name in names if fits(pattern.match, name)]
        if not fitting:
            leaves = sorted({name.rpartition(".")[2] for name in names})
            raise ConfigError(
                f"lora.patterns[{number}].match={pattern.match!r}: no layer with adapters has such "
                f"a name. Their names end in {', '.join(leaves)}, such as {names[0]!r}."
            )
        for name in fitting:  # the first pattern that fits counts
            ranks.setdefault(name, how.r if pattern.r is None else pattern.r)
            alphas.setdefault(name, how.alpha if pattern.alpha is None else pattern.alpha)
    return (
        {name: r for name, r in ranks.items() if r != how.r},
        {name: alpha for name, alpha in alphas.items() if alpha != how.alpha},
    )


def fits(pattern: str, name: str) -> bool:
    """Whether a pattern with * fits a name, or its end from a dot on."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _block(name: str) -> int | None:
    """The number of the block that a layer lies in."""
    match = _BLOCK.search(name)
    return None if match is None else int(match[1])


def adapted_names(base: Any, targets: list[str] | str) -> list[str]:
    """The whole names of the linear layers that targets name."""
    output = base.get_output_embeddings()
    linear = [name for name, module in base.named_modules() if is_linear(module)]
    if targets == "all-linear":
        return [name for name in linear if base.get_submodule(name) is not output]
    return [name for name in linear if any(_ends(name, target) for target in targets)]


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _is_inside(name: str, modules: Iterable[str]) -> bool:
    return re.fullmatch(excluded(modules), name) is not None if modules else False


def excluded(modules: Iterable[str]) -> str:
    """A regular expression for all that lies in modules which train whole: they get no adapters, as
    in peft.
    """
    ends = "|".join(re.escape(name) for name in modules)
    return rf"(.*\.)?({ends})(\..*)?"


def _targets(base: Any, targets: list[str] | str | None, peft: Any) -> list[str] | str:
    """The layers to adapt, as peft takes them. ConfigError names every target that does not exist.

    The default is all seven projections of a Llama-like decoder, else peft's choice for the family,
    else all linear layers.
    """
    if isinstance(targets, str):
        return targets
    linear = {
        name.rpartition(".")[2]
        for name, module in base.named_modules()
        if is_linear(module) and not _is_tied(base, module)
    }
    if targets is None:
        if linear.issuperset(_LLAMA):
            return list(_LLAMA)
        peft_targets = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        return peft_targets.get(base.config.model_type, "all-linear")
    problems = [_problem(base, target, linear) for target in targets]
    problems = [problem for problem in problems if problem]
    if problems:
        raise ConfigError(
            f"lora.targets={targets}: {'; '.join(problems)}.\nThe linear layers of a "
            f"{base.config.model_type} are {', '.join(sorted(linear))}. Name some of them, or use "
            '"all-linear", or leave targets out.'
        )
    return list(targets)


def is_linear(module: nn.Module) -> bool:
    """Whether peft has adapters for it that we train: a linear layer, or GPT-2's form of one."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (nn.Linear, Conv1D))


def _is_tied(base: Any, module: nn.Module) -> bool:
    """Whether it is an output layer whose matrix is the embedding: adapters would change both."""
    return module is base.get_output_embeddings() and any(
        one.weight is module.weight for one in base.modules() if isinstance(one, nn.Embedding)
    )


def _problem(base: nn.Module, target: str, linear: set[str]) -> str | None:
    """What is wrong with a target; None when it names linear layers alone."""
    matched = [module for name, module in base.named_modules() if _ends(name, target)]
    if not matched:
        return f"there is no {target!r} ({nearest(target, sorted(linear))})"
    if any(_is_tied(base, module) for module in matched):
        return f"{target!r} shares its matrix with the embedding, which adapters cannot"
    if not all(map(is_linear, matched)):
        return f"{target!r} is no linear layer but a {type(matched[0]).__name__}"
    return None


# What trains whole
# --------------------------------------------------------------------------------------------------


def whole_names(base: nn.Module, how: Lora) -> set[str]:
    """The parameters of an adapted base that train whole: biases, those of modules_to_save, and
    rows of its embedding.
    """
    names = [name for name, _ in base.named_parameters() if not is_adapter(name)]
    rows = {name for name in names if name.endswith(f".{ROWS}")}
    parameters = [name for name in names if name not in rows]
    ends = {"none": (), "all": ("bias",), "lora_only": ("base_layer.bias",)}[how.bias]
    whole = {name for name in parameters if any(_ends(name, end) for end in ends)}
    if how.bias != "none" and not whole:
        raise ConfigError(
            f'lora.bias="{how.bias}": {_of(base)} has no such bias. Leave bias out, or use another.'
        )
    for module in how.modules_to_save:
        whole |= _of_module(base, module, parameters)
    return whole | rows


def _of(base: Any) -> str:
    return f"a {base.config.model_type}"


def _of_module(base: nn.Module, wanted: str, parameters: list[str]) -> set[str]:
    """The parameters of a module that trains whole. ConfigError when there are none, or when others
    share them.
    """
    places = [name for name, _ in base.named_modules() if name and _ends(name, wanted)]
    everywhere = dict(base.named_parameters(remove_duplicate=False))
    inside = tuple(f"{place}." for place in places)
    own = [name for name in everywhere if name.startswith(inside) and not is_adapter(name)]
    if not own:
        leaves = sorted({name.split(".")[-2] for name in parameters if "." in name})
        what = "has no weights of its own" if places else "does not exist"
        raise ConfigError(
            f"lora.modules_to_save: {wanted!r} {what} in {_of(base)}. {nearest(wanted, leaves)}"
        )
    moving = {id(everywhere[name]) for name in own}
    shared = [
        name
        for name, parameter in everywhere.items()
        if id(parameter) in moving and not name.startswith(inside)
    ]
    if shared:
        raise ConfigError(
            f"lora.modules_to_save: {wanted!r} shares its weights with {shared[0]!r}, which would "
            "train too, while peft would take them apart. Leave it out, or train without lora."
        )
    return set(parameters) & set(own)
