"""The pages of docs/coming-from/: every flag of a program has a key here that exists, a flag, a
command, or a reason; and the tables of the pages are made from tests/fixtures/flags.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.foreign_flags import NOTHING, PAGES, PROGRAMS, ROOT, Row, is_there, markdown, read, shown
from tests.unit.pages import WRITES
from trainer import tasks
from trainer.config import reference
from trainer.config.synonyms import SYNONYMS, libraries, peers, programs

ROWS = [(program, row) for program in PROGRAMS for row in read(program).rows]
OURS = {
    key.path.rpartition(".")[2]
    for task in tasks.names()
    for key in reference.keys(tasks.config_of(task))
}
PRIVATE = {"_n_gpu"}
MADE = re.compile(r"(?<=<!-- flags -->\n).*?(?=<!-- end of flags -->)", re.S)


def name_of(case: tuple[str, Row]) -> str:
    program, row = case
    return f"{program}: {row.section}: {row.flags[:40]}"


def test_there_is_a_table_for_every_page_and_a_page_for_every_table() -> None:
    assert sorted(page.stem for page in PAGES.glob("*.md") if page.stem != "index") == PROGRAMS
    assert len(PROGRAMS) == 9


def test_what_stands_for_a_flag_exists() -> None:
    missing = [
        f"{name_of((program, row))}: {part}"
        for program, row in ROWS
        for part in row.parts
        if not is_there(part, read(program).legal)
    ]
    assert missing == []


def test_a_flag_without_a_key_has_a_reason() -> None:
    silent = [
        name_of((program, row)) for program, row in ROWS if row.here == NOTHING and not row.note
    ]
    assert silent == []


def test_a_row_that_names_nothing_of_ours_is_in_the_table_of_synonyms() -> None:
    unknown = [
        f"{program}: {name}"
        for program, row in ROWS
        if not row.parts
        for name in row.names or [f"? {row.flags}"]
        if name not in SYNONYMS or SYNONYMS[name].sentence(read(program).legal) is None
    ]
    assert unknown == []


def test_whoever_writes_a_flag_of_a_program_into_a_dictionary_is_told_ours() -> None:
    unknown = [
        f"{program}: {name}"
        for program, row in ROWS
        if row.is_training and not row.here.startswith("as ")
        for name in row.names
        if name not in SYNONYMS and name not in OURS and f"--{name}" not in row.parts
    ]
    assert unknown == []


def test_a_table_and_the_synonyms_lead_to_one_key_or_the_table_says_why() -> None:
    apart = [
        f"{name_of((program, row))}: {name}"
        for program, row in ROWS
        if row.is_training and not row.note
        for name in row.names
        if name in SYNONYMS and not have_common_block(keys_in(row), SYNONYMS[name].keys)
    ]
    assert apart == []


def keys_in(row: Row) -> list[str]:
    """The dotted keys that stand for a flag."""
    return [part for part in row.parts if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)*", part)]


def have_common_block(some: Sequence[str], others: Sequence[str]) -> bool:
    """Whether a key of one side is one of the other side, or lies in its block; or a side has
    none.
    """
    pairs = [(f"{one}.", f"{other}.") for one in some for other in others]
    return not pairs or any(a.startswith(b) or b.startswith(a) for a, b in pairs)


def test_no_name_stands_in_two_tables_of_synonyms() -> None:
    parts = [set(one.SYNONYMS) for one in (libraries, programs, peers)]
    assert sum(map(len, parts)) == len(set().union(*parts)) == len(SYNONYMS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_tables_of_a_page_are_made_from_its_file(program: str) -> None:
    page = PAGES / f"{program}.md"
    text = page.read_text()
    made = markdown(program)
    if os.environ.get(WRITES):
        page.write_text(MADE.sub(lambda _: made, text))
        text = page.read_text()
    assert MADE.findall(text) == [made], (
        f"make it anew: {WRITES}=1 .venv/bin/python -m pytest tests/unit/test_flag_tables.py"
    )


def test_no_cell_of_a_table_is_empty_that_says_what_to_write() -> None:
    for program, row in ROWS:
        here, _ = shown(row, read(program))
        assert here, name_of((program, row))


def test_every_flag_of_the_installed_trainer_is_listed() -> None:
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    if version("transformers") not in read("t5-trainer").versions:
        pytest.skip("another version of transformers is installed than the table is of")
    sources = [folder / "training_args.py", folder / "training_args_seq2seq.py"]
    fields = {
        statement.target.id
        for source in sources
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("TrainingArguments")
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    assert len(fields) > 100
    listed = {name for row in read("t5-trainer").rows for name in row.names}
    assert fields - listed - PRIVATE == set()


def test_the_number_of_flags_is_said() -> None:
    """The count of flags, of which how many have something here, for the log."""
    flags = [(program, name) for program, row in ROWS for name in row.names or [row.flags]]
    print(f"{len(flags)} flags and variables in {len(PROGRAMS)} tables of {ROOT.name}")
    assert len(flags) > 600
