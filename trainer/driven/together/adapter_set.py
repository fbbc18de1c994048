"""The adapters of one run, apart from the base that they stand in."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.models import adapters

if TYPE_CHECKING:
    from trainer.config.optimizer.lora import Lora

_NAME = re.compile(r"(.+)\.lora_([AB])\.default\.weight")


@dataclass(frozen=True)
class LayerOfAdapters:
    """The adapter of one layer: the layer's output gets up(down(input)) * scale more.

    down, up: the names of its weights in their AdapterSet, (R, D) and (O, R). number: of the layer
    in its run.
    """

    down: str
    up: str
    scale: float
    dropout: float
    number: int


class AdapterSet(nn.Module):
    """The adapters of one run, by the names that they have in a model of that run alone.

    An engine trains it. The gradients come from elsewhere: `forward(*gradients)`, one for each
    parameter in their order, is a sum whose gradient they are.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], layers: Mapping[str, LayerOfAdapters]
    ) -> None:
        """layers: by the names of the layers in the base."""
        super().__init__()
        self.layers_by_name = dict(layers)
        for name, values in weights.items():
            *parents, last = name.split(".")
            module: nn.Module = self
            for part in parents:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(values))

    def forward(self, *gradients: Tensor) -> Tensor:
        pairs = zip(self.parameters(), gradients, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()

    def leaves(self) -> dict[str, Tensor]:
        """The weights by name, in the same memory, as leaves of a graph of their own: a gradient
        with respect to them passes no engine.
        """
        return {name: p.detach().requires_grad_() for name, p in self.named_parameters()}


def draw(base: Any, how: Lora, *, seed: int, prefix: str) -> AdapterSet:
    """New adapters for a base without adapters, which is as it was afterwards: the same ones that a
    run alone begins with.

    prefix: the name of the base in the model of a run. ConfigError for adapters that change it.
    """
    if how.weights_of_base is not None or how.dora or how.tokens:
        raise ConfigError(
            "data.together: the adapters of this run train weights of the base or scale them, "
            "which it shares with other runs. Use plain adapters, or leave together out."
        )
    with _of_full_precision(base):
        adapted = adapters.adapted(base, how, seed=seed)
    try:
        weights: dict[str, Tensor] = {}
        layers: dict[str, LayerOfAdapters] = {}
        for name, parameter in adapted.named_parameters():
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            weights[f"{prefix}.{name}"] = parameter.detach()
            place = match[1]
            layer: Any = adapted.get_submodule(place)
            layers[place] = LayerOfAdapters(
                down=f"{prefix}.{place}.lora_A.default.weight",
                up=f"{prefix}.{place}.lora_B.default.weight",
                scale=float(layer.scaling["default"]),
                dropout=float(getattr(layer.lora_dropout["default"], "p", 0.0)),
                number=layers[place].number if place in layers else len(layers),
            )
        return AdapterSet(weights, layers)
    finally:
        adapters.remove(base)
        if hasattr(base, "peft_config"):
            del base.peft_config


@contextlib.contextmanager
def _of_full_precision(base: nn.Module) -> Iterator[None]:
    """While it is open, every weight of a base looks like fp32, without memory: peft rounds new
    adapters to the dtype of the weight beside them, and a run alone begins with all their bits.
    """
    held = [(p, p.data) for p in base.parameters() if p.is_floating_point()]
    for parameter, values in held:
        parameter.data = torch.zeros((), device=values.device).expand(values.shape)
    try:
        yield
    finally:
        for parameter, values in held:
            parameter.data = values


def zeros_of(leaves: Mapping[str, Tensor]) -> list[Tensor]:
    """A gradient of nothing."""
    return [torch.zeros_like(leaf, requires_grad=False) for leaf in leaves.values()]


def summed(gradients: Sequence[Tensor] | None, more: Sequence[Tensor]) -> list[Tensor]:
    """The sum of gradients, in fp32 where their dtype is shorter."""
    wide = [one.float() if one.dtype.itemsize < 4 else one for one in more]
    if gradients is None:
        return wide
    return [old + new for old, new in zip(gradients, wide, strict=True)]
