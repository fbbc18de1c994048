"""What a step of a model was found to need, as the measuring process hands it over. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["train", "evaluate", "answer"]


@dataclass(frozen=True)
class Request:
    """One thing to run under fake tensors."""

    experiment: dict[str, Any]
    kind: Kind
    rows: list[dict[str, list[int]]]  # encoded, of one micro-batch
    raw: list[dict[str, Any]] = field(default_factory=list)  # the same as text, for answers
    answer_tokens: int | None = None  # of an answer; None: as many as the experiment allows
    accumulates: bool = False  # a second micro-batch of the same rows follows


@dataclass(frozen=True)
class Moment:
    """What is alive besides weights and buffers, at a moment when nothing less is held against more
    gradients.
    """

    gradients: int  # bytes, of gradients that are complete
    activations: (
        int  # everything else: saved tensors, temporaries, a gradient in the making, the batch
    )
    logits: int

    @property
    def total(self) -> int:
        return self.gradients + self.activations + self.logits


@dataclass(frozen=True)
class Measured:
    """Bytes of one step."""

    weights: int
    buffers: int
    trainable: int  # numbers, not bytes
    frozen: int
    largest: int  # numbers of the largest trainable weight
    states: int  # numbers that the optimizer remembers of all weights
    moments: list[Moment]
    scratch: int  # of attention kernels
    shapes: dict[str, list[int]]  # of the batch
    tensors: list[tuple[str, int]]  # the largest at the end of the forward
    seconds: float

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Measured:
        moments = [Moment(**moment) for moment in values["moments"]]
        return cls(
            **{
                **values,
                "moments": moments,
                "tensors": [(name, size) for name, size in values["tensors"]],
            }
        )

    def plain(self) -> dict[str, Any]:
        return asdict(self)
