"""Each task as a skilled person trains it with transformers alone, for best_of_hf.py: stock models,
rows padded to the longest of a micro-batch, everything that can be chosen left to be chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from trainer.data.padding import pad_right
from trainer.models.losses import IGNORED, scored_before
from trainer.tasks.cross_attention.text.contexts import token_batch
from trainer.tasks.fid.tokens import drawn_target
from trainer.tasks.retriever.tokens import passage_of

# B rows, T tokens of the longest, P passages

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Knobs:
    """What a person may choose."""

    grouped: bool = True  # rows of like length share a micro-batch
    optimizer: str = "fused"  # of torch's AdamW: fused, foreach
    attention: str = "sdpa"
    multiple: int = 1  # widths are rounded up to a multiple of it
    flattened: bool = False  # DataCollatorWithFlattening, with positions that begin anew
    sorted_passages: bool = False  # of FiD: encoded eight at a time, those of like length
    compiled: bool = False  # torch.compile(dynamic=True)

    def __str__(self) -> str:
        chosen = [self.optimizer, self.attention, "grouped" if self.grouped else "shuffled"]
        chosen += [f"multiples of {self.multiple}"] if self.multiple > 1 else []
        named = ("flattened", "sorted_passages", "compiled")
        return ", ".join([*chosen, *(name for name in named if getattr(self, name))])


EVERY_TASK = (
    Knobs(),
    Knobs(multiple=8),
    Knobs(grouped=False),
    Knobs(optimizer="foreach"),
    Knobs(attention="eager"),
    Knobs(compiled=True),
)
MORE = {"causal_lm": (Knobs(flattened=True),), "fid": (Knobs(sorted_passages=True),)}


class Rival:
    """A stock model and torch's AdamW; micro-batches add up to the mean over a step's units."""

    def __init__(self, name: str, task: Any, knobs: Knobs, *, micro_batch: int) -> None:
        self.knobs, self._micro_batch = knobs, micro_batch
        self.model = task.model().train()
        for module in self.model.modules():
            config = getattr(module, "config", None)
            if config is not None:
                config._attn_implementation = knobs.attention
        self._loss = LOSSES[name](task, self.model, knobs)
        if knobs.compiled:
            for child in self.model.children():
                child.compile(dynamic=True)
        optim = task.cfg.optim
        weights = [x for x in self.model.parameters() if x.requires_grad]
        self._optimizer = torch.optim.AdamW(
            weights, lr=optim.lr, weight_decay=optim.weight_decay, **{knobs.optimizer: True}
        )

    def step(self, rows: Rows, units: int) -> float:
        """One optimizer step on these rows; its loss."""
        if self.knobs.grouped:
            rows = sorted(rows, key=self._loss.length, reverse=True)
        total = 0.0
        for start in range(0, len(rows), self._micro_batch):
            loss = self._loss(rows[start : start + self._micro_batch]) / units
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total


class Loss(ABC):
    """The summed loss of some rows."""

    def __init__(self, task: Any, model: Any, knobs: Knobs) -> None:
        self.task, self.model, self.knobs = task, model, knobs

    def length(self, row: Mapping[str, Any]) -> int:
        return self.task.length(row)

    def padded(self, rows: Iterable[Sequence[int]], pad: int | None = None) -> tuple[Any, Any]:
        """(B, T) ids and mask."""
        ids, mask = pad_right(list(rows), self.task.pad if pad is None else pad)
        room = (0, -ids.shape[1] % self.knobs.multiple)
        return F.pad(ids, room, value=self.task.pad if pad is None else pad), F.pad(mask, room)

    def labels(self, rows: Iterable[Sequence[int]]) -> Tensor:
        ids, mask = self.padded(rows)
        return ids.masked_fill(mask == 0, IGNORED)

    @abstractmethod
    def __call__(self, rows: Rows) -> Tensor:
        """The summed loss of some rows."""


class OfLanguageModel(Loss):
    def __call__(self, rows: Rows) -> Tensor:
        base = self.model.base
        if self.knobs.flattened:
            flat = [int(token) for row in rows for token in row["ids"]]
            ids = torch.tensor([flat])
            places = torch.cat([torch.arange(len(row["ids"])) for row in rows])[None]
            labels = ids.masked_fill(places == 0, IGNORED)
            out = base(
                input_ids=ids,
                position_ids=places,
                labels=labels,
                use_cache=False,
                num_items_in_batch=torch.tensor(1),
            )
            return out.loss
        ids, mask = self.padded(row["ids"] for row in rows)
        labels = ids.masked_fill(mask == 0, IGNORED)
        return base(
            input_ids=ids,
            attention_mask=mask,
            labels=labels,
            use_cache=False,
            num_items_in_batch=torch.tensor(1),
        ).loss


class OfSummariser(Loss):
    def __call__(self, rows: Rows) -> Tensor:
        ids, mask = self.padded(row["source"] for row in rows)
        labels = self.labels(row["targets"] for row in rows)
        loss = self.model.base(input_ids=ids, attention_mask=mask, labels=labels).loss
        return loss * (labels != IGNORED).sum()


class OfReader(Loss):
    def __call__(self, rows: Rows) -> Tensor:
        """Fusion-in-Decoder: passages in the encoder one by one, side by side in the decoder."""
        of_rows = [self.task._prompts_of(row) for row in rows]
        passages = [ids for prompts in of_rows for ids in prompts]
        ids, mask = self.padded(passages)
        states = (
            self._sorted(passages, ids.shape[1])
            if self.knobs.sorted_passages
            else (self.model.t5.encoder(input_ids=ids, attention_mask=mask).last_hidden_state)
        )
        count = len(of_rows[0])
        labels = self.labels(drawn_target(row) for row in rows)
        encoded = BaseModelOutput(last_hidden_state=states.unflatten(0, (-1, count)).flatten(1, 2))  # pyright: ignore
        loss = self.model.t5(
            encoder_outputs=encoded,
            attention_mask=mask.unflatten(0, (-1, count)).flatten(1, 2),
            labels=labels,
            use_cache=False,
        ).loss
        return loss * (labels != IGNORED).sum()

    def _sorted(self, passages: Sequence[Sequence[int]], width: int) -> Tensor:
        order = np.argsort([len(ids) for ids in passages], kind="stable")
        parts = []
        for start in range(0, len(order), 8):
            ids, mask = self.padded(passages[n] for n in order[start : start + 8])
            states = self.model.t5.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
            parts.append(F.pad(states, (0, 0, 0, width - states.shape[1])))
        return torch.cat(parts).index_select(0, torch.from_numpy(np.argsort(order)))


class OfVerifier(Loss):
    def __call__(self, rows: Rows) -> Tensor:
        """The stock encoder's last states of padded statements, under the task's own loss."""
        batch = self.task.collate(rows)
        ends = batch["starts"].tolist()
        statements = [batch["tokens"][a:b].tolist() for a, b in pairwise(ends)]
        ids, mask = self.padded(statements)
        padded = {"input_ids": ids, "attention_mask": mask}
        (loss,) = self.task.losses(_Reading(self.model, padded), [batch])
        return loss


class OfRetriever(Loss):
    def __call__(self, rows: Rows) -> Tensor:
        """The stock encoder's states of padded texts, under the task's own loss."""
        batch = self.task.collate(rows)
        kept = {n: x for n, x in batch.items() if not n.startswith(("query_", "passage_"))}
        chosen = [
            passage_of(row, place) for row in rows for place in self.task._choose_statements(row)
        ]
        queries, passages = self.padded(r["query"] for r in rows), self.padded(chosen)
        texts = {"query_ids": queries[0], "query_mask": queries[1]}
        texts |= {"passage_ids": passages[0], "passage_mask": passages[1]}
        (loss,) = self.task.losses(self.model, [{**kept, **texts}])
        return loss


class OfCrossAttention(Loss):
    def __call__(self, rows: Rows) -> Tensor:
        """transformers has no such model: the task's own, with rows and contexts padded, and the
        context encoded in every step.
        """
        ids, mask = self.padded(row["decoder"] for row in rows)
        labels = ids.masked_fill(mask == 0, IGNORED)
        is_answer = self.task.cfg.data.loss_on == "answer"
        for index, row in enumerate(rows if is_answer else ()):
            labels[index, : int(row["answer_start"][0])] = IGNORED
        context = token_batch(rows, "context", pad=self.task.pad, is_chunked=False)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, **context}
        return self.model(**batch, scored_flat=scored_before(labels)).loss


class _Reading(nn.Module):
    """A model that reads these tensors, whatever it is called with."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._model, self._batch = model, batch

    def forward(self, **_: Tensor) -> Any:
        return self._model(**self._batch)


LOSSES: dict[str, type[Loss]] = {
    "causal_lm": OfLanguageModel,
    "summariser": OfSummariser,
    "fid": OfReader,
    "vera": OfVerifier,
    "retriever": OfRetriever,
    "cross_attention": OfCrossAttention,
}
