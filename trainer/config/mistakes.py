"""What is wrong with a dictionary, a line for each mistake, and what to write instead. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from trainer.config.synonyms import Synonym
from trainer.errors import nearest

Block = type[BaseModel]
Synonyms = Mapping[str, Synonym]


def mistakes(schema: Block, error: ValidationError, synonyms: Synonyms) -> list[str]:
    """A line for each mistake that `error` lists of a dictionary of `schema`."""
    return [_line(schema, dict(item), synonyms) for item in error.errors()]


def _line(schema: Block, item: dict[str, Any], synonyms: Synonyms) -> str:
    location: tuple[Any, ...] = item["loc"]
    path = ".".join(str(part) for part in location if not _is_union_tag(part)) or "(top level)"
    if item["type"] == "extra_forbidden":
        blocks: list[Block] = [schema]  # that may stand where the key does
        for part in location[:-1]:
            if not _is_union_tag(part):
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
    (`base`, `tokenizer`): these are kinds of one value.
    """
    for name, field in schema.model_fields.items():
        yield f"{above}{name}"
        if str not in _types_in(field.annotation):
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
