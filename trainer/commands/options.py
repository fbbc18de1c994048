"""The options that commands of `python -m trainer` share, and the experiment that these name."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from trainer.config.flags import CacheDir, DataPath, OnOff, has_no_value
from trainer.config.groups import names
from trainer.config.identity import exp_id as id_of
from trainer.config.userfile import kind
from trainer.errors import EXIT_OK, ConfigError, LatheError
from trainer.launch.ending import EXIT_FAILED, set_up_logging

if TYPE_CHECKING:
    from trainer.evaluation.named_run import NamedRun
    from trainer.training.options import Options

R = TypeVar("R")
_ON_OFF = "BOOL"  # how --help shows the value of such a flag
_NO_VALUE, _SWITCH_WORDS = ("None", "none"), ("True", "False", "None")
_WORDS = {
    "true": True,
    "false": False,
    "on": True,
    "off": False,
    "yes": True,
    "no": False,
    "1": True,
    "0": False,
}
SavedirBase = Annotated[
    Path, typer.Option("-sb", "--savedir_base", help="Root of all run folders.")
]
ExpConfigs = Annotated[
    Path | None, typer.Option("--exp_configs", help="File of groups: .py, .yaml or .json.")
]


@dataclass(frozen=True)
class ExperimentOptions:
    """Which experiment a command works on, and where its files are."""

    savedir_base: SavedirBase
    exp_group: Annotated[
        str | None, typer.Option("-e", "--exp_group", help="Group of the experiment.")
    ] = None
    exp_id: Annotated[
        str | None,
        typer.Option(
            "--exp_id",
            help="Use only the experiment with this id; without -e, read it from its folder.",
        ),
    ] = None
    exp_configs: ExpConfigs = None
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, help="The value that was given to trainval.py; it is part of the id."
        ),
    ] = None
    data_path: DataPath = None
    cache_dir: CacheDir = Path("tmp-cache")

    def values(self) -> dict[str, Any]:
        """The dictionary of the experiment."""
        return experiment(
            self.exp_group, self.exp_id, self.exp_configs, self.savedir_base, self.steps
        )

    def run_options(self, **more: Any) -> Options:
        """What a run reads besides its dictionary. Imports torch.

        more: other fields of Options.
        """
        from trainer.training.options import Options

        return Options(
            self.savedir_base, data_path=self.data_path, cache_dir=self.cache_dir, **more
        )


@dataclass(frozen=True)
class UntrainedOptions(ExperimentOptions):
    """ExperimentOptions of a command that needs no trained model. It needs no folder of runs
    either, unless the base of the experiment is a run.
    """

    savedir_base: SavedirBase = Path("results")


@dataclass(frozen=True)
class RunOptions(UntrainedOptions):
    """UntrainedOptions of a command that may name a run, or an exported folder, by its first
    word.
    """

    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run, in place of -e and --exp_id: its id in --savedir_base, the beginning of "
            "it, or its folder; or an exported folder.",
        ),
    ] = None

    def named_run(self) -> NamedRun:
        """The run that the word names, else that of the experiment. Imports torch."""
        from trainer.evaluation.named_run import experiment_run, named_run

        if self.run is None:
            return experiment_run(self.values(), self.savedir_base)
        flags = {"-e": self.exp_group, "--exp_id": self.exp_id}
        others = [flag for flag, value in flags.items() if value is not None]
        if others:
            raise ConfigError(
                f"evaluate {self.run}: it names a run, and {others[0]} names another. Give one."
            )
        return named_run(self.run, self.savedir_base)


Model = Annotated[
    str,
    typer.Option(
        "--model", help="best or final of the run, base (untrained), or any exported folder."
    ),
]
Split = Annotated[
    str, typer.Option("--split", help="train, valid, test, or valid_NAME of data.valid_sets.")
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="Use only this many rows, the first ones.")
]
ShardRows = Annotated[
    int | None,
    typer.Option(
        "--shard_rows",
        min=1,
        help="Vectors per file; a kill loses at most the file in progress.",
    ),
]
Dims = Annotated[
    int | None,
    typer.Option(
        "--dims",
        min=1,
        help="Write the first numbers of each vector only; of a model trained with "
        "loss.matryoshka.",
    ),
]
Layers = Annotated[
    int | None,
    typer.Option(
        "--layers",
        min=1,
        help="Use the first blocks of the base only; of a model trained with "
        "loss.matryoshka.layers.",
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option("--batch", min=1, help="Rows per device and forward; default train.eval_batch."),
]
NumBeams = Annotated[
    int, typer.Option("--num_beams", min=1, help="Number of beams; 1: greedy decoding.")
]
NumAnswers = Annotated[
    int,
    typer.Option(
        "--num_answers", min=1, help="Number of answers for each row: the best beams, or samples."
    ),
]
Pred = Annotated[
    Path | None,
    typer.Option("--pred", help="JSON lines to write: question, answers, prediction, scores."),
]
WriteScores = Annotated[
    Path | None,
    typer.Option(
        "--write_scores", help="JSON to write: the rows, with ctxs[].score of each passage."
    ),
]


def module_of(task: str, name: str, what: str, *, room: str = "tasks") -> Any:
    """trainer/<room>/<task>/<name>.py; ConfigError when there is none for this task."""
    folder = Path(__file__).parent.parent / room
    names = sorted(file.parent.name for file in folder.glob(f"*/{name}.py"))
    if task not in names:
        raise ConfigError(
            f"task {task!r} has nothing to {what}. Tasks that have: {', '.join(names)}."
        )
    return importlib.import_module(f"trainer.{room}.{task}.{name}")


def experiment(
    group: str | None, exp_id: str | None, file: Path | None, savedir_base: Path, steps: int | None
) -> dict[str, Any]:
    """The experiment that the options name: from a group, by its id, or from its folder."""
    from exp_configs import experiments_of

    if group is None:
        if exp_id is None:
            raise ConfigError(
                "-e GROUP or --exp_id ID is required: which experiment is meant. A file of groups "
                "as the first word of `lathe` does as well."
            )
        path = savedir_base / exp_id / "exp_dict.json"
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}). Give the id of a run in {savedir_base}."
            ) from None
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path} holds {kind(values)}, want the dictionary of an experiment. Put it back "
                "from a copy."
            )
        return values
    experiments = experiments_of(group, file, steps)
    of_group = {id_of(values): values for values in experiments}
    if exp_id is None and len(of_group) > 1:
        lines = [f"  {one}  {name}" for one, name in names(group, experiments).items()]
        raise ConfigError(
            f"-e {group} has {len(of_group)} experiments. Say which by --exp_id:\n"
            + "\n".join(lines)
        )
    if exp_id is not None and exp_id not in of_group:
        raise ConfigError(
            f"--exp_id {exp_id} is not in -e {group}, which has {', '.join(of_group)}. (--steps "
            "changes it.)"
        )
    return of_group[exp_id or next(iter(of_group))]


def guard(function: Callable[..., None]) -> Callable[..., None]:
    """A command for typer (see spread) that ends like trainval.py: an error of ours becomes one
    message on stderr and its own exit code.
    """
    command = spread(function)

    @functools.wraps(command)
    def run(*arguments: Any, **values: Any) -> None:
        set_up_logging()
        code = EXIT_OK
        try:
            command(*arguments, **values)
        except LatheError as error:
            typer.echo(f"{type(error).__name__}: {error}", err=True)
            code = error.exit_code
        except typer.Exit:
            raise
        except Exception:
            logging.exception("failed")
            code = EXIT_FAILED
        if "torch" in sys.modules:
            from trainer.runtime import distributed

            if distributed.has_group():
                distributed.shutdown(code)
        raise typer.Exit(code)

    return run


def log_to_stderr() -> None:
    """Log to standard error from now on, because standard output is for results only."""
    from rich.console import Console

    from trainer.telemetry.console import ConsoleHandler

    logging.getLogger().handlers = [ConsoleHandler(Console(stderr=True))]


# Commands whose flags stand in dataclasses
# --------------------------------------------------------------------------------------------------


def spread(command: Callable[..., R]) -> Callable[..., R]:
    """The command with a signature for typer: each parameter that is a dataclass is replaced by its
    fields, which are declared like parameters (Annotated).
    """
    kinds = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    tables: dict[str, Any] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind: Any = kinds[parameter.name]
        if is_dataclass(kind):
            tables[parameter.name] = kind
            parameters += _parameters_of(kind)
        else:
            parameters.append(
                parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY)
            )

    if not tables:
        return command

    @functools.wraps(command)
    def run(**values: Any) -> R:
        for name, table in tables.items():
            own = [field.name for field in fields(table) if field.name in values]
            values[name] = table(**{each: values.pop(each) for each in own})
        return command(**values)

    changed: Any = run
    changed.__signature__ = inspect.Signature(parameters)
    changed.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _parameters_of(table: Any) -> Iterator[inspect.Parameter]:
    annotations = get_type_hints(table, include_extras=True)
    for field in fields(table):
        annotation: Any = annotations[field.name]
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        for declaration in get_args(annotation)[1:]:
            if isinstance(declaration, OnOff):
                option = typer.Option(
                    declaration.name, metavar=_ON_OFF, callback=on_or_off, help=declaration.help
                )
                annotation, default = Annotated[str, option], str(default).lower()
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )


class FlagsOnOff(TyperCommand):
    """A command whose flags of on and off may stand without a value: `--push_to_hub` is on.

    Launch scripts, and haven's launcher, write `--steps None` for a flag that is not given, and
    `--force False` for a switch that is off.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options: dict[str, Any] = {name: option for option in self.params for name in option.opts}
        words: list[str] = []
        rest = list(args)
        while rest:
            name, equals, value = rest.pop(0).partition("=")
            option = options.get(name)
            is_switch = getattr(option, "is_flag", False)
            if option is not None and not equals and rest:
                value = rest[0]
            if option is not None and value in (_SWITCH_WORDS if is_switch else _NO_VALUE):
                rest = rest if equals else rest[1:]
                words += [name] if value == "True" else []
                continue
            words.append(f"{name}={value}" if equals else name)
            is_on_or_off = getattr(option, "metavar", None) == _ON_OFF
            if is_on_or_off and not equals and has_no_value(rest):
                words.append("true")
        return super().parse_args(ctx, words)


def on_or_off(value: str) -> bool:
    """Read on/off, true/false, yes/no or 1/0: users of older scripts write all of them."""
    text = value.strip().lower()
    if text not in _WORDS:
        close = difflib.get_close_matches(text, _WORDS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise typer.BadParameter(
            f"{value!r} is neither on nor off. Use one of {', '.join(_WORDS)}.{hint}"
        )
    return _WORDS[text]
