"""NaturalQuestions in every form in which it is published: the simplified files, the original ones,
the Hub's natural_questions, and long_nq.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from trainer.recipes.cross_attention import files
from trainer.recipes.cross_attention.files import Part, PublishedRecord
from trainer.recipes.cross_attention.rows import UNANSWERABLE, is_text, row_of

if TYPE_CHECKING:
    from trainer.protocol.task import Row


def row(record: PublishedRecord) -> Row | None:
    """A row whose context is the long answer.

    Its answers are the short answers; without any, Yes or No; without these, UNANSWERABLE.
    """
    raw = record.values
    if "long_answer_clean" in raw:
        passage, shorts, verdicts = (
            raw["long_answer_clean"],
            raw.get("short_answers_text"),
            [raw.get("yes_no_answer")],
        )
        shorts = [shorts] if isinstance(shorts, str) else shorts or []
        return row_of(
            record,
            raw["question_text"],
            _nq_answers(shorts, verdicts),
            [(raw.get("document_title"), passage, True)],
        )
    tokens, title, question = _nq_document(record)
    annotations = _nq_annotations(record)
    passage = next((tokens(*span) for span, _, _ in annotations if span[1] > span[0] >= 0), None)
    shorts = [tokens(*span) for _, spans, _ in annotations for span in spans]
    answers = _nq_answers(shorts, [verdict for _, _, verdict in annotations])
    return row_of(record, question, answers, [(title, passage, True)])


def _nq_answers(shorts: Iterable[Any], verdicts: Iterable[Any]) -> list[Any]:
    texts = [text for text in shorts if is_text(text)]
    if texts:
        return texts
    words = {"YES": "Yes", "NO": "No", 1: "Yes", 0: "No"}
    keys = [verdict.upper() if isinstance(verdict, str) else verdict for verdict in verdicts]
    answers = [words[key] for key in keys if key in words]
    return answers[:1] or [UNANSWERABLE]


def _nq_document(record: PublishedRecord) -> tuple[Callable[[int, int], str], str | None, Any]:
    """The text of a span of tokens (mark-up left out), the title and the question."""
    raw = record.values
    if "document_text" in raw:  # simplified: tokens with spaces between, tags among them
        tokens = raw["document_text"].split(" ")
        words = [(token, token.startswith("<") and token.endswith(">")) for token in tokens]
    elif "document_tokens" in raw:
        words = [(token["token"], token["html_token"]) for token in raw["document_tokens"]]
    elif "document" in raw:  # the Hub's
        columns = raw["document"]["tokens"]
        words = list(zip(columns["token"], columns["is_html"], strict=True))
    else:
        raise record.bad(
            f"it has {', '.join(raw)}, want document_text, document_tokens, document or "
            "long_answer_clean"
        )
    document = raw.get("document") or {}
    title = raw.get("document_title") or document.get("title")
    if not title:
        names = parse_qs(urlsplit(raw.get("document_url", "")).query).get("title")
        title = names[0].replace("_", " ") if names else None
    question = raw["question_text"] if "question_text" in raw else raw["question"]["text"]

    def text(start: int, end: int) -> str:
        return " ".join(word for word, is_markup in words[start:end] if not is_markup)

    return text, title, question


def _nq_annotations(
    record: PublishedRecord,
) -> list[tuple[tuple[int, int], list[tuple[int, int]], Any]]:
    """(span of the long answer, spans of the short answers, yes or no) of every annotation."""
    annotations = record.values["annotations"]
    if isinstance(annotations, dict):  # the Hub's: a list for each field
        lists = zip(*annotations.values(), strict=True)
        annotations = [dict(zip(annotations, values, strict=True)) for values in lists]
    spans: list[tuple[tuple[int, int], list[tuple[int, int]], Any]] = []
    for one in annotations:
        long, shorts = _span(one["long_answer"]), one["short_answers"]
        if isinstance(shorts, dict):
            short_spans = list(zip(shorts["start_token"], shorts["end_token"], strict=True))
        else:
            short_spans = [_span(short) for short in shorts]
        spans.append((long, short_spans, one["yes_no_answer"]))
    return spans


def _span(answer: dict[str, int]) -> tuple[int, int]:
    return answer["start_token"], answer["end_token"]


def with_questions_of(rows: Iterable[Row], place: Path | str) -> Iterator[Row]:
    """The rows whose question stands in nq_open; case, punctuation and spaces do not matter."""
    parts: tuple[Part, ...] = ("train", "dev")
    questions = {
        _normal(record.text("question")) for part in parts for record in files.records(place, part)
    }
    return (row for row in rows if _normal(row["question"]) in questions)


def _normal(question: str) -> str:
    return " ".join(question.lower().translate(str.maketrans("", "", string.punctuation)).split())
