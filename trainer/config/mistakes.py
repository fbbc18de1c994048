"""What is wrong with a dictionary, a line for each mistake, and what to write instead. Imports no
torch.

A dictionary that fits its schema may still be one that no new run begins with. A run
(trainer/launch/preflight.py) and the submission of a job (jobs/submit/refusals.py) take their words
for it from here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

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
    if same:
        return f"Did you mean {' or '.join(map(repr, same))}?"
    synonym = synonyms.get(name)
    return synonym.sentence(legal) if synonym is not None else None


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


def long_warmup(cfg: Experiment) -> Iterator[str]:
    """The problem of a warm-up that is longer than the run."""
    steps, warmup = cfg.train.steps, cfg.schedule.warmup_of(cfg.train.steps)
    if 0 < steps < warmup:
        yield (
            f"schedule.warmup_steps={warmup} is longer than the run of train.steps={steps}: "
            f"its learning rate would never be reached. Use at most {steps}, a "
            "warmup_ratio, or more steps."
        )


# An AdamW step moves every weight by about lr (Kingma & Ba 2015, sec. 2.1), an Adafactor step by lr
# times the weight's size (Shazeer & Stern 2018, sec. 8). Weights of language models start at about
# 0.02 (Radford et al. 2019, their code), whose neighbours in fp32 are 2e-9 away.
_HIGHEST_RATE = {"adamw": 0.1, "adafactor": 1.0}
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
    best = cfg.train.best
    if best is not None and not best.startswith("valid/"):
        yield (
            f"train.best={best!r}: evaluations are of the validation split, so that all metrics "
            f"begin with 'valid/'. Use 'valid/loss', or {'valid/' + best.rpartition('/')[2]!r}."
        )
