"""The names that rows may hold, which `data.columns` may map. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# What a task makes of a row.
Purpose = Literal[
    "conversation",
    "completion",
    "text",
    "question",
    "query",
    "summary",
    "statement",
    "preference",
]


@dataclass(frozen=True)
class Layout:
    """The names that a kind of row may hold, which `columns` may map."""

    # Names of one and the same thing each. The first one that a row has tells rows apart:
    # data.valid_share holds out by its value.
    groups: tuple[tuple[str, ...], ...]
    lists: frozenset[str] = frozenset()  # names whose value is a list, or a text that holds one
    # names of lists of objects, each with the names of its objects: "ctxs[].text"
    objects: tuple[tuple[str, tuple[str, ...]], ...] = ()
    purpose: Purpose | None = None  # None: no format of other people has such rows

    def legal(self) -> list[str]:
        """Every name that `columns` may map."""
        names = [name for group in self.groups for name in group]
        nested = [f"{outer}[].{inner}" for outer, inners in self.objects for inner in inners]
        return [*names, *nested]

    def alternatives(self, name: str) -> tuple[str, ...]:
        """The names that stand for the same as `name`, itself included."""
        outer = name.partition("[]")[0]
        return next(group for group in self.groups if outer in group)


_PASSAGE = ("id", "title", "text", "score")
_CONTEXTS = ("contexts", "context", "ctxs")

# A question with its answers and contexts: one file for cross_attention, fid and retriever.
QUESTIONS = Layout(
    (
        ("question", "query", "query_text", "text"),
        ("id", "query_id", "_id", "qid"),
        ("answers", "answer"),
        _CONTEXTS,
        ("titles", "title"),
        ("useful_contexts",),
        ("target",),
        ("dataset",),
    ),
    purpose="question",
    lists=frozenset({"answers", "contexts", "ctxs", "titles", "useful_contexts"}),
    objects=(("ctxs", _PASSAGE),),
)
# The same of a retriever, which looks for the passages among the contexts.
QUERIES = replace(QUESTIONS, groups=(*QUESTIONS.groups, ("topic",)), purpose="query")
TEVATRON = Layout(
    (
        ("query", "query_text", "question", "text"),
        ("query_id", "_id", "qid", "id"),
        ("positive_passages", "positive_docids", "positive_document_ids"),
        ("negative_passages", "negative_docids", "negative_document_ids"),
        ("topic",),
    ),
    purpose="query",
    lists=frozenset(
        f"{side}_{kind}"
        for side in ("positive", "negative")
        for kind in ("passages", "docids", "document_ids")
    ),
    objects=(("positive_passages", _PASSAGE), ("negative_passages", _PASSAGE)),
)
TEXTS = Layout((("text",),), purpose="text")
COMPLETIONS = Layout((("prompt",), ("completion",), ("input",)), purpose="completion")
CHATS = Layout(
    (("messages",), ("prompt",), ("completion",), ("tools",), ("system",), ("input",)),
    purpose="conversation",
    lists=frozenset({"messages", "tools"}),
    objects=(("messages", ("role", "content", "weight", "tool_calls")),),
)
PREFERENCES = Layout(
    (
        ("prompt",),
        ("chosen",),
        ("rejected",),
        ("completion",),
        ("label",),
        ("tools",),
        ("system",),
        ("margin",),
        ("score_chosen",),
        ("score_rejected",),
    ),
    purpose="preference",
    lists=frozenset({"tools"}),
)
SUMMARIES = Layout((("document",), ("summary",), ("id",)), purpose="summary")
STATEMENTS = Layout(
    (("golds", "statement"), ("distractors", "label")),
    purpose="statement",
    lists=frozenset({"golds", "distractors"}),
)
