"""Questions with answers and passages, in the formats of SQuAD, DPR and Tevatron.

For a reader a row becomes {"question", "answers", "ctxs"}, its passages that answer before those
that do not. For a retriever it becomes {"query", "positive_passages",
"negative_passages"}.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from trainer.data.formats.lists import as_list, structure
from trainer.data.left_out import note
from trainer.data.readers import fields
from trainer.data.readers.jsonl import preview
from trainer.data.usual.placed import Around, Placed, named
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row

WITHOUT_POSITIVE = "questions without a positive passage (left out)"
IMPOSSIBLE = "questions that their paragraph does not answer (left out)"
_OF_DPR = ("positive_ctxs", "hard_negative_ctxs", "negative_ctxs")
POSITIVES = ("positive_passages", "positive_docids", "positive_document_ids")
NEGATIVES = ("negative_passages", "negative_docids", "negative_document_ids")


def question_of(raw: Row, question: str, sides: tuple[list[Row], list[Row]]) -> Row:
    """The row of a reader. sides: the passages that answer, and the others."""
    positives, others = sides
    row: Row = {"question": question, "ctxs": positives + others}
    for name in ("answers", "answer", "target"):
        if raw.get(name) is not None:
            row[name] = raw[name]
    return named(raw, row)


# DPR
# --------------------------------------------------------------------------------------------------


def dpr_questions(placed: Placed, around: Around) -> Placed:
    """Questions with all their passages, positives first. Those of a .qa.csv have no passages."""
    for place, raw in placed:
        question = fields.required_text(raw, "question", place)
        if all(raw.get(name) is None for name in _OF_DPR):
            bare = {name: raw[name] for name in ("answers", "answer") if raw.get(name) is not None}
            yield place, named(raw, {"question": question, **bare})
            continue
        positives, hard, easy = _dpr_passages(raw, place)
        yield place, question_of(raw, question, (positives, hard + easy))


def dpr_queries(placed: Placed, around: Around) -> Placed:
    """Queries with their positives; the negatives are the hard ones, or the easy ones where there
    are none. Questions without positives are left out.
    """
    for index, (place, raw) in enumerate(placed):
        question = fields.required_text(raw, "question", place)
        if all(raw.get(name) is None for name in _OF_DPR):
            raise DataError(
                f"{place}: 'positive_ctxs' is missing (keys: {fields.keys(raw)}), which a "
                "retriever learns from; a .qa.csv holds questions and answers alone. Give DPR's "
                "biencoder-*.json.",
                place=place,
                field="positive_ctxs",
            )
        positives, hard, easy = _dpr_passages(raw, place)
        if not positives:
            note(place, WITHOUT_POSITIVE, field="positive_ctxs")
            continue
        name, number = fields.first_given(raw, fields.QUESTION_IDS)
        yield (
            place,
            {
                "query_id": index if number is None else fields.identity(number, place, name),
                "query": question,
                "positive_passages": positives,
                "negative_passages": hard or easy,
            },
        )


def _dpr_passages(raw: Row, place: str) -> list[list[Row]]:
    """The positives, the hard negatives and the other negatives of a question."""
    return [fields.passages(raw.get(name) or [], place, name) for name in _OF_DPR]


# Tevatron
# --------------------------------------------------------------------------------------------------


def tevatron_questions(placed: Placed, around: Around) -> Placed:
    """Queries with answers as questions with passages, positives first."""
    for place, raw in placed:
        name, query = fields.first_given(raw, fields.QUESTIONS)
        sides: list[list[Row]] = []
        for names in (POSITIVES, NEGATIVES):
            side, values = fields.first_given(raw, names)
            sides.append(fields.passages(values or [], place, side))
        question = fields.text(query, place, name)
        yield place, question_of(raw, question, (sides[0], sides[1]))


# SQuAD
# --------------------------------------------------------------------------------------------------


def squad_questions(placed: Placed, around: Around) -> Placed:
    """Questions, each with its paragraph. Those that it does not answer (SQuAD 2) are left out."""
    for place, raw, paragraph in _squad_rows(placed, around):
        row: Row = {"question": raw["question"], "context": paragraph["text"]}
        if raw["answers"]:
            row["answers"] = raw["answers"]
        if paragraph.get("title"):
            row["title"] = paragraph["title"]
        yield place, named(raw, row)


def squad_queries(placed: Placed, around: Around) -> Placed:
    """Questions as queries, each with its paragraph as the positive and no negative."""
    for place, raw, paragraph in _squad_rows(placed, around):
        row: Row = {"query": raw["question"], "positive_passages": [paragraph]}
        yield place, named(raw, {**row, "negative_passages": []})


def _squad_rows(placed: Placed, around: Around) -> Iterator[tuple[str, Row, Row]]:
    """(place, {"id"?, "question", "answers"}, {"title"?, "text"} of its paragraph)."""
    for place, flat, title, context in _flat(placed):
        question = fields.required_text(flat, "question", place)
        answers = _squad_answers(flat, place)
        if around.is_labelled and not answers:
            note(place, IMPOSSIBLE, field="answers")
            continue
        paragraph: Row = {"text": fields.text(context, place, "context")}
        if title is not None and str(title).strip():
            paragraph["title"] = fields.text(title, place, "title")
        identity = {} if flat.get("id") is None else {"id": flat["id"]}
        yield place, {**identity, "question": question, "answers": answers}, paragraph


def _flat(placed: Placed) -> Iterator[tuple[str, Row, Any, Any]]:
    """(place, question, title, context) of flat rows, and of files as they were published: {"data":
    [{"title", "paragraphs": [{"context", "qas": [...]}]}]}.
    """
    for place, raw in placed:
        if raw.get("data") is None and raw.get("paragraphs") is None:
            yield place, raw, raw.get("title"), raw.get("context")
            continue
        articles = [raw] if raw.get("data") is None else _objects(raw["data"], place, "data")
        for number, article in enumerate(articles):
            at = "" if raw.get("data") is None else f"data[{number}]."
            for below, paragraph in enumerate(_inside(article, "paragraphs", place, at)):
                inner = f"{at}paragraphs[{below}]."
                for last, question in enumerate(_inside(paragraph, "qas", place, inner)):
                    here = f"{place}, {inner}qas[{last}]"
                    yield here, question, article.get("title"), paragraph.get("context")


def _inside(raw: Row, name: str, place: str, at: str) -> list[Row]:
    return _objects(raw.get(name), place, f"{at}{name}")


def _objects(value: Any, place: str, name: str) -> list[Row]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):  # pyright: ignore[reportUnknownVariableType]
        raise DataError(
            f"{place}: {name} is {preview(value)}, want a list of objects, as SQuAD's files have "
            "data, paragraphs and qas.",
            place=place,
            field=name,
        )
    return cast("list[Row]", value)


def _squad_answers(raw: Row, place: str) -> list[str]:
    """The different answers of a question, of {"text": [...]} or of [{"text"}, ...]."""
    value = raw.get("answers")
    value = structure(value, place, "answers") if isinstance(value, str) and value else value
    if isinstance(value, dict) and "text" not in value:
        raise DataError(
            f"{place}: 'answers' is {preview(value)}, want a list of texts under \"text\".",
            place=place,
            field="answers",
        )
    value = cast("Row", value)["text"] if isinstance(value, dict) else value
    texts = as_list(value, place, "answers.text")
    if not isinstance(texts, list | None):
        texts = [texts]
    answers: list[str] = []
    for number, one in enumerate(cast("list[Any]", texts or [])):
        text = cast("Row", one).get("text") if isinstance(one, dict) else one
        answers.append(fields.text(text, place, f"answers[{number}].text"))
    return list(dict.fromkeys(answers))
