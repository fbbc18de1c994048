"""A pass over rows of one run that is computed in rounds, with the rows of others beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.driven.packs import TARGETS
from trainer.driven.together.adapter_set import AdapterSet, summed, zeros_of
from trainer.driven.together.rounds import Pack, layout_of_round, packs_of_layout
from trainer.operations.rows import DrivenRow

if TYPE_CHECKING:
    from trainer.driven.passes import RowsPass
    from trainer.operations.operation_log import Operation
    from trainer.training.engine import Engine


@dataclass
class RunningPass:
    """What is there of a pass. recorded: the layout by which it was computed before; None: its rows
    are packed with those of other runs.
    """

    operation: Operation
    of: RowsPass
    recorded: Mapping[str, Any] | None
    began: float  # seconds since 1970
    rounds: list[Any] = field(default_factory=list[Any])  # that are done, as layouts
    logps: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # of rows that are done
    gradients: list[Tensor] | None = None  # of this rank's rows

    @property
    def left(self) -> list[tuple[int, int]]:
        """(number, tokens) of the rows that are not done."""
        rows = enumerate(self.of.rows)
        return [(number, len(row.tokens)) for number, row in rows if number not in self.logps]

    @property
    def is_done(self) -> bool:
        return len(self.logps) == len(self.of.rows)

    def row(self, number: int) -> DrivenRow:
        return self.of.rows[number]

    def recorded_packs(self, run: str) -> list[Pack]:
        """The packs of its next round."""
        assert self.recorded is not None, "it was computed before"
        return packs_of_layout(self.recorded["rounds"][len(self.rounds)], run)

    def take(self, numbers: Sequence[int], logps_N: Tensor) -> None:
        """Take the log-probabilities of some rows, row after row."""
        counts = [int(self.row(number).inputs[TARGETS].size) for number in numbers]
        self.logps.update(zip(numbers, logps_N.split(counts), strict=True))

    def add_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Add those of one round."""
        self.gradients = summed(self.gradients, gradients)

    def end_round(self, packs: Sequence[Pack], run: str) -> None:
        """Write down how a round was packed."""
        self.rounds.append(layout_of_round(packs, run))

    def ordered_logps(self) -> list[Tensor]:
        """The log-probabilities of all rows in their order."""
        return [self.logps[number] for number in range(len(self.of.rows))]

    def give_gradient(self, engine: Engine, adapters: AdapterSet) -> None:
        """Add the gradient of the pass to what the run's engine has accumulated. A collective."""
        weights = [*adapters.parameters()]
        gradients = self.gradients or zeros_of(adapters.leaves())
        own = [one.to(weight.dtype) for one, weight in zip(gradients, weights, strict=True)]
        with torch.enable_grad():
            engine.backward(engine.model(*own))
        self.gradients = None
