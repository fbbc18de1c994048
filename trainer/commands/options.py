"""What the commands of `python -m trainer` share: their options and the experiment they name."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from trainer.config.identity import exp_id as id_of
from trainer.config.userfile import kind
from trainer.errors import EXIT_OK, ConfigError, LatheError
from trainer.launch.ending import EXIT_FAILED, set_up_logging

P = ParamSpec("P")

ExpGroup = Annotated[str | None, typer.Option("-e", "--exp_group", help="Group of the experiment.")]
SavedirBase = Annotated[
    Path, typer.Option("-sb", "--savedir_base", help="Root of all run folders.")
]
ExpId = Annotated[
    str | None, typer.Option("--exp_id", help="This one only; alone, read from its folder.")
]
ExpConfigs = Annotated[
    Path | None, typer.Option("--exp_configs", help="Python file with EXP_GROUPS.")
]
Steps = Annotated[
    int | None,
    typer.Option("--steps", min=1, help="As given to trainval.py: it is part of the id."),
]
DataPath = Annotated[Path | None, typer.Option("--data_path", help="Folder of the data set.")]
CacheDir = Annotated[Path, typer.Option("--cache_dir", help="Token caches and tokenizers.")]
NumProc = Annotated[
    int | None,
    typer.Option(
        "--num_proc", min=1, help="Processes that encode rows; default: 1 for few, else all cores."
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model", help="best or final of the run, base (untrained), or any exported folder."
    ),
]
Split = Annotated[str, typer.Option("--split", help="train, valid or test.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="The first rows only.")]
BatchSize = Annotated[
    int | None, typer.Option("--batch", min=1, help="Rows per device; default train.eval_batch.")
]
NumBeams = Annotated[int, typer.Option("--num_beams", min=1, help="1: greedy.")]
NumAnswers = Annotated[
    int, typer.Option("--num_answers", min=1, help="The n best answers of each row, or n draws.")
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
    """The one experiment that is meant: of a group, by its id, or out of its folder."""
    from exp_configs import experiments_of

    if group is None:
        if exp_id is None:
            raise ConfigError(
                "-e GROUP or --exp_id ID is required: the experiment whose model is evaluated."
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
    found = {id_of(values): values for values in experiments_of(group, file, steps)}
    if exp_id is None and len(found) > 1:
        raise ConfigError(
            f"-e {group} has {len(found)} experiments. Say which by --exp_id: {', '.join(found)}."
        )
    if exp_id is not None and exp_id not in found:
        raise ConfigError(
            f"--exp_id {exp_id} is not in -e {group}, which has {', '.join(found)}. (--steps "
            "changes it.)"
        )
    return found[exp_id or next(iter(found))]


def guarded(function: Callable[P, None]) -> Callable[P, None]:
    """Run a command as trainval.py does.

    An error of ours is one message on stderr, and its own exit code.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        set_up_logging()
        code = EXIT_OK
        try:
            function(*args, **kwargs)
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
    """Messages of ours on standard error from now on: standard output is for results alone."""
    from rich.console import Console

    from trainer.telemetry.console import ConsoleHandler

    logging.getLogger().handlers = [ConsoleHandler(Console(stderr=True))]
