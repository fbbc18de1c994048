"""The forward and backward passes of a group of ordinary runs, all at once on one base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.driven.together.adapter_set import summed
from trainer.driven.together.rounds import Pack, runs_of
from trainer.driven.together.shared_base import LabelledPart, PackPart, SharedBase
from trainer.driven.together.step_packs import StepRows, filler_row, packs_of, rows_of
from trainer.driven.together.trained_adapters import TrainedAdapters, given, sizes_of
from trainer.models.losses import Terms
from trainer.runtime import distributed

if TYPE_CHECKING:
    from trainer.data.order import StepBatches
    from trainer.protocol.task import Batch, Row, Task


@dataclass(frozen=True)
class SharedMember:
    """An experiment that trains on the base. seed: of the dropout of its adapters."""

    adapters: TrainedAdapters
    terms: Terms
    seed: int


@dataclass
class _Sums:
    """The loss and the gradients of a step of one experiment, as far as its packs were read."""

    loss: Tensor = field(default_factory=lambda: torch.zeros((), device=distributed.device()))
    gradients: list[Tensor] | None = None

    def as_batch(self) -> Batch:
        assert self.gradients is not None, "every rank has rows of every step"
        return given(self.loss, self.gradients)


@dataclass
class SharedSteps:
    """The steps of a group. No method is a collective: a rank reads its own rows."""

    base: SharedBase
    collate: Task  # of any experiment of the group: they have one base
    most_tokens: int  # of a pack
    names: Sequence[str]  # of all experiments, in their order
    rows: Mapping[str, StepRows]  # of those whose rows are in packs
    members: dict[str, SharedMember] = field(default_factory=dict[str, SharedMember])

    def computed(self, windows: Mapping[str, StepBatches]) -> dict[str, StepBatches]:
        """The windows of one step with what its rows give in place of the rows: one micro-batch
        each (trained_adapters.given).

        windows: of the members that do this step now, by name; all of the same step.
        """
        (step,) = {window.step for window in windows.values()}
        own = {name: rows_of(window.batches) for name, window in windows.items()}
        lengths = {name: self.rows[name].lengths(step) for name in self.names if name in self.rows}
        sums = {name: _Sums() for name in windows}
        for number, pack in enumerate(packs_of(lengths, most_tokens=self.most_tokens)):
            if any(slot.run in windows for slot in pack):
                self._compute(pack, own, sums, seed=(step, number, distributed.rank()))
        return {
            name: replace(window, batches=[sums[name].as_batch()])
            for name, window in windows.items()
        }

    def _compute(
        self,
        pack: Pack,
        own: Mapping[str, Sequence[Row]],
        sums: Mapping[str, _Sums],
        *,
        seed: tuple[int, ...],
    ) -> None:
        """Read one pack, and add what it gives to the sums of its members."""
        rows = [
            own[str(slot.run)][slot.row] if slot.run in own else filler_row(slot.tokens)
            for slot in pack
        ]
        names = [name for name in runs_of([pack]) if name in own]
        parts = [self._part(name, pack, rows, seed=seed) for name in names]
        batch = self.collate.collate(rows)
        how: Any = {"sizes": sizes_of(batch), "with_backward": True}
        losses = self.base.losses(batch, parts, **how)
        gradients = self.base.gradients(losses, [part.rows for part in parts])
        for name, loss, own_gradients in zip(names, losses, gradients, strict=True):
            sums[name].loss += loss.detach()
            sums[name].gradients = summed(sums[name].gradients, own_gradients)

    def _part(
        self, name: str, pack: Pack, rows: Sequence[Row], *, seed: tuple[int, ...]
    ) -> LabelledPart:
        member = self.members[name]
        places = [place for place, slot in enumerate(pack) if slot.run == name]
        labels = sum(int(rows[place]["scored"][1:].sum()) for place in places)
        part = PackPart(member.adapters, places[0], len(places), (member.seed, *seed))
        return LabelledPart(part, labels, member.terms)
