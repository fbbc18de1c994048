"""The training loss of each source of a mix, out of the losses of the labels of every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer.models.losses import keeping_losses
from trainer.runtime import distributed

# N labels of a micro-batch, S sources


class SourceSums:
    """Losses and labels of each source, summed up since they were last logged. Every rank has its
    own part. A step counts once its update was made: one that is left out (train.on_bad_step) is in
    no sum, as it is in no count of labels.
    """

    def __init__(self, labels: Sequence[str], sums: Sequence[Sequence[float]] = ()) -> None:
        """labels: of the sources, () of a run without a mix. sums: (loss, labels) of each source on
        all ranks, as settle() gave them to a checkpoint.
        """
        self.labels = list(labels)
        self._sums_S2 = torch.zeros((len(labels), 2), dtype=torch.float64)
        if sums and len(sums) == len(labels) and distributed.is_main():
            self._sums_S2 += torch.tensor(sums, dtype=torch.float64)
        self._sums_S2 = self._sums_S2.to(distributed.device())
        self._of_step_S2 = torch.zeros_like(self._sums_S2)  # of the last window

    @contextmanager
    def adding(self, sources: Sequence[Tensor]) -> Iterator[None]:
        """The losses that are computed inside, of one window, wait for count(). sources: of its
        labels, by micro-batch; () without a mix.
        """
        self._of_step_S2.zero_()
        with keeping_losses(bool(sources)) as losses:
            yield
        if losses:
            self._add(losses, sources)

    def count(self) -> None:
        """Add those of the last window, whose update was made."""
        self._sums_S2 += self._of_step_S2

    def own(self) -> list[list[float]]:
        """(loss, labels) of each source on this rank. No collective."""
        return self._sums_S2.tolist()

    def _add(self, losses: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Nothing is added where the task's loss is over something else than labels."""
        losses_N, source_N = torch.cat(list(losses)), torch.cat(list(sources))
        if len(losses_N) != len(source_N):
            return
        source_N = source_N.to(losses_N.device, non_blocking=True)
        # one sum after the other: index_add on a GPU adds in any order
        for source in range(len(self.labels)):
            is_of_source = source_N == source
            self._of_step_S2[source, 0] += (losses_N.double() * is_of_source).sum()
            self._of_step_S2[source, 1] += is_of_source.sum()

    def settle(self) -> list[list[float]]:
        """The sums over all ranks, for a checkpoint; from here on rank 0 holds them. A
        collective.
        """
        if not self.labels:
            return []
        total = distributed.total(self._sums_S2)
        self._sums_S2 = total if distributed.is_main() else torch.zeros_like(total)
        return total.tolist()

    def read(self) -> dict[str, float]:
        """The mean loss of each source since the last call, by the name of its metric; none of a
        source without a label. A collective.
        """
        if not self.labels:
            return {}
        sums = self.settle()
        self._sums_S2 = torch.zeros_like(self._sums_S2)
        pairs = zip(self.labels, sums, strict=True)
        return {f"loss_{label}": loss / count for label, (loss, count) in pairs if count}
