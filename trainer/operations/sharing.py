"""Which runs may share a base: those whose dictionaries differ in what each has of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trainer.files.atomic import read_json
from trainer.switches import KERNELS

# What each driven run has of its own, in a worker that it shares.
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
# What each experiment of a group has of its own that is trained together (--together).
OWN_OF_EXPERIMENTS = (
    "label",
    "lora",
    "optim",
    "schedule",
    "data",
    *(
        f"train.{key}"
        for key in (
            *("steps", "epochs", "seed", "order", "bucket_steps"),
            *("global_batch", "micro_batch", "micro_tokens", "eval_batch"),
            *("log_every", "eval_every", "save_every", "keep_last"),
            *("best", "best_is", "patience", "max_lost_labels", "label_smoothing", "z_loss"),
            *("on_bad_step", "bad_steps_allowed", "bad_steps_among", "spike_z", "spike_window"),
        )
    ),
)


def differences(host: BaseModel, guest: BaseModel, own: Sequence[str] = OWN) -> list[str]:
    """The keys of two checked experiments that keep them from sharing a base; [] if they may. own:
    the keys that may differ.
    """
    keys = _differing(host.model_dump(mode="json"), guest.model_dump(mode="json"), "")
    return sorted(key for key in keys if not any(_is_below(key, one) for one in own))


def kernels_differ(host: Path, guest: Path) -> bool:
    """Whether the runs in these folders have begun, with kernels that differ: one worker computes
    all of its runs by the same ones, and each goes on by its own (decision 46).
    """
    began = [read_json(folder / "data.json") for folder in (host, guest)]
    one, other = (None if it is None else [it.get(key) for key in KERNELS.values()] for it in began)
    return None not in (one, other) and one != other


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
