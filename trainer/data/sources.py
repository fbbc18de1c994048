"""Readers of raw rows: always in the same order, one row in memory at a time, file and line in
every error.

`folder` is --data_path; None, when it was not given, is refused with the files that were wanted.
Splits are "train" and "valid", plus "test" where a source has one. Lines are counted from 1.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from trainer.data.stdlib_docs import is_held_out
from trainer.errors import DataError
from trainer.tasks.protocol import Row

_JSONL_NAMES = {
    "train": ("train.jsonl",),
    "valid": ("valid.jsonl", "val.jsonl", "dev.jsonl"),
    "test": ("test.jsonl",),
}
_NQ_SPLITS = {"train": ("train",), "valid": ("valid", "val", "dev"), "test": ("test",)}
_NQ_VALID_OF_1000 = 20  # passages held out from language modelling
_PASSAGES, QUERIES = "corpus.tsv", "queries.jsonl"
_PASSAGE_FIELDS = ["id", "text", "title"]


def read_jsonl(path: Path) -> Iterator[Row]:
    """The objects of a JSON-lines file. DataError for malformed JSON, a line that is no object, or
    an empty file.
    """
    return (row for _, row in numbered_jsonl(path))


def numbered_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    """(line, object) of a JSON-lines file, for readers that check the objects; blank lines are
    counted and skipped.
    """
    is_empty = True
    for line, text in lines(path):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise bad_line(
                path,
                line,
                f"malformed JSON ({error.msg}, column {error.colno}); write one object a line",
            ) from None
        if not isinstance(row, dict):
            raise bad_line(path, line, f"a JSON {type(row).__name__}, want an object like {{...}}")
        is_empty = False
        yield line, row
    if is_empty:
        raise DataError(f"{path} is empty. Put one JSON object on every line.")


def qa_rows(folder: Path | None, split: str) -> Iterator[Row]:
    """Rows of folder/train.jsonl or valid.jsonl (also val.jsonl, dev.jsonl), or test.jsonl.

    A line holds "question"; "answer" (text) or "answers" (a list); "context" (text) or "contexts"
    (a list); and may hold "title" or "titles", "dataset" (text: where the question comes from) and,
    with "contexts", "useful_contexts" (a 0 or 1 for each). A row has question, answers and what was
    given of the others. DataError names file and line of whatever is missing, blank or of another
    type.
    """
    path = _split_file(folder, split)
    for line, raw in numbered_jsonl(path):
        yield _question_row(raw, path, line)


def text_rows(folder: Path | None, split: str, names: Sequence[str]) -> Iterator[Row]:
    """Rows {name: text} of the files of `qa_rows`, for these names. DataError for a line where one
    is missing.
    """
    path = _split_file(folder, split)
    for line, raw in numbered_jsonl(path):
        yield {name: _text(raw, name, path, line) for name in names}


def nq_rows(folder: Path | None, split: str) -> Iterator[Row]:
    """NaturalQuestions rows with their gold passage: question, answers, context, title, passage_id
    (text).

    `folder`, or its subfolder nq, holds corpus.tsv (see `passages`) and queries.jsonl, whose lines
    hold "split" (train, val or dev, test), "question", "answers" and "gold", the id of a passage.
    Only the split's questions and gold passages are kept in memory.
    """
    folder = nq_folder(folder)
    path = folder / QUERIES
    names = split_names(split)
    queries = [(line, raw) for line, raw in numbered_jsonl(path) if raw.get("split") in names]
    if not queries:
        raise DataError(
            f"{path} has no line whose split is {' or '.join(names)}, which {split!r} wants."
        )
    wanted = {str(raw.get("gold")) for _, raw in queries}
    gold = {passage["id"]: passage for passage in passages(folder) if passage["id"] in wanted}
    for line, raw in queries:
        passage = gold.get(str(raw.get("gold")))
        if passage is None:
            raise bad_line(path, line, f"gold={raw.get('gold')!r} is no id in {folder / _PASSAGES}")
        yield {
            "question": _text(raw, "question", path, line),
            "answers": _answers(raw, path, line),
            "context": passage["text"],
            "title": passage["title"],
            "passage_id": passage["id"],
        }


def passages(folder: Path | None) -> Iterator[Row]:
    """{"id", "text", "title"} of every line of corpus.tsv; see `tsv_passages`."""
    return tsv_passages(nq_folder(folder) / _PASSAGES)


def tsv_passages(path: Path) -> Iterator[Row]:
    """{"id", "text", "title"} of every line of tab-separated id, text, title behind a header that
    says so.

    There a quote is a quote, unless the file is quoted as CSV is, like DPR's psgs_w100.tsv. The
    first field with a quote in it decides: CSV puts quotes around the whole field and doubles those
    within ("" is not in prose); a field in quotes that has none within says nothing, and the next
    one decides.
    """
    is_csv = _is_csv(path)
    is_empty = True
    for line, text in lines(path):
        fields = _csv_fields(text, path, line) if is_csv else text.split("\t")
        if len(fields) != 3:
            raise bad_line(
                path, line, f"{len(fields)} tab-separated field(s), want id, text and title"
            )
        if line == 1:
            if fields != _PASSAGE_FIELDS:
                raise bad_line(
                    path,
                    line,
                    f"the header is {shown(fields)}, want id, text and title with tabs between",
                )
            continue
        number, body, title = fields
        if not number.strip() or not body.strip():
            raise bad_line(path, line, "the id or the text is blank; give both")
        is_empty = False
        yield {"id": number, "text": body, "title": title}
    if is_empty:
        raise DataError(
            f"{path} holds no passage. Put a header line, then id, text and title with tabs "
            "between them."
        )


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
    for passage in passages(folder):
        text = f"{passage['title']}\n{passage['text']}"
        if is_held_out(text, per_mille=_NQ_VALID_OF_1000) == (split == "valid"):
            yield {"text": text}


def _is_csv(path: Path) -> bool:
    """Whether the first field that can tell is quoted as CSV does; see `tsv_passages`. A header in
    quotes can tell.
    """
    for line, text in lines(path):
        for content in text.split("\t") if '"' in text else ():
            if '"' not in content:
                continue
            inner = content[1:-1]
            if content != f'"{inner}"' or '"' in inner.replace('""', ""):
                return False
            if line == 1 or '""' in inner:
                return True
    return False


def _csv_fields(text: str, path: Path, line: int) -> list[str]:
    try:
        return next(csv.reader([text], delimiter="\t", strict=True))
    except csv.Error as error:
        raise bad_line(
            path,
            line,
            f"{error}, in a file whose fields are quoted as CSV; close the quotes, and double "
            "those within",
        ) from None


def _question_row(raw: Row, path: Path, line: int) -> Row:
    row: Row = {
        "question": _text(raw, "question", path, line),
        "answers": _answers(raw, path, line),
    }
    if "dataset" in raw:
        row["dataset"] = _text(raw, "dataset", path, line)
    many = _one_of(raw, ("context", "contexts"), path, line) == "contexts"
    if not many:
        row["context"] = _text(raw, "context", path, line)
        if "title" in raw:
            row["title"] = _text(raw, "title", path, line)
        return row
    row["contexts"] = _text_list(raw, "contexts", path, line)
    if "titles" in raw:
        row["titles"] = _text_list(raw, "titles", path, line)
        if len(row["titles"]) != len(row["contexts"]):
            raise bad_line(
                path,
                line,
                f"{len(row['titles'])} titles for {len(row['contexts'])} contexts; give one each",
            )
    if "useful_contexts" in raw:
        row["useful_contexts"] = useful = raw["useful_contexts"]
        if (
            not isinstance(useful, list)
            or len(useful) != len(row["contexts"])
            or not set(useful) <= {0, 1}
        ):
            raise bad_line(
                path, line, f"'useful_contexts' is {shown(useful)}, want a 0 or 1 for each context"
            )
    return row


def _answers(raw: Row, path: Path, line: int) -> list[str]:
    if _one_of(raw, ("answer", "answers"), path, line) == "answer":
        return [_text(raw, "answer", path, line)]
    return _text_list(raw, "answers", path, line)


def _one_of(raw: Row, names: tuple[str, str], path: Path, line: int) -> str:
    given = [name for name in names if name in raw]
    if len(given) != 1:
        found = "both are" if given else "neither is"
        raise bad_line(
            path,
            line,
            f"{names[0]!r} or {names[1]!r} is wanted, {found} there (keys: "
            f"{', '.join(raw) or 'none'})",
        )
    return given[0]


def _text(raw: Row, name: str, path: Path, line: int) -> str:
    if name not in raw:
        raise bad_line(path, line, f"{name!r} is missing (keys: {', '.join(raw) or 'none'})")
    return _checked_text(raw[name], name, path, line)


def _text_list(raw: Row, name: str, path: Path, line: int) -> list[str]:
    values = raw[name]
    if not isinstance(values, list) or not values:
        raise bad_line(
            path, line, f"{name!r} is {shown(values)}, want a list of texts that is not empty"
        )
    return [
        _checked_text(value, f"{name}[{index}]", path, line) for index, value in enumerate(values)
    ]


def _checked_text(value: Any, name: str, path: Path, line: int) -> str:
    if not isinstance(value, str) or not value.strip():
        raise bad_line(path, line, f"{name!r} is {shown(value)}, want text that is not blank")
    return value


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def bad_line(path: Path, line: int, problem: str) -> DataError:
    return DataError(f"{path}, line {line}: {problem}.")


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, line without its end) of a UTF-8 file; only LF and CRLF end a line, for texts may
    hold U+2028.
    """
    try:
        with path.open("rb") as file:
            for line, content in enumerate(file, start=1):
                yield line, _decoded(content, path, line)
    except OSError as error:
        wanted = f"Put it there, or point --data_path at the folder that holds {path.name}."
        raise DataError(f"{path} cannot be read: {error.strerror}. {wanted}") from error


def _decoded(content: bytes, path: Path, line: int) -> str:
    encoding = "utf-8-sig" if line == 1 else "utf-8"
    try:
        return content.rstrip(b"\r\n").decode(encoding)
    except UnicodeDecodeError as error:
        raise bad_line(
            path, line, f"byte {error.start} is not UTF-8; save the file as UTF-8"
        ) from None


def _split_file(folder: Path | None, split: str) -> Path:
    folder = given_folder(folder, "train.jsonl and valid.jsonl")
    names = _JSONL_NAMES.get(split)
    if names is None:
        raise DataError(f"split={split!r} does not exist. Use {', '.join(_JSONL_NAMES)}.")
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(
        f"{folder} holds none of {', '.join(names)}, which the {split} split is read from. "
        "Write one JSON object a line, or point --data_path at the folder that holds the file."
    )


def split_names(split: str) -> Sequence[str]:
    if split not in _NQ_SPLITS:
        raise DataError(f"split={split!r} does not exist. Use {', '.join(_NQ_SPLITS)}.")
    return _NQ_SPLITS[split]


def nq_folder(folder: Path | None) -> Path:
    folder = given_folder(
        folder, f"{_PASSAGES} (id, text, title) and {QUERIES} (split, question, answers, gold)"
    )
    return next(
        (place for place in (folder, folder / "nq") if (place / _PASSAGES).is_file()), folder
    )


def given_folder(folder: Path | None, wanted: str) -> Path:
    if folder is None:
        raise DataError(
            "the data is read from --data_path, and none was given. Point it at a folder that "
            f"holds {wanted}, "
            "or use data.source='stdlib_docs', which needs no files."
        )
    return folder
