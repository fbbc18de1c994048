"""Rows of KILT: an input, its outputs, and their provenance in Wikipedia, whose pages stand in a
file of their own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.data.formats.json_text import BadJson, json_value
from trainer.data.left_out import note
from trainer.data.readers import fields
from trainer.data.readers.folders import required_folder
from trainer.data.readers.jsonl import bad_line, lines, preview
from trainer.data.usual.placed import Around, Placed, named
from trainer.data.usual.questions import WITHOUT_POSITIVE
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row

SOURCE = "kilt_knowledgesource.json"  # JSON lines, whatever its name says
_SOURCES = (SOURCE, "kilt_knowledgesource.jsonl")
# The published file (35 GB) begins every line so. A line of another page is not parsed.
_ID = re.compile(r'\s*\{"_id": ?"?(\w+)')


class Span(NamedTuple):
    """Paragraphs of a page. last: None for the whole page."""

    page: str
    first: int
    last: int | None


def kilt_questions(placed: Placed, around: Around) -> Placed:
    """{"question", "answers", "ctxs"}: the contexts are the paragraphs of the provenance."""
    for place, raw, answers, passages in _with_passages(placed, around):
        row: Row = {"question": raw["input"], "ctxs": passages}
        yield place, named(raw, row | ({"answers": answers} if answers else {}))


def kilt_queries(placed: Placed, around: Around) -> Placed:
    """{"query", "positive_passages", "negative_passages"}, without negatives. Inputs without
    provenance are left out.
    """
    for place, raw, _, passages in _with_passages(placed, around):
        if not passages:
            note(place, WITHOUT_POSITIVE, field="output")
            continue
        row: Row = {"query": raw["input"], "positive_passages": passages, "negative_passages": []}
        yield place, named(raw, row)


def _with_passages(
    placed: Placed, around: Around
) -> Iterator[tuple[str, Row, list[str], list[Row]]]:
    """(place, row, its different answers, its different passages). The rows of a split are held in
    memory, and of the pages only those that they name.
    """
    rows: list[tuple[str, Row, list[str], list[Span]]] = []
    for place, raw in placed:
        fields.required_text(raw, "input", place)
        answers, spans = _outputs(raw, place)
        rows.append((place, raw, answers, spans))
    page_ids = {span.page for _, _, _, spans in rows for span in spans}
    path = _source_of(around.folder) if page_ids else None
    pages = {} if path is None else _pages(path, page_ids)
    for place, raw, answers, spans in rows:
        passages = [_passage(span, pages, f"{place}, in {path}") for span in spans]
        yield place, raw, answers, passages


def _outputs(raw: Row, place: str) -> tuple[list[str], list[Span]]:
    """The different answers of a row, and the different paragraphs that they stand in."""
    outputs = raw.get("output") or []
    if not isinstance(outputs, list) or not all(isinstance(one, dict) for one in outputs):  # pyright: ignore[reportUnknownVariableType]
        raise DataError(
            f"{place}: 'output' is {preview(raw['output'])}, want a list of objects with answer "
            "and provenance.",
            place=place,
            field="output",
        )
    answers: list[str] = []
    spans: list[Span] = []
    for number, one in enumerate(outputs):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        output: Row = one
        if (output.get("answer") or "") != "":
            answers.append(fields.text(output["answer"], place, f"output[{number}].answer"))
        named_pages = output.get("provenance") or []
        if not isinstance(named_pages, list):
            raise DataError(
                f"{place}: 'output[{number}].provenance' is {preview(named_pages)}, want a list of "
                "objects.",
                place=place,
                field=f"output[{number}].provenance",
            )
        for last, entry in enumerate(named_pages):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            spans.append(_span(entry, place, f"output[{number}].provenance[{last}]"))
    return list(dict.fromkeys(answers)), list(dict.fromkeys(spans))


def _span(found: Any, place: str, name: str) -> Span:
    entry: Row = found if isinstance(found, dict) else {}
    page = fields.identity(entry.get("wikipedia_id"), place, f"{name}.wikipedia_id")
    numbers: list[int] = []
    for key in ("start_paragraph_id", "end_paragraph_id"):
        value = entry.get(key)
        if value is None or value == -1:  # the set of Hugging Face writes -1 for a missing number
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise DataError(
                f"{place}: {name}.{key} is {preview(value)}, want the number of a paragraph.",
                place=place,
                field=f"{name}.{key}",
            )
        numbers.append(value)
    return Span(page, min(numbers), max(numbers)) if numbers else Span(page, 0, None)


def _source_of(folder: Path | None) -> Path:
    """The file of pages in --data_path, packed or not."""
    folder = required_folder(folder, f"KILT's rows and {SOURCE}")
    names = [name for one in _SOURCES for name in (one, f"{one}.gz")]
    source = next((folder / name for name in names if (folder / name).is_file()), None)
    if source is None:
        raise DataError(
            f"{folder} holds no {SOURCE}, where the pages are that KILT's rows name. Put it there, "
            "or a link to it."
        )
    return source


def _pages(path: Path, wanted: Collection[str]) -> dict[str, tuple[str, list[str]]]:
    """(title, paragraphs) of the pages with these ids."""
    pages: dict[str, tuple[str, list[str]]] = {}
    for line, text in lines(path):
        begins = _ID.match(text)
        if not text.strip() or (begins is not None and begins[1] not in wanted):
            continue
        try:
            page = json_value(text)
        except BadJson as error:
            raise bad_line(path, line, str(error)) from None
        place = f"{path}, line {line}"
        raw: Row = page if isinstance(page, dict) else {}
        name, number = fields.first_given(raw, ("wikipedia_id", "_id", "kilt_id"))
        identity = fields.identity(number, place, name)
        if identity in wanted:
            title = str(raw.get("wikipedia_title") or "")
            pages[identity] = (title, _paragraphs(raw.get("text"), place))
            if len(pages) == len(wanted):
                break
    return pages


def _paragraphs(value: Any, place: str) -> list[str]:
    """The paragraphs of a page: a list of texts, or that of Hugging Face's set, {"paragraph"}."""
    value = value.get("paragraph") if isinstance(value, dict) else value  # pyright: ignore
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):  # pyright: ignore
        raise DataError(
            f"{place}: 'text' is {preview(value)}, want a list of paragraphs.",
            place=place,
            field="text",
        )
    return [str(one) for one in value]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _passage(span: Span, pages: dict[str, tuple[str, list[str]]], place: str) -> Row:
    if span.page not in pages:
        raise DataError(
            f"{place}: there is no page {span.page!r}. Give the knowledge source that the rows "
            "were made with.",
            place=place,
        )
    title, paragraphs = pages[span.page]
    if span.first >= len(paragraphs):
        raise DataError(
            f"{place}: page {span.page!r} has {len(paragraphs)} paragraphs, and the provenance "
            f"begins in number {span.first}.",
            place=place,
        )
    last = len(paragraphs) - 1 if span.last is None else span.last
    text = " ".join(one.strip() for one in paragraphs[span.first : last + 1])
    passage: Row = {"id": f"{span.page}:{span.first}-{last}", "text": text}
    return {**passage, "title": title} if title else passage
