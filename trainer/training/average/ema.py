"""An exponential moving average of the weights (train.ema), which evaluations and exports take.

After every update, average = decay x average + (1 - decay) x weights, in fp32. It begins as the
weights of step 0. Each rank averages the fp32 weights that it updates: all of them at ZeRO-0, its
part of them from stage 1 on. The arithmetic is that of one element at a time, so the average has
the same bits however the weights are divided. Source: torch.optim.swa_utils of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import CheckpointError
from trainer.files.saved_tensors import part_of, piece_name
from trainer.runtime import distributed


@dataclass(frozen=True)
class OwnPart:
    """The elements of one parameter that this rank averages."""

    start: int  # the first of them in the flattened parameter
    weights: Tensor  # fp32, which the optimizer updates in place: (count,), at stage 0 whole
    average: Tensor  # fp32, of the same shape


class Average:
    """The average of one rank's weights, and the exchange of both in the model."""

    def __init__(
        self,
        decay: float,
        parameters: Mapping[str, nn.Parameter],
        masters: Iterable[tuple[str, int, Tensor]],
        *,
        stage: int,
        zero: Any,
    ) -> None:
        """parameters: every trainable one by name. masters: (parameter, start, fp32 elements) of
        what this rank updates. zero: DeepSpeed's optimizer.
        """
        self._decay, self._parameters, self._stage, self._zero = decay, parameters, stage, zero
        self._parts = {name: OwnPart(start, own, own.clone()) for name, start, own in masters}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of a step into the average."""
        weights = [part.weights for part in self._parts.values()]
        if weights:  # of a tiny model, some rank may update nothing
            torch._foreach_lerp_(self.tensors(), weights, 1 - self._decay)  # pyright: ignore[reportPrivateImportUsage]

    def tensors(self) -> list[Tensor]:
        """What this rank holds in memory."""
        return [part.average for part in self._parts.values()]

    # Saved and restored
    # ----------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[str, int, Tensor]]:
        """(parameter, start, values) of what this rank holds, where it is. Over all ranks each
        element comes once.
        """
        world, rank = distributed.world(), distributed.rank()
        places = {name: k for k, name in enumerate(self._parameters)}
        for name, part in self._parts.items():
            if self._stage > 0 or places[name] % world == rank:
                yield name, part.start, part.average.reshape(-1)

    def own_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint takes from this rank, where it is. Named as SavedTensors reads them."""
        own: dict[str, Tensor] = {}
        for name, start, values in self.pieces():
            parameter: Any = self._parameters[name]
            shape = parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape
            if values.numel() == shape.numel():
                own[name] = values.view(shape)
            elif values.numel():
                own[piece_name(name, start, shape)] = values
        return own

    def restore(self, averages: Mapping[str, Tensor]) -> None:
        """Put back what the own_tensors() of all ranks gave, of any number of ranks.

        CheckpointError when it is the average of other parameters.
        """
        if averages.keys() != self._parameters.keys():
            missing = sorted(self._parameters.keys() - averages.keys())
            extra = sorted(averages.keys() - self._parameters.keys())
            raise CheckpointError(
                f"the average of train.ema does not fit: missing {missing[:3]}, unexpected "
                f"{extra[:3]}"
            )
        for name, part in self._parts.items():
            values = part_of(averages, name, part.start, part.average.numel())
            part.average.copy_(values.reshape(part.average.shape))

    # In the model
    # ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def show(self) -> None:
        """Give the model the average in place of its weights. A collective."""
        self._place(lambda part: part.average)

    @torch.no_grad()
    def hide(self) -> None:
        """Give the model its weights back, to the last bit. A collective."""
        self._place(lambda part: part.weights)

    def _place(self, values_of: Callable[[OwnPart], Tensor]) -> None:
        if self._stage == 3:
            self._zero._partition_all_parameters()  # as DeepSpeed's step() begins
            for name, part in self._parts.items():
                tensor: Any = self._parameters[name]
                tensor.ds_tensor.view(-1)[: part.average.numel()].copy_(values_of(part))
            whole = self._zero.persistent_parameters  # small ones, which every rank has whole
            if whole:
                whole[0].all_gather(whole)
            return
        for name, parameter in self._parameters.items():
            part = self._parts.get(name)
            if self._stage > 0:
                own = None if part is None else (part.start, values_of(part))
                parameter.copy_(_assemble(parameter, own))
                continue
            assert part is not None, "at stage 0 every rank has all weights"
            if part.weights.data_ptr() == parameter.data_ptr():
                # fp32: the optimizer updates the model's own weights, so both change places
                weights = part.weights.clone()
                part.weights.copy_(part.average)
                part.average.copy_(weights)
            else:
                parameter.copy_(values_of(part))


def _assemble(parameter: Tensor, own: tuple[int, Tensor] | None) -> Tensor:
    """A parameter of which each rank has some elements (their start, and values), or none. A
    collective.
    """
    size, width = parameter.numel(), parameter.element_size()
    whole = parameter.new_zeros(-(-size * width // 4) * 4 // width)
    if own is not None:
        start, values = own
        whole[start : start + values.numel()].copy_(values)
    # a sum of numbers would make 0.0 of -0.0; the bits of all ranks lie beside each other
    distributed.add_up(whole.view(torch.int32))
    return whole[:size].view(parameter.shape)
