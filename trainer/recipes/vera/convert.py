"""The whole conversion: raw files -> problems -> UnifiedQA lines and statement groups.

It writes these as files, with a report.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from trainer.errors import ConfigError, DataError, nearest
from trainer.files.atomic import refusals, replace_file, write_json
from trainer.recipes.vera.adapters import ADAPTERS
from trainer.recipes.vera.declare import Draft, draft, ended
from trainer.recipes.vera.problem import BadRecord, Problem
from trainer.recipes.vera.report import Report
from trainer.recipes.vera.rules import declared

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


def convert(asked: Conversion, converter: Converter | None = None) -> list[Report]:
    """Write out/<task>/<split>.json, <split>.tsv and report.json of every split; the reports, in
    the order of splits.

    converter: makes statements of `sentence </s> choice`; None: problems that need one are left out
    and counted. DataError for files that are not there or malformed, for a split without a group,
    and with is_strict for every row that gives none; ConfigError for an unknown name or for files
    that exist: nothing is overwritten.
    """
    adapter, task = _adapter(asked)
    variants = _variants(asked, adapter)
    files = _files(asked, adapter)
    for split in files:
        _refuse_existing(asked.out / task, split)
    reports: list[Report] = []
    for split, paths in files.items():
        report = Report(asked.dataset, task, split, {**variants, "declarer": asked.declarer})
        items = list(_read(adapter, paths, variants, asked, report))
        groups = _groups(items, converter, report)
        if asked.is_strict or not groups:
            _refuse_losses(report)
        _write(asked.out / task, split, items, groups, report)
        reports.append(report)
    return reports


def named_values(texts: Sequence[str]) -> dict[str, str]:
    """{"case": "fit"} of ["case=fit"]."""
    for text in texts:
        if "=" not in text:
            raise ConfigError(f"--variant {text}: want NAME=VALUE, such as case=fit.")
    return dict(text.split("=", 1) for text in texts)


def known_declarer(name: str) -> Declarer:
    """The declarer of that name, original or rules; ConfigError for any other name.

    original: rules a to d, the default and what the published data is.
    """
    for known in get_args(Declarer):
        if name == known:
            return known
    raise ConfigError(
        f"--declarer {name}: no such declarer. {nearest(name, list(get_args(Declarer)))}"
    )


# What is asked
# --------------------------------------------------------------------------------------------------


def _adapter(asked: Conversion) -> tuple[Adapter, str]:
    """The adapter, and the name of the task.

    Lines of UnifiedQA are declared as the task that they are of.
    """
    if asked.dataset not in ADAPTERS:
        raise ConfigError(
            f"no data set is called {asked.dataset!r}. {nearest(asked.dataset, sorted(ADAPTERS))}"
        )
    adapter, task = ADAPTERS[asked.dataset], asked.task or asked.dataset
    if asked.dataset == _UNIFIED:
        if asked.task is None:
            raise ConfigError(
                "unifiedqa: --task NAME is required, the set that the lines are of, such as "
                "--task qasc."
            )
        if task in ADAPTERS:
            known = ADAPTERS[task]
            return replace(
                adapter, is_joined=known.is_joined, is_statement=known.is_statement
            ), task
    return adapter, task


def _variants(asked: Conversion, adapter: Adapter) -> dict[str, str]:
    """Every variant of the adapter, given or default."""
    for name, value in asked.variants.items():
        if value not in adapter.variants.get(name, ()):
            legal = [
                f"{known}={one}" for known, values in adapter.variants.items() for one in values
            ]
            wanted = (
                f"Use one of {', '.join(legal)}." if legal else "It has no variants: leave it out."
            )
            raise ConfigError(f"{asked.dataset} has no variant {name}={value}. {wanted}")
    defaults = {name: values[0] for name, values in adapter.variants.items()}
    if asked.dataset == _UNIFIED and adapter.is_statement:
        defaults["boolean"] = "statement"
    return defaults | dict(asked.variants)


def _files(asked: Conversion, adapter: Adapter) -> dict[str, list[Path | None]]:
    """The files of each split that is asked for and there.

    DataError when none is there, or one of several is missing.
    """
    if asked.raw.is_file():
        return _single_file(asked, adapter)
    splits = list(adapter.files) if asked.split is None else [asked.split]
    if asked.split is not None and asked.split not in adapter.files:
        raise ConfigError(f"--split {asked.split}: {asked.dataset} has {', '.join(adapter.files)}.")
    found: dict[str, list[Path | None]] = {}
    for split in splits:
        paths = [_first_there(asked.raw, name) for name in adapter.files[split]]
        missing = [
            name for name, path in zip(adapter.files[split], paths, strict=True) if path is None
        ]
        missing = [name for name in missing if not name.endswith("?")]
        if not missing:
            found[split] = paths
        elif any(paths) and len(missing) < len(paths):
            raise DataError(
                f"{asked.raw} lacks {', '.join(missing)} of the {split} split. Put it beside the "
                "others."
            )
    if not found:
        listed = "; ".join(f"{split}: {' and '.join(adapter.files[split])}" for split in splits)
        raise DataError(
            f"{asked.raw} holds no split of {asked.dataset} ({listed}). Give --in the folder "
            "that does."
        )
    return found


def _single_file(asked: Conversion, adapter: Adapter) -> dict[str, list[Path | None]]:
    """The split of a file that was given by its own name, or the one that --split says it is."""
    named = [
        split
        for split, names in adapter.files.items()
        if asked.raw.name in names[0].rstrip("?").split("|")
    ]
    split = asked.split or (named[0] if named else None)
    if split is None:
        raise ConfigError(
            f"--in {asked.raw} is no name that {asked.dataset} has. Say by --split which split "
            "it is."
        )
    names = adapter.files.get(split, next(iter(adapter.files.values())))
    if sum(not name.endswith("?") for name in names) != 1:
        raise ConfigError(
            f"--in {asked.raw} is one file, and a split is {', '.join(names)}. Give their folder."
        )
    return {split: [asked.raw, *(None for _ in names[1:])]}


def _first_there(folder: Path, names: str) -> Path | None:
    places = (folder / name for name in names.rstrip("?").split("|"))
    return next((path for path in places if path.is_file()), None)


# What becomes of it
# --------------------------------------------------------------------------------------------------


def _read(
    adapter: Adapter,
    paths: Sequence[Path | None],
    variants: Mapping[str, str],
    asked: Conversion,
    report: Report,
) -> Iterator[_Item]:
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
        yield _Item(raw.place, problem, line, _drafts(problem, adapter, asked.declarer))


def _drafts(problem: Problem, adapter: Adapter, declarer: str) -> list[Draft]:
    rules = declared if declarer == "rules" else None
    return [
        draft(problem, choice, is_joined=adapter.is_joined, declarer=rules)
        for choice in problem.choices
    ]


def _groups(items: Sequence[_Item], converter: Converter | None, report: Report) -> list[Group]:
    """The groups, in the order of the rows; a row whose statements nobody can make has none."""
    report.by_rule.update(found.rule for item in items for found in item.drafts)
    if converter is None:
        report.unconverted += [item.place for item in items if _needs_converter(item)]
        items = [item for item in items if not _needs_converter(item)]
    finished = _finished(items, converter)
    groups = [group for _, group in finished]
    report.count_groups(groups, is_boolean=[item.problem.is_boolean for item, _ in finished])
    return groups


def _needs_converter(item: _Item) -> bool:
    return any(found.rule == "converter" for found in item.drafts)


def _finished(items: Sequence[_Item], converter: Converter | None) -> list[tuple[_Item, Group]]:
    texts = [found.text for item in items for found in item.drafts if found.rule == "converter"]
    converted = iter(converter(texts) if converter and texts else ())
    finished: list[tuple[_Item, Group]] = []
    for item in items:
        made = [
            ended(next(converted)) if found.rule == "converter" else found.text
            for found in item.drafts
        ]
        texts_made = [found.before + text for found, text in zip(item.drafts, made, strict=True)]
        finished.append((item, _group(item.problem, texts_made)))
    return finished


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


def _refuse_existing(folder: Path, split: str) -> None:
    for path in (folder / f"{split}.json", folder / f"{split}.tsv"):
        if path.exists():
            raise ConfigError(
                f"{path} exists already, and nothing is overwritten. Delete it, or use another "
                "--out."
            )


def _write(
    folder: Path, split: str, items: Sequence[_Item], groups: Sequence[Group], report: Report
) -> None:
    """The three files, each whole or not there; the groups, which experiments look for, last."""
    with refusals(folder):
        folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"{split}.tsv", "".join(f"{item.line}\n" for item in items).encode())
    write_json(folder / _REPORT, _reports(folder / _REPORT) | {split: report.numbers()})
    rows = ",\n".join(json.dumps(group, ensure_ascii=False) for group in groups)
    replace_file(folder / f"{split}.json", f"[\n{rows}\n]\n".encode())
    log.info("%s: written", folder / f"{split}.json")


def _reports(path: Path) -> dict[str, Any]:
    """The reports of splits that were converted before."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({error}). Delete it; it is written again."
        ) from None
