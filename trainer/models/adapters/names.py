"""What the parameters of adapters are called, in a model and in peft's files."""

from __future__ import annotations

import re

ROWS = "token_rows"  # the parameter of an embedding's rows that train
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
    Rows of an embedding have the name of their module there, and what trains whole keeps its own.
    """
    part = _MARK.search(name)
    if part is None:
        place = name.removesuffix(f".{ROWS}")
        more = "" if place == name else ".token_adapter.trainable_tokens_delta"
        return f"{PREFIX}{place}{more}"
    last = "" if part[1] == "magnitude_vector" else ".weight"
    return f"{PREFIX}{name[: part.start()]}.lora_{part[1]}{last}"
