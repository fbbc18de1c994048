"""The loss over a pool of queries and passages, which may span the micro-batches of a window and
all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from trainer.models.gradcache import PoolScope, pooled_losses
from trainer.protocol.task import Batch
from trainer.runtime import distributed
from trainer.tasks.retriever.batches import texts_of
from trainer.tasks.retriever.config import Config
from trainer.tasks.retriever.loss import distillation, losses
from trainer.tasks.retriever.model import first_numbers, most_calls
from trainer.tasks.retriever.tokens import bits_of

log = logging.getLogger(__name__)

# Tensors that a rank does not exchange: it computes the loss of its own queries only, over the
# passages of all ranks.
_OWN = (
    "queries",
    "counts",
    "targets",
    "positive_ids",
    "positive_counts",
    "teacher",
    "log_scale",
)
_VECTORS = ("queries", "passages", "askers")


@dataclass
class PoolLoss:
    """The losses of an experiment over its pools."""

    cfg: Config
    _is_size_logged: bool = False
    own: ClassVar[tuple[str, ...]] = _OWN

    def of_window(self, model: nn.Module, window: Sequence[Batch]) -> Iterator[Tensor]:
        """The losses of a window. A query is compared with all passages of its pool: those of the
        window or of its micro-batch, of all ranks or of its own.
        """
        cfg = self.cfg.loss
        where = {"across_ranks": cfg.negatives_x_device, "on_host": cfg.pool_on_host}
        layers = cfg.matryoshka.layers if cfg.matryoshka else ()
        own = (*self.own, *(f"queries_{layer}" for layer in layers))
        scope = PoolScope(own=own, **where)
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

    @property
    def temperature(self) -> float:
        """What scores are divided by, where it is not learnt."""
        return self.cfg.encoder.temperature

    def _represent(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The vectors of a micro-batch, and the other tensors that the loss needs."""
        cfg, texts = self.cfg.loss, texts_of(batch)
        if cfg.chunk_tokens is not None:
            vectors = model(**texts, chunks=(None, None), calls=most_calls(texts))
        elif cfg.query_chunk or cfg.passage_chunk:
            vectors = model(**texts, chunks=(cfg.query_chunk, cfg.passage_chunk))
        else:
            vectors = model(**texts)
        represented = {**vectors, "counts": batch["counts"]}
        if self.cfg.data.positives > 1:
            represented["targets"] = batch["targets"]
        if cfg.mask_duplicates:
            for name in ("identities", "positive_ids", "positive_counts"):
                represented[name] = batch[name]
        if cfg.symmetric:
            # under names of their own, for these are exchanged
            represented |= {
                name.replace("queries", "askers"): tensor
                for name, tensor in vectors.items()
                if name.startswith("queries")
            }
            if cfg.mask_duplicates:
                represented["asker_ids"] = batch["positive_ids"]
                represented["asker_counts"] = batch["positive_counts"]
        if self.cfg.needs_teacher:
            # as integers: a teacher's scores carry no gradient
            represented["teacher"] = bits_of(batch["teacher"])
        return represented

    def _of_pool(self, pool: Mapping[str, Tensor]) -> Tensor:
        """() the loss of a pool: of its whole vectors, and of those of the layers, weighted, with
        their divergence from the whole ones.

        Source of the layers: Li et al. 2024 (2D Matryoshka Sentence Embeddings), as
        AdaptiveLayerLoss of sentence-transformers has them: the divergence is a mean over texts.
        """
        how = self.cfg.loss.matryoshka
        pool = dict(pool)
        if self.cfg.needs_teacher:
            pool["teacher"] = pool["teacher"].view(torch.float32)
        total = self._of_dims(pool)
        if how is None or not how.layers:
            return total
        weights = how.layer_weights or [1 / len(how.layers)] * len(how.layers)
        for layer, weight in zip(how.layers, weights, strict=True):
            of_layer = {name: pool[f"{name}_{layer}"] for name in _VECTORS if name in pool}
            total = total + weight * self._of_dims({**pool, **of_layer})
            if how.divergence:
                total = total + how.divergence * distillation.divergence(
                    of_layer, pool, temperature=how.divergence_temperature
                )
        return total

    def _of_dims(self, pool: dict[str, Tensor]) -> Tensor:
        """() the loss of some vectors, whole or of their first numbers, weighted.

        Source of the sum: Kusupati et al. 2022 (Matryoshka Representation Learning).
        """
        how = self.cfg.loss.matryoshka
        if how is None or not how.dims:
            return self._of_vectors(pool)
        total = pool["queries"].new_zeros(())
        for width, weight in zip(how.dims, how.weights or [1.0] * len(how.dims), strict=True):
            cut = partial(first_numbers, dims=width, normalize=self.cfg.encoder.normalize)
            vectors = {name: cut(pool[name]) for name in _VECTORS if name in pool}
            total = total + weight * self._of_vectors({**pool, **vectors})
        return total

    def _of_vectors(self, pool: Mapping[str, Tensor]) -> Tensor:
        cfg, total = self.cfg.loss, pool["queries"].new_zeros(())
        temperature: losses.Temperature = self.temperature
        if "log_scale" in pool:
            temperature = (-pool["log_scale"]).exp()
        if cfg.contrastive and cfg.kind == "triplet":
            total = total + cfg.contrastive * losses.triplet(pool, margin=cfg.margin)
        elif cfg.contrastive:
            total = total + cfg.contrastive * losses.in_batch(pool, cfg, temperature=temperature)
        how = cfg.distillation
        if how is not None:
            learnt = distillation.distil if how.kind == "kl" else distillation.margin_mse
            scale = {"temperature": temperature, "teacher_temperature": how.teacher_temperature}
            total = total + how.coefficient * learnt(pool, **scale)
        return total
