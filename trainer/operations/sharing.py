"""Which runs may share a base: those whose dictionaries differ in their adapters alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

# What each run has of its own, in a worker that it shares.
OWN = (
    "lora",
    "optim",
    "label",
    "train.seed",
    "train.steps",
    "train.save_every",
    "train.keep_last",
    "data.put_aside_s",
    "data.together",
)


def differences(host: BaseModel, guest: BaseModel) -> list[str]:
    """The keys of two checked experiments that keep them from sharing a base; [] if they may."""
    keys = _differing(host.model_dump(mode="json"), guest.model_dump(mode="json"), "")
    return sorted(key for key in keys if not any(_is_below(key, own) for own in OWN))


def _is_below(key: str, own: str) -> bool:
    return key == own or key.startswith(f"{own}.")


def _differing(one: Any, other: Any, path: str) -> list[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = {*one, *other}
        return [
            key
            for name in keys
            for key in _differing(one.get(name), other.get(name), f"{path}.{name}".lstrip("."))
        ]
    return [] if one == other else [path]
