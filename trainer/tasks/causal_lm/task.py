"""Next-token language modelling on any causal LM of transformers; every weight trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trainer.data import lookup, stdlib_docs
from trainer.data.padding import pad_right
from trainer.data.readers import questions
from trainer.errors import ConfigError
from trainer.models.head import logits_head
from trainer.models.losses import IGNORED, next_token_loss
from trainer.tasks.abilities import Uncut
from trainer.tasks.causal_lm.config import Config
from trainer.tasks.protocol import Batch, Encoded, Row
from trainer.tasks.token_task import TokenTask


class CausalLM(nn.Module):
    """A stock causal LM whose forward gives the summed loss.

    The head runs on labelled positions only.
    """

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """(B, T) ids, mask and labels -> {"loss": () fp32, the sum over labelled tokens}."""
        body = getattr(self.base, self.base.base_model_prefix)
        position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
        hidden_BTD = body(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        return {"loss": next_token_loss(hidden_BTD, labels, logits_head(self.base))}


class Task(TokenTask[Config]):
    """Texts in, a language model out."""

    def operate(self, base: Any) -> nn.Module:
        positions = getattr(base.config, "max_position_embeddings", None)
        if positions is not None and self.cfg.data.max_tokens > positions:
            raise ConfigError(
                f"data.max_tokens={self.cfg.data.max_tokens} is longer than the model's "
                f"{positions} positions. Use at most {positions}."
            )
        self.recompute(base)
        return CausalLM(base)

    def rows(self, split: str) -> Iterable[Row]:
        for row in self._texts(split):
            yield from self._pieces(row)

    def _texts(self, split: str) -> Iterable[Row]:
        source = self.cfg.data.source
        if source == "stdlib_docs":
            return stdlib_docs.texts(split)
        if source == "lookup":
            return lookup.texts(split)
        return questions.texts(self.places.data_path, split, source)

    def _pieces(self, row: Row) -> Iterator[Row]:
        """The row itself, or numbered pieces of a text that is longer than data.max_tokens."""
        limit = self.cfg.data.max_tokens
        # a byte-level vocabulary never makes more tokens than bytes
        if len(row["text"].encode()) < limit:
            yield {**row, "piece": 0}
            return
        for piece in range(-(-len(self._ids(row["text"])) // limit)):
            yield {**row, "piece": piece}

    def _ids(self, text: str) -> list[int]:
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end]

    def encode(self, row: Row) -> Encoded:
        limit, piece = self.cfg.data.max_tokens, row["piece"]
        return Encoded({"ids": self._ids(row["text"])[piece * limit : (piece + 1) * limit]})

    def untruncated(self, row: Row) -> dict[str, Uncut]:
        """ids: nothing is cut off, for a text that is too long goes on in the next row."""
        return {"ids": Uncut([self.encode(row)["ids"]], None, "data.max_tokens", labels_from=1)}

    def encoding_id(self) -> str:
        return self.encoded_under(max_tokens=self.cfg.data.max_tokens)

    def limits(self) -> dict[str, int]:
        return {"data.max_tokens": self.cfg.data.max_tokens}

    def specimen(self) -> Row:
        return {"text": self.filler(), "piece": 0}

    def length(self, encoded: Mapping[str, Any]) -> int:
        return len(encoded["ids"])

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        ids, mask = pad_right([row["ids"] for row in rows], self.pad)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": ids.masked_fill(mask == 0, IGNORED),
        }

    def units(self, batch: Batch) -> Tensor:
        return (batch["labels"][:, 1:] != IGNORED).sum()
