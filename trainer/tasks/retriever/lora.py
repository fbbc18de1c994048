"""Low-rank adapters in an encoder that stays as it is, in peft's own files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.files import safetensors_file
from trainer.models.freezing import load_into

if TYPE_CHECKING:
    from trainer.tasks.retriever.config import Lora

ADAPTER, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = ".default"  # peft's name of the only adapter, which its files leave out


def adapted(model: Any, how: Lora, *, seed: int) -> Any:
    """The model with new adapters, the only parameters that train. ConfigError when no module is
    called like a target.

    Seeded by itself: all ranks must begin with the same adapters.
    """
    peft = _peft()
    config = peft.LoraConfig(
        task_type=peft.TaskType.FEATURE_EXTRACTION,
        r=how.r,
        lora_alpha=how.alpha,
        lora_dropout=how.dropout,
        target_modules=list(how.targets),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            # peft would keep adapters in fp32 beside a bf16 base; the engine holds every weight in
            # one dtype
            return peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        except ValueError as error:
            names = sorted(
                {
                    name.rpartition(".")[2]
                    for name, one in model.named_modules()
                    if isinstance(one, nn.Linear)
                }
            )
            raise ConfigError(
                f"lora.targets={how.targets}: {str(error).splitlines()[0]} Linear layers there "
                f"are {', '.join(names)}."
            ) from None


def write_adapter(
    folder: Path, weights: Mapping[str, Tensor], how: Lora, *, base: str | None
) -> None:
    """Write adapter_config.json and adapter_model.safetensors, as peft's from_pretrained reads
    them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION",
        "base_model_name_or_path": base,
        "r": how.r,
        "lora_alpha": how.alpha,
        "lora_dropout": how.dropout,
        "target_modules": list(how.targets),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / ADAPTER).write_text(json.dumps(content, indent=2) + "\n")
    safetensors_file.write_tensors(
        folder, _WEIGHTS, {name.replace(_NAME, ""): values for name, values in weights.items()}
    )


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Fill the adapters of `adapted(...)` from a folder; ConfigError when they do not fit."""
    trained = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    path = folder / _WEIGHTS
    if not path.is_file():
        raise ConfigError(
            f"{folder} holds no {_WEIGHTS}. Give a best/ or final/ folder of a run with lora."
        )
    holder = nn.Module()
    for name, parameter in trained.items():
        holder.register_parameter(
            name.replace(_NAME, "").replace(".", "/"), nn.Parameter(parameter, False)
        )
    found = {name.replace(".", "/"): values for name, values in safetensors_file.tensors_of(path)}
    load_into(holder, found, source=str(path))


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError:
        raise ConfigError(
            'lora needs the package peft. Install it: pip install "lathe[lora]".'
        ) from None
    return peft
