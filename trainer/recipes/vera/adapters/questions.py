"""Sets of questions with options.

The science and commonsense exams of AI2 and their kin, and UnifiedQA's own files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainer.data.readers import jsonl
from trainer.errors import DataError
from trainer.recipes.vera.adapters.adapter import (
    Adapter,
    Raw,
    Variants,
    add_to,
    checked_text,
    index_of,
    json_lines,
    json_list,
    labelled_json_lines,
    plain_lines,
    text_of,
    value_of,
)
from trainer.recipes.vera.problem import BadRecord, Problem, multiple_choice, read_line

ADAPTERS: dict[str, Adapter] = {}
_adapter = partial(add_to, ADAPTERS)

_OPTION_MARK = re.compile(r"\s*\([A-Z]\)\s*")
_CAPITALS = {"train": "Train", "dev": "Dev", "test": "Test"}


def _files_by_split(
    pattern: str, *, train: str = "train", dev: str = "dev", test: str = "test"
) -> dict[str, tuple[str, ...]]:
    names = {"train": train, "dev": dev, "test": test}
    return {split: (pattern.format(name),) for split, name in names.items()}


def _files_with_labels(dev: str) -> dict[str, tuple[str, ...]]:
    names = {"train": "train", "dev": dev}
    labels = {
        split: "|".join(f"{name}-labels.lst" for name in alternatives.split("|"))
        for split, alternatives in names.items()
    }
    rows = {
        split: "|".join(f"{name}.jsonl" for name in alternatives.split("|"))
        for split, alternatives in names.items()
    }
    return {split: (rows[split], labels[split]) for split in names}


def _stem(row: Any, _: Variants) -> Problem:
    """{"question": {"stem", "choices": [{"label", "text"}]}, "answerKey"}.

    Labels may be letters or numbers.
    """
    options = value_of(row, "question", "choices")
    if not isinstance(options, list):
        raise BadRecord(f"'question.choices' is {jsonl.preview(options)}, want a list")
    labels = [str(value_of(option, "label")) for option in options]
    gold = index_of(value_of(row, "answerKey"), labels, "answerKey")
    return multiple_choice(
        text_of(row, "question", "stem"), [text_of(option, "text") for option in options], gold
    )


@_adapter("physical_iqa", _files_with_labels("valid|dev"), labelled_json_lines)
def _piqa(row: Any, _: Variants) -> Problem:
    goal, label = row
    return multiple_choice(
        text_of(goal, "goal"),
        [text_of(goal, "sol1"), text_of(goal, "sol2")],
        index_of(label, ("0", "1"), "label"),
    )


@_adapter("social_iqa", _files_with_labels("dev"), labelled_json_lines)
def _siqa(row: Any, _: Variants) -> Problem:
    story, label = row
    choices = [text_of(story, f"answer{letter}") for letter in "ABC"]
    gold = index_of(label, ("1", "2", "3"), "label")
    return multiple_choice(text_of(story, "question"), choices, gold, text_of(story, "context"))


@_adapter("sciq", _files_by_split("{}.json", dev="valid"), json_list)
def _sciq(row: Any, _: Variants) -> Problem:
    """The options in alphabetical order.

    The file has the answer apart, and the place of an option must not tell it.
    """
    right = text_of(row, "correct_answer")
    choices = sorted([right, *(text_of(row, f"distractor{number}") for number in (1, 2, 3))])
    return multiple_choice(text_of(row, "question"), choices, choices.index(right))


@_adapter("quarel", _files_by_split("quarel-v1-{}.jsonl"), json_lines)
def _quarel(row: Any, _: Variants) -> Problem:
    """{"question": "text (A) one (B) other", "answer_index"}."""
    question, *choices = _OPTION_MARK.split(text_of(row, "question"))
    choices = [
        checked_text(choice.strip(), f"option {index + 1}") for index, choice in enumerate(choices)
    ]
    gold = index_of(
        value_of(row, "answer_index"), [str(index) for index in range(len(choices))], "answer_index"
    )
    return multiple_choice(checked_text(question.strip(), "question"), choices, gold)


def _cycic_rows(paths: Sequence[Path | None]) -> Iterator[Raw]:
    """(question, label) of the multiple-choice half of CycIC, joined by run_id; the true/false half
    is left alone.
    """
    questions, labels = (path for path in paths if path is not None)
    label_of = {
        str(row.get("run_id")): row.get("correct_answer") for row in jsonl.read_jsonl(labels)
    }
    for raw in json_lines([questions]):
        if raw.value.get("questionType") != "true/false":
            yield raw._replace(value=(raw.value, label_of.get(str(raw.value.get("run_id")))))


@_adapter(
    "cycic_mc",
    {
        "train": tuple(
            f"CycIC_training_{part}.jsonl|cycic_training_{part}.jsonl"
            for part in ("questions", "labels")
        ),
        "dev": tuple(
            f"CycIC_dev_{part}.jsonl|cycic_dev_{part}.jsonl" for part in ("questions", "labels")
        ),
    },
    _cycic_rows,
)
def _cycic(row: Any, _: Variants) -> Problem:
    question, label = row
    names = sorted(name for name in question if name.startswith("answer_option"))
    gold = index_of(label, [name.removeprefix("answer_option") for name in names], "correct_answer")
    return multiple_choice(
        text_of(question, "question"), [text_of(question, name) for name in names], gold
    )


@_adapter(
    "prost",
    {"dev": ("default.jsonl|prost.jsonl",)},
    json_lines,
    variants={"question": ("ex_question", "masked")},
)
def _prost(row: Any, variants: Variants) -> Problem:
    choices = [text_of(row, letter) for letter in "ABCD"]
    gold = index_of(value_of(row, "label"), ("0", "1", "2", "3"), "label")
    if variants["question"] == "masked":
        question = text_of(row, "question").replace("[MASK]", "_")
    else:
        question = text_of(row, "ex_question")
    return multiple_choice(question, choices, gold, text_of(row, "context"))


def unified_lines(paths: Sequence[Path | None]) -> Iterator[Raw]:
    """The lines of a UnifiedQA file; an empty one is refused, as every other format is."""
    is_empty = True
    for raw in plain_lines(paths):
        is_empty = False
        yield raw
    if is_empty:
        raise DataError(
            f"{paths[0]} is empty. Put one question, a tab and its answer on every line."
        )


ADAPTERS |= {
    "commonsenseqa": Adapter(
        {split: (f"{split}_rand_split.jsonl",) for split in ("train", "dev")}, json_lines, _stem
    ),
    "qasc": Adapter({split: (f"{split}.jsonl",) for split in ("train", "dev")}, json_lines, _stem),
    "openbookqa": Adapter(_files_by_split("{}.jsonl"), json_lines, _stem),
    "arc_easy": Adapter(_files_by_split("ARC-Easy-{}.jsonl", **_CAPITALS), json_lines, _stem),
    "arc_hard": Adapter(_files_by_split("ARC-Challenge-{}.jsonl", **_CAPITALS), json_lines, _stem),
    "ai2_science_elementary": Adapter(
        _files_by_split("Elementary-NDMC-{}.jsonl", **_CAPITALS), json_lines, _stem
    ),
    "ai2_science_middle": Adapter(
        _files_by_split("Middle-NDMC-{}.jsonl", **_CAPITALS), json_lines, _stem
    ),
    "quartz": Adapter(_files_by_split("{}.jsonl"), json_lines, _stem),
    "unifiedqa": Adapter(
        _files_by_split("{}.tsv"),
        unified_lines,
        lambda line, variants: read_line(
            line,
            is_statement=variants["boolean"] == "statement",
            keeps_blank=variants["blank"] == "keep",
        ),
        variants={"boolean": ("question", "statement"), "blank": ("refuse", "keep")},
    ),
}
