"""haven-ai 0.7.3, connected: its launcher and its job manager send by us, its notebooks read our
folders. Its only importer.

haven is never in the way of an experiment: ids, folders and submission are ours. What is cured when
it is loaded, in this process only:

- it asks pkg_resources for its version, which setuptools 82 dropped;
- its toolkit module needs a client that is not public, and its Slurm module needs accounting and
  writes every key of a job dictionary as #SBATCH: jobs/haven/scheduler.py takes the place of both;
- it copies code through `code` where that is a link to a snapshot: the link is removed first;
- every summary sets TZ=US/Eastern for the whole process, and now only formats the time so;
- its dashboard imports a name that IPython 9 has moved.

haven unpickles score_list.pkl: look only at folders that you trust.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from job_configs import job_values
from jobs.haven.scheduler import GROUP, Scheduler
from trainer.errors import ConfigError

INSTALL = "Install it with: pip install -e '.[haven]'"


def connect() -> None:
    """Connect haven to Lathe in this process; `from haven import ...` then gives what is connected.

    ConfigError when haven is not installed.
    """
    _load("haven_jobs")


def job_config(group: str, file: Path | None = None) -> dict[str, Any]:
    """The job dictionary of a group for haven's `run_wizard(job_config=...)`.

    file: a Python file with JOB_CONFIGS, instead of job_configs.py.
    """
    return {"account_id": None, **job_values(group, file), GROUP: group}


def hash_dict(values: dict[str, Any]) -> str:
    """haven's own id of an experiment, which exp_id must equal. ConfigError without haven."""
    return str(_load("haven_utils").hash_dict(values))


def job_manager(
    savedir_base: str | Path,
    exp_list: Sequence[dict[str, Any]] | None = None,
    *,
    job_scheduler: str = "toolkit",
    workdir: str | Path = ".",
    **job: Any,
) -> Any:
    """haven's JobManager over the folders of `savedir_base`.

    exp_list: by default every experiment below savedir_base. job_scheduler: toolkit or slurm, for
    what is launched; what was sent elsewhere is seen as well. job: a job dictionary, needed to
    launch only.
    """
    utils = _load("haven_utils")
    experiments = (
        utils.get_exp_list(str(savedir_base), verbose=False) if exp_list is None else list(exp_list)
    )
    return _load("haven_jobs").JobManager(
        exp_list=experiments,
        savedir_base=str(savedir_base),
        workdir=str(workdir),
        job_config=dict(job),
        job_scheduler=job_scheduler,
    )


def result_manager(savedir_base: str | Path, **options: Any) -> Any:
    """haven's ResultManager over the folders of `savedir_base`; options as haven documents them."""
    return _load("haven_results").ResultManager(savedir_base=str(savedir_base), **options)


def dashboard(savedir_base: str | Path, **options: Any) -> Any:
    """Show haven's dashboard of the folders of `savedir_base` in a notebook, and return it.

    options: of haven's ResultManager. ConfigError without ipywidgets.
    """
    results = result_manager(savedir_base, **{"verbose": False, **options})
    # enable_datatables needs require.js, which notebooks have not had since version 7
    return _load("haven_jupyter").get_dashboard(results, enable_datatables=False)


# Loading


@cache
def _load(name: str) -> Any:
    """haven.<name>, cured. ConfigError when haven, or what it needs for this, is not installed."""
    if importlib.util.find_spec("haven") is None:
        raise ConfigError(f"haven is not installed. {INSTALL}")
    try:
        if name == "haven_jupyter":  # which passes over an import that fails
            for package in ("IPython", "ipywidgets"):
                importlib.import_module(package)
        with _pkg_resources():
            utils = importlib.import_module("haven.haven_utils")
        jobs = importlib.import_module("haven.haven_jobs")
        if "IPython" in sys.modules:  # this may be a notebook, which imports haven_jupyter later
            core: Any = importlib.import_module("IPython.core.display")
            if not hasattr(core, "display"):  # haven's dashboard looks for it there; IPython <9
                core.display = importlib.import_module("IPython.display").display
        module = importlib.import_module(f"haven.{name}")
    except ImportError as error:
        raise ConfigError(f"haven cannot be imported: {error}. {INSTALL}") from error
    if not hasattr(jobs, "is_connected"):
        _cure(utils, jobs)
    return module


def _cure(utils: Any, jobs: Any) -> None:
    copy_code = utils.copy_code

    def copy_into_folder(src_path: str, dst_path: str, **options: Any) -> None:
        if Path(dst_path).is_symlink():
            Path(dst_path).unlink()
        copy_code(src_path, dst_path, **options)

    def nothing(token: Any = None) -> None:
        """In the place of haven's client of a scheduler, and of its check of one."""

    parent: Any = jobs.JobManager

    class JobManager(parent):
        """haven's, with our submission in the place of its schedulers' modules."""

        def __init__(
            self,
            exp_list: Sequence[dict[str, Any]] | None = None,
            savedir_base: str | None = None,
            workdir: str | None = None,
            job_config: dict[str, Any] | None = None,
            job_scheduler: str | None = None,
            **options: Any,
        ) -> None:
            job = dict(job_config or {})
            group = str(job.pop(GROUP, "haven"))
            parent.__init__(
                self,
                exp_list=exp_list,
                savedir_base=savedir_base,
                workdir=workdir,
                job_config=job,
                job_scheduler=job_scheduler,
                **options,
            )
            self.ho = Scheduler(
                str(job_scheduler), Path(str(savedir_base)), exp_list or [], group=group
            )

    utils.time_to_montreal = _eastern_time
    utils.copy_code = copy_into_folder
    module = SimpleNamespace(get_api=nothing, sanity_check=nothing)
    jobs.toolkit_manager = jobs.slurm_manager = module  # what `from . import` finds
    jobs.JobManager = JobManager
    jobs.is_connected = True


@contextmanager
def _pkg_resources() -> Generator[None]:
    """Answer the one question that haven asks of pkg_resources, which newer setuptools lack.

    The stand-in is removed after the block, so that no other package finds it.
    """
    if "haven" in sys.modules or importlib.util.find_spec("pkg_resources") is not None:
        yield
        return

    def get_distribution(name: str) -> SimpleNamespace:
        return SimpleNamespace(version=importlib.metadata.version(name))

    stub: Any = ModuleType("pkg_resources")
    stub.get_distribution = get_distribution
    sys.modules["pkg_resources"] = stub
    try:
        yield
    finally:
        del sys.modules["pkg_resources"]


def _eastern_time(fname: str | None = None, timezone: str = "US/Eastern") -> str:
    """When a file was changed (or now) as haven writes it: "03:14 PM (Nov 21)".

    This process' TZ is not touched.
    """
    try:
        # the first is an optional alias
        zone = ZoneInfo({"US/Eastern": "America/New_York"}.get(timezone, timezone))
    except ZoneInfoNotFoundError:  # a machine without time zones
        zone = None
    moment = os.path.getctime(fname) if fname else time.time()
    return datetime.fromtimestamp(moment, zone).strftime("%I:%M %p (%b %d)")
