"""A sparse retriever (SPLADE): it maps queries and passages to weights of words, and learns to give
a query the words of its passages. Its rows, batches and contrast are those of the dense one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.metrics.mergeable import GatheredValues, Ratio
from trainer.models import base_model, base_source
from trainer.models.weights import model_folder
from trainer.protocol.abilities import Side
from trainer.protocol.task import STEP, Batch, Places
from trainer.runtime.batch import to_device
from trainer.tasks.retriever import sentence_folder
from trainer.tasks.retriever import task as dense
from trainer.tasks.retriever.batches import texts_of
from trainer.tasks.retriever.config import Config, Sparse
from trainer.tasks.retriever.export import DESCRIBED_DATA, QUERY, refuse_other_form
from trainer.tasks.retriever.model import most_calls
from trainer.tasks.retriever.sparse import export, heads, metrics
from trainer.tasks.retriever.sparse.loss import SparseLoss
from trainer.tasks.retriever.sparse.model import SparseRetriever
from trainer.tasks.retriever.tokens import Tokens
from trainer.tasks.token_task import TokenTask

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

log = logging.getLogger(__name__)


class Task(dense.Task):
    """A row is a query with its passages; the loss is a mean over queries."""

    kind: ClassVar[base_model.Kind] = "masked_lm"
    base_name: ClassVar[str] = QUERY  # one model for both sides

    # there are no two encoders here, so that the model is that of any task
    skeleton, bases = TokenTask.skeleton, TokenTask.bases

    def __init__(self, cfg: Config, places: Places) -> None:
        heads.check(base_source.config_of(cfg.base, places))
        super().__init__(cfg, places)
        self.words: Sparse = cfg.sparse  # an exported model may say otherwise
        self._pool_loss = SparseLoss(cfg)

    @property
    def vocabulary(self) -> int:
        """The number of words that have weights."""
        return base_source.config_of(self.cfg.base, self.places).vocab_size

    # Model
    # ----------------------------------------------------------------------------------------------

    def model(self) -> nn.Module:
        return TokenTask.model(self)

    def operate(self, base: Any) -> nn.Module:
        source = base_source.resolve(self.cfg.base, self.places)
        heads.check_read(base, str(source))
        if self.cfg.dropout is not None:
            base_model.set_dropout(base, self.cfg.dropout)
        around = [*self.tokens.before, *self.tokens.after]
        read = self.reader(base.base_model)
        return SparseRetriever(base, read, how=self.words, around=around)

    def load_export(self, folder: Path) -> nn.Module:
        refuse_other_form(folder, "sparse")
        self._follow_description(folder)
        return TokenTask.load_export(self, folder).eval()

    def _follow_description(self, folder: Path) -> None:
        """Make of texts what the exported model was trained to, even if this experiment says
        otherwise.
        """
        description = export.read(folder)
        self.words = export.sparse_of(description, self.cfg.sparse)
        data = self.cfg.data
        trained = {name: getattr(description, name) for name in DESCRIBED_DATA}
        changed = {name: value for name, value in trained.items() if value != getattr(data, name)}
        if changed:
            log.warning(
                "%s was trained with %s, which this experiment says otherwise: its own hold",
                folder,
                changed,
            )
            self.tokens = Tokens(self.tokenizer, data.model_copy(update=changed))

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """A model of transformers that fills masks, or adapters; and what sentence-transformers
        needs, where it has words for it.
        """
        TokenTask.export(self, weights, folder)
        export.write(folder, self.cfg)
        if export.can_say(self.cfg, self.tokens, self.vocabulary):
            model_folder.write_tokenizer(folder, sentence_folder.with_pad(self.tokenizer))
            export.write_for_sentences(folder, self.cfg, self.tokens)

    # Loss and scores
    # ----------------------------------------------------------------------------------------------

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """As the dense retriever's; in training also step (1,), the number of the step."""
        batch = super().collate(rows)
        if STEP in rows[0]:
            batch[STEP] = torch.tensor([int(rows[0][STEP][0])])
        return batch

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Ratio | GatheredValues]:
        """Every metric of metrics.sparse_metrics."""
        texts = texts_of(batch)
        weights = model(**texts, calls=most_calls(texts))
        table = metrics.table_of(batch, weights["queries"], weights["passages"])
        how = {"vocabulary": self.vocabulary, "temperature": self.words.temperature}
        return {"retrieval": GatheredValues(table, partial(metrics.sparse_metrics, **how))}

    # Embedding
    # ----------------------------------------------------------------------------------------------

    def embed(self, model: nn.Module, rows: Sequence[Sequence[int]], *, side: Side) -> Tensor:
        """(N, V) fp32 weights of N token rows."""
        texts = to_device(self._batches.lay_out(rows, side))
        return model(**texts)["queries" if side == "query" else "passages"].float()

    def embed_words(
        self, model: nn.Module, rows: Sequence[Sequence[int]], *, side: Side
    ) -> csr_matrix:
        """(N, V) fp32: the weights above 0 of N token rows, on the CPU."""
        from scipy.sparse import csr_matrix

        return csr_matrix(self.embed(model, rows, side=side).cpu().numpy())

    def shorten(self, dims: int) -> None:
        raise ConfigError(
            f"--dims {dims}: got it for a sparse retriever, whose numbers are weights of words: "
            "the first ones are no vector. Leave it out."
        )
