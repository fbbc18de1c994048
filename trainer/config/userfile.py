"""Files that a user names: Python files, run for what they define (EXP_GROUPS, JOB_CONFIGS), and
folders and files that a dictionary names by a relative path. Imports no torch.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

from trainer.errors import EXIT_BAD_INPUT, ConfigError

# The folder in which a job was submitted. Set by submission, and only for a dictionary with
# relative paths: a job runs in another folder, the snapshot of its code.
START_FOLDER = "LATHE_START_FOLDER"
_HUB_ID = re.compile(r"(?:\b[\w.-]+\b/)?\b[\w.-]{1,96}\b", re.ASCII)


def leave(use: str) -> NoReturn:
    """End a program that is none, with exit code 2: the file that was started is one to be named on
    a command line. `use` says by which command.
    """
    sys.stderr.write(f"{sys.argv[0]} starts nothing by itself. {use}\n")
    sys.exit(EXIT_BAD_INPUT)


def execute(path: Path, *, flag: str, defines: str) -> dict[str, Any]:
    """The names that the Python file at `path` defines.

    The file may import its neighbours; the folder of this process stays what it is, for relative
    paths on a command line start there. What it prints goes to standard error, for standard output
    may be read by a program. ConfigError when it is no .py file, naming `flag` and what the file
    should define; and for whatever goes wrong in it, with its own line.
    """
    path = path.absolute()  # as its frames name it
    name = f"user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_Source(name, str(path)))
    if spec is None or spec.loader is None or path.suffix != ".py" or not path.is_file():
        raise ConfigError(
            f"{flag} {path}: {_problem(path)}; want the path of a Python file (.py) that defines "
            f"{defines}.{_ADVICE.get(path.suffix.lower(), '')}"
        )
    module = importlib.util.module_from_spec(spec)
    here = os.getcwd()
    try:
        with _neighbours_of(path), contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (
        Exception,
        SystemExit,
    ) as error:  # any: it is the user's code, and must not end this command in silence
        raise ConfigError(
            f"{path}:{_line(error, path)}: {type(error).__name__}: {error}"
        ) from error
    finally:
        os.chdir(here)
    return vars(module)


class _Source(importlib.machinery.SourceFileLoader):
    """Compiles the file as it is now. Python (3.11) takes a compiled copy for the file's own while
    its length and the second of its last change are the same: a quick edit would be passed over.
    """

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


@contextlib.contextmanager
def _neighbours_of(path: Path) -> Iterator[None]:
    """Inside, modules of the file's folder can be imported. They are forgotten afterwards, because
    the folder of the next file may have others of the same names.
    """
    folder, before = str(path.parent), set(sys.modules)
    if folder in sys.path:  # such as the folder of this program
        yield
        return
    sys.path.append(folder)  # behind all others: a neighbour must not replace a library
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            # a library and our own rooms may lie below the folder, too
            is_library = "site-packages" in file or name.partition(".")[0] in ("trainer", "jobs")
            if Path(file).is_relative_to(folder) and not is_library:
                del sys.modules[name]


_PLAIN = " Write what it says as a dictionary of Python into a .py file."
_ADVICE = {  # by suffix: how to come from this kind of file to a Python file
    ".yaml": _PLAIN,
    ".yml": _PLAIN,
    ".json": _PLAIN,
    ".toml": _PLAIN,
    ".ipynb": " `jupyter nbconvert --to script` makes one of a notebook.",
}


def _problem(path: Path) -> str:
    if path.is_dir():
        return "it is a folder"
    if not path.exists():
        return "there is no such file"
    return f"it is a {path.suffix or 'file without a suffix'}"


def _line(error: BaseException, path: Path) -> int:
    """The line of `path` that the error came from.

    It is that of its own text, or of the last of its frames that lies in the file.
    """
    if isinstance(error, SyntaxError) and error.lineno and error.filename in (None, str(path)):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next(
        (frame.lineno or 1 for frame in reversed(frames) if Path(frame.filename) == path), 1
    )


def placed(name: str) -> str:
    """A path of a dictionary as this process reaches it: of a job, from the folder in which it was
    submitted; else, and where nothing lies there, as it is.
    """
    start = os.environ.get(START_FOLDER)
    if not start or not name:
        return name
    path = os.path.join(start, name)  # an absolute name stays what it is
    return path if os.path.exists(path) else name


def may_be_hub_id(spec: str) -> bool:
    """Whether a name of a tokenizer or a base could be one on the Hub: "NAME" or "OWNER/NAME", of
    the letters that huggingface_hub's validate_repo_id admits.
    """
    is_of_git = "--" in spec or ".." in spec or spec.endswith(".git")
    return _HUB_ID.fullmatch(spec) is not None and not is_of_git


def kind(value: Any) -> str:
    """What a value is, in the words of a message: "missing or None", "an empty list", "a str"."""
    if value is None:
        return "missing or None"
    name = type(value).__name__
    return (
        f"an empty {name}"
        if value in ({}, [], ())
        else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
    )
