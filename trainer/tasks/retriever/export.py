"""A trained retriever as a folder: Tevatron's layout, and a description of how to use it.

One encoder for both sides lies in the folder itself, two encoders lie in query_model/ and
passage_model/. A pooler lies in pooler.pt with pooler_config.json, the tokenizer in the folder.
Adapters (LoRA) lie in the place of the encoder, which is then left out.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.config.block import validate
from trainer.data import vocabulary
from trainer.errors import ConfigError
from trainer.models import adapters
from trainer.models.weights import model_folder
from trainer.tasks.retriever import sentence_folder
from trainer.tasks.retriever.config import Config, Encoder, Strict

if TYPE_CHECKING:
    from trainer.tasks.retriever.model import Pooler

log = logging.getLogger(__name__)

DESCRIPTION = "retriever_config.json"
OF_CROSS = "reranker_config.json"  # the description in an export of form="cross"
OF_LATE = "late_config.json"  # that of form="late"
OF_SPARSE = "sparse_config.json"  # that of form="sparse"
_DESCRIPTIONS = {"bi": DESCRIPTION, "cross": OF_CROSS, "late": OF_LATE, "sparse": OF_SPARSE}
# the keys of an experiment's `data` that the description states, and that hold for the model
DESCRIBED_DATA = (
    "separator",
    "query_prefix",
    "passage_prefix",
    "query_tokens",
    "passage_tokens",
    "append_eos",
)
POOLER, POOLER_CONFIG = "pooler.pt", "pooler_config.json"
QUERY, PASSAGE = "query_model", "passage_model"  # Tevatron's folders, and the names of our modules
LOG_SCALE = "log_scale.log_scale"  # the weight of a learnt temperature, which the description says


class Described(Strict):
    """retriever_config.json: how texts become vectors. base_fingerprint is "" for an experiment
    without lora.
    """

    pooling: str
    normalize: bool
    temperature: float
    tied: bool
    projection: dict[str, Any] | None
    separator: str
    query_prefix: str
    passage_prefix: str
    query_tokens: int
    passage_tokens: int
    append_eos: bool
    base_fingerprint: str = ""


def write(
    folder: Path,
    weights: Mapping[str, Tensor],
    cfg: Config,
    *,
    configs: Mapping[str, Any],
    tokenizer: Any,
    adapters_into: Callable[[Mapping[str, Tensor], Path], None],
    fingerprint: str,
) -> None:
    """Write trained weights, given by name, as a folder.

    configs: the transformers config of each side's base. adapters_into: a function that writes the
    adapters of one side into its folder, called when adapters are exported without their base.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for side, place in sides(folder, tied=cfg.encoder.tied).items():
        weights_of_side = {
            name.partition(".")[2]: values
            for name, values in weights.items()
            if name.startswith(f"{side}.")
        }
        if cfg.exports_adapters:
            adapters_into(weights_of_side, place)
            continue
        config = configs[side]
        config.dtype = next(iter(weights_of_side.values())).dtype
        model_folder.write(place, config, tokenizer, weights_of_side)
        if place != folder:
            # an experiment whose base is this one finds the folder by its config.json
            model_folder.write_config(folder, config)
    is_for_sentences = sentence_folder.can_say(cfg)
    if is_for_sentences:
        tokenizer = sentence_folder.with_pad(tokenizer)
    model_folder.write_tokenizer(folder, tokenizer)
    pooler = {
        name.partition(".")[2]: values
        for name, values in weights.items()
        if name.startswith("pooler.")
    }
    if pooler:
        _write_pooler(folder, pooler, cfg.encoder)
    if is_for_sentences:
        width = configs[QUERY].hidden_size
        ours = {name: values for name, values in pooler.items() if name.startswith("linear_q.")}
        sentence_folder.write(folder, cfg, width=width, pooler=ours)
    data = cfg.data.model_dump()
    encoder = cfg.encoder.model_dump(mode="json", exclude={"learn_temperature"})
    scale = weights.get(LOG_SCALE)
    if scale is not None:
        encoder["temperature"] = math.exp(-min(float(scale), math.log(100)))
    content = encoder | {name: data[name] for name in DESCRIBED_DATA}
    content["base_fingerprint"] = fingerprint
    (folder / DESCRIPTION).write_text(json.dumps(content, indent=2) + "\n")


def sides(folder: Path, *, tied: bool) -> dict[str, Path]:
    """The folder of each side's encoder; query_model alone when one encoder serves both sides."""
    return {QUERY: folder} if tied else {QUERY: folder / QUERY, PASSAGE: folder / PASSAGE}


def read_description(folder: Path) -> Described | None:
    """The description in an export; None for a folder that Tevatron wrote. ConfigError when it is
    malformed.
    """
    path = folder / DESCRIPTION
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: {error}. Export the model again.") from None
    return validate(Described, values, source=str(path))


def encoder_of(folder: Path, otherwise: Encoder) -> Encoder:
    """How the model in a folder embeds texts: by its description if it has one, else by its files,
    and by `otherwise` where they say nothing.
    """
    description = read_description(folder)
    if description is not None:
        names = ("pooling", "normalize", "temperature", "tied", "projection")
        return validate(
            Encoder,
            {name: getattr(description, name) for name in names},
            source=str(folder / DESCRIPTION),
        )
    update: dict[str, Any] = {"tied": not (folder / QUERY).is_dir()}
    if (folder / POOLER_CONFIG).is_file():
        config = json.loads((folder / POOLER_CONFIG).read_text())
        update["normalize"] = config["normalize"]
        update["projection"] = {
            "width": config["output_dim"],
            "in_width": config["input_dim"],
            "tied": config["tied"],
        }
    return validate(Encoder, {**otherwise.model_dump(mode="json"), **update}, source=str(folder))


# The pooler
# --------------------------------------------------------------------------------------------------


def _write_pooler(folder: Path, weights: Mapping[str, Tensor], how: Encoder) -> None:
    tied = "linear_p.weight" not in weights
    tensors = dict(weights)
    if tied:  # Tevatron's tied pooler has one layer under both names, and loads both
        tensors |= {
            name.replace("linear_q", "linear_p"): values for name, values in weights.items()
        }
    torch.save(tensors, folder / POOLER)
    out_width, in_width = weights["linear_q.weight"].shape
    config = {
        "input_dim": in_width,
        "output_dim": out_width,
        "tied": tied,
        "normalize": how.normalize,
    }
    (folder / POOLER_CONFIG).write_text(json.dumps(config) + "\n")


def is_projected(folder: Path) -> bool:
    """Whether a folder holds a pooler, or says that its vectors were projected by one."""
    description = read_description(folder)
    is_said = description is not None and description.projection is not None
    return is_said or (folder / POOLER).is_file()


@torch.no_grad()
def load_pooler(pooler: Pooler, folder: Path) -> None:
    """Fill a pooler from a folder; ConfigError when the folder has none, or one of another
    shape.
    """
    path = folder / POOLER
    if not path.is_file():
        raise ConfigError(
            f"{folder} holds no {POOLER}, but its vectors are projected, and a new one would be "
            "random. "
            "Copy the file there, or take encoder.projection out."
        )
    tensors = torch.load(path, map_location="cpu", weights_only=True)
    for name, parameter in pooler.named_parameters():
        got = tuple(tensors[name].shape) if name in tensors else "nothing"
        if got != tuple(parameter.shape):
            raise ConfigError(
                f"{path}: {name} is {got}, want {tuple(parameter.shape)}. Use the pooler of this "
                "model."
            )
        parameter.copy_(tensors[name])


def refuse_other_form(folder: Path, form: str) -> None:
    """ConfigError when a folder says that it holds a model of another form."""
    for other, name in _DESCRIPTIONS.items():
        if other != form and (folder / name).is_file():
            raise ConfigError(
                f'{folder} holds a retriever of form="{other}" ({name}), want one of '
                f'form="{form}". Name an experiment with form="{other}", or another folder.'
            )


def refuse_base(source: Any, form: str) -> None:
    """ConfigError when an experiment would start from a model of another form, whose head it does
    not have: its own would be new. source: a folder, a Hub id or a random base.
    """
    if not isinstance(source, str):
        return
    for other, name in _DESCRIPTIONS.items():
        if other != form and (Path(source) / name).is_file():
            raise ConfigError(
                f'base: {source} was trained as form="{other}" ({name}), and form="{form}" '
                "has another head, which would be random. Name the base that it was trained from, "
                f"and init_from={source!r} to take its body; or say form={other!r}."
            )


def refuse_lost_head(source: str, form: str) -> None:
    """ConfigError when a folder says that it holds a model of this form: its head is not there."""
    name = _DESCRIPTIONS[form]
    if (Path(source) / name).is_file():
        raise ConfigError(
            f'{source} was exported as form="{form}" ({name}), and its head is not there: a new '
            "one would be random. Copy the folder again, or export the model anew."
        )


def refuse_other_tokenizer(folder: Path, tokenizer: Any, cache_dir: Path) -> None:
    """ConfigError when the tokenizer in the folder of a model has other ids than the experiment's,
    by which the model would read other words.
    """
    if not (folder / "tokenizer.json").is_file():
        return
    theirs = vocabulary.load_tokenizer(str(folder), data_path=None, cache_dir=cache_dir)
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{folder}: its tokenizer has {len(theirs.get_vocab())} tokens, and that of this "
            f"experiment, {tokenizer.name_or_path!r}, has {len(tokenizer.get_vocab())} or others: "
            "the model would read other words. Name an experiment with the same tokenizer."
        )


def tell_changes(folder: Path, trained: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Log what a model was trained with and an experiment says otherwise; False: nothing."""
    changed = {name: value for name, value in trained.items() if value != own[name]}
    if changed:
        log.warning(
            "%s was trained with %s, which this experiment says otherwise: its own hold",
            folder,
            changed,
        )
    return bool(changed)


def check_holds_model(folder: Path, *, tied: bool) -> None:
    """ConfigError when a folder holds no encoder where one must be, or a model of another form."""
    refuse_other_form(folder, "bi")
    for place in sides(folder, tied=tied).values():
        if not (place / "config.json").is_file() and not adapters.are_in(place):
            raise ConfigError(
                f"{place} holds neither config.json nor {adapters.ADAPTER}, so it is no "
                "retriever's. Give a best/ or final/ folder, or one that Tevatron wrote."
            )
