"""The states that the blocks of a stock body give, and bodies of fewer blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.errors import ConfigError
from trainer.models.families import T5

# Names of the norm behind the last block, beside the list of blocks.
_FINAL_NORMS = ("norm", "final_norm", "ln_f", "final_layer_norm", "final_layernorm")


class InnerLayers:
    """Listens to a body: what its first n blocks give, as a body of n blocks would give it, with
    the norm behind the last block if the body has one. The layer 0 is the embedding of the tokens.
    """

    def __init__(self, body: Any, layers: Sequence[int], *, key: str) -> None:
        """key: of the dictionary, for messages. ConfigError where the body has fewer blocks."""
        parent, blocks = _stack_of(body, key)
        _check(layers, len(blocks), len(blocks) - 1, key)
        self._norm = final_norm(parent)
        self._seen: dict[int, Tensor] | None = None
        # the hooks belong to the body, so that a block that is compiled is compiled with its own
        for layer in layers:
            block = blocks[max(0, layer - 1)]
            if layer == 0:
                block.register_forward_pre_hook(self._hear_input, with_kwargs=True)
            else:
                block.register_forward_hook(self._hearing(layer))

    @contextmanager
    def listening(self) -> Iterator[dict[int, Tensor]]:
        """Inside, the body is run once; afterwards the states of each layer are in the dictionary.
        A block that backward computes again is not listened to.
        """
        seen = self._seen = {}
        try:
            yield seen
        finally:
            self._seen = None
        if self._norm is not None:
            for layer, states in seen.items():
                seen[layer] = self._norm(states)

    def _hear_input(self, module: nn.Module, given: Any, named: dict[str, Any]) -> None:
        if self._seen is not None:
            self._seen[0] = given[0] if given else named["hidden_states"]

    def _hearing(self, layer: int) -> Callable[..., None]:
        def hear(module: nn.Module, given: Any, output: Any) -> None:
            if self._seen is not None:
                self._seen[layer] = output[0] if isinstance(output, tuple) else output

        return hear


def keep_blocks(body: Any, count: int, *, key: str) -> bool:
    """Remove all but the first `count` blocks of a body, in place; whether there were more."""
    _, blocks = _stack_of(body, key)
    _check([count], len(blocks), len(blocks), key)
    has_more = len(blocks) > count
    del blocks[count:]
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if hasattr(body.config, name):
            setattr(body.config, name, count)
    return has_more


def final_norm(parent: nn.Module) -> nn.Module | None:
    """The norm behind the last block, which stands beside the list of blocks; None: there is
    none.
    """
    children = dict(parent.named_children())
    return next((children[name] for name in _FINAL_NORMS if name in children), None)


def _check(layers: Sequence[int], blocks: int, most: int, key: str) -> None:
    if max(layers) > most:
        raise ConfigError(
            f"{key}: got {max(layers)}, but the base has {blocks} blocks, want at most {most}. "
            "All of them are the whole model, which needs no layer of its own."
        )


def _stack_of(body: Any, key: str) -> tuple[nn.Module, nn.ModuleList]:
    """The list of blocks of a body, and the module that it stands in."""
    if body.config.model_type in T5:
        raise ConfigError(
            f"{key}: the blocks of a {body.config.model_type} are not listened to one by one. Use "
            "another base, such as a BERT, or leave it out."
        )
    found = [
        (parent, blocks)
        for parent in body.modules()
        for blocks in parent.children()
        if isinstance(blocks, nn.ModuleList)
        and len(blocks)
        and all(isinstance(block, GradientCheckpointingLayer) for block in blocks)
    ]
    if len(found) != 1:
        raise ConfigError(
            f"{key}: got a {body.config.model_type} with {len(found)} lists of blocks, want one. "
            "Use another base, such as a BERT, or leave it out."
        )
    return found[0]
