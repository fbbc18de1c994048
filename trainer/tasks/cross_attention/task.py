"""Questions answered by a frozen decoder that reads a context through inserted cross-attention layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from trainer import base_model, distributed
from trainer.config import canonical_json
from trainer.data import sources, stdlib_docs, vocabulary
from trainer.data.padding import pad_right
from trainer.errors import ConfigError, DataError
from trainer.losses import IGNORED
from trainer.metrics import Ratio, answer_scores
from trainer.task import GREEDY, Answered, Batch, Encoded, Places, Row, Search
from trainer.tasks.cross_attention import export, templates
from trainer.tasks.cross_attention.config import Config
from trainer.tasks.cross_attention.generation import greedy, most_prompt_tokens
from trainer.tasks.cross_attention.model import CrossAttentionModel
from trainer.tasks.cross_attention.weights import load_added, read_added


class Task:
    """A question (and the answer being written) in the decoder, its context behind the cross-attention."""

    unit: ClassVar[str] = "tokens"

    def __init__(self, cfg: Config, places: Places) -> None:
        self.cfg, self.places = cfg, places
        self.tokenizer = base_model.tokenizer_of(cfg, places)
        self.pad = vocabulary.pad_id(self.tokenizer)
        self.eos = vocabulary.eos_id(self.tokenizer)

    # Model ------------------------------------------------------------------------------------------------------

    def model(self) -> nn.Module:
        model = self._operate(base_model.load(self.cfg.base, self.places, precision=self.cfg.train.precision))
        if self.cfg.init_from is not None:
            load_added(model, read_added(Path(self.cfg.init_from)), source=self.cfg.init_from)
        return model

    def skeleton(self) -> nn.Module:
        return self._operate(base_model.skeleton(self.cfg.base, self.places))

    def _operate(self, base: Any) -> CrossAttentionModel:
        model = CrossAttentionModel(base, self.cfg.layers, seed=self.cfg.train.seed)
        model.check_lengths(self.cfg.data.decoder_tokens, self.cfg.data.context_tokens)
        model.checkpoint_blocks(self.cfg.train.gradient_checkpointing)
        return model

    def fingerprint(self) -> str:
        return base_model.fingerprint(self.cfg.base, self.places)

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        export.write(folder, weights, self.cfg, fingerprint=self.fingerprint(), tokenizer=self.tokenizer)

    def exported(self, folder: Path) -> nn.Module:
        return export.load(folder, self.places, precision=self.cfg.train.precision)

    # Data -------------------------------------------------------------------------------------------------------

    def rows(self, split: str) -> Iterable[Row]:
        rows = _questions(self.cfg.data.source, split, self.places.data_path)
        if split == "train" or not self.cfg.data.shuffled_context:
            return rows
        return _with_another_context(list(rows))

    def encode(self, row: Row) -> Encoded:
        """Token ids: decoder text with its answer and EOS, and the context's chunks, each cut to its limit."""
        data = self.cfg.data
        prompt = self._ids(templates.prompt(row["question"], data.template))
        answer = [*self._ids(row["answers"][0]), self.eos]
        decoder = (prompt + answer)[: data.decoder_tokens]
        if data.loss_on == "answer" and len(decoder) <= len(prompt):
            raise DataError(
                f"data.decoder_tokens={data.decoder_tokens} cuts off the whole answer of {row['question']!r}: "
                f"its prompt alone has {len(prompt)} tokens. Raise data.decoder_tokens."
            )
        context = self._context_ids(row["question"], _contexts_of(row))
        is_cut = len(prompt) + len(answer) > data.decoder_tokens or max(map(len, context)) > data.context_tokens
        encoded = {"decoder": decoder, "answer_start": [len(prompt)], "truncated": [int(is_cut)]}
        encoded |= self._within_limit(context, "context")
        if "other" in row:
            encoded |= self._within_limit(self._context_ids(row["question"], row["other"]), "other")
        return encoded

    def _context_ids(self, question: str, contexts: list[str]) -> list[list[int]]:
        data = self.cfg.data
        how = {"question_on_context": data.question_on_context, "chunked": data.chunked}
        return [self._ids(text) for text in templates.context_texts(question, contexts, data.template, **how)]

    def _within_limit(self, texts: list[list[int]], field: str) -> Encoded:
        chunks = [ids[: self.cfg.data.context_tokens] for ids in texts]
        return {field: [token for chunk in chunks for token in chunk], f"{field}_lengths": [len(c) for c in chunks]}

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def encoding_id(self) -> str:
        return canonical_json(
            {
                "task": "cross_attention",
                "tokenizer": vocabulary.tokenizer_id(self.tokenizer),
                "data": self.cfg.data.model_dump(mode="json", exclude={"answer_tokens"}),
            }
        )

    def length(self, encoded: Mapping[str, Any]) -> int:
        return len(encoded["decoder"]) + len(encoded["context"])

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """input_ids, attention_mask, labels (B, T); context_input_ids, context_attention_mask (B, L) or (B, C, L)."""
        ids, mask = pad_right([row["decoder"] for row in rows], self.pad)
        labels = ids.masked_fill(mask == 0, IGNORED)
        if self.cfg.data.loss_on == "answer":
            for index, row in enumerate(rows):
                labels[index, : int(row["answer_start"][0])] = IGNORED
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        for field in ("context", "other"):
            if field in rows[0]:
                batch[f"{field}_input_ids"], batch[f"{field}_attention_mask"] = self._contexts(rows, field)
        return batch

    def _contexts(self, rows: Sequence[Mapping[str, Any]], field: str) -> tuple[Tensor, Tensor]:
        per_row = [_chunks(row[field], row[f"{field}_lengths"]) for row in rows]
        num_chunks = max(len(chunks) for chunks in per_row)
        flat = [chunk for chunks in per_row for chunk in [*chunks, *[[]] * (num_chunks - len(chunks))]]
        ids, mask = pad_right(flat, self.pad)
        if not self.cfg.data.chunked:
            return ids, mask
        return ids.view(len(rows), num_chunks, -1), mask.view(len(rows), num_chunks, -1)

    # Loss and scores --------------------------------------------------------------------------------------------

    def units(self, batch: Batch) -> Tensor:
        return (batch["labels"][:, 1:] != IGNORED).sum()

    def losses(self, model: nn.Module, window: Sequence[Batch]) -> Iterator[Tensor]:
        for batch in window:
            yield model(**_without_other(batch)).loss

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Ratio]:
        """loss: per labelled token. shuffled_loss: the same under another row's context; higher, if layers read."""
        units = self.units(batch)
        scores = {"loss": Ratio(model(**_without_other(batch)).loss, units)}
        if "other_input_ids" in batch:
            wrong = {
                **_without_other(batch),
                "context_input_ids": batch["other_input_ids"],
                "context_attention_mask": batch["other_attention_mask"],
            }
            scores["shuffled_loss"] = Ratio(model(**wrong).loss, units)
        return scores

    # Answers ----------------------------------------------------------------------------------------------------

    def answers(
        self, model: nn.Module, rows: Sequence[Mapping[str, Any]], raw: Sequence[Row], *, search: Search = GREEDY
    ) -> Answered:
        """Greedy answers of at most data.answer_tokens tokens, and em, f1, precision, recall and recall_em of them."""
        if search != GREEDY:
            raise ConfigError(f"{search}: task 'cross_attention' answers greedily only. Ask for one beam, one answer.")
        device, most = distributed.device(), most_prompt_tokens(model, self.cfg.data.answer_tokens)
        ids, mask = self._prompts(rows, most)
        context_ids, context_mask = self._contexts(rows, "context")
        made = greedy(
            model,
            ids.to(device),
            mask.to(device),
            context_input_ids=context_ids.to(device),
            context_attention_mask=context_mask.to(device),
            max_new_tokens=self.cfg.data.answer_tokens,
            pad_token_id=self.pad,
            eos_token_id=self.eos,
            always_steps=distributed.world() > 1,
        )
        predictions = [self._text(tokens) for tokens in made.tokens_BG.tolist()]
        return Answered(predictions, answer_scores(predictions, [row["answers"] for row in raw]))

    def _prompts(self, rows: Sequence[Mapping[str, Any]], most: int) -> tuple[Tensor, Tensor]:
        """(B, T) ids and mask of what stands before the answers, padded on the left; at most the last `most` tokens."""
        prompts = [row["decoder"][: int(row["answer_start"][0])][-most:] for row in rows]
        ids, mask = pad_right([list(prompt)[::-1] for prompt in prompts], self.pad)
        return ids.flip(1), mask.flip(1)

    def _text(self, tokens: list[int]) -> str:
        end = tokens.index(self.eos) if self.eos in tokens else len(tokens)
        kept = tokens[:end]
        return str(self.tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _questions(source: str, split: str, data_path: Path | None) -> Iterable[Row]:
    if source == "stdlib_docs":
        return stdlib_docs.qa_rows(split)
    return sources.nq_rows(data_path, split) if source == "nq" else sources.qa_rows(data_path, split)


def _contexts_of(row: Row) -> list[str]:
    return row.get("contexts") or [row["context"]]


def _without_other(batch: Batch) -> Batch:
    return {name: tensor for name, tensor in batch.items() if not name.startswith("other_")}


def _chunks(flat: Sequence[int], lengths: Sequence[int]) -> list[Sequence[int]]:
    chunks, start = [], 0
    for length in lengths:
        chunks.append(flat[start : start + int(length)])
        start += int(length)
    return chunks


def _with_another_context(rows: list[Row]) -> Iterator[Row]:
    """Each row with the context of the next row that has a different one, so that the pairing depends on no batch."""
    for index, row in enumerate(rows):
        own = _contexts_of(row)
        others = (_contexts_of(rows[(index + offset) % len(rows)]) for offset in range(1, len(rows)))
        yield {**row, "other": next((other for other in others if other != own), own)}
