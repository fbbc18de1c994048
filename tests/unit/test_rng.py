"""Random state: seeded apart, captured whole, put back exactly."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from safetensors.torch import save as to_bytes

from tests.wording import refused
from trainer.runtime import rng
from trainer.runtime.preemption import Stopped
from trainer.training import scoring


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Any:
    with rng.replay(rng.capture()):
        yield


def draws() -> list[float]:
    """Two values of each generator; the odd count of Gaussians leaves one cached in Python and
    numpy.
    """
    python = [random.random(), random.gauss(0, 1)]
    numpy = [float(np.random.rand()), float(np.random.randn())]
    return [*python, *numpy, *torch.rand(2).tolist(), *torch.randn(3).tolist()]


def test_one_seed_and_rank_give_one_stream() -> None:
    rng.seed_everything(42, 1)
    first = draws()
    rng.seed_everything(42, 1)
    assert draws() == first


def test_ranks_and_neighbouring_seeds_share_no_stream() -> None:
    streams = []
    for seed, rank in [(42, 0), (42, 1), (43, 0), (41, 2)]:
        rng.seed_everything(seed, rank)
        streams.append(draws())
    values = [value for stream in streams for value in stream]
    assert len(set(values)) == len(values)


def test_restore_continues_every_generator_where_it_was_captured() -> None:
    rng.seed_everything(7, 0)
    draws()
    state = rng.capture()
    expected = draws()
    rng.seed_everything(8, 0)
    rng.restore(state)
    assert draws() == expected


def test_a_state_survives_safetensors() -> None:
    rng.seed_everything(7, 0)
    draws()
    state = load(to_bytes(rng.capture()))
    expected = draws()
    rng.restore(state)
    assert draws() == expected


def test_replay_repeats_a_block_and_puts_the_present_back() -> None:
    rng.seed_everything(7, 0)
    before = rng.capture()
    first = draws()
    middle = rng.capture()
    expected = draws()
    rng.restore(middle)
    with rng.replay(before):
        assert draws() == first
    assert draws() == expected


def test_replay_puts_the_present_back_after_an_error() -> None:
    rng.seed_everything(7, 0)
    before = rng.capture()
    draws()
    present = rng.capture()
    with pytest.raises(KeyError), rng.replay(before):
        raise KeyError
    assert all(torch.equal(rng.capture()[name], value) for name, value in present.items())


@pytest.mark.parametrize("name", ["python", "numpy", "torch", "python.gauss"])
def test_a_state_without_a_generator_is_refused_and_nothing_is_changed(name: str) -> None:
    state = rng.capture()
    rng.seed_everything(3, 0)
    present = rng.capture()
    del state[name]
    with refused("random_state_unfit", name=name):
        rng.restore(state)
    assert all(torch.equal(rng.capture()[key], value) for key, value in present.items())


def test_cuda_states_are_left_out_where_there_is_no_such_device() -> None:
    state = {**rng.capture(), "cuda.63": torch.zeros(16, dtype=torch.uint8)}
    expected = draws()
    rng.restore(state)
    assert draws() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_restore_continues_the_cuda_generator() -> None:
    rng.seed_everything(7, 0)
    state = rng.capture()
    expected = torch.rand(4, device="cuda")
    rng.restore(state)
    assert torch.equal(torch.rand(4, device="cuda"), expected)


def test_an_evaluation_leaves_the_mode_and_every_generator_as_they_were() -> None:
    """Else a run that is evaluated draws other dropout than one that is not."""
    model: Any = torch.nn.Dropout()
    rng.seed_everything(3, 1)
    undisturbed = draws()
    for is_stopped in (False, True):
        rng.seed_everything(3, 1)
        with contextlib.suppress(Stopped), scoring._evaluation(model):
            assert not model.training
            draws()
            if is_stopped:
                raise Stopped
        assert model.training
        assert draws() == undisturbed
