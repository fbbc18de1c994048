"""Questions of --data_path with what their files know about them, and texts to model, one row in
memory at a time and in the file's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainer.config.formats.layouts import COMPLETIONS, QUESTIONS, TEXTS, Layout
from trainer.config.own_rows import OwnRows
from trainer.data.formats.conversation import with_input
from trainer.data.formats.held_out import is_held_out
from trainer.data.formats.lists import as_list
from trainer.data.left_out import watched
from trainer.data.readers import fields
from trainer.data.readers.fields import first_given
from trainer.data.readers.folders import CORPUS, QUERIES, nq_folder, split_names
from trainer.data.readers.jsonl import numbered_jsonl, objects, preview, tabbed
from trainer.data.readers.own_rows import FILES, own_rows
from trainer.data.readers.passages import nq_passages
from trainer.data.readers.row_files import QA, placed_rows
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row

_POSITIVES = ("positive_passages", "positive_document_ids", "positive_docids", "gold")
_NQ_VALID_OF_1000 = 20  # passages held out from language modelling


@dataclass(frozen=True)
class Query:
    """One question, and what its file knows about it."""

    id: str
    text: str
    answers: list[str]  # may be empty
    positives: list[str]  # ids of passages that answer it; may be empty


def queries(path: Path, split: str | None = None) -> Iterator[Query]:
    """The questions of a file; with `split`, those whose "split" is that one.

    MS MARCO's queries.tsv (id, query), DPR's .qa.csv (question, answers), or JSON lines: Tevatron's
    {"query_id", "query"} and its training rows, BEIR's {"_id", "text"}, FiD's {"id",
    "question"}. What is known of answers ("answers", a list or a text) and positives
    ("positive_passages", "positive_document_ids", "positive_docids", "gold") is read too. Without
    an id, a question's place in the file, from 0, is its id. DataError for an id with white space,
    which run files cannot hold.
    """
    names = split_names(split) if split is not None else ()
    ids: set[str] = set()
    for index, (place, raw) in enumerate(_raw_queries(path)):
        if split is not None and raw.get("split") not in names:
            continue
        raw = watched(raw)
        id_name, number = first_given(raw, fields.QUESTION_IDS)
        name = str(index) if number is None else fields.column_identity(number, place, id_name)
        text_name, text = first_given(raw, fields.QUESTIONS)
        text = fields.text(text, place, text_name)
        if name in ids:
            raise DataError(
                f"{place}: the id {name!r} stands twice; give every question its own.", place=place
            )
        ids.add(name)
        key, value = first_given(raw, _POSITIVES)
        values = as_list(value, place, key)
        positives: list[str] = []
        for one in [values] if isinstance(values, dict) else values or ():
            passage = first_given(one, fields.PASSAGE_IDS)[1] if isinstance(one, dict) else one
            positives.append(fields.column_identity(passage, place, key))
        yield Query(name, text, fields.answers(raw, place), [*dict.fromkeys(positives)])
    if not ids:
        of_split = f" whose split is {' or '.join(names)}" if names else ""
        raise DataError(
            f"{path} has no question{of_split}. Leave --split out, or name another file."
        )


def _raw_queries(path: Path) -> Iterator[tuple[str, Row]]:
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(QA):
        yield from placed_rows(path)
    elif name.endswith(".tsv"):
        for line, (number, query) in tabbed(path, 2, "id and query"):
            yield f"{path}, line {line}", {"query_id": number, "query": query}
    else:
        for line, raw in numbered_jsonl(path):
            yield f"{path}, line {line}", raw


def qa_rows(
    folder: Path | None, split: str, own: OwnRows = FILES, *, cache_dir: Path | None = None
) -> Iterator[Row]:
    """Rows of a user's questions, of whatever kind of file: see `own_rows`.

    A row holds "question"; "answer" (text) or "answers" (a list); "context" (text), "contexts" (a
    list) or "ctxs" (FiD's objects of text and title); and may hold "title" or "titles", "dataset"
    (text: where the question comes from) and, with "contexts", "useful_contexts" (a 0 or 1 for
    each). It has question, answers and what was given of the others. DataError names file and line
    of whatever is missing, blank or of another type.
    """
    how: dict[str, Any] = {"layout": QUESTIONS, "first": ".jsonl", "cache_dir": cache_dir}
    for place, raw in own_rows(own, split, folder, **how):
        yield question_row(raw, place)


def text_rows(
    folder: Path | None,
    split: str,
    names: Sequence[str],
    own: OwnRows = FILES,
    *,
    layout: Layout | None = None,
    cache_dir: Path | None = None,
) -> Iterator[Row]:
    """Rows {name: text} of a user's files, for these names: see `own_rows`.

    layout: what `columns` may name besides. DataError for a row where one is missing.
    """
    layout = layout or Layout(tuple((name,) for name in names))
    how: dict[str, Any] = {"layout": layout, "first": ".jsonl", "cache_dir": cache_dir}
    for place, raw in own_rows(own, split, folder, **how):
        yield {name: fields.required_text(raw, name, place) for name in names}


def nq_lines(
    folder: Path | None, split: str, name: str | None = None
) -> Iterator[tuple[int, str, Row]]:
    """(index from 0, place, object) of a split's questions in NaturalQuestions'
    queries.jsonl, or in the file of that name beside it. DataError when there are none.
    """
    names = split_names(split)
    path = nq_folder(folder) / (name or QUERIES)
    is_empty = True
    for index, (place, raw) in enumerate(objects(path)):
        if raw.get("split") in names:
            is_empty = False
            yield index, place, watched(raw)
    if is_empty:
        raise DataError(
            f"{path} has no line whose split is {' or '.join(names)}, which {split!r} wants."
        )


def nq_rows(folder: Path | None, split: str) -> Iterator[Row]:
    """NaturalQuestions rows with their gold passage: question, answers, context, title, passage_id
    (text).

    `folder`, or its subfolder nq, holds corpus.tsv (see `tsv_passages`) and queries.jsonl, whose
    lines hold "split" (train, val or dev, test), "question", "answers" and "gold", the id of a
    passage. Only the split's questions and gold passages are kept in memory.
    """
    of_split = list(nq_lines(folder, split))
    folder = nq_folder(folder)
    ids = {str(raw.get("gold")).strip() for _, _, raw in of_split}
    gold = {passage["id"]: passage for passage in nq_passages(folder) if passage["id"] in ids}
    for _, place, raw in of_split:
        passage = gold.get(str(raw.get("gold")).strip())
        if passage is None:
            raise DataError(
                f"{place}: gold={raw.get('gold')!r} is no id in {folder / CORPUS}.",
                place=place,
                field="gold",
            )
        yield {
            "question": fields.required_text(raw, "question", place),
            "answers": _required_answers(raw, place),
            "context": passage["text"],
            "title": passage["title"],
            "passage_id": passage["id"],
        }


def texts(
    folder: Path | None,
    split: str,
    source: Literal["nq", "files"],
    own: OwnRows = FILES,
    *,
    cache_dir: Path | None = None,
) -> Iterator[Row]:
    """Rows {"text": ...} for language modelling.

    "files": every row of the user's with a non-blank "text". "nq": title, newline, text of every
    passage of corpus.tsv; 2 % are "valid", the others "train". The hash of the text decides: the
    same text under two ids (real corpora have them) is never in both.
    """
    if source == "files":
        yield from text_rows(folder, split, ("text",), own, layout=TEXTS, cache_dir=cache_dir)
        return
    if split not in ("train", "valid"):
        raise DataError(
            f"split={split!r} does not exist for the passages of corpus.tsv. Use train or valid."
        )
    for passage in nq_passages(folder):
        text = f"{passage['title']}\n{passage['text']}"
        if is_held_out(text, per_mille=_NQ_VALID_OF_1000) == (split == "valid"):
            yield {"text": text}


def completions(
    folder: Path | None, split: str, own: OwnRows = FILES, *, cache_dir: Path | None = None
) -> Iterator[Row]:
    """Rows {"text", "answer_spans"} of a user's files, every row with a non-blank "prompt" and
    "completion", which follow one another as they stand. Alpaca's "input" stands in a line of its
    own behind the prompt.

    answer_spans: the one of the completion, in characters.
    """
    how: dict[str, Any] = {"layout": COMPLETIONS, "first": ".jsonl", "cache_dir": cache_dir}
    for place, raw in own_rows(own, split, folder, **how):
        fields.required_text(raw, "prompt", place)
        if not isinstance(raw.get("input"), str | None):
            raise DataError(
                f"{place}: 'input' is {preview(raw['input'])}, want text.",
                place=place,
                field="input",
            )
        prompt = with_input(raw)
        text = prompt + fields.required_text(raw, "completion", place)
        yield {"text": text, "answer_spans": [(len(prompt), len(text))]}


def question_row(raw: Row, place: str) -> Row:
    """The row of `qa_rows` that an object in our names gives."""
    row: Row = {
        "question": fields.required_text(raw, "question", place),
        "answers": _required_answers(raw, place),
    }
    if raw.get("dataset") is not None:
        row["dataset"] = fields.text(raw["dataset"], place, "dataset")
    if raw.get("ctxs") is not None and not _present(raw, ("context", "contexts")):
        passages = fields.passages(raw["ctxs"], place, "ctxs")
        if not passages:
            raise DataError(
                f"{place}: 'ctxs' is [], want a list that is not empty.", place=place, field="ctxs"
            )
        row["contexts"] = fields.texts([one.get("text") for one in passages], place, "ctxs")
        titles = [one["title"] for one in passages if one.get("title")]
        if len(titles) == len(passages):
            row["titles"] = titles
        return row
    if _one_of(raw, ("context", "contexts"), place) == "context":
        row["context"] = fields.text(raw["context"], place, "context")
        if raw.get("title") is not None:
            row["title"] = fields.text(raw["title"], place, "title")
        return row
    row["contexts"] = fields.texts(raw["contexts"], place, "contexts")
    count = len(row["contexts"])
    if raw.get("titles") is not None:
        row["titles"] = fields.titles(raw["titles"], place, count)
    if raw.get("useful_contexts") is not None:
        row["useful_contexts"] = fields.useful_contexts(raw, place, count)
    return row


def _required_answers(raw: Row, place: str) -> list[str]:
    name = _one_of(raw, ("answer", "answers"), place)
    return fields.texts(raw[name], place, name)


def _present(raw: Row, names: tuple[str, str]) -> list[str]:
    return [name for name in names if raw.get(name) is not None]


def _one_of(raw: Row, names: tuple[str, str], place: str) -> str:
    present = _present(raw, names)
    if len(present) != 1:
        count = "both are" if present else "neither is"
        raise DataError(
            f"{place}: {names[0]!r} or {names[1]!r} is wanted, {count} there (keys: "
            f"{fields.keys(raw)}).",
            place=place,
        )
    return present[0]
