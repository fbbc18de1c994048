"""What the parameters of adapters are called, in a model and in peft's files."""

from __future__ import annotations

import re

PREFIX = "base_model.model."  # of every name in peft's files
_MARK = re.compile(r"\.lora_(A|B|magnitude_vector)\.default(\.weight)?$")


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return _MARK.search(name) is not None


def layer_of(name: str) -> str:
    """The layer in which an adapter's parameter stands."""
    return _MARK.sub("", name)


def in_file(name: str) -> str:
    """A trained parameter's name as peft's files have it: without the adapter's own, which is
    "default".

    peft 0.21, _get_adapter_state_dict: DoRA's magnitude is a module, but stands there as a tensor.
    What trains beside adapters keeps its name.
    """
    part = _MARK.search(name)
    if part is None:
        return f"{PREFIX}{name}"
    last = "" if part[1] == "magnitude_vector" else ".weight"
    return f"{PREFIX}{name[: part.start()]}.lora_{part[1]}{last}"
