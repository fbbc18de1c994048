"""A sparse retriever (SPLADE): it maps queries and passages to weights of words, and learns to give
a query the words of its passages. Its rows, batches and contrast are those of the dense one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer.metrics.mergeable import GatheredValues, Ratio
from trainer.models import base_model, base_source
from trainer.models.weights import model_folder
from trainer.protocol.abilities import Side
from trainer.protocol.task import STEP, Batch, Places, Text
from trainer.runtime.batch import to_device
from trainer.tasks.retriever import export as forms
from trainer.tasks.retriever import sentence_folder
from trainer.tasks.retriever.apart.task import TwoSidedTask
from trainer.tasks.retriever.batches import Batches, texts_of
from trainer.tasks.retriever.config import Config, Sparse
from trainer.tasks.retriever.export import QUERY
from trainer.tasks.retriever.model import most_calls, texts_by_name
from trainer.tasks.retriever.sparse import export, heads, metrics
from trainer.tasks.retriever.sparse.loss import SparseLoss
from trainer.tasks.retriever.sparse.model import SparseRetriever
from trainer.tasks.retriever.tokens import Tokens


class Task(TwoSidedTask):
    """Each text becomes weights of words."""

    kind: ClassVar[base_model.Kind] = "masked_lm"
    base_name: ClassVar[str] = QUERY  # of Retriever, which may have two

    def __init__(self, cfg: Config, places: Places) -> None:
        heads.check(base_source.config_of(cfg.base, places))
        tokenizer = base_source.tokenizer_of(cfg, places, needs_eos=False)
        super().__init__(cfg, places, tokenizer=tokenizer)
        self.tokens = Tokens(self.tokenizer, cfg.data)
        self.words: Sparse = cfg.sparse  # an exported model may say otherwise
        self._pool_loss = SparseLoss(cfg)

    # Model
    # ----------------------------------------------------------------------------------------------

    def operate(self, base: Any) -> nn.Module:
        source = base_source.resolve(self.cfg.base, self.places)
        heads.check_read(base, str(source))
        if self.cfg.dropout is not None:
            base_model.set_dropout(base, self.cfg.dropout)
        around = [*self.tokens.before, *self.tokens.after]
        read = self.reader(base.base_model)
        return SparseRetriever(base, read, how=self.words, around=around)

    def model(self) -> nn.Module:
        forms.refuse_base(base_source.resolve(self.cfg.base, self.places), "sparse")
        return super().model()

    def load_export(self, folder: Path) -> nn.Module:
        forms.refuse_other_form(folder, "sparse")
        self._follow_description(folder)
        model = super().load_export(folder).eval()
        forms.refuse_other_tokenizer(folder, self.tokenizer, self.places.cache_dir)
        return model

    def _follow_description(self, folder: Path) -> None:
        """Make of texts what the exported model was trained to, even if this experiment says
        otherwise.
        """
        description = export.read(folder)
        self.words = export.sparse_of(description, self.cfg.sparse)
        data, own = self.cfg.data, {**dict(self.cfg.sparse), **dict(self.cfg.data)}
        if forms.tell_changes(folder, dict(description), own):
            trained = {name: getattr(description, name) for name in forms.DESCRIBED_DATA}
            self.tokens = Tokens(self.tokenizer, data.model_copy(update=trained))

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """A model of transformers that fills masks, or adapters; and what sentence-transformers
        needs, where it has words for it.
        """
        super().export(weights, folder)
        export.write(folder, self.cfg)
        if export.can_say(self.cfg, self.tokens, self.exported_config().vocab_size):
            model_folder.write_tokenizer(folder, sentence_folder.with_pad(self.tokenizer))
            export.write_for_sentences(folder, self.cfg, self.tokens)

    # Batches and scores
    # ----------------------------------------------------------------------------------------------

    @property
    def _batches(self) -> Batches:
        return Batches(self.cfg, self.tokens, is_packed=self.is_packed)

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """As the dense retriever's; in training also step (1,), the number of the step."""
        batch = super().collate(rows)
        if STEP in rows[0]:
            batch[STEP] = torch.tensor([int(rows[0][STEP][0])])
        return batch

    def describe(self, batch: Batch) -> dict[str, Text]:
        return texts_by_name(batch)

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Ratio | GatheredValues]:
        """Every metric of metrics.sparse_metrics."""
        texts = texts_of(batch)
        weights = model(**texts, calls=most_calls(texts))
        table = metrics.table_of(batch, weights["queries"], weights["passages"])
        words = weights["queries"].shape[1]
        how = {"vocabulary": words, "temperature": self.words.temperature}
        return {"retrieval": GatheredValues(table, partial(metrics.sparse_metrics, **how))}

    # Embedding
    # ----------------------------------------------------------------------------------------------

    def embed_words(self, model: nn.Module, rows: Sequence[Sequence[int]], *, side: Side) -> Tensor:
        """(N, V) fp32 weights of N token rows, 0 of most words."""
        texts = to_device(self.laid_out(rows, side))
        return model(**texts)["queries" if side == "query" else "passages"].float()
