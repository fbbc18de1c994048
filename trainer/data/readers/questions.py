"""Questions of --data_path with what their files know about them, and texts to model, one row in
memory at a time and in the file's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainer.data.readers import fields
from trainer.data.readers.fields import first_given
from trainer.data.readers.folders import (
    CORPUS,
    QUERIES,
    first_split_file,
    nq_folder,
    split_names,
)
from trainer.data.readers.jsonl import numbered_jsonl, objects, shown
from trainer.data.readers.passages import nq_passages
from trainer.data.stdlib_docs import is_held_out
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.tasks.protocol import Row

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
    """The questions of a JSON-lines file; with `split`, those whose "split" is that one.

    Tevatron's {"query_id", "query"} and its training rows, BEIR's {"_id", "text"}, FiD's {"id",
    "question"}. What is known of answers ("answers", a list or a text) and positives
    ("positive_passages", "positive_document_ids", "positive_docids", "gold") is read too. Without
    an id, a question's place in the file, from 0, is its id. DataError for an id with white space,
    which run files cannot hold.
    """
    names = split_names(split) if split is not None else ()
    ids: set[str] = set()
    for index, (line, raw) in enumerate(numbered_jsonl(path)):
        if split is not None and raw.get("split") not in names:
            continue
        place = f"{path}, line {line}"
        id_name, number = first_given(raw, fields.QUESTION_IDS)
        name = str(index) if number is None else fields.column_identity(number, place, id_name)
        text_name, text = first_given(raw, fields.QUESTIONS)
        text = fields.text(text, place, text_name)
        if name in ids:
            raise DataError(f"{place}: the id {name!r} stands twice; give every question its own.")
        ids.add(name)
        yield Query(name, text, fields.answers(raw, place), _positives(raw, place))
    if not ids:
        of_split = f" whose split is {' or '.join(names)}" if names else ""
        raise DataError(
            f"{path} has no question{of_split}. Leave --split out, or name another file."
        )


def qa_rows(folder: Path | None, split: str) -> Iterator[Row]:
    """Rows of folder/train.jsonl or valid.jsonl (also val.jsonl, dev.jsonl), or test.jsonl.

    A line holds "question"; "answer" (text) or "answers" (a list); "context" (text) or "contexts"
    (a list); and may hold "title" or "titles", "dataset" (text: where the question comes from) and,
    with "contexts", "useful_contexts" (a 0 or 1 for each). A row has question, answers and what was
    given of the others. DataError names file and line of whatever is missing, blank or of another
    type.
    """
    path = first_split_file(folder, split)
    for line, raw in numbered_jsonl(path):
        yield _question_row(raw, f"{path}, line {line}")


def text_rows(folder: Path | None, split: str, names: Sequence[str]) -> Iterator[Row]:
    """Rows {name: text} of the files of `qa_rows`, for these names.

    DataError for a line where one is missing.
    """
    path = first_split_file(folder, split)
    for line, raw in numbered_jsonl(path):
        yield {name: fields.required_text(raw, name, f"{path}, line {line}") for name in names}


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
            yield index, place, raw
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
    ids = {str(raw.get("gold")) for _, _, raw in of_split}
    gold = {passage["id"]: passage for passage in nq_passages(folder) if passage["id"] in ids}
    for _, place, raw in of_split:
        passage = gold.get(str(raw.get("gold")))
        if passage is None:
            raise DataError(f"{place}: gold={raw.get('gold')!r} is no id in {folder / CORPUS}.")
        yield {
            "question": fields.required_text(raw, "question", place),
            "answers": _required_answers(raw, place),
            "context": passage["text"],
            "title": passage["title"],
            "passage_id": passage["id"],
        }


def texts(folder: Path | None, split: str, source: Literal["nq", "jsonl"]) -> Iterator[Row]:
    """Rows {"text": ...} for language modelling.

    "jsonl": the files of `qa_rows`, every line with a non-blank "text". "nq": title, newline, text
    of every passage of corpus.tsv; 2 % are "valid", the others "train". The hash of the text
    decides: the same text under two ids (real corpora have them) is never in both.
    """
    if source == "jsonl":
        yield from text_rows(folder, split, ("text",))
        return
    if split not in ("train", "valid"):
        raise DataError(
            f"split={split!r} does not exist for the passages of corpus.tsv. Use train or valid."
        )
    for passage in nq_passages(folder):
        text = f"{passage['title']}\n{passage['text']}"
        if is_held_out(text, per_mille=_NQ_VALID_OF_1000) == (split == "valid"):
            yield {"text": text}


def completions(folder: Path | None, split: str) -> Iterator[Row]:
    """Rows {"text", "answer_spans"} of the files of `qa_rows`, every line with a non-blank "prompt"
    and "completion", which follow one another as they stand.

    answer_spans: the one of the completion, in characters.
    """
    for row in text_rows(folder, split, ("prompt", "completion")):
        text = row["prompt"] + row["completion"]
        yield {"text": text, "answer_spans": [(len(row["prompt"]), len(text))]}


def _question_row(raw: Row, place: str) -> Row:
    row: Row = {
        "question": fields.required_text(raw, "question", place),
        "answers": _required_answers(raw, place),
    }
    if "dataset" in raw:
        row["dataset"] = fields.text(raw["dataset"], place, "dataset")
    if _one_of(raw, ("context", "contexts"), place) == "context":
        row["context"] = fields.text(raw["context"], place, "context")
        if "title" in raw:
            row["title"] = fields.text(raw["title"], place, "title")
        return row
    row["contexts"] = fields.texts(raw["contexts"], place, "contexts")
    count = len(row["contexts"])
    if "titles" in raw:
        row["titles"] = fields.texts(raw["titles"], place, "titles")
        if len(row["titles"]) != count:
            raise DataError(
                f"{place}: {len(row['titles'])} titles for {count} contexts; give one each."
            )
    if "useful_contexts" in raw:
        row["useful_contexts"] = useful = raw["useful_contexts"]
        if not isinstance(useful, list) or len(useful) != count or not set(useful) <= {0, 1}:
            raise DataError(
                f"{place}: 'useful_contexts' is {shown(useful)}, want a 0 or 1 for each context."
            )
    return row


def _required_answers(raw: Row, place: str) -> list[str]:
    if _one_of(raw, ("answer", "answers"), place) == "answer":
        return [fields.text(raw["answer"], place, "answer")]
    return fields.texts(raw["answers"], place, "answers")


def _one_of(raw: Row, names: tuple[str, str], place: str) -> str:
    present = [name for name in names if name in raw]
    if len(present) != 1:
        count = "both are" if present else "neither is"
        raise DataError(
            f"{place}: {names[0]!r} or {names[1]!r} is wanted, {count} there (keys: "
            f"{fields.keys(raw)})."
        )
    return present[0]


def _positives(raw: Row, place: str) -> list[str]:
    name, value = first_given(raw, _POSITIVES)
    values: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    ids: list[str] = []
    for one in values:
        number = first_given(one, fields.PASSAGE_IDS)[1] if isinstance(one, dict) else one
        ids.append(fields.column_identity(number, place, name))
    return ids
