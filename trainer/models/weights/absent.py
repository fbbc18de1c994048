"""Weights that the files of a base lack. transformers draws them at random whenever it reads the
base. One that trains begins with what is drawn; one that stays as it is would be another in every
process.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "absent_weights"  # of the attribute that a model of transformers gets
_UNREAD = re.compile(r"(^|\.)pooler\.")  # no task reads a pooler's output
_SHOWN = 5  # names listed before "and n more"


@dataclass(frozen=True)
class _Absent:
    source: str
    weights: dict[str, nn.Parameter]


def note(model: PreTrainedModel, missing: Collection[str], source: str) -> None:
    """Remember in a model which of its weights were drawn, for refuse().

    missing: names that from_pretrained reports. Buffers are none of them, nor are weights that are
    tied to another one.
    """
    tied = set(model.all_tied_weights_keys)
    new = {
        name: weight
        for name, weight in model.named_parameters()
        if name in missing and name not in tied
    }
    setattr(model, _NAME, _Absent(source, new))


def names(model: PreTrainedModel) -> list[str]:
    """The names of the weights of a model that were drawn, as note() remembers them."""
    absent: Any = getattr(model, _NAME, None)
    return [*absent.weights] if isinstance(absent, _Absent) else []


def refuse(model: nn.Module, *, is_trained: bool) -> None:
    """ConfigError when a base in this module lacks weights that do not train.

    is_trained: a weight with requires_grad trains; False: none does.
    """
    training = {id(weight) for weight in model.parameters() if is_trained and weight.requires_grad}
    for module in model.modules():
        absent: Any = getattr(module, _NAME, None)
        if not isinstance(absent, _Absent):
            continue
        refuse_named(
            [name for name, weight in absent.weights.items() if id(weight) not in training],
            absent.source,
        )


def refuse_named(names: Collection[str], source: str) -> None:
    """ConfigError when there are names of weights that the files of a base lack; of a pooler, which
    nothing reads, they may.
    """
    lost = sorted(name for name in names if not _UNREAD.search(name))
    if not lost:
        return
    more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
    raise ConfigError(
        f"base={source!r}: its files lack {', '.join(lost[:_SHOWN])}{more}, and here no training "
        "fills what they lack: every start would draw other numbers. Copy the folder again, or "
        "name a base that is whole."
    )
