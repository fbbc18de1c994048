"""How a command ends: its exit code, and who is told about it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

import typer

from trainer.errors import EXIT_OK, LatheError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
# The least level of what each of these libraries logs.
LIBRARIES = dict.fromkeys(
    ("httpx", "filelock", "DeepSpeed", "torch", "wandb", "urllib3"), logging.WARNING
) | {"huggingface_hub": logging.ERROR}  # we raise one ConfigError when it cannot be reached


def end(command: Callable[[], int]) -> NoReturn:
    """Run `command` and exit with its code. An error of ours is shown as one message, any other
    with its traceback. gloo's threads cannot turn the exit code into that of an abort.
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
    if "trainer.survival.lifeline" in sys.modules:  # this may be a rank of --survive
        from trainer.survival import lifeline

        with contextlib.suppress(OSError):
            lifeline.tell("leaving", code=code)
    if "trainer.runtime.watch" in sys.modules:  # the ranks may watch each other
        from trainer.runtime import watch

        watch.leave(code, text or "")
    leave(code)


def last_words(error: LatheError) -> None:
    """Report an error as end() does, for a process that another thread ends."""
    text = f"{type(error).__name__}: {error}"
    typer.echo(text, err=True)
    _tell_wrapper(error.exit_code, text)


def _tell_wrapper(code: int, text: str | None) -> None:
    """Write the exit code where the wrapper of a job looks for it, because torchrun turns every
    code but 0 into 1.

    The first rank that fails writes its code; success is written by rank 0 only.
    """
    path = os.environ.get("LATHE_OUTCOME")
    if path is None or (code == EXIT_OK and os.environ.get("RANK", "0") != "0"):
        return
    with (
        contextlib.suppress(OSError),
        open(path, "x") as file,
    ):  # FileExistsError: another rank was first
        json.dump({"code": code, "error": text}, file)


def leave(code: int) -> NoReturn:
    """Exit with `code`. Once torch is imported, distributed.shutdown() ends the process, because
    the interpreter's own exit may abort.
    """
    if "torch" in sys.modules:
        from trainer.runtime import distributed

        distributed.shutdown(code)
    raise typer.Exit(code)


def set_up_logging() -> None:
    """Log our messages to standard output, from rank 0 only, and the warnings of libraries."""
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    from trainer.telemetry.console import ConsoleHandler  # imports rich, which --help does not need

    logging.basicConfig(level=level, format="%(message)s", handlers=[ConsoleHandler()])
    quieten()


def quieten() -> None:
    """Let libraries log warnings only."""
    for name, level in LIBRARIES.items():
        logging.getLogger(name).setLevel(level)
