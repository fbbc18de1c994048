"""Sets of yes/no questions and of statements.

They are creak, csqa2, strategyqa, spatial_cs, com2sense_paired and comve_a.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainer.errors import DataError
from trainer.recipes.vera.adapters.adapter import (
    Adapter,
    Raw,
    Variants,
    add_to,
    column,
    csv_rows,
    index_of,
    json_lines,
    json_list,
    text_of,
    value_of,
    whole_json,
)
from trainer.recipes.vera.problem import (
    BadRecord,
    Problem,
    multiple_choice,
    statement,
    yes_no,
)

ADAPTERS: dict[str, Adapter] = {}
_adapter = partial(add_to, ADAPTERS)

_FALSE_TRUE, _NO_YES = ("false", "true"), ("no", "yes")


def _truth(row: Any, name: str, words: tuple[str, str]) -> bool:
    """Whether a field holds the second of two words, such as true or yes."""
    return bool(index_of(value_of(row, name), words, name))


@_adapter(
    "csqa2",
    {split: (f"CSQA2_{split}.json|csqa2_{split}.json",) for split in ("train", "dev")},
    json_lines,
    # keep: as the author's train file has it, where a question with a line end in it makes two
    # broken lines
    variants={"newlines": ("join", "keep")},
)
def _csqa2(row: Any, variants: Variants) -> Problem:
    question, raw = text_of(row, "question"), value_of(row, "question")
    label = _truth(row, "answer", _NO_YES)
    return yes_no(raw if variants["newlines"] == "keep" else question, label=label)


@_adapter("strategyqa", {"train": ("train.json",), "dev": ("dev.json",)}, json_list)
def _strategyqa(row: Any, _: Variants) -> Problem:
    answer = value_of(row, "answer")
    if not isinstance(answer, bool):
        raise BadRecord(f"'answer' is {answer!r}, want true or false")
    return yes_no(text_of(row, "question"), label=answer)


def _com2sense_pairs(paths: Sequence[Path | None]) -> Iterator[Raw]:
    """(the ids, their records) of every pair, in the order of the pair file, which has each pair in
    both directions.
    """
    sentences, pairs = (path for path in paths if path is not None)
    by_id = {
        str(raw.value.get("id")): raw.value
        for raw in json_list([sentences])
        if isinstance(raw.value, dict)
    }
    pair_of = whole_json(pairs)
    if not isinstance(pair_of, dict):
        raise DataError(f"{pairs} is no JSON object of ids. Take the publisher's file as it is.")
    visited: set[str] = set()
    for number, (first, second) in enumerate(pair_of.items(), start=1):
        if first not in visited:
            visited |= {first, str(second)}
            yield Raw(
                pairs,
                "item",
                number,
                [(identity, by_id.get(identity)) for identity in (first, str(second))],
            )


@_adapter(
    "com2sense_paired",
    {split: (f"{split}.json", f"pair_id_{split}.json") for split in ("train", "dev", "test")},
    _com2sense_pairs,
)
def _com2sense(pair: Any, _: Variants) -> Problem:
    for identity, row in pair:
        if row is None:
            raise BadRecord(f"no sentence has the id {identity!r}")
    labels = [index_of(value_of(row, "label"), ("False", "True"), "label") for _, row in pair]
    if sum(labels) != 1:
        raise BadRecord(f"{sum(labels)} of the pair are true, want one")
    return multiple_choice(None, [text_of(row, "sent") for _, row in pair], labels.index(1))


def _comve_pairs(paths: Sequence[Path | None]) -> Iterator[Raw]:
    """(fields, which of the two makes no sense, or None) of every row of the data, joined by id."""
    data, gold = (path for path in paths if path is not None)
    absurd = {raw.value[0]: raw.value[1] for raw in csv_rows(gold) if len(raw.value) == 2}
    for raw in csv_rows(data):
        if raw.value[0] != "id":
            yield raw._replace(value=(raw.value, absurd.get(raw.value[0])))


@_adapter(
    "comve_a",
    {
        "train": (
            "subtaskA_train_data.csv|subtaskA_data_all.csv",
            "subtaskA_train_gold.csv|subtaskA_answers_all.csv",
        ),
        "dev": ("subtaskA_dev_data.csv", "subtaskA_dev_gold.csv|subtaskA_gold_answers.csv"),
        "test": ("subtaskA_test_data.csv", "subtaskA_test_gold.csv|subtaskA_gold_answers.csv"),
    },
    _comve_pairs,
)
def _comve(row: Any, _: Variants) -> Problem:
    fields, absurd = row
    if absurd is None:
        raise BadRecord(f"id {fields[0]!r} is not in the gold file")
    choices = [column(fields, 1, "sent0"), column(fields, 2, "sent1")]
    return multiple_choice(None, choices, 1 - index_of(absurd, ("0", "1"), "the gold file"))


ADAPTERS |= {
    "creak": Adapter(
        {"train": ("train.json",), "dev": ("dev.json",), "contrast": ("contrast_set.json",)},
        json_lines,
        lambda row, _: statement(text_of(row, "sentence"), label=_truth(row, "label", _FALSE_TRUE)),
        is_statement=True,
    ),
    "spatial_cs": Adapter(
        {"dev": ("height/data.json", "posrel/data_qa.json", "size/data.json")},
        json_lines,
        lambda row, _: yes_no(text_of(row, "question"), label=_truth(row, "label", ("0", "1"))),
    ),
}
