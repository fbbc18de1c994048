"""`trainval(exp_dict, savedir, args)`, the function that haven's own launcher calls.

    from haven import haven_wizard
    from trainer.api.haven import trainval

    haven_wizard.run_wizard(func=trainval, exp_groups=EXP_GROUPS, args=args, ...)

jobs/haven has what haven needs besides, to send such a run to a scheduler.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from trainer.api.arguments import dictionary, run_flags
from trainer.api.training import train_one
from trainer.config.groups import GROUP, NAME, names
from trainer.config.identity import exp_id
from trainer.errors import ConfigError
from trainer.files.survive import LAUNCHED

if TYPE_CHECKING:
    from trainer.config.flags import RunFlags

_NO_VALUE = (None, "None", "none")  # haven writes a value that is None as a word
# What haven 0.7.3 adds to the arguments, and what is read here besides the flags of a run.
_KNOWN = ("exp_group_list", "savedir_base", "reset", "exp_id", "job_scheduler", "python_binary")

log = logging.getLogger(__name__)


def trainval(exp_dict: Mapping[str, Any], savedir: str | Path, args: Any = None) -> None:
    """Train one experiment in the folder that haven has made for it, or go on with it.

    exp_dict: the experiment's dictionary.
    savedir: SAVEDIR_BASE/<id>, as haven names it, so that id and folder are those of `lathe train`.
    args: the arguments of the program, as argparse returns them. Those named like flags of `lathe
        train` are these flags; None, and the text "None", are no value.

    Here, on one rank, it returns when the run is done, and raises LatheError where it cannot be.
    In a job, and under torchrun or deepspeed, it ends the process, as trainval.py does.

    Raises ConfigError for another folder, a wrong flag, and `steps`, which the dictionary states.
    """
    arguments: dict[str, Any] = {} if args is None else vars(args)
    if arguments.get("exp_id") or any(name in os.environ for name in LAUNCHED):
        from trainer.launch.ending import end

        end(lambda: _as_command(exp_dict, savedir, arguments))
    values, flags = dictionary(exp_dict), _flags(arguments)
    train_one(values, flags, **_about(values, Path(savedir), arguments))


def _as_command(exp_dict: Mapping[str, Any], savedir: str | Path, given: dict[str, Any]) -> int:
    """Train as trainval.py does, on every rank of a launcher. Returns the exit code."""
    import trainval as command

    values = dictionary(exp_dict)
    options = {**vars(_flags(given)), **_about(values, Path(savedir), given)}
    return command.begin([values], options, command.Launch())


def _flags(given: Mapping[str, Any]) -> RunFlags:
    """The flags of a run among the arguments of a program. Texts are read as by a command."""
    from pydantic import TypeAdapter, ValidationError

    from trainer.config.flags import RunFlags

    values: dict[str, Any] = {}
    for name, kind in get_type_hints(RunFlags).items():
        value = given.get(name)
        if value in _NO_VALUE:
            continue
        with contextlib.suppress(ValidationError):  # run_flags refuses it
            value = TypeAdapter(kind).validate_python(value)
        values[name] = value
    others = sorted(given.keys() - values.keys() - {*get_type_hints(RunFlags), *_KNOWN, "steps"})
    if others:
        log.info("arguments that Lathe does not read: %s", ", ".join(others))
    return run_flags(values.pop("data_path", None), values)


def _about(values: dict[str, Any], folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Where the run stands, and what people call it: fields of Options."""
    name, steps = exp_id(values), given.get("steps")
    if folder.name != name:
        raise ConfigError(
            f"savedir {folder}: the id of this experiment is {name}. Give its folder, "
            f"{folder.parent / name}."
        )
    if steps not in _NO_VALUE and str(steps) != str(values.get("train", {}).get("steps")):
        raise ConfigError(
            f"steps={steps}: the schedule depends on it, so the dictionary states it, "
            "train.steps. Write it there: run_wizard(exp_list=with_steps(EXP_GROUPS[GROUP], "
            "STEPS)), of trainer.config.groups."
        )
    group, title = _group_and_name(name, given)
    return {
        "savedir_base": folder.parent,
        "group": group,
        "names": {name: title} if title else {},
        "began_at": time.time(),
    }


def _group_and_name(name: str, given: Mapping[str, Any]) -> tuple[str, str]:
    """The group of an experiment and its name for people; "" where haven does not say it. A job is
    told both by whoever sent it.
    """
    from exp_configs import experiments_of

    groups = given.get("exp_group_list") or []
    file = given.get("exp_configs")
    for group in groups:
        with contextlib.suppress(ConfigError):  # a group of the program's own
            own = names(group, experiments_of(group, Path(file) if file else None, None))
            if name in own:
                return group, own[name]
    if groups:
        return (groups[0] if len(groups) == 1 else ""), ""
    return os.environ.get(GROUP, ""), os.environ.get(NAME, "")
