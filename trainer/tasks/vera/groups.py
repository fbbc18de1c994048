"""Reads groups of statements: from converted data sets, a user's own files or the embedded
corpora.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trainer.config.formats.layouts import STATEMENTS
from trainer.data import lookup, stdlib_docs
from trainer.data.formats import picked
from trainer.data.formats.json_text import json_value
from trainer.data.formats.lists import as_list
from trainer.data.formats.normal_form import is_blank
from trainer.data.left_out import note, watched
from trainer.data.readers.folders import required_folder, split_names
from trainer.data.readers.own_rows import own_rows
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row
    from trainer.tasks.vera.config import Data

log = logging.getLogger(__name__)

SEED = 19260817  # the published program's seed of its shuffle and of its samples of large dev sets
# The published data sets whose statements are judged one by one. Source: FORMAT_BY_TASK of the
# published program.
BOOLEAN = {
    "csqa2",
    "symkd_anno",
    "gengen_anno",
    "spatial_cs",
    "strategyqa",
    "creak",
    "rainier_anno",
}
# The tasks of the embedded corpora, and whether each is boolean.
EMBEDDED = {"docs_choice": False, "docs_boolean": True, **dict.fromkeys(lookup.STATEMENTS, False)}
_FILES = {"train": "train.json", "valid": "dev.json", "test": "test.json"}
_CHOICES = 4
BOTH = "groups whose gold is a distractor as well (learnt as true and as false)"
_SIDES = ("golds", "distractors")
_LABELS = {"1": True, "0": False, "true": True, "false": False, "yes": True, "no": False}


def tasks_of(data: Data, split: str) -> Sequence[str]:
    """The tasks of a split in their order; those of "test" are the valid tasks if none are named.

    DataError for an unknown split.
    """
    sources = {
        "train": data.train_tasks,
        "valid": data.valid_tasks,
        "test": data.test_tasks or data.valid_tasks,
    }
    if data.source == "lookup":
        sources[lookup.CONTROL] = data.valid_tasks
    if split not in sources:
        raise DataError(f"split={split!r} does not exist. Use {', '.join(sources)}.")
    return sources[split]


def is_boolean(task: str, data: Data) -> bool:
    """Whether each statement of a task is true or false by itself; otherwise one statement of each
    group is true.
    """
    is_embedded = data.source != "groups"
    return task in BOOLEAN or task in data.boolean or (is_embedded and EMBEDDED.get(task, False))


def rows(
    data: Data, split: str, folder: Path | None, *, cache_dir: Path | None = None
) -> list[Row]:
    """The groups of a split, task by task: {"task", "number", "golds", "distractors"}, where number
    counts the groups of a task from 0.

    data.order "legacy" shuffles the training groups once, as published. A valid task with more
    groups than data.valid_limit is cut to a sample of them, drawn as published. DataError names the
    file and the group that is wrong.
    """
    rows: list[Row] = []
    for task in tasks_of(data, split):
        rows += _of_task(task, data, split, folder, cache_dir)
    if split == "train" and data.order == "legacy":
        random.Random(SEED).shuffle(rows)
    return rows


def mixture(rows: Sequence[Row]) -> dict[str, int]:
    """How many groups each task has."""
    return dict(Counter(row["task"] for row in rows))


def _of_task(
    task: str, data: Data, split: str, folder: Path | None, cache_dir: Path | None
) -> list[Row]:
    if data.source == "files":
        groups = _own(task, data, split, folder, cache_dir)
    elif data.source == "groups":
        groups = _read(task, data, split, folder)
    else:
        is_lookup = data.source == "lookup"
        legal = [name for name in EMBEDDED if (name in lookup.STATEMENTS) == is_lookup]
        if task not in legal:
            raise DataError(
                f"task {task!r} is not in {data.source}. Use one of {', '.join(legal)}."
            )
        groups = list(lookup.statements(task, split)) if is_lookup else _docs_rows(task, split)
    if split == "valid" and data.valid_limit is not None and len(groups) > data.valid_limit:
        log.info("%s: %d of its %d validation groups are used", task, data.valid_limit, len(groups))
        groups = random.Random(SEED).sample(groups, data.valid_limit)
    return [
        {"task": task, "number": number, **group} for number, group in picked.enumerated(groups)
    ]


def _read(task: str, data: Data, split: str, folder: Path | None) -> list[Row]:
    root = required_folder(
        folder, f"<task>/train.json and <task>/dev.json, for example {task}/{_FILES[split]}"
    )
    # many data sets publish no answers of their test split: it is then read from dev.json
    names = [_FILES[split]] if split != "test" else [_FILES["test"], _FILES["valid"]]
    path = next(
        (root / task / name for name in names if (root / task / name).is_file()),
        root / task / names[0],
    )
    # a split may be another kind of file than JSON
    others = (file for stem in split_names(split) for file in (root / task).glob(f"{stem}.*"))
    if not path.is_file() and any(others):
        return _own(task, data, split, root / task, None)
    if split == "test":
        log.info("%s: test groups of %s", task, path.name)
    try:
        values = json_value(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. Task {task!r} of data.{split}_tasks wants "
            f"it: {_advice(task, root)}, or leave the task out."
        ) from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}). Want a list of groups.") from None
    if not isinstance(values, list) or not values:
        raise DataError(
            f"{path}: want a list of groups that is not empty, each with golds and distractors."
        )
    return [
        _check(group, path, number, is_boolean(task, data))
        for number, group in enumerate(cast(list[Any], values), 1)
    ]


def _own(
    task: str, data: Data, split: str, folder: Path | None, cache_dir: Path | None
) -> list[Row]:
    """The groups of a task from a user's rows, which hold golds and distractors, or a statement and
    its label.
    """
    has_labels = is_boolean(task, data)
    placed = own_rows(data, split, folder, layout=STATEMENTS, cache_dir=cache_dir)
    return [_group(raw, place, task, is_boolean=has_labels) for place, raw in placed]


def _group(raw: Row, place: str, task: str, *, is_boolean: bool) -> Row:
    if raw.get("statement") is None:
        lists = {name: as_list(raw.get(name), place, name) or [] for name in _SIDES}
        return _checked_at(place, lists, is_boolean)
    if not is_boolean:
        raise DataError(
            f"{place}: a statement with a label is true or false by itself. Name task {task!r} in "
            "data.boolean, or give golds and distractors.",
            place=place,
        )
    label = str(raw.get("label")).strip().lower()
    if label not in _LABELS:
        raise DataError(
            f"{place}: 'label' is {raw.get('label')!r}, want one of {', '.join(_LABELS)}.",
            place=place,
            field="label",
        )
    texts = _texts([raw["statement"]], place, "statement")
    return {
        "golds": texts if _LABELS[label] else [],
        "distractors": [] if _LABELS[label] else texts,
    }


def _advice(task: str, root: Path) -> str:
    return (
        f"make it with `python -m trainer convert {task} --in RAW --out {root}`, if that command "
        'knows this set, or put a list of {"golds": [...], "distractors": [...]} there'
    )


def _check(group: Any, path: Path, number: int, is_boolean: bool) -> Row:
    where = f"{path}, group {number}"
    if not isinstance(group, dict) or not set(_SIDES) <= group.keys():
        raise DataError(f"{where}: want an object with golds and distractors.", place=where)
    group = watched(cast("Row", group))
    lists = {name: as_list(group[name], where, name) for name in _SIDES}
    return _checked_at(where, lists, is_boolean)


def _checked_at(where: str, group: Row, is_boolean: bool) -> Row:
    golds, distractors = (_texts(group[name], where, name) for name in _SIDES)
    if len(golds) > 1 or not golds + distractors:
        raise DataError(
            f"{where}: {len(golds)} golds, {len(distractors)} distractors; want a statement or "
            "more, one gold at most.",
            place=where,
        )
    if not is_boolean and not golds:
        raise DataError(
            f"{where}: no gold, but its task is multiple-choice. Give one, or name the task in "
            "data.boolean.",
            place=where,
        )
    if is_boolean and len(golds + distractors) > 1:
        raise DataError(
            f"{where}: {len(golds + distractors)} statements, but its task is boolean: want "
            "exactly one.",
            place=where,
        )
    if set(golds) & set(distractors):
        note(where, BOTH, field="distractors")
    return {"golds": golds, "distractors": distractors}


def _texts(values: Any, where: str, name: str) -> list[str]:
    if not isinstance(values, list) or not all(
        isinstance(text, str) and not is_blank(text) for text in cast(list[Any], values)
    ):
        raise DataError(
            f"{where}: {name} is {values!r}; want a list of texts that are not blank.", place=where
        )
    return cast(list[str], values)


def _docs_rows(task: str, split: str) -> list[Row]:
    """Groups of statements about functions of the standard library; a false statement gives another
    function's summary.
    """
    rows, is_boolean = stdlib_docs.qa_rows("valid" if split == "test" else split), EMBEDDED[task]
    names = [row["question"].removeprefix("What does ").removesuffix(" do?") for row in rows]
    summaries = [row["answers"][0] for row in rows]
    groups: list[Row] = []
    for number, name in enumerate(names):
        gold = f"{name}: {summaries[number]}"
        steps = [7] if is_boolean else range(1, _CHOICES)
        others = [f"{name}: {summaries[(number + step) % len(rows)]}" for step in steps]
        if not is_boolean:
            groups.append({"golds": [gold], "distractors": others})
        elif number % 2:
            groups.append({"golds": [], "distractors": others})
        else:
            groups.append({"golds": [gold], "distractors": []})
    return groups
