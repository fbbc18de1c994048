"""How far rounding alone may put two computations of the same numbers apart.

An operation in floating point is off by up to eps of its result. A number that is the end of
`depth` operations collects as many errors, which go either way and add up like the steps of a walk:
to about sqrt(depth) x eps x the largest magnitude. Processors differ in exactly these errors: how
many terms a register sums at once, whether a product is rounded before it is added, how many
threads share a sum. `margin` says how much of such a walk is allowed. It is measured on several
processors: docs/log.md holds the table, and no margin is wider than ten times the worst of it.

LATHE_SHOW_ERRORS=FILE appends a line to FILE for every comparison, and
`python -m tests.tolerance FILE ...` prints the worst of each test.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Numbers = Tensor | float | Sequence[float]
Step = tuple[Tensor | float, Mapping[str, Tensor]]  # a loss, and its gradients by name
# A gradient that cancels to nothing, as that of a key's bias does, is left with the rounding of its
# parts, which are as large as this share of the largest gradient.
CANCELS = 0.03


def allowed(
    scale: float, *, depth: float, margin: float, dtype: torch.dtype = torch.float32
) -> float:
    """The distance that `margin` walks of `depth` roundings of numbers up to `scale` may reach."""
    return margin * math.sqrt(depth) * torch.finfo(dtype).eps * scale


def assert_close(
    got: Numbers,
    want: Numbers,
    *,
    depth: float,
    margin: float,
    what: str,
    of: str = "",
    scale: float | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """No element of `got` is further from `want` than rounding allows.

    depth: operations that follow one another on the way to an element, the terms of its sums
    included. scale: the largest magnitude among the numbers that are summed; that of `want` unless
    told. dtype: in which the numbers were computed; the coarser one of the two tensors, and fp32
    for plain numbers. what, of: the quantity, for the table, and which one of them, for the
    message.
    """
    dtype = dtype or _coarser(got, want)
    ours, theirs = _exact(got), _exact(want)
    assert ours.shape == theirs.shape, (
        f"{what} {of}: got shape {tuple(ours.shape)}, want {tuple(theirs.shape)}"
    )
    scale = _largest(theirs[theirs.isfinite()]) if scale is None else scale
    bound = allowed(scale, depth=depth, margin=margin, dtype=dtype)
    distance = _largest(torch.where(ours == theirs, 0.0, ours - theirs))
    note(what, of, distance, bound)
    assert distance <= bound, (
        f"{what} {of}: {distance:.3e} apart, rounding allows {bound:.3e} (largest magnitude "
        f"{scale:.3e}, {margin:g} x "
        f"sqrt({depth:g}) x eps of {str(dtype).removeprefix('torch.')})"
    )


def assert_all_close(
    got: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    *,
    cancels: float = 0.0,
    of: str = "",
    **rounding: Any,
) -> None:
    """assert_close of tensors by name, of which both sides have the same ones.

    cancels: an element is held against this share at least of the largest one of all tensors.
    """
    assert got.keys() == want.keys(), f"{of} {sorted(got.keys() ^ want.keys())} on one side only"
    largest = max((_largest(_exact(tensor)) for tensor in want.values()), default=0.0)
    for name, tensor in want.items():
        scale = max(_largest(_exact(tensor)), cancels * largest)
        assert_close(got[name], tensor, of=f"{of} {name}".strip(), scale=scale, **rounding)


def assert_same_step(
    got: Step,
    want: Step,
    *,
    depth: float,
    loss: float,
    gradients: float,
    cancels: float = CANCELS,
    of: str = "",
) -> None:
    """Equal losses, `depth` operations deep, and equal gradients, which have passed them twice;
    `loss` and `gradients` are the margins.
    """
    assert_close(got[0], want[0], what="loss", of=of, depth=depth, margin=loss)
    how = {"what": "gradients", "depth": 2 * depth, "margin": gradients, "cancels": cancels}
    assert_all_close(got[1], want[1], of=of, **how)


def assert_equal_step(got: Step, want: Step) -> None:
    """The same to the last bit, as the same operations in the same order must be."""
    assert float(got[0]) == float(want[0])
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        assert torch.equal(got[1][name], gradient), name


def depth_of(model: nn.Module) -> int:
    """Operations on the way through a model: the terms of the sums of its matrices, one matrix
    after the other. Those that are side by side, a query's and a key's, stand for attention's own
    products and for the norms.
    """
    return sum(each.in_features for each in model.modules() if isinstance(each, nn.Linear))


def note(what: str, of: str, distance: float, bound: float) -> None:
    """Append a comparison to the file that LATHE_SHOW_ERRORS names, if it names one."""
    if "LATHE_SHOW_ERRORS" not in os.environ:
        return
    test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
    line = {"test": test, "what": what, "of": of, "distance": distance, "bound": bound}
    with Path(os.environ["LATHE_SHOW_ERRORS"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _exact(numbers: Numbers) -> Tensor:
    tensor = (
        numbers.detach()
        if isinstance(numbers, Tensor)
        else torch.tensor(numbers, dtype=torch.float64)
    )
    return tensor.double()


def _largest(tensor: Tensor) -> float:
    """NaN where the tensor holds one, so that no comparison with it holds."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _coarser(*numbers: Numbers) -> torch.dtype:
    dtypes = [
        each.dtype for each in numbers if isinstance(each, Tensor) and each.is_floating_point()
    ]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def worst(lines: Sequence[dict[str, str | float]]) -> list[tuple[str, str, float, float]]:
    """(test, quantity, largest distance as a share of its bound, that distance) of each, cases
    taken together.
    """
    shares: dict[tuple[str, str], tuple[float, float]] = {}
    for line in lines:
        key = (str(line["test"]).partition("[")[0], str(line["what"]))
        distance, bound = float(line["distance"]), float(line["bound"])
        share = distance / bound if bound else 0.0
        shares[key] = max(shares.get(key, (0.0, 0.0)), (share, distance))
    return [
        (test, what, share, distance) for (test, what), (share, distance) in sorted(shares.items())
    ]


def main(files: Sequence[str]) -> None:
    """Print a table of the worst of each test over all files."""
    lines = [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]
    print(
        "| test | quantity | worst share of what is allowed | its distance |\n| --- | --- | --- "
        "| --- |"
    )
    for test, what, share, distance in worst(lines):
        print(f"| {test.rpartition('::')[2]} | {what} | {share:.2f} | {distance:.1e} |")


if __name__ == "__main__":
    main(sys.argv[1:])
