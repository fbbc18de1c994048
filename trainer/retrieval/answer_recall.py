"""Whether a passage holds an answer, as DPR asks it, and how deep in a ranking the first such
passage stands.

Source: Karpukhin et al. 2020 (DPR), whose question it is: do the answer's tokens stand in the
passage, in a row?
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import regex

from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.data.readers.questions import Query
    from trainer.data.readers.rankings import Run
    from trainer.protocol.task import Row

# Letters, digits and marks in a row, or any other single character that is neither white space nor
# control.
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
_BETWEEN = "\0"  # a control character, and so in no token


def tokens(text: str) -> list[str]:
    """The words and signs of a text, in lower case."""
    return [token.lower() for token in _TOKEN.findall(text)]


def searchable(text: str) -> str:
    """A text as `holds` takes it: its tokens between separators, decomposed (NFD) first."""
    return _BETWEEN.join(["", *tokens(unicodedata.normalize("NFD", text)), ""])


def holds(passage: str, answer: str) -> bool:
    """Whether the answer's tokens stand in the passage in a row. Both: see `searchable`."""
    return answer in passage


def has_answer(answers: Sequence[str], text: str) -> bool:
    """Whether any of the answers is in the text, token by token, whatever the case and the
    composition of letters.
    """
    passage = searchable(text)
    return any(holds(passage, searchable(answer)) for answer in answers)


class AnswerFinder:
    """`has_answer` for many questions over the same passages, each of which is tokenised once."""

    def __init__(self, passages: Mapping[str, Row]) -> None:
        self._passages = passages
        self._searchable: dict[str, str] = {}

    def first(self, answers: Sequence[str], ids: Iterable[str]) -> int | None:
        """The rank, from 1, of the first passage with an answer in its text; None without one."""
        wanted = [searchable(answer) for answer in answers]
        for rank, name in enumerate(ids, start=1):
            if any(holds(self.text(name), answer) for answer in wanted):
                return rank
        return None

    def having(self, answers: Sequence[str], ids: Iterable[str]) -> set[str]:
        """Those of the passages that have an answer in their text."""
        wanted = [searchable(answer) for answer in answers]
        return {name for name in ids if any(holds(self.text(name), answer) for answer in wanted)}

    def text(self, name: str) -> str:
        """A passage's text without its title, as `holds` takes it."""
        if name not in self._searchable:
            self._searchable[name] = searchable(self._passages[name]["text"])
        return self._searchable[name]


def answer_recall(
    run: Run, queries: Sequence[Query], passages: Mapping[str, Row], *, at: Sequence[int]
) -> dict[str, float]:
    """answer_recall@k: the share of questions with an answer in one of their first k passages
    (DPR's top-k accuracy).

    Over all questions that have answers; one that the run lacks counts 0. DataError when none has.
    """
    asked = [query for query in queries if query.answers]
    if not asked:
        raise DataError(
            "no question has answers, which answer recall looks for. Judge by --qrels instead."
        )
    finder = AnswerFinder(passages)
    firsts = [
        finder.first(query.answers, [hit.passage for hit in run.get(query.id, [])[: max(at)]])
        for query in asked
    ]
    return {
        f"answer_recall@{k}": sum(first is not None and first <= k for first in firsts) / len(asked)
        for k in at
    }
