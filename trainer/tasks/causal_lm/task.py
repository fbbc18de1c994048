"""Next-token language modelling on any causal LM of transformers; every weight trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from trainer import base_model
from trainer.config import canonical_json
from trainer.data import sources, stdlib_docs, vocabulary
from trainer.data.padding import pad_right
from trainer.errors import ConfigError
from trainer.losses import IGNORED, next_token_loss
from trainer.metrics import Ratio
from trainer.task import Batch, Encoded, Places, Row, Uncut
from trainer.tasks.causal_lm.config import Config


class CausalLM(nn.Module):
    """A stock causal LM whose forward gives the summed loss; the head runs on labelled positions only."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """(B, T) ids, mask and labels -> {"loss": () fp32, the sum over labelled tokens}."""
        body = getattr(self.base, self.base.base_model_prefix)
        position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
        hidden_BTD = body(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        return {"loss": next_token_loss(hidden_BTD, labels, self.base.get_output_embeddings())}


class Task:
    """Texts in, a language model out."""

    unit: ClassVar[str] = "tokens"

    def __init__(self, cfg: Config, places: Places) -> None:
        self.cfg, self.places = cfg, places
        self.tokenizer = base_model.tokenizer_of(cfg, places)
        self.pad = vocabulary.pad_id(self.tokenizer)
        self.eos = vocabulary.eos_id(self.tokenizer)

    def model(self) -> nn.Module:
        return self._operate(base_model.load(self.cfg.base, self.places, precision=self.cfg.train.precision))

    def skeleton(self) -> nn.Module:
        return self._operate(base_model.skeleton(self.cfg.base, self.places))

    def _operate(self, base: Any) -> nn.Module:
        positions = getattr(base.config, "max_position_embeddings", None)
        if positions is not None and self.cfg.data.max_tokens > positions:
            raise ConfigError(
                f"data.max_tokens={self.cfg.data.max_tokens} is longer than the model's {positions} positions. "
                f"Use at most {positions}."
            )
        _refuse_scaled_logits(base.config)
        if self.cfg.train.gradient_checkpointing:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return CausalLM(base)

    def rows(self, split: str) -> Iterable[Row]:
        source = self.cfg.data.source
        texts = (
            stdlib_docs.texts(split) if source == "stdlib_docs" else sources.texts(self.places.data_path, split, source)
        )
        for row in texts:
            yield from self._pieces(row)

    def _pieces(self, row: Row) -> Iterator[Row]:
        """The row itself, or numbered pieces of a text that is longer than data.max_tokens."""
        limit = self.cfg.data.max_tokens
        if len(row["text"].encode()) < limit:  # a byte-level vocabulary never makes more tokens than bytes
            yield {**row, "piece": 0}
            return
        for piece in range(-(-len(self._ids(row["text"])) // limit)):
            yield {**row, "piece": piece}

    def _ids(self, text: str) -> list[int]:
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.eos]

    def encode(self, row: Row) -> Encoded:
        limit, piece = self.cfg.data.max_tokens, row["piece"]
        return {"ids": self._ids(row["text"])[piece * limit : (piece + 1) * limit]}

    def untruncated(self, row: Row) -> dict[str, Uncut]:
        """ids: nothing is cut off, for a text that is too long goes on in the next row."""
        return {"ids": Uncut([self.encode(row)["ids"]], None, "data.max_tokens", labels_from=1)}

    def encoding_id(self) -> str:
        return canonical_json(
            {
                "tokenizer": vocabulary.tokenizer_id(self.tokenizer),
                "task": "causal_lm",
                "max_tokens": self.cfg.data.max_tokens,
            }
        )

    def length(self, encoded: Mapping[str, Any]) -> int:
        return len(encoded["ids"])

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        ids, mask = pad_right([row["ids"] for row in rows], self.pad)
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}

    def units(self, batch: Batch) -> Tensor:
        return (batch["labels"][:, 1:] != IGNORED).sum()

    def losses(self, model: nn.Module, window: Sequence[Batch]) -> Iterator[Tensor]:
        for batch in window:
            yield model(**batch)["loss"]

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Ratio]:
        return {"loss": Ratio(model(**batch)["loss"], self.units(batch))}

    def fingerprint(self) -> str:
        return ""

    def exported(self, folder: Path) -> nn.Module:
        return self._operate(base_model.load(str(folder), self.places, precision=self.cfg.train.precision))

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        config = base_model.config_of(self.cfg.base, self.places)
        named = {name.removeprefix("base."): tensor for name, tensor in weights.items()}
        config.dtype = next(iter(named.values())).dtype
        base_model.export_folder(folder, config, self.tokenizer, named)


def _refuse_scaled_logits(config: Any) -> None:
    """Families that scale or cap their logits behind the head (Granite, Cohere, Gemma 2) would get a wrong loss."""
    keys = ("logits_scaling", "logit_scale", "final_logit_softcapping")
    odd = [f"{key}={getattr(config, key)}" for key in keys if getattr(config, key, None) not in (None, 1.0)]
    if odd:
        raise ConfigError(
            f"base: {config.model_type} sets {', '.join(odd)}, which this task's loss does not apply. "
            "Use a base whose head gives its logits directly, such as GPTBigCode or Llama."
        )
