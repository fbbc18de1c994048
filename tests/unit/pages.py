"""Pages of docs/ that are made from the program: they are what it says, or a test says how to make
them anew.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WRITES = "LATHE_WRITE_PAGES"


def wrapped(text: str) -> list[str]:
    """An entry of a list as lines that a terminal shows."""
    return textwrap.wrap(text, 110, subsequent_indent="  ", break_on_hyphens=False)


def assert_made(page: str, text: str, test: str) -> None:
    """docs/`page` is `text`; with LATHE_WRITE_PAGES set it is written first. test: this file."""
    path = ROOT / "docs" / page
    if os.environ.get(WRITES):
        path.write_text(text)
    made = path.read_text() if path.exists() else ""
    own = Path(test).relative_to(ROOT)
    assert made == text, f"make it anew: {WRITES}=1 .venv/bin/python -m pytest {own}"
