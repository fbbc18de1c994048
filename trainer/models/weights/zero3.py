"""Corrects errors of transformers 5.23 when it builds or reads a model under ZeRO-3."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from trainer.models.weights import weight_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@contextlib.contextmanager
def tied_as_saved(build: Any, config: PretrainedConfig, source: str) -> Iterator[None]:
    """Inside, a partitioned from_pretrained ties two weights only if the files hold one of them, or
    both with equal values.

    transformers 5.23, tie_weights: two weights that the class ties and the files hold both (the
    output layer and the embedding of T5 v1.1) are compared when everything is read. Under ZeRO-3
    both are empty by then and count as equal, so that the checkpoint's own output layer would be
    thrown away.
    """
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    if not is_deepspeed_zero3_enabled():
        yield
        return
    with torch.device("meta"), without_partitioning():
        tied: dict[str, str] = build(config).all_tied_weights_keys
    saved = weight_files.tensors(source, {*tied, *tied.values()}) if tied else {}
    both = [(name, to) for name, to in tied.items() if name in saved and to in saved]
    untied = {name for name, to in both if not torch.equal(saved[name], saved[to])}
    if not untied:
        yield
        return
    of_class = build.get_expanded_tied_weights_keys

    def of_files(model: PreTrainedModel, **how: Any) -> dict[str, str]:
        return {name: to for name, to in of_class(model, **how).items() if name not in untied}

    build.get_expanded_tied_weights_keys = of_files
    try:
        yield
    finally:
        build.get_expanded_tied_weights_keys = of_class


@contextlib.contextmanager
def without_partitioning() -> Iterator[None]:
    """Inside, transformers 5.23 partitions no model that it builds.

    Under ZeRO-3 the parts of a T5Gemma 2 would partition themselves, which nothing on the meta
    device can.
    """
    from transformers.integrations import deepspeed as integration

    before = integration._hf_deepspeed_config_weak_ref
    integration._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = before
