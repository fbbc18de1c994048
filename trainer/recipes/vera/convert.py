"""The whole conversion: raw files -> problems -> UnifiedQA lines and statement groups.

It writes these as files, with a report.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from trainer.errors import ConfigError, DataError, nearest
from trainer.files.atomic import refusals, replace_file, write_json
from trainer.recipes.vera.adapters import ADAPTERS
from trainer.recipes.vera.declare import Draft, draft, with_full_stop
from trainer.recipes.vera.problem import BadRecord, Problem
from trainer.recipes.vera.report import Report
from trainer.recipes.vera.rules import statement_by_rule

if TYPE_CHECKING:
    from trainer.recipes.vera.adapters.adapter import Adapter

log = logging.getLogger(__name__)

Declarer = Literal["original", "rules"]
Converter = Callable[[Sequence[str]], list[str]]
Group = dict[str, list[str]]
_UNIFIED, _REPORT = "unifiedqa", "report.json"
_NAMED_FAILURES = 10


@dataclass(frozen=True)
class Conversion:
    """What is converted, and how."""

    dataset: str  # the name of an adapter
    raw: Path  # the publisher's folder, or the one file of a split
    out: Path
    split: str | None = None  # None: every split whose files are there
    task: str | None = None  # the folder below `out`; None: the data set's name
    variants: Mapping[str, str] = field(default_factory=dict[str, str])
    declarer: Declarer = "original"
    is_strict: bool = False


@dataclass(frozen=True)
class _Item:
    """A problem, where it came from, its line and the drafts of its choices."""

    place: str
    problem: Problem
    line: str
    drafts: list[Draft]


def convert(request: Conversion, converter: Converter | None = None) -> list[Report]:
    """Write out/<task>/<split>.json, <split>.tsv and report.json of every split; the reports, in
    the order of splits.

    converter: makes statements of `sentence </s> choice`; None: problems that need one are left out
    and counted. DataError for files that are not there or malformed, for a split without a group,
    and with is_strict for every row that gives none; ConfigError for an unknown name or for files
    that exist: nothing is overwritten.
    """
    adapter, task = _adapter(request)
    for name, value in request.variants.items():
        if value not in adapter.variants.get(name, ()):
            legal = [
                f"{known_name}={one}"
                for known_name, values in adapter.variants.items()
                for one in values
            ]
            advice = (
                f"Use one of {', '.join(legal)}." if legal else "It has no variants: leave it out."
            )
            raise ConfigError(f"{request.dataset} has no variant {name}={value}. {advice}")
    defaults = {name: values[0] for name, values in adapter.variants.items()}
    if request.dataset == _UNIFIED and adapter.is_statement:
        defaults["boolean"] = "statement"
    variants = defaults | dict(request.variants)
    files = _files(request, adapter)
    folder = request.out / task
    for split in files:
        for path in (folder / f"{split}.json", folder / f"{split}.tsv"):
            if path.exists():
                raise ConfigError(
                    f"{path} exists already, and nothing is overwritten. Delete it, or use another "
                    "--out."
                )
    reports: list[Report] = []
    for split, paths in files.items():
        report = Report(request.dataset, task, split, {**variants, "declarer": request.declarer})
        items = list(_read(adapter, paths, variants, request, report))
        groups = _groups(items, converter, report)
        if request.is_strict or not groups:
            _refuse_losses(report)
        _write(folder, split, items, groups, report)
        reports.append(report)
    return reports


def values_by_name(texts: Sequence[str]) -> dict[str, str]:
    """{"case": "fit"} of ["case=fit"]."""
    for text in texts:
        if "=" not in text:
            raise ConfigError(f"--variant {text}: want NAME=VALUE, such as case=fit.")
    return dict(text.split("=", 1) for text in texts)


def declarer_of(name: str) -> Declarer:
    """The declarer of that name, original or rules; ConfigError for any other name.

    original: rules a to d, the default and what the published data is.
    """
    for declarer in get_args(Declarer):
        if name == declarer:
            return declarer
    raise ConfigError(
        f"--declarer {name}: no such declarer. {nearest(name, list(get_args(Declarer)))}"
    )


# The request
# --------------------------------------------------------------------------------------------------


def _adapter(request: Conversion) -> tuple[Adapter, str]:
    """The adapter, and the name of the task.

    Lines of UnifiedQA are declared as the task that they are of.
    """
    if request.dataset not in ADAPTERS:
        raise ConfigError(
            f"no data set is called {request.dataset!r}. "
            f"{nearest(request.dataset, sorted(ADAPTERS))}"
        )
    adapter, task = ADAPTERS[request.dataset], request.task or request.dataset
    if request.dataset == _UNIFIED:
        if request.task is None:
            raise ConfigError(
                "unifiedqa: --task NAME is required, the set that the lines are of, such as "
                "--task qasc."
            )
        if task in ADAPTERS:
            own = ADAPTERS[task]
            adapter = replace(adapter, is_joined=own.is_joined, is_statement=own.is_statement)
    return adapter, task


def _files(request: Conversion, adapter: Adapter) -> dict[str, list[Path | None]]:
    """The files of each requested split that has them.

    DataError when none is there, or one of several is missing.
    """
    if request.raw.is_file():
        return _single_file(request, adapter)
    splits = list(adapter.files) if request.split is None else [request.split]
    if request.split is not None and request.split not in adapter.files:
        raise ConfigError(
            f"--split {request.split}: {request.dataset} has {', '.join(adapter.files)}."
        )
    files: dict[str, list[Path | None]] = {}
    for split in splits:
        paths: list[Path | None] = []
        for names in adapter.files[split]:
            places = (request.raw / name for name in names.rstrip("?").split("|"))
            paths.append(next((path for path in places if path.is_file()), None))
        missing = [
            name for name, path in zip(adapter.files[split], paths, strict=True) if path is None
        ]
        missing = [name for name in missing if not name.endswith("?")]
        if not missing:
            files[split] = paths
        elif any(paths) and len(missing) < len(paths):
            raise DataError(
                f"{request.raw} lacks {', '.join(missing)} of the {split} split. Put it beside the "
                "others."
            )
    if not files:
        listed = "; ".join(f"{split}: {' and '.join(adapter.files[split])}" for split in splits)
        raise DataError(
            f"{request.raw} holds no split of {request.dataset} ({listed}). Give --in the folder "
            "that does."
        )
    return files


def _single_file(request: Conversion, adapter: Adapter) -> dict[str, list[Path | None]]:
    """The split of a file that was given by its own name, or the one that --split says it is."""
    fitting = [
        split
        for split, names in adapter.files.items()
        if request.raw.name in names[0].rstrip("?").split("|")
    ]
    split = request.split or (fitting[0] if fitting else None)
    if split is None:
        raise ConfigError(
            f"--in {request.raw} is no name that {request.dataset} has. Say by --split which split "
            "it is."
        )
    names = adapter.files.get(split, next(iter(adapter.files.values())))
    if sum(not name.endswith("?") for name in names) != 1:
        raise ConfigError(
            f"--in {request.raw} is one file, and a split is {', '.join(names)}. Give their folder."
        )
    return {split: [request.raw, *(None for _ in names[1:])]}


# What becomes of it
# --------------------------------------------------------------------------------------------------


def _read(
    adapter: Adapter,
    paths: Sequence[Path | None],
    variants: Mapping[str, str],
    request: Conversion,
    report: Report,
) -> Iterator[_Item]:
    rules = statement_by_rule if request.declarer == "rules" else None
    for raw in adapter.read(paths):
        report.rows += 1
        try:
            problem = adapter.problem(raw.value, variants)
            line = adapter.line(problem)
        except BadRecord as error:
            report.failures.append(f"{raw.place}: {error}")
            continue
        report.count_problem(
            problem, line, is_cloze=adapter.is_cloze, is_statement=adapter.is_statement
        )
        drafts = [
            draft(problem, choice, is_joined=adapter.is_joined, declarer=rules)
            for choice in problem.choices
        ]
        yield _Item(raw.place, problem, line, drafts)


def _groups(items: Sequence[_Item], converter: Converter | None, report: Report) -> list[Group]:
    """The groups, in the order of the rows; a row whose statements nobody can make has none."""
    report.by_rule.update(one.rule for item in items for one in item.drafts)
    if converter is None:
        report.unconverted += [item.place for item in items if _needs_converter(item)]
        items = [item for item in items if not _needs_converter(item)]
    questions = [one.text for item in items for one in item.drafts if one.rule == "converter"]
    converted = iter(converter(questions) if converter and questions else ())
    groups: list[Group] = []
    for item in items:
        statements: list[str] = []
        for one in item.drafts:
            text = with_full_stop(next(converted)) if one.rule == "converter" else one.text
            statements.append(one.before + text)
        groups.append(_group(item.problem, statements))
    report.count_groups(groups, is_boolean=[item.problem.is_boolean for item in items])
    return groups


def _needs_converter(item: _Item) -> bool:
    return any(one.rule == "converter" for one in item.drafts)


def _group(problem: Problem, statements: Sequence[str]) -> Group:
    """Gold and distractors; an option that has the gold's text is no distractor."""
    if problem.gold is None:
        return {"golds": [], "distractors": list(statements)}
    choices = [choice.strip() for choice in problem.choices]
    gold = choices[problem.gold]
    others = [
        statement for choice, statement in zip(choices, statements, strict=True) if choice != gold
    ]
    return {"golds": [statements[problem.gold]], "distractors": others}


def _refuse_losses(report: Report) -> None:
    problems = report.failures + [
        f"{place}: needs a question converter" for place in report.unconverted
    ]
    if not problems:
        return
    listed = "\n".join(f"  {problem}" for problem in problems[:_NAMED_FAILURES])
    more = (
        ""
        if len(problems) <= _NAMED_FAILURES
        else f"\n  and {len(problems) - _NAMED_FAILURES} more"
    )
    raise DataError(
        f"{report.task}/{report.split}: {len(problems)} of {report.rows} rows give no "
        f"group:\n{listed}{more}\n"
        "Mend them, or give --converter where one is needed (--declarer rules needs it less "
        "often). Without --strict, "
        "rows like these are left out and counted, as long as others are left."
    )


# Writing
# --------------------------------------------------------------------------------------------------


def _write(
    folder: Path, split: str, items: Sequence[_Item], groups: Sequence[Group], report: Report
) -> None:
    """The three files, each whole or not there; the groups, which experiments look for, last."""
    with refusals(folder):
        folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"{split}.tsv", "".join(f"{item.line}\n" for item in items).encode())
    path = folder / _REPORT
    try:
        reports = json.loads(path.read_text())  # of splits that were converted before
    except FileNotFoundError:
        reports = {}
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({error}). Delete it; it is written again."
        ) from None
    write_json(path, reports | {split: report.numbers()})
    rows = ",\n".join(json.dumps(group, ensure_ascii=False) for group in groups)
    replace_file(folder / f"{split}.json", f"[\n{rows}\n]\n".encode())
    log.info("%s: written", folder / f"{split}.json")
