"""What clients are told of an error: paths as they are below the savedir_base, and no words of
Python. The log of the server has the whole.
"""

from __future__ import annotations

import os
from pathlib import Path

from jobs.errors import reason_of
from trainer.errors import LatheError


def reason_for_client(error: BaseException, place: Path, base: Path) -> str:
    """What to tell a client of an error: it names the file, or else `place`, relative to `base`."""
    is_in_words = isinstance(error, LatheError) or (
        isinstance(error, OSError) and error.filename is not None
    )
    if is_in_words:
        return without_base(reason_of(error, place), base)
    text = f"{place}: the server does not understand it. The server's log says why."
    return without_base(text, base)


def without_base(text: str, base: Path) -> str:
    """A text in which paths below `base` are relative to it."""
    for folder in {str(base), os.path.realpath(base)} - {"/"}:
        text = text.replace(f"{folder}/", "")
    return text
