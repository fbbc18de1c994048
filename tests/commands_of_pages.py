"""What a page of docs/ tells to write and to type: its files, and its command lines of `lathe`.

A file is a name between backquotes, words up to a colon, and a block. A command line is a line of a
block without a language that begins with `lathe`, or with torchrun and leads to `lathe`; with "$ "
in front it is one that the tests run.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.run import get_args_parser
from typer.main import get_command

from tests.forked import ROOT
from trainer import lathe

_FILE = re.compile(r"`([\w.-]+\.(?:py|yaml))`[^`]*:\n\n```\w*\n(.*?)^```", re.M | re.S)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class CommandLine:
    """One line of a page."""

    words: tuple[str, ...]
    is_run: bool

    @property
    def of_lathe(self) -> tuple[str, ...]:
        """The words behind `lathe`; UsageError when torchrun does not understand those before."""
        if self.words[0] == "lathe":
            return self.words[1:]
        launch: Any = get_args_parser().parse_args(list(self.words[1:]))
        assert launch.no_python, "without --no-python torchrun takes lathe for a Python file"
        assert launch.training_script == "lathe"
        return tuple(launch.training_script_args)


def files_of(page: Path) -> dict[str, str]:
    """The texts of the files that a page tells to write, by their names."""
    return dict(_FILE.findall(page.read_text()))


def python_of(page: Path) -> list[str]:
    """The blocks of Python of a page, in their order."""
    return [text for language, text in _BLOCK.findall(page.read_text()) if language == "python"]


def commands_of(page: Path) -> list[CommandLine]:
    """The command lines of a page, in their order."""
    found: list[CommandLine] = []
    for language, block in _BLOCK.findall(page.read_text()):
        for line in [] if language else block.splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words[:1] == ["lathe"] or (words[:1] == ["torchrun"] and "lathe" in words):
                found.append(CommandLine(tuple(words), line.startswith("$ ")))
    return found


def parsed(words: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """The command of `lathe WORDS` and its options, as the program understands them; UsageError
    when it does not. A file of groups that is named must be there.
    """
    program: Any = get_command(lathe.app)
    context = program.make_context("lathe", list(words))
    rest = [*context._protected_args, *context.args]
    name, command, rest = program.resolve_command(context, rest)
    return name, command.make_context(name, rest, parent=context).params


def write_lathe(folder: Path) -> Path:
    """A program `lathe` of this repository in `folder`, whatever is installed."""
    script = folder / "lathe"
    start = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom trainer.lathe import app\napp()\n"
    script.write_text(f"#!{sys.executable}\n{start}")
    script.chmod(0o755)
    return script
