"""Keeps what a model is measured on out of what it is trained on: questions, and near copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.data.left_out import note
from trainer.errors import ConfigError, DataError
from trainer.rounds.near_copies import near_copies

if TYPE_CHECKING:
    from trainer.data.readers.questions import Query

COPIES = "training questions that a held-out question nearly repeats (left out)"
POSITIVES = "positives of held-out questions that are positives of training questions as well"
_SHOWN = 3  # pairs that a message shows


@dataclass(frozen=True)
class HeldOut:
    """Questions that a model is measured on, and the passages that answer them."""

    name: str  # valid or test
    queries: Sequence[Query]
    positives: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Guard:
    """What counts as a near copy, and what becomes of it."""

    least: float = 0.8  # similarity of near copies (near_copies.py)
    drops: bool = False  # leave near copies out of the training questions; else they are refused

    def __post_init__(self) -> None:
        if not 0 < self.least <= 1:
            raise ConfigError(
                f"--near {self.least}: want a similarity above 0 and at most 1, such as 0.8."
            )


def without_leaks(
    train: Sequence[Query],
    positives: Mapping[str, Sequence[str]],
    held_out: Sequence[HeldOut],
    *,
    guard: Guard,
) -> list[Query]:
    """The training questions that no held-out question nearly repeats.

    positives: of the training questions. Those that held-out questions have as well are noted.
    DataError names the near copies, where they are not to be dropped, and when no question is left.
    """
    copies: dict[int, str] = {}
    for of_split in held_out:
        texts = [query.text for query in of_split.queries]
        for copy in near_copies((query.text for query in train), texts, least=guard.least):
            other = of_split.queries[copy.other]
            copies.setdefault(
                copy.text,
                f"question {train[copy.text].id!r} ({train[copy.text].text!r}) is nearly question "
                f"{other.id!r} of {of_split.name} ({other.text!r}; similarity "
                f"{copy.similarity:.2f})",
            )
    if copies and not guard.drops:
        shown = "\n".join(list(copies.values())[:_SHOWN])
        raise DataError(
            f"{len(copies)} of {len(train)} training questions are near copies of held-out ones, "
            f"which a trained model would remember:\n{shown}\nGive --drop_copies to train without "
            "them, or --near with a higher similarity, if these are not the same questions."
        )
    for text in copies.values():
        note(text, COPIES)
    kept = [query for number, query in enumerate(train) if number not in copies]
    if not kept:
        raise DataError(
            f"all {len(train)} training questions are near copies of held-out ones. Give others in "
            "--queries, or --near with a higher similarity."
        )
    _note_shared_passages(kept, positives, held_out)
    return kept


def _note_shared_passages(
    train: Sequence[Query],
    positives: Mapping[str, Sequence[str]],
    held_out: Sequence[HeldOut],
) -> None:
    trained_on = {passage for query in train for passage in positives[query.id]}
    for of_split in held_out:
        for query in of_split.queries:
            for passage in of_split.positives[query.id]:
                if passage in trained_on:
                    note(
                        f"passage {passage!r} of question {query.id!r} of {of_split.name}",
                        POSITIVES,
                    )
