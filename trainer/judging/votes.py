"""Votes of people on the answers of two models: votes.jsonl of a run. Imports no torch.

votes.jsonl holds rows that task `preference` reads as they are: `prompt`, `chosen`, `rejected`, and
`tools` where the row has some. Besides them stand `row`, `pair`, `voter`, `better`, `left` (the
model whose answer stood on the left) and `at`. votes_other.jsonl holds the same of votes that
prefer no answer, and of those that nobody could learn from: one of the two answers is blank.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from filelock import FileLock

from trainer.data.formats.normal_form import is_blank
from trainer.errors import ConfigError
from trainer.files.atomic import bounded_lines, open_file, read_small, refusals, replace_file
from trainer.metrics.win_rate import Preferred, Side

ANSWERS = "judge_answers.jsonl"  # what `lathe judge` leaves: both answers of each row
VOTES, OTHERS = "votes.jsonl", "votes_other.jsonl"
MOST_PAIRS = 1000  # that are shown to people
_LOCK_S = 30.0
_LETTERS = 16  # of a pair's digest


@dataclass(frozen=True)
class AnswerPair:
    """A row that both models answered."""

    row: int  # its number, from 1
    prompt: Any  # turns of a conversation, or a text
    references: Sequence[str]  # the right answers, where there are any
    before: str
    after: str
    tools: Any = None

    @cached_property
    def digest(self) -> str:
        """What names this prompt with these two answers; other answers are another pair."""
        text = json.dumps([self.prompt, self.before, self.after, self.tools], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_LETTERS]

    def answer(self, side: Side) -> str:
        """What a model said."""
        return self.after if side == "after" else self.before

    def left_of(self, voter: str) -> Side:
        """The model whose answer stands on the left for a voter: as good as random, and the same
        whenever, and by whichever server, the pair is shown.
        """
        digest = hashlib.sha256(f"{self.digest}\0{voter}".encode()).digest()
        return "after" if digest[0] % 2 else "before"


@dataclass(frozen=True)
class Vote:
    """What one person said of one pair."""

    row: int
    pair: str
    voter: str
    better: Preferred
    left: Side
    at: str  # ISO time


def read_pairs(path: Path, most: int | None = MOST_PAIRS) -> list[AnswerPair]:
    """The pairs of an ANSWERS file whose answers differ, in the order in which everybody gets them:
    that of their digests, so that the first ones are a random part of the rows. [] where there is
    no file. OSError. ConfigError for a line that is none.

    most: no more than these.
    """
    try:
        file = open_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    with file:
        pairs = (_pair(line, f"{path}, line {n}") for n, line in enumerate(bounded_lines(file), 1))
        differing = (one for one in pairs if one.before.strip() != one.after.strip())
        if most is None:
            return sorted(differing, key=lambda one: one.digest)
        return heapq.nsmallest(most, differing, key=lambda one: one.digest)


def _pair(line: bytes, place: str) -> AnswerPair:
    try:
        value = json.loads(line)
        names = ("row", "prompt", "references", "before", "after")
        pair = AnswerPair(*(value[name] for name in names), tools=value.get("tools"))
        if not (isinstance(pair.before, str) and isinstance(pair.after, str)):
            raise TypeError("an answer is no text")
        return pair
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{place}: no row of two answers ({type(error).__name__}: {error}). `lathe judge` "
            "writes the file anew."
        ) from None


def read_votes(folder: Path, pairs: Iterable[AnswerPair]) -> list[Vote]:
    """The votes on these pairs, one of each voter and pair: the last one. OSError."""
    wanted = {one.digest for one in pairs}
    last: dict[tuple[str, str], Vote] = {}
    for name in (VOTES, OTHERS):
        for line in _lines(folder / name):
            vote = _vote(line)
            if vote is None or vote.pair not in wanted:
                continue
            key = vote.pair, vote.voter
            if key not in last or last[key].at <= vote.at:
                last[key] = vote
    return [*last.values()]


def choices_of(votes: Iterable[Vote]) -> dict[str, list[Preferred]]:
    """Pair -> what each voter preferred."""
    choices: dict[str, list[Preferred]] = {}
    for vote in votes:
        choices.setdefault(vote.pair, []).append(vote.better)
    return choices


def add_vote(folder: Path, pair: AnswerPair, vote: Vote) -> None:
    """Add a vote to the files of a run, in place of an earlier one of the same voter on the pair.

    Each file is replaced as a whole, so that whoever dies here leaves no torn line; the file that
    gets the vote comes first, so that a death between the two leaves the last vote readable. What
    somebody else wrote into the files stays. StorageError when the disk refuses.
    """
    row = _as_row(pair, vote)
    is_preference = vote.better != "equal" and not any(map(is_blank, (pair.before, pair.after)))
    names = (VOTES, OTHERS) if is_preference else (OTHERS, VOTES)
    line = json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n"
    with refusals(folder), FileLock(folder / ".votes.lock", timeout=_LOCK_S):
        for name, new in zip(names, ([line], []), strict=True):
            path = folder / name
            lines = _lines(path)
            others = [one for one in lines if not _is_of(one, vote)]
            if others + new != lines:
                replace_file(path, b"".join([*others, *new]))


def _as_row(pair: AnswerPair, vote: Vote) -> dict[str, Any]:
    """A vote as a row of preferences. Of an equal one both answers stand under their models."""
    row: dict[str, Any] = {"prompt": pair.prompt}
    if vote.better == "equal":
        row |= {"before": pair.before, "after": pair.after}
    else:
        other: Side = "before" if vote.better == "after" else "after"
        row |= {"chosen": pair.answer(vote.better), "rejected": pair.answer(other)}
    if pair.tools is not None:
        row["tools"] = pair.tools
    return {**row, **vars(vote)}


def _is_of(line: bytes, vote: Vote) -> bool:
    other = _vote(line)
    return other is not None and (other.pair, other.voter) == (vote.pair, vote.voter)


def _vote(line: bytes) -> Vote | None:
    """The vote of a line; None for a line of somebody else."""
    try:
        value: Any = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, Mapping):
        return None
    row = cast("Mapping[str, Any]", value)
    names = Vote.__dataclass_fields__
    is_whole = all(isinstance(row.get(name), int if name == "row" else str) for name in names)
    if not is_whole or row["better"] not in ("before", "after", "equal"):
        return None
    return Vote(**{name: row[name] for name in names})


def _lines(path: Path) -> list[bytes]:
    """The lines of a file, each with its end. [] where there is none. OSError."""
    try:
        content = read_small(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [line + b"\n" for line in _whole(content)]


def _whole(content: bytes) -> Iterator[bytes]:
    return (line for line in content.split(b"\n") if line.strip())
