"""A plausibility verifier: an encoder, the state of a statement's last token, a linear head, a temperature."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer import shards
from trainer.data.sources import shown
from trainer.encoder_only import find_file
from trainer.errors import ConfigError

# S statements, L tokens of the longest, D width

HEAD_FILE, DESCRIPTION = "head.safetensors", "vera.json"


class Head(nn.Linear):
    """A linear layer that computes in fp32, whatever its weights are in.

    bf16 logits would have 256 values between two powers of 2, and tied statements count as answered rightly.
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.float(), self.weight.float(), self.bias.float())


class Verifier(nn.Module):
    """An encoder (T5's, or a decoder's body) and a head on the state of each statement's last token."""

    def __init__(self, encoder: Any, *, seed: int) -> None:
        super().__init__()
        encoder.config.use_cache = False  # a decoder's body would fill one in training
        self.encoder = encoder
        width = encoder.config.hidden_size
        self.head = Head(width, 1, dtype=next(encoder.parameters()).dtype)
        generator, bound = torch.Generator().manual_seed(seed), 1 / math.sqrt(width)  # torch's own for a linear layer
        if self.head.weight.device.type != "meta":
            with torch.no_grad():
                for parameter in self.head.parameters():
                    parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """(S, L) right-padded ids and mask -> {"hidden": (S, D) of the last tokens, "logits": (S,) fp32}."""
        states_SLD = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        last_S = attention_mask.sum(-1) - 1
        hidden_SD = states_SLD[torch.arange(len(last_S), device=last_S.device), last_S]
        return {"hidden": hidden_SD, "logits": self.head(hidden_SD).squeeze(-1)}


def write_head(folder: Path, head: Mapping[str, Tensor], *, temperature: float = 1.0) -> None:
    """Add a head ("weight" (1, D), "bias" (1,)) and its temperature to an encoder's folder."""
    shards.write_tensors(folder, HEAD_FILE, head)
    (folder / DESCRIPTION).write_text(json.dumps({"temperature": temperature}) + "\n")


@torch.no_grad()
def load_head(model: Verifier, source: str) -> bool:
    """Fill the head from a folder or Hub id of ours; False when it has none. ConfigError when it does not fit."""
    from safetensors.torch import load_file

    file = find_file(source, HEAD_FILE)
    if file is None:
        return False
    tensors = load_file(file)
    for name, parameter in model.head.named_parameters():
        if name not in tensors or tensors[name].shape != parameter.shape:
            got = tuple(tensors[name].shape) if name in tensors else "nothing"
            raise ConfigError(f"{file}: {name} is {got}, want {tuple(parameter.shape)}. Export it again.")
        parameter.copy_(tensors[name])
    return True


def read_temperature(folder: Path) -> float:
    """What logits of the model in `folder` are divided by; 1.0 where nothing was calibrated."""
    path = folder / DESCRIPTION
    if not path.is_file():
        return 1.0
    try:
        value = json.loads(path.read_text())["temperature"]
    except (ValueError, KeyError, TypeError):
        value = None
    if not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"{path}: temperature is {shown(value)}, want a number above 0. Calibrate the model again.")
    return float(value)
