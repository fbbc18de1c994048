"""How a prompt and an answer become token ids and batches: one text for a decoder and for a reward
model, two texts for an encoder-decoder.

A whole answer is {"ids", "scored"} or {"prompt", "ids"}, before data.max_tokens cuts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from trainer.data.chat.chat_template import flags
from trainer.data.padding import pad_right
from trainer.models.packed.layout import pack
from trainer.protocol.abilities import Uncut
from trainer.protocol.task import Batch, Cut, Row
from trainer.tasks.preference.model import prompts_and_answers, sequences, whole_sequences

_LIMIT = "data.max_tokens"

Whole = Mapping[str, list[int]]
EncodedRow = Mapping[str, Any]


class Form(Protocol):
    """What a task asks of either form."""

    @property
    def identity(self) -> dict[str, Any]:
        """What ids depend on besides all that every form does."""
        ...

    def whole(self, answers: Sequence[Row]) -> list[dict[str, list[int]]]:
        """Whole answers of rows of rows.py."""
        ...

    def cut(self, whole: Whole) -> Whole:
        """A whole answer cut to data.max_tokens."""
        ...

    def losses_of(self, whole: Whole) -> tuple[int, int]:
        """How many learnt tokens of an answer the limit cuts off, and of how many."""
        ...

    def cuts(self, whole: Sequence[Whole]) -> dict[str, Cut]:
        """What the limit cuts off the answers of a row."""
        ...

    def uncut(self, whole: Mapping[str, Whole]) -> dict[str, Uncut]:
        """The fields of an encoded row before the cut; whole: by the name of the answer."""
        ...

    def fields(self, cut: Mapping[str, Whole]) -> dict[str, list[int]]:
        """The fields of an encoded row."""
        ...

    def names_of_fields(self, names: Sequence[str]) -> list[str]:
        """What fields() calls those of answers."""
        ...

    def num_learnt(self, row: EncodedRow, name: str) -> int:
        """How many tokens of an answer are learnt."""
        ...

    def batch(self, rows: Sequence[EncodedRow], names: Sequence[str]) -> Batch:
        """What the model reads of the answers of these names: all of the first name, then all of
        the second.
        """
        ...


class OneText:
    """A prompt with its answer behind it."""

    def __init__(self, task: Any) -> None:
        self.task = task

    @property
    def opening(self) -> list[int]:
        """The ids that begin every text; a chat template writes them itself."""
        return [] if self.task.chat is not None else self.task.opening

    @property
    def identity(self) -> dict[str, Any]:
        return {"opening": self.opening}

    def whole(self, answers: Sequence[Row]) -> list[dict[str, list[int]]]:
        task = self.task
        if task.chat is not None:
            return task.chat.tokens(answers, task.end)
        texts = [answer["text"] for answer in answers]
        encoding = task.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        of_answers: list[dict[str, list[int]]] = []
        for number, answer in enumerate(answers):
            ids = encoding["input_ids"][number]
            scored = flags(encoding["offset_mapping"][number], answer["answer_spans"])
            opening = [] if ids[: len(self.opening)] == self.opening else self.opening
            whole = {"ids": [*opening, *ids, task.end]}
            whole["scored"] = [*([0] * len(opening)), *scored, 1]
            of_answers.append(whole)
        return of_answers

    def cut(self, whole: Whole) -> Whole:
        """A reward model judges the last token: it stays."""
        limit, ids = self.task.cfg.data.max_tokens, whole["ids"]
        keeps_last = self.task.how.loss == "reward" and len(ids) > limit
        kept = [*ids[: limit - 1], ids[-1]] if keeps_last else ids[:limit]
        return {"ids": kept, "scored": whole["scored"][:limit]}

    def losses_of(self, whole: Whole) -> tuple[int, int]:
        scored = whole["scored"]
        return sum(scored[self.task.cfg.data.max_tokens :]), sum(scored)

    def cuts(self, whole: Sequence[Whole]) -> dict[str, Cut]:
        limit = self.task.cfg.data.max_tokens
        return {"answers": Cut(_LIMIT, limit, [len(one["ids"]) for one in whole])}

    def uncut(self, whole: Mapping[str, Whole]) -> dict[str, Uncut]:
        limit = self.task.cfg.data.max_tokens
        return {
            name: Uncut([one["ids"]], limit, _LIMIT, labels_from=one["scored"].index(1))
            for name, one in whole.items()
        }

    def fields(self, cut: Mapping[str, Whole]) -> dict[str, list[int]]:
        fields: dict[str, list[int]] = {}
        for name, one in cut.items():
            fields[name], fields[f"{name}_scored"] = one["ids"], one["scored"]
        return fields

    def names_of_fields(self, names: Sequence[str]) -> list[str]:
        return [field for name in names for field in (name, f"{name}_scored")]

    def num_learnt(self, row: EncodedRow, name: str) -> int:
        return int(np.asarray(row[f"{name}_scored"])[1:].sum())

    def batch(self, rows: Sequence[EncodedRow], names: Sequence[str]) -> Batch:
        task = self.task
        pad = None if task.is_packed else task.pad
        ids, scored = (
            [row[f"{name}{end}"] for name in names for row in rows] for end in ("", "_scored")
        )
        if task.how.loss == "reward":
            return whole_sequences(ids, pad=pad)
        num_whole = len(rows) if task.how.loss == "orpo" else 0
        return sequences(ids, scored, num_whole=num_whole, pad=pad)


class TwoTexts:
    """A prompt, which the encoder reads once for all of its answers, and what the decoder writes:
    each ends with the end token.
    """

    def __init__(self, task: Any) -> None:
        self.task = task

    @property
    def identity(self) -> dict[str, Any]:
        return {"prompts": "of the encoder"}

    def whole(self, answers: Sequence[Row]) -> list[dict[str, list[int]]]:
        starts = [answer["answer_spans"][0][0] for answer in answers]
        texts = [
            part
            for answer, start in zip(answers, starts, strict=True)
            for part in (answer["text"][:start], answer["text"][start:])
        ]
        how = {"add_special_tokens": False, "verbose": False}
        ids = [[*one, self.task.end] for one in self.task.tokenizer(texts, **how)["input_ids"]]
        pairs = zip(ids[::2], ids[1::2], strict=True)
        return [{"prompt": prompt, "ids": answer} for prompt, answer in pairs]

    def cut(self, whole: Whole) -> Whole:
        """A prompt that is cut keeps its end token; an answer does not, for it ends later."""
        limit, prompt = self.task.cfg.data.max_tokens, whole["prompt"]
        kept = prompt if len(prompt) <= limit else [*prompt[: limit - 1], self.task.end]
        return {"prompt": kept, "ids": whole["ids"][:limit]}

    def losses_of(self, whole: Whole) -> tuple[int, int]:
        length = len(whole["ids"])
        return max(0, length - self.task.cfg.data.max_tokens), length

    def cuts(self, whole: Sequence[Whole]) -> dict[str, Cut]:
        limit = self.task.cfg.data.max_tokens
        prompts, answers = [len(whole[0]["prompt"])], [len(one["ids"]) for one in whole]
        return {"prompts": Cut(_LIMIT, limit, prompts), "answers": Cut(_LIMIT, limit, answers)}

    def uncut(self, whole: Mapping[str, Whole]) -> dict[str, Uncut]:
        limit = self.task.cfg.data.max_tokens
        prompt = next(iter(whole.values()))["prompt"]
        answers = {
            name: Uncut([one["ids"]], limit, _LIMIT, labels_from=0) for name, one in whole.items()
        }
        return {"prompt": Uncut([prompt], limit, _LIMIT), **answers}

    def fields(self, cut: Mapping[str, Whole]) -> dict[str, list[int]]:
        prompt = next(iter(cut.values()))["prompt"]
        return {"prompt": prompt, **{name: one["ids"] for name, one in cut.items()}}

    def names_of_fields(self, names: Sequence[str]) -> list[str]:
        return ["prompt", *names]

    def num_learnt(self, row: EncodedRow, name: str) -> int:
        return len(row[name])

    def prompts(self, ids: Sequence[list[int]]) -> Batch:
        """Prompts that are answered, for encoder_decoder.generate: whole ones with their end."""
        cut = [self.cut({"prompt": one, "ids": []})["prompt"] for one in ids]
        if self.task.is_packed:
            return pack(cut, bucketed=True)
        tokens, mask = pad_right(cut, self.task.pad)
        return {"input_ids": tokens, "attention_mask": mask}

    def batch(self, rows: Sequence[EncodedRow], names: Sequence[str]) -> Batch:
        task = self.task
        return prompts_and_answers(
            [row["prompt"] for row in rows],
            [[row[name] for name in names] for row in rows],
            counts_whole=task.how.loss == "orpo",
            pad=None if task.is_packed else task.pad,
        )
