"""Where the rows of a user's own files are, and what their columns are called. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, model_validator

from trainer.config.block import Fraction, Strict
from trainer.errors import nearest

Columns = dict[str, Annotated[str, Field(min_length=1)]]


class Splits(Strict):
    """The file or the name of each split; None: the usual one."""

    train: str | None = None
    """Of the split that trains."""
    valid: str | None = None
    """Of the split that is evaluated on the way."""
    test: str | None = None
    """Of the split that is evaluated at last."""


@dataclass(frozen=True)
class Layout:
    """The names that a kind of row may hold, which `columns` may map."""

    # Names of one and the same thing each. The first one that a row has tells rows apart:
    # data.valid_share holds out by its value.
    groups: tuple[tuple[str, ...], ...]
    lists: frozenset[str] = frozenset()  # names whose value is a list, or a text that holds one
    # names of lists of objects, each with the names of its objects: "ctxs[].text"
    objects: tuple[tuple[str, tuple[str, ...]], ...] = ()

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
    lists=frozenset({"answers", "contexts", "ctxs", "titles", "useful_contexts"}),
    objects=(("ctxs", _PASSAGE),),
)
TEVATRON = Layout(
    (
        ("query", "query_text", "question", "text"),
        ("query_id", "_id", "qid", "id"),
        ("positive_passages", "positive_docids", "positive_document_ids"),
        ("negative_passages", "negative_docids", "negative_document_ids"),
    ),
    lists=frozenset(
        f"{side}_{kind}"
        for side in ("positive", "negative")
        for kind in ("passages", "docids", "document_ids")
    ),
    objects=(("positive_passages", _PASSAGE), ("negative_passages", _PASSAGE)),
)
TEXTS = Layout((("text",),))
COMPLETIONS = Layout((("prompt",), ("completion",), ("input",)))
CHATS = Layout(
    (("messages",), ("prompt",), ("completion",), ("tools",), ("system",), ("input",)),
    lists=frozenset({"messages", "tools"}),
    objects=(("messages", ("role", "content", "weight", "tool_calls")),),
)
SUMMARIES = Layout((("document",), ("summary",), ("id",)), lists=frozenset())
STATEMENTS = Layout(
    (("golds", "statement"), ("distractors", "label")),
    lists=frozenset({"golds", "distractors"}),
)


class OwnRows(Strict):
    """Rows of your own: files below --data_path, or a data set of Hugging Face `datasets`."""

    not_encoded = frozenset(
        {"files", "dataset", "subset", "revision", "splits", "columns", "valid_share"}
    )

    files: Splits = Splits()
    """.jsonl, .json, .csv, .tsv or .parquet, each also .gz, or a folder of them; usual: train.*,
    valid.* (val, dev, validation), test.*. Behind a name may stand a part of its rows:
    "train.csv[:100]", or "[:10%]" of the usual file.
    """
    dataset: str | None = None
    """Read instead of files: a Hub id, a folder of files or one of save_to_disk (also below
    --data_path).
    """
    subset: str | None = None
    """Of `dataset`: its configuration, such as "3.0.0" of cnn_dailymail."""
    revision: str | None = None
    """Of `dataset`: a commit or tag on the Hub."""
    splits: Splits = Splits()
    """Of `dataset`: the names of its splits, or parts of them ("train[:100]"); usual: train,
    validation, test.
    """
    columns: Columns = {}  # noqa: RUF012 (the block is frozen)
    """Our name of a field -> the column that holds it: {"question": "query", "titles":
    "ctxs[].title", "id": "meta.id"}.
    """
    valid_share: Fraction = 0.0
    """The share of the training rows that is the validation split, where it has no file of its own.
    """

    def layout(self) -> Layout | None:
        """What the rows hold; None: the source reads no rows that `columns` could rename."""
        return None

    def names_files(self) -> bool:
        """Whether the source reads files that `files` can name."""
        return self.layout() is not None

    @model_validator(mode="after")
    def _the_source_reads_own_rows(self) -> OwnRows:
        source = getattr(self, "source", None)
        if source is None:
            return self
        if self.files != Splits() and not self.names_files():
            raise ValueError(f"source={source!r} names no files: leave them out")
        if self.layout() is not None:
            return self
        own_keys = [name for name in ("dataset", "columns", "valid_share") if getattr(self, name)]
        if own_keys:
            raise ValueError(
                f"source={source!r} reads no rows of your own: leave out {' and '.join(own_keys)}"
            )
        return self

    @model_validator(mode="after")
    def _columns_are_ours(self) -> OwnRows:
        layout, source = self.layout(), getattr(self, "source", None)
        if layout is None:
            return self
        legal = layout.legal()
        for name in self.columns:
            if name not in legal:
                raise ValueError(
                    f"columns: {name!r} is no field of source={source!r}. {nearest(name, legal)} "
                    f"Our name comes first, then yours; ours are {', '.join(legal)}"
                )
        for group in layout.groups:
            mapped = {name.partition("[]")[0] for name in self.columns} & set(group)
            if len(mapped) > 1:
                raise ValueError(
                    f"columns: {' and '.join(sorted(mapped))} are names of one thing: map one"
                )
        return self

    @model_validator(mode="after")
    def _the_data_set_is_named(self) -> OwnRows:
        if self.dataset is None and (self.subset or self.revision or self.splits != Splits()):
            raise ValueError(
                "subset, revision and splits are of a data set: name it in `dataset`, or leave "
                "them out"
            )
        if self.valid_share and (self.files.valid or self.splits.valid):
            raise ValueError(
                f"valid_share={self.valid_share} takes the validation rows from those of training: "
                "name no valid split, or leave it out"
            )
        return self
