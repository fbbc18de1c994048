"""Where the rows of a user's own files are, and what their columns are called. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from trainer.config import mix as mixes
from trainer.config.block import Fraction, Strict
from trainer.config.formats.layouts import Layout, Purpose
from trainer.config.formats.table import FORMATS, FormatName, refusal
from trainer.config.mix import MixedSource, Mixing
from trainer.errors import nearest

if TYPE_CHECKING:
    from typing_extensions import Self  # of typing from Python 3.11 on

FROM = "from"  # in the place of a list of objects: the column that holds the list


Name = Annotated[str, Field(min_length=1)]
# A column, or for a list of objects {"from": the column of the list, our key: theirs}. The tags
# pick one kind, so that a mistake is reported for that kind alone.
Column = Annotated[
    Annotated[Name, Tag("<name>")] | Annotated[dict[str, Name], Tag("<objects>")],
    Discriminator(lambda value: "<objects>" if isinstance(value, dict) else "<name>"),
]
Columns = dict[str, Column]
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")]


class Splits(Strict):
    """The file or the name of each split; None: the usual one."""

    train: str | None = None
    """Of the split that trains."""
    valid: str | None = None
    """Of the split that is evaluated on the way."""
    test: str | None = None
    """Of the split that is evaluated at last."""


class OwnRows(Strict):
    """Rows of your own: files below --data_path, or a data set of Hugging Face `datasets`."""

    not_encoded = frozenset(
        {"files", "dataset", "subset", "revision", "splits", "columns", "valid_share", "stream"}
        | {"mix", "mixing", "valid_sets"}
    )
    # The keys that a source of `mix` may have of its own.
    of_source: ClassVar[frozenset[str]] = frozenset(
        {"source", "format", "files", "dataset", "subset", "revision", "splits", "columns"}
        | {"valid_share"}
    )
    # What the task makes of rows in a format of other people; none, where it reads no such row.
    purposes: ClassVar[tuple[Purpose, ...]] = ()
    # Keys that need every row before the first step, where they are set.
    unstreamed: ClassVar[tuple[str, ...]] = ()
    # Sources that join the rows of several files.
    unstreamed_sources: ClassVar[tuple[str, ...]] = ()
    # The sources whose rows may have such a format.
    sources_of_formats: ClassVar[tuple[str, ...]] = ("files",)

    format: FormatName | None = None
    """What the rows look like, where they have a usual name (docs/formats.md). None: our own names,
    those of `columns`, or what the first rows show.
    """
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
    "ctxs[].title", "id": "meta.id"}; of a list of objects -> {"from": its column, our key: theirs}.
    With `format`, the names of the format stand for ours.
    """
    valid_share: Fraction = 0.0
    """The share of the training rows that is the validation split, where it has no file of its own.
    """
    mix: dict[Name, MixedSource] = {}  # noqa: RUF012 (the block is frozen)
    """Several sources to train on, each with its weight: {"a.jsonl": 0.7, "b.jsonl": 0.3}, or null
    for its number of rows. A name is a file or a folder below --data_path, or a `source` without
    files; a block in the place of a weight says more: {"weight": 0.3, "dataset": "org/name",
    "format": "alpaca"} (docs/mixing.md).
    """
    mixing: Mixing = Mixing()
    """How they are mixed."""
    stream: bool = False
    """Encode the training rows while they are trained on, for millions of rows: the first step
    waits for its own rows only (docs/own-data.md). Order and losses stay the same.
    """

    valid_sets: dict[SetName, Name] = {}  # noqa: RUF012 (the block is frozen)
    """More validation sets by name: {"hard": "hard.jsonl[:500]"}, files as in `files`, or splits of
    `dataset`. Each evaluation scores them too, as "valid_hard/loss".
    """

    def of_set(self, name: str) -> Self:
        """The same rows, of which the validation split is the one of valid_sets."""
        key = "files" if self.dataset is None else "splits"
        splits: Splits = getattr(self, key)
        own = splits.model_copy(update={"valid": self.valid_sets[name]})
        return self.model_copy(update={key: own, "valid_share": 0.0})

    def layout(self) -> Layout | None:
        """What the task reads in its rows; None: the source reads no rows of a person's own."""
        return None

    def names(self) -> Layout | None:
        """What `columns` may map: names of the format, else those of the task; None: nothing."""
        layout = self.layout()
        return layout if layout is None or self.format is None else FORMATS[self.format].names

    @property
    def reads(self) -> str | None:
        """What decides how rows are read: the format, else the source."""
        return self.format or getattr(self, "source", None)

    def names_files(self) -> bool:
        """Whether the source reads files that `files` can name."""
        return self.layout() is not None

    def part(self, name: str) -> Self:
        """The block of one source of `mix`, as if it were the only one. ValueError for one that is
        wrong.

        A source has the keys of this block, but for where the rows are; one that names a `source`
        of its own says itself how its rows are read.
        """
        entry = self.mix[name]
        block = dict(entry) if isinstance(entry, dict) else {}
        block.pop(mixes.WEIGHT, None)
        unknown = [key for key in block if key not in self.of_source]
        if unknown:
            legal = sorted({*self.of_source, mixes.WEIGHT})
            raise ValueError(
                f"{unknown[0]!r} is no key of one source. {nearest(unknown[0], legal)}"
            )
        source = block.get("source", getattr(self, "source", None))
        reads_files = self.model_copy(update={"source": source}).names_files()
        if "dataset" not in block and (reads_files or "source" not in block):
            place = self.place_of(name)
            files = {**place.get("files", {}), **block.get("files", {})}
            block = {**place, **block}
            if files:
                block["files"] = files
        left_out = {"mix", "mixing", "files", "dataset", "subset", "revision", "splits"}
        left_out |= self.of_source if "source" in block else set()
        left_out |= {"columns"} if "format" in block else set()
        own = self.model_dump(mode="json", exclude_unset=True, exclude=left_out)
        return type(self).model_validate_json(json.dumps({**own, **block}), strict=True)

    def place_of(self, name: str) -> dict[str, Any]:
        """The keys that the name of a source alone stands for."""
        sources = get_args(type(self).model_fields["source"].annotation)
        if name in sources and not self.model_copy(update={"source": name}).names_files():
            return {"source": name}
        return {"files": {"train": name}}

    def has_own_rows(self, split: str) -> bool:
        """Whether a source, as `part` gives it, has rows of "valid" or "test" beside those that
        train.
        """
        if self.layout() is None and not self.names_files():
            return True
        is_named = getattr(self.files, split) is not None or self.dataset is not None
        return is_named or (split == "valid" and self.valid_share > 0)

    @model_validator(mode="after")
    def _the_mix_is_whole(self) -> OwnRows:
        problems = list(mixes.problems(self))
        for name in self.mix:
            try:
                self.part(name)
            except ValidationError as error:
                reasons = [one["msg"].removeprefix("Value error, ") for one in error.errors()]
                problems.append(f"mix[{name!r}]: {'; '.join(reasons)}")
            except ValueError as error:
                problems.append(f"mix[{name!r}]: {error}")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _the_task_reads_the_format(self) -> OwnRows:
        source = getattr(self, "source", None)
        if self.format is None or source is None:
            return self
        if not set(self.purposes) & FORMATS[self.format].serves.keys():
            raise ValueError(refusal(self.format, self.purposes))
        if source not in self.sources_of_formats:
            legal = " or ".join(f'"{one}"' for one in self.sources_of_formats)
            raise ValueError(
                f"format={self.format!r} with source={source!r}, which says what its rows look "
                f"like: leave one of them out, or use source={legal}"
            )
        return self

    @model_validator(mode="after")
    def _the_source_reads_own_rows(self) -> OwnRows:
        source = getattr(self, "source", None)
        if source is None:
            return self
        if self.files != Splits() and not self.names_files():
            raise ValueError(f"source={source!r} names no files: leave them out")
        if self.valid_sets and not self.names_files():
            raise ValueError(f"valid_sets are files, and source={source!r} has none: leave it out")
        if self.names() is not None:
            return self
        own_keys = [name for name in ("dataset", "columns", "valid_share") if getattr(self, name)]
        if own_keys:
            what = (
                f"source={source!r} reads no rows of your own"
                if self.format is None
                else f"format={self.format!r} has files with names and columns of their own"
            )
            raise ValueError(f"{what}: leave out {' and '.join(own_keys)}")
        return self

    @model_validator(mode="after")
    def _a_stream_can_be_read(self) -> OwnRows:
        if not self.stream:
            return self
        if self.mix:
            raise ValueError(
                "stream=True with mix, whose sources are encoded and counted before the first "
                "step: leave one of the two out"
            )
        if self.names() is None or self.reads in self.unstreamed_sources:
            raise ValueError(
                f"stream=True wants rows that stand one by one in files of yours, "
                f"{self.reads!r} has none such: leave stream out"
            )
        if self.valid_share:
            raise ValueError(
                f"stream=True with valid_share={self.valid_share}, which has to read every row "
                "before the first step: give the validation split a file of its own, or leave "
                "stream out"
            )
        whole = [name for name in self.unstreamed if getattr(self, name)]
        if whole:
            raise ValueError(
                f"stream=True with {' and '.join(whole)}, for which every row has to be read "
                "before the first step: leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _columns_are_ours(self) -> OwnRows:
        layout = self.names()
        if layout is None:
            return self
        reader = (
            f"source={getattr(self, 'source', None)!r}"
            if self.format is None
            else f"format={self.format!r}"
        )
        legal = layout.legal()
        for name, column in self.columns.items():
            if name not in legal:
                raise ValueError(
                    f"columns: {name!r} is no field of {reader}. {nearest(name, legal)} "
                    f"Our name comes first, then yours; ours are {', '.join(legal)}"
                )
            if not isinstance(column, str):
                _check_objects(name, column, layout)
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


def _check_objects(name: str, keys: Mapping[str, str], layout: Layout) -> None:
    """ValueError when `name` is no list of objects, or its objects have no such key."""
    inner = dict(layout.objects).get(name)
    if inner is None:
        lists = [outer for outer, _ in layout.objects]
        advice = f"only {', '.join(lists)} is" if lists else "none of its fields is"
        raise ValueError(
            f"columns: {name!r} is no list of objects here, {advice}: write the name of a column, "
            f'{{"{name}": "{keys.get(FROM, "its column")}"}}'
        )
    if FROM not in keys:
        raise ValueError(
            f'columns.{name}: no "from", which is the column of the list: '
            f'{{"{name}": {{"from": "turns", ...}}}}'
        )
    unknown = next((key for key in keys if key not in (FROM, *inner)), None)
    if unknown is not None:
        raise ValueError(
            f"columns.{name}: {unknown!r} is no key of its objects. {nearest(unknown, [*inner])} "
            f'"from" is the column of the list; ours are {", ".join(inner)}'
        )
