"""`lathe submit` as a function."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.api.arguments import dictionary, refuse_below_one, run_flags
from trainer.api.table import Table
from trainer.errors import ConfigError, LatheError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SHOWN = ("exp_id", "action", "text", "state")  # of each experiment
_NEEDS_LIST = "submit: want a list of experiments, [{...}, ...], with at least one."


def submit(
    experiments: Sequence[Mapping[str, Any]],
    data: str | Path | None = None,
    *,
    backend: str,
    group: str = "python",
    job: Mapping[str, Any] | None = None,
    savedir_base: str | Path = "results",
    max_parallel: int | None = None,
    allow_dirty: bool = False,
    **flags: Any,
) -> Table:
    """Send each experiment to where it is trained, unless it has succeeded or is alive, as `lathe
    submit` does. It may be called again: nothing is sent twice.

    experiments: their dictionaries.
    data: the folder of their data, as the jobs see it.
    backend: local, slurm, toolkit, ray, k8s or inline.
    group: the name under which `lathe status -e` finds them.
    job: the job dictionary (resources, partition, ...), see docs/jobs.md; None: that of
        job_configs.py.
    savedir_base: the folder of all runs.
    max_parallel: the most live jobs of the group at a time; None: no limit.
    allow_dirty: send uncommitted code, too, and keep it as a patch.
    flags: other flags of `lathe train` by their names.

    Returns a row for each experiment: "exp_id" (`load` opens SAVEDIR_BASE/<exp_id>), "action"
    (send, skip, wait or settle), "text" (why, or the scheduler's id) and "state".

    Raises ConfigError, before anything is sent, for a wrong dictionary, argument or job dictionary;
    Unreachable when the scheduler cannot be seen; SomeFailed, with the reasons, when some
    experiments could not be sent (`jobs.errors`). All are LatheError of `trainer.errors`.
    """
    if isinstance(experiments, dict | str) or not experiments:
        raise ConfigError(_NEEDS_LIST)
    values = [dictionary(one) for one in experiments]
    refuse_below_one(max_parallel=max_parallel)
    texts = run_flags(data, flags).as_text()
    from jobs.config import JobConfig
    from jobs.report import selection
    from jobs.submit import group as group_of_jobs
    from jobs.submit import prepare
    from trainer.config.block import validate
    from trainer.config.groups import experiments_of_group
    from trainer.files.atomic import refusals

    base = Path(savedir_base)
    config = (
        prepare.job_config(group, None, None)
        if job is None
        else validate(JobConfig, dict(job), source=f"the job dictionary of {group!r}")
    )
    with refusals(base):
        request = prepare.make(
            group=group,
            experiments=experiments_of_group({group: values}, group, None),
            base=base,
            backend=backend,
            job=config,
            flags=texts,
            allow_dirty=allow_dirty,
            max_parallel=max_parallel,
        )
        results = group_of_jobs.submit(request)
    try:
        selection.fail_if_any(results)
    except LatheError as error:
        bad = [f"{one.exp_id}  {one.action:<7} {one.text}" for one in results if one.is_bad]
        raise type(error)("\n".join([*bad, str(error)])) from None
    return Table({name: getattr(one, name) for name in _SHOWN} for one in results)
