r"""A question with its choices, and the line that UnifiedQA has for it.

`question \n (A) c1 (B) c2 [\n context]<TAB>answer text`, where \n is a backslash and an n; without
a question the line starts with \n. A yes/no question is `question<TAB>yes` or `question<TAB>no`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from string import ascii_uppercase

_SEPARATOR = "\\n"
YES = "yes"


class BadRecord(ValueError):
    """A record that is no problem; says what was got and what was wanted. The caller adds file and
    line.
    """


@dataclass(frozen=True)
class Problem:
    """A question and its choices. A boolean has one choice, which is true (gold 0) or false (gold
    None): "yes", or the statement if nothing is asked.
    """

    question: str | None  # None: the choices are statements
    choices: tuple[str, ...]
    gold: int | None  # index into choices
    context: str | None = None

    @property
    def is_boolean(self) -> bool:
        return len(self.choices) == 1


def yes_no(question: str, *, label: bool) -> Problem:
    """A boolean with a question."""
    return Problem(question, (YES,), 0 if label else None)


def statement(text: str, *, label: bool) -> Problem:
    """A boolean that is a statement already."""
    return Problem(None, (text,), 0 if label else None)


def multiple_choice(
    question: str | None, choices: list[str], gold: int, context: str | None = None
) -> Problem:
    """A problem with two choices or more; BadRecord for fewer, or a gold that is none of them."""
    if len(choices) < 2:
        raise BadRecord(f"{len(choices)} option(s), want two or more")
    if not 0 <= gold < len(choices):
        raise BadRecord(f"the answer is option {gold + 1} of {len(choices)}")
    return Problem(question, tuple(choices), gold, context)


def write_line(problem: Problem) -> str:
    """The UnifiedQA line of a problem, without its end. Nothing is lower-cased."""
    if problem.is_boolean:
        statement = problem.choices[0] if problem.question is None else problem.question
        return f"{statement}\t{_label(problem)}"
    return f"{_question_part(problem)}\t{_gold_text(problem)}"


def write_padded_line(problem: Problem) -> str:
    """As write_line, with the spaces that UnifiedQA has round the tab of some of its sets."""
    return f"{_question_part(problem)} \t {_gold_text(problem)} "


def read_line(line: str, *, is_statement: bool = False, keeps_blank: bool = False) -> Problem:
    """The problem of a UnifiedQA line; texts are stripped. BadRecord says why a line holds none.

    is_statement: what stands before yes or no is a statement, not a question. keeps_blank: a blank
    question is one.
    """
    question, tab, answer = line.rpartition("\t")
    if not tab:
        raise BadRecord("no tab, want question, tab, answer")
    parts, answer = [part.strip() for part in question.split(_SEPARATOR)], answer.strip()
    if len(parts) == 1:
        if answer not in (YES, "no"):
            raise BadRecord(f"no options, and the answer is {answer!r}, want yes or no")
        if not parts[0] and not keeps_blank:
            raise BadRecord("the question is blank")
        return (statement if is_statement else yes_no)(parts[0], label=answer == YES)
    if len(parts) > 3:
        raise BadRecord(
            f"{len(parts)} parts with {_SEPARATOR} between, want question, choices and perhaps "
            "context"
        )
    choices = list(_read_choices(parts[1]))
    if answer not in choices:
        raise BadRecord(f"the answer {answer!r} is none of the options {choices}")
    return multiple_choice(
        parts[0] or None, choices, choices.index(answer), parts[2] if len(parts) == 3 else None
    )


def one_line(text: str) -> str:
    """A text without tabs and line ends, which would break a line. If one stood between two words,
    a space takes its place.
    """
    return (
        " ".join(part for part in re.split(r"\s*[\t\r\n]+\s*", text) if part)
        if re.search(r"[\t\r\n]", text)
        else text
    )


def _question_part(problem: Problem) -> str:
    if len(problem.choices) > len(ascii_uppercase):
        raise BadRecord(
            f"{len(problem.choices)} options, want {len(ascii_uppercase)} at most, one for each "
            "letter"
        )
    marked = (
        f"({letter}) {choice}"
        for letter, choice in zip(ascii_uppercase, problem.choices, strict=False)
    )
    parts = [_SEPARATOR, *marked]
    if problem.question is not None:
        parts.insert(0, problem.question)
    if problem.context is not None:
        parts += [_SEPARATOR, problem.context]
    return " ".join(parts)


def _label(problem: Problem) -> str:
    return "no" if problem.gold is None else YES


def _gold_text(problem: Problem) -> str:
    if problem.gold is None:
        raise BadRecord("no option is the answer")
    return problem.choices[problem.gold]


def _read_choices(text: str) -> Iterator[str]:
    """The texts between (A), (B), ... as far as these follow one another.

    An option that holds the next one's letter is cut.
    """
    if not text.startswith("(A)"):
        raise BadRecord(f"the options are {text[:40]!r}, want (A) ... (B) ...")
    rest = text[3:]
    for letter in ascii_uppercase[1:]:
        choice, marker, after = rest.partition(f"({letter})")
        if not marker:
            break
        yield choice.strip()
        rest = after
    yield rest.strip()
