"""The files that a loop of rounds reads: a corpus, training questions, and those that are held
out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.formats.layouts import TEVATRON
from trainer.data.formats.held_out import PLACES, place_of_row
from trainer.data.readers.passages import distinct_passages, passages, passages_with_ids
from trainer.data.readers.questions import queries
from trainer.data.readers.rankings import Qrels, read_qrels
from trainer.errors import ConfigError, DataError
from trainer.retrieval import embeddings
from trainer.retrieval.negatives import positives_of
from trainer.rounds.leaks import Guard, HeldOut, without_leaks

if TYPE_CHECKING:
    from trainer.data.readers.questions import Query
    from trainer.protocol.task import Row


@dataclass(frozen=True)
class QuestionFile:
    """Questions, and what is relevant to them."""

    queries: Path
    qrels: Path | None = None  # None: the positives that the file of questions names
    split: str | None = None  # only questions whose "split" is this one

    def read(self) -> Questions:
        judgements = None if self.qrels is None else read_qrels(self.qrels)
        own = list(queries(self.queries, self.split))
        return Questions(own, positives_of(own, judgements))


@dataclass(frozen=True)
class Questions:
    """Questions that were read, and the ids of the passages that answer each."""

    queries: Sequence[Query]
    positives: Mapping[str, Sequence[str]]

    @cached_property
    def digest(self) -> str:
        content = [[one.id, one.text, one.answers, self.positives[one.id]] for one in self.queries]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def qrels(self) -> Qrels:
        """The judgements, of questions that have any."""
        own = self.positives
        return {one.id: dict.fromkeys(own[one.id], 1) for one in self.queries if own[one.id]}

    @cached_property
    def digest_and_count(self) -> tuple[str, int]:
        return embeddings.digest_of(self.rows())

    def rows(self) -> Iterable[Row]:
        return ({"id": one.id, "text": one.text} for one in self.queries)

    def only(self, kept: Sequence[Query]) -> Questions:
        return Questions(kept, self.positives)


@dataclass(frozen=True)
class Corpus:
    """The passages that are searched. They stay on the disk."""

    path: Path

    def rows(self) -> Iterable[Row]:
        return passages(self.path)

    def texts(self, ids: set[str]) -> dict[str, Row]:
        return passages_with_ids(self.path, ids)

    def refuse_bad_ids(self, needed: set[str]) -> None:
        """DataError for an id that two passages have, and for one of `needed` that none has. It
        reads every passage, and holds 8 bytes of each.
        """
        absent = set(needed)
        for row in distinct_passages(self.path):
            absent.discard(row["id"])
        if absent:
            self.texts(needed)  # which names one of them

    @cached_property
    def digest_and_count(self) -> tuple[str, int]:
        return embeddings.digest_of(passages(self.path))


@dataclass(frozen=True)
class LoopFiles:
    """What a person names."""

    passages: Path
    train: QuestionFile
    valid: QuestionFile | None = None
    valid_share: float = 0.0  # of the training questions, where there is no file of validation
    test: QuestionFile | None = None  # is never trained on nor measured; the guard reads it

    def __post_init__(self) -> None:
        if (self.valid is None) == (not self.valid_share):
            got = "both" if self.valid_share else "none of them"
            raise ConfigError(
                f"--valid_queries (or --valid_qrels, --valid_split) and --valid_share: got {got}, "
                "want one. Every round is measured on validation questions."
            )
        if not 0 <= self.valid_share < 1:
            raise ConfigError(f"--valid_share {self.valid_share}: want a share such as 0.1.")

    def read(self, guard: Guard) -> LoopTexts:
        """What the files hold, without near copies of what is held out. DataError when nothing is
        left to train on or to measure.
        """
        train = self.train.read()
        if self.valid is None:
            valid, train = _parted(train, self.valid_share)
        else:
            valid = self.valid.read()
        if not valid.qrels:
            raise DataError(
                f"none of the {len(valid.queries)} validation questions has a relevant passage. "
                "Give --valid_qrels, questions with positives, or a larger --valid_share."
            )
        if not train.queries:
            raise DataError(
                f"--valid_share {self.valid_share} holds all {len(valid.queries)} questions out, "
                "and none is left to train on. Give a smaller share."
            )
        held_out = [HeldOut("valid", valid.queries, valid.positives)]
        if self.test is not None:
            test = self.test.read()
            held_out.append(HeldOut("test", test.queries, test.positives))
        kept = without_leaks(train.queries, train.positives, held_out, guard=guard)
        train = train.only(kept)
        if not train.qrels:
            raise DataError(
                f"none of the {len(kept)} training questions has a relevant passage. Give --qrels, "
                "or questions with positives."
            )
        return LoopTexts(Corpus(self.passages), train, valid)


def _parted(questions: Questions, share: float) -> tuple[Questions, Questions]:
    """The held-out share, and the others: the rule of `data.valid_share`, so that a judge trained
    under the same share has not seen what is held out here.
    """
    held_out: list[Query] = []
    others: list[Query] = []
    for query in questions.queries:
        place = place_of_row({"query": query.text}, TEVATRON)
        is_held_out = place is not None and place < round(share * PLACES)
        (held_out if is_held_out else others).append(query)
    return questions.only(held_out), questions.only(others)


@dataclass(frozen=True)
class LoopTexts:
    """What was read."""

    corpus: Corpus
    train: Questions
    valid: Questions

    def refuse_bad_ids(self) -> None:
        """DataError for a relevant passage that the corpus lacks, and for an id that two passages
        have, before anything is encoded.
        """
        of_questions = (*self.train.qrels.values(), *self.valid.qrels.values())
        self.corpus.refuse_bad_ids({name for relevant in of_questions for name in relevant})

    @property
    def digests(self) -> dict[str, str]:
        """Names the content, for the plan of a loop."""
        return {
            "passages": self.corpus.digest_and_count[0],
            "train": self.train.digest,
            "valid": self.valid.digest,
        }
