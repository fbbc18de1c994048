"""The loss over a pool of queries and passages, which may span the micro-batches of a window and
all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.models.gradcache import PoolScope, pooled_losses
from trainer.protocol.task import Batch
from trainer.runtime import distributed
from trainer.tasks.retriever.batches import texts_of
from trainer.tasks.retriever.config import Config
from trainer.tasks.retriever.loss import losses
from trainer.tasks.retriever.tokens import bits_of

log = logging.getLogger(__name__)

# Tensors that a rank does not exchange: it computes the loss of its own queries only, over the
# passages of all ranks.
_OWN = ("queries", "counts", "positive_ids", "positive_counts", "teacher")


@dataclass
class PoolLoss:
    """The losses of an experiment over its pools."""

    cfg: Config
    _is_size_logged: bool = False

    def of_window(self, model: nn.Module, window: Sequence[Batch]) -> Iterator[Tensor]:
        """The losses of a window. A query is compared with all passages of its pool: those of the
        window or of its micro-batch, of all ranks or of its own.
        """
        cfg = self.cfg.loss
        scope = PoolScope(own=_OWN, across_ranks=cfg.negatives_x_device, on_host=cfg.pool_on_host)
        # one micro-batch at a time: a list would hold all of them on the device
        for pool in [window] if cfg.pool == "window" else ([batch] for batch in window):
            if not self._is_size_logged:
                self._is_size_logged = True
                ranks = distributed.world() if cfg.negatives_x_device else 1
                queries = ranks * sum(len(batch["counts"]) for batch in pool)
                passages = ranks * sum(len(batch["identities"]) for batch in pool)
                message = "one loss goes over %d queries and %d passages: %d negatives a query"
                log.info(message, queries, passages, passages - 1)
            yield from pooled_losses(
                lambda batch: self._represent(model, batch), pool, self._of_pool, scope
            )

    def _represent(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The vectors of a micro-batch, and the other tensors that the loss needs."""
        cfg, texts = self.cfg.loss, texts_of(batch)
        if cfg.query_chunk or cfg.passage_chunk:
            vectors = model(**texts, chunks=(cfg.query_chunk, cfg.passage_chunk))
        else:
            vectors = model(**texts)
        represented = {**vectors, "counts": batch["counts"]}
        if cfg.mask_duplicates:
            for name in ("identities", "positive_ids", "positive_counts"):
                represented[name] = batch[name]
        if cfg.distillation is not None:
            # as integers: a teacher's scores carry no gradient
            represented["teacher"] = bits_of(batch["teacher"])
        return represented

    def _of_pool(self, pool: Mapping[str, Tensor]) -> Tensor:
        cfg, temperature = self.cfg.loss, self.cfg.encoder.temperature
        total = pool["queries"].new_zeros(())
        if cfg.contrastive:
            contrastive = losses.in_batch(
                pool, temperature=temperature, mask_duplicates=cfg.mask_duplicates
            )
            total = total + cfg.contrastive * contrastive
        if cfg.distillation is not None:
            distillation = losses.distil(
                {**pool, "teacher": pool["teacher"].view(torch.float32)},
                temperature=temperature,
                teacher_temperature=cfg.distillation.teacher_temperature,
            )
            total = total + cfg.distillation.coefficient * distillation
        return total
