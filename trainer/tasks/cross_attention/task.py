"""Questions answered by a frozen decoder that reads a context through cross-attention layers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from trainer.config.userfile import placed
from trainer.data import lookup
from trainer.data.padding import pad_right, unflat
from trainer.errors import ConfigError
from trainer.metrics.mergeable import GatheredValues, Ratio, answer_scores
from trainer.models import adapters, base_model, base_source
from trainer.models.losses import IGNORED, Terms, scored_before
from trainer.models.packed.stock import REPLACED
from trainer.protocol.abilities import GREEDY, Answered, Search, Uncut, scored_answers
from trainer.protocol.task import DRAW, Batch, Encoded, Places, Row
from trainer.runtime import distributed
from trainer.tasks.cross_attention.config import Config
from trainer.tasks.cross_attention.decoder import export, foreign
from trainer.tasks.cross_attention.decoder.model import CrossAttentionModel
from trainer.tasks.cross_attention.decoder.packed_batch import (
    can_be_streams,
    context_stream,
    decoder_stream,
    under_context,
)
from trainer.tasks.cross_attention.decoder.weights import load_added, read_added
from trainer.tasks.cross_attention.text import contexts, questions
from trainer.tasks.cross_attention.text.fim import Sentinels, fill_in_the_middle
from trainer.tasks.cross_attention.text.prompts import Prompts
from trainer.tasks.token_task import TokenTask

if TYPE_CHECKING:
    from trainer.tasks.cross_attention.encoder_states.reading import StateCache

# The keys of `data` that every encoding id holds; a key that was added later is in the id if it is
# set.
_ALWAYS_COUNTED = (
    "source",
    "facts",
    "template",
    "question_on_context",
    "decoder_tokens",
    "context_tokens",
    "chunked",
    "loss_on",
    "include_context_ids",
    "shuffled_context",
)
_OTHER = "other"  # the field that holds another row's context, in evaluation
IS_CONTEXT = "is_context"  # marks a row, raw or encoded, whose decoder predicts the context itself


class Task(TokenTask[Config]):
    """The decoder reads a question and writes its answer; cross-attention layers read the
    context.
    """

    rows_are_of_files: ClassVar[bool] = True

    def __init__(self, cfg: Config, places: Places) -> None:
        super().__init__(cfg, places)
        self.prompts = Prompts(self.tokenizer, cfg.data, lambda: self._states, lambda: self.ends)
        self.sentinels = Sentinels.of(self.tokenizer)

    # Model
    # ----------------------------------------------------------------------------------------------

    def model(self) -> nn.Module:
        model: Any = super().model()
        if self.cfg.init_from is None:
            return model
        folder = Path(placed(self.cfg.init_from))
        load_added(model, read_added(folder), source=str(folder))
        if not adapters.are_in(folder):
            return model
        if self.cfg.lora is None:
            raise ConfigError(
                f"init_from={str(folder)!r}: its layers were trained with adapters in their base, "
                "but the experiment has none. State lora as that one does."
            )
        adapters.check_base(folder, self.fingerprint())
        adapters.load(model.base, folder)
        return model

    def operate(self, base: Any) -> CrossAttentionModel:
        model = CrossAttentionModel(base, self.cfg.layers, seed=self.cfg.train.seed)
        model.check_lengths(self.cfg.data.decoder_tokens, self.cfg.data.context_tokens)
        model.recompute_every = self.cfg.train.recompute_every
        model.terms = Terms.of(self.cfg.train)
        return model

    def fingerprint(self) -> str:
        return base_source.fingerprint(self.cfg.base, self.places)

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        content = export.write(
            folder, weights, self.cfg, fingerprint=self.fingerprint(), tokenizer=self.tokenizer
        )
        if self.cfg.lora is not None:
            below = f"{self.base_name}."
            names = [name for name in weights if name.startswith(below)]
            self.export_adapters({n.removeprefix(below): weights[n] for n in names}, folder)
        foreign.write(
            folder,
            content,
            base_model.skeleton(self.cfg.base, self.places),
            source=base_source.resolve(self.cfg.base, self.places),
            tokenizer=self.tokenizer,
            ends=self.exported_ends,
        )

    def load_export(self, folder: Path) -> nn.Module:
        self._export = folder
        return export.load(folder, self.places, precision=self.cfg.train.precision)

    # Data
    # ----------------------------------------------------------------------------------------------

    @cached_property
    def _states(self) -> StateCache | None:
        """The prepared states; None when contexts are encoded online."""
        return (
            contexts.open_cache(self.cfg, self.places, self.tokenizer)
            if self.cfg.data.encode == "cached"
            else None
        )

    def rows(self, split: str) -> Iterable[Row]:
        _ = self._states  # missing states are an error before anything is tokenised or loaded
        data, places = self.cfg.data, self.places
        subset = {"train": data.training_data_subset, "valid": data.validation_data_subset}.get(
            split, "all"
        )
        how: dict[str, Any] = {"subset": subset, "facts": data.facts}
        how |= {"own": data, "cache_dir": places.cache_dir}
        rows = questions.of_split(data.source, split, places.data_path, **how)
        if split == "train" and data.include_context_ids:
            again = questions.of_split(data.source, split, places.data_path, **how)
            return chain(rows, ({**row, IS_CONTEXT: True} for row in again))
        if split == "train" or not data.shuffled_context:
            return rows
        return questions.with_another_context(list(rows))

    def encode(self, row: Row) -> Encoded:
        """Token ids of the decoder's text, with EOS, and of the context's chunks, each cut to its
        limit.
        """
        if not self.cfg.data.include_context_ids:
            return self.prompts.encode(row)
        is_context = IS_CONTEXT in row
        encoded = self.prompts.encode(row, predicts_context=is_context)
        encoded[IS_CONTEXT] = [int(is_context)]
        return encoded

    def encoding_id(self) -> str:
        data = self.cfg.data
        if data.source == "lookup":
            return self._encoded_under(set(), rows=lookup.num_contexts(data.facts))
        return self._encoded_under({"facts"})  # only the rows of "lookup" depend on it

    def earlier_encoding_ids(self) -> Sequence[str]:
        """Ids of older versions: from 2026-11-23 to 2026-11-25 they held `facts` for every source,
        and on 2026-11-21 only questions were trained.
        """
        ids = [self._encoded_under(set())]
        if not self.cfg.data.include_context_ids:
            ids.append(self._encoded_under({"facts", "include_context_ids"}))
        return ids

    def _encoded_under(self, without: set[str], **of_rows: int) -> str:
        values = self.cfg.data.encoded_values(_ALWAYS_COUNTED)
        data = {key: value for key, value in values.items() if key not in without}
        return self.encoded_under(data=data, **of_rows)

    def limits(self) -> dict[str, int]:
        return {
            "data.decoder_tokens": self.cfg.data.decoder_tokens,
            "data.context_tokens": self.cfg.data.context_tokens,
        }

    def specimen(self) -> Row:
        text = self.filler()
        return {"id": "0", "question": text, "answers": [text], "context": text}

    def length(self, encoded: Mapping[str, Any]) -> int:
        return len(encoded["decoder"]) + len(encoded["context"])

    def padded_fields(self) -> Sequence[str]:
        return "decoder", "context"

    def kind_field(self) -> str | None:
        return IS_CONTEXT  # a question has some 40 tokens in the decoder, a context hundreds

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """A packed batch (packed_batch.py) if is_packed and every row has a context, else a padded
        one.

        A padded batch holds input_ids, attention_mask, labels (B, T), scored_flat (N,), and the
        context: context_input_ids and context_attention_mask, (B, L) or (B, C, L), or
        encoder_hidden_states (B, L, D) and encoder_attention_mask (B, L).
        """
        fields = ["context", *([_OTHER] if _OTHER in rows[0] else [])]
        decoders = [self._decoder(row) for row in rows]
        lengths = [len(ids) for ids in decoders]
        if self.is_packed and can_be_streams(rows, fields):
            is_answer = self.cfg.data.loss_on == "answer"
            batch = decoder_stream(
                decoders, [int(row["answer_start"][0]) if is_answer else 0 for row in rows]
            )
            for field in fields:
                chunks = [unflat(row, field) for row in rows]
                prefix = f"{field}_" if field == _OTHER else ""
                stream = context_stream(chunks, lengths, cache=self._states)
                batch |= {f"{prefix}{name}": tensor for name, tensor in stream.items()}
            return batch | self.noise(rows, lengths)
        ids, mask = pad_right(decoders, self.prompts.pad)
        labels = ids.masked_fill(mask == 0, IGNORED)
        if self.cfg.data.loss_on == "answer":
            for index, row in enumerate(rows):
                labels[index, : int(row["answer_start"][0])] = IGNORED
        batch = {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": labels,
            "scored_flat": scored_before(labels),
            **self.prompts.contexts(rows, "context"),
            **self.noise(rows, lengths, width=ids.shape[1]),
        }
        if _OTHER not in rows[0]:
            return batch
        return batch | {
            f"{_OTHER}_{name}": tensor
            for name, tensor in self.prompts.contexts(rows, _OTHER).items()
        }

    @cached_property
    def is_packed(self) -> bool:
        """Whether batches are packed. ConfigError if data.packed is True and the base's attention
        has no packed replacement.
        """
        is_packed = self.cfg.data.packed
        if is_packed is False:
            return False
        attention = base_source.config_of(self.cfg.base, self.places)._attn_implementation
        if is_packed and attention not in REPLACED:
            raise ConfigError(
                f"data.packed=True: the base's attention is {attention!r}, want 'sdpa', which can "
                "be run on streams. Leave data.packed out, or the base's attn_implementation."
            )
        return attention in REPLACED

    def _decoder(self, row: Mapping[str, Any]) -> list[int]:
        """The decoder's ids. In training, a row that predicts its context has the parts of the
        context reordered with probability data.fim_rate, anew in every step.
        """
        ids = [int(token) for token in row["decoder"]]
        if IS_CONTEXT not in row or not row[IS_CONTEXT][0] or DRAW not in row:
            return ids
        random = np.random.RandomState(int(row[DRAW][0]) % 2**32)
        if random.random_sample() >= self.cfg.data.fim_rate:
            return ids
        start = len(self.prompts.opening)
        stop = len(ids) - (ids[-1] == self.prompts.eos)
        room = self.cfg.data.decoder_tokens - start - (len(ids) - stop)
        parts = fill_in_the_middle(ids[start:stop], self.sentinels, max_tokens=room, random=random)
        return [*ids[:start], *parts, *ids[stop:]]

    # Loss and scores
    # ----------------------------------------------------------------------------------------------

    def units(self, batch: Batch) -> Tensor:
        if "scored" in batch:
            return torch.tensor(len(batch["scored"]), device=batch["scored"].device)
        return (batch["labels"][:, 1:] != IGNORED).sum()

    def losses(self, model: nn.Module, window: Sequence[Batch]) -> Iterator[Tensor]:
        for batch in window:
            yield _loss(model, batch)

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Ratio | GatheredValues]:
        """loss: per labelled token. shuffled_loss: the same with another row's context, which is
        higher if the layers use the context.
        """
        units = self.units(batch)
        scores: dict[str, Ratio | GatheredValues] = {"loss": Ratio(_loss(model, batch), units)}
        if any(name.startswith(f"{_OTHER}_") for name in batch):
            scores["shuffled_loss"] = Ratio(_loss(model, under_context(batch, f"{_OTHER}_")), units)
        return scores

    # Answers
    # ----------------------------------------------------------------------------------------------

    def answer_tokens(self) -> int:
        return self.cfg.data.answer_tokens

    def answers(
        self,
        model: nn.Module,
        rows: Sequence[Mapping[str, Any]],
        raw: Sequence[Row],
        *,
        search: Search = GREEDY,
        max_tokens: int | None = None,
    ) -> Answered:
        """Answers of at most data.answer_tokens tokens, and em, f1, precision, recall and recall_em
        of each row's best answer.
        """
        is_synced = distributed.must_keep_step(model)
        how: dict[str, Any] = {"device": distributed.device(), "is_synced": is_synced}
        n_best = self.prompts.answers(model, rows, search=search, max_tokens=max_tokens, **how)
        return scored_answers(n_best, raw, search, answer_scores)

    def under_another_context(self, encoded: Mapping[str, Any]) -> Mapping[str, Any]:
        """The row with the context that shuffled_loss is computed under."""
        if _OTHER not in encoded:
            raise ConfigError("--another_context: the rows carry none. Set data.shuffled_context.")
        return {
            **encoded,
            "context": encoded[_OTHER],
            "context_lengths": encoded[f"{_OTHER}_lengths"],
        }

    # What limits cut off
    # ----------------------------------------------------------------------------------------

    def uncut_fields(self, row: Row) -> dict[str, Uncut]:
        """decoder: prompt and answer, or the context that the row predicts; context: every
        chunk.
        """
        data = self.cfg.data
        whole = self._without_limits.encode(
            row, predicts_context=data.include_context_ids and IS_CONTEXT in row
        )
        stops = list(accumulate(whole["context_lengths"]))
        chunks = [whole["context"][start:stop] for start, stop in pairwise([0, *stops])]
        labels_from = whole["answer_start"][0] if data.loss_on == "answer" else 1
        return {
            "decoder": Uncut(
                [whole["decoder"]],
                data.decoder_tokens,
                "data.decoder_tokens",
                labels_from=labels_from,
            ),
            "context": Uncut(
                chunks, data.context_tokens, "data.context_tokens", holds_answers=True
            ),
        }

    @cached_property
    def _without_limits(self) -> Prompts:
        lifted = {"decoder_tokens": sys.maxsize, "context_tokens": sys.maxsize}
        return Prompts(self.tokenizer, self.cfg.data.model_copy(update=lifted))


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    """() the summed loss of a batch's labelled tokens, with the rows' own contexts."""
    own = {name: tensor for name, tensor in batch.items() if not name.startswith(f"{_OTHER}_")}
    return (model(packed=own) if "scored" in own else model(**own)).loss
