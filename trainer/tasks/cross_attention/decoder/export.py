"""The trained layers as a folder: the added weights, adapters in their base, and that base.

The base is there by reference with a fingerprint, or merged into the folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.config.block import Strict, validate
from trainer.config.schema import Base, RandomBase
from trainer.data import vocabulary
from trainer.errors import ConfigError, ResumeError
from trainer.files import safetensors_file
from trainer.models import adapters, base_model, base_source
from trainer.models.weights import absent, generation_file, model_folder
from trainer.protocol.task import Places
from trainer.tasks.cross_attention.config import Config, Layers
from trainer.tasks.cross_attention.decoder import foreign
from trainer.tasks.cross_attention.decoder.model import CrossAttentionModel
from trainer.tasks.cross_attention.decoder.weights import PREFIX, load_added, read_added

DESCRIPTION = "cross_attention.json"
MERGED = "./base"  # the base of a merged export: a folder in it


class Reference(Strict):
    """The base model that an export names."""

    base: Base


def write(
    folder: Path, weights: Mapping[str, Tensor], cfg: Config, *, fingerprint: str, tokenizer: Any
) -> dict[str, Any]:
    """Write model.safetensors (published names), cross_attention.json and the tokenizer's files.

    It returns what cross_attention.json says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    added = {name: tensor for name, tensor in weights.items() if name.startswith(PREFIX)}
    safetensors_file.write_tensors(folder, "model.safetensors", added)
    described = cfg.model_dump(mode="json")
    content = {name: described[name] for name in ("base", "layers", "data")}
    content |= {"base_fingerprint": fingerprint, "precision": cfg.train.precision}
    if cfg.train.base_bits is not None:
        content["base_bits"] = cfg.train.base_bits
    (folder / DESCRIPTION).write_text(json.dumps(content, indent=2) + "\n")
    model_folder.write_tokenizer(folder, tokenizer)
    return content


def load(
    folder: Path, places: Places, *, precision: str = "fp32", is_packed: bool = True
) -> CrossAttentionModel:
    """The base that `folder` refers to, or holds, with its added layers, in evaluation mode.

    is_packed: a base that was trained on in 8 or 4 bits has them here, too.
    Raises ConfigError when the folder is no export, ResumeError when the base is not the one that
    was trained on.
    """
    content = read_description(folder)
    base = base_of(folder, content)
    fingerprint, expected = base_source.fingerprint(base, places), content["base_fingerprint"]
    if fingerprint != expected:
        raise ResumeError(
            f"{folder}: its layers were trained on base {expected}, but {content['base']!r} is now "
            f"{fingerprint}.\n"
            "Put the old base back: these layers mean nothing on another one."
        )
    layers = validate(Layers, content["layers"], source=str(folder / DESCRIPTION))
    bits = content.get("base_bits") if is_packed else None
    stock = base_model.load(base, places, precision=precision, bits=bits)
    absent.refuse(stock, is_trained=False)
    lora = adapters.read(folder)
    if lora is not None:
        stock = adapters.adapted(stock, lora, seed=0)
    model = CrossAttentionModel(stock, layers)
    load_added(model, read_added(folder), source=str(folder))
    if lora is not None:
        adapters.load(model.base, folder)
    return model.eval()


def read_description(folder: Path) -> dict[str, Any]:
    """cross_attention.json of an export. ConfigError when there is none."""
    path = folder / DESCRIPTION
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: {error}. Give a best/ or final/ folder of a cross_attention run."
        ) from None


def base_of(folder: Path, content: Mapping[str, Any]) -> Base:
    """The base that an export names.

    Where it was merged, it is the folder in the export, wherever that stands now.
    """
    if content["base"] == MERGED:
        return str(folder / MERGED)
    return validate(Reference, {"base": content["base"]}, source=str(folder / DESCRIPTION)).base


def places_of(folder: Path, cache_dir: Path) -> Places:
    """Where an export lies among runs: what its base needs when that is another experiment's."""
    return Places(data_path=None, cache_dir=cache_dir, savedir_base=folder.resolve().parent.parent)


def merge(folder: Path, out: Path, places: Places) -> None:
    """Write the export in `folder` once more into the empty folder `out`, with its base in it."""
    content = read_description(folder)
    precision = (
        "fp32"
        if isinstance(base_of(folder, content), RandomBase)
        else content.get("precision", "fp32")
    )
    model = load(folder, places, precision=precision, is_packed=False)  # checks the fingerprint
    tokenizer = vocabulary.load_tokenizer(str(folder), data_path=None, cache_dir=places.cache_dir)
    adapters.remove(model.base)  # they lie in the folder, beside the base
    weights = {name: parameter.detach() for name, parameter in model.base.named_parameters()}
    model_folder.write(out / MERGED, model.base.config, tokenizer, weights)
    for file in folder.iterdir():
        if file.is_file():
            shutil.copy(file, out)
    ends = _ends(folder, tokenizer)
    if isinstance(ends, list):
        generation_file.write(out / MERGED, model.base.config, eos_token_id=ends)
    fingerprint = base_source.fingerprint(str(out / MERGED), places)
    content |= {"base": MERGED, "base_fingerprint": fingerprint}
    content.pop("base_bits", None)
    (out / DESCRIPTION).write_text(json.dumps(content, indent=2) + "\n")
    foreign.write(out, content, model.base, source=MERGED, tokenizer=tokenizer, ends=ends)


def copy(folder: Path, out: Path, places: Places) -> None:
    """Write the export in `folder` once more into the empty folder `out`, with its base by name."""
    content = read_description(folder)
    shutil.copytree(folder, out, dirs_exist_ok=True)
    tokenizer = vocabulary.load_tokenizer(str(folder), data_path=None, cache_dir=places.cache_dir)
    base = base_of(folder, content)
    is_within = content["base"] == MERGED
    source = MERGED if is_within else base_source.resolve(base, places)
    stock = base_model.skeleton(base, places)
    ends = _ends(folder, tokenizer)
    foreign.write(out, content, stock, source=source, tokenizer=tokenizer, ends=ends)


def _ends(folder: Path, tokenizer: Any) -> int | list[int]:
    """The tokens that end an answer, as an export's generation_config.json says them; of an older
    export without one, the tokenizer's end.
    """
    ends = generation_file.ends_of_base(str(folder), None) or [vocabulary.eos_id(tokenizer)]
    return ends[0] if len(ends) == 1 else ends
