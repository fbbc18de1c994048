"""What stands on top of a base: its own output layer, and new weights, which lie in a file of their
own beside the base's, so that others can load the base alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.files import safetensors_file
from trainer.models.weight_files import find_file

HEAD_FILE = "head.safetensors"


class Head(nn.Linear):
    """A new linear layer on the states of a base: drawn under its own seed, the same on every rank,
    as torch would.

    It computes in fp32, whatever its weights are in: bf16 has 256 values between two powers of 2,
    and many a score would tie with another.
    """

    def __init__(self, base: Any, outputs: int = 1, *, seed: int) -> None:
        """base: a model of transformers, whose width and dtype are taken."""
        width = base.config.hidden_size
        super().__init__(width, outputs, dtype=next(base.parameters()).dtype)
        generator, bound = torch.Generator().manual_seed(seed), 1 / math.sqrt(width)
        if self.weight.device.type != "meta":
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.copy_(
                        torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
                    )

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.float(), self.weight.float(), self.bias.float())


def logits_head(base: Any) -> Callable[[Tensor], Tensor]:
    """(..., D) states -> (..., V) logits: a base's output layer, and what its family does behind
    it.

    Gemma caps its logits, Granite divides and Cohere multiplies them. Source: transformers 5.23.
    """
    layer, config = base.get_output_embeddings(), base.config
    cap: float | None = getattr(config, "final_logit_softcapping", None)
    scale: float = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0

    def logits_of(hidden: Tensor) -> Tensor:
        logits = layer(hidden) if scale == 1.0 else layer(hidden) * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return logits_of


def scales_states(config: Any) -> bool:
    """Whether a model with T5's decoder multiplies its states by d_model**-0.5 before its head.

    T5 v1.0 and umT5 do, T5 v1.1 and mT5 do not. Source: transformers 5.23.
    """
    if config.model_type == "umt5":
        return config.tie_word_embeddings
    return config.model_type == "t5" and config.scale_decoder_outputs


def write_head(folder: Path, head: Mapping[str, Tensor]) -> None:
    """Add a head's weights, by their names within it, to the folder of its base."""
    safetensors_file.write_tensors(folder, HEAD_FILE, head)


@torch.no_grad()
def load_head(head: nn.Module, source: str) -> bool:
    """Fill a head from a folder or Hub id of ours; False when it has none. ConfigError when it does
    not fit.
    """
    from safetensors.torch import load_file

    file = find_file(source, HEAD_FILE)
    if file is None:
        return False
    tensors = load_file(file)
    for name, parameter in head.named_parameters():
        if name not in tensors or tensors[name].shape != parameter.shape:
            got = tuple(tensors[name].shape) if name in tensors else "nothing"
            raise ConfigError(
                f"{file}: {name} is {got}, want {tuple(parameter.shape)}. Export it again."
            )
        parameter.copy_(tensors[name])
    return True
