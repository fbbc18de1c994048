"""The made-up corpus: people and places that do not exist, so that an answer can only be read.

Whoever answers 95 % of its held-out rows has found the one fact that answers among others of the
same form, and copied a name that no training row holds: "does it learn?" of a new machine, cluster
or recipe, in minutes and without data. A row follows from its split and number alone, on every
machine. The split "control" is "valid" with what answers taken away: what is still right there is
not read but guessed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from typing import TYPE_CHECKING

from trainer.data.stdlib_docs import is_held_out
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row

VERSION = 1  # of the names and texts below, which it seeds: whoever changes them counts on
CONTROL = "control"
NUM_ROWS = {"train": 60_000, "valid": 500, "test": 500, CONTROL: 500}
_CONTEXTS_PER_FACT = 25_000  # training rows of contexts(), where that is more

_SYLLABLES = ["".join(letters) for letters in product("bdfghklmnprstvz", "aeiou", "lnr")]
_HELD_OUT_OF_1000 = 200  # names that training never holds
FACTS = 8  # of one text, where nothing else is said
_SAMPLED = 2000  # texts of each kind that a tokenizer sees
_RELATIONS = {  # how a fact is told, and how it is asked for
    "lives in": "Where does {} live?",
    "was born in": "Where was {} born?",
    "works in": "Where does {} work?",
    "has been to": "Where has {} been?",
}


@dataclass(frozen=True)
class _Fact:
    person: str  # "Bal Kor"
    relation: str  # "lives in"
    place: str  # "Fen Zir"

    @property
    def text(self) -> str:
        return f"{self.person} {self.relation} {self.place}."

    @property
    def question(self) -> str:
        return _RELATIONS[self.relation].format(self.person)


@cache
def _names() -> tuple[list[str], list[str]]:
    """Those of training, and those that it never holds: two words of one syllable each."""
    names = [f"{first} {second}".title() for first, second in product(_SYLLABLES, repeat=2)]
    is_fresh = [is_held_out(name, per_mille=_HELD_OUT_OF_1000) for name in names]
    return (
        [name for name, fresh in zip(names, is_fresh, strict=True) if not fresh],
        [name for name, fresh in zip(names, is_fresh, strict=True) if fresh],
    )


class _Draw(random.Random):
    """What one row is drawn with: names of its split alone, none of them twice."""

    def __init__(self, split: str, number: int) -> None:
        seeded = "valid" if split == CONTROL else split  # it asks what the validation asks
        super().__init__(f"{VERSION} {seeded} {number}")
        self._is_training = split == "train"
        trained, fresh = _names()
        self._names = trained if self._is_training else fresh
        self._drawn: set[str] = set()

    def name(self) -> str:
        while (name := self.choice(self._names)) in self._drawn:
            pass
        self._drawn.add(name)
        return name

    def count(self, most: int, *, least: int = 1, shortness: int = 2) -> int:
        """`most`; in training any number, and with a shortness above 1 mostly fewer: short rows
        teach to copy, long ones to choose.
        """
        if not self._is_training:
            return most
        return least + int((most - least + 1) * self.random() ** shortness)

    def facts(self, count: int, *, alike: bool = False) -> tuple[list[_Fact], _Fact]:
        """`count` facts in any order, and the one that is asked for; of two or more, another one is
        about the same person. alike: those of other people tell what is asked for, of them.
        """
        relations = list(_RELATIONS)
        relation_asked, other_relation = self.sample(relations, 2)
        person = self.name()
        answer = _Fact(person, relation_asked, self.name())
        facts = [answer, _Fact(person, other_relation, self.name())]
        while len(facts) < count:
            other_person, relation = self.name(), self.choice(relations)
            facts.append(_Fact(other_person, relation_asked if alike else relation, self.name()))
        del facts[count:]
        self.shuffle(facts)
        return facts, answer


def questions(split: str, *, passages: int) -> Iterator[Row]:
    """Rows {"id", "question", "answers", "ctxs"}: so many passages of one fact each, exactly one of
    which answers. In "control" that one is left out. In training the passages about other people
    tell what is asked for: where any relation will do there, it alone is right 6 times in 10 of
    five passages, and a reader is slow to look at the person as well (docs/log.md).
    """
    for number, draw in _draws(split):
        facts, answer = draw.facts(passages, alike=split == "train")
        if split == CONTROL:
            facts.remove(answer)
        ctxs = [
            {"id": f"{number}-{place}", "title": "", "text": fact.text}
            for place, fact in enumerate(facts)
        ]
        yield {"id": str(number), **_question_and_answer(answer), "ctxs": ctxs}


def num_contexts(facts: int) -> int:
    """Training rows of contexts(). Layers learn 60,000 texts of eight facts by heart: a training
    loss of .005 and a held-out one of .168 (docs/log.md).
    """
    return max(NUM_ROWS["train"], _CONTEXTS_PER_FACT * facts)


def contexts(split: str, *, facts: int = FACTS) -> Iterator[Row]:
    """Rows {"question", "answers", "context", "title"}: so many facts in one text, in training
    fewer too, one of which answers. The context of "control" is the next row's.
    """
    for number, draw in _draws(split, num_train=num_contexts(facts)):
        own, answer = draw.facts(draw.count(facts, shortness=1))
        if split == CONTROL:
            own, _ = _Draw(split, number + 1).facts(facts)
        yield {**_question_and_answer(answer), "context": _text(own), "title": ""}


def texts(split: str, *, facts: int = FACTS) -> Iterator[Row]:
    """Rows {"text", "answer_spans"} for language modelling: so many facts, in training mostly
    fewer, then a question about each with its answer, whose first character and the one behind its
    last are a span.
    """
    for _, draw in _draws(split):
        own, _ = draw.facts(draw.count(facts))
        text, spans = _text(own), list[tuple[int, int]]()
        for fact in draw.sample(own, len(own)):
            text += f" {fact.question}"
            spans.append((len(text), len(text) + len(f" {fact.place}.")))
            text += f" {fact.place}."
        yield {"text": text, "answer_spans": spans}


def summaries(split: str, *, facts: int = FACTS) -> Iterator[Row]:
    """Rows {"id", "document", "summaries"}: so many facts, in training mostly fewer, about several
    people, and what they say of the one who is named first. The document of "control" is the next
    row's.
    """
    for number, draw in _draws(split):
        document, summary = _document_and_summary(draw, facts)
        if split == CONTROL:
            document, _ = _document_and_summary(_Draw(split, number + 1), facts)
        yield {"id": str(number), "document": document, "summaries": [summary]}


def statements(kind: str, split: str) -> Iterator[Row]:
    """Groups {"golds", "distractors"}: a statement that is true by what it says itself, and some of
    the same beginning that are false. In "control" any one of them is called true.

    kind: a key of STATEMENTS.
    """
    for _, draw in _draws(split):
        beginning, ends = STATEMENTS[kind](draw)
        gold = draw.randrange(len(ends)) if split == CONTROL else 0
        sentences = [f"{beginning} {end}" for end in ends]
        yield {"golds": [sentences.pop(gold)], "distractors": sentences}


def sample_texts() -> list[str]:
    """Texts of every kind, for a tokenizer to be trained on."""
    rows = [*islice(texts("train"), _SAMPLED), *islice(summaries("train"), _SAMPLED)]
    sampled = [text for row in rows for text in (row.get("text"), row.get("document")) if text]
    for kind in STATEMENTS:
        groups = islice(statements(kind, "train"), _SAMPLED)
        sampled += [text for group in groups for text in group["golds"] + group["distractors"]]
    return sampled + [f"question: {text} title: context: {text}" for text in sampled[:_SAMPLED]]


def _draws(split: str, *, num_train: int = NUM_ROWS["train"]) -> Iterator[tuple[int, _Draw]]:
    if split not in NUM_ROWS:
        raise DataError(
            f"split={split!r} does not exist in the made-up corpus. Use {', '.join(NUM_ROWS)}."
        )
    count = num_train if split == "train" else NUM_ROWS[split]
    return ((number, _Draw(split, number)) for number in range(count))


def _question_and_answer(answer: _Fact) -> Row:
    return {"question": answer.question, "answers": [answer.place]}


def _text(facts: list[_Fact]) -> str:
    return " ".join(fact.text for fact in facts)


def _document_and_summary(draw: _Draw, count: int) -> tuple[str, str]:
    facts, answer = draw.facts(draw.count(count, least=2))
    own = [fact for fact in facts if fact.person == answer.person]
    claims = " and ".join(f"{fact.relation} {fact.place}" for fact in own)
    return f"About {answer.person}: {_text(facts)}", f"{answer.person} {claims}."


# What a statement tells, and how it may end: truly, and how falsely
# --------------------------------------------------------------------------------------------------


def _arithmetic(draw: _Draw) -> tuple[str, list[str]]:
    first, second = draw.randint(1, 9), draw.randint(1, 9)
    totals = [first + second + wrong for wrong in (0, *draw.sample([-3, -2, -1, 1, 2, 3], 3))]
    beginning = f"{draw.name()} has {first} coins. {draw.name()} has {second} coins."
    return beginning, [f"Together they have {total} coins." for total in totals]


def _order(draw: _Draw) -> tuple[str, list[str]]:
    came = draw.randint(2, 22)
    hours = [draw.randint(came + 1, 23), *draw.sample(range(1, came), min(3, came - 1))]
    name = draw.name()
    beginning = f"{name} came at {came} o'clock."
    return beginning, [f"So {name} came before {hour} o'clock." for hour in hours]


def _membership(draw: _Draw) -> tuple[str, list[str]]:
    members = [draw.name() for _ in range(draw.randint(1, 4))]
    names = [draw.choice(members), *(draw.name() for _ in range(3))]
    return f"The boat carries {', '.join(members)}.", [
        f"So {name} is in the boat." for name in names
    ]


STATEMENTS: dict[str, Callable[[_Draw], tuple[str, list[str]]]] = {
    "arithmetic": _arithmetic,
    "order": _order,
    "membership": _membership,
}
