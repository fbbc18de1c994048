"""What an operation is refused for before anything is computed: then nothing has changed."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.driven.losses import LOSSES, DrivenLoss
from trainer.driven.packs import TARGETS
from trainer.errors import ConfigError, DataError, nearest
from trainer.operations.rows import DrivenRow

_ADAM = {
    "learning_rate": (0.0, math.inf),
    "beta1": (0.0, 1.0),
    "beta2": (0.0, 1.0),
    "eps": (0.0, math.inf),
    "weight_decay": (0.0, math.inf),
    "grad_clip_norm": (0.0, math.inf),
}


@dataclass(frozen=True)
class AdamStep:
    """The parameters of one optim_step, by the SDK's names. grad_clip_norm: 0.0 clips nothing."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


def adam_of(fields: Mapping[str, Any]) -> AdamStep:
    """ConfigError names every parameter that is missing or out of its range."""
    problems: list[str] = []
    for name, (low, high) in _ADAM.items():
        value: Any = fields.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # a whole number may be beyond every float, and still below infinity
        if not (is_number and low <= value < high and value <= sys.float_info.max):
            bound = "a finite number from 0 on" if high == math.inf else "from 0 to below 1"
            problems.append(f"{name}: got {value!r}, want {bound}")
    if problems:
        raise ConfigError(f"optim_step: {'; '.join(problems)}. Send it again with such values.")
    return AdamStep(**{name: float(fields[name]) for name in _ADAM})


def loss_of(fields: Mapping[str, Any]) -> tuple[DrivenLoss, dict[str, float]]:
    """The loss that an operation names, and the numbers that it sets. ConfigError for another."""
    name = str(fields.get("loss_fn"))
    if name not in LOSSES:
        raise ConfigError(
            f"loss_fn={name!r} is not computed here. {nearest(name, [*LOSSES])} Or compute it in "
            "the client from log-probabilities (forward_backward_custom)."
        )
    loss = LOSSES[name]
    config: dict[str, float] = {}
    for key, value in (fields.get("loss_fn_config") or {}).items():
        if key not in loss.config:
            legal = nearest(key, [*loss.config]) if loss.config else "It has none."
            raise ConfigError(f"loss_fn_config: {key!r} is no number of {name}. {legal}")
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"loss_fn_config: {key}={value!r}. Give a finite number.")
        config[key] = number
    return loss, config


def check_rows(
    rows: Sequence[DrivenRow], loss: DrivenLoss, *, name: str, vocabulary: int, most_tokens: int
) -> None:
    """DataError for the first row that is wrong. name: of the loss."""
    if not rows:
        raise DataError(f"{name}: got no rows. Send at least one.")
    legal = {TARGETS, *loss.inputs, *loss.optional}
    for number, row in enumerate(rows):
        place, tokens = f"row {number}", row.tokens
        if not len(tokens) or len(tokens) > most_tokens:
            raise DataError(
                f"{place}: got {len(tokens)} tokens, want 1 to {most_tokens} (data.max_tokens). "
                "Cut it."
            )
        _check_ids(f"{place}, tokens", tokens, vocabulary)
        missing = [key for key in (TARGETS, *loss.inputs) if key not in row.inputs]
        foreign = sorted(row.inputs.keys() - legal)
        if missing or foreign:
            raise DataError(
                f"{place}: got the loss inputs {sorted(row.inputs)}; {name} wants "
                f"{', '.join((TARGETS, *loss.inputs))}"
                f"{', and may have ' + ', '.join(loss.optional) if loss.optional else ''}. "
                f"{'Add ' + ', '.join(missing) if missing else 'Leave out ' + ', '.join(foreign)}."
            )
        targets = row.inputs[TARGETS]
        for key, values in row.inputs.items():
            is_whole = values.shape == targets.shape or values.shape == tokens.shape
            if values.ndim > 2 or len(values) != len(tokens) or not is_whole:
                raise DataError(
                    f"{place}, {key}: got the shape {list(values.shape)} with {len(tokens)} "
                    "tokens. Give one number, or one list of K, for each token."
                )
            if key != TARGETS and not np.isfinite(values).all():
                position = int(np.flatnonzero(~np.isfinite(values.reshape(-1)))[0])
                raise DataError(
                    f"{place}, {key}: got {values.reshape(-1)[position]} at position {position}. "
                    "Give finite numbers."
                )
        if targets.ndim > 1 and not targets.shape[1]:
            raise DataError(f"{place}, {TARGETS}: got no target for a token. Give at least one.")
        _check_ids(f"{place}, {TARGETS}", targets.reshape(-1), vocabulary)


def _check_ids(place: str, ids: Any, vocabulary: int) -> None:
    is_foreign = (ids < 0) | (ids >= vocabulary)
    if is_foreign.any():
        position = int(np.flatnonzero(is_foreign)[0])
        raise DataError(
            f"{place}: got the id {int(ids[position])} at position {position}, want 0 to "
            f"{vocabulary - 1}: the vocabulary of the base. Use the tokenizer of the base."
        )
