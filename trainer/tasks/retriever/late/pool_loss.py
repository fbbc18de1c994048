"""The loss over a pool of queries and passages that are lists of vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from trainer.models.lean.maxsim import maxsim
from trainer.protocol.task import Batch
from trainer.tasks.retriever.config import Late
from trainer.tasks.retriever.loss.pool_loss import PoolLoss


class LatePoolLoss(PoolLoss):
    """The losses of an experiment over its pools: those of dot products, of the scores of late
    interaction. In a pool the vectors of all texts of a side stand one after the other.
    """

    own: ClassVar[tuple[str, ...]] = (*PoolLoss.own, "query_lengths")

    @property
    def temperature(self) -> float:
        return self.cfg.late.temperature

    def _represent(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        represented = super()._represent(model, batch)
        if self.cfg.loss.symmetric:
            represented["asker_lengths"] = represented["query_lengths"]
        return represented

    def _of_vectors(self, pool: Mapping[str, Tensor]) -> Tensor:
        how = self.cfg.late
        scored = {**pool, "products": scores(pool, "queries", "query_lengths", how)}
        if self.cfg.loss.symmetric:
            scored["asker_products"] = scores(pool, "askers", "asker_lengths", how)
        return super()._of_vectors(scored)


def scores(pool: Mapping[str, Tensor], queries: str, lengths: str, how: Late) -> Tensor:
    """(Q, P) scores of the queries of that name with all passages of a pool."""
    lengths_Q = pool[lengths]
    scores_QP = maxsim(pool[queries], lengths_Q, pool["passages"], pool["passage_lengths"])
    return scores_QP / lengths_Q[:, None] if how.mean else scores_QP
