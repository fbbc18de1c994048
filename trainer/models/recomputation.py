"""Blocks whose inner states are computed again in the backward pass instead of being kept.

Such a block keeps its input alone, on the device, or in a store of the host until the backward pass
comes to it (train.activation_offload).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.errors import ConfigError
from trainer.models.packed.replaced import replaced


class InputStore(Protocol):
    """Where inputs of blocks wait for the backward pass. The names are DeepSpeed's (0.19.8)."""

    def offload_input(self, tensor: Tensor) -> int | None:
        """Take a tensor, and return its number; None: it stays where it is."""
        ...

    def restore_input(self, tensor_id: int) -> Tensor:
        """The tensor of a number, on its device again. Called once."""
        ...

    def forget_input(self, tensor_id: int) -> None:
        """Nobody will ask for the tensor of this number. Called in any thread."""
        ...


class _Stored:
    """What a graph keeps in place of a tensor that is in the store. A graph that is dropped before
    its backward pass, such as that of a frozen block below all trainable ones, gives it up.
    """

    def __init__(self, store: InputStore, number: int) -> None:
        self._store, self._number = store, number
        self._is_due = True

    def take(self) -> Tensor:
        """The tensor, once: a graph runs backward once."""
        self._is_due = False
        return self._store.restore_input(self._number)

    def __del__(self) -> None:
        if self._is_due:
            self._store.forget_input(self._number)


_store: InputStore | None = None


def keep_inputs_in(store: InputStore | None) -> None:
    """From here on, blocks of this process that are computed again keep their inputs in this store;
    None: where they are. Every run sets it.
    """
    global _store
    _store = store


def of_many_blocks(function: Callable[..., Any], *given: Any) -> Any:
    """function(*given), which runs blocks, computed again in backward as a whole. Its blocks keep
    no inputs for the backward pass, so that none goes to a store.
    """

    def without_store() -> AbstractContextManager[None]:
        return replaced(sys.modules[__name__], "_store", None)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return without_store(), without_store()

    return checkpoint(function, *given, use_reentrant=False, context_fn=contexts)


def run(function: Callable[..., Any], *given: Any, number: int, every: int | None) -> Any:
    """function(*given) of block `number`; of every so many blocks computed again in backward.

    given: its first tensor is the input of the block.
    """
    if every and number % every == 0:  # torch's default also replays the dropout draws
        return _again(function, *given, use_reentrant=False)
    return function(*given)


def _again(function: Callable[..., Any], *given: Any, **how: Any) -> Any:
    """torch's checkpoint, whose first tensor waits in the store, if there is one. The others, such
    as masks and positions, are the same for all blocks, and stay where they are. ConfigError for a
    block whose input is given by name.
    """
    store = _store
    if store is None or not torch.is_grad_enabled():
        return checkpoint(function, *given, **how)
    input = next((one for one in given if isinstance(one, Tensor)), None)
    if input is None:
        raise ConfigError(
            "train.activation_offload: blocks of this base are given their input by name, where "
            "it cannot be taken from. Leave activation_offload out."
        )

    taken = weakref.ref(input)  # torch (2.13) keeps pack() as long as the graph

    def pack(tensor: Tensor) -> Tensor | _Stored:
        number = store.offload_input(tensor) if tensor is taken() else None
        return tensor if number is None else _Stored(store, number)

    def unpack(kept: Tensor | _Stored) -> Tensor:
        return kept.take() if isinstance(kept, _Stored) else kept

    # What the block itself keeps goes by the hooks of checkpoint(), which are inside of these.
    with saved_tensors_hooks(pack, unpack):
        return checkpoint(function, *given, **how)


def of_stock(base: Any, *, every: int | None, **how: Any) -> None:
    """Have transformers compute every so many blocks of each stack again in backward. how: more
    arguments of torch's checkpoint.
    """
    if not every:
        return
    if not base.supports_gradient_checkpointing:
        raise ConfigError(
            f"train.gradient_checkpointing: transformers computes no blocks of model_type "
            f"{base.config.model_type!r} again. Leave it out."
        )
    kwargs = {"use_reentrant": False, **how}
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    for module in base.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = partial(_again, **kwargs)
    for blocks in _stacks(base):
        for number, block in enumerate(blocks):
            block.gradient_checkpointing = number % every == 0


@contextmanager
def nothing_of(base: nn.Module) -> Iterator[None]:
    """Inside, no block of a stock model is computed again, whatever of_stock() said."""
    blocks = [block for block in base.modules() if getattr(block, "gradient_checkpointing", False)]
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(replaced(block, "gradient_checkpointing", False))
        yield


def num_blocks(model: nn.Module) -> int:
    """How many blocks the longest stack of a model has."""
    return max((len(blocks) for blocks in _stacks(model)), default=0)


def check(every: int | None, blocks: int) -> None:
    """ConfigError when there are fewer blocks than that."""
    if every and every > blocks:
        raise ConfigError(
            f"train.gradient_checkpointing={every}: the base has {blocks} blocks. Use at most "
            f'{blocks}, true (every block), false (none), or "auto".'
        )


def _stacks(model: nn.Module) -> list[list[Any]]:
    """The lists of blocks in a model."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [
        blocks
        for blocks in lists
        if blocks and all(isinstance(block, GradientCheckpointingLayer) for block in blocks)
    ]
