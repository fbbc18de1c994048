"""Low-rank adapters (LoRA, rsLoRA, DoRA, PiSSA) in a frozen base, stored in peft's file format."""

from trainer.models.adapters.files import (
    ADAPTER,
    WEIGHTS,
    are_in,
    check_base,
    load,
    loading,
    read,
    refuse,
    refuse_another_base,
    write,
)
from trainer.models.adapters.inside import (
    adapted,
    beside_the_whole_base,
    beside_the_whole_base_as,
    changes_base,
    freeze_rest,
    layers_of,
    merge,
    merged_weights,
    remove,
    switched_off,
)
from trainer.models.adapters.names import is_adapter

__all__ = [
    "ADAPTER",
    "WEIGHTS",
    "adapted",
    "are_in",
    "beside_the_whole_base",
    "beside_the_whole_base_as",
    "changes_base",
    "check_base",
    "freeze_rest",
    "is_adapter",
    "layers_of",
    "load",
    "loading",
    "merge",
    "merged_weights",
    "read",
    "refuse",
    "refuse_another_base",
    "remove",
    "switched_off",
    "write",
]
