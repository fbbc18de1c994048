"""Weights in files that are no finite numbers: looked for where a loss is none, and no update made
it so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from trainer.errors import ConfigError
from trainer.models.weights import weight_files

_SHOWN = 5


def refuse(sources: Iterable[str], dtype: torch.dtype, *, happened: str) -> None:
    """ConfigError names the weights in these folders or Hub ids that are not finite in `dtype`.
    Reads every one.

    happened: the first clause of the message: what is not finite, and when.
    """
    problems: list[str] = []
    for file in _files(sources):
        problems += [
            f"{file}: {name} {reason}"
            for name, tensor in _tensors(file)
            if (reason := _reason(tensor, dtype)) is not None
        ]
    if problems:
        more = f"\nand {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ConfigError(
            f"{happened}, because weights are not:\n"
            + "\n".join(problems[:_SHOWN])
            + f"{more}.\nGet the files again; where a precision cannot hold the numbers, choose "
            "another train.precision."
        )


def _files(sources: Iterable[str]) -> Iterator[Path]:
    """A retriever of two encoders has its weights in folders within."""
    for source in dict.fromkeys(sources):
        files = weight_files.of(source)
        folder = Path(source)
        if not files and folder.is_dir():
            inner = sorted(path.parent for path in folder.glob("*/config.json"))
            files = [file for place in inner for file in weight_files.of(str(place))]
        yield from files


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    if file.suffix != ".safetensors":
        yield from weight_files.read_pickle(file).items()
        return
    with safe_open(file, framework="pt", device="cpu") as content:
        for name in content.keys():  # noqa: SIM118  (a safe_open is no mapping)
            yield name, content.get_tensor(name)


def _reason(tensor: Tensor, dtype: torch.dtype) -> str | None:
    """Why a tensor cannot be computed with; None for a good one."""
    if not tensor.is_floating_point():
        return None
    if bool(tensor.isnan().any()):
        return "holds NaN (no number)"
    if bool(tensor.isinf().any()):
        return "holds an infinity"
    if bool(tensor.to(dtype).isinf().any()):
        return f"holds numbers that {str(dtype).removeprefix('torch.')} cannot"
    return None
