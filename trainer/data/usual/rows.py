"""Rows of a person's files, whatever their format, with the names that a task reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainer.config.formats.table import FORMATS, FormatName
from trainer.data.formats import picked
from trainer.data.left_out import count_format
from trainer.data.readers import fields
from trainer.data.readers.columns import columns_in, in_our_names
from trainer.data.usual import instructions, kilt, preferences, questions
from trainer.data.usual.placed import Around, Placed, Reader, as_they_are
from trainer.data.usual.signs import OURS, format_of, is_own
from trainer.data.usual.triples import triples
from trainer.errors import DataError, LatheError

if TYPE_CHECKING:
    from trainer.config.formats.layouts import Layout, Purpose
    from trainer.config.own_rows import OwnRows
    from trainer.protocol.task import Row

_LOOKED_AT = 10  # first rows, by which a format is told; a question may hold a hundred passages

# How the rows of a format become what a task makes of them. Formats whose files are read by names
# of their own (msmarco, beir, nq, pretokenised; fid for a retriever) are not among them.
READERS: Mapping[tuple[FormatName, Purpose], Reader] = {
    ("openai", "conversation"): as_they_are,
    ("sharegpt", "conversation"): instructions.sharegpt,
    ("alpaca", "conversation"): instructions.alpaca_conversations,
    ("alpaca", "completion"): instructions.alpaca_completions,
    ("alpaca", "summary"): instructions.alpaca_summaries,
    ("prompt_completion", "conversation"): as_they_are,
    ("prompt_completion", "completion"): as_they_are,
    ("prompt_completion", "summary"): instructions.prompt_summaries,
    ("conversational", "conversation"): as_they_are,
    ("completion", "text"): as_they_are,
    ("triples", "query"): triples,
    ("dpr", "question"): questions.dpr_questions,
    ("dpr", "query"): questions.dpr_queries,
    ("kilt", "question"): kilt.kilt_questions,
    ("kilt", "query"): kilt.kilt_queries,
    ("squad", "question"): questions.squad_questions,
    ("squad", "query"): questions.squad_queries,
    ("tevatron", "question"): questions.tevatron_questions,
    ("tevatron", "query"): as_they_are,
    ("fid", "question"): as_they_are,
    ("preference", "preference"): as_they_are,
    ("openai_preference", "preference"): preferences.openai,
    ("unpaired_preference", "preference"): as_they_are,
}
# Names of which every row of a format has one each; an empty list counts.
_NEEDED: Mapping[FormatName, tuple[tuple[str, ...], ...]] = {
    "openai": (("messages",),),
    "sharegpt": (("conversations",),),
    "alpaca": (("instruction",), ("output",)),
    "prompt_completion": (("prompt",), ("completion",)),
    "conversational": (("prompt",), ("completion",)),
    "completion": (("text",),),
    "triples": (("anchor", "query", "question"), ("positive", "answer")),
    "dpr": (("question",),),
    "kilt": (("input",),),
    "squad": (("data", "paragraphs", "question"),),
    "tevatron": (fields.QUESTIONS, questions.POSITIVES),
    "fid": (fields.QUESTIONS, ("ctxs",)),
    "preference": (("chosen",), ("rejected",)),
    "openai_preference": (("input",), ("preferred_output",), ("non_preferred_output",)),
    "unpaired_preference": (("prompt",), ("completion",), ("label",)),
}

T = TypeVar("T")


def in_our_form(
    rows: Iterable[tuple[str, Row]], own: OwnRows, layout: Layout, *, what: str, around: Around
) -> Iterator[tuple[str, Row]]:
    """(place, row) with the names of `layout`, out of rows as their files have them: of the format
    that `own` names, or else of the one that the first rows show.

    what: the file or data set, for what a run tells. DataError names the place of a row that is not
    of the format.
    """
    name = own.format
    if name is None and not own.columns:
        name, rows = _sign_of_first(iter(rows), own, layout, around)
    purpose = layout.purpose
    if name is None or purpose is None:
        yield from in_our_names(rows, own.columns, layout)
        return
    is_ours = own.format is None and name in OURS[purpose]
    names = layout if is_ours else FORMATS[name].names or layout
    placed = in_our_names(rows, own.columns, names)
    if not is_ours:
        placed = _whole(placed, name, around)
    yield from counted(READERS[name, purpose](placed, around), what, name)


def _sign_of_first(
    rows: Iterator[tuple[str, Row]], own: OwnRows, layout: Layout, around: Around
) -> tuple[FormatName | None, Iterator[tuple[str, Row]]]:
    """The format that the first rows of a split show, and all rows. Where only some rows are read,
    the split's first ones tell it, once.
    """
    some = picked.current()
    if some is None:
        first, rows = _peek(rows)
        return format_of(first, own, layout, is_labelled=around.is_labelled), rows
    key = f"format of {layout.purpose}"
    if key not in some.learnt:
        first = some.first[:_LOOKED_AT]
        some.learnt[key] = format_of(first, own, layout, is_labelled=around.is_labelled)
    return some.learnt[key], rows


def unlabelled(
    rows: Iterable[tuple[str, Row]], own: OwnRows, layout: Layout, folder: Path | None
) -> Iterator[tuple[str, Row]]:
    """The same of rows to predict, which may lack what would be learnt, and may hold our own names
    whatever format the training rows had.
    """
    around = Around(folder, is_labelled=False)
    first, rows = _peek(iter(rows))
    are_own = all(is_own(raw, layout) for _, raw in first)
    columns = columns_in(first, own.columns)
    if columns or are_own:  # else the error names the columns that are not there
        own = own.model_copy(update={"columns": columns})
    if own.format is None or own.columns or not are_own:
        placed = in_our_form(rows, own, layout, what="", around=around)
    else:
        placed = in_our_names(rows, {}, layout)
    is_chat = layout.purpose == "conversation"
    yield from instructions.sharegpt(placed, around) if is_chat else placed


def counted(rows: Iterable[T], what: str, name: FormatName) -> Iterator[T]:
    """The same rows, counted for the line that a run says about its data: "train.jsonl: Alpaca
    rows, 52,002".
    """
    for row in rows:
        count_format(f"{what}: {FORMATS[name].called} rows")
        yield row


def _whole(placed: Placed, name: FormatName, around: Around) -> Placed:
    """The rows, each of which holds what the format needs."""
    learnt = () if around.is_labelled else (("output",), ("completion",), questions.POSITIVES)
    needed = [group for group in _NEEDED[name] if group not in learnt]
    for place, raw in placed:
        for group in needed:
            if not any(one in raw for one in group):
                raise DataError(
                    f"{place}: {' or '.join(map(repr, group))} is missing (keys: "
                    f"{fields.keys(raw)}); the format {name!r} is {FORMATS[name].holds}. Add it, "
                    "or take the row out; data.columns says what your columns are called.",
                    place=place,
                    field=group[0],
                )
        yield place, raw


def _peek(
    rows: Iterator[tuple[str, Row]],
) -> tuple[list[tuple[str, Row]], Iterator[tuple[str, Row]]]:
    """The first rows, and all rows, as which the first ones are given away. An error among them is
    raised where it stands.
    """
    first: list[tuple[str, Row]] = []
    error: LatheError | None = None
    try:
        first.extend(itertools.islice(rows, _LOOKED_AT))
    except LatheError as problem:
        error = problem

    def every() -> Iterator[tuple[str, Row]]:
        while first:
            yield first.pop(0)
        if error is not None:
            raise error
        yield from rows

    return first, every()
