"""Makes a Request from a command line: job dictionary, flags, code and environment.

`trainval.py -j` and `lathe-jobs submit` share it.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from job_configs import job_values
from jobs import secret_keys
from jobs.backends import BackendCache
from jobs.code import snapshot
from jobs.config import JobConfig
from jobs.record import wandb_key
from jobs.record.paths import BaseFolder, check_base
from jobs.submit import refusals
from jobs.submit.request import RESEND_S, Request
from trainer.config.block import validate
from trainer.config.flags import ON_OFF, PATHS, RUN_FLAGS, SWITCHES, has_no_value
from trainer.errors import ConfigError, nearest

if TYPE_CHECKING:
    from jobs.job_state import JobState
    from jobs.protocol import Backend

PROJECT = Path(__file__).resolve().parent.parent.parent  # the folder of trainval.py
log = logging.getLogger(__name__)


def job_config(
    group: str, file: Path | None, python_binary: str | None, *, survive: str | None = None
) -> JobConfig:
    """The checked job dictionary of a group.

    `python_binary` and `survive` from the command line go over its own.
    """
    values = job_values(group, file)
    if python_binary:
        values["python_binary"] = python_binary
    if survive:
        values["survive"] = survive
    return validate(
        JobConfig, values, source=f"{file or 'job_configs.py'}: job dictionary of {group!r}"
    )


def training_flags(words: Sequence[str]) -> dict[str, str]:
    """{"data_path": "/data"} of words like trainval.py's: --data_path /data, or --data_path=/data;
    "" for a switch.

    ConfigError names the first word that is none of its flags, with the nearest one.
    """
    flags: dict[str, str] = {}
    rest = list(words)
    while rest:
        name, equals, text = rest.pop(0).partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or key not in RUN_FLAGS:
            raise ConfigError(f"{name!r}: no such training flag. {nearest(key, list(RUN_FLAGS))}")
        if key in SWITCHES and equals:
            raise ConfigError(f"{name}={text}: want no value. Write {name} alone, or leave it out.")
        if key in ON_OFF and not equals and has_no_value(rest):
            rest.insert(0, "true")
        if not equals and not rest and key not in SWITCHES:
            raise ConfigError(f"{name}: want a value after it.")
        flags[key] = text if equals or key in SWITCHES else rest.pop(0)
    return flags


def with_steps(flags: Mapping[str, str], steps: int | None) -> dict[str, str]:
    """The flags of a training whose dictionary has the value of --steps: its schedule stays, so the
    training has to know that it was shortened.
    """
    return dict(flags) if steps is None else {"steps": str(steps), **flags}


def make(
    *,
    group: str,
    experiments: Sequence[dict[str, Any]],
    base: Path,
    backend: str,
    job: JobConfig,
    flags: Mapping[str, str],
    allow_dirty: bool,
    take_snapshot: bool = True,
    retry: Collection[JobState] = (),
    max_parallel: int | None = None,
    use_array: bool = False,
    after: Sequence[str] = (),
    resend_s: float = RESEND_S,
    backend_of: Callable[[str], Backend] | None = None,
) -> Request:
    """The Request for a group.

    flags: those of `training_flags`, and "steps" where --steps has shortened the experiments.
    Takes a snapshot of the code (not for a plan), and checks where the key of W&B will come from.
    """
    check_base(base)
    load = backend_of or BackendCache()
    target = load(backend)
    start = refusals.start_folder(experiments, PROJECT, shares_disk=target.traits.shares_disk)
    folder = BaseFolder(base.absolute())
    key = wandb_key.find_key_source(job, os.environ)
    if flags.get("wandb_project_name") and flags.get("wandb_entity_name"):
        log.info("wandb: %s", key.text)
    if key.key_file is not None:  # WANDB_API_KEY_FILE of this shell may name it
        job = job.model_copy(update={"wandb_key_file": str(key.key_file)})
    code = None
    if take_snapshot and not target.traits.is_in_process:
        code = snapshot.take(PROJECT, folder, allow_dirty=allow_dirty)
        patch = " + patch" if code.is_dirty else ""
        log.info("code: snapshot %s of %s%s", code.digest[:12], code.name, patch)
    return Request(
        base=folder,
        group=group,
        experiments=experiments,
        job=job,
        backend=target,
        backend_of=load,
        workdir=PROJECT if code is None else code.workdir,
        snapshot=code,
        python=sys.executable,
        flags=[
            f"--{name}" if name in SWITCHES else f"--{name}={_absolute(name, text)}"
            for name, text in flags.items()
        ],
        deepspeed=flags.get("deepspeed"),
        environment={
            **secret_keys.minimal_environment(os.environ, is_same_machine=target.traits.runs_here),
            **start,
        },
        retry=retry,
        max_parallel=max_parallel,
        use_array=use_array,
        after=after,
        resend_s=resend_s,
    )


def _absolute(name: str, text: str) -> str:
    """A path as an absolute one, for the job runs in its snapshot; any other text as it is."""
    if name == "device" and text.endswith(".json"):  # a calibration, maybe of several devices
        times = re.match(r"\d+x(?=.)", text)
        start = 0 if times is None else times.end()
        return text[:start] + str(Path(text[start:]).expanduser().absolute())
    if name in PATHS or (name == "deepspeed" and Path(text).is_file()):
        return str(Path(text).expanduser().absolute())
    return text
