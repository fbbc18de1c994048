"""A part of a split behind its name: "train.jsonl[:100]" is its first hundred rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.wording import refused
from trainer.config.block import validate
from trainer.config.own_rows import OwnRows
from trainer.data.formats.subset import split_name
from trainer.data.readers.own_rows import own_rows
from trainer.data.readers.questions import qa_rows
from trainer.tasks.causal_lm.config import Data as TextData

TOTAL = 30
PARTS = ("[:7]", "[3:9]", "[25:]", "[:]", "[-4:]", "[:-26]", "[:10%]", "[50%:60%]", "[10:99]")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One file of each kind, of the same rows, each for a split or below a name of its own."""
    lines = [json.dumps({"text": str(number)}) for number in range(TOTAL)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "valid.json").write_text(f"[{', '.join(lines)}]")
    (tmp_path / "other.csv").write_text("\n".join(["text", *map(str, range(TOTAL))]))
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "a.jsonl").write_text("\n".join(lines[:20]))
    (tmp_path / "two" / "b.jsonl").write_text("\n".join(lines[20:]))
    return tmp_path


def numbers(folder: Path, split: str = "train", **values: object) -> list[int]:
    own = validate(TextData, {"source": "files", **values}, source="test")
    found = own_rows(own, split, folder, layout=own.layout() or pytest.fail("no layout"))
    return [int(row["text"]) for _, row in found]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["train.jsonl", "valid.json", "other.csv", "two"])
def test_a_part_is_what_python_slices(name: str, part: str, folder: Path) -> None:
    bounds = [bound.strip() for bound in part.strip("[]").split(":")]
    shares = [
        round(int(one[:-1]) * TOTAL / 100) if one.endswith("%") else int(one) if one else None
        for one in bounds
    ]
    wanted = list(range(TOTAL))[slice(*shares)]
    assert numbers(folder, files={"train": f"{name}{part}"}) == wanted


def test_a_part_alone_is_of_the_usual_file(folder: Path) -> None:
    assert numbers(folder, files={"train": "[:2]"}) == [0, 1]
    assert numbers(folder, "valid", files={"valid": "[-1:]"}) == [TOTAL - 1]


def test_a_file_of_that_very_name_comes_first(folder: Path) -> None:
    (folder / "odd.jsonl[:1]").write_text('{"text": "7"}\n{"text": "8"}\n')
    assert numbers(folder, files={"train": "odd.jsonl[:1]"}) == [7, 8]


def test_a_held_out_share_is_taken_from_the_part(folder: Path) -> None:
    how = {"files": {"train": "train.jsonl[:20]"}, "valid_share": 0.3}
    both = numbers(folder, **how) + numbers(folder, "valid", **how)
    assert sorted(both) == list(range(20))


def test_places_of_rows_are_those_of_the_whole_file(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"text": "1"}\n{"no": 1}\n')
    own = OwnRows.model_validate({"files": {"train": "train.jsonl[1:]"}})
    with refused("field_missing", at="train.jsonl, line 2"):
        list(qa_rows(folder, "train", own))


def test_a_part_of_a_data_set_that_was_saved_to_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": str(number)} for number in range(TOTAL)])
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "saved"))
    for part, wanted in (("[:3]", [0, 1, 2]), ("[:10%]", [0, 1, 2]), ("[-2:]", [28, 29])):
        splits = {"train": f"train{part}"}
        assert numbers(tmp_path, dataset="saved", splits=splits) == wanted


def test_a_name_without_a_part_is_itself() -> None:
    assert split_name("train[1].jsonl") == ("train[1].jsonl", None)


def test_what_is_no_part_is_refused(folder: Path) -> None:
    with refused("part_malformed", at="train.jsonl[:x]", part=":x"):
        numbers(folder, files={"train": "train.jsonl[:x]"})


def test_a_part_without_a_row_is_refused(folder: Path) -> None:
    with refused("part_empty", at="train.jsonl", part="[30:]"):
        numbers(folder, files={"train": "train.jsonl[30:]"})
