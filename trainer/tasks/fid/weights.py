"""The table of position biases in cross-attention, which a plain T5 lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainer.errors import ConfigError
from trainer.models.weights.weight_files import find_file

if TYPE_CHECKING:
    from trainer.config.schema import RandomBase

# transformers before 4.0 gave cross-attention this table, later versions do not (huggingface
# #8518).
CROSS_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


@torch.no_grad()
def add_cross_bias(t5: Any, source: str | RandomBase) -> None:
    """Fill the table of cross-attention's position biases from the folder `source`.

    ConfigError when the folder holds no such table.
    """
    from safetensors import safe_open

    file = find_file(source, "model.safetensors") if isinstance(source, str) else None
    if file is not None:
        with safe_open(file, framework="pt") as tensors:
            if CROSS_BIAS in tensors.keys():  # noqa: SIM118 (a safetensors file is no dictionary)
                table = t5.decoder.block[0].layer[1].EncDecAttention.relative_attention_bias.weight
                table.copy_(tensors.get_tensor(CROSS_BIAS))
                return
    raise ConfigError(
        f"reader.compat_cross_bias: {source if isinstance(source, str) else 'a random base'} holds "
        "no table of cross-attention position biases. Use a folder that `python -m trainer import "
        "fid ... --compat_cross_bias` wrote, or leave compat_cross_bias out."
    )
