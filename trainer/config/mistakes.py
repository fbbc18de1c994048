"""What is wrong with a dictionary, a line for each mistake, and what to write instead. Imports no
torch.

A dictionary that fits its schema may still be one that no new run begins with. A run
(trainer/launch/preflight.py) and the submission of a job (jobs/submit/refusals.py) take their words
for it from here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from trainer.config.formats.table import FORMATS
from trainer.config.scores.direction import direction_of, is_of_validation
from trainer.config.synonyms import Synonym
from trainer.errors import nearest

if TYPE_CHECKING:
    from trainer.config.schema import Experiment

Block = type[BaseModel]
Synonyms = Mapping[str, Synonym]
OPTIMIZER_ON_NVME = (
    "--survive: got an optimizer offloaded to NVMe, want it in memory, for ranks copy it "
    "there after every step. Offload to the CPU, or train without --survive."
)
OFFLOAD_OF_NOTHING = (
    "train.activation_offload=true without train.gradient_checkpointing: it takes the inputs of "
    "blocks that are computed again, and none is. Set gradient_checkpointing to true, or leave "
    "activation_offload out."
)
# Keys of services by their form: Hugging Face, OpenAI and Anthropic, W&B since 2025, GitHub, AWS.
_SECRET = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|sk-(?=[\w-]*\d)[\w-]{32,}|wandb_v1_[\w-]{20,}|gh[a-z]_[A-Za-z0-9]{30,}"
    r"|AKIA[A-Z0-9]{16}\b)"
)
_SECRET_NAME = re.compile(r"(api_?key|(auth|hf)_token|secret|password|wandb_key)$", re.IGNORECASE)
_NO_SECRETS = (
    "A key of a service stands in no dictionary, for that is stored beside the run and shown. Set "
    "WANDB_API_KEY, HF_TOKEN, ... in the environment."
)


def takes_nothing_away(train: Mapping[str, Any]) -> bool:
    """Whether the block `train` of a dictionary is one of OFFLOAD_OF_NOTHING."""
    return bool(train.get("activation_offload")) and not train.get("gradient_checkpointing")


def is_secret(text: str) -> bool:
    """Whether a text holds what looks like the key of a service."""
    return bool(_SECRET.search(text))


def secrets(values: Any, above: str = "") -> Iterator[str]:
    """A line for each value of a dictionary that looks like the key of a service. It does not tell
    the value.
    """
    if isinstance(values, str) and is_secret(values):
        yield f"{above}: got what looks like the key of a service. {_NO_SECRETS}"
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from secrets(value, f"{above}.{key}" if above else str(key))
    elif isinstance(values, list | tuple):
        for place, value in enumerate(values):
            yield from secrets(value, f"{above}.{place}")


# What torch and others call them.
FP16_OF_T5 = (
    "train.precision='fp16': activations of the T5 families pass 65,504, the largest number of "
    "fp16, and become NaN (huggingface/transformers #4586, #9295); they were trained in bf16. Use "
    "'bf16' or 'fp32'"
)
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


def mistakes(schema: Block, error: ValidationError, synonyms: Synonyms) -> list[str]:
    """A line for each mistake that `error` lists of a dictionary of `schema`."""
    return [_line(schema, dict(item), synonyms) for item in error.errors()]


def _line(schema: Block, item: dict[str, Any], synonyms: Synonyms) -> str:
    location: tuple[Any, ...] = item["loc"]
    path = ".".join(str(part) for part in location if not _is_union_tag(part)) or "(top level)"
    if item["type"] == "extra_forbidden":
        blocks: list[Block] = [schema]  # that may stand where the key does
        for part in location[:-1]:
            if not _is_union_tag(part) and not isinstance(part, int):  # a place in a list
                fields = [one.model_fields[part] for one in blocks if part in one.model_fields]
                blocks = [block for field in fields for block in blocks_in(field.annotation)]
        legal = {name for block in blocks for name in block.model_fields}
        elsewhere = other_place(path, list(paths(schema)), synonyms)
        return f"{path}: no such key. {elsewhere or nearest(str(location[-1]), sorted(legal))}"
    if item["type"] == "missing":
        return f"{path}: required, but not given."
    got = "" if isinstance(item["input"], dict) else f" Got {item['input']!r}."
    if item["type"] == "literal_error" and isinstance(item["input"], str):
        legal_values = re.findall("'([^']*)'", item["ctx"]["expected"])
        name = item["input"].lower().removeprefix("torch.")
        meant = _PRECISIONS.get(name, name)
        close = nearest(meant, legal_values)
        got += f" {close}" if close.startswith("Did") else ""
        if path == "data.source" and name in FORMATS:
            got += f' This is what rows look like: "format": {name!r}, beside a source.'
    return f"{path}: {item['msg']}.{got}"


def _is_union_tag(part: Any) -> bool:
    return isinstance(part, str) and part.startswith("<")


def other_place(path: str, legal: Collection[str], synonyms: Synonyms) -> str | None:
    """A sentence that says where the key at `path` belongs; None: its name tells nothing.

    legal: every dotted key. A key of this very name in another block comes first, then what another
    library calls so.
    """
    name = path.rpartition(".")[2]
    same = [key for key in legal if key.rpartition(".")[2] == name and key != path]
    if same:  # optim.lr is meant before optim.groups.lr, which is a key in a list of exceptions
        least_deep = min(key.count(".") for key in same)
        same = [key for key in same if key.count(".") == least_deep]
        return f"Did you mean {' or '.join(map(repr, same))}?"
    synonym = synonyms.get(name)
    if synonym is not None:
        return synonym.sentence(legal)
    return _NO_SECRETS if _SECRET_NAME.search(name) else None


def paths(schema: Block, above: str = "") -> Iterator[str]:
    """Every dotted key of a schema, but not the keys of a block in whose place a text may stand
    (`base`, `tokenizer`): these are kinds of one value. Nor those of blocks in a list.
    """
    for name, field in schema.model_fields.items():
        yield f"{above}{name}"
        if str not in _types_in(field.annotation) and get_origin(field.annotation) is not list:
            for block in blocks_in(field.annotation):
                yield from paths(block, f"{above}{name}.")


def blocks_in(annotation: Any) -> list[Block]:
    """The blocks that an annotation names: of `Lora | None`, Lora."""
    types = _types_in(annotation)
    return [one for one in types if isinstance(one, type) and issubclass(one, BaseModel)]


def _types_in(annotation: Any) -> list[Any]:
    """The types that an annotation is made of: of `Annotated[str, ...] | Block`, both."""
    arguments = get_args(annotation)
    if not arguments:
        return [annotation]
    return [one for argument in arguments for one in _types_in(argument)]


def no_base(source: str) -> str:
    """The problem of a base whose name is neither a folder nor a name on the Hub."""
    problem = "it is a file" if Path(source).is_file() else "there is no such folder here"
    return (
        f"base={source!r}: {problem}. Give the folder that holds config.json and the weights, a "
        "Hub id, or a dictionary with a config."
    )


def late_stop(until: int, steps: int) -> str:
    """The problem of a --until beyond the last step of a run."""
    return (
        f"--until {until}: got a step beyond the run, whose last one is {steps}. Give a step up to "
        f"{steps}, or leave --until out."
    )


def long_warmup(cfg: Experiment) -> Iterator[str]:
    """The problem of a warm-up that is longer than the run."""
    steps, warmup = cfg.train.steps, cfg.schedule.warmup_of(cfg.train.steps)
    if 0 < steps < warmup:
        yield (
            f"schedule.warmup_steps={warmup} is longer than the run of train.steps={steps}: "
            f"its learning rate would never be reached. Use at most {steps}, a "
            "warmup_ratio, or more steps."
        )


# A step of Lion moves every weight by lr, one of AdamW by about lr (Kingma & Ba 2015, sec. 2.1),
# and Muon is scaled to that; an Adafactor step by lr times the weight's size (Shazeer & Stern 2018,
# sec. 8); one of SGD by lr times the gradient, which in a large model is far below 1. Weights of
# language models start at about 0.02 (Radford et al. 2019, their code), whose neighbours in fp32
# are 2e-9 away.
_HIGHEST_RATE = {
    "adamw": 0.1,
    "adamw8bit": 0.1,
    "adafactor": 1.0,
    "lion": 0.1,
    "muon": 0.1,
    "sgd": 100.0,
}
_LOWEST_RATE = 1e-9


def odd_rate(cfg: Experiment) -> Iterator[str]:
    """The doubt about a learning rate far outside of what anybody trains with: one that moves
    weights by many times their size, or not at all.
    """
    lr, highest = cfg.optim.lr, _HIGHEST_RATE[cfg.optim.name]
    if not _LOWEST_RATE <= lr <= highest:
        effect = "by more than its size" if lr > highest else "by less than fp32 can tell"
        yield (
            f"optim.lr={lr:g}: a step of {cfg.optim.name} moves a weight {effect}, want between "
            f"{_LOWEST_RATE:g} and {highest:g}. Most runs use 1e-6 to 1e-2."
        )


def foreign_best(cfg: Experiment) -> Iterator[str]:
    """The problem of a train.best that is the name of no validation metric."""
    data = getattr(cfg, "data", None)
    sets: Collection[str] = getattr(data, "valid_sets", {})
    for best in cfg.train.best_metrics:
        split = best.partition("/")[0] if is_of_validation(best) else ""
        name = split.removeprefix("valid").removeprefix("_")
        if not split:
            yield (
                f"train.best={best!r}: evaluations are of the validation split, so that all "
                "metrics begin with 'valid/' (or 'valid_NAME/' of a set in data.valid_sets). Use "
                f"'valid/loss', or {'valid/' + best.rpartition('/')[2]!r}."
            )
        elif name and name not in sets:
            hint = nearest(name, sorted(sets)) if sets else "It has none: name the set there."
            yield f"train.best={best!r}: data.valid_sets has no {name!r}. {hint}"


def turned_best(cfg: Experiment) -> Iterator[str]:
    """The doubt about a train.best_is that keeps the worst value of a metric whose name says which
    one is the best.
    """
    for metric in cfg.train.best_metrics:
        stated, natural = cfg.train.stated_direction(metric), direction_of(metric)
        if stated is not None and natural is not None and stated != natural:
            better, extreme = {"min": ("lower", "highest"), "max": ("higher", "lowest")}[natural]
            yield (
                f"train.best_is={stated!r}: {metric} is better when it is {better}, and best/ "
                f"would hold its {extreme} value. Leave train.best_is out, or say {natural!r}."
            )


def late_changes(cfg: Experiment) -> Iterator[str]:
    """The doubt about weights of a mix that would come behind the last step. Of a run in epochs
    nothing is known before its rows are counted.
    """
    steps, mixing = cfg.train.steps, getattr(getattr(cfg, "data", None), "mixing", None)
    for place, change in enumerate([] if mixing is None else mixing.changes):
        if 0 < steps <= change.after:
            yield (
                f"data.mixing.changes[{place}]: after={change.after}, and the run has {steps} "
                f"steps: these weights are never used. Give a step below {steps}, or leave the "
                "change out."
            )


def doubts_of(cfg: Experiment) -> Iterator[str]:
    """What a run warns of, and refuses with --strict."""
    yield from odd_rate(cfg)
    yield from turned_best(cfg)
    yield from late_changes(cfg)
