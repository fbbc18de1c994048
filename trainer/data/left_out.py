"""What readers leave out of the data, or doubt: counted, told, written to one file, or refused.

A reader calls note() for every row, text, passage or field that it leaves out or doubts. reading()
counts the notes of one reading of a split; a command or a run gathers those of all its splits and
settles them when all rows have been read once: --strict refuses them.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.formats.json_text import preview
from trainer.data.formats.lists import doubt_of
from trainer.errors import DataError
from trainer.files.atomic import refusals, replace_file

if TYPE_CHECKING:
    from trainer.protocol.task import Row

FILE = "left_out.jsonl"
NAMED = 1000  # notes of one reason that the file names; the others are counted
IN_TRAIN = "rows that are training rows as well (measured on them is memory, not learning)"
_SHOWN = 3  # places in a message
_KEYS = 12  # keys in a message
_PLACE = re.compile(r"(?P<file>.+), (?P<unit>line|row|item) (?P<number>\d+)$", re.DOTALL)

_EMPTY: tuple[Any, ...] = (None, "", [], {})
# What readers know to be no content, even where another key names the row.
_KNOWN = frozenset(
    {"id", "_id", "qid", "query_id", "docid", "passage_id", "psg_id", "split", "metadata"}
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Note:
    """One thing that was left out, or that is doubted."""

    place: str  # "train.jsonl, line 3", or the id of a question
    # what such things are called, many of them: "questions without a positive passage (left out)"
    why: str
    field: str | None = None


@dataclass
class ReadKeys:
    """The keys of raw rows (WatchedRow), and which of them were read."""

    held: dict[str, int] = field(default_factory=dict[str, int])  # how many rows hold each
    read: set[str] = field(default_factory=set[str])

    def unread(self) -> dict[str, int]:
        """How many rows hold each key that nothing has read."""
        return {name: count for name, count in self.held.items() if name not in self.read}

    def line(self) -> str:
        """A line such as "nothing reads 'url' (2,000 rows), 'date' (90 rows)"; "" where all was
        read.
        """
        unread = self.unread()
        keys = [f"{preview(name)} ({count:,} rows)" for name, count in unread.items()]
        more = f" and {len(keys) - _KEYS} more keys" if len(keys) > _KEYS else ""
        return f"nothing reads {', '.join(keys[:_KEYS])}{more}" if keys else ""


@dataclass
class Notes:
    """The notes of one reading. Their number is bounded, their counts are not."""

    counts: dict[str, int] = field(default_factory=dict[str, int])  # by reason
    first: list[Note] = field(default_factory=list[Note])
    keys: ReadKeys = field(default_factory=ReadKeys)
    formats: dict[str, int] = field(default_factory=dict[str, int])  # "train.jsonl: Alpaca rows"

    def add(self, note: Note, *, count: int = 1) -> None:
        """Add a note; count: how many more things it stands for, itself included."""
        number = self.counts.get(note.why, 0)
        self.counts[note.why] = number + count
        if number < NAMED:
            self.first.append(note)

    def updated(self, notes: Notes) -> Notes:
        """These notes with the ones of another reading, which replace those of the same reason."""
        first = [one for one in self.first if one.why not in notes.counts]
        keys = ReadKeys(self.keys.held | notes.keys.held, self.keys.read | notes.keys.read)
        formats = self.formats | notes.formats
        return Notes(self.counts | notes.counts, first + notes.first, keys, formats)

    def merge(self, notes: Notes) -> None:
        """Add the notes of other rows of the same split."""
        counts = Counter(one.why for one in self.first)
        for one in notes.first:
            if counts[one.why] < NAMED:
                self.first.append(one)
                counts[one.why] += 1
        for mine, other in (
            (self.counts, notes.counts),
            (self.keys.held, notes.keys.held),
            (self.formats, notes.formats),
        ):
            for name, count in other.items():
                mine[name] = mine.get(name, 0) + count
        self.keys.read |= notes.keys.read

    def record(self) -> dict[str, Any]:
        """The notes as plain JSON, for of()."""
        first = [asdict(note) for note in self.first]
        unread = self.keys.unread()
        return {"counts": self.counts, "first": first, "unread": unread, "formats": self.formats}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Notes:
        first = [Note(**note) for note in record["first"]]
        keys = ReadKeys(dict(record.get("unread", {})))
        return cls(dict(record["counts"]), first, keys, dict(record.get("formats", {})))

    def __bool__(self) -> bool:
        return bool(self.counts)

    def line(self, *, with_places: bool = False) -> str:
        """The counts in one line, for example "2 blank summaries (left out)".

        with_places: the first places of each reason are named.
        """
        parts: list[str] = []
        for why, count in self.counts.items():
            places = [note.place for note in self.first if note.why == why][:_SHOWN]
            more = ", ..." if count > len(places) else ""
            parts.append(f"{count:,} {why}")
            if with_places:
                parts[-1] += f": {'; '.join(places)}{more}"
        return "; ".join(parts)

    def lines(self, split: str) -> Iterator[dict[str, Any]]:
        """The lines of the file, of one split."""
        counts: dict[str, int] = {}
        for note in self.first:
            counts[note.why] = counts.get(note.why, 0) + 1
            yield {"split": split, **parts_of(note.place), "field": note.field, "why": note.why}
        for why, count in self.counts.items():
            if count > counts.get(why, 0):
                yield {"split": split, "why": why, "more": count - counts.get(why, 0)}


def parts_of(place: str) -> dict[str, Any]:
    """A place as {"file": "train.jsonl", "line": 3}; {"place": ...} of any other one."""
    match = _PLACE.match(place)
    if match is None:
        return {"place": place}
    return {"file": match["file"], match["unit"]: int(match["number"])}


Gathered = dict[str, Notes]  # by split, or by what else was read
_reading: ContextVar[Notes | None] = ContextVar("reading", default=None)
_gathering: ContextVar[Gathered | None] = ContextVar("gathering", default=None)


def note(place: str, why: str, *, field: str | None = None, count: int = 1) -> None:
    """Say that a reader leaves something out, or doubts it (see Note). Nothing happens when rows
    are read again, outside of reading().
    """
    notes = _reading.get()
    if notes is not None:
        notes.add(Note(place, why, field), count=count)


def doubt(value: Any, place: str, name: str, *, is_list: bool) -> None:
    """Note a text of the field `name` that was probably meant to be something else (doubt_of)."""
    why = doubt_of(value, name, is_list=is_list)
    if why is not None:
        note(place, why, field=name)


def count_format(called: str) -> None:
    """Count a row of a file that is in a format of other people: "train.jsonl: Alpaca rows"."""
    notes = _reading.get()
    if notes is not None:
        notes.formats[called] = notes.formats.get(called, 0) + 1


def current() -> Notes | None:
    """The notes of the reading that goes on, if any."""
    return _reading.get()


@contextmanager
def reading() -> Iterator[Notes]:
    """Inside, notes are counted in what this yields. A reading inside another one has its own."""
    notes = Notes()
    token = _reading.set(notes)
    try:
        yield notes
    finally:
        _reading.reset(token)


@contextmanager
def gathering() -> Iterator[Gathered]:
    """Inside, the notes of every split that is read are gathered, to be settled together."""
    notes_of: Gathered = {}
    token = _gathering.set(notes_of)
    try:
        yield notes_of
    finally:
        _gathering.reset(token)


def gather(split: str, notes: Notes) -> None:
    """Add the notes of a split that was read; where nobody gathers them, they are told at once.
    Whatever is said again of a reason replaces what was said of it before.
    """
    notes_of = _gathering.get()
    if notes_of is not None:
        notes_of[split] = notes_of.get(split, Notes()).updated(notes)
    elif notes:
        log.warning("%s: %s", split, notes.line(with_places=True))


def of_mix(split: str, source: str) -> str:
    """The name under which the notes of one source of a split are gathered (data.mix)."""
    return f"{split}, {source}"


@contextmanager
def gathering_of_source(split: str, source: str) -> Iterator[None]:
    """Inside, the notes of a split are gathered under the name of one of its sources."""
    with gathering() as own:
        yield
    for notes in own.values():
        gather(of_mix(split, source), notes)


def gathered() -> Gathered:
    """What is gathered, by split."""
    return _gathering.get() or {}


def of_split(split: str) -> Notes:
    """The gathered notes of a split; none where it was not read, or nobody gathers."""
    return (_gathering.get() or {}).get(split, Notes())


def refusing(rows: Iterable[Row], what: str, *, strict: bool) -> Iterator[Row]:
    """The same rows, then what one_reading() says: whoever writes them gets the DataError before
    the file is in its place.
    """
    with one_reading(what, strict=strict):
        yield from rows


@contextmanager
def one_reading(what: str, *, strict: bool) -> Iterator[Notes]:
    """The notes of what is read inside, told at its end; DataError under --strict. For a command
    that reads in one place.
    """
    with reading() as notes:
        yield notes
    if notes:
        refuse({what: notes}, strict=strict)
        log.warning("%s: %s", what, notes.line(with_places=True))


@contextmanager
def settling(folder: Path | None, *, strict: bool) -> Iterator[None]:
    """What is gathered inside is settled at the end: see settle()."""
    with gathering():
        yield
        settle(folder, strict=strict)


def refuse(notes_of: Gathered, *, strict: bool) -> None:
    """DataError if `strict` is set and anything was left out or is doubted."""
    doubts = [
        f"{split}: {notes.line(with_places=True)}" for split, notes in notes_of.items() if notes
    ]
    if strict and doubts:
        lines = "\n".join(doubts)
        raise DataError(
            f"--strict: got what is left out of the data, or doubted, want nothing.\n{lines}\nMend "
            "these rows or take them out of the files; or leave --strict out."
        )


def settle(folder: Path | None, *, strict: bool) -> None:
    """Write what was gathered to the one file in `folder` (None: nowhere), tell it, and refuse it
    under --strict. An older file goes when there is nothing.
    """
    notes_of = _gathering.get() or {}
    if folder is not None:
        write(folder / FILE, notes_of)
    refuse(notes_of, strict=strict)
    for split, notes in notes_of.items():
        if notes:
            log.warning("%s: %s", split, notes.line(with_places=True))


def write(path: Path, notes_of: Gathered, *, error: DataError | None = None) -> None:
    """Write the notes, and the row that was refused, as JSON lines; without any, `path` goes.

    error: of a row; one without a place is of none, and is not written.
    """
    lines = [line for split, notes in notes_of.items() for line in notes.lines(split)]
    if error is not None and error.place is not None:
        lines.append(
            {**parts_of(error.place), "field": error.field, "why": str(error), "is_refused": True}
        )
    with refusals(path):
        if lines:
            path.parent.mkdir(parents=True, exist_ok=True)  # a row may be refused before a run is
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            replace_file(path, text.encode("utf-8", "backslashreplace"))
        else:
            path.unlink(missing_ok=True)


# Keys that nothing reads
# --------------------------------------------------------------------------------------------------


class WatchedRow(dict[str, Any]):
    """A raw row. The first look at one of its keys counts the keys that it holds; `[]`, get() and
    `in` count a key as read, and so does nothing else.
    """

    def __init__(self, values: Mapping[str, Any], held: Iterable[str], keys: ReadKeys) -> None:
        """held: the keys of the row as its file has them."""
        super().__init__(values)
        self._held: Iterable[str] | None = held
        self._keys = keys

    def __getitem__(self, name: str) -> Any:
        self._look_at(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._look_at(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._look_at(name)
        return super().get(name, default)

    def _look_at(self, name: Any) -> None:
        if self._held is not None:
            for one in self._held:
                self._keys.held[one] = self._keys.held.get(one, 0) + 1
            self._held = None
        self._keys.read.add(name)


def watched(
    row: dict[str, Any],
    *,
    raw: Mapping[str, Any] | None = None,
    sources: Iterable[str] = (),
    replaced: Iterable[str] = (),
) -> dict[str, Any]:
    """The row; while a split is read (left_out.reading), as a WatchedRow.

    raw: the row as its file has it, where columns were renamed: `sources` are the columns that were
    read for that, `replaced` those whose place another one took.
    """
    notes = current()
    if notes is None:
        return row
    raw, sources = row if raw is None else raw, set(sources)
    lost = {name for name in replaced if name not in sources}
    keys = [
        f"{name} (replaced by data.columns)" if name in lost else str(name)
        for name, value in raw.items()
        if _is_content(name, value, sources)
    ]
    return WatchedRow(row, keys, notes.keys)


def count_unread(name: str, objects: Iterable[Mapping[str, Any]], read: Collection[str]) -> None:
    """Count a row for each key of the objects in its list `name` that is not among those which are
    read: "messages[].exclude". Nothing happens outside of reading().
    """
    notes = current()
    if notes is None:
        return
    keys = {
        f"{name}[].{key}"
        for one in objects
        for key, value in one.items()
        if key not in read and _is_content(key, value, set())
    }
    for key in keys:
        notes.keys.held[key] = notes.keys.held.get(key, 0) + 1


def _is_content(name: str, value: Any, sources: set[str]) -> bool:
    is_empty = isinstance(value, str | list | dict | None) and value in _EMPTY
    return name not in _KNOWN and name not in sources and not is_empty
