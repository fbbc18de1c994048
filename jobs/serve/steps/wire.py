"""The protobuf messages of the Tinker SDK, as one table of fields, and classes made of it.

Source: the messages of tinker 0.38.0. The table gives byte for byte the descriptor that
is in that file; a test compares them (docs/decisions/40-the-tinker-dialect.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

PACKAGE, FILE = "tinker_public", "tinker_public.proto"
ENUMS: dict[str, list[str]] = {
    "StopReason": ["STOP_REASON_STOP", "STOP_REASON_LENGTH"],
    "DType": [
        "DTYPE_UNSPECIFIED",
        "DTYPE_FLOAT32",
        "DTYPE_INT64",
        "DTYPE_INT32",
        "DTYPE_BFLOAT16",
    ],
}
FLOAT32, INT64, INT32 = 1, 2, 3  # of DType
STOP, LENGTH = 0, 1  # of StopReason
# The fields of each message in the order of their numbers, which count from 1. A type is that of
# protobuf, another message or an enum; with [] behind it the field repeats, with ? it may be
# absent, with |NAME it is one of a group, and {} around it makes a map whose keys are texts.
MESSAGES: dict[str, dict[str, str]] = {
    "SampleResponse": {
        "sequences": "SampledSequence[]",
        "prompt_logprobs": "bytes?",
        "topk_prompt_logprobs": "TopkLogprobs?",
        "prompt_cache_hit_tokens": "int32",
        "target_prompt_logprobs": "Tensor?",
        "prompt_alt_tokens": "PromptAltTokens?",
    },
    "PromptAltTokens": {"tokens": "Tensor", "logprobs": "Tensor"},
    "SampledSequence": {
        "stop_reason": "StopReason",
        "tokens": "bytes",
        "logprobs": "bytes?",
        "topk_sampled_logprobs": "TopkLogprobs?",
    },
    "TopkLogprobs": {"token_ids": "bytes", "logprobs": "bytes", "k": "uint32", "length": "uint32"},
    "SparseCsr": {"values": "bytes", "crow_indices": "bytes", "col_indices": "bytes"},
    "Tensor": {
        "dense": "bytes|encoding",
        "sparse_csr": "SparseCsr|encoding",
        "dtype": "DType",
        "shape": "int64[]",
    },
    "BatchedTensor": {
        "data": "bytes",
        "offsets": "bytes",
        "dtype": "DType",
        "trailing_shape": "int64[]",
    },
    "ArrayRecord": {"type_tag": "string", "fields": "{BatchedTensor}", "num_datums": "int64"},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": "string",
        "loss_fn_outputs": "ArrayRecord[]",
        "metrics": "{double}",
    },
    "ForwardBackwardRequest": {
        "model_id": "string",
        "seq_id": "int32",
        "data": "Datum[]",
        "loss_fn": "string",
        "loss_fn_config": "{double}",
        "forward_only": "bool",
        "loss_fn_config_v2": "{LossConfigValue}",
    },
    "LossConfigValue": {"number": "double|value", "text": "string|value"},
    "Datum": {
        "model_input": "Chunk[]",
        "loss_fn_inputs": "{Tensor}",
        "model_input_spans": "ProvenanceSpan[]",
        "loss_fn_input_spans": "ProvenanceSpan[]",
    },
    "ProvenanceSpan": {
        "prompt_tokens": "PromptProvenanceSpan|span",
        "sampled_tokens": "SampledProvenanceSpan|span",
    },
    "PromptProvenanceSpan": {"sequence_id": "string", "offset": "int64", "length": "int64"},
    "SampledProvenanceSpan": {"sequence_id": "string", "offset": "int64", "length": "int64"},
    "Chunk": {
        "encoded_text": "EncodedTextChunk|chunk",
        "image": "ImageChunk|chunk",
        "dmel": "DmelChunk|chunk",
    },
    "EncodedTextChunk": {"tokens": "bytes"},
    "ImageChunk": {
        "data": "bytes",
        "format": "string",
        "expected_tokens": "int32?",
        "override_dimensions": "ImageDimensions?",
    },
    "ImageDimensions": {"width": "uint32", "height": "uint32"},
    "DmelChunk": {"dmel": "bytes"},
    "SamplingParams": {
        "max_tokens": "int32?",
        "seed": "uint64?",
        "temperature": "float?",
        "top_k": "int32?",
        "top_p": "float?",
        "stop_strs": "StopStrings|stop",
        "stop_tokens": "StopTokens|stop",
    },
    "StopStrings": {"values": "string[]"},
    "StopTokens": {"values": "int32[]"},
}
_FIELD = descriptor_pb2.FieldDescriptorProto
SCALARS = {
    "bool": _FIELD.TYPE_BOOL,
    "bytes": _FIELD.TYPE_BYTES,
    "double": _FIELD.TYPE_DOUBLE,
    "float": _FIELD.TYPE_FLOAT,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "string": _FIELD.TYPE_STRING,
    "uint32": _FIELD.TYPE_UINT32,
    "uint64": _FIELD.TYPE_UINT64,
}


def file_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """The descriptor of the whole table."""
    file = descriptor_pb2.FileDescriptorProto(name=FILE, package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields.items(), start=1):
            _add_field(message, field, number, kind)
        _add_absences(message)
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    return file


def _add_field(message: descriptor_pb2.DescriptorProto, name: str, number: int, kind: str) -> None:
    kind, _, group = kind.partition("|")
    is_map, repeats, may_be_absent = kind.startswith("{"), kind.endswith("[]"), kind.endswith("?")
    kind = kind.strip("{}[]?")
    field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL)
    if is_map:
        entry = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        pair = message.nested_type.add(name=entry)
        pair.options.map_entry = True
        pair.field.add(name="key", number=1, label=_FIELD.LABEL_OPTIONAL, type=_FIELD.TYPE_STRING)
        _set_type(pair.field.add(name="value", number=2, label=_FIELD.LABEL_OPTIONAL), kind)
        kind, repeats = f"{message.name}.{entry}", True
    if repeats:
        field.label = _FIELD.LABEL_REPEATED
    _set_type(field, kind)
    if group:
        groups = [one.name for one in message.oneof_decl]
        if group not in groups:
            message.oneof_decl.add(name=group)
            groups.append(group)
        field.oneof_index = groups.index(group)
    field.proto3_optional = may_be_absent
    if not may_be_absent:
        field.ClearField("proto3_optional")


def _add_absences(message: descriptor_pb2.DescriptorProto) -> None:
    """Give each field that may be absent a group of its own, behind the groups of the message."""
    for field in message.field:
        if field.proto3_optional:
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field.name}")


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    if kind in SCALARS:
        field.type = SCALARS[kind]
        return
    field.type = _FIELD.TYPE_ENUM if kind in ENUMS else _FIELD.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{kind}"


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()  # of our own: the SDK may be in the same process
    pool.Add(file_descriptor())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in MESSAGES
    }


CLASSES = _classes()
ForwardBackwardRequest: Any = CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput: Any = CLASSES["ForwardBackwardOutput"]
SampleResponse: Any = CLASSES["SampleResponse"]

_DATA = 1 + [*MESSAGES["ForwardBackwardRequest"]].index("data")  # the number of this field
_FIXED = {1: 8, 5: 4}  # bytes of a value, by its wire type


def num_parts(content: bytes, most: int) -> int:
    """How many fields a serialized ForwardBackwardRequest and its rows have; above `most` it stops
    to count. DecodeError for what is no message.

    An empty part of two bytes takes a hundred once it is parsed, so they are counted before.
    """
    count = 0
    for number, start, end in _fields(content, 0, len(content)):
        count += 1
        if number == _DATA:
            for _ in _fields(content, start, end):
                count += 1
                if count > most:
                    break
        if count > most:
            break
    return count


def _fields(content: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(number, start, end) of each field between two places. DecodeError."""
    while at < end:
        tag, at = _varint(content, at, end)
        kind, size = tag & 7, 0
        if kind == 0:
            _, at = _varint(content, at, end)
        elif kind == 2:
            size, at = _varint(content, at, end)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise DecodeError(f"wire type {kind}")
        if at + size > end:
            raise DecodeError("a field that is longer than its message")
        yield tag >> 3, at, at + size
        at += size


def _varint(content: bytes, at: int, end: int) -> tuple[int, int]:
    """A number of variable length, and the place behind it. DecodeError."""
    value, shift = 0, 0
    while at < end and shift < 70:
        byte = content[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at
    raise DecodeError("a number without an end")
