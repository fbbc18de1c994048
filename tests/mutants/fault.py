"""What a fault is, and how it is put into a copy of the project."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class BadFault(Exception):
    """A fault that cannot be tried as it stands in the list."""


@dataclass(frozen=True)
class Fault:
    """One line of the project, made wrong. The tests of its file must fail with it."""

    file: str  # from the root of the project
    text: str  # a piece of one line, which stands exactly once in the file
    replacement: str
    why: str  # what a user would suffer if nobody noticed
    tests: str  # what is given to pytest: files, and -k with words

    @property
    def module(self) -> str:
        """The name under which Python imports the file."""
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def problem(root: Path, fault: Fault) -> str | None:
    """Why a fault cannot be tried on the project at `root`, or None when it can."""
    path = root / fault.file
    if not path.is_file():
        return f"{fault.file} does not exist"
    content = path.read_text(encoding="utf-8")
    count = content.count(fault.text)
    if count != 1:
        return f"{fault.file}: {fault.text!r} stands there {count} times, want once"
    if fault.text == fault.replacement:
        return f"{fault.file}: the replacement of {fault.text!r} changes nothing"
    try:
        compile(content.replace(fault.text, fault.replacement), fault.file, "exec")
    except SyntaxError as error:
        return f"{fault.file}: with {fault.replacement!r} it is no Python ({error})"
    missing = [
        word
        for word in fault.tests.split()
        if word.startswith("tests/") and not (root / word).exists()
    ]
    return f"{fault.file}: {', '.join(missing)} does not exist" if missing else None


@contextmanager
def applied(root: Path, fault: Fault, *, number: int) -> Iterator[None]:
    """Inside, the file at `root` has the fault; afterwards it is as it was, its time of change
    included.

    number: another one for each fault. It becomes the time of change, because Python takes bytecode
    that it compiled before for that of a file of the same size and of the same second.
    """
    wrong = problem(root, fault)
    if wrong is not None:
        raise BadFault(wrong)
    path = root / fault.file
    before, times = path.read_bytes(), path.stat()
    path.write_text(before.decode("utf-8").replace(fault.text, fault.replacement), encoding="utf-8")
    os.utime(path, (times.st_atime, 1_000_000_000 + number))
    try:
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
