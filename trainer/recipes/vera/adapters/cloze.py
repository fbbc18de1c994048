"""Sets with a blank, and sets with endings.

A blank: wsc273, numersense, winogrande_xl, alphanli. Endings: copa, codah, swag, ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from trainer.data.readers import jsonl
from trainer.data.readers.row_files import placed_rows
from trainer.errors import DataError
from trainer.recipes.vera.adapters.adapter import (
    Adapter,
    Raw,
    Variants,
    add_to,
    checked_text,
    column,
    csv_objects,
    index_of,
    json_lines,
    labelled_json_lines,
    tab_lines,
    text_of,
    value_of,
    xml_items,
)
from trainer.recipes.vera.problem import (
    BadRecord,
    Problem,
    multiple_choice,
    write_padded_line,
)

ADAPTERS: dict[str, Adapter] = {}
_adapter = partial(add_to, ADAPTERS)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_WSC273 = 273  # the schemas of the collection that are WSC273, the first ones
# Words that lose their capital inside a sentence whatever comes next; names and "I" are not among
# them.
_FUNCTION_WORDS = _words(
    "a all an another both each every he her his it its many my no one our several she some "
    "someone something that the their there these they this those two we you your"
)


def _by_fields(
    question: str, options: Sequence[str], label: str, legal: Sequence[str]
) -> Callable[[Any, Variants], Problem]:
    """The reader of rows whose question, options and label are fields of these names.

    legal: the labels, in the order of the options.
    """

    def problem(row: Any, _: Variants) -> Problem:
        choices = [text_of(row, name) for name in options]
        gold = index_of(value_of(row, label), legal, label)
        return multiple_choice(text_of(row, question), choices, gold)

    return problem


_HUB = "{0}.jsonl|{0}.parquet|{0}-00000-of-00001.parquet"  # of a split, as the Hub has files


def _is_of_hub(paths: Sequence[Path | None]) -> bool:
    """Whether the first file has rows in the layout of Hugging Face's data sets."""
    return paths[0] is not None and paths[0].suffix != ".xml"


def _hub_rows(paths: Sequence[Path | None]) -> Iterator[Raw]:
    """The rows of JSON lines or of Parquet."""
    path = paths[0]
    assert path is not None, "a split's first file is there"
    for number, (_, row) in enumerate(placed_rows(path), start=1):
        yield Raw(path, "row", number, row)


# Blanks
# --------------------------------------------------------------------------------------------------


def _schemas(paths: Sequence[Path | None]) -> Iterator[Raw]:
    """(schema, its options) of WSC273; options as in wsc273.txt, where that is given, else as in
    the collection. Of the Hub's winograd_wsc: its rows.
    """
    if _is_of_hub(paths):
        yield from _hub_rows(paths)
        return
    collection, texts = paths
    schemas = list(xml_items([collection], "schema"))[:_WSC273]
    # a record of wsc273.txt: sentence, [MASK], options with a comma between, answer, blank
    lines = [] if texts is None else [text.strip() for _, text in jsonl.lines(texts)]
    records: list[tuple[str, str]] = []  # (right, wrong)
    for start in range(0, len(lines) - 3, 5):
        options = [option.strip() for option in lines[start + 2].split(",")]
        right = lines[start + 3]
        if texts is not None and (len(options) != 2 or right not in options):
            problem = (
                f"options {jsonl.preview(lines[start + 2])} and answer {jsonl.preview(right)} do "
                "not fit"
            )
            raise jsonl.bad_line(texts, start + 3, f"{problem}; take the published file")
        records.append((right, options[1 - options.index(right)]))
    if texts is not None and len(records) != len(schemas):
        raise DataError(
            f"{texts} holds {len(records)} schemas, and {collection} {len(schemas)}. Take the "
            "published files."
        )
    for index, raw in enumerate(schemas):
        yield raw._replace(value=(raw.value, None if texts is None else records[index]))


@_adapter(
    "wsc273",
    {"dev": (f"WSCollection.xml|{_HUB.format('test')}", "wsc273.txt?")},
    _schemas,
    variants={"case": ("keep", "fit")},
    is_cloze=True,
)
def _wsc(row: Any, variants: Variants) -> Problem:
    if isinstance(row, dict):
        question, choices, gold = _wsc_of_hub(row)
    else:
        question, choices, gold = _wsc_of_collection(*row)
    if variants["case"] == "fit":
        starts = question.startswith("_") or question[: question.index("_")].rstrip().endswith(
            (".", "!", "?")
        )
        if starts:
            choices = [choice[:1].upper() + choice[1:] for choice in choices]
        else:
            choices = [_lower_function_word(choice) for choice in choices]
    return multiple_choice(question, choices, gold)


def _wsc_of_hub(row: dict[str, Any]) -> tuple[str, list[str], int]:
    """A row of winograd_wsc (wsc273): text, pronoun, pronoun_loc, two options, label 0 or 1."""
    text, pronoun, start = (
        text_of(row, "text"),
        text_of(row, "pronoun"),
        value_of(row, "pronoun_loc"),
    )
    if not isinstance(start, int) or text[start : start + len(pronoun)] != pronoun:
        raise BadRecord(f"'pronoun_loc' is {start!r}, where the text has no {pronoun!r}")
    options = value_of(row, "options")
    if not isinstance(options, list) or len(options) != 2:
        raise BadRecord(f"'options' is {jsonl.preview(options)}, want two")
    choices = [checked_text(one, "options") for one in options]
    before, after = text[:start], text[start + len(pronoun) :]
    gold = index_of(value_of(row, "label"), ("0", "1"), "label")
    return " ".join(f"{before} _ {after}".split()), choices, gold


def _wsc_of_collection(
    schema: Element, options: tuple[str, str] | None
) -> tuple[str, list[str], int]:
    """A schema of WSCollection.xml; options: (right, wrong) of wsc273.txt."""
    gold = index_of(_xml_text(schema, "correctAnswer").strip(" ."), ("A", "B"), "correctAnswer")
    if options is None:
        choices = [
            " ".join((element.text or "").split()) for element in schema.findall("answers/answer")
        ]
    else:
        right, wrong = options
        choices = [right, wrong] if gold == 0 else [wrong, right]
    before, after = (schema.findtext(f"text/{name}") or "" for name in ("txt1", "txt2"))
    return " ".join(f"{before} _ {after}".split()), choices, gold


@_adapter(
    "numersense",
    {"train": ("train.masked.tsv",), "dev": ("validation.masked.tsv",)},
    tab_lines,
    is_cloze=True,
)
def _numersense(fields: Any, _: Variants) -> Problem:
    sentence, answer = column(fields, 0, "sentence"), column(fields, 1, "answer").strip()
    gold = index_of("no" if answer == "zero" else answer, _NUMBERS, "answer")
    return multiple_choice(sentence.replace("<mask>", "_"), _NUMBERS, gold)


@_adapter(
    "alphanli",
    {split: (f"{split}.jsonl", f"{split}-labels.lst") for split in ("train", "dev", "test")},
    labelled_json_lines,
    is_cloze=True,
)
def _alphanli(row: Any, _: Variants) -> Problem:
    story, label = row
    choices = [text_of(story, "hyp1"), text_of(story, "hyp2")]
    question = f"{text_of(story, 'obs1')} _ {text_of(story, 'obs2')}"
    return multiple_choice(question, choices, index_of(label, ("1", "2"), "label"))


# Endings
# --------------------------------------------------------------------------------------------------


@_adapter(
    "copa",
    {
        "train": (_HUB.format("train"),),  # of SuperGLUE: 400 of the 500 of the first release
        "dev": (f"copa-dev.xml|val.jsonl|{_HUB.format('validation')}",),
        "test": ("copa-test.xml",),  # SuperGLUE's has no answers
    },
    lambda paths: _hub_rows(paths) if _is_of_hub(paths) else xml_items(paths, "item"),
    variants={"connective": ("none", "because_so")},
    is_joined=True,
)
def _copa(item: Any, variants: Variants) -> Problem:
    if isinstance(item, dict):  # the Hub's and SuperGLUE's names
        premise, relation = text_of(item, "premise"), value_of(item, "question")
        choices = [text_of(item, "choice1"), text_of(item, "choice2")]
        gold = index_of(value_of(item, "label"), ("0", "1"), "label")
    else:
        premise, relation = _xml_text(item, "p"), item.get("asks-for")
        choices = [_xml_text(item, "a1"), _xml_text(item, "a2")]
        gold = index_of(
            item.get("most-plausible-alternative"), ("1", "2"), "most-plausible-alternative"
        )
    if variants["connective"] == "because_so":
        direction = index_of(relation, ("cause", "effect"), "asks-for")
        premise = f"{premise.strip().rstrip('.')} {('because', 'so')[direction]}"
        choices = [_lower_function_word(choice.strip()) for choice in choices]
    return multiple_choice(premise, choices, gold)


@_adapter("codah", {"dev": ("full_data.tsv",)}, tab_lines, is_joined=True)
def _codah(fields: Any, _: Variants) -> Problem:
    choices = [column(fields, 2 + index, f"ending {index}") for index in range(4)]
    gold = index_of(column(fields, 6, "answer"), ("0", "1", "2", "3"), "answer")
    return multiple_choice(column(fields, 1, "prompt"), choices, gold)


@_adapter(
    "hellaswag",
    {"train": ("hellaswag_train.jsonl",), "dev": ("hellaswag_val.jsonl",)},
    json_lines,
    is_joined=True,
)
def _hellaswag(row: Any, _: Variants) -> Problem:
    endings = value_of(row, "endings")
    if not isinstance(endings, list):
        raise BadRecord(f"'endings' is {jsonl.preview(endings)}, want a list")
    choices = [checked_text(ending, f"endings[{index}]") for index, ending in enumerate(endings)]
    gold = index_of(value_of(row, "label"), [str(index) for index in range(len(choices))], "label")
    return multiple_choice(text_of(row, "ctx"), choices, gold)


@_adapter(
    "story_cloze_test",
    {
        "dev": ("cloze_test_val__spring2016 - cloze_test_ALL_val.csv",),
        "dev_2018": ("cloze_test_val__winter2018-cloze_test_ALL_val - 1 - 1.csv",),
        "test": ("cloze_test_test__spring2016 - cloze_test_ALL_test.csv",),
    },
    csv_objects,
    is_joined=True,
)
def _story(row: Any, _: Variants) -> Problem:
    sentences = [text_of(row, f"InputSentence{number}").strip() for number in range(1, 5)]
    choices = [text_of(row, f"RandomFifthSentenceQuiz{number}") for number in (1, 2)]
    gold = index_of(value_of(row, "AnswerRightEnding"), ("1", "2"), "AnswerRightEnding")
    return multiple_choice(" ".join(sentences), choices, gold)


def _xml_text(element: Element, name: str) -> str:
    return checked_text(element.findtext(name), name)


def _lower_function_word(text: str) -> str:
    return text[:1].lower() + text[1:] if text.split(" ")[0].lower() in _FUNCTION_WORDS else text


ADAPTERS |= {
    "winogrande_xl": Adapter(
        {"train": ("train_xl.jsonl",), "dev": ("dev.jsonl",)},
        json_lines,
        _by_fields("sentence", ("option1", "option2"), "answer", ("1", "2")),
        is_cloze=True,
        line=write_padded_line,
    ),
    "swag": Adapter(
        {"train": ("train.csv",), "dev": ("val.csv",)},
        csv_objects,
        _by_fields(
            "startphrase",
            [f"ending{index}" for index in range(4)],
            "label",
            ("0", "1", "2", "3"),
        ),
        is_joined=True,
    ),
}
