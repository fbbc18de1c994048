"""Chooses and counts the trainable parameters of a model, and loads tensors into it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError

Chooser = Callable[[str], bool] | Iterable[nn.Module]
_SHOWN = 5  # names listed in an error before "and n more"


@dataclass(frozen=True)
class TrainableReport:
    """The size of a model and of its trainable part; a shared parameter counts once."""

    total: int  # numbers in all parameters
    trainable: int  # numbers in the trainable parameters
    names: tuple[str, ...]  # of the trainable parameters, in the model's order

    @property
    def share(self) -> float:
        """Trainable / total, 0 for an empty model."""
        return self.trainable / self.total if self.total else 0.0

    def __str__(self) -> str:
        return (
            f"{self.trainable:,} of {self.total:,} parameters train ({self.share:.2%}), in "
            f"{len(self.names)} tensors"
        )


def freeze_except(model: nn.Module, trainable: Chooser) -> None:
    """Set requires_grad on every parameter of `model`: True for the chosen ones, False for the
    others.

    trainable: a predicate on parameter names, or the modules whose parameters train. A parameter
    with several names trains when any of them is chosen. ConfigError when nothing is chosen.
    """
    if callable(trainable):
        every = model.named_parameters(remove_duplicate=False)
        trained = {id(parameter) for name, parameter in every if trainable(name)}
    else:
        trained = {id(parameter) for module in trainable for parameter in module.parameters()}
    own = list(model.parameters())
    if not any(id(parameter) in trained for parameter in own):
        raise ConfigError(
            f"none of the {len(own)} parameters of {type(model).__name__} was chosen to train, "
            "wanted at least one. "
            "Choose by a name or a module that the model has."
        )
    for parameter in own:
        parameter.requires_grad_(id(parameter) in trained)


def trainable_report(model: nn.Module) -> TrainableReport:
    """Counts and names of the trainable parameters of `model`, which ZeRO-3 may have
    partitioned.
    """
    parameters = list(model.named_parameters())
    moving = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    return TrainableReport(
        total=sum(_numel(parameter) for _, parameter in parameters),
        trainable=sum(_numel(parameter) for _, parameter in moving),
        names=tuple(name for name, _ in moving),
    )


def _numel(parameter: nn.Parameter) -> int:
    # Under ZeRO-3 a parameter is an empty tensor and its real size stands in ds_numel (deepspeed
    # 0.19.8).
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def load_into(model: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Copy named tensors into the parameters and saved buffers of `model`, each exactly once,
    casting to its dtype.

    The names must be exactly those of the model. A shared tensor needs one of its names; tensors
    under several of its names must be equal. source: where the tensors came from, for the message.
    ConfigError lists every missing, unexpected and misshaped name at once. It must be called before
    the engine partitions the model.
    """
    # every parameter and saved buffer with all of its names, in the model's order
    by_storage: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_storage.setdefault(id(tensor), ([], tensor))[0].append(name)
    groups = list(by_storage.values())
    targets = {name: target for names, target in groups for name in names}
    missing = [names[0] for names, _ in groups if not tensors.keys() & set(names)]
    problems = [f"missing {_list_names(missing)}"]
    problems += [f"unexpected {_list_names(sorted(tensors.keys() - targets.keys()))}"]
    clashes: list[str] = []
    for names, _ in groups:
        present = [name for name in names if name in tensors]
        clashes += [
            f"{present[0]} and {name}"
            for name in present[1:]
            if not torch.equal(tensors[present[0]], tensors[name])
        ]
    problems += [f"different tensors for one shared parameter: {_list_names(clashes)}"]
    wrong = [
        f"{name} (got {tuple(tensor.shape)}, want {tuple(targets[name].shape)})"
        for name, tensor in tensors.items()
        if name in targets and tensor.shape != targets[name].shape
    ]
    problems += [f"wrong shapes {_list_names(wrong)}"]
    problems = [problem for problem in problems if not problem.endswith("[]")]
    if problems:
        raise ConfigError(
            f"{source} does not fit {type(model).__name__}: {'; '.join(problems)}. "
            "Use weights that were saved from a model of the same configuration."
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"[{', '.join(names[:_SHOWN])}]{more}" if names else "[]"
