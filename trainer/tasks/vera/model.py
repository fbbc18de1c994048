"""A plausibility verifier: a T5's encoder or a decoder's body, a linear head on the last token, a
temperature.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.data.readers.jsonl import preview
from trainer.errors import ConfigError
from trainer.models.decoder import streams
from trainer.models.decoder.backbone import Backbone, backbone_of
from trainer.models.families import DECODERS, T5, check_family
from trainer.models.head import Head
from trainer.models.packed import t5_encoder
from trainer.models.packed.layout import pack

# S statements, L tokens of the longest, M tokens of all of them, D width

_ADVICE = (
    "A statement is judged by the state of its end: choose a T5 such as google/t5-v1_1-base, or a "
    "decoder."
)
DESCRIPTION = "vera.json"


class Verifier(nn.Module):
    """An encoder (T5's, or a decoder's body) and a head on each statement's last token."""

    def __init__(self, encoder: Any, *, seed: int, recompute_every: int | None = None) -> None:
        """recompute_every: k computes every k-th block again in the backward pass.

        ConfigError for an encoder of another family.
        """
        super().__init__()
        check_family(encoder.config, (*T5, *DECODERS), advice=_ADVICE)
        self.recompute_every = recompute_every
        encoder.config.use_cache = False  # a decoder's body would fill one in training
        self.encoder = encoder
        self.backbone: Backbone | None = None  # of a decoder's body
        if encoder.config.model_type in DECODERS:
            self.backbone = backbone_of(encoder, advice=_ADVICE)
        self.head = Head(encoder, seed=seed)

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        """Statements as read_by lays them out -> {"hidden": (S, D), "logits": (S,) fp32}.

        hidden: the states of the last tokens. A batch may also hold (S, L) input_ids and
        attention_mask, padded on the right, which takes longer.
        """
        if "tokens" in batch:
            hidden_SD = self._states(batch)[batch["last"]]
        else:
            mask_SL = batch["attention_mask"]
            states_SLD = self.encoder(
                input_ids=batch["input_ids"], attention_mask=mask_SL
            ).last_hidden_state
            hidden_SD = states_SLD[
                torch.arange(len(mask_SL), device=mask_SL.device), mask_SL.sum(-1) - 1
            ]
        logits_S = self.head(hidden_SD).squeeze(-1)
        if "which" in batch:
            hidden_SD, logits_S = hidden_SD[batch["which"]], logits_S[batch["which"]]
        return {"hidden": hidden_SD, "logits": logits_S}

    def _states(self, batch: Mapping[str, Tensor]) -> Tensor:
        """(M, D) states of the tokens of a packed batch."""
        if self.backbone is not None:
            every = self.recompute_every if self.training else None
            return streams.encode(self.backbone, batch, recompute_every=every)
        stack = self.encoder.encoder  # of a T5EncoderModel
        return t5_encoder.encode(stack, batch, recompute_every=self.recompute_every)


def read_by(statements: Sequence[Sequence[int]], *, once: bool = False) -> dict[str, Tensor]:
    """Token rows as a verifier reads them: one stream of real tokens (layout.pack), and `last`
    (S,), the place of each statement's last token in it.

    once: equal statements are read once, so that their logits are equal to the last bit; `which`
    (S,) then gives the place of each statement's state and logit. Metrics count a tie as right, and
    rounding must not break it.
    """
    keys = [tuple(int(token) for token in statement) for statement in statements]
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    read = list(places) if once else keys
    ends = np.cumsum([len(statement) for statement in read]) - 1
    packed = {**pack(read, bucketed=True), "last": torch.from_numpy(ends)}
    return packed | ({"which": torch.tensor([places[key] for key in keys])} if once else {})


def layout_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a batch that read_by made."""
    names = ("tokens", "passage", "position", "starts", "cells", "last", "which")
    return {
        name: tensor for name, tensor in batch.items() if name in names or name.startswith("grid_")
    }


def write_description(folder: Path, temperature: float, **more: Any) -> None:
    """Write vera.json beside a verifier: the temperature that divides its logits, and `more`."""
    (folder / DESCRIPTION).write_text(json.dumps({"temperature": temperature, **more}) + "\n")


def read_temperature(folder: Path) -> float:
    """The temperature that divides logits of the model in `folder`; 1.0 without calibration."""
    path = folder / DESCRIPTION
    if not path.is_file():
        return 1.0
    try:
        value = json.loads(path.read_text())["temperature"]
    except (ValueError, KeyError, TypeError):
        value = None
    if not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(
            f"{path}: temperature is {preview(value)}, want a number above 0. Calibrate the model "
            "again."
        )
    return float(value)
