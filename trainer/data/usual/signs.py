"""Which format rows are in, as their keys and values show."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trainer.config.formats.table import FORMATS, WANTED, FormatName, formats_of, refusal
from trainer.data.readers import fields
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.config.formats.layouts import Layout, Purpose
    from trainer.config.own_rows import OwnRows
    from trainer.protocol.task import Row

_CONTEXTS = ("contexts", "context", "ctxs")
_PASSAGES = (*_CONTEXTS, "positive_ctxs", "positive_passages")  # what FiD's reader knows
_ASKED = ("query", "question", "prompt", "contexts", "context", "ctxs")
_QUERY_FILES = ("queries.jsonl", "queries.*.jsonl")  # of BEIR
_COLLECTIONS = ("collection.tsv", "collection.tsv.gz")  # of MS MARCO
_SQUAD_CELL = re.compile(r"\s*\{\s*['\"](?:text|answer_start)['\"]\s*:")


def _of_objects(value: Any) -> bool:
    """Whether a value is a list of objects, one at least."""
    items = cast("list[Any]", value) if isinstance(value, list) else []
    return bool(items) and all(isinstance(one, dict) for one in items)


def _is_text(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _is_squad(raw: Row) -> bool:
    if _of_objects(raw.get("data")):
        return "paragraphs" in raw["data"][0]
    answers = raw.get("answers")
    is_cell = isinstance(answers, str) and bool(_SQUAD_CELL.match(answers))
    is_spans = (isinstance(answers, dict) and "text" in answers) or (
        _of_objects(answers) and "text" in cast("list[Row]", answers)[0]
    )
    return (is_cell or is_spans) and "context" in raw


def _is_kilt(raw: Row) -> bool:
    outputs = raw.get("output")
    if not _is_text(raw.get("input")) or not _of_objects(outputs):
        return False
    return bool({"answer", "provenance"} & cast("list[Row]", outputs)[0].keys())


def _is_conversational(raw: Row) -> bool:
    sides = (raw.get("prompt"), raw.get("completion"))
    return all(_of_objects(side) and {"role", "from"} & side[0].keys() for side in sides)  # pyright: ignore


def _is_unpaired(raw: Row) -> bool:
    return isinstance(raw.get("label"), bool) and "prompt" in raw and "completion" in raw


def _is_triple(raw: Row) -> bool:
    is_of_texts = "positive" in raw and ("anchor" in raw or "query" in raw or "question" in raw)
    has_answer = "answer" in raw and ("negative" in raw or "negative_1" in raw)
    return is_of_texts or (has_answer and ("anchor" in raw or "query" in raw or "question" in raw))


def _is_pretokenised(raw: Row) -> bool:
    query = raw.get("query")
    is_of_ids = isinstance(query, list) and all(isinstance(one, int) for one in cast(Any, query))
    return is_of_ids and "positives" in raw


_OF_TEVATRON = ("positive_passages", "positive_docids", "positive_document_ids")
# In this order: the first one that a row shows is its format.
_SIGNS: dict[FormatName, Callable[[Row], bool]] = {
    "openai_preference": lambda raw: "preferred_output" in raw and "non_preferred_output" in raw,
    "preference": lambda raw: "chosen" in raw and "rejected" in raw,
    "unpaired_preference": _is_unpaired,
    "openai": lambda raw: "messages" in raw,
    "sharegpt": lambda raw: "conversations" in raw,
    "alpaca": lambda raw: _is_text(raw.get("instruction")) and "output" in raw,
    "conversational": _is_conversational,
    "prompt_completion": lambda raw: _is_text(raw.get("prompt"), raw.get("completion")),
    "kilt": _is_kilt,
    "squad": _is_squad,
    "pretokenised": _is_pretokenised,
    "dpr": lambda raw: "question" in raw and "positive_ctxs" in raw,
    "tevatron": lambda raw: not raw.keys().isdisjoint(_OF_TEVATRON),
    "triples": _is_triple,
    "fid": lambda raw: "question" in raw and _of_objects(raw.get("ctxs")),
    "completion": lambda raw: _is_text(raw.get("text")) and not raw.keys() & {*_ASKED},
}
# Of rows to predict, which need not hold what is learnt.
_SIGNS_UNLABELLED: dict[FormatName, Callable[[Row], bool]] = {
    **_SIGNS,
    "alpaca": lambda raw: _is_text(raw.get("instruction")),
}

# The formats whose names are those of the task itself.
OURS: Mapping[Purpose, frozenset[FormatName]] = {
    "conversation": frozenset({"openai", "sharegpt", "prompt_completion", "conversational"}),
    "completion": frozenset({"prompt_completion"}),
    "text": frozenset({"completion"}),
    "question": frozenset({"fid"}),
    "query": frozenset(),
    "summary": frozenset(),
    "statement": frozenset(),
    "preference": frozenset({"preference", "unpaired_preference"}),
}


def sign_of(raw: Row, *, is_labelled: bool = True) -> FormatName | None:
    """The format that one row shows; None: none."""
    # a cell of a table that is blank is None: of an instruction the output may be blank
    cells: Row = {
        name: value for name, value in raw.items() if value is not None or name == "output"
    }
    signs = _SIGNS if is_labelled else _SIGNS_UNLABELLED
    return next((name for name, is_one in signs.items() if is_one(cells)), None)


def format_of(
    first: Sequence[tuple[str, Row]], own: OwnRows, layout: Layout, *, is_labelled: bool = True
) -> FormatName | None:
    """The format that the first rows show and that the task does not read as its own names; None:
    they hold own names, or nothing tells. A format of the task's own names is given all the same,
    for what a run tells.

    is_labelled: False for rows to predict, which may be anything. DataError for other rows of two
    formats, or of one that the task does not read.
    """
    purpose = layout.purpose
    if not first or purpose is None:
        return None
    names: list[FormatName | None]
    names = [sign_of(raw, is_labelled=is_labelled) for _, raw in first]
    if all(is_own(raw, layout) for _, raw in first):
        return names[0] if {*names} == {names[0]} and names[0] in OURS[purpose] else None
    # a text alone tells little
    names = [None if name == "completion" else name for name in names]
    if not any(names) or is_own(first[0][1], layout):  # the reader says what such a row lacks
        return None
    name = names[0]
    if name is None or any(one != name for one in names):
        if not is_labelled:
            return None
        if purpose == "question" and all(
            any(raw.get(name) is not None for name in _PASSAGES) for _, raw in first
        ):
            return None  # FiD's reader takes each row by its own names
        raise _mixture(first, names)
    if purpose in FORMATS[name].serves:
        return name
    if not is_labelled:
        return None
    place = first[0][0]
    called = f"{place}: its rows are {FORMATS[name].called} rows"
    if name in formats_of(own.purposes):
        raise DataError(
            f"{called}, and data.source={own.reads!r} reads {WANTED[purpose]}. Say "
            f'"format": "{name}" in data.',
            place=place,
        )
    raise DataError(f"{called}: {refusal(name, own.purposes)}.", place=place)


def _mixture(first: Sequence[tuple[str, Row]], found: Sequence[FormatName | None]) -> DataError:
    """The error of first rows that are not all of one format."""
    usual = next(number for number, name in enumerate(found) if name is not None)
    odd = next(number for number, name in enumerate(found) if name != found[usual])
    place, raw = first[odd]
    name, other = found[usual], found[odd]
    assert name is not None
    what = f"its keys are {fields.keys(raw)}" if other is None else f"its format is {other!r}"
    return DataError(
        f"{place}: {what}, want that of {first[usual][0]}, {name!r}: {FORMATS[name].holds}. Mend "
        "it, or give rows of one format in a file; data.format or data.columns say what they hold.",
        place=place,
    )


def is_own(raw: Row, layout: Layout) -> bool:
    """Whether a row has the names under which the task reads it; what they hold is judged by the
    reader.
    """
    is_pair = raw.get("prompt") is not None and "completion" in raw
    if layout.purpose == "conversation":
        return is_pair or any(raw.get(name) is not None for name in ("messages", "conversations"))
    if layout.purpose == "preference":
        return ("chosen" in raw and "rejected" in raw) or (is_pair and "label" in raw)
    if layout.purpose == "completion":
        return is_pair
    if layout.purpose in ("question", "query"):
        return any(name in raw for name in _CONTEXTS) and not _is_squad(raw)
    # a task on made-up rows reads no names of a person's own
    return not layout.groups or any(name in raw for name in layout.groups[0])


def format_of_folder(own: OwnRows, folder: Path | None) -> FormatName | None:
    """The format of a folder that is known by its files, where the dictionary names none of them;
    None: any other folder.
    """
    says = own.format is not None or own.dataset or own.columns or own.valid_share
    if says or folder is None or any(own.files.model_dump().values()) or not folder.is_dir():
        return None
    if any(path.stem == "train" or path.name.startswith("train.") for path in folder.iterdir()):
        return None
    if any((folder / name).is_file() for name in _COLLECTIONS):
        return "msmarco"
    has_queries = any(True for name in _QUERY_FILES for _ in folder.glob(name))
    return "beir" if has_queries and (folder / "qrels").is_dir() else None
