"""What the forms of a retriever share that read queries and passages apart from each other: rows,
tokens, and a loss over a pool of both.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from trainer.config.auto import AUTO
from trainer.data.arranged.arrangement import Arrangement
from trainer.data.formats import picked
from trainer.models import base_model
from trainer.protocol.abilities import Side, Uncut
from trainer.protocol.task import Batch, Encoded, Row
from trainer.tasks.retriever import export, rows, selection
from trainer.tasks.retriever.batches import Batches
from trainer.tasks.retriever.batching import together
from trainer.tasks.retriever.config import Config, Data
from trainer.tasks.retriever.loss import teacher_scores
from trainer.tasks.retriever.loss.pool_loss import PoolLoss
from trainer.tasks.retriever.tokens import Tokens, identity
from trainer.tasks.token_task import TokenTask


class TwoSidedTask(TokenTask[Config]):
    """A row is a query with its passages; the loss is a mean over queries."""

    unit: ClassVar[str] = "queries"
    kind: ClassVar[base_model.Kind] = "encoder"
    rows_are_of_files: ClassVar[bool] = True
    tokens: Tokens
    _pool_loss: PoolLoss
    _arranged: tuple[str, Arrangement | None] | None = None  # of the store with this digest

    # Data
    # ----------------------------------------------------------------------------------------------

    def rows(self, split: str) -> Iterable[Row]:
        places = self.places
        of_split = rows.rows(self.cfg.data, split, places.data_path, cache_dir=places.cache_dir)
        # rows of the embedded corpus stay as recorded runs have them
        if self.cfg.data.source != "stdlib_docs":
            of_split = rows.without_own_positives(of_split)
        data = self.cfg.data
        if split == "train" and self.cfg.needs_teacher:
            of_split = teacher_scores.required(of_split)
        if split == "train" and data.batches is not None and data.batches.reads_topics:
            of_split = together.with_topics(of_split)
        sizes = (data.passages, data.positives) if split == "train" else (1, 1)
        usable = selection.trainable(of_split, *sizes)
        return ({**row, "item": item} for item, row in picked.enumerated(usable))

    def encode(self, row: Row) -> Encoded:
        """Ids of the query and of all its passages, positives first; the identity of each passage,
        and its score by a teacher.
        """
        texts = [*row["positives"], *row["negatives"]]
        whole = {
            "query": self.tokens.plain_ids([row["query"]], "query"),
            "passage": self.tokens.plain_ids(texts, "passage"),
        }
        (query,) = self.tokens.cut(whole["query"], "query")
        passages = self.tokens.cut(whole["passage"], "passage")
        scores = [
            text.get("score", np.nan) if isinstance(text, Mapping) else np.nan for text in texts
        ]
        is_cut = len(query) >= self.tokens.limit("query") or max(
            map(len, passages)
        ) >= self.tokens.limit("passage")
        return Encoded(
            {
                "query": query,
                "passages": [token for tokens in passages for token in tokens],
                "lengths": [len(tokens) for tokens in passages],
                "identities": [word for tokens in passages for word in identity(tokens)],
                "scores": np.asarray(scores, dtype=np.float32).view(np.int32).tolist(),
                "num_positives": [len(row["positives"])],
                "item": [row["item"]],
                **together.fields(row, self.cfg.data.batches),
            },
            is_truncated=is_cut,
            cuts={
                "queries": self.tokens.cut_of(whole["query"], "query"),
                "passages": self.tokens.cut_of(whole["passage"], "passage"),
            },
        )

    def uncut_fields(self, row: Row) -> dict[str, Uncut]:
        """query; and passages, positives and negatives; all with their special tokens."""
        data = self.cfg.data
        texts = [*row["positives"], *row["negatives"]]
        return {
            "query": Uncut(
                self._whole.ids([row["query"]], "query"), data.query_tokens, "data.query_tokens"
            ),
            "passages": Uncut(
                self._whole.ids(texts, "passage"), data.passage_tokens, "data.passage_tokens"
            ),
        }

    @cached_property
    def _whole(self) -> Tokens:
        """The same tokens without limits."""
        lifted = {"query_tokens": sys.maxsize, "passage_tokens": sys.maxsize}
        return Tokens(self.tokenizer, self.cfg.data.model_copy(update=lifted))

    def limits(self) -> dict[str, int]:
        return {
            "data.query_tokens": self.cfg.data.query_tokens,
            "data.passage_tokens": self.cfg.data.passage_tokens,
        }

    def specimen(self) -> Row:
        """A row with as many passages as a query has in training; token ids if the data hold
        ids.
        """
        text: Any = (
            [self.pad] * max(self.limits().values())
            if self.cfg.data.source == "pretokenised"
            else self.filler()
        )
        negatives = [text] * (self.cfg.data.passages - 1)
        return {"query": text, "positives": [text], "negatives": negatives, "item": 0}

    def encoding_id(self) -> str:
        data: Data = self.cfg.data
        # the stored lengths depend on the number of passages
        described = {name: getattr(data, name) for name in export.DESCRIBED_DATA}
        described |= together.settings(data.batches)
        return self.encoded_under(passages=data.passages, **described)

    def arrangement(self, store: Any, sources: tuple[int, ...]) -> Arrangement | None:
        """What data.batches says of the training rows, computed once for a store."""
        batches = self.cfg.data.batches
        if batches is None or store.meta["split"] != "train":
            return None
        if self._arranged is None or self._arranged[0] != store.digest:
            by = together.arrangement_of(self, batches, store, sources)
            self._arranged = (store.digest, by)
        return self._arranged[1]

    def length(self, encoded: Mapping[str, Any]) -> int:
        return len(encoded["query"]) + self.cfg.data.passages * int(max(encoded["lengths"]))

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        return self._batches.of_rows(rows)

    @property
    @abstractmethod
    def _batches(self) -> Batches: ...

    # Loss
    # ----------------------------------------------------------------------------------------------

    def units(self, batch: Batch) -> Tensor:
        return torch.tensor(len(batch["counts"]), device=batch["counts"].device)

    def losses(self, model: nn.Module, window: Sequence[Batch]) -> Iterator[Tensor]:
        return self._pool_loss.of_window(model, window)

    def laid_out(self, texts: Sequence[Sequence[int]], side: Side) -> dict[str, Tensor]:
        """Token ids as the model takes them, for vectors that are only read. Chunks of "auto" are
        those of a training, whose activations they bound: here are none, and all texts are one.
        """
        batches, loss = self._batches, self.cfg.loss
        if loss.chunk_tokens == AUTO:
            loss = loss.model_copy(update={"chunk_tokens": None})
            batches = replace(batches, cfg=self.cfg.model_copy(update={"loss": loss}))
        return batches.lay_out(texts, side)

    def ids(self, texts: Sequence[Row], *, side: Side) -> list[list[int]]:
        """Token ids as `embed` takes them: with prefix, title and special tokens, cut to the side's
        limit.
        """
        return self.tokens.ids(texts, side)
