"""What a sparse retriever lowers: a retriever's loss of its weights, and regularisers that keep
most of them at 0.

A regulariser is a function of the mean weight of each word over the whole pool: over all
micro-batches of a window and all ranks, as far as the pool of the contrast goes. Each micro-batch
hands in the sum of its texts' weights, so that no other text is exchanged for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from trainer.protocol.task import STEP, Batch
from trainer.tasks.retriever.config import Sparse
from trainer.tasks.retriever.loss.pool_loss import PoolLoss

# Q queries of this rank, V vocabulary, K micro-batches of all ranks


class SparseLoss(PoolLoss):
    """The losses of an experiment over its pools, with regularisers."""

    @property
    def own(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As of any retriever. Passages are wide here: without a contrast with those of other
        queries, ranks do not exchange them.
        """
        how = self.cfg.loss
        is_contrast = how.contrastive > 0 and how.kind == "softmax"
        return PoolLoss.own if is_contrast else (*PoolLoss.own, "passages")

    @property
    def temperature(self) -> float:
        return self.cfg.sparse.temperature

    def _represent(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        represented = super()._represent(model, batch)
        for side in ("queries", "passages"):
            weights = represented[side]
            represented[f"{side}_sum"] = weights.sum(0, keepdim=True)
            represented[f"{side}_count"] = weights.new_full((1,), len(weights), dtype=torch.int64)
        if STEP in batch:
            represented[STEP] = batch[STEP]
        return represented

    def _of_pool(self, pool: Mapping[str, Tensor]) -> Tensor:
        """() the loss of this rank's queries: a regulariser counts once for each of them, for the
        loop divides by their number.
        """
        return super()._of_pool(pool) + len(pool["counts"]) * regularisers(pool, self.cfg.sparse)


def regularisers(pool: Mapping[str, Tensor], how: Sparse) -> Tensor:
    """() fp32: the regularisers of a pool, times their weights.

    pool: of each side, <side>_sum (K, V), the sums of the weights of K micro-batches, and
    <side>_count (K,), their texts; and perhaps step (K,), the number of the step, from 1.

    Sources: flops and the warm-up: Paria et al. 2020 (arXiv 2004.05665), which Formal et al. 2021
    take; l1 of queries: Lassance & Clinchant 2022; anti_zero: naver/splade.
    """
    sums = {side: pool[f"{side}_sum"].sum(0) for side in ("queries", "passages")}
    means = {side: sums[side] / pool[f"{side}_count"].sum() for side in sums}
    total = how.passage_weight * regulariser(means["passages"], how.passage_regulariser)
    # of queries that no model reads nothing can change
    learnt = ["passages"] if how.queries == "tokens" else ["passages", "queries"]
    if "queries" in learnt:
        total = total + how.query_weight * regulariser(means["queries"], how.query_regulariser)
    if STEP in pool and how.warmup_steps:
        share = pool[STEP][0].to(total.dtype) / how.warmup_steps
        total = total * share.clamp(max=1.0).square()
    if how.anti_zero:
        total = total + how.anti_zero * sum(1 / sums[side].sum().square() for side in learnt)
    return total


def regulariser(means_V: Tensor, kind: Literal["flops", "l1"]) -> Tensor:
    """() of the mean weight of each word, which is 0 or more: the sum of the squares (flops), or
    the mean sum of a text's weights (l1).
    """
    return means_V.square().sum() if kind == "flops" else means_V.sum()
