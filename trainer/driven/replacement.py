"""Weights and moments of a live engine replaced by those of a saved state."""

from __future__ import annotations

from typing import Any

import torch

from trainer.errors import CheckpointError
from trainer.files.saved_tensors import part_of
from trainer.training import engine as engines
from trainer.training.checkpoint import Checkpoint
from trainer.training.engine import Engine
from trainer.training.optimizer_state import MASTER


@torch.no_grad()
def replace(engine: Engine, saved: Checkpoint, *, with_optimizer: bool) -> None:
    """Put the weights of a saved state, which fit, into the engine, with its moments and the count
    of its steps, or with none, as before the first step. No gradient may be pending. A collective.
    """
    module: Any = engine.model.module
    weights = saved.weights(engines.shapes(module))
    optimizer = saved.optimizer(engine.optimizer.shapes())
    state = saved.state()["engine"]  # all files are open before anything changes
    engine.state_copy.wait()
    if engine.stage == 3:
        engine.model.optimizer._partition_all_parameters()  # as DeepSpeed's step() begins
    for name, start, values in engine.optimizer.masters():
        place = f"{name}|{MASTER}"
        source, key = (optimizer, place) if place in optimizer else (weights, name)
        part = part_of(source, key, start, values.numel())
        values.copy_(part.reshape(values.shape))
    engines.load_weights(module, weights)
    if engine.stage == 3:
        whole = engine.model.optimizer.persistent_parameters  # small ones, whole on every rank
        if whole:
            whole[0].all_gather(whole)
    if with_optimizer:
        engine.optimizer.restore(optimizer, state)
        return
    engine.optimizer.make_empty()
    for state in engine.optimizer.inner().state.values():
        for key, value in state.items():
            if torch.is_tensor(value):
                value.zero_()
            elif key == "step":
                state[key] = 0


def refuse_others(engine: Engine, saved: Checkpoint) -> None:
    """CheckpointError for a state of other weights or moments than those of the engine."""
    shapes = engines.shapes(engine.model.module)
    weights = saved.weights(shapes)
    optimizer = saved.optimizer(engine.optimizer.shapes())
    for got, want, what in (
        ({name: tuple(weights[name].shape) for name in weights}, shapes, "weights"),
        (
            {name: tuple(optimizer[name].shape) for name in optimizer},
            engine.optimizer.shapes(),
            "moments",
        ),
    ):
        expected = {name: tuple(shape) for name, shape in want.items()}
        if got != expected:
            name = next(iter(sorted(got.items() ^ expected.items())))[0]
            raise CheckpointError(
                f"{saved}: its {what} are of another model: {name} has the shape {got.get(name)}, "
                f"want {expected.get(name)}. Load a state of the same base, rank and layers."
            )
