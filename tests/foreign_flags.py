"""The tables of tests/fixtures/flags: every flag of the programs that people come from, and what
stands for it here.

A file is of one page of docs/coming-from/. Its lines: `# tasks: ...` and `# versions: ...`;
`[section]`, with the word `training` behind it where a person may write its names into a
dictionary; and four cells with tabs between them:

- the flag, or several flags with blanks between that share the rest of the line
- what it is there when nobody gives it
- what stands for it here, several with ", " between; empty: what the table of synonyms says
- what is different, and why
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from typer.main import get_command

import trainval
from jobs.config import JobConfig
from trainer import lathe, tasks
from trainer.config.mistakes import paths
from trainer.config.synonyms import SYNONYMS

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "tests" / "fixtures" / "flags"
PAGES = ROOT / "docs" / "coming-from"
PROGRAMS = sorted(path.stem for path in TABLES.glob("*.tsv"))
_NAME = re.compile(r"-{0,2}[A-Za-z][\w.-]*$")
_KEY = re.compile(r"[a-z_]+(\.[a-z_0-9]+)*$")
_LETTERS = re.compile(r"-[a-z]{1,2}$")  # a short form
_POSITIONAL = re.compile(r"\bwords?$")
NOTHING = "-"


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    section: str
    is_training: bool  # its names may stand in a dictionary
    flags: str
    default: str
    here: str
    note: str

    @property
    def names(self) -> list[str]:
        """The flags without their dashes; none where the cell is words of a person or a program."""
        words = self.flags.split()
        is_free = _POSITIONAL.search(self.default) or not all(map(_NAME.match, words))
        long = [word for word in words if not _LETTERS.match(word)]
        return [] if is_free else [word.lstrip("-") for word in long]

    @property
    def parts(self) -> list[str]:
        """What stands for it here; none where the table of synonyms says it."""
        return [part.strip() for part in self.here.split(",") if part.strip()]


@dataclass(frozen=True)
class Table:
    """A file of tests/fixtures/flags."""

    program: str
    tasks: tuple[str, ...]
    versions: str
    rows: tuple[Row, ...]

    @property
    def legal(self) -> set[str]:
        """Every dotted key of its tasks."""
        return {key for task in self.tasks for key in paths(tasks.config_of(task))}

    @property
    def sections(self) -> dict[str, list[Row]]:
        """Its rows by section, in the order of the file."""
        sections: dict[str, list[Row]] = {}
        for row in self.rows:
            sections.setdefault(row.section, []).append(row)
        return sections


@cache
def read(program: str) -> Table:
    """The table of a program."""
    heads: dict[str, str] = {}
    rows: list[Row] = []
    section, kind = "", ""
    for line in (TABLES / f"{program}.tsv").read_text().splitlines():
        if line.startswith("# "):
            name, _, value = line[2:].partition(": ")
            heads[name] = value
        elif line.startswith("["):
            section, _, kind = line[1:].partition("]")
        elif line:
            flags, default, here, note = line.split("\t")
            rows.append(Row(section, kind.strip() == "training", flags, default, here, note))
    return Table(program, tuple(heads["tasks"].split()), heads["versions"], tuple(rows))


# What a part may be
# --------------------------------------------------------------------------------------------------


def is_there(part: str, legal: set[str]) -> bool:
    """Whether what a table calls by `part` exists in this program."""
    word, _, rest = part.partition(" ")
    if part == NOTHING or part.startswith("as "):
        return True
    if word == "env":
        return _is_read(rest)
    if word in ("torchrun", "deepspeed") and word not in legal:
        return not rest or rest.lstrip("-").replace("-", "_") in _TORCHRUN
    if word == "lathe":
        return _has_flag(*rest.split())
    if part.startswith("job:"):
        return part[4:] in JobConfig.model_fields
    if part.startswith("request:"):
        return _is_of_a_request(part[8:])
    if part.startswith("-"):
        return part in {flag for option in get_command(trainval.app).params for flag in option.opts}
    return bool(_KEY.match(part)) and part in legal


_TORCHRUN = {"nproc_per_node", "master_port", "nnodes"}


@cache
def _commands() -> dict[str, Any]:
    commands: Any = get_command(lathe.app)
    return dict(commands.commands)


def _has_flag(command: str, flag: str = "") -> bool:
    if command not in _commands():
        return False
    return not flag or any(flag in option.opts for option in _commands()[command].params)


def _is_read(name: str) -> bool:
    """Whether a source of ours, or a library that reads it for us, knows an environment variable."""
    if name.startswith("HF_"):
        return True  # huggingface_hub
    return name in _sources()


@cache
def _sources() -> str:
    files = [*ROOT.glob("*.py"), *ROOT.glob("trainer/**/*.py"), *ROOT.glob("jobs/**/*.py")]
    return "".join(path.read_text() for path in files)


def _is_of_a_request(name: str) -> bool:
    return name in (ROOT / "jobs" / "serve" / "requests.py").read_text()


# As a page shows them
# --------------------------------------------------------------------------------------------------


def shown(row: Row, table: Table) -> tuple[str, str]:
    """The third and the fourth cell of a row as a page shows them, in Markdown."""
    if row.parts:
        return ", ".join(map(_part_shown, row.parts)), row.note
    cells: list[str] = []
    notes: list[str] = []
    for name in row.names:
        synonym = SYNONYMS[name]
        keys = [key for key in synonym.keys if key in table.legal]
        cells += [_part_shown(part) for part in (*keys, *synonym.flags)]
        notes.append(synonym.advice if keys or synonym.flags or not synonym.keys else "")
    unique = list(dict.fromkeys(cells))
    return ", ".join(unique) or "nothing", row.note or " ".join(dict.fromkeys(filter(None, notes)))


def _part_shown(part: str) -> str:
    if part == NOTHING:
        return "nothing"
    if part.startswith("as "):
        return part.replace("t5-trainer.md", "there")
    kind, _, name = part.partition(":")
    if kind == "job":
        return f"`{name}` of the job dictionary"
    if kind == "request":
        return f"`{name}`"
    word, _, rest = part.partition(" ")
    return f"`{rest}`" if word == "env" else f"`{part}`"


def markdown(program: str) -> str:
    """The tables of a program, one under a heading for each section."""
    table = read(program)
    lines = [f"Versions: {table.versions}.", ""]
    for section, rows in table.sections.items():
        lines += [f"### {section}", "", "| there | default | here | what is different |"]
        lines += ["|---|---|---|---|"]
        for row in rows:
            names = row.flags.split() if row.names or _POSITIONAL.search(row.default) else None
            flags = ", ".join(f"`{name}`" for name in names or [row.flags])
            here, note = shown(row, table)
            lines.append(f"| {flags} | {row.default} | {here} | {note} |")
        lines.append("")
    return "\n".join(lines)


def parses(command: str, words: list[str]) -> dict[str, Any]:
    """The options of `lathe COMMAND WORDS` as the program understands them; UsageError if not."""
    return _commands()[command].make_context(command, list(words)).params
