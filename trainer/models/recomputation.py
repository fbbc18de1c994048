"""Blocks whose inner states are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.errors import ConfigError
from trainer.models.packed.replaced import replaced


def run(function: Callable[..., Any], *given: Any, number: int, every: int | None) -> Any:
    """function(*given) of block `number`; of every so many blocks computed again in backward."""
    if every and number % every == 0:  # torch's default also replays the dropout draws
        return checkpoint(function, *given, use_reentrant=False)
    return function(*given)


def of_stock(base: Any, *, every: int | None, **how: Any) -> None:
    """Have transformers compute every so many blocks of each stack again in backward. how: more
    arguments of torch's checkpoint.
    """
    if not every:
        return
    kwargs = {"use_reentrant": False, **how}
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
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
