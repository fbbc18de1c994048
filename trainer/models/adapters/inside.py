"""Adapters in a model: put in, switched off, merged, taken out.

peft replaces the base's linear layers by its own. The base keeps its class and its methods, so
tasks call it like a base without adapters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.files.packages import extra
from trainer.models.adapters import tokens
from trainer.models.adapters.names import is_adapter
from trainer.models.adapters.targets import (
    adapted_names,
    excluded,
    targets_of,
    whole_names,
)
from trainer.models.lean import adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainer.config.optimizer.lora import Lora


def adapted(base: PreTrainedModel, how: Lora, *, seed: int) -> PreTrainedModel:
    """The same base with new adapters in it. `freeze_rest` says what else trains.

    The base may be on the meta device, or partitioned (ZeRO-3). Adapters are drawn under `seed`,
    for all ranks must begin with the same ones. ConfigError for targets that the base does not
    have.
    """
    peft = extra("peft", "lora")
    targets = targets_of(base, how, peft)
    is_meta = next(base.parameters()).device.type == "meta"
    init = {"default": True}.get(how.init, how.init)
    config = peft.LoraConfig(
        r=how.r,
        lora_alpha=how.alpha,
        lora_dropout=how.dropout,
        target_modules=targets.names,
        rank_pattern={f"^{name}": r for name, r in targets.ranks.items()},
        alpha_pattern={f"^{name}": alpha for name, alpha in targets.alphas.items()},
        exclude_modules=excluded(how.modules_to_save) if how.modules_to_save else None,
        init_lora_weights=True if is_meta else init,  # nothing is drawn or computed there
        use_rslora=how.rslora,
        use_dora=how.dora,
    )
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("meta") if is_meta else contextlib.nullcontext(),
    ):
        torch.manual_seed(seed)
        if changes_base(how):
            for name in adapted_names(base, targets.names):
                layer: Any = base.get_submodule(name)
                shape = getattr(layer.weight, "ds_shape", layer.weight.shape)
                r = targets.ranks.get(name, how.r)
                if r > min(shape):
                    raise ConfigError(
                        f'lora.init="{how.init}": rank {r} of {name} is beyond the {min(shape)} '
                        "singular values of its weight. Give a smaller r, or another init."
                    )
        # not get_peft_model: it wraps the base, and keeps adapters in fp32 beside a bf16 base,
        # while the engine holds every weight in one dtype
        adapted_base = peft.inject_adapter_in_model(config, base)
        tokens.put_in(adapted_base, how)
        adapter.keep_less(adapted_base)
        return adapted_base


def layers_of(model: nn.Module) -> list[Any]:
    """The layers that hold adapters."""
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def freeze_rest(base: nn.Module, how: Lora) -> None:
    """Freeze everything in a base, also weights that a task has added, except its adapters and what
    trains whole beside them. ConfigError for biases and modules that the base does not have.
    """
    whole = whole_names(base, how)
    for name, parameter in base.named_parameters():
        parameter.requires_grad_(is_adapter(name) or name in whole)


@contextlib.contextmanager
def switched_off(layers: Collection[Any]) -> Iterator[None]:
    """Switches the adapters of these layers off for as long as it is open."""
    # not enable_adapters(False): it makes them untrainable too, which an engine would not expect
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merge(base: nn.Module) -> None:
    """Add every adapter to the weight that it stands beside, and put the plain layers back.
    ConfigError for adapters of an output layer that shares its matrix with the embedding.

    The sum is rounded once to the weight's dtype, whatever that is.
    """
    output: Any = getattr(base, "get_output_embeddings", lambda: None)()
    if output is not None and hasattr(output, "lora_A"):
        whole = output.get_base_layer().weight
        if any(one.weight is whole for one in base.modules() if isinstance(one, nn.Embedding)):
            raise ConfigError(
                "the output layer has adapters, and shares its matrix with the embedding, which "
                "would change, too: they cannot be merged. Use them beside their base."
            )
    for layer in layers_of(base):
        dtype = layer.get_base_layer().weight.dtype
        layer.float().merge()
        layer.to(dtype)
    tokens.take_out(base, merges=True)
    remove(base)


def remove(base: nn.Module) -> None:
    """Put the plain layers back, without their adapters."""
    for name, module in list(base.named_modules()):
        if hasattr(module, "lora_A"):
            base.set_submodule(name, module.get_base_layer())  # pyright: ignore[reportCallIssue]
    tokens.take_out(base, merges=False)


def merged_weights(
    model: nn.Module, weights: Mapping[str, Tensor], *, bases: Collection[str]
) -> dict[str, Tensor]:
    """The trained weights of a model by name, where each of `bases` has merged weights instead of
    adapters.

    model: a new model as at the start of the run, on the CPU and in the dtype of training; it is
    changed. bases: names of its modules that hold adapters.
    """
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in weights.items():
            own[name].copy_(values)
    inside = tuple(f"{place}." for place in bases)
    whole = {name: values for name, values in weights.items() if not name.startswith(inside)}
    for place in bases:
        base = model.get_submodule(place)
        merge(base)
        whole |= {f"{place}.{name}": p.detach() for name, p in base.named_parameters()}
    return whole


# Adapters that begin as a part of the base (PiSSA)
# --------------------------------------------------------------------------------------------------


def changes_base(how: Lora | None) -> bool:
    """Whether adapters begin as the largest part of the base's weights, which is taken out of
    them.
    """
    return how is not None and how.init.startswith("pissa")


def beside_the_whole_base(
    model: nn.Module, weights: Mapping[str, Tensor], how: Lora
) -> dict[str, Tensor]:
    """The same weights with adapters of twice the rank, which belong beside the base as it was
    before a part of it was taken out: what was learnt, and minus what the adapters began with.

    model: a new model as at the start of the run, on the CPU. Source: peft's conversion of PiSSA,
    https://github.com/huggingface/peft/tree/main/examples/pissa_finetuning.
    """
    began = dict(model.named_parameters())
    # rank-stabilised adapters are scaled by 1 / sqrt(r), so twice the rank takes sqrt(2) of it
    factor = math.sqrt(2) if how.rslora else 1.0
    tensors: dict[str, Tensor] = {}
    for name, values in weights.items():
        if not is_adapter(name):
            tensors[name] = values
            continue
        first = began[name].detach().to(values.dtype)
        if ".lora_A." in name:
            tensors[name] = torch.cat([values, first])
        else:
            tensors[name] = torch.cat([values, -first], dim=1) * factor
    return tensors


def beside_the_whole_base_as(how: Lora) -> Lora:
    """How the adapters of beside_the_whole_base are made."""
    alphas = 1 if how.rslora else 2
    patterns = [
        one.model_copy(update={"r": one.r and 2 * one.r, "alpha": one.alpha and alphas * one.alpha})
        for one in how.patterns
    ]
    doubled = {"r": 2 * how.r, "alpha": alphas * how.alpha, "patterns": patterns}
    return how.model_copy(update=doubled | {"init": "default"})
