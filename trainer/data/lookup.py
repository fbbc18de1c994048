"""A made-up corpus about people and places that do not exist, so that a model can answer only by
reading the context.

A model that answers 95 % of the held-out rows finds the one fact that answers among other facts of
the same form, and copies a name that no training row holds. This shows within minutes, and without
any data set, whether training works on a new machine, cluster or recipe. A row depends only on its
split and its number, so it is the same on every machine. The split "control" holds the "valid"
rows without the fact that answers: a right answer there is a guess.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from typing import TYPE_CHECKING

from trainer.data.formats.held_out import is_held_out
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row

VERSION = 1  # seeds the names and texts below; add 1 when you change how they are made
CONTROL = "control"
NUM_ROWS = {"train": 60_000, "valid": 500, "test": 500, CONTROL: 500}
_CONTEXTS_PER_FACT = 25_000  # training rows of contexts() per fact, if more than NUM_ROWS

_SYLLABLES = ["".join(letters) for letters in product("bdfghklmnprstvz", "aeiou", "lnr")]
_HELD_OUT_OF_1000 = 200  # of 1,000 names, so many never occur in training
FACTS = 8  # the default number of facts in one text
_SAMPLED = 2000  # texts of each kind that a tokenizer is trained on
_RELATIONS = {  # the verb of a fact -> the question about it
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
    """(names for training, held-out names), each of two words of one syllable."""
    names = [f"{first} {second}".title() for first, second in product(_SYLLABLES, repeat=2)]
    is_fresh = [is_held_out(name, per_mille=_HELD_OUT_OF_1000) for name in names]
    return (
        [name for name, fresh in zip(names, is_fresh, strict=True) if not fresh],
        [name for name, fresh in zip(names, is_fresh, strict=True) if fresh],
    )


class _Draw(random.Random):
    """The random generator of one row. It draws only names of the row's split, and none twice."""

    def __init__(self, split: str, number: int) -> None:
        seeded = "valid" if split == CONTROL else split  # the same questions as in validation
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
        """`most` outside training; in training a random number from `least` to `most`.

        A shortness above 1 makes small numbers likelier: short rows teach the model to copy, long
        rows to choose.
        """
        if not self._is_training:
            return most
        return least + int((most - least + 1) * self.random() ** shortness)

    def facts(self, count: int, *, alike: bool = False) -> tuple[list[_Fact], _Fact]:
        """`count` facts in random order, and the one of them that the question asks for.

        With two or more facts, a second fact is about the same person. alike: the distractor facts
        answer the same relation for other people.
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
    """Rows {"id", "question", "answers", "ctxs"}: `passages` passages of one fact each, exactly one
    of which answers. In "control" that passage is missing.

    In training the passages about other people have the relation that the question asks for. With
    random relations, the relation alone would identify the answer in 6 of 10 rows of five passages,
    and a model would learn only slowly to look at the person as well (docs/log.md).
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


def fragments(split: str, *, passages: int) -> Iterator[Row]:
    """Rows {"id", "question", "answers", "ctxs"} that hold no question: in its place stands a
    fragment of one passage, its beginning ("Bal Kor lives in") or the place at its end ("Fen Zir"),
    and the answer is the whole passage.

    A row has `passages` passages, in training mostly fewer. The made-up base of the demo is trained
    on them (trainer/demo/make_base.py).
    """
    is_training = split == "train"
    for number, draw in _draws(split):
        facts, whole = draw.facts(draw.count(passages), alike=is_training)
        fragment = draw.choice([f"{whole.person} {whole.relation}", whole.place])
        ctxs = [{"title": "", "text": fact.text} for fact in facts]
        yield {"id": str(number), "question": fragment, "answers": [whole.text], "ctxs": ctxs}


def preferences(split: str, *, facts: int = 2, num_train: int = 6000) -> Iterator[Row]:
    """Rows {"prompt", "chosen", "rejected"}: facts about people and a question; of two sentences
    that name the right place, the chosen one says what was asked, and the other one that the person
    lives there, say, where the question was about work. Both have as many words, or nearly so.
    """
    for _, draw in _draws(split, num_train=num_train):
        own, asked = draw.facts(draw.count(facts))
        other = draw.choice([relation for relation in _RELATIONS if relation != asked.relation])
        yield {
            "prompt": f"{_text(own)} {asked.question}",
            "chosen": f" {asked.text}",
            "rejected": f" {asked.person} {other} {asked.place}.",
        }


def num_contexts(facts: int) -> int:
    """The number of training rows of contexts().

    60,000 rows of eight facts are too few, because layers learn them by heart: the training loss
    is then .005 and the held-out loss .168 (docs/log.md).
    """
    return max(NUM_ROWS["train"], _CONTEXTS_PER_FACT * facts)


def contexts(split: str, *, facts: int = FACTS) -> Iterator[Row]:
    """Rows {"question", "answers", "context", "title"}. One of the facts in the context answers.

    A context has `facts` facts, in training a random number up to that. In "control" a row has
    the context of the next row.
    """
    for number, draw in _draws(split, num_train=num_contexts(facts)):
        own, answer = draw.facts(draw.count(facts, shortness=1))
        if split == CONTROL:
            own, _ = _Draw(split, number + 1).facts(facts)
        yield {**_question_and_answer(answer), "context": _text(own), "title": ""}


def texts(split: str, *, facts: int = FACTS) -> Iterator[Row]:
    """Rows {"text", "answer_spans"} for language modelling. A text has `facts` facts, in training
    mostly fewer, and then a question about each fact with its answer.

    answer_spans: the answers in the text as (start, end) offsets in characters, end exclusive.
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
    """Rows {"id", "document", "summaries"}. The summary repeats the facts of the person whom the
    document names first.

    A document has `facts` facts about several people, in training mostly fewer. In "control" a row
    has the document of the next row.
    """
    for number, draw in _draws(split):
        document, summary = _document_and_summary(draw, facts)
        if split == CONTROL:
            document, _ = _document_and_summary(_Draw(split, number + 1), facts)
        yield {"id": str(number), "document": document, "summaries": [summary]}


def statements(kind: str, split: str) -> Iterator[Row]:
    """Groups {"golds", "distractors"}: one true statement, and false ones with the same beginning.

    The beginning alone decides which end is true. In "control" the gold is a random statement.

    kind: a key of STATEMENTS.
    """
    for _, draw in _draws(split):
        beginning, ends = STATEMENTS[kind](draw)
        gold = draw.randrange(len(ends)) if split == CONTROL else 0
        sentences = [f"{beginning} {end}" for end in ends]
        yield {"golds": [sentences.pop(gold)], "distractors": sentences}


def sample_texts() -> list[str]:
    """Texts of every kind, to train a tokenizer on."""
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


# Kinds of statements: (beginning, ends), of which the first end is true
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
