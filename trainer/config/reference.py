"""What keys a task's dictionary may have: from its JSON schema, whose descriptions stand beside the
keys. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.block import Strict

Node = Mapping[str, Any]  # a part of a JSON schema

_REQUIRED = object()
_TYPES = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "null": "null",
    "object": "dictionary",
}
_BOUNDS = (
    ("exclusiveMinimum", "above"),
    ("minimum", "at least"),
    ("exclusiveMaximum", "below"),
    ("maximum", "at most"),
)


@dataclass(frozen=True)
class Key:
    """One key of a dictionary, as a person reads about it."""

    path: str  # "train.global_batch"
    kind: str  # "integer above 0"
    default: str | None  # as JSON; None: the key is required
    description: str


def json_schema(config: type[Strict]) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a task's dictionary, for editors and other programs."""
    return config.model_json_schema()


def keys(config: type[Strict]) -> list[Key]:
    """Every key of a task's dictionary, blocks before the keys in them, in the schema's order."""
    schema = json_schema(config)
    return list(_keys_of(schema, schema["$defs"], ""))


def _keys_of(block: Node, blocks: Mapping[str, Node], above: str) -> Iterator[Key]:
    required = block.get("required", ())
    for name, node in block["properties"].items():
        path = f"{above}{name}"
        inner = list(_blocks_in(node, blocks))
        default = node.get("default", _REQUIRED)
        if name in required:
            default = _REQUIRED
        is_whole_block = len(inner) == 1 and default not in (_REQUIRED, None, [])
        yield Key(
            path,
            _kind(node, blocks),
            None if default is _REQUIRED else json.dumps({} if is_whole_block else default),
            " ".join(node.get("description", "").split()),
        )
        for each in inner:
            yield from _keys_of(each, blocks, f"{path}.")


def _blocks_in(node: Node, blocks: Mapping[str, Node]) -> Iterator[Node]:
    """The blocks that may stand as this value, or in this list."""
    if "$ref" in node:
        yield blocks[node["$ref"].rpartition("/")[2]]
    if "items" in node:
        yield from _blocks_in(node["items"], blocks)
    for choice in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _blocks_in(choice, blocks)


def _kind(node: Node, blocks: Mapping[str, Node]) -> str:
    """What a value may be, in words."""
    if "$ref" in node:
        return "block"
    if "const" in node:
        return json.dumps(node["const"])
    if "enum" in node:
        return " | ".join(json.dumps(value) for value in node["enum"])
    choices = (*node.get("anyOf", ()), *node.get("oneOf", ()))
    if choices:
        kinds = [_kind(choice, blocks) for choice in choices]
        return " | ".join(dict.fromkeys(kinds))
    if node.get("type") == "array":
        if "prefixItems" in node:
            kinds = [_kind(item, blocks) for item in node["prefixItems"]]
            return f"list [{', '.join(kinds)}]"
        least = " (not empty)" if node.get("minItems", 0) else ""
        return f"list of {_kind(node.get('items', {}), blocks)}{least}"
    bounds = [f"{word} {node[bound]:g}" for bound, word in _BOUNDS if bound in node]
    return " ".join([_TYPES.get(node.get("type", ""), "any value"), " and ".join(bounds)]).strip()
