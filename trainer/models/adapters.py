"""Low-rank adapters (LoRA, rsLoRA, DoRA) in a frozen base, stored in peft's file format.

peft replaces the base's linear layers by its own. The base keeps its class and its methods, so
tasks call it like a base without adapters.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.config.block import Strict, validate
from trainer.config.schema import Lora
from trainer.errors import ConfigError, nearest
from trainer.files import safetensors_file
from trainer.files.packages import extra
from trainer.models.frozen.freezing import load_into

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BASE = "adapter_base.json"  # what the adapters were trained on
_PREFIX = "base_model.model."  # of every name in peft's files
_MARK = re.compile(r"\.lora_(A|B|magnitude_vector)\.default(\.weight)?$")
# The linear layers in a block of a Llama-like decoder; a base that has all of them gets adapters
# there.
_LLAMA = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
# Keys of adapter_config.json that change what adapters compute, and no name or shape of a tensor.
_PATTERNS = ("alpha_pattern", "rank_pattern", "use_qalora", "layer_replication")
_MOVED = re.compile(r"pissa|olora|corda|loftq")  # these begin by changing the base's weights
_TASK_TYPES = {
    "causal_lm": "CAUSAL_LM",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
    "encoder": "FEATURE_EXTRACTION",
}


class _TrainedOn(Strict):
    """adapter_base.json."""

    base_fingerprint: str


# In a model
# --------------------------------------------------------------------------------------------------


def adapted(base: PreTrainedModel, how: Lora, *, seed: int) -> PreTrainedModel:
    """The same base with new adapters in it, which are its only trainable parameters.

    The base may be on the meta device, or partitioned (ZeRO-3). Adapters are drawn under `seed`,
    for all ranks must begin with the same ones. ConfigError for targets that the base does not
    have.
    """
    peft = extra("peft", "lora")
    targets = _targets(base, how.targets, peft)
    config = peft.LoraConfig(
        r=how.r,
        lora_alpha=how.alpha,
        lora_dropout=how.dropout,
        target_modules=targets,
        use_rslora=how.rslora,
        use_dora=how.dora,
    )
    is_meta = next(base.parameters()).device.type == "meta"
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("meta") if is_meta else contextlib.nullcontext(),
    ):
        torch.manual_seed(seed)
        # not get_peft_model: it wraps the base, and keeps adapters in fp32 beside a bf16 base,
        # while the engine holds every weight in one dtype
        return peft.inject_adapter_in_model(config, base)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return _MARK.search(name) is not None


def layers_of(model: nn.Module) -> list[Any]:
    """The layers that hold adapters."""
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def freeze_rest(base: nn.Module) -> None:
    """Freeze everything in a base except its adapters, also weights that a task has added."""
    for name, parameter in base.named_parameters():
        parameter.requires_grad_(is_adapter(name))


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

    The sum is rounded once to the weight's dtype, whatever that is.
    """
    for layer in layers_of(base):
        dtype = layer.get_base_layer().weight.dtype
        layer.float().merge()
        layer.to(dtype)
    remove(base)


def remove(base: nn.Module) -> None:
    """Put the plain layers back, without their adapters."""
    for name, module in list(base.named_modules()):
        if hasattr(module, "lora_A"):
            base.set_submodule(name, module.get_base_layer())  # pyright: ignore[reportCallIssue]


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
    whole = {name: values for name, values in weights.items() if not is_adapter(name)}
    for place in bases:
        base = model.get_submodule(place)
        merge(base)
        whole |= {f"{place}.{name}": p.detach() for name, p in base.named_parameters()}
    return whole


# Targets
# --------------------------------------------------------------------------------------------------


def _targets(base: Any, targets: list[str] | str | None, peft: Any) -> Any:
    """The layers to adapt, as peft takes them. ConfigError names every target that does not exist.

    The default is all seven projections of a Llama-like decoder, else peft's choice for the family,
    else all linear layers.
    """
    if isinstance(targets, str):
        return targets
    linear = {
        _leaf(name)
        for name, module in base.named_modules()
        if is_linear(module) and not _is_tied(base, module)
    }
    if targets is None:
        if linear.issuperset(_LLAMA):
            return list(_LLAMA)
        peft_targets = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        return peft_targets.get(base.config.model_type, "all-linear")
    problems = [_problem(base, target, linear) for target in targets]
    problems = [problem for problem in problems if problem]
    if problems:
        raise ConfigError(
            f"lora.targets={targets}: {'; '.join(problems)}.\nThe linear layers of a "
            f"{base.config.model_type} are {', '.join(sorted(linear))}. Name some of them, or use "
            '"all-linear", or leave targets out.'
        )
    return list(targets)


def is_linear(module: nn.Module) -> bool:
    """Whether peft has adapters for it that we train: a linear layer, or GPT-2's form of one."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (nn.Linear, Conv1D))


def _is_tied(base: Any, module: nn.Module) -> bool:
    """Whether it is an output layer whose matrix is the embedding: adapters would change both."""
    return module is base.get_output_embeddings() and any(
        one.weight is module.weight for one in base.modules() if isinstance(one, nn.Embedding)
    )


def _problem(base: nn.Module, target: str, linear: set[str]) -> str | None:
    """What is wrong with a target; None when it names linear layers alone."""
    matched = [
        module
        for name, module in base.named_modules()
        if name == target or name.endswith(f".{target}")
    ]
    if not matched:
        return f"there is no {target!r} ({nearest(target, sorted(linear))})"
    if any(_is_tied(base, module) for module in matched):
        return f"{target!r} shares its matrix with the embedding, which adapters cannot"
    if not all(map(is_linear, matched)):
        return f"{target!r} is no linear layer but a {type(matched[0]).__name__}"
    return None


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


# In files
# --------------------------------------------------------------------------------------------------


def write(
    folder: Path,
    weights: Mapping[str, Tensor],
    how: Lora,
    *,
    kind: str,
    base: str | None,
    fingerprint: str,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors, as peft's from_pretrained reads
    them, and adapter_base.json with the base's fingerprint.

    weights: of the adapters in one base, by their names in it. kind: of the base, as
    base_model.Kind. base: its folder or Hub id; None where it has none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in weights if is_adapter(name)]
    leaves = sorted({_leaf(_MARK.sub("", name)) for name in names})
    content = {
        "peft_type": "LORA",
        "task_type": _TASK_TYPES[kind],
        "base_model_name_or_path": base,
        "r": how.r,
        "lora_alpha": how.alpha,
        "lora_dropout": how.dropout,
        "target_modules": how.targets if isinstance(how.targets, list) else leaves,
        "use_rslora": how.rslora,
        "use_dora": how.dora,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / ADAPTER).write_text(json.dumps(content, indent=2) + "\n")
    safetensors_file.write_tensors(
        folder, _WEIGHTS, {_in_file(name): weights[name] for name in names}
    )
    about = _TrainedOn(base_fingerprint=fingerprint)
    (folder / _BASE).write_text(json.dumps(about.model_dump(), indent=2) + "\n")


def _in_file(name: str) -> str:
    """A parameter's name as peft's files have it: without the adapter's own, which is "default".

    peft 0.21, _get_adapter_state_dict: DoRA's magnitude is a module, but stands there as a tensor.
    """
    part = _MARK.search(name)
    assert part is not None, name
    last = "" if part[1] == "magnitude_vector" else ".weight"
    return f"{_PREFIX}{name[: part.start()]}.lora_{part[1]}{last}"


def are_in(folder: Path) -> bool:
    """Whether a folder holds adapters."""
    return (folder / ADAPTER).is_file()


def read(folder: Path) -> Lora | None:
    """How the adapters in a folder are made; None when it holds none. ConfigError for a kind of
    adapters that is not ours.
    """
    path = folder / ADAPTER
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        names = {"r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout"}
        names |= {"target_modules": "targets", "use_rslora": "rslora", "use_dora": "dora"}
        values = {ours: content[theirs] for theirs, ours in names.items() if theirs in content}
        foreign = [key for key in _PATTERNS if content.get(key)]
        begun = content.get("init_lora_weights")
        foreign += ["init_lora_weights"] if isinstance(begun, str) and _MOVED.match(begun) else []
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: {error}. Export the adapters again.") from None
    if foreign:
        says = ", ".join(f"{key}={content[key]!r}" for key in foreign)
        raise ConfigError(
            f"{path}: {says}, which makes adapters of another kind: got them, want adapters of one "
            "rank and scale beside an unchanged base. Merge them into their base with peft "
            "(merge_and_unload), and give the whole model."
        )
    return validate(Lora, values, source=str(path))


def check_base(folder: Path, fingerprint: str) -> None:
    """ConfigError when the adapters in a folder were trained on another base than this one."""
    path = folder / _BASE
    if not path.is_file():
        return
    trained_on = validate(
        _TrainedOn, json.loads(path.read_text()), source=str(path)
    ).base_fingerprint
    refuse_another_base(folder, trained_on, fingerprint)


def refuse_another_base(folder: Path, trained_on: str | None, fingerprint: str) -> None:
    """ConfigError when two fingerprints differ: of the base that the adapters in a folder were
    trained on, and of an experiment's.
    """
    if trained_on != fingerprint:
        raise ConfigError(
            f"{folder}: its adapters were trained on base {trained_on}, but this experiment's is "
            f"{fingerprint}.\nPut the old base back: they mean nothing in another one."
        )


def load(base: nn.Module, folder: Path) -> None:
    """Fill the adapters of an adapted base from a folder; ConfigError when they do not fit."""
    path = folder / _WEIGHTS
    if not path.is_file():
        raise ConfigError(
            f"{folder} holds no {_WEIGHTS}. Give a best/ or final/ folder of a run with lora."
        )
    holder = nn.Module()
    for name, parameter in base.named_parameters():
        if is_adapter(name):
            place = _in_file(name).replace(".", "/")
            # the same storage: what is copied into the holder is in the base
            holder.register_parameter(place, nn.Parameter(parameter.detach(), False))
    tensors = {name.replace(".", "/"): values for name, values in safetensors_file.tensors_of(path)}
    load_into(holder, tensors, source=str(path))


def refuse(folder: Path, *, because: str) -> None:
    """ConfigError when a folder holds adapters where a whole model is wanted."""
    if are_in(folder):
        raise ConfigError(
            f"{folder} holds adapters without their base, {because}.\nTrain it with "
            '"lora": {"export": "merged"}, or merge them with peft: '
            "PeftModel.from_pretrained(base, folder).merge_and_unload()."
        )


def loading(kind: str, folder: Path) -> str:
    """Python that makes `model` of what FOLDER, which is `folder`, holds, for a model card.

    kind: an Auto class of transformers.
    """
    if not are_in(folder):
        how = _attention_of(folder)
        return f"model = {kind}.from_pretrained(FOLDER{how}).eval()"
    base = json.loads((folder / ADAPTER).read_text())["base_model_name_or_path"]
    lines = [
        "from peft import PeftModel",
        "",
        f"base = {kind}.from_pretrained({base!r}{_attention_of(base)})",
        "model = PeftModel.from_pretrained(base, FOLDER).merge_and_unload().eval()",
    ]
    if (folder / "generation_config.json").is_file():
        lines[:1] = ["from peft import PeftModel", "from transformers import GenerationConfig"]
        lines.append("model.generation_config = GenerationConfig.from_pretrained(FOLDER)")
    return "\n".join(lines)


def _attention_of(folder: Any) -> str:
    """The argument that a folder whose model caps its attention needs in transformers 4: there
    "sdpa", the default, leaves the cap out.
    """
    path = Path(str(folder)) / "config.json"
    is_capped = path.is_file() and re.search(r'"attn_logit_softcapping": *[0-9]', path.read_text())
    return ', attn_implementation="eager"' if is_capped else ""
