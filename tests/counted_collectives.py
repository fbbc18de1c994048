"""What ranks send each other in a training step, by collective: installed in a process before its
command runs, it writes down the bytes of every call.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# By torch's names: where the tensor that this rank contributes stands among the arguments.
_GIVEN = {
    "all_reduce": 0,
    "reduce": 0,
    "broadcast": 0,
    "reduce_scatter_tensor": 1,
    "_reduce_scatter_base": 1,
    "all_gather_into_tensor": 1,
    "_all_gather_base": 1,
    "all_gather": 1,
}


def install(folder: Path) -> None:
    """From here on, rank 0 writes to collectives.jsonl of the folder."""
    from trainer.training import loop

    step = [-1]
    train_step = loop.train_step
    file = folder / "collectives.jsonl"
    is_main = os.environ.get("RANK", "0") == "0"

    def counted(call: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        given = args[_GIVEN[name]] if len(args) > _GIVEN[name] else None
        if given is None:
            given = kwargs.get("tensor", kwargs.get("input", kwargs.get("input_tensor")))
        if is_main and isinstance(given, torch.Tensor) and step[0] >= 0:
            with file.open("a") as lines:
                lines.write(
                    json.dumps({"step": step[0], "call": name, "nbytes": given.nbytes}) + "\n"
                )
        return call(*args, **kwargs)

    def begin(*args: Any, **kwargs: Any) -> Any:
        step[0] += 1
        return train_step(*args, **kwargs)

    loop.train_step = begin
    for name in _GIVEN:
        call = getattr(torch.distributed, name)
        setattr(torch.distributed, name, functools.partial(counted, call, name))


def sent(folder: Path, step: int) -> Counter[str]:
    """Bytes that rank 0 contributed in one step, by collective; gathers count a rank's part."""
    found: Counter[str] = Counter()
    for line in map(json.loads, (folder / "collectives.jsonl").read_text().splitlines()):
        if line["step"] == step:
            found[line["call"].removeprefix("_").removesuffix("_base").removesuffix("_tensor")] += (
                line["nbytes"]
            )
    return found
