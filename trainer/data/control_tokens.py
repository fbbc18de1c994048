"""Control tokens of a tokenizer in the texts of rows.

A tokenizer takes "</s>" or "<|im_end|>" in a user's text for its own token: a text ends there, or
another turn begins. Such texts are counted and named, for few people meant that.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from trainer.data import vocabulary

# Keys of rows that hold no text that a tokenizer gets, or another row's text.
_NO_TEXTS = frozenset({"id", "_id", "docid", "passage_id", "dataset", "task", "role", "other"})
# Keys of rows whose texts stand in an earlier row as well: the later pieces of a long text, and
# rows that predict their context.
_REPEATED = ("piece", "is_context")

Control = tuple[str, str]  # (field, token): ("ctxs.text", "</s>")


class ControlTokens:
    """The control tokens of one tokenizer."""

    def __init__(self, tokenizer: Any, *, ends: Collection[int] = ()) -> None:
        """ends: tokens that end a turn or a text; they count although the tokenizer, which added
        them, does not call them special.
        """
        self.tokenizer = tokenizer
        special = {
            added.content: number
            for number, added in tokenizer.added_tokens_decoder.items()
            if added.special or number in ends
        }
        special |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._ids = {text: int(number) for text, number in special.items() if text.strip()}
        longest_first = sorted(self._ids, key=lambda text: (-len(text), text))
        alternatives = "|".join(map(re.escape, longest_first))
        self._pattern = re.compile(alternatives) if alternatives else None

    def in_text(self, text: str) -> list[str]:
        """The control tokens that the tokenizer makes of a text, each once, in their order."""
        if self._pattern is None or self._pattern.search(text) is None:
            return []
        ids = set(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        spelled = dict.fromkeys(match[0] for match in self._pattern.finditer(text))
        return [token for token in spelled if self._ids[token] in ids]

    def written_out(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts that a model is to write, without special tokens. A control token in them
        becomes the characters that it is written with, for a text ends at its own end alone.
        """
        if not texts:
            return []
        how: dict[str, Any] = {"add_special_tokens": False, "verbose": False}
        ids = self.tokenizer(list(texts), **how)["input_ids"]
        for number, text in enumerate(texts):
            if self.in_text(text):
                ids[number] = self.tokenizer(text, split_special_tokens=True, **how)["input_ids"]
        return ids

    def in_row(self, row: Mapping[str, Any]) -> list[Control]:
        """The control tokens in the texts of a raw row, each once a field. The one that opens every
        text may stand at the beginning of a "text" or "prompt" of its own.
        """
        if any(row.get(name) for name in _REPEATED):
            return []
        controls: dict[Control, None] = {}
        for field, text in _texts(row, ""):
            text = text.removeprefix(self._opening) if field in ("text", "prompt") else text
            controls |= dict.fromkeys((field, token) for token in self.in_text(text))
        return list(controls)

    @cached_property
    def _opening(self) -> str:
        return str(self.tokenizer.bos_token) if vocabulary.opening_of(self.tokenizer) else ""


def controls_of(task: Any) -> ControlTokens | None:
    """The control tokens of a task's tokenizer; None of a task that has none."""
    tokenizer = getattr(task, "tokenizer", None)
    if tokenizer is None:
        return None
    is_chat = getattr(task, "chat", None) is not None
    return ControlTokens(tokenizer, ends=[task.turn_end] if is_chat else [])


def reason(control: Control) -> str:
    """What rows with a control token are called, many of them."""
    field, token = control
    return f"rows with the control token {token!r} in {field!r}"


def _texts(value: Any, field: str) -> Iterator[tuple[str, str]]:
    """(field, text) of every text in a value: "answers", or "ctxs.text"."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            if name not in _NO_TEXTS or "." in field:  # an argument of a call may be called "id"
                yield from _texts(one, f"{field}.{name}" if field else str(name))
    elif isinstance(value, Iterable):
        for one in value:
            if not isinstance(one, int | float):
                yield from _texts(one, field)
