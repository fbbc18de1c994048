"""A row of reading comprehension, made of a publisher's record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from trainer.recipes.cross_attention.files import PublishedRecord

if TYPE_CHECKING:
    from trainer.protocol.task import Row

# The answer of a question that its contexts do not answer.
UNANSWERABLE = "UNANSWERABLE"


def row_of(
    record: PublishedRecord,
    question: Any,
    answers: Iterable[Any],
    passages: Iterable[tuple[Any, Any, bool]],
) -> Row | None:
    """A row with passages (title, text, whether it is useful); None without answer or context."""
    contexts = [(title, text, useful) for title, text, useful in passages if is_text(text)]
    references = list(dict.fromkeys(answer for answer in answers if is_text(answer)))
    if not is_text(question):
        raise record.bad(f"its question is {question!r:.60}, want text that is not blank")
    if not references or not contexts:
        return None
    row: Row = {
        "question": question,
        "answers": references,
        "contexts": [text for _, text, _ in contexts],
    }
    if all(is_text(title) for title, _, _ in contexts):
        row["titles"] = [title for title, _, _ in contexts]
    row["useful_contexts"] = [int(useful) for _, _, useful in contexts]
    return row


def is_text(value: Any) -> bool:
    """Whether a value of a record is text that is not blank."""
    return isinstance(value, str) and bool(value.strip())
