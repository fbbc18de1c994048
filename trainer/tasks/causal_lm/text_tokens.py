"""Tokens of whole texts, many of them by one call of the tokenizer, and how many each has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from trainer.data.chat.chat_template import flags
from trainer.protocol.task import Row

# texts, and characters of them, that are tokenised by one call: books fill no memory
_TEXTS_AT_ONCE, _LETTERS_AT_ONCE = 64, 1 << 20
_REMEMBERED_TOKENS = 1 << 19
_REMEMBERED_COUNTS = 1 << 19  # 50 MB; later texts are counted again at each reading

_Key = tuple[str, Any]


class TextTokens:
    """Remembers the tokens of the last texts, because the pieces of a text follow one another."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        begun: Callable[[list[int]], list[int]],
        end: int,
        is_on_answers: bool,
    ) -> None:
        """begun: the ids of a text with what opens it. end: the token that ends every text.
        is_on_answers: only answers are labels.
        """
        self._tokenizer, self._begun, self._end = tokenizer, begun, end
        self._is_on_answers = is_on_answers
        self._recent: OrderedDict[_Key, dict[str, list[int]]] = OrderedDict()
        self._num_recent = 0  # tokens
        # hash and length of a text -> its tokens with opening and end
        self._counts: dict[tuple[int, int], int] = {}

    def of(self, rows: Sequence[Row]) -> list[dict[str, list[int]]]:
        """Each row's whole text with its opening and its end token: "ids" and, when only answers
        are labels, "scored", which is 1 for the tokens of answers and the end token. Bit for bit
        what the tokenizer gives for one text at a time.
        """
        new = {_key(row): row for row in rows if _key(row) not in self._recent}
        found = {_key(row): self._recent[_key(row)] for row in rows if _key(row) in self._recent}
        for texts in _chunks(new.values()):
            found |= self._tokenised(texts)
        return [found[_key(row)] for row in rows]

    def with_counts(
        self, rows: Iterable[Row], is_counted: Callable[[str], bool]
    ) -> Iterator[tuple[Row, int | None]]:
        """(row, number of tokens with opening and end) of each row; None where the text need not be
        counted. Texts that were counted in an earlier reading are not tokenised again.
        """
        for chunk in _chunks(rows):
            texts = [row["text"] for row in chunk]
            unknown = [
                row
                for row, text in zip(chunk, texts, strict=True)
                if is_counted(text) and _name(text) not in self._counts
            ]
            lengths = [len(fields["ids"]) for fields in self.of(unknown)]
            new = {_name(row["text"]): num for row, num in zip(unknown, lengths, strict=True)}
            if len(self._counts) < _REMEMBERED_COUNTS:
                self._counts |= new
            for row, text in zip(chunk, texts, strict=True):
                name = _name(text)
                yield row, (new.get(name) or self._counts[name]) if is_counted(text) else None

    def _tokenised(self, rows: Sequence[Row]) -> dict[_Key, dict[str, list[int]]]:
        encoding = self._tokenizer(
            [row["text"] for row in rows],
            add_special_tokens=False,
            return_offsets_mapping=self._is_on_answers,
        )
        found: dict[_Key, dict[str, list[int]]] = {}
        for number, row in enumerate(rows):
            fields = {"ids": [*self._begun(encoding["input_ids"][number]), self._end]}
            if self._is_on_answers:
                scored = flags(encoding["offset_mapping"][number], row["answer_spans"])
                opening = [0] * (len(fields["ids"]) - 1 - len(scored))
                fields["scored"] = [*opening, *scored, 1]
            found[_key(row)] = fields
            self._remember(_key(row), fields)
        return found

    def _remember(self, key: _Key, fields: dict[str, list[int]]) -> None:
        self._recent[key] = fields
        self._num_recent += len(fields["ids"])
        while self._num_recent > _REMEMBERED_TOKENS and len(self._recent) > 1:
            _, oldest = self._recent.popitem(last=False)
            self._num_recent -= len(oldest["ids"])


def _key(row: Row) -> _Key:
    spans = row.get("answer_spans")
    return row["text"], None if spans is None else tuple(map(tuple, spans))


def _name(text: str) -> tuple[int, int]:
    return hash(text), len(text)


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """The rows in their order, so many at a time as one call tokenises."""
    chunk: list[Row] = []
    letters = 0
    for row in rows:
        chunk.append(row)
        letters += len(row["text"])
        if len(chunk) == _TEXTS_AT_ONCE or letters >= _LETTERS_AT_ONCE:
            yield chunk
            chunk, letters = [], 0
    if chunk:
        yield chunk
