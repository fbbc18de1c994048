"""`lathe train` as a function: in this process on one rank, or under torchrun on several."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import errors
from trainer.api.arguments import dictionary, refuse_below_one, run_flags
from trainer.api.process_state import as_found
from trainer.api.run import Run, load
from trainer.errors import EXIT_OK, EXIT_PAUSED, EXIT_PREEMPTED, ConfigError, LatheError
from trainer.files.survive import LAUNCHED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer.config.flags import RunFlags
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import RunPlan

_LEFT = "left without saving. The same call goes on from the last checkpoint."
_LOOKS_S = 0.2  # seconds between two looks at whether a signal came


def fine_tune(
    values: Mapping[str, Any],
    data: str | Path | None = None,
    *,
    savedir_base: str | Path = "results",
    ranks: int = 1,
    reset: bool = False,
    **flags: Any,
) -> Run:
    """Train one experiment to its end, as `lathe train` does: the same id, folder and losses.

    values: the experiment's dictionary; docs/keys.md lists the keys.
    data: the folder of its data (`--data_path`).
    savedir_base: the folder of all runs; the run's own folder is SAVEDIR_BASE/<id>.
    ranks: how many processes train together, one a GPU. One rank is this process; several are
        started by torchrun on this machine.
    reset: move an old folder of the run aside and start over (`-r 1`).
    flags: other flags of `lathe train` (docs/commands.md) by their names, such as log_every=10 or
        strict=True.

    Called again, it goes on with a run that was stopped (by until=STEP, too), and trains a finished
    one no further. What belongs to the whole process is afterwards as it was: environment, signal
    handlers, loggers, random state, torch's defaults.

    Raises ConfigError for a wrong dictionary or argument, DataError for wrong data, ResumeError
    where the folder holds another run, DoesNotFitError for too little memory, StorageError,
    CheckpointError and DivergedError. All are LatheError of `trainer.errors`.

    The first interrupt saves the run and raises KeyboardInterrupt, which says how to go on; a
    second one leaves without saving. Any other signal that asks a process to end, such as SIGTERM,
    has its effect once the run is saved.
    """
    began_at = time.time()
    experiment = dictionary(values)
    own = run_flags(data, flags)
    refuse_below_one(ranks=ranks)
    about = {"savedir_base": Path(savedir_base), "reset": reset, "began_at": began_at}
    return train_one(experiment, own, ranks=ranks, **about)


def train_one(experiment: dict[str, Any], own: RunFlags, *, ranks: int = 1, **about: Any) -> Run:
    """What fine_tune does, of checked arguments. about: other fields of Options, such as names."""
    _refuse_place()
    train = experiment.get("train")
    with as_found(compiles=isinstance(train, dict) and bool(train.get("compile"))):
        from trainer.training.options import Options
        from trainer.training.run_plan import plan

        options = Options(**vars(own), **about)
        run_plan = plan(experiment, options, world=ranks, rank=0)
        train_it = _train_here if ranks == 1 else _train_under_torchrun
        try:
            number = train_it(run_plan, options)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_LEFT) from None
    run = load(run_plan.folder, cache_dir=own.cache_dir)
    if number is not None:
        _interrupt(run, number)
    return run


def _refuse_place() -> None:
    """ConfigError where this process cannot train."""
    launched = [name for name in LAUNCHED if name in os.environ]
    if launched:
        raise ConfigError(
            f"fine_tune: {', '.join(launched)} is set, but fine_tune starts its ranks itself. "
            "Start this program with python, not with torchrun or deepspeed, and give ranks=N."
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "fine_tune: it was called in another thread than the main one, which alone gets the "
            'signals that stop a run. Call it there, or send the run by submit(..., "local").'
        )
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "fine_tune: torch.distributed has a process group already, and a run makes its own. "
            "End it first: torch.distributed.destroy_process_group()."
        )


def _interrupt(run: Run, number: int) -> None:
    """Let a signal that has stopped the run have its effect."""
    state = run.status
    text = (
        f"{signal.Signals(number).name}: the run is stopped after step {state.get('step', 0)} of "
        f"{state.get('total')}, and saved in {run.folder}. The same call goes on there."
    )
    if number == signal.SIGINT and signal.getsignal(number) is signal.default_int_handler:
        raise KeyboardInterrupt(text)
    print(text, file=sys.stderr, flush=True)
    signal.raise_signal(number)


def _train_here(run_plan: RunPlan, options: Options) -> int | None:
    """Train in this process. The number of the signal that stopped the run; None: it is done."""
    from trainer.launch.group import run_each
    from trainer.runtime import distributed
    from trainer.runtime.preemption import Preemption

    distributed.init()
    preemption = Preemption()
    try:
        code = run_each([run_plan], options, preemption)
    finally:
        preemption.close()
    return preemption.number if code == EXIT_PREEMPTED else None


# Several ranks
# --------------------------------------------------------------------------------------------------


def _train_under_torchrun(run_plan: RunPlan, options: Options) -> int | None:
    """Train by `torchrun trainval.py`. The number of the signal that stopped the run; None: it is
    done. Raises the error of the rank that failed first.
    """
    import trainval
    from trainer.config.flags import RunFlags
    from trainer.launch.run_folder import claim_folder
    from trainer.runtime.preemption import Preemption

    with claim_folder(run_plan, options):
        pass  # the folder has the dictionary now, which the ranks read
    texts = RunFlags.as_text(options)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(run_plan.sharding.world), trainval.__file__]
    command += ["--exp_id", run_plan.id, "--savedir_base", str(options.savedir_base)]
    command += [f"--{name}={text}" if text else f"--{name}" for name, text in texts.items()]
    preemption = Preemption()
    try:
        with tempfile.TemporaryDirectory(prefix="lathe-") as folder:
            outcome = Path(folder) / "outcome.json"
            code = _follow(command, outcome, preemption)
            news = json.loads(outcome.read_text()) if outcome.is_file() else {}
    finally:
        preemption.close()
    code = news.get("code", code)
    if code == EXIT_PREEMPTED:
        return preemption.number
    if code not in (EXIT_OK, EXIT_PAUSED):
        raise _error(news.get("error") or f"torchrun ended with code {code}; see what it printed.")
    return None


def _follow(command: list[str], outcome: Path, preemption: Preemption) -> int:
    """Run a launcher and show what it prints. A signal to this process asks it to end, which saves.
    Returns its exit code. outcome: the file into which a rank writes how the run ended.
    """
    environment = {**os.environ, "LATHE_OUTCOME": str(outcome)}
    environment.pop("FORCE_COLOR", None)  # a kernel sets it, and a pipe shows no progress bar
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # it gets the signals that it is passed, and no Ctrl-C beside them
    )
    assert process.stdout is not None
    decoder, is_passed_on = codecs.getincrementaldecoder("utf-8")("replace"), False
    try:
        while True:
            if preemption.requested and not is_passed_on:
                process.terminate()
                is_passed_on = True
            if not select.select([process.stdout], [], [], _LOOKS_S)[0]:
                continue
            content = os.read(process.stdout.fileno(), 1 << 16)
            if not content:
                return process.wait()
            sys.stdout.write(decoder.decode(content))
            sys.stdout.flush()
    except BaseException:  # a second interrupt among them
        _kill(process)
        raise
    finally:
        process.stdout.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a launcher with its ranks."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


def _error(text: str) -> LatheError:
    """The error that a rank has told as "ConfigError: ...", of its own type where it is ours."""
    name, _, message = text.partition(": ")
    kind: Any = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, LatheError):
        return kind(message)
    return LatheError(text)
