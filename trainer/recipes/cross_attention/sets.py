"""Reading-comprehension data as its publishers give it out: NaturalQuestions, HotpotQA, SQuAD 2, MS
MARCO, TopiOCQA.

A row is what `readers.questions.qa_rows` reads: question, answers, contexts, titles (where there
are any), useful_contexts (a 0 or 1 for each), dataset. One that cannot be answered has the answer
UNANSWERABLE; one without answers or without a context is left out. Source of these rules and of the
splits: ServiceNow/xc-cache, HEAD 0e90cb8. A publisher's dev set is the valid split of nq, squad_v2
and msmarco; of hotpotqa and topiocqa it is the test split, and valid is taken out of train.

A set is read from a folder with its publisher's files (.json, .jsonl, .gz of these; train, dev or
val in their names), from a folder that `datasets` saved, or from the Hub. Always in the same order,
and one row in memory at a time.
"""

from __future__ import annotations

import hashlib
import logging
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import parse_qs, urlsplit

from trainer.errors import DataError, nearest
from trainer.recipes.cross_attention import files
from trainer.recipes.cross_attention.files import Part, PublishedRecord, read_as

if TYPE_CHECKING:
    from trainer.protocol.task import Row

log = logging.getLogger(__name__)

Name = Literal["nq", "hotpotqa", "squad_v2", "msmarco", "topiocqa"]
NAMES: tuple[Name, ...] = get_args(Name)
# no set of its own: when it is given, only those questions of nq are kept that stand in it
NQ_OPEN = "nq_open"
UNANSWERABLE = "UNANSWERABLE"
# as published: every question of the train split three times, its passages in another order
HOTPOTQA_SHUFFLES = 3
_SEED = 12345  # of those orders, and of hotpotqa's valid split

_HUB_CONFIGS = {"hotpotqa": "distractor", "msmarco": "v2.1"}
_HAS_TEST = ("hotpotqa", "topiocqa")
_NO_ANSWER = "no answer present"
_TURN = " [SEP] "  # between the turns of a conversation, as in TopiOCQA's own "all history" files


@dataclass(frozen=True)
class PublishedSource:
    """One set and where it is: a folder, or an id on the Hub."""

    name: Name
    place: Path | str
    only_questions: Path | str | None = None  # nq: where nq_open is

    def records(self, part: Part) -> Iterator[PublishedRecord]:
        """The publisher's records of a part, whatever form they are kept in."""
        return files.records(
            self.place, part, without=_FILES_OF_OTHERS, config=_HUB_CONFIGS.get(self.name)
        )


_FILES_OF_OTHERS = (
    "open",
    "fullwiki",
    "eval",
)  # in the names of files that stand beside a set's own


def sources_in(folder: Path | None, given: Mapping[str, str]) -> list[PublishedSource]:
    """The sets below a folder, in subfolders of their names, and those that are given by name and
    place.

    DataError for a name that is none, or when there is no set at all.
    """
    known = [*NAMES, NQ_OPEN]
    wrong = [name for name in given if name not in known]
    if wrong:
        raise DataError(f"--source {wrong[0]}: no such set. {nearest(wrong[0], known)}")
    places: dict[str, Path | str] = {}
    for name in known:
        if name in given:
            places[name] = Path(given[name]) if Path(given[name]).is_dir() else given[name]
        elif folder is not None and (folder / name).is_dir():
            places[name] = folder / name
    found = [
        PublishedSource(name, places[name], places.get(NQ_OPEN) if name == "nq" else None)
        for name in NAMES
        if name in places
    ]
    if not found:
        raise DataError(
            f"{folder}: holds none of the folders {', '.join(NAMES)}. Put the publishers' files "
            "into such folders, or give a place by --source NAME=FOLDER_OR_HUB_ID."
        )
    return found


def rows(
    sources: Iterable[PublishedSource], split: str, *, hotpotqa_shuffles: int = HOTPOTQA_SHUFFLES
) -> Iterator[Row]:
    """The rows of a split of some sets, one set after another."""
    for source in sources:
        count = 0
        for row in _rows_of(source, split, hotpotqa_shuffles):
            count += 1
            yield {**row, "dataset": source.name}
        log.info("%s: %d rows of the %s split", source.name, count, split)


def _rows_of(source: PublishedSource, split: str, shuffles: int) -> Iterator[Row]:
    if source.name == "hotpotqa":
        return _hotpotqa(source, split, shuffles if split == "train" else 0)
    if source.name == "topiocqa":
        return _topiocqa(source, split)
    read: Callable[[PublishedRecord], Row | None] = {
        "nq": _nq,
        "squad_v2": _squad,
        "msmarco": _msmarco,
    }[source.name]
    part: Part | None = {"train": "train", "valid": "dev"}.get(split)  # pyright: ignore[reportAssignmentType]
    found = (
        row
        for record in (source.records(part) if part else ())
        if (row := read_as(read, record)) is not None
    )
    return found if source.only_questions is None else _asked_in(found, source.only_questions)


def has_test(sources: Iterable[PublishedSource]) -> bool:
    """Whether one of the sets has a test split."""
    return any(source.name in _HAS_TEST for source in sources)


def _row(
    record: PublishedRecord,
    question: Any,
    answers: Iterable[Any],
    passages: Iterable[tuple[Any, Any, bool]],
) -> Row | None:
    """A row of (title, text, whether it is useful) passages; None without answer or context."""
    kept = [(title, text, useful) for title, text, useful in passages if _is_text(text)]
    references = list(dict.fromkeys(answer for answer in answers if _is_text(answer)))
    if not _is_text(question):
        raise record.bad(f"its question is {question!r:.60}, want text that is not blank")
    if not references or not kept:
        return None
    row: Row = {
        "question": question,
        "answers": references,
        "contexts": [text for _, text, _ in kept],
    }
    if all(_is_text(title) for title, _, _ in kept):
        row["titles"] = [title for title, _, _ in kept]
    row["useful_contexts"] = [int(useful) for _, _, useful in kept]
    return row


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


# NaturalQuestions
# --------------------------------------------------------------------------------------------------


def _nq(record: PublishedRecord) -> Row | None:
    """Long answer, and its first short answer, else Yes or No, else UNANSWERABLE; the others are
    references too.

    Understood: the simplified files, the original ones, the Hub's natural_questions, and long_nq,
    which is flat.
    """
    raw = record.values
    if "long_answer_clean" in raw:
        passage, shorts, verdicts = (
            raw["long_answer_clean"],
            raw.get("short_answers_text"),
            [raw.get("yes_no_answer")],
        )
        shorts = [shorts] if isinstance(shorts, str) else shorts or []
        return _row(
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
    return _row(record, question, answers, [(title, passage, True)])


def _nq_answers(shorts: Iterable[Any], verdicts: Iterable[Any]) -> list[Any]:
    found = [text for text in shorts if _is_text(text)]
    if found:
        return found
    words = {"YES": "Yes", "NO": "No", 1: "Yes", 0: "No"}
    known = [
        words[key]
        for verdict in verdicts
        if (key := verdict.upper() if isinstance(verdict, str) else verdict) in words
    ]
    return known[:1] or [UNANSWERABLE]


def _nq_document(record: PublishedRecord) -> tuple[Callable[[int, int], str], str | None, Any]:
    """The text of a span of tokens (mark-up left out), the title and the question."""
    raw = record.values
    if "document_text" in raw:  # simplified: tokens with spaces between, tags among them
        tokens = raw["document_text"].split(" ")
        words = [(token, token.startswith("<") and token.endswith(">")) for token in tokens]
    elif "document_tokens" in raw:
        words = [(token["token"], token["html_token"]) for token in raw["document_tokens"]]
    elif "document" in raw:  # the Hub's
        found = raw["document"]["tokens"]
        words = list(zip(found["token"], found["is_html"], strict=True))
    else:
        raise record.bad(
            f"it has {', '.join(raw)}, want document_text, document_tokens, document or "
            "long_answer_clean"
        )
    document = raw.get("document") or {}
    title = (
        raw.get("document_title")
        or document.get("title")
        or _title_of_url(raw.get("document_url", ""))
    )
    question = raw["question_text"] if "question_text" in raw else raw["question"]["text"]

    def text(start: int, end: int) -> str:
        return " ".join(word for word, is_markup in words[start:end] if not is_markup)

    return text, title, question


def _nq_annotations(
    record: PublishedRecord,
) -> list[tuple[tuple[int, int], list[tuple[int, int]], Any]]:
    """(span of the long answer, spans of the short answers, yes or no) of every annotation."""
    found = record.values["annotations"]
    if isinstance(found, dict):  # the Hub's: a list for each field
        found = [dict(zip(found, one, strict=True)) for one in zip(*found.values(), strict=True)]
    return [
        (
            _span(one["long_answer"]),
            [_span(short) for short in _spans(one["short_answers"])],
            one["yes_no_answer"],
        )
        for one in found
    ]


def _spans(shorts: Any) -> list[dict[str, int]]:
    if isinstance(shorts, dict):
        pairs = zip(shorts["start_token"], shorts["end_token"], strict=True)
        return [{"start_token": start, "end_token": end} for start, end in pairs]
    return shorts


def _span(found: Mapping[str, int]) -> tuple[int, int]:
    return found["start_token"], found["end_token"]


def _title_of_url(url: str) -> str | None:
    names = parse_qs(urlsplit(url).query).get("title")
    return names[0].replace("_", " ") if names else None


def _asked_in(rows: Iterable[Row], place: Path | str) -> Iterator[Row]:
    """The rows whose question stands in nq_open, case, punctuation and spaces aside."""
    parts: tuple[Part, ...] = ("train", "dev")
    asked = {
        _normal(record.text("question")) for part in parts for record in files.records(place, part)
    }
    return (row for row in rows if _normal(row["question"]) in asked)


def _normal(question: str) -> str:
    return " ".join(question.lower().translate(str.maketrans("", "", string.punctuation)).split())


# SQuAD and MS MARCO
# -------------------------------------------------------------------------------------------------


def _squad(record: PublishedRecord) -> Row | None:
    """A question on one paragraph; impossible ones are UNANSWERABLE."""
    raw = record.values
    answers = raw["answers"]["text"] or [UNANSWERABLE]
    return _row(
        record,
        raw["question"],
        answers,
        [(raw.get("title", "").replace("_", " "), raw["context"], True)],
    )


def _msmarco(record: PublishedRecord) -> Row | None:
    """A query with all its passages, of which those are useful that an annotator selected."""
    raw = record.values
    answers = [UNANSWERABLE if _is_no_answer(answer) else answer for answer in raw["answers"]]
    passages = raw["passages"]
    if isinstance(passages, dict):  # the Hub's: a list for each field
        pairs = zip(passages["passage_text"], passages["is_selected"], strict=True)
    else:
        pairs = ((passage["passage_text"], passage["is_selected"]) for passage in passages)
    return _row(
        record, raw["query"], answers, [(None, text, bool(selected)) for text, selected in pairs]
    )


def _is_no_answer(answer: Any) -> bool:
    return isinstance(answer, str) and re.sub(r"\W+$", "", answer.strip().lower()) == _NO_ANSWER


# HotpotQA
# --------------------------------------------------------------------------------------------------


def _hotpotqa(source: PublishedSource, split: str, shuffles: int) -> Iterator[Row]:
    """Ten passages each; those with a supporting sentence are useful.

    shuffles: copies of a row in other orders; 0: as given.
    """
    if split == "test":
        chosen = source.records("dev")
    else:
        held_out = _held_out(source)
        chosen = (
            record
            for record in source.records("train")
            if (_hotpotqa_id(record) in held_out) == (split == "valid")
        )
    for record in chosen:
        row = read_as(_hotpotqa_row, record)
        if row is None:
            continue
        for copy in range(max(1, shuffles)):
            yield _shuffled(row, f"{copy}:{_hotpotqa_id(record)}") if shuffles else row


def _hotpotqa_row(record: PublishedRecord) -> Row | None:
    raw = record.values
    context, facts = raw["context"], raw["supporting_facts"]
    if isinstance(context, dict):  # the Hub's: a list for each field
        context, facts = (
            zip(context["title"], context["sentences"], strict=True),
            zip(facts["title"], facts["sent_id"], strict=True),
        )
    supporting = {title for title, _ in facts}
    passages = [
        (title, "".join(sentences).strip(), title in supporting) for title, sentences in context
    ]
    return _row(record, raw["question"], [raw["answer"]], passages)


def _hotpotqa_id(record: PublishedRecord) -> str:
    return record.text("_id" if "_id" in record.values else "id")


def _held_out(source: PublishedSource) -> set[str]:
    """The ids of the questions of train that are the valid split: as many as dev has, chosen by a
    hash.
    """
    count = sum(1 for _ in source.records("dev"))
    ids = [_hotpotqa_id(record) for record in source.records("train")]
    return set(sorted(ids, key=lambda name: _draw(f"valid:{name}"))[: min(count, len(ids) // 2)])


def _shuffled(row: Row, name: str) -> Row:
    """The same row with its passages in an order that the name decides."""
    order = sorted(range(len(row["contexts"])), key=lambda place: _draw(f"{name}:{place}"))
    lists = {
        field: [row[field][place] for place in order]
        for field in ("contexts", "titles", "useful_contexts")
        if field in row
    }
    return {**row, **lists}


def _draw(name: str) -> bytes:
    # no generator: numpy's and Python's orders may change
    return hashlib.sha256(f"{_SEED}:{name}".encode()).digest()


# TopiOCQA
# --------------------------------------------------------------------------------------------------


def _topiocqa(source: PublishedSource, split: str) -> Iterator[Row]:
    """A turn of a conversation on its gold passage; the last conversations of train, as many as dev
    has, are valid.
    """
    if split == "test":
        chosen = source.records("dev")
    else:
        number = len({_conversation(record) for record in source.records("dev")})
        conversations = list(
            dict.fromkeys(_conversation(record) for record in source.records("train"))
        )
        last = set(conversations[-min(number, len(conversations) // 2) :] if number else ())
        chosen = (
            record
            for record in source.records("train")
            if (_conversation(record) in last) == (split == "valid")
        )
    return (row for record in chosen if (row := read_as(_topiocqa_row, record)) is not None)


def _conversation(record: PublishedRecord) -> str:
    names = [name for name in ("Conversation_no", "conv_id") if name in record.values]
    if not names:
        raise record.bad(f"it has {', '.join(record.values)}, want Conversation_no or conv_id")
    return str(record.values[names[0]])


def _topiocqa_row(record: PublishedRecord) -> Row | None:
    """Understood: the conversations with their Gold_passage.

    Also the publisher's retriever and gold-passage files.
    """
    raw = record.values
    if "Question" in raw:
        further = [answer["Answer"] for answer in raw.get("Additional_answers") or []]
        question = _TURN.join([*(raw.get("Context") or []), raw["Question"]])
        passages, answers = (
            [raw["Gold_passage"]] if raw.get("Gold_passage") else [],
            [raw["Answer"], *further],
        )
    elif "positive_ctxs" in raw:
        question, answers, passages = raw["question"], raw["answers"], raw["positive_ctxs"][:1]
    else:
        question, answers = raw["question"], raw.get("short_answers") or raw.get("answers") or []
        passages = (
            [{"title": raw.get("title"), "text": raw["context"]}] if raw.get("context") else []
        )
    return _row(
        record, question, answers, [(found.get("title"), found["text"], True) for found in passages]
    )
