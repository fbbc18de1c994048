"""What a dictionary says of metrics: which ones choose best/, and which are a user's own. Imports
no torch.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from trainer.config.scores.direction import Direction


def _best(value: Any) -> Any:
    one_by_one: list[Any] = value if isinstance(value, list) else [value]
    is_named = all(isinstance(one, str) and one for one in one_by_one)
    if value is None or (one_by_one and is_named and len(set(one_by_one)) == len(one_by_one)):
        return value
    raise ValueError('Input should be a metric, such as "valid/loss", or a list of different ones')


_METRIC = {"type": "string", "minLength": 1}
_METRICS = {
    "anyOf": [_METRIC, {"type": "array", "items": _METRIC, "minItems": 1}, {"type": "null"}]
}
Best = Annotated[str | list[str] | None, PlainValidator(_best), WithJsonSchema(_METRICS)]


def _best_is(value: Any) -> Any:
    stated: Any = value.values() if isinstance(value, dict) else [value]
    if value is None or (stated and all(one in ("min", "max") for one in stated)):
        return value
    raise ValueError('Input should be "min", "max" or one of them by metric: {"valid/em": "max"}')


_DIRECTION = {"enum": ["min", "max"]}
_DIRECTIONS = {
    "anyOf": [_DIRECTION, {"type": "object", "additionalProperties": _DIRECTION}, {"type": "null"}]
}
BestIs = Annotated[
    Direction | dict[str, Direction] | None,
    PlainValidator(_best_is),
    WithJsonSchema(_DIRECTIONS),
]


_OWN_METRIC = re.compile(r"[^:]+\.py:[A-Za-z_][A-Za-z0-9_]*")


def _own_metrics(value: Any) -> Any:
    one_by_one: list[Any] = value if isinstance(value, list) else [value]
    are_specs = all(isinstance(one, str) and _OWN_METRIC.fullmatch(one) for one in one_by_one)
    if value is not None and not (one_by_one and are_specs):
        raise ValueError('Input should be a file and a function in it, "mine.py:style", or a list')
    if value is not None and len({one.rpartition(":")[2] for one in one_by_one}) < len(one_by_one):
        raise ValueError("Two functions have one name, and so would their numbers: rename one")
    files = {one.rpartition(":")[0] for one in one_by_one if value is not None}
    if len({file.rpartition("/")[2] for file in files}) < len(files):
        raise ValueError("Two files have one name, under which the run keeps them: rename one")
    return value


_SPEC = {"type": "string", "pattern": f"^{_OWN_METRIC.pattern}$"}
_SPECS = {"anyOf": [_SPEC, {"type": "array", "items": _SPEC, "minItems": 1}, {"type": "null"}]}
OwnMetrics = Annotated[str | list[str] | None, PlainValidator(_own_metrics), WithJsonSchema(_SPECS)]
