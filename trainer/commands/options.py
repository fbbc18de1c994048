"""What the commands of `python -m trainer` share: their options, the experiment that is meant, and
how they end.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec

import typer

from trainer.config.identity import exp_id as id_of
from trainer.config.userfile import kind
from trainer.errors import EXIT_OK, ConfigError, LatheError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
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


def module_of(task: str, name: str, what: str) -> Any:
    """trainer/tasks/<task>/<name>.py; ConfigError when the task has none."""
    from trainer import tasks

    known = sorted(file.parent.name for file in Path(tasks.__file__).parent.glob(f"*/{name}.py"))
    if task not in known:
        raise ConfigError(
            f"task {task!r} has nothing to {what}. Tasks that have: {', '.join(known)}."
        )
    return importlib.import_module(f"trainer.tasks.{task}.{name}")


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


def end(command: Callable[[], int]) -> NoReturn:
    """Run `command` and exit with its code. An error of ours is one message; any other is shown
    whole, and then gloo's threads must not turn the exit code into an abort.
    """
    set_up_logging()
    text: str | None = None
    try:
        code = command()
    except LatheError as error:
        text = f"{type(error).__name__}: {error}"
        typer.echo(text, err=True)
        code = error.exit_code
    except KeyboardInterrupt:
        text = "left without saving. The same command goes on from the last checkpoint."
        typer.echo(text, err=True)
        code = EXIT_INTERRUPTED
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        logging.exception("failed")
        code = EXIT_FAILED
    _tell_wrapper(code, text)
    _tell_agent(code)
    _tell_peers(code, text)
    leave(code)


def last_words(error: LatheError) -> None:
    """What end() tells of an error, where its process is ended by another thread."""
    text = f"{type(error).__name__}: {error}"
    typer.echo(text, err=True)
    _tell_wrapper(error.exit_code, text)


def _tell_wrapper(code: int, text: str | None) -> None:
    """Leave the exit code where the wrapper of a job looks for it: torchrun turns every one but 0
    into 1.

    A rank that fails is believed at once, and the first one is; success is for rank 0 to tell.
    """
    path = os.environ.get("LATHE_OUTCOME")
    if path is None or (code == EXIT_OK and os.environ.get("RANK", "0") != "0"):
        return
    with (
        contextlib.suppress(OSError),
        open(path, "x") as file,
    ):  # FileExistsError: another rank was first
        json.dump({"code": code, "error": text}, file)


def _tell_agent(code: int) -> None:
    """As _tell_wrapper, to the agent of --survive, if this process is one of its ranks."""
    if "trainer.survival.lifeline" in sys.modules:
        from trainer.survival import lifeline

        with contextlib.suppress(OSError):
            lifeline.tell("leaving", code=code)


def _tell_peers(code: int, text: str | None) -> None:
    """As _tell_wrapper, to the other ranks, if they watch each other."""
    if "trainer.survival.watch" in sys.modules:
        from trainer.survival import watch

        watch.leave(code, text or "")


def leave(code: int) -> NoReturn:
    """Exit with `code`. Once torch.distributed is up the interpreter's own way out can abort (see
    distributed).
    """
    if "torch" in sys.modules:
        from trainer.runtime import distributed

        distributed.shutdown(code)
    raise typer.Exit(code)


def set_up_logging() -> None:
    """Messages of ours on standard output, from rank 0 alone; of libraries only warnings."""
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    from trainer.telemetry.console import ConsoleHandler  # rich, which --help needs not

    logging.basicConfig(level=level, format="%(message)s", handlers=[ConsoleHandler()])
    for name in ("httpx", "filelock", "DeepSpeed", "torch", "wandb", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # an unreachable Hub ends in one ConfigError of ours
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def log_to_stderr() -> None:
    """Messages of ours on standard error from now on: standard output is for results alone."""
    from rich.console import Console

    from trainer.telemetry.console import ConsoleHandler

    logging.getLogger().handlers = [ConsoleHandler(Console(stderr=True))]
