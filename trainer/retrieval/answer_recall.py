"""Whether a passage holds an answer, and the rank of the first passage that does.

As in DPR (Karpukhin et al. 2020), a passage holds an answer when the answer's tokens stand in it
one after another.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import regex

from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.data.readers.questions import Query
    from trainer.data.readers.rankings import Rankings
    from trainer.protocol.task import Row

# A token is letters, digits and marks in a row, or any other single character that is neither
# white space nor control.
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
_BETWEEN = "\0"  # between tokens: a control character, which no token holds


def tokens(text: str) -> list[str]:
    """The words and signs of a text, in lower case."""
    return [token.lower() for token in _TOKEN.findall(text)]


def searchable(text: str) -> str:
    """A text in the form that `holds` takes: decomposed (NFD), as tokens between separators."""
    return _BETWEEN.join(["", *tokens(unicodedata.normalize("NFD", text)), ""])


def holds(passage: str, answer: str) -> bool:
    """Whether the answer's tokens stand in the passage one after another; both `searchable`."""
    return answer in passage


def has_answer(answers: Sequence[str], text: str) -> bool:
    """Whether the text holds any of the answers; upper case and the composition of letters do not
    matter.
    """
    passage = searchable(text)
    return any(holds(passage, searchable(answer)) for answer in answers)


class AnswerFinder:
    """`has_answer` for many questions over the same passages; each passage is tokenised once."""

    def __init__(self, passages: Mapping[str, Row]) -> None:
        self._passages = passages
        self._searchable: dict[str, str] = {}

    def first(self, answers: Sequence[str], ids: Iterable[str]) -> int | None:
        """The rank, from 1, of the first passage with an answer in its text; None without one."""
        searchable_answers = [searchable(answer) for answer in answers]
        for rank, name in enumerate(ids, start=1):
            if any(holds(self.text(name), answer) for answer in searchable_answers):
                return rank
        return None

    def having(self, answers: Sequence[str], ids: Iterable[str]) -> set[str]:
        """The ids of the passages that have an answer in their text."""
        searchable_answers = [searchable(answer) for answer in answers]
        return {
            name
            for name in ids
            if any(holds(self.text(name), answer) for answer in searchable_answers)
        }

    def text(self, name: str) -> str:
        """A passage's text without its title, as `holds` takes it."""
        if name not in self._searchable:
            self._searchable[name] = searchable(self._passages[name]["text"])
        return self._searchable[name]


def answer_recall(
    rankings: Rankings, queries: Sequence[Query], passages: Mapping[str, Row], *, at: Sequence[int]
) -> dict[str, float]:
    """answer_recall@k: the share of questions with an answer in one of their first k passages
    (DPR's top-k accuracy).

    The share is over all questions that have answers; one that was not ranked counts 0. DataError
    when no question has answers.
    """
    answerable = [query for query in queries if query.answers]
    if not answerable:
        raise DataError(
            "no question has answers, which answer recall looks for. Judge by --qrels instead."
        )
    finder = AnswerFinder(passages)
    firsts = [
        finder.first(query.answers, [hit.passage for hit in rankings.get(query.id, [])[: max(at)]])
        for query in answerable
    ]
    return {
        f"answer_recall@{k}": sum(first is not None and first <= k for first in firsts)
        / len(answerable)
        for k in at
    }
