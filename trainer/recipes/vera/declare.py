"""From a question and a choice to a statement, by the four rules of the original; the first that
fits decides.

(a) no question: the choice as it is; (b) question and ending joined, in the sets made of endings;
(c) exactly one blank: the choice fills it; (d) the last sentence goes to the question converter, as
`sentence </s> choice`, and those before it come back in front. The statements of (c) and (d) end in
"." or "!", and the context stands before them. Source: Liu et al. 2023 (Vera), its data
preparation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from trainer.recipes.vera.problem import Problem

Rule = Literal["verbatim", "joined", "blank", "rules", "converter"]
# last sentence, choice, what is before; None: this is not for rules
Declarer = Callable[[str, str, str], str | None]

_UNDERSCORES = re.compile(r"_+")
_LONGEST_BLANK = 20
_SENTENCE_END = ". "


@dataclass(frozen=True)
class Draft:
    """A statement; for rule "converter", without the text that the converter puts between `before`
    and the full stop.
    """

    rule: Rule
    text: str  # of rule "converter": what it is given
    before: str = ""  # the context, and the sentences before the last


def draft(
    problem: Problem, choice: str, *, is_joined: bool, declarer: Declarer | None = None
) -> Draft:
    """What becomes of one choice. is_joined: rule (b) holds in this set. declarer: is tried before
    rule (d).
    """
    choice = choice.strip()
    if problem.question is None:
        return Draft("verbatim", choice)
    question = problem.question.strip()
    if is_joined:
        return Draft("joined", f"{question} {choice}")
    context = f"{problem.context.strip()} " if problem.context else ""
    blanks = find_blanks(question)
    if len(blanks) == 1:
        start, end = blanks[0]
        return Draft(
            "blank", with_full_stop(f"{question[:start]}{choice}{question[end:]}"), context
        )
    *earlier, last = question.split(_SENTENCE_END)
    before = "".join(f"{sentence}{_SENTENCE_END}" for sentence in earlier)
    statement = declarer(last, choice, before) if declarer else None
    if statement is not None:
        return Draft("rules", with_full_stop(statement), context + before)
    return Draft("converter", f"{last} </s> {choice}", context + before)


def find_blanks(question: str) -> list[tuple[int, int]]:
    """(start, end) of every blank.

    A blank is 1 to 20 underscores beside a space, or a single one that starts the text before a
    letter.
    """
    blanks: list[tuple[int, int]] = []
    for match in _UNDERSCORES.finditer(question):
        start, end = match.span()
        before, after = question[max(start - 1, 0) : start], question[end : end + 1]
        starts_text = start == 0 and end == 1 and after.isalpha()
        if end - start <= _LONGEST_BLANK and (starts_text or " " in (before, after)):
            blanks.append((start, end))
    return blanks


def with_full_stop(text: str) -> str:
    """A statement with its full stop, without question marks; what ends in "." or "!" is kept."""
    return text if text.endswith((".", "!")) else f"{text.strip('?')}."
