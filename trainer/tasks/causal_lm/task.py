"""Next-token language modelling on any causal LM of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from trainer.data import left_out, lookup, stdlib_docs, vocabulary
from trainer.data.chat.chat_template import ChatTemplate
from trainer.data.chat.rows import chats
from trainer.data.chat.unwritten import TOOLS
from trainer.data.chat.writer import naming
from trainer.data.padding import pad_right
from trainer.data.readers import questions
from trainer.errors import DataError
from trainer.models import base_source
from trainer.models.decoder.streams import Read
from trainer.models.distillation import DistillationTerms, Lesson, without_teacher
from trainer.models.head import OutputLayer
from trainer.models.inputs.neftune import noisy
from trainer.models.losses import IGNORED, PLAIN, Terms, scored_before
from trainer.models.masks import of_right_padded
from trainer.models.packed.layout import pack_labelled
from trainer.models.stretches.bases import problems
from trainer.models.stretches.stretch import stretch_of
from trainer.protocol.abilities import RankPlace, ReplyText, Uncut
from trainer.protocol.task import Batch, Cut, Encoded, Places, Row
from trainer.tasks.causal_lm.config import Config
from trainer.tasks.causal_lm.text_tokens import TextTokens
from trainer.tasks.continuation import ContinuationTask, replies, reply_row
from trainer.tasks.distilled import DistilledTask
from trainer.tasks.token_task import refuse_beyond_positions


class CausalLM(nn.Module):
    """A stock causal LM whose forward gives the summed loss.

    The head runs on labelled positions only.
    """

    def __init__(
        self,
        base: Any,
        read: Read | None = None,
        terms: Terms = PLAIN,
        distillation: DistillationTerms | None = None,
    ) -> None:
        """read: the function with which the body reads streams (streams.reader_of); None: rows are
        padded. terms: of the loss in training mode. distillation: how a teacher is learnt from.
        """
        super().__init__()
        self.base, self._read, self.terms = base, read, terms
        self.distillation = distillation

    def forward(
        self,
        labels: Tensor | None = None,
        *,
        scored: Tensor,
        targets: Tensor | None = None,
        **batch: Tensor,
    ) -> dict[str, Tensor]:
        """OutputLayer.sums over labelled tokens.

        batch: rows as layout.pack_labelled packs them, or a stretch of them; or (B, T) input_ids,
        attention_mask and labels with scored = losses.scored_before(labels); perhaps
        distillation.teacher_fields.
        targets: (N,) tokens in place of labels, each after the position in `scored`: then
        {"logprobs": (N,) fp32}, their log-probabilities.
        """
        hidden_ND = self.scored_states(scored=scored, **without_teacher(batch))
        if targets is not None:
            return {"logprobs": -OutputLayer(self.base).losses(hidden_ND, targets)}
        assert labels is not None, "rows have labels where they have no targets"
        targets_N = labels.flatten().index_select(0, scored + 1)
        terms = self.terms if self.training else None
        lesson = Lesson.of(self.distillation, batch)
        return OutputLayer(self.base).sums(hidden_ND, targets_N, terms, lesson)

    def scored_states(self, scored: Tensor, **batch: Tensor) -> Tensor:
        """(N, D) states of the tokens whose next token has a label."""
        batch.pop("labels", None)
        with noisy(self.base.get_input_embeddings(), batch):
            return self._states(**batch).index_select(0, scored)

    def _states(self, **batch: Tensor) -> Tensor:
        """Last hidden states: (M, D) of a stream, (B * T, D) of padded rows."""
        if "tokens" in batch:
            assert self._read is not None
            return self._read(batch)
        mask_BT = batch["attention_mask"]
        body = getattr(self.base, self.base.base_model_prefix)
        return body(
            input_ids=batch["input_ids"],
            attention_mask=of_right_padded(mask_BT, self.base.config),
            position_ids=(mask_BT.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state.flatten(0, 1)


class Task(DistilledTask[Config], ContinuationTask[Config]):
    """Texts in, a language model out."""

    rows_are_of_files: ClassVar[bool] = True

    def __init__(self, cfg: Config, places: Places) -> None:
        super().__init__(cfg, places)
        self.chat = None
        if cfg.data.purpose == "conversation":
            template, folder = cfg.data.chat_template, places.data_path
            self.chat = ChatTemplate.of(self.tokenizer, template, folder)

    def operate(self, base: Any) -> nn.Module:
        refuse_beyond_positions(base, self.cfg.data.max_tokens)
        read = self.reader(getattr(base, base.base_model_prefix))
        return CausalLM(base, read, Terms.of(self.cfg.train), self.distillation)

    def generation(self) -> dict[str, Any]:
        return {"eos_token_id": self.exported_ends, "pad_token_id": self.pad}

    def rows(self, split: str) -> Iterable[Row]:
        if self.cfg.is_driven:
            raise DataError(
                f'data.source="client": a client sends the rows of this run, and no file has '
                f"those of the {split} split. Give data of another source to read rows."
            )
        if self.chat is not None:
            read = {"role", "content", "weight", "tool_calls", *self.chat.words}
            for row in chats(self.places.data_path, split, **self._own):
                left_out.count_unread("messages", row["messages"], read)
                if row.get("tools") and "tools" not in read:
                    left_out.note(naming(row["messages"]), TOOLS, field="tools")
                yield row
            return
        yield from self._pieces(self._texts(split))

    @property
    def _own(self) -> dict[str, Any]:
        return {"own": self.cfg.data, "cache_dir": self.places.cache_dir}

    def _texts(self, split: str) -> Iterable[Row]:
        source = self.cfg.data.source
        if source == "stdlib_docs":
            return stdlib_docs.texts(split)
        if source == "lookup":
            return lookup.texts(split, facts=self.cfg.data.facts)
        if self.cfg.data.purpose == "completion":
            return questions.completions(self.places.data_path, split, **self._own)
        kind = "nq" if self.cfg.data.reads == "nq" else "files"
        return questions.texts(self.places.data_path, split, kind, **self._own)

    @property
    def _is_on_answers(self) -> bool:
        return self.cfg.data.loss_on == "answer"

    def _pieces(self, texts: Iterable[Row]) -> Iterator[Row]:
        """Each text as piece 0; one longer than data.max_tokens becomes several numbered pieces."""
        limit = self.cfg.data.max_tokens
        for row, count in self._text_tokens.with_counts(texts, self._may_be_cut):
            for piece in range(1 if count is None else -(-count // limit)):
                yield {**row, "piece": piece}

    def _may_be_cut(self, text: str) -> bool:
        """Whether a text may have more than data.max_tokens tokens, by its bytes alone."""
        growth, limit = self._most_tokens_per_byte, self.cfg.data.max_tokens
        return growth is None or len(self.opening) + growth * len(text.encode()) >= limit

    @cached_property
    def _most_tokens_per_byte(self) -> int | None:
        return vocabulary.most_tokens_per_byte(self.tokenizer)

    @cached_property
    def _text_tokens(self) -> TextTokens:
        return TextTokens(
            self.tokenizer, begun=self._begun, end=self.end, is_on_answers=self._is_on_answers
        )

    def encode(self, row: Row) -> Encoded:
        return self.encode_rows([row])[0]

    def encode_rows(self, rows: Sequence[Row]) -> list[Encoded]:
        if self.chat is not None:
            return [self._conversation(whole) for whole in self.chat.tokens(rows, self.end)]
        limit = self.cfg.data.max_tokens
        encoded: list[Encoded] = []
        for row, fields in zip(rows, self._text_tokens.of(rows), strict=True):
            start = row["piece"] * limit
            values = {name: tokens[start : start + limit] for name, tokens in fields.items()}
            encoded.append(Encoded(values))
        return encoded

    def _conversation(self, whole: Mapping[str, list[int]]) -> Encoded:
        """The first data.max_tokens tokens of a conversation. The rest is dropped, for it would be
        learnt without the turns before it.
        """
        limit = self.cfg.data.max_tokens
        first_tokens = {name: values[:limit] for name, values in whole.items()}
        lost = sum(whole["scored"][limit:])
        length = len(whole["ids"])
        return Encoded(
            first_tokens,
            is_truncated=length > limit,
            lost_labels=(lost, sum(whole["scored"])),
            cuts={"conversations": Cut("data.max_tokens", limit, [length])},
        )

    def uncut_fields(self, row: Row) -> dict[str, Uncut]:
        """ids. A text has no limit, because a long one continues in the next row. A conversation is
        cut at its end, and its labels count from the first one.
        """
        if self.chat is not None:
            (whole,), limit = self.chat.tokens([row], self.end), self.cfg.data.max_tokens
            first = whole["scored"].index(1)
            return {"ids": Uncut([whole["ids"]], limit, "data.max_tokens", labels_from=first)}
        ids = self.encode(row)["ids"]
        return {"ids": Uncut([ids], None, "data.max_tokens", labels_from=1)}

    def encoding_id(self) -> str:
        if self.chat is not None:
            return self.encoded_under(max_tokens=self.cfg.data.max_tokens, **self.chat.identity())
        settings: dict[str, Any] = {"max_tokens": self.cfg.data.max_tokens}
        if self._is_on_answers:
            settings["loss_on"] = "answer"
        if self.opening:  # until 2026-11-26 texts had none
            settings["opening"] = self.opening
        return self.encoded_under(**settings)

    def limits(self) -> dict[str, int]:
        return {"data.max_tokens": self.cfg.data.max_tokens}

    def specimen(self) -> Row:
        text = self.filler()
        if self.chat is not None:
            turns = [{"role": role, "content": text} for role in ("user", "assistant")]
            return {"messages": turns}
        return {"text": text, "answer_spans": [(0, len(text))], "piece": 0}

    def length(self, encoded: Mapping[str, Any]) -> int:
        return len(encoded["ids"])

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """The rows as layout.pack_labelled packs them; for a base that reads no streams input_ids,
        attention_mask and labels (B, T), and scored (N,).
        """
        # without "scored" every token is a label; the sources of a mix need not be alike
        flags = [row["scored"] if "scored" in row else [1] * len(row["ids"]) for row in rows]
        lengths = [len(row["ids"]) for row in rows]
        if self.is_packed:
            packed = pack_labelled([row["ids"] for row in rows], flags)
            return self.with_lesson({**packed, **self.noise(rows, lengths)}, rows)
        ids, mask = pad_right([row["ids"] for row in rows], self.pad)
        is_label, _ = pad_right(flags, 0)
        labels = ids.masked_fill(is_label == 0, IGNORED)
        batch = {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": labels,
            "scored": scored_before(labels),
            **self.noise(rows, lengths, width=ids.shape[1]),
        }
        return self.with_lesson(batch, rows)

    def sharing_problems(self, ranks: int) -> list[str]:
        return list(problems(base_source.config_of(self.cfg.base, self.places), ranks))

    def share(self, batch: Batch, place: RankPlace) -> Batch:
        return stretch_of(batch, place)

    def num_labels(self, row: Mapping[str, Any]) -> int:
        is_label = row["scored"] if "scored" in row else np.ones(len(row["ids"]))
        return int(np.sum(is_label[1:]))

    def units(self, batch: Batch) -> Tensor:
        return torch.tensor(len(batch["scored"]), device=batch["scored"].device)

    # Answers
    # ----------------------------------------------------------------------------------------------

    def reply_row(self, encoded: Mapping[str, Any]) -> Row | None:
        if "scored" not in encoded:  # a text: every token is a label
            return None
        limit = self.cfg.data.max_tokens
        return reply_row(self, encoded["ids"], encoded["scored"], most=limit)

    def replies(self, model: nn.Module, rows: Sequence[Row], *, max_tokens: int) -> list[ReplyText]:
        base: Any = model.base
        return replies(self, base, rows, max_tokens=max_tokens)
