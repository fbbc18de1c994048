"""The command that searches over a sweep: `lathe sweep -e GROUP`."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from filelock import FileLock, Timeout

from exp_configs import read_groups
from jobs.errors import Busy
from jobs.options import (
    BackendName,
    Base,
    ExpConfigs,
    Flags,
    JobConfigs,
    Json,
    NeededGroup,
    PythonBinary,
    ResendAfter,
    Steps,
    json_alone,
    report_errors,
)
from jobs.record.paths import BaseFolder
from jobs.search.drive import Driver, as_text
from jobs.search.record import SearchRecord, SearchState
from jobs.submit.prepare import job_config, make, training_flags, with_steps
from jobs.submit.request import RESEND_S
from trainer import tasks
from trainer.config import groups
from trainer.config.identity import digest
from trainer.config.scores.direction import direction_of
from trainer.config.sweeps.sweep import Sweep, SweepGroup, late_rungs
from trainer.errors import ConfigError, nearest
from trainer.files.atomic import refusals


@report_errors
def sweep_command(
    exp_group: NeededGroup,
    savedir_base: Base,
    job_scheduler: BackendName = "local",
    exp_configs: ExpConfigs = None,
    job_configs: JobConfigs = None,
    steps: Steps = None,
    python_binary: PythonBinary = "",
    max_parallel: Annotated[
        int | None, typer.Option("--max-parallel", min=1, help="Most live trials at one time.")
    ] = None,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Send uncommitted code, with its patch.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry_run", help="Say what the search would cost, and send nothing.")
    ] = False,
    resend_after: ResendAfter = RESEND_S,
    as_json: Json = False,
    flags: Flags = None,
) -> None:
    """Search over a group with `sweep`: train its trials from rung to rung, and only the best ones
    to their end. It says before it starts what that costs. Killed, the same command goes on.
    """
    sweep = _sweep(exp_group, exp_configs, steps)
    begun = _begun(exp_group, sweep)
    texts = with_steps(training_flags(flags or []), steps)
    if "until" in texts:
        raise ConfigError(
            f"--until {texts['until']}: the rungs of a search say where its trials stop. Leave it "
            "out, and write it into search.rungs."
        )
    for line in cost_lines(exp_group, sweep, begun):
        typer.echo(line, err=as_json)
    request = make(
        group=exp_group,
        experiments=[sweep.specimen()],
        base=savedir_base,
        backend=job_scheduler,
        job=job_config(exp_group, job_configs, python_binary),
        flags=texts,
        allow_dirty=allow_dirty or dry_run,
        take_snapshot=not dry_run,
        max_parallel=max_parallel,
        resend_s=resend_after,
    )
    _ = request.templates  # every mistake that a job would be refused for
    if dry_run:
        return
    base = BaseFolder(savedir_base.absolute())
    record = SearchRecord.of(base.path, exp_group)
    with _hold(record), json_alone(as_json):
        try:
            search = Driver(exp_group, sweep, request, record, begun).drive()
        except KeyboardInterrupt:
            logging.getLogger(__name__).warning(
                "left: trials that were sent run on. The same command goes on with the search."
            )
            raise typer.Exit(130) from None
    _show(search, base, as_json=as_json)


def _sweep(group: str, file: Path | None, steps: int | None) -> Sweep:
    """The sweep of a group, with `steps` written in where it is given. ConfigError for a group
    without one, and with what a training would refuse in its first trial.
    """
    whole_file = read_groups(file)
    if group not in whole_file:
        raise ConfigError(f"-e {group}: no such group. {nearest(group, sorted(whole_file))}")
    own = whole_file[group]
    if not isinstance(own, SweepGroup):
        raise ConfigError(
            f"-e {group}: it is a list of experiments, and a search wants a dictionary with "
            '`sweep`: vary(MINE, sweep={"optim.lr": [1e-4, 3e-4]}).'
        )
    sweep = own.sweep
    if steps is not None:
        sweep = replace(sweep, parent=groups.with_steps([sweep.parent], steps)[0])
        problems = list(late_rungs(sweep.search.rungs, steps)) if sweep.search.rungs else []
        if problems:
            raise ConfigError(f"-e {group} --steps {steps}: {problems[0]}")
    return sweep


def _begun(group: str, sweep: Sweep) -> SearchState:
    """What a search of this sweep begins with."""
    cfg = tasks.parse(sweep.specimen(), source=f"-e {group}: the first trial of its sweep")
    metric = next(iter(cfg.train.best_metrics), "valid/loss")
    direction = cfg.train.stated_direction(metric) or direction_of(metric)
    if direction is None:
        raise ConfigError(
            f"train.best={metric!r}: got no train.best_is, and the name does not say whether lower "
            'or higher is better; want one of them. Set train.best_is to "min" or "max".'
        )
    return SearchState(
        digest=digest({"parent": sweep.parent, **sweep.stated}),
        keys=tuple(sweep.axes),
        metric=metric,
        is_least_best=direction == "min",
        steps=cfg.train.steps,
    )


def cost_lines(group: str, sweep: Sweep, begun: SearchState) -> Iterator[str]:
    """What a search costs, in optimizer steps, beside that of training every trial to its end."""
    search = sweep.search
    count = search.trials or len(sweep.trials())
    order = "lowest" if begun.is_least_best else "highest"
    yield f"{group}: {count} trials ({search.how}), the {order} {begun.metric} is best"
    if not begun.steps:
        yield "  each to its end, whose steps are known when the rows of its epochs are counted"
        return
    costs = search.cost(count, begun.steps)
    for cost in costs:
        yield f"  {cost.trials:>5} to step {cost.rung}: {cost.steps:,} steps"
    total, whole = sum(cost.steps for cost in costs), count * begun.steps
    yield (
        f"  {total:,} steps in all; every trial to its end would be {whole:,} "
        f"({100 * total / whole:.0f}%)"
    )


@contextmanager
def _hold(record: SearchRecord) -> Generator[None]:
    """Hold the lock of a search. Busy when another process drives it."""
    with refusals(record.path):
        record.path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(FileLock(record.path.with_name(".search.lock"), timeout=0))
        except Timeout:
            raise Busy(
                f"{record.path}: another process drives this search. Let it finish."
            ) from None
        yield


def _show(search: SearchState, base: BaseFolder, *, as_json: bool) -> None:
    """The best trial, and the others that were trained to their end."""
    ended = search.ranked(max(rung for one in search.trials for rung in one.scores))
    if as_json:
        documents: list[Mapping[str, Any]] = [
            {"trial": one.number + 1, "exp_id": one.exp_id, "values": one.values}
            | {"scores": {str(rung): score for rung, score in one.scores.items()}}
            for one in ended
        ]
        typer.echo(json.dumps(documents, indent=1))
        return
    for place, trial in enumerate(ended, start=1):
        score = trial.scores[max(trial.scores)]
        typer.echo(f"{place}. {search.metric} {score:.6g}  {trial.exp_id}  {as_text(trial.values)}")
    typer.echo(f"the best: {base.run(ended[0].exp_id).path / 'final'}")
