"""Questions with the passages that a retriever found for them.

A row is {"id", "question", "answers", "target"?, "ctxs"}: id is text, answers may be empty but in
the train split, and ctxs are the passages, best first as the file has them: {"id"?, "title"?,
"text"?, "score"?}, where what is missing or null in the file is missing in the row. A passage
without "text" has an id, to be looked up in a corpus. Rows come in the order of the file and one at
a time; only what must be joined (the questions of a ranking, and the ranking) is held in memory.
Errors name the line, or the item of a JSON list; both are counted from 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainer.config.formats.layouts import QUESTIONS
from trainer.config.own_rows import OwnRows, Splits
from trainer.data import lookup, stdlib_docs
from trainer.data.formats import picked
from trainer.data.left_out import note
from trainer.data.readers import fields
from trainer.data.readers.folders import split_file
from trainer.data.readers.own_rows import FILES, own_rows
from trainer.data.readers.questions import nq_lines
from trainer.data.readers.rankings import RankedPassage, check_distinct, ranked_passages
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row

_QUESTION_FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")
_RANKED_FILES, _RANKING_FILES = (".json", ".jsonl"), (".trec", ".tsv", ".txt", ".run")
UNSCORED = "questions of which some passages have a score (the order of the file is kept)"
UNANSWERED = "questions without an answer (answered, not scored)"
_NO_LISTS = ("answers", "answer", "target")  # of texts, beside the passages
_PASSAGE_LISTS = (
    ("ctxs",),  # FiD, and what DPR's retriever writes
    ("positive_ctxs", "hard_negative_ctxs", "negative_ctxs"),  # DPR's training files
    ("positive_passages", "negative_passages"),  # Tevatron's training files
)


def rows(
    data_path: Path | None,
    split: str,
    *,
    source: Literal["fid", "files", "ranked", "nq", "stdlib_docs", "lookup"],
    own: OwnRows = FILES,
    ranking: str | None = None,
    contexts: int,
    sort_by_score: bool,
    cache_dir: Path | None = None,
) -> Iterator[Row]:
    """Questions of a split, each with its first `contexts` passages: fewer, or none, where there
    are fewer.

    sort_by_score: where every passage of a question has a score, the highest come first; ties keep
    their order. own: where a user's rows are, see `own_rows`. ranking: a name below data_path;
    None: <split>.trec, .tsv, .txt or .run, where the valid split may also be called val, dev or
    validation. "fid", "files": question (or query), answers (or answer; a list or a text), target,
    and ctxs; or in place of ctxs contexts with titles, or what DPR and Tevatron train on,
    positives before negatives. A passage is an object or an id. "ranked": such questions without
    passages, and a ranking, see `ranked_passages`. "nq": queries.jsonl of `data_path` or its
    subfolder nq, with ranked ids under "bm25". "stdlib_docs": the embedded corpus; a question's own
    passage stands among those of the questions behind it. "lookup": made-up facts, of which one
    answers.
    """
    if source == "nq":
        rows = _nq_rows(data_path, split, own.files)
    elif source == "stdlib_docs":
        rows = _documentation_rows(split, contexts)
    elif source == "lookup":
        rows = lookup.questions(split, passages=contexts)
    else:
        suffixes = _RANKED_FILES if source == "ranked" else _QUESTION_FILES
        how: dict[str, Any] = {"layout": QUESTIONS, "suffixes": suffixes, "cache_dir": cache_dir}
        questions = own_rows(own, split, data_path, **how)
        if source == "ranked":
            path = split_file(data_path, split, _RANKING_FILES, name=ranking, key="data.rankings")
            limits: dict[str, Any] = {"contexts": contexts, "sort_by_score": sort_by_score}
            rows = _ranked_rows(questions, split, path, **limits)
        else:
            rows = (
                {**_question(raw, place, index=index, split=split), "ctxs": _passages(raw, place)}
                for index, (place, raw) in picked.enumerated(questions)
            )
    for index, row in picked.enumerated(rows):
        number = index + 1
        if not row["answers"] and "target" not in row:
            note(f"row {number}, question {row['id']!r}", UNANSWERED, field="answers")
        have_scores = {"score" in one for one in row["ctxs"]}
        if sort_by_score and len(have_scores) > 1:
            note(f"row {number}, question {row['id']!r}", UNSCORED, field="ctxs.score")
        yield {**row, "ctxs": _first(row["ctxs"], contexts, sort_by_score)}


def _first(ctxs: list[Row], contexts: int, sort_by_score: bool) -> list[Row]:
    if sort_by_score and all("score" in ctx for ctx in ctxs):
        ctxs = sorted(ctxs, key=lambda ctx: ctx["score"], reverse=True)
    return ctxs[:contexts]


def question_with_passages(raw: Row, place: str, *, contexts: int, sort_by_score: bool) -> Row:
    """The row that an object in our names gives, which need not know an answer."""
    row = _question(raw, place, index=0, split="test")
    return {**row, "ctxs": _first(_passages(raw, place), contexts, sort_by_score)}


# The sources: rows with all passages that the file has, in its order


def _nq_rows(data_path: Path | None, split: str, files: Splits) -> Iterator[Row]:
    for index, place, raw in nq_lines(data_path, split, getattr(files, split, None)):
        if "bm25" not in raw:
            raise DataError(
                f"{place}: 'bm25' is missing (keys: {fields.keys(raw)}).", place=place, field="bm25"
            )
        ctxs = fields.passages(raw["bm25"], place, "bm25")
        yield {**_question(raw, place, index=index, split=split), "ctxs": ctxs}


def _documentation_rows(split: str, contexts: int) -> Iterator[Row]:
    """Rows about documentation, each with its own passage among others.

    That of row i is at place i modulo the number of passages, so that the place tells nothing.
    """
    documented = stdlib_docs.qa_rows(split)
    passages = [
        {"id": str(index), "title": row["title"], "text": row["context"]}
        for index, row in enumerate(documented)
    ]
    count = min(contexts, len(documented))
    for index, row in enumerate(documented):
        ctxs = [passages[(index + step) % len(documented)] for step in range(1, count)]
        ctxs.insert(index % count, passages[index])
        yield {
            "id": str(index),
            "question": row["question"],
            "answers": row["answers"],
            "ctxs": ctxs,
        }


def _ranked_rows(
    placed: Iterator[tuple[str, Row]],
    split: str,
    ranking: Path,
    *,
    contexts: int,
    sort_by_score: bool,
) -> Iterator[Row]:
    questions: dict[str, Row] = {}
    for index, (place, raw) in enumerate(placed):
        question = _question(raw, place, index=index, split=split)
        if question["id"] in questions:
            raise DataError(
                f"{place}: the id {question['id']!r} stands twice; give every question its own.",
                place=place,
            )
        questions[question["id"]] = question
    ranked: dict[str, list[RankedPassage]] = {name: [] for name in questions}
    _read_ranking(ranking, ranked, contexts=contexts, sort_by_score=sort_by_score)
    for name, of_question in ranked.items():
        if not of_question:
            note(f"{ranking}, question {name!r}", "questions that the ranking lacks (no passages)")
    for name, question in questions.items():
        hits = ranked.pop(name)
        check_distinct([hit.passage for hit in hits], name, ranking)
        ctxs: list[Row] = []
        for hit in hits:
            ctxs.append({"id": hit.passage})
            if hit.score is not None:
                ctxs[-1]["score"] = hit.score
        yield {**question, "ctxs": ctxs}


def _read_ranking(
    path: Path, ranked: dict[str, list[RankedPassage]], *, contexts: int, sort_by_score: bool
) -> None:
    """Fills `ranked`; lines for other questions are left out, and noted."""
    unknown: dict[str, None] = {}
    for question, passage in ranked_passages(path):
        best = ranked.get(question)
        if best is None:
            unknown[question] = None
            continue
        best.append(passage)
        is_sorted = sort_by_score and passage.score is not None
        if len(best) > contexts + (1000 if is_sorted else 0):  # a run 1000 deep would be gigabytes
            if is_sorted:
                best.sort(key=lambda one: one.score or 0.0, reverse=True)
            del best[contexts:]
    if unknown and not any(ranked.values()):
        raise DataError(
            f"{path} ranks passages for none of the {len(ranked)} questions: its ids are like "
            f"{min(unknown)!r}, theirs like {next(iter(ranked))!r}. Use the ranking of these "
            "questions, or give them its ids: without one, a question's id is its place in the "
            "file, from 0."
        )
    for question in unknown:
        note(f"{path}, question {question!r}", "ranked questions of no row of the split (left out)")


# What an object says


def _question(raw: Row, place: str, *, index: int, split: str) -> Row:
    """{"id", "question", "answers", "target"?} of a raw row.

    Without an id of its own, its index in the file, from 0, is the id.
    """
    id_name, number = fields.first_given(raw, fields.QUESTION_IDS)
    name, question = fields.first_given(raw, fields.QUESTIONS, "question")
    if question is None:
        raise DataError(
            f"{place}: {name!r} is missing (keys: {fields.keys(raw)}).", place=place, field=name
        )
    row: Row = {
        "id": str(index) if number is None else fields.identity(number, place, id_name),
        "question": fields.text(question, place, name),
        "answers": fields.answers(raw, place),
    }
    if raw.get("target") is not None:
        row["target"] = fields.text(raw["target"], place, "target")
    if split == "train" and not row["answers"] and "target" not in row:
        raise DataError(
            f"{place}: neither 'answers' nor 'target' is there (keys: {fields.keys(raw)}), which a "
            "question to train on needs. Add one, or take the question out.",
            place=place,
        )
    return row


def _passages(raw: Row, place: str) -> list[Row]:
    names = next((names for names in _PASSAGE_LISTS if any(name in raw for name in names)), None)
    if names is None:
        contexts = fields.contexts(raw, place)
        if contexts is not None:
            return contexts
        lists = [name for name, value in raw.items() if isinstance(value, list)]
        lists = [name for name in lists if name not in _NO_LISTS]
        advice = 'Write "ctxs": [] in a row for which no passage was found.'
        if lists:
            names_of_lists = " or ".join(map(repr, lists))
            advice = f"Is that {names_of_lists} here? data.columns maps it to 'ctxs'."
        raise DataError(
            f"{place}: 'ctxs' is missing, and so are 'contexts' and 'context' (keys: "
            f"{fields.keys(raw)}). They are the passages that are read. {advice}",
            place=place,
            field="ctxs",
        )
    passages: list[Row] = []
    for name in names:
        if raw.get(name) is not None:
            passages += fields.passages(raw[name], place, name)
    return passages
