"""Adapters in files, as peft lays them out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainer.config.block import Strict, validate
from trainer.config.optimizer.lora import Lora
from trainer.errors import ConfigError
from trainer.files import safetensors_file
from trainer.models.adapters.names import ROWS, in_file, is_adapter, layer_of
from trainer.models.adapters.targets import fits, whole_names
from trainer.models.frozen.freezing import load_into

ADAPTER, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BASE = "adapter_base.json"  # what the adapters were trained on
# Keys of adapter_config.json that change what adapters compute, and no name or shape of a tensor.
_FOREIGN = ("use_qalora", "layer_replication", "lora_bias")
_OUTPUTS = ("lm_head", "embed_out")  # what the output layers of decoders are called
_MOVED = re.compile(r"pissa|olora|corda|loftq")  # these begin by changing the base's weights
_TASK_TYPES: dict[str, str | None] = {
    "masked_lm": None,  # peft has no word for it
    "causal_lm": "CAUSAL_LM",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
    "encoder": "FEATURE_EXTRACTION",
}


class _TrainedOn(Strict):
    """adapter_base.json."""

    base_fingerprint: str


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

    weights: of what trains in one base, by the names there. kind: of the base, as
    base_model.Kind. base: its folder or Hub id; None where it has none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layers = list(dict.fromkeys(layer_of(name) for name in weights if is_adapter(name)))
    leaves = sorted({layer.rpartition(".")[2] for layer in layers})
    targets = how.targets if isinstance(how.targets, list) else leaves
    ranks = {layer: len(weights[f"{layer}.lora_A.default.weight"]) for layer in layers}
    alphas = dict.fromkeys(layers, how.alpha)
    for layer in layers:
        own = (one.alpha for one in how.patterns if fits(one.match, layer))
        alphas[layer] = next(own, None) or how.alpha
    content = {
        "peft_type": "LORA",
        "task_type": _TASK_TYPES[kind],
        "base_model_name_or_path": base,
        "r": how.r,
        "lora_alpha": how.alpha,
        "lora_dropout": how.dropout,
        "target_modules": targets if how.layers is None and how.parts is None else layers,
        "use_rslora": how.rslora,
        "use_dora": how.dora,
        "bias": how.bias,
        "inference_mode": True,
    }
    more = {
        "rank_pattern": {f"^{name}": r for name, r in ranks.items() if r != how.r},
        "alpha_pattern": {f"^{name}": one for name, one in alphas.items() if one != how.alpha},
        "modules_to_save": how.modules_to_save,
        "trainable_token_indices": {
            name.removesuffix(f".{ROWS}"): how.tokens for name in weights if name.endswith(ROWS)
        },
    }
    content |= {key: value for key, value in more.items() if value}
    (folder / ADAPTER).write_text(json.dumps(content, indent=2) + "\n")
    tensors = {in_file(name): values for name, values in weights.items()}
    safetensors_file.write_tensors(folder, WEIGHTS, tensors)
    about = _TrainedOn(base_fingerprint=fingerprint)
    (folder / _BASE).write_text(json.dumps(about.model_dump(), indent=2) + "\n")


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
        names |= {"bias": "bias"}
        values = {ours: content[theirs] for theirs, ours in names.items() if theirs in content}
        targets = values.get("targets")
        outputs = [name for name in targets or [] if name in _OUTPUTS]
        if isinstance(targets, list) and outputs:  # it may share its matrix
            others = [name for name in targets if name not in outputs]
            values |= {"targets": others or None, "parts": ["output"]}
        values["modules_to_save"] = content.get("modules_to_save") or []
        values["patterns"] = _patterns(
            content.get("rank_pattern") or {}, content.get("alpha_pattern") or {}
        )
        values["tokens"] = _tokens(content.get("trainable_token_indices") or [])
        layers = content.get("layers_to_transform")
        if layers is not None:
            values["layers"] = [layers] if isinstance(layers, int) else layers
        foreign = [key for key in _FOREIGN if content.get(key)]
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


def _patterns(ranks: dict[str, int], alphas: dict[str, int]) -> list[dict[str, Any]]:
    """Patterns of ours for those of peft. ValueError for a regular expression."""
    entries: dict[str, dict[str, Any]] = {}
    for key, patterns in (("r", ranks), ("alpha", alphas)):
        for pattern, value in patterns.items():
            name = pattern.removeprefix("^")
            if not re.fullmatch(r"[\w.]+", name):
                raise ValueError(f"{pattern!r} is a regular expression, want the name of a layer")
            entries.setdefault(name, {"match": name})[key] = value
    return list(entries.values())


def _tokens(of_layers: dict[str, list[int]] | list[int]) -> list[int]:
    """The tokens whose rows train. ValueError when those of several embeddings do."""
    if isinstance(of_layers, list):
        return of_layers
    if len(of_layers) > 1:
        raise ValueError(f"trainable_token_indices of {', '.join(of_layers)}, want one embedding")
    return next(iter(of_layers.values()))


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
    """Fill the adapters of an adapted base, and what trains whole beside them, from a folder;
    ConfigError when they do not fit.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise ConfigError(
            f"{folder} holds no {WEIGHTS}. Give a best/ or final/ folder of a run with lora."
        )
    holder, how = nn.Module(), read(folder)
    whole: set[str] = set() if how is None else whole_names(base, how)
    for name, parameter in base.named_parameters():
        if is_adapter(name) or name in whole:
            place = in_file(name).replace(".", "/")
            # the same storage: what is copied into the holder is in the base
            holder.register_parameter(place, nn.Parameter(parameter.detach(), False))
    tensors = {name.replace(".", "/"): values for name, values in safetensors_file.tensors_of(path)}
    load_into(holder, tensors, source=str(path))


def refuse(folder: Path, *, because: str) -> None:
    """ConfigError when a folder holds adapters where a whole model is wanted."""
    if are_in(folder):
        raise ConfigError(
            f"{folder} holds adapters without their base, {because}.\nTrain it with "
            '"lora": {"export": "merged"}, or fold them into it: '
            f"`lathe merge {folder} --out NEW`; for adapters of peft: "
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
