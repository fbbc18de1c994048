"""Late interaction: a retriever that compares texts vector by vector, each of a token, and learns
to score a query's passages above others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer.config.block import validate
from trainer.errors import ConfigError
from trainer.metrics.mergeable import GatheredValues, Ratio
from trainer.models import base_model, base_source
from trainer.models.families import family_of
from trainer.models.lean.maxsim import maxsim
from trainer.models.weights import model_folder
from trainer.protocol.abilities import IdLists, Side, TokenVectors
from trainer.protocol.task import Batch, Places, Row, Text
from trainer.runtime.batch import to_device
from trainer.tasks.retriever import export as forms
from trainer.tasks.retriever.apart.task import TwoSidedTask
from trainer.tasks.retriever.batches import texts_of
from trainer.tasks.retriever.config import Config, Data, Late
from trainer.tasks.retriever.cross import losses, metrics
from trainer.tasks.retriever.late import export
from trainer.tasks.retriever.late.batches import LateBatches, texts_by_name
from trainer.tasks.retriever.late.model import LateRetriever
from trainer.tasks.retriever.late.pool_loss import LatePoolLoss, scores
from trainer.tasks.retriever.late.vector_tokens import VectorTokens
from trainer.tasks.retriever.loss.own_passages import own_passages
from trainer.tasks.retriever.model import most_calls
from trainer.tasks.retriever.sentence_folder import with_pad
from trainer.tasks.retriever.tokens import Tokens


class Task(TwoSidedTask):
    """Each token of a text becomes a vector."""

    base_name: ClassVar[str] = "query_model"  # of Retriever, which may have two

    def __init__(self, cfg: Config, places: Places) -> None:
        tokenizer = base_source.tokenizer_of(cfg, places, needs_eos=False)
        super().__init__(cfg, places, tokenizer=tokenizer)
        self._pool_loss = LatePoolLoss(cfg)
        self._follow(cfg.data, cfg.late)

    def _follow(self, data: Data, late: Late) -> None:
        """Make vectors as this says; an exported model may say otherwise than the experiment."""
        self.late = late
        self.tokens = Tokens(self.tokenizer, data)
        self.vectors = VectorTokens(self.tokenizer, late, query_tokens=data.query_tokens)

    # Model
    # ----------------------------------------------------------------------------------------------

    def operate(self, base: Any) -> nn.Module:
        if self.cfg.dropout is not None:
            base_model.set_dropout(base, self.cfg.dropout)
        self._refuse_beyond_positions(base.config)
        how: Any = {"width": self.late.width, "seed": self.cfg.train.seed}
        return LateRetriever(base, self.reader(base), **how)

    def _refuse_beyond_positions(self, config: Any) -> None:
        """ConfigError when an expanded query is longer than the positions that a base has learnt:
        every batch would fail.
        """
        positions = getattr(config, "max_position_embeddings", None)
        if positions is not None and family_of(config).positions_follow_pad:
            positions -= config.pad_token_id + 1
        longest = self.vectors.query_tokens
        if self.late.expand and positions is not None and longest > positions:
            raise ConfigError(
                f"data.query_tokens={longest}: late.expand makes every query so long, longer than "
                f"the model's {positions} positions. Use at most {positions}."
            )

    def model(self) -> nn.Module:
        forms.refuse_base(base_source.resolve(self.cfg.base, self.places), "late")
        return super().model()

    def fill_head(self, head: Any, source: str) -> bool:
        if export.fill_head(head, source):
            return True
        forms.refuse_lost_head(source, "late")
        return False

    def load_export(self, folder: Path) -> nn.Module:
        forms.refuse_other_form(folder, "late")
        said = export.read_description(folder)
        if said is not None:
            data, late = said
            own = {name: getattr(self.cfg.data, name) for name in data}
            own |= self.cfg.late.model_dump()
            forms.tell_changes(folder, {**data, **late.model_dump()}, own)
            own_data = validate(
                Data, {**self.cfg.data.model_dump(exclude_unset=True), **data}, source=str(folder)
            )
            self._follow(own_data, late)
        model = super().load_export(folder).eval()
        forms.refuse_other_tokenizer(folder, self.tokenizer, self.places.cache_dir)
        return model

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """A body of transformers; adapters without their base where the experiment says so. The
        projection lies beside it in any case.
        """
        weights = self.whole(weights, [self.base_name])
        parts: dict[str, dict[str, Tensor]] = {self.base_name: {}, "head": {}}
        for name, values in weights.items():
            part, _, own = name.partition(".")
            parts[part][own] = values
        base = parts[self.base_name]
        if self.cfg.exports_adapters:
            self.export_adapters(base, folder)
            model_folder.write_tokenizer(folder, self.tokenizer)
        else:
            config = self.exported_config()
            config.dtype = next(iter(base.values())).dtype
            model_folder.write(folder, config, with_pad(self.tokenizer), base)
        words = self.vectors.skipped_words
        export.write(folder, self.cfg, parts["head"]["weight"], skipped_words=words)

    # Batches
    # ----------------------------------------------------------------------------------------------

    @property
    def _batches(self) -> LateBatches:
        return LateBatches(self.cfg, self.tokens, self.is_packed, self.vectors)

    def describe(self, batch: Batch) -> dict[str, Text]:
        return texts_by_name(batch)

    # Scores
    # ----------------------------------------------------------------------------------------------

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Ratio | GatheredValues]:
        """The loss and the metrics of a reranker (cross.metrics): each query's own passages are
        compared with each other.
        """
        texts = texts_of(batch)
        vectors = model(**texts, calls=most_calls(texts))
        products_QP = scores(vectors, "queries", "query_lengths", self.late)
        of_batch = {name: batch[name] for name in ("counts", "targets")}
        own = own_passages({**of_batch, "products": products_QP})
        is_there_QN = own.is_positive_QN | own.is_negative_QN
        labels_QN = own.is_positive_QN.to(own.products_QN.dtype)
        lists = losses.Lists(own.products_QN, labels_QN, is_there_QN)
        scaled = losses.Lists(own.products_QN / self.late.temperature, labels_QN, is_there_QN)
        loss_Q = losses.softmax(scaled)
        return {"loss": Ratio(loss_Q.sum(), self.units(batch)), **metrics.of_lists(lists)}

    def token_vectors(
        self, model: nn.Module, rows: Sequence[Sequence[int]], *, side: Side
    ) -> TokenVectors:
        """The vectors of N token rows. model: in evaluation mode."""
        found = model(**to_device(self._batches.lay_out(rows, side)))
        name = "queries" if side == "query" else "passages"
        return TokenVectors(found[name].float(), found[f"{side}_lengths"])

    def lists_of(self, texts: Sequence[tuple[str, Sequence[Row]]]) -> list[IdLists]:
        """The ids of queries with their passages, cut to the limits, as `relevance` takes them."""
        queries = self.ids([{"text": query} for query, _ in texts], side="query")
        ids = iter(self.ids([one for _, passages in texts for one in passages], side="passage"))
        of_queries = zip(queries, texts, strict=True)
        return [(query, [next(ids) for _ in passages]) for query, (_, passages) in of_queries]

    def relevance(self, model: nn.Module, lists: Sequence[IdLists]) -> Tensor:
        """(P,) fp32 scores of the passages of queries, list by list. model: in evaluation mode."""
        places: dict[tuple[int, ...], int] = {}
        owners = [
            places.setdefault(tuple(query), len(places))
            for query, passages in lists
            for _ in passages
        ]
        queries = self.token_vectors(model, [*places], side="query")
        of_lists = [passage for _, passages in lists for passage in passages]
        passages = self.token_vectors(model, of_lists, side="passage")
        scores_QP = self.compare(queries, passages)
        return scores_QP[owners, torch.arange(len(owners))]

    def compare(self, queries: TokenVectors, passages: TokenVectors) -> Tensor:
        """(Q, P) scores of all queries and passages."""
        found = maxsim(queries.vectors, queries.lengths, passages.vectors, passages.lengths)
        return found / queries.lengths[:, None] if self.late.mean else found
