"""Publishers' files become, byte for byte, the lines and the statements that Vera's author made of
them.

What goes to the question converter is marked by a stand-in, as it is in the recorded statements:
<<LM:text>>.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.parity.recordings import Entry, digest, folders, once, params, statements_folder
from trainer.recipes.vera.convert import Conversion, convert
from trainer.recipes.vera.report import Report

SYSTEM = "vera"

# The author's train file has the line ends that are inside eight questions; the dev file has not.
AS_THE_AUTHOR = {"csqa2/train": {"newlines": "keep"}}

# (groups, statements), as the original conversion program counts them.
COUNTS = {
    "copa/dev": (500, 1000),
    "codah/dev": (2776, 11104),
    "numersense/dev": (200, 2200),
    "comve_a/train": (10000, 19995),
    "comve_a/dev": (997, 1994),
    "creak/train": (10176, 10176),
    "creak/dev": (1371, 1371),
    "wsc273/dev": (273, 546),
    "csqa2/train": (9264, 9264),
    "csqa2/dev": (2541, 2541),
    "strategyqa/train": (2061, 2061),
    "strategyqa/dev": (229, 229),
}


@dataclass(frozen=True)
class Conversions:
    """What the original program makes of one set of statements."""

    name: str  # "wsc273/dev"
    facts: dict[str, Any]


def recorded() -> list[Entry[Conversions]]:
    return once(
        Entry(Conversions(name, facts), name, folder, digest(facts))
        for folder in folders(SYSTEM)
        for path in sorted(folder.glob("adapters/golden*.json"))
        for name, facts in json.loads(path.read_text())["sets"].items()
    )


def marks(texts: Sequence[str]) -> list[str]:
    return [f"<<LM:{text}>>" for text in texts]


def raw_folder(task: str, tmp_path: Path) -> Path:
    """The publisher's folder; that of WSC with wsc273.txt, whose options differ from those of the
    collection.
    """
    folder = statements_folder(task)
    if folder is None:
        pytest.skip(f"no {task} in tests/parity/recorded/statements or $LATHE_DATA/statements")
    if task != "wsc273" or (folder / "wsc273.txt").is_file():
        return folder
    made = tmp_path / "raw"
    made.mkdir()
    (made / "WSCollection.xml").write_bytes((folder / "WSCollection.xml").read_bytes())
    told = [
        line.split("\t")
        for line in (Path(__file__).parent / "wsc273_options.tsv").read_text().splitlines()
    ]
    records = (f"Sentence [MASK] .\n[MASK]\n{right} ,{wrong}\n{right}\n\n" for right, wrong in told)
    (made / "wsc273.txt").write_text("".join(records))
    return made


def converted(name: str, tmp_path: Path, **settings: Any) -> Report:
    task, split = name.split("/")
    asked = Conversion(task, raw_folder(task, tmp_path), tmp_path / "out", split=split, **settings)
    (report,) = convert(asked, marks)
    return report


def canonical_digest(path: Path) -> str:
    text = json.dumps(json.loads(path.read_text()), ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


each_recorded = pytest.mark.parametrize("case", params(recorded(), "golden conversions", SYSTEM))


@each_recorded
def test_the_unifiedqa_lines_are_those_of_the_author(case: Conversions, tmp_path: Path) -> None:
    name, facts = case.name, case.facts
    converted(name, tmp_path, variants=AS_THE_AUTHOR.get(name, {}))
    content = (tmp_path / "out" / f"{name}.tsv").read_bytes()
    assert len(content) == facts["tsv_bytes"]
    assert hashlib.sha256(content).hexdigest() == facts["tsv_sha256"]


@each_recorded
def test_the_statements_of_those_lines_are_those_of_the_original(
    case: Conversions, tmp_path: Path
) -> None:
    name, facts = case.name, case.facts
    converted(name, tmp_path, variants=AS_THE_AUTHOR.get(name, {}))
    task, split = name.split("/")
    lines = Conversion(
        "unifiedqa",
        tmp_path / "out" / f"{name}.tsv",
        tmp_path / "again",
        split=split,
        task=task,
        variants={"blank": "keep"},
    )
    (report,) = convert(lines, marks)
    assert (report.groups, report.statements, report.gold_groups) == (
        facts["groups"],
        facts["statements"],
        facts["gold_groups"],
    )
    assert (report.converter_share > 0) == facts["needs_question_converter"]
    found = json.loads((tmp_path / "again" / f"{name}.json").read_text())
    assert found[: len(facts.get("first_3", []))] == facts.get("first_3", [])
    assert canonical_digest(tmp_path / "again" / f"{name}.json") == facts["canonical_json_sha256"]


@each_recorded
def test_statements_made_without_a_detour_over_lines_are_the_same(
    case: Conversions, tmp_path: Path
) -> None:
    name, facts = case.name, case.facts
    if name in AS_THE_AUTHOR:
        pytest.skip("lines of the author are broken: without the detour the rows are whole")
    converted(name, tmp_path)
    assert canonical_digest(tmp_path / "out" / f"{name}.json") == facts["canonical_json_sha256"]


@pytest.mark.parametrize("name", COUNTS)
def test_groups_and_statements_are_as_many_as_the_original_makes(name: str, tmp_path: Path) -> None:
    report = converted(name, tmp_path, is_strict=True)
    assert (report.groups, report.statements) == COUNTS[name]
    assert (report.rows, report.failures, report.ambiguous_lines) == (COUNTS[name][0], [], 0)
    assert report.lost_distractors == (5 if name == "comve_a/train" else 0)


def test_lines_with_line_ends_in_them_fail_as_they_did_and_are_listed(tmp_path: Path) -> None:
    converted("csqa2/train", tmp_path, variants={"newlines": "keep"})
    lines = Conversion(
        "unifiedqa",
        tmp_path / "out/csqa2/train.tsv",
        tmp_path / "again",
        split="train",
        task="csqa2",
    )
    (report,) = convert(lines, marks)
    without_tab = [failure for failure in report.failures if "no tab" in failure]
    assert (report.rows, report.groups, len(without_tab)) == (
        9264 + 8,
        9264 - len(report.failures) + 8,
        8,
    )
