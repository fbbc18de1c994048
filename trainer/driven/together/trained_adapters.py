"""The adapters of an ordinary run on a base that runs share, in the place of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.driven.together.adapter_set import AdapterSet
from trainer.driven.together.shared_base import LabelledPart, PackPart, SharedBase
from trainer.protocol.task import Batch

LOSS, GRADIENT = "loss", "gradient_"


def given(loss: Tensor, gradients: Sequence[Tensor]) -> Batch:
    """A micro-batch whose summed loss and gradients were computed already.

    gradients: of the adapters, in their order.
    """
    return {LOSS: loss, **{f"{GRADIENT}{k}": one for k, one in enumerate(gradients)}}


class TrainedAdapters(AdapterSet):
    """Called as the model of its run alone, with a micro-batch: {"loss": () fp32, summed}.

    A micro-batch of given() gives its loss and, in the backward pass, its gradients. Rows are read
    on the shared base; their loss has no gradient.
    """

    def __init__(self, drawn: AdapterSet, base: SharedBase) -> None:
        """drawn: new adapters for `base`."""
        weights = {name: weight.detach() for name, weight in drawn.named_parameters()}
        super().__init__(weights, drawn.layers_by_name)
        self._base = base

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if LOSS in batch:
            weights = [*self.parameters()]
            gradients = [batch[f"{GRADIENT}{k}"] for k in range(len(weights))]
            own = [one.to(p.dtype) for one, p in zip(gradients, weights, strict=True)]
            return {LOSS: _Given.apply(batch[LOSS], *own, *weights)}  # pyright: ignore[reportReturnType]
        return {LOSS: self._evaluated(batch)}

    @torch.no_grad()
    def _evaluated(self, batch: Mapping[str, Tensor]) -> Tensor:
        sizes = sizes_of(batch)
        rows = PackPart(self, 0, len(sizes), None)
        part = LabelledPart(rows, len(batch["scored"]), None)
        (loss,) = self._base.losses(batch, [part], sizes=sizes, with_backward=False)
        return loss


def sizes_of(batch: Mapping[str, Tensor]) -> list[int]:
    """The tokens that each row of a batch has in the model: of padded rows the pads, too."""
    if "starts" in batch:
        return batch["starts"].diff().tolist()
    count, width = batch["input_ids"].shape
    return [width] * count


class _Given(torch.autograd.Function):
    """The loss, whose gradients with respect to the weights are the given ones."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *tensors: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(*tensors[: len(tensors) // 2])
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients = ctx.saved_tensors
        of_weights = [gradient * scale.to(gradient.dtype) for gradient in gradients]
        return (None, *[None] * len(gradients), *of_weights)
