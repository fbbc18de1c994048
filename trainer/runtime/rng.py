"""Random state: seed it, capture it as plain tensors, put it back, run a block under an earlier
one.

Four generators are covered: Python's `random`, numpy's global one, torch on the CPU, torch on every
CUDA device.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from trainer.errors import CheckpointError

MT_WORDS = 624  # words of a Mersenne Twister's state; Python appends its position to them


def seed_everything(seed: int, rank: int) -> None:
    """Seed every generator of this process. Different ranks, and different seeds, get unrelated
    random numbers.

    numpy's SeedSequence mixes seed and rank. Adding them would give rank 1 of seed 42 the numbers
    of rank 0 of seed 43.
    """
    sequence = np.random.SeedSequence((seed, rank))
    words = [int(word) for word in sequence.generate_state(4, np.uint64)]
    random.seed(words[0])
    np.random.seed(words[1] & 0xFFFFFFFF)
    torch.manual_seed(words[2] >> 1)  # seeds every CUDA device, too


def capture() -> dict[str, Tensor]:
    """The state of every generator, as CPU tensors that safetensors can hold."""
    _, words, gauss = random.getstate()
    mersenne = np.random.get_state(legacy=False)
    keys, position = mersenne["state"]["key"], mersenne["state"]["pos"]
    state = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python.gauss": _optional(gauss),
        "numpy": torch.tensor([*(int(key) for key in keys), position], dtype=torch.int64),
        "numpy.gauss": _optional(mersenne["gauss"] if mersenne["has_gauss"] else None),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        for index, cuda in enumerate(torch.cuda.get_rng_state_all()):
            state[f"cuda.{index}"] = cuda
    return state


def restore(state: Mapping[str, Tensor]) -> None:
    """Put a captured state back. A CUDA device that is only in the state or only on this machine is
    left out.

    Raises CheckpointError when a generator is missing or its state has the wrong length.
    """
    _check(state)
    words = tuple(int(word) for word in state["python"].tolist())
    random.setstate((3, words, _value(state["python.gauss"])))
    keys, cached = state["numpy"].tolist(), _value(state["numpy.gauss"])
    np.random.set_state(
        (
            "MT19937",
            np.array(keys[:-1], dtype=np.uint32),
            keys[-1],
            int(cached is not None),
            cached or 0.0,
        )
    )
    torch.set_rng_state(state["torch"].cpu())
    for index in range(torch.cuda.device_count()):
        if f"cuda.{index}" in state:
            torch.cuda.set_rng_state(state[f"cuda.{index}"].cpu(), index)


@contextmanager
def replay(state: Mapping[str, Tensor]) -> Iterator[None]:
    """Run a block under a captured `state`, and restore the generators afterwards."""
    present = capture()
    restore(state)
    try:
        yield
    finally:
        restore(present)


def _optional(value: float | None) -> Tensor:
    return torch.tensor([] if value is None else [value], dtype=torch.float64)


def _value(tensor: Tensor) -> float | None:
    return float(tensor[0]) if tensor.numel() else None


def _check(state: Mapping[str, Tensor]) -> None:
    lengths = {
        "python": MT_WORDS + 1,
        "numpy": MT_WORDS + 1,
        "torch": torch.get_rng_state().numel(),
    }
    for name, length in lengths.items():
        got = state[name].numel() if name in state else "nothing"
        if got != length:
            raise CheckpointError(
                f"random state {name!r}: got {got} values, want {length}. Resume from another one."
            )
    missing = {"python.gauss", "numpy.gauss"} - state.keys()
    if missing:
        raise CheckpointError(
            f"random state: {', '.join(sorted(missing))} missing. Resume from another checkpoint."
        )
