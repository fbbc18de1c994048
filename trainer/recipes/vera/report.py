"""Counts what became of the records of a split, for the report that is printed and written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.recipes.vera.declare import Rule, find_blanks
from trainer.recipes.vera.problem import BadRecord, Problem, read_line

_SHOWN = 5


@dataclass
class Report:
    """Counts of one split. A row is a publisher's record, a group the statements of one problem."""

    dataset: str
    task: str
    split: str
    settings: dict[str, str]  # the variants and the declarer
    rows: int = 0
    groups: int = 0
    gold_groups: int = 0
    statements: int = 0
    # "file, line: why" of every row that is no problem
    failures: list[str] = field(default_factory=list[str])
    # rows left out because no converter was given
    unconverted: list[str] = field(default_factory=list[str])
    identical_options: int = 0  # problems where an option has the text of another
    lost_distractors: int = 0  # multiple-choice groups with one statement left
    # problems with underscores, or meant to have a blank, with none or several blanks
    blanks_not_one: int = 0
    duplicates: int = 0  # groups that equal an earlier one
    ambiguous_lines: int = 0  # lines that a UnifiedQA reader takes for another problem
    by_rule: Counter[Rule] = field(default_factory=Counter[Rule])  # statements

    @property
    def converter_share(self) -> float:
        """The share of statements, made or left out, that are the converter's."""
        total = sum(self.by_rule.values())
        return self.by_rule["converter"] / total if total else 0.0

    def count_problem(
        self, problem: Problem, line: str, *, is_cloze: bool, is_statement: bool
    ) -> None:
        """Count what is known of a problem before its statements are made."""
        texts = [choice.strip() for choice in problem.choices]
        self.identical_options += len(set(texts)) < len(texts)
        question = problem.question or ""
        self.blanks_not_one += (is_cloze or "_" in question) and len(
            find_blanks(question.strip())
        ) != 1
        self.ambiguous_lines += not _reads_back(problem, line, is_statement=is_statement)

    def count_groups(
        self, groups: Sequence[dict[str, list[str]]], *, is_boolean: Sequence[bool]
    ) -> None:
        """Count what is known of the groups, some of which come from booleans."""
        sizes = [len(group["golds"]) + len(group["distractors"]) for group in groups]
        self.groups, self.statements = len(groups), sum(sizes)
        self.gold_groups = sum(bool(group["golds"]) for group in groups)
        self.lost_distractors = sum(
            size == 1 and not boolean for size, boolean in zip(sizes, is_boolean, strict=True)
        )
        texts = Counter((*group["golds"], None, *group["distractors"]) for group in groups)
        self.duplicates = len(groups) - len(texts)

    def numbers(self) -> dict[str, Any]:
        """Everything, as it stands in report.json."""
        values = {
            name: value
            for name, value in vars(self).items()
            if name not in ("by_rule", "split", "task")
        }
        return values | {
            "by_rule": dict(self.by_rule),
            "converter_share": round(self.converter_share, 4),
        }

    def lines(self) -> list[str]:
        """The report as it is printed."""
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        by_rule = ", ".join(f"{rule} {count}" for rule, count in self.by_rule.most_common())
        failures = [f"    {problem}" for problem in self.failures[:_SHOWN]]
        if len(self.failures) > _SHOWN:
            failures.append(f"    and {len(self.failures) - _SHOWN} more")
        lines = [
            f"{self.task}/{self.split}: {self.rows} rows -> {self.groups} groups, "
            f"{self.statements} statements",
            f"  made with                {self.dataset}, {settings}",
            f"  groups with a gold       {self.gold_groups}",
            f"  statements by rule       {by_rule or 'none'} (converter share "
            f"{self.converter_share:.1%})",
            f"  parse failures           {len(self.failures)}",
            *failures,
            f"  left out, no converter   {len(self.unconverted)}",
            f"  identical options        {self.identical_options} (left with one statement: "
            f"{self.lost_distractors})",
            f"  blank count not one      {self.blanks_not_one}",
            f"  duplicate groups         {self.duplicates}",
            f"  ambiguous lines          {self.ambiguous_lines}",
        ]
        if self.unconverted:
            rules = (
                ", --declarer rules of some of it"
                if self.settings.get("declarer") != "rules"
                else ""
            )
            lines.append(f"  --converter FOLDER makes statements of what was left out{rules}")
        return lines


def _reads_back(problem: Problem, line: str, *, is_statement: bool) -> bool:
    try:
        own = read_line(line, is_statement=is_statement)
    except BadRecord:
        return False
    if "\n" in line or own.gold is None or problem.gold is None:
        return "\n" not in line and own.gold == problem.gold
    return (
        _texts(own) == _texts(problem)
        and own.choices[own.gold] == problem.choices[problem.gold].strip()
    )


def _texts(problem: Problem) -> tuple[str, ...]:
    parts = (problem.question or "", problem.context or "", *problem.choices)
    return tuple(part.strip() for part in parts)
