"""TopiOCQA: conversations. Its dev set is the test split, and valid is taken out of train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.recipes.cross_attention.files import PublishedRecord, RecordsOf, read_as
from trainer.recipes.cross_attention.rows import row_of

if TYPE_CHECKING:
    from trainer.protocol.task import Row

_TURN = " [SEP] "  # between the turns of a conversation, as in TopiOCQA's own "all history" files


def rows(records: RecordsOf, split: str) -> Iterator[Row]:
    """One row for each turn of a conversation, with its gold passage.

    The last conversations of train are the valid split, as many as dev has.
    """
    if split == "test":
        of_split = records("dev")
    else:
        number = len({_conversation(record) for record in records("dev")})
        conversations = list(dict.fromkeys(_conversation(record) for record in records("train")))
        last = set(conversations[-min(number, len(conversations) // 2) :] if number else ())
        of_split = (
            record
            for record in records("train")
            if (_conversation(record) in last) == (split == "valid")
        )
    return (row for record in of_split if (row := read_as(_row, record)) is not None)


def _conversation(record: PublishedRecord) -> str:
    names = [name for name in ("Conversation_no", "conv_id") if name in record.values]
    if not names:
        raise record.bad(f"it has {', '.join(record.values)}, want Conversation_no or conv_id")
    return str(record.values[names[0]])


def _row(record: PublishedRecord) -> Row | None:
    """A row of the conversations with their Gold_passage, of the publisher's files for retrievers,
    or of its files with gold passages.
    """
    raw = record.values
    if "Question" in raw:
        further = [answer["Answer"] for answer in raw.get("Additional_answers") or []]
        question = _TURN.join([*(raw.get("Context") or []), raw["Question"]])
        answers = [raw["Answer"], *further]
        passages = [raw["Gold_passage"]] if raw.get("Gold_passage") else []
    elif "positive_ctxs" in raw:
        question, answers, passages = raw["question"], raw["answers"], raw["positive_ctxs"][:1]
    else:
        question, answers = raw["question"], raw.get("short_answers") or raw.get("answers") or []
        passages = (
            [{"title": raw.get("title"), "text": raw["context"]}] if raw.get("context") else []
        )
    titled = [(passage.get("title"), passage["text"], True) for passage in passages]
    return row_of(record, question, answers, titled)
