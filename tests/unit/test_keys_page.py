"""docs/keys.md lists every key of an experiment's dictionary, from the schemas and the comments
beside them.

`LATHE_WRITE_KEYS=1 pytest tests/unit/test_keys_page.py` writes it anew.
"""

from __future__ import annotations

import ast
import io
import os
import textwrap
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "keys.md"
SOURCES = [
    ROOT / "trainer/config/schema.py",
    ROOT / "trainer/config/own_rows.py",
    *sorted(ROOT.glob("trainer/tasks/*/config.py")),
]
HEAD = """# Every key of an experiment's dictionary

Made from the schemas by `tests/unit/test_keys_page.py`, which also says how to make it anew. A key
without a default is required. The blocks of the first section are those of every experiment,
those of the second stand in `data` of every task.
`Positive` is an integer above 0, `Fraction` a number from 0.0 to below 1.0.
"""


def comments_of(source: str) -> dict[int, str]:
    """The text of every comment by its line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokens
        if token.type == tokenize.COMMENT and "pyright:" not in token.string
    }


def comment_of(node: ast.AnnAssign, comments: dict[int, str], lines: list[str]) -> str:
    """What is said of a key: the comment lines right above it, and the comments on its own
    lines.
    """
    first = node.lineno
    while lines[first - 2].lstrip().startswith("#"):
        first -= 1
    texts = [comments[line] for line in range(first, node.end_lineno + 1) if line in comments]
    return " ".join(texts)


def default_of(node: ast.AnnAssign) -> str:
    """The default as it is written; "" for a required key."""
    return "" if node.value is None else ast.unparse(node.value)


def is_block(node: ast.stmt, names: set[str]) -> bool:
    """Whether this statement is a class of keys: it derives from Strict or from another block."""
    if not isinstance(node, ast.ClassDef):
        return False
    return any(isinstance(base, ast.Name) and base.id in names for base in node.bases)


def wrapped(text: str) -> list[str]:
    """An entry of a list as lines that a terminal shows."""
    return textwrap.wrap(text, 110, subsequent_indent="  ", break_on_hyphens=False)


def block_text(block: ast.ClassDef, comments: dict[int, str], lines: list[str]) -> list[str]:
    """One class of keys as a list."""
    summary = " ".join((ast.get_docstring(block) or "").split())
    text = [f"### {block.name}", "", summary, ""]
    for node in block.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        kind, default = ast.unparse(node.annotation), default_of(node)
        text += wrapped(f"- `{node.target.id}`: `{kind}`" + (f" = `{default}`" if default else ""))
        comment = comment_of(node, comments, lines)
        if comment:
            text += wrapped("  <br>" + comment.replace("<", "&lt;"))
    return [*text, ""]


def page() -> str:
    """The whole page, as text."""
    text = [HEAD]
    for path in SOURCES:
        source = path.read_text()
        comments, lines = comments_of(source), source.splitlines()
        titles = {
            "schema": "Every experiment",
            "own_rows": "Rows of your own, in `data` of every task",
        }
        title = titles.get(path.stem, f"Task `{path.parent.name}`")
        text += [f"## {title}", ""]
        names = {"Strict", "Experiment", "OwnRows"}
        for node in ast.parse(source).body:
            if is_block(node, names):
                names.add(node.name)
                text += block_text(node, comments, lines)
    return "\n".join(text).rstrip() + "\n"


def test_the_page_of_keys_is_up_to_date() -> None:
    if os.environ.get("LATHE_WRITE_KEYS"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "make it anew: LATHE_WRITE_KEYS=1 pytest " + str(
        Path(__file__).relative_to(ROOT)
    )


def test_a_key_is_listed_with_its_default_and_its_comment() -> None:
    text = page()
    assert "- `clip`: `Annotated[float, Field(ge=0)]` = `1.0`\n  <br>global gradient norm;" in text
    assert "- `deepspeed`: `str` = `'zero2'`\n  <br>ds_configs/&lt;name>.json, or a path;" in text
    assert "- `steps`: `Positive`\n" in text
