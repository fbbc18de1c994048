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

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from trainer.errors import DataError, nearest
from trainer.recipes.cross_attention import files, hotpotqa, natural_questions, topiocqa
from trainer.recipes.cross_attention.files import Part, PublishedRecord, read_as
from trainer.recipes.cross_attention.rows import UNANSWERABLE, row_of

if TYPE_CHECKING:
    from trainer.protocol.task import Row

log = logging.getLogger(__name__)

Name = Literal["nq", "hotpotqa", "squad_v2", "msmarco", "topiocqa"]
NAMES: tuple[Name, ...] = get_args(Name)
# No set of its own: where it is given, only the questions of nq that stand in it become rows.
NQ_OPEN = "nq_open"
# As published: every question of the train split stands there three times, each time with its
# passages in another order.
HOTPOTQA_SHUFFLES = 3

_HUB_CONFIGS = {"hotpotqa": "distractor", "msmarco": "v2.1"}
_HAS_TEST = ("hotpotqa", "topiocqa")
_NO_ANSWER = "no answer present"


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


# Words in the names of files that stand beside a set's own and are not part of it.
_FILES_OF_OTHERS = ("open", "fullwiki", "eval")


def sources_in(folder: Path | None, places_by_name: Mapping[str, str]) -> list[PublishedSource]:
    """The sets in the subfolders of a folder, and those of places_by_name.

    A set of places_by_name replaces the subfolder of its name. DataError for an unknown name, or
    when there is no set at all.
    """
    names = [*NAMES, NQ_OPEN]
    wrong = [name for name in places_by_name if name not in names]
    if wrong:
        raise DataError(f"--source {wrong[0]}: no such set. {nearest(wrong[0], names)}")
    places: dict[str, Path | str] = {}
    for name in names:
        if name in places_by_name:
            place = places_by_name[name]
            places[name] = Path(place) if Path(place).is_dir() else place
        elif folder is not None and (folder / name).is_dir():
            places[name] = folder / name
    sources = [
        PublishedSource(name, places[name], places.get(NQ_OPEN) if name == "nq" else None)
        for name in NAMES
        if name in places
    ]
    if not sources:
        raise DataError(
            f"{folder}: holds none of the folders {', '.join(NAMES)}. Put the publishers' files "
            "into such folders, or give a place by --source NAME=FOLDER_OR_HUB_ID."
        )
    return sources


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
        return hotpotqa.rows(source.records, split, shuffles if split == "train" else 0)
    if source.name == "topiocqa":
        return topiocqa.rows(source.records, split)
    read: Callable[[PublishedRecord], Row | None] = {
        "nq": natural_questions.row,
        "squad_v2": _squad,
        "msmarco": _msmarco,
    }[source.name]
    part: Part | None = {"train": "train", "valid": "dev"}.get(split)  # pyright: ignore[reportAssignmentType]
    records = source.records(part) if part else ()
    read_rows = (read_as(read, record) for record in records)
    of_split = (row for row in read_rows if row is not None)
    if source.only_questions is None:
        return of_split
    return natural_questions.with_questions_of(of_split, source.only_questions)


def has_test(sources: Iterable[PublishedSource]) -> bool:
    """Whether one of the sets has a test split."""
    return any(source.name in _HAS_TEST for source in sources)


def _squad(record: PublishedRecord) -> Row | None:
    """A question on one paragraph; impossible ones are UNANSWERABLE."""
    raw = record.values
    answers = raw["answers"]["text"] or [UNANSWERABLE]
    return row_of(
        record,
        raw["question"],
        answers,
        [(raw.get("title", "").replace("_", " "), raw["context"], True)],
    )


def _msmarco(record: PublishedRecord) -> Row | None:
    """A query with all its passages, of which those are useful that an annotator selected."""
    raw = record.values
    answers = [
        UNANSWERABLE if re.sub(r"\W+$", "", str(answer).strip().lower()) == _NO_ANSWER else answer
        for answer in raw["answers"]
    ]
    passages = raw["passages"]
    if isinstance(passages, dict):  # the Hub's: a list for each field
        pairs = zip(passages["passage_text"], passages["is_selected"], strict=True)
    else:
        pairs = ((passage["passage_text"], passage["is_selected"]) for passage in passages)
    return row_of(
        record, raw["query"], answers, [(None, text, bool(selected)) for text, selected in pairs]
    )
