"""Blocks whose inner states are computed again in the backward pass instead of being kept.

Such a block keeps its input alone, on the device, or in a store of the host until the backward pass
comes to it (train.activation_offload).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

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


class _Stored(NamedTuple):
    """What a graph keeps in place of a tensor that is in the store."""

    number: int


_store: InputStore | None = None


def keep_inputs_in(store: InputStore | None) -> None:
    """From here on, blocks of this process that are computed again keep their inputs in this store;
    None: where they are. It is set for each run.
    """
    global _store
    _store = store


def run(function: Callable[..., Any], *given: Any, number: int, every: int | None) -> Any:
    """function(*given) of block `number`; of every so many blocks computed again in backward.

    given: the input of the block first, which train.activation_offload may take to the host.
    """
    if every and number % every == 0:  # torch's default also replays the dropout draws
        return _again(function, *given, use_reentrant=False)
    return function(*given)


def _again(function: Callable[..., Any], *given: Any, **how: Any) -> Any:
    """torch's checkpoint, whose first argument waits in the store, if there is one. Others, such as
    masks and positions, belong to all blocks, and stay.
    """
    store = _store
    input = given[0] if given else None
    if store is None or not isinstance(input, Tensor) or not torch.is_grad_enabled():
        return checkpoint(function, *given, **how)

    def pack(tensor: Tensor) -> Tensor | _Stored:
        number = store.offload_input(tensor) if tensor is input else None
        return tensor if number is None else _Stored(number)

    def unpack(kept: Tensor | _Stored) -> Tensor:
        return store.restore_input(kept.number) if isinstance(kept, _Stored) else kept

    # The block itself runs under hooks of the checkpoint, which are inside of these.
    with saved_tensors_hooks(pack, unpack):
        return checkpoint(function, *given, **how)


def of_stock(base: Any, *, every: int | None, **how: Any) -> None:
    """Have transformers compute every so many blocks of each stack again in backward. how: more
    arguments of torch's checkpoint.
    """
    if not every:
        return
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
