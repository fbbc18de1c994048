"""Rows of tokens with the inputs of a loss, and outputs of rows, as bytes of safetensors.

Of an operation: "tokens" int32 (the tokens of all rows, one row after another), "token_offsets"
int64 (n + 1; row i has tokens[token_offsets[i] : token_offsets[i + 1]]), and of each input NAME
"in.NAME" float32 or int64 (flat) with "in.NAME.offsets" int64 (n + 1). The field "inputs" of the
operation's header says what follows the tokens' axis: {NAME: {"trailing": [K]}}, [] for one number
a token. Outputs: "out.NAME" float32 with "out.NAME.offsets" likewise.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import load, save

from trainer.errors import DataError

Array = NDArray[Any]


@dataclass(frozen=True)
class DrivenRow:
    """One row. tokens: (T,) int32; inputs: by name (T,) or (T, K), float32 or int64."""

    tokens: Array
    inputs: Mapping[str, Array] = field(default_factory=dict[str, Array])


def rows_to_payload(rows: Sequence[DrivenRow]) -> tuple[bytes, dict[str, dict[str, list[int]]]]:
    """The payload of rows, and the field "inputs" of their operation.

    DataError when rows have inputs of other names, or of another trailing axis, than the first.
    """
    tensors = _joined([row.tokens for row in rows], "tokens", "token_offsets", np.int32)
    inputs: dict[str, dict[str, list[int]]] = {}
    for index, row in enumerate(rows):
        if row.inputs.keys() != rows[0].inputs.keys():
            raise DataError(
                f"row {index} has the loss inputs {sorted(row.inputs)}, row 0 "
                f"{sorted(rows[0].inputs)}. Give all rows of an operation the same ones."
            )
    for name, first in rows[0].inputs.items() if rows else ():
        arrays = [np.asarray(row.inputs[name]) for row in rows]
        trailing = list(first.shape[1:])
        for index, array in enumerate(arrays):
            if list(array.shape[1:]) != trailing:
                raise DataError(
                    f"row {index}: {name} has the shape {list(array.shape)}, that of row 0 "
                    f"{list(first.shape)}. Give all rows of an operation the same second axis."
                )
        dtype = np.int64 if np.issubdtype(first.dtype, np.integer) else np.float32
        tensors |= _joined(arrays, f"in.{name}", f"in.{name}.offsets", dtype)
        inputs[name] = {"trailing": trailing}
    return save(tensors), inputs


def rows_of(payload: bytes, inputs: Mapping[str, Mapping[str, Sequence[int]]]) -> list[DrivenRow]:
    """The rows of a payload. DataError when it is none."""
    tensors = _load(payload)
    tokens = _parts(tensors, "tokens", "token_offsets", ())
    of = {
        name: _parts(tensors, f"in.{name}", f"in.{name}.offsets", about["trailing"])
        for name, about in inputs.items()
    }
    if any(len(parts) != len(tokens) for parts in of.values()):
        raise DataError("the payload has inputs of another number of rows than tokens.")
    return [
        DrivenRow(row, {name: parts[index] for name, parts in of.items()})
        for index, row in enumerate(tokens)
    ]


def outputs_to_payload(outputs: Mapping[str, Sequence[Array]]) -> bytes:
    """The payload of a result: by name, one array for each row, in the order of the rows."""
    tensors: dict[str, Array] = {}
    for name, arrays in outputs.items():
        tensors |= _joined(arrays, f"out.{name}", f"out.{name}.offsets", np.float32)
    return save(tensors)


def outputs_of(payload: bytes) -> dict[str, list[Array]]:
    """The outputs of a result's payload: by name, one flat float32 array for each row."""
    tensors = _load(payload)
    names = [key.removeprefix("out.") for key in tensors if not key.endswith(".offsets")]
    return {name: _parts(tensors, f"out.{name}", f"out.{name}.offsets", ()) for name in names}


def _joined(arrays: Sequence[Array], name: str, offsets: str, dtype: Any) -> dict[str, Array]:
    sizes = [array.size for array in arrays]
    flat = [np.asarray(array, dtype).reshape(-1) for array in arrays]
    return {
        name: np.concatenate(flat) if flat else np.zeros(0, dtype),
        offsets: np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
    }


def _load(payload: bytes) -> dict[str, Array]:
    try:
        return load(payload) if payload else {}
    except safetensors.SafetensorError as error:
        raise DataError(f"the payload of rows is no safetensors file: {error}.") from None


def _parts(
    tensors: Mapping[str, Array], name: str, offsets: str, trailing: Sequence[int]
) -> list[Array]:
    if name not in tensors or offsets not in tensors:
        raise DataError(f"the payload of rows has no {name!r} with {offsets!r}.")
    flat, bounds = tensors[name], tensors[offsets]
    if bounds[0] != 0 or bounds[-1] != flat.size or bool((np.diff(bounds) < 0).any()):
        raise DataError(f"the payload of rows: {offsets!r} does not divide {name!r}.")
    parts = [flat[start:end] for start, end in itertools.pairwise(bounds)]
    width = int(np.prod(trailing)) if trailing else 1
    if width < 1:
        raise DataError(f"the payload of rows: got no number of {name!r} for a token, want one.")
    if trailing and any(part.size % width for part in parts):
        raise DataError(f"the payload of rows: {name!r} does not divide into rows of {width}.")
    return [part.reshape(-1, *trailing) if trailing else part for part in parts]
