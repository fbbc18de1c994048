"""Uploaded rows: their kinds, the mistakes in a file, and its conversion to what a task reads.

Needs no torch and reads one line at a time. A mistake says line, got and want. A report counts all
mistakes of a file and names the first ones.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from trainer.config.formats import layouts
from trainer.data.formats import conversation
from trainer.data.formats.held_out import PLACES, place_of_row
from trainer.data.formats.json_text import BadJson, json_value
from trainer.data.formats.lists import as_list
from trainer.data.formats.normal_form import is_blank
from trainer.errors import DataError
from trainer.files.atomic import aside, open_file

Row = dict[str, Any]
MAX_MISTAKES = 20
MAX_LINE = 8 << 20  # bytes; a longer line is refused
MAX_VALUES = 100_000  # of one row; Python needs up to 250 bytes for one of two bytes, such as {}
TEXT_OR_SIGN = re.compile(rb'"[^"]*"?|[,\[{]')  # once no text holds an escaped quote


class Mistake(NamedTuple):
    """A mistake in a line. line: counted from 1."""

    line: int
    got: str
    want: str

    def __str__(self) -> str:
        return f"line {self.line}: got {self.got}, want {self.want}"


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


@dataclass
class RowReport:
    """The number and kind of the rows in a file, and its mistakes."""

    num_rows: int = 0
    kind: str | None = None  # of the first row that has a kind
    num_mistakes: int = 0
    mistakes: list[Mistake] = field(default_factory=list[Mistake])  # the first ones
    # how many rows without a mistake have each place (place_of_row)
    places: Counter[int] = field(default_factory=Counter[int])

    def add(self, line: int, got: str, want: str) -> None:
        self.num_mistakes += 1
        if len(self.mistakes) < MAX_MISTAKES:
            self.mistakes.append(Mistake(line, got, want))


def check(path: Path, kinds: Sequence[str] | None = None) -> RowReport:
    """Check a JSON-lines file whose rows are all of one kind, among `kinds` (None: all kinds)."""
    report = RowReport()
    allowed = list(kinds or KINDS)
    for line, content in _lines(path):
        row = _object(report, line, content)
        if row is None:
            continue
        report.num_rows += 1
        kind = kind_of(row, allowed)
        if kind is None:
            want = " or ".join(
                f"{name} rows with {', '.join(KINDS[name].needs)}" for name in allowed
            )
            report.add(line, f"the keys {_cut(', '.join(sorted(row)))}", want)
        elif report.kind not in (None, kind):
            report.add(line, f"a {kind} row", f"a {report.kind} row, as before")
        else:
            report.kind = kind
            problems = list(KINDS[kind].problems(row))
            for got, want in problems:
                report.add(line, got, want)
            if not problems:
                report.places[_place(row, kind)] += 1
    if not report.num_rows and not report.num_mistakes:
        report.add(1, "an empty file", "one JSON object on every line")
    return report


def kind_of(row: Row, kinds: Sequence[str]) -> str | None:
    """The first of these kinds whose keys a row has."""
    return next((name for name in kinds if all(key in row for key in KINDS[name].needs)), None)


def _place(row: Row, kind: str) -> int:
    """The place of a row, by which it is held out or not; one that asks nothing never is."""
    place = place_of_row(KINDS[kind].files_row(row, 0), KINDS[kind].layout)
    return PLACES if place is None else place


def write_split(source: Path, target: Path, kind: str, *, keep: Callable[[int], bool]) -> int:
    """Write rows of an upload in the format that a task reads; returns how many.

    keep: whether to write a row of this place (place_of_row). DataError when the upload has changed
    since it was checked; StorageError.
    """
    written = 0
    with aside(target) as temporary, temporary.open("wb") as file:
        for number, (line, content) in enumerate(_lines(source)):
            report = RowReport()
            row = _object(report, line, content)
            if row is None:
                raise DataError(f"{source}, {report.mistakes[0]}. Upload the file again.")
            if keep(_place(row, kind)):
                converted = KINDS[kind].files_row(row, number)
                file.write(json.dumps(converted, ensure_ascii=False).encode() + b"\n")
                written += 1
    return written


def write_splits(train: Path, valid: Path | None, folder: Path, kind: str, limit: int) -> None:
    """Write train.jsonl and valid.jsonl of a job into a folder. DataError, StorageError.

    valid: the file of the validation rows; None: the rows of `train` that are held out.
    limit: the rows of `train` with a place below it are held out; 0 with a validation file.
    """
    write_split(train, folder / "train.jsonl", kind, keep=lambda place: place >= limit)
    if valid is not None:
        write_split(valid, folder / "valid.jsonl", kind, keep=lambda place: True)
    else:
        write_split(train, folder / "valid.jsonl", kind, keep=lambda place: place < limit)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, content) of every line that is not blank. A too long line is cut."""
    with open_file(path) as file:
        number = 0
        while content := file.readline(MAX_LINE + 1):
            number += 1
            if len(content) > MAX_LINE:
                yield number, content
                while content and not content.endswith(b"\n"):
                    content = file.readline(MAX_LINE)
                continue
            text = content.removeprefix(b"\xef\xbb\xbf") if number == 1 else content
            if text.strip():
                yield number, text


def _object(report: RowReport, line: int, content: bytes) -> Row | None:
    """The JSON object in a line; None, with a mistake added to the report, when there is none."""
    if len(content) > MAX_LINE:
        report.add(line, "a line that is too long", f"at most {MAX_LINE} bytes")
        return None
    if _has_many_values(content):
        report.add(line, f"a row of more than {MAX_VALUES} values", "a smaller row")
        return None
    try:
        value: Any = json_value(content.decode())  # as the trainings read it
    except UnicodeDecodeError as error:
        report.add(line, f"byte {error.start} that is not UTF-8", "a file saved as UTF-8")
        return None
    except BadJson as error:
        report.add(line, str(error), "one JSON object")
        return None
    if not isinstance(value, dict):
        report.add(line, f"a JSON {type(value).__name__}", 'an object like {"messages": [...]}')
        return None
    return cast("Row", value)


def _has_many_values(content: bytes) -> bool:
    """Whether the JSON of a line may have more than MAX_VALUES values; found without reading it as
    JSON, in little memory.

    Outside of texts, a value follows the beginning of the line, a comma or an opening bracket. A
    row has at most two texts for each value: a key and the value itself.
    """
    if sum(content.count(sign) for sign in (b",", b"[", b"{")) < MAX_VALUES:
        return False
    rest = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_texts = num_signs = 0
    for match in TEXT_OR_SIGN.finditer(rest):
        is_text = rest[match.start()] == ord('"')
        num_texts += is_text
        num_signs += not is_text
        if num_signs >= MAX_VALUES or num_texts > 2 * MAX_VALUES:
            return True
    return False


def _quote(value: Any) -> str:
    return _cut(repr(value[:60] if isinstance(value, str) else value))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not is_blank(value)


def _texts(row: Row, *names: str) -> Iterator[tuple[str, str]]:
    """Mistakes of the keys whose value is not a text, or is blank."""
    for name in names:
        if not _is_text(row.get(name)):
            yield f"{name}={_quote(row.get(name))}", f"{name} as text that is not blank"


def _lists(row: Row, *names: str) -> Iterator[tuple[str, str]]:
    """Mistakes of the keys whose value is neither a text nor a list of texts."""
    for name in names:
        if not _are_texts(_items(row, name)):
            yield f"{name}={_quote(row.get(name))}", f"{name} as text, or a list of texts"


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


# Chats
# --------------------------------------------------------------------------------------------------


def _chat_problems(row: Row) -> Iterator[tuple[str, str]]:
    problems: list[conversation.RowProblem] = []
    conversation.read(row, problems.append)
    for name, value, want in problems:
        yield f"{name}={_quote(value)}" if name else str(value), want


# Other rows
# --------------------------------------------------------------------------------------------------


def _triple_problems(row: Row) -> Iterator[tuple[str, str]]:
    yield from _texts(row, "query")
    for name in ("positive", "negative"):
        if not _are_texts(_as_it_stands(row[name])):
            yield f"{name}={_quote(row[name])}", f"{name} as text, or a list of texts"


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
        yield f"label={_quote(row['label'])}", "label as true or false"


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
        _chat_problems,
        _as_it_is,
        {"causal_lm": {"source": "chat", "loss_on": "answer"}},
        layouts.CHATS,
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
