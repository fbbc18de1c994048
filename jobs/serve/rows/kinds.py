"""The kinds of uploaded rows: the keys of each, its mistakes, and what a task reads of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from jobs.serve.rows.preferences import preference_problems, preference_row
from jobs.serve.rows.turns import chat_problems, quote
from trainer.config.formats import layouts
from trainer.data.formats.lists import as_list
from trainer.data.formats.normal_form import is_blank
from trainer.errors import DataError

Row = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of row.

    needs: keys that every row of it has. problems: finds the mistakes in a row, as (got, want).
    files_row: converts a row and its number to the row that a task reads. data: task -> keys of its
    `data` block that make it read such rows. layout: the names of these rows, as all these tasks
    know them.
    """

    needs: tuple[str, ...]
    problems: Callable[[Row], Iterator[tuple[str, str]]]
    files_row: Callable[[Row, int], Row]
    data: Mapping[str, dict[str, Any]]
    layout: layouts.Layout


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not is_blank(value)


def _texts(row: Row, *names: str) -> Iterator[tuple[str, str]]:
    """Mistakes of the keys whose value is not a text, or is blank."""
    for name in names:
        if not _is_text(row.get(name)):
            yield f"{name}={quote(row.get(name))}", f"{name} as text that is not blank"


def _lists(row: Row, *names: str) -> Iterator[tuple[str, str]]:
    """Mistakes of the keys whose value is neither a text nor a list of texts."""
    for name in names:
        if not _are_texts(_items(row, name)):
            yield f"{name}={quote(row.get(name))}", f"{name} as text, or a list of texts"


def _are_texts(values: list[Any]) -> bool:
    return bool(values) and all(map(_is_text, values))


def _items(row: Row, name: str) -> list[Any]:
    """The items of a list, or of a text that is one, by the rule of the trainings; a list of any
    other value. Empty for what looks like a list and cannot be read as one.
    """
    try:
        values = as_list(row.get(name), "row", name)
    except DataError:
        return []
    return cast("list[Any]", values) if isinstance(values, list) else [values]


# Other rows
# --------------------------------------------------------------------------------------------------


def _triple_problems(row: Row) -> Iterator[tuple[str, str]]:
    yield from _texts(row, "query")
    for name in ("positive", "negative"):
        if not _are_texts(_as_it_stands(row[name])):
            yield f"{name}={quote(row[name])}", f"{name} as text, or a list of texts"


def _as_it_stands(value: Any) -> list[Any]:
    """A passage's text may look like a list: it is none, as in triples of the trainings."""
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _passages(row: Row, number: int, name: str) -> list[Row]:
    texts = _as_it_stands(row[name])
    return [{"docid": f"{number}-{name}-{i}", "text": text} for i, text in enumerate(texts)]


def _label(row: Row) -> str | None:
    """A label as "true" or "false"; None for any other label."""
    text = str(row["label"]).strip().lower()
    return {"true": "true", "1": "true", "false": "false", "0": "false"}.get(text)


def _question_problems(row: Row) -> Iterator[tuple[str, str]]:
    extras = [name for name in ("titles", "target") if row.get(name) is not None]
    yield from _texts(row, "question", *(name for name in extras if name == "target"))
    yield from _lists(row, "contexts", "answers", *(name for name in extras if name == "titles"))
    num_titles, num_contexts = len(_items(row, "titles")), len(_items(row, "contexts"))
    if "titles" in extras and num_titles != num_contexts:
        yield f"{num_titles} titles for {num_contexts} contexts", "one title for each context"


def _question_row(row: Row, number: int) -> Row:
    contexts = _items(row, "contexts")
    titles = [""] * len(contexts) if row.get("titles") is None else _items(row, "titles")
    passages = zip(titles, contexts, strict=True)
    values: Row = {
        "id": str(number),
        "question": row["question"],
        "answers": _items(row, "answers"),
        "contexts": contexts,  # of cross_attention with source "jsonl"
        "ctxs": [{"title": title, "text": text} for title, text in passages],  # of fid
    }
    return values if row.get("target") is None else {**values, "target": row["target"]}


def _statement_problems(row: Row) -> Iterator[tuple[str, str]]:
    yield from _texts(row, "statement")
    if _label(row) is None:
        yield f"label={quote(row['label'])}", "label as true or false"


def _group_problems(row: Row) -> Iterator[tuple[str, str]]:
    yield from _lists(row, "golds", "distractors")
    if len(_items(row, "golds")) > 1:
        yield f"{len(_items(row, 'golds'))} golds", "one gold"


def _as_it_is(row: Row, number: int) -> Row:
    return row


def _verifier(*boolean: str) -> dict[str, dict[str, Any]]:
    """Keys of vera's `data` block that make it read the rows as one task."""
    names = {"train_tasks": ["statements"], "valid_tasks": ["statements"], "test_tasks": []}
    return {"vera": {"source": "files", **names, "boolean": list(boolean)}}


# A row is of the first kind whose keys it has.
KINDS: dict[str, Kind] = {
    "chat": Kind(
        ("messages",),
        chat_problems,
        _as_it_is,
        {"causal_lm": {"source": "chat", "loss_on": "answer"}},
        layouts.CHATS,
    ),
    "preference": Kind(
        ("input", "preferred_output", "non_preferred_output"),
        preference_problems,
        preference_row,
        {"preference": {"source": "chat"}},
        layouts.PREFERENCES,
    ),
    "completion": Kind(
        ("prompt", "completion"),
        lambda row: _texts(row, "prompt", "completion"),
        _as_it_is,
        {"causal_lm": {"source": "jsonl", "loss_on": "answer", "chat_template": None}},
        layouts.COMPLETIONS,
    ),
    "triple": Kind(
        ("query", "positive", "negative"),
        _triple_problems,
        lambda row, number: {
            "query_id": str(number),
            "query": row["query"],
            "positive_passages": _passages(row, number, "positive"),
            "negative_passages": _passages(row, number, "negative"),
        },
        {"retriever": {"source": "tevatron"}},
        layouts.TEVATRON,
    ),
    "question": Kind(
        ("question", "contexts", "answers"),
        _question_problems,
        _question_row,
        {
            "cross_attention": {"source": "jsonl"},
            "fid": {
                "source": "fid",
                "files": {"train": "train.jsonl", "valid": "valid.jsonl"},
            },
        },
        layouts.QUESTIONS,
    ),
    "document": Kind(
        ("document", "summary"),
        lambda row: _texts(row, "document", "summary"),
        _as_it_is,
        {
            "summariser": {
                "source": "files",
                "document": "document",
                "summaries": ["summary"],
            }
        },
        layouts.SUMMARIES,
    ),
    "statement": Kind(
        ("statement", "label"),
        _statement_problems,
        lambda row, _: {"statement": row["statement"], "label": _label(row)},
        _verifier("statements"),
        layouts.STATEMENTS,
    ),
    "group": Kind(
        ("golds", "distractors"),
        _group_problems,
        lambda row, _: {name: _items(row, name) for name in ("golds", "distractors")},
        _verifier(),
        layouts.STATEMENTS,
    ),
    "text": Kind(
        ("text",),
        lambda row: _texts(row, "text"),
        _as_it_is,
        {"causal_lm": {"source": "jsonl", "loss_on": "all", "chat_template": None}},
        layouts.TEXTS,
    ),
}
