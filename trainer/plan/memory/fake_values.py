"""Fake tensors that know their values, where the shapes of a model depend on them: masks, lengths
and positions.

A fake tensor has a shape and no values. One that is computed from known values alone gets a `twin`,
a real tensor on the CPU, which is computed beside it. An operation whose result has a shape that
depends on values (nonzero, a boolean index, item) reads the twins. A tensor that depends on weights
has no twin: reading a number of it gives 0, and an argmax gives token CHOSEN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

aten = torch.ops.aten

CHOSEN = 3  # the token that a fake model generates: ids below it are ends and pads
# Most elements of a twin. Larger ones, such as masks of all scores, decide no shape and cost time.
LARGEST = 1 << 21
LARGEST_FLOAT = 1 << 12
_SHAPED_BY_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
_UNFILLED = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
}
_INDEXING = {aten.index.Tensor, aten._unsafe_index.Tensor}
_CHOOSING = {aten.argmax.default, aten.argmin.default, aten.topk.default, aten.multinomial.default}


class UnknownShapeError(Exception):
    """A shape depends on the value of a weight, which is not known before the run."""


def run_with_twins(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on fake tensors. Its results get twins where all arguments are known."""
    if func is aten._local_scalar_dense.default:
        return _number(args[0])
    if func is aten.equal.default:
        return all(_is_known(x) for x in args) and torch.equal(*(_real(x) for x in args))
    if func is aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
        return _constant(args[0])
    if any(map(_is_real_array, tensors_in(args))):
        args = tree_map(lambda value: _constant(value) if _is_real_array(value) else value, args)
    if func in _INDEXING:
        # a boolean mask becomes integer indices, one tensor for each of its axes
        places: list[Any] = []
        for index in args[1]:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                places.extend(_shaped_by_values(aten.nonzero.default, (index,), {}).unbind(1))
            else:
                places.append(index)
        args = (args[0], places, *args[2:])
    if func in _SHAPED_BY_VALUES:
        return _shaped_by_values(func, args, kwargs)
    out = func(*args, **kwargs)
    _give_twins(out, func, args, kwargs)
    return out


def _give_twins(out: Any, func: Any, args: Any, kwargs: Any) -> None:
    """Give twins to the results of an operation, or take them away where it made them unknown."""
    writes = func._schema.is_mutable
    tensors = list(tensors_in(out))
    is_small = bool(tensors) and all(
        tensor.numel() <= (LARGEST_FLOAT if tensor.is_floating_point() else LARGEST)
        for tensor in tensors
    )
    # a twin is computed from twins alone, or from no tensor at all (arange, full)
    is_random = func in _UNFILLED or torch.Tag.nondeterministic_seeded in func.tags
    are_known = not is_random and all(map(_is_known, tensors_in(args, kwargs)))
    if func in _CHOOSING:
        # the indices among the result (of argmax, topk) have a twin that is CHOSEN everywhere
        indices = [fake for fake in tensors_in(out) if not fake.is_floating_point()]
        for fake in filter(lambda one: one.numel() <= LARGEST, indices):
            with _disable_current_modes():
                fake.twin = torch.full(fake.shape, CHOSEN, dtype=fake.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    elif (writes or is_small) and are_known:
        # an operation that writes into its arguments writes into their twins, too
        _attach(out, _on_twins(func, args, kwargs))
    elif writes:
        for fake in tensors:
            fake.twin = None  # pyright: ignore[reportAttributeAccessIssue]


def _is_real_array(value: Any) -> bool:
    """Whether it is a real tensor with axes. (torch wraps numbers as tensors without axes.)"""
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.ndim > 0


def _constant(real: Tensor) -> Tensor:
    """A fake tensor for a real one: the result of torch.tensor, with its values, or a tensor on the
    meta device that a skeleton keeps besides weights and buffers (the frequencies of rotary
    positions), without values. torch would compute with the real tensor, on a device that cannot.
    """
    fake: Any = torch.empty(real.shape, dtype=real.dtype, device=real.device)
    fake.twin = None if real.is_meta else real
    return fake


def _real(value: Any) -> Any:
    return getattr(value, "twin") if isinstance(value, FakeTensor) else value  # noqa: B009 (pyright knows no twin)


def _is_known(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) or getattr(tensor, "twin", None) is not None


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """The tensors among values, lists and dictionaries. torch's own pytree takes five times as
    long.
    """
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(*value)
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())


def _number(tensor: Tensor) -> Any:
    if _is_known(tensor):
        with _disable_current_modes():
            return _real(tensor).item()
    return 0.0 if tensor.is_floating_point() else False if tensor.dtype == torch.bool else 0


def _on_twins(func: Any, args: Any, kwargs: Any) -> Any:
    def real(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) else _real(value)

    with _disable_current_modes(), torch.no_grad():
        return func(*tree_map(real, args), **tree_map(real, kwargs))


def _attach(out: Any, twins: Any) -> None:
    for fake, twin in zip(tensors_in(out), tensors_in(twins), strict=True):
        fake.twin = twin if isinstance(fake, FakeTensor) else None  # pyright: ignore[reportAttributeAccessIssue]


def _shaped_by_values(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation whose shape depends on values, such as nonzero. UnknownShapeError
    where the values are not known.
    """
    deciding = [tensor for tensor in tensors_in(args, kwargs) if not tensor.is_floating_point()]
    if not deciding or not all(map(_is_known, deciding)):
        raise UnknownShapeError(
            f"{func}: the shape of its result depends on values that are not known beforehand"
        )
    device = next(tensors_in(args, kwargs)).device
    if func is aten.masked_select.default and not _is_known(args[0]):
        with _disable_current_modes():
            count = int(torch.broadcast_to(_real(args[1]), args[0].shape).sum())
        return torch.empty(count, dtype=args[0].dtype, device=device)
    twins = _on_twins(func, args, kwargs)
    out = tree_map(lambda real: torch.empty(real.shape, dtype=real.dtype, device=device), twins)
    _attach(out, twins)
    return out
