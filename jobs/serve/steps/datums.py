"""Rows of the SDK as rows of an operation, and outputs of an operation as the SDK reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.serve.requests import quote
from jobs.serve.steps import wire
from trainer.errors import DataError, nearest
from trainer.operations.rows import DrivenRow, outputs_of, rows_to_payload

_SAMPLED = frozenset({"target_tokens", "logprobs", "advantages"})
_THRESHOLDS = frozenset({"clip_low_threshold", "clip_high_threshold"})
# Of each loss: the inputs that a row must have, and those that it may have. A test holds this
# against what the ranks compute (trainer/driven/losses.py).
INPUTS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "cross_entropy": (frozenset({"target_tokens"}), frozenset({"weights"})),
    "importance_sampling": (_SAMPLED, frozenset()),
    "ppo": (_SAMPLED, _THRESHOLDS),
    "cispo": (_SAMPLED, _THRESHOLDS),
    "dro": (_SAMPLED, frozenset()),
}
# What may be set of each loss. Source: the SDK's documentation of losses.
CONFIG: dict[str, tuple[str, ...]] = {
    "cross_entropy": (),
    "importance_sampling": (),
    "ppo": ("clip_low_threshold", "clip_high_threshold"),
    "cispo": ("clip_low_threshold", "clip_high_threshold"),
    "dro": ("beta",),
}
NOT_OFFERED = {
    "custom": "an uploaded loss is a graph of a client, and no graph of a request is run here. Use "
    "forward_backward_custom with a Python function, which runs at the client",
    "gspo": "it is not offered here",
    "stable_reinforce": "it needs what was recorded while sampling, which is not recorded here",
}
MOST_DENSE = 16 << 20  # numbers of the sparse tensors of one request, laid out
_NUMPY: dict[int, Any] = {wire.FLOAT32: np.float32, wire.INT64: np.int64, wire.INT32: np.int32}


def check_loss(name: str, config: Mapping[str, Any]) -> None:
    """Return if a loss is computed here with these settings; else DataError."""
    if name in NOT_OFFERED:
        raise DataError(f"loss_fn: got {name!r}, and {NOT_OFFERED[name]}.")
    if name not in INPUTS:
        raise DataError(f"loss_fn: got {quote(name)}. {nearest(name, sorted(INPUTS))}")
    for key, value in config.items():
        if key not in CONFIG[name]:
            legal = ", ".join(CONFIG[name]) or "none"
            raise DataError(f"loss_fn_config of {name}: got {quote(key)}, want {legal}.")
        if not isinstance(value, float) or not math.isfinite(value):
            raise DataError(f"loss_fn_config: got {key}={quote(value)}, want a finite number.")


def rows_operation(request: Any, *, max_tokens: int) -> tuple[dict[str, Any], bytes, int]:
    """(fields, payload, number of tokens) of the operation that a ForwardBackwardRequest asks for.

    max_tokens: of one row. DataError names the first row that is wrong, and what is.
    """
    config = loss_config(request)
    check_loss(request.loss_fn, config)
    if not request.data:
        raise DataError("data: got no rows, want one or more.")
    _refuse_sparse(request)
    rows = [
        _row(datum, request.loss_fn, f"row {number}", max_tokens)
        for number, datum in enumerate(request.data)
    ]
    payload, inputs = rows_to_payload(rows)
    tokens = sum(len(row.tokens) for row in rows)
    fields: dict[str, Any] = {
        "loss_fn": request.loss_fn,
        "loss_fn_config": config,
        "rows": len(rows),
        "tokens": tokens,
        "inputs": inputs,
    }
    return fields, payload, tokens


def _refuse_sparse(request: Any) -> None:
    """Return if the sparse tensors of all rows are few numbers when they are laid out; else
    DataError: a few bytes may say that they are many.
    """
    tensors = (one for datum in request.data for one in datum.loss_fn_inputs.values())
    sparse = (one for one in tensors if one.WhichOneof("encoding") == "sparse_csr")
    count = sum(math.prod(max(size, 0) for size in one.shape) for one in sparse)
    if count > MOST_DENSE:
        raise DataError(
            f"data: the sparse tensors of its rows are {count} numbers when they are laid out, "
            f"want at most {MOST_DENSE}. Send fewer rows in one request."
        )


def loss_config(request: Any) -> dict[str, float | str]:
    """The settings of a loss: the SDK writes numbers twice, for older servers."""
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    return config


def _row(datum: Any, loss: str, place: str, max_tokens: int) -> DrivenRow:
    parts: list[NDArray[Any]] = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise DataError(
                f"{place}: got a part of the type {kind}, want encoded_text: token ids."
            )
        parts.append(_numbers(chunk.encoded_text.tokens, np.int32, f"{place}: tokens"))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not 1 <= len(tokens) <= max_tokens:
        raise DataError(f"{place}: got {len(tokens)} tokens, want 1 to {max_tokens}.")
    if tokens.min() < 0:
        raise DataError(f"{place}: got the token {tokens.min()}, want ids from 0 on.")
    if datum.model_input_spans or datum.loss_fn_input_spans:
        raise DataError(
            f"{place}: where its tokens come from is not recorded here. Leave out with_provenance."
        )
    needed, optional = INPUTS[loss]
    names = datum.loss_fn_inputs.keys()
    for name in sorted(needed - names):
        raise DataError(f"{place}: the loss {loss} wants loss_fn_inputs[{name!r}]. Add it.")
    for name in sorted(names - needed - optional):
        want = ", ".join(sorted(needed | optional))
        raise DataError(f"{place}: the loss {loss} reads no {quote(name)}, want {want}.")
    inputs = {name: _tensor(one, f"{place}: {name}") for name, one in datum.loss_fn_inputs.items()}
    target = inputs["target_tokens"]
    if not np.issubdtype(target.dtype, np.integer) or (target.size and target.min() < 0):
        raise DataError(f"{place}: target_tokens: got {_about(target)}, want token ids (int64).")
    if target.ndim not in (1, 2) or len(target) != len(tokens):
        raise DataError(
            f"{place}: target_tokens: got the shape {list(target.shape)}, want [{len(tokens)}] or "
            f"[{len(tokens)}, K]: one for each token, or K of them."
        )
    if not target.size:
        raise DataError(f"{place}: target_tokens: got no target for a token, want one or more.")
    if loss == "cross_entropy" and "weights" not in inputs:
        inputs["weights"] = np.ones(target.shape, np.float32)
    for name, array in inputs.items():
        if array.shape not in (target.shape, tokens.shape):
            raise DataError(
                f"{place}: {name}: got the shape {list(array.shape)}, want that of target_tokens, "
                f"{list(target.shape)}."
            )
        if name == "target_tokens":
            continue
        if not np.isfinite(array).all():
            raise DataError(f"{place}: {name}: got NaN or an infinite number, want finite ones.")
        inputs[name] = array.astype(np.float32, copy=False)
    return DrivenRow(tokens, inputs)


def _about(array: NDArray[Any]) -> str:
    least = f" from {array.min()} on" if array.size else ""
    return f"{array.dtype}{least}"


def _numbers(content: bytes, dtype: Any, place: str) -> NDArray[Any]:
    if len(content) % np.dtype(dtype).itemsize:
        raise DataError(f"{place}: {len(content)} bytes are no numbers of {np.dtype(dtype)}.")
    return np.frombuffer(content, dtype=dtype)


def _tensor(tensor: Any, place: str) -> NDArray[Any]:
    """A tensor of the wire as an array; a sparse one is laid out, with 0 where it says nothing."""
    dtype = _NUMPY.get(tensor.dtype)
    if dtype is None:
        raise DataError(f"{place}: got the dtype {tensor.dtype}, want float32 or int64.")
    shape = list(tensor.shape)
    if len(shape) > 2 or any(not 0 <= size <= MOST_DENSE for size in shape):
        raise DataError(f"{place}: got the shape {shape}, want one axis or two.")
    if tensor.WhichOneof("encoding") == "sparse_csr":
        sparse = tensor.sparse_csr
        return dense(
            _numbers(sparse.values, dtype, place),
            _numbers(sparse.crow_indices, np.int64, place),
            _numbers(sparse.col_indices, np.int64, place),
            shape,
            place,
        )
    values = _numbers(tensor.dense, dtype, place)
    shape = shape or [len(values)]
    if math.prod(shape) != len(values):
        raise DataError(f"{place}: {len(values)} numbers do not fill the shape {shape}.")
    array: NDArray[Any] = np.reshape(values, shape)
    return array


def dense(
    values: NDArray[Any],
    crow: NDArray[np.int64],
    col: NDArray[np.int64],
    shape: Sequence[int],
    place: str,
    *,
    absent: int = 0,
) -> NDArray[Any]:
    """A CSR tensor of two axes laid out, with `absent` where it says nothing. DataError where its
    indices are none.
    """
    is_csr = len(shape) == 2 and len(crow) == shape[0] + 1 and len(col) == len(values)
    if is_csr:
        is_csr = crow[0] == 0 and crow[-1] == len(values) and bool((np.diff(crow) >= 0).all())
    if not is_csr or (len(col) and not (col.min() >= 0 and col.max() < shape[1])):
        raise DataError(f"{place}: its indices are no CSR tensor of the shape {list(shape)}.")
    if math.prod(shape) > MOST_DENSE:
        raise DataError(f"{place}: {list(shape)} is more than {MOST_DENSE} numbers. Send fewer.")
    array = np.full(shape, absent, values.dtype)
    array[np.repeat(np.arange(shape[0]), np.diff(crow)), col] = values
    return array


def forward_output(
    payload: bytes, metrics: Mapping[str, float], trailing: Mapping[str, Sequence[int]]
) -> bytes:
    """The protobuf ForwardBackwardOutput of a result. trailing: by output, the shape behind the
    axis of tokens.
    """
    message = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics.update({name: float(value) for name, value in metrics.items()})
    outputs = outputs_of(payload)
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord")
    for name, arrays in outputs.items():
        field = record.fields[name]
        flat = [np.ascontiguousarray(array, dtype="<f4") for array in arrays]
        offsets = np.concatenate([[0], np.cumsum([array.nbytes for array in flat])])
        field.data = b"".join(array.tobytes() for array in flat)
        field.offsets = offsets.astype("<i8").tobytes()
        field.dtype = wire.FLOAT32
        field.trailing_shape.extend(trailing.get(name, ()))
        record.num_datums = len(arrays)
    return message.SerializeToString()
