"""The command `lathe`: everything that trainval.py, `python -m trainer` and lathe-jobs do, by one
name and from any folder. Imports no torch until a command needs it.
"""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path
from typing import Any, NoReturn, cast

import typer
from typer.main import get_command_name
from typer.models import CommandInfo

import trainval
from jobs import cli as jobs_cli
from trainer import __main__ as trainer_cli
from trainer.commands.options import FlagsOnOff
from trainer.config import groups
from trainer.config.readers.group_file import READERS
from trainer.errors import ConfigError, LatheError
from trainer.version import Version

FILES = (".py", *READERS)  # suffixes of a file of groups
RUNS = Path("results")  # the folder of runs where -sb is not given


class FileFirst(FlagsOnOff):
    """A command whose first word may be a file of groups: FILE stands for --exp_configs FILE. The
    group need not be named when the file has one.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._with_options(args))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)
        return [pieces[0], "[FILE]", *pieces[1:]] if self._has("exp_configs") else pieces

    def _has(self, name: str) -> bool:
        return any(parameter.name == name for parameter in self.params)

    def _with_options(self, args: list[str]) -> list[str]:
        if not args or not self._has("exp_configs"):
            return args
        self._refuse_words(args)
        if not _is_file(args[0]):
            return args
        file, *rest = args
        flags = {word.partition("=")[0] for word in rest if word.startswith("-")}
        words = ["--exp_configs", file]
        if self._has("exp_group") and not flags & {"-e", "--exp_group", "--exp_id", "-h", "--help"}:
            try:
                names = list(groups.read(Path(file)))
                if len(names) > 1:
                    raise ConfigError(
                        f"{file} has {len(names)} groups. Say which by -e: {', '.join(names)}."
                    )
            except LatheError as error:
                _refuse(error)
            words += ["--exp_group", names[0]]
        return [*words, *rest]

    def _refuse_words(self, args: list[str]) -> None:
        """End the command for a file of groups that is not its first word, or a second one, and for
        a first word that is neither a file of groups nor an option.
        """
        pairs = itertools.pairwise(args)
        later = [word for before, word in pairs if _is_file(word) and not before.startswith("-")]
        has_words = any(parameter.param_type_name == "argument" for parameter in self.params)
        is_other = not has_words and not args[0].startswith("-") and not _is_file(args[0])
        if later or is_other:
            _refuse(
                ConfigError(
                    f"lathe {self.name}: got {(later or args)[0]!r}. One file of groups "
                    f"({', '.join(FILES)}) may be given, as the first word: lathe {self.name} FILE "
                    "-e GROUP"
                )
            )


def _is_file(word: str) -> bool:
    return word.lower().endswith(FILES) and not word.startswith("-")


def _refuse(error: LatheError) -> NoReturn:
    typer.echo(f"{type(error).__name__}: {error}", err=True)
    sys.exit(error.exit_code)


def name_of(command: CommandInfo) -> str:
    """What a command is called on the command line."""
    return command.name or get_command_name(cast(Any, command.callback).__name__)


def _make() -> typer.Typer:
    programs = (jobs_cli.app, trainer_cli.app)  # of two commands of one name the trainer's counts
    (train,) = trainval.app.registered_commands
    commands = {"train": train}
    for program in programs:
        commands |= {name_of(command): command for command in program.registered_commands}
    settings = {
        "help_option_names": ["-h", "--help"],
        "default_map": {name: {"savedir_base": str(RUNS)} for name in commands},
    }
    app = typer.Typer(
        context_settings=settings,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        no_args_is_help=True,
        help="Fine-tune models, submit the jobs that do it, and use what they trained. A command "
        "that takes -e GROUP also takes a file of groups (.py, .yaml, .json) as its first word.",
    )

    @app.callback()
    def _about(version: Version = False) -> None:
        pass

    for name, command in commands.items():
        own = copy.copy(command)
        own.name, own.cls = name, FileFirst
        app.registered_commands.append(own)
    app.add_typer(
        jobs_cli.app,
        name="jobs",
        help="The commands of lathe-jobs, plan, export and doctor among them.",
    )
    return app


app = _make()

if __name__ == "__main__":
    app(prog_name="lathe")
