"""Commands that change submitted experiments: cancel, retry, reset, reconcile, gc."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from jobs.backends import BackendCache
from jobs.errors import NothingMatched
from jobs.job_state import ENDED_BADLY
from jobs.options import (
    Base,
    Group,
    Ids,
    Json,
    ResendAfter,
    Yes,
    json_alone,
    report_errors,
)
from jobs.record.paths import BaseFolder
from jobs.report import selection
from jobs.submit.control import Again, again, cancel, reconcile, reset
from jobs.submit.policy import Limits
from jobs.submit.request import RESEND_S
from trainer.errors import ConfigError


@report_errors
def cancel_command(
    savedir_base: Base,
    ids: Ids = None,
    exp_group: Group = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Stop live jobs; the training first saves. A group, or several ids, need --yes."""
    rows = selection.select_rows(savedir_base, ids, exp_group)
    selection.refuse_by_hand(rows, "cancel")
    if not yes and (exp_group or len(rows) > 1):
        raise ConfigError(f"cancel: this ends up to {len(rows)} experiments. Say --yes.")
    results = cancel(BaseFolder(savedir_base.absolute()), rows, BackendCache())
    selection.show(results, as_json)
    selection.fail_if_any(results)


@report_errors
def retry_command(
    savedir_base: Base,
    ids: Ids = None,
    exp_group: Group = None,
    state: Annotated[
        str, typer.Option("--state", help="Every experiment in one of these states.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Run ended experiments again, from their last checkpoint, as they were sent before."""
    states = selection.states(state)
    rows = [
        row
        for row in selection.select_rows(savedir_base, ids, exp_group, is_all=bool(state))
        if not states or row.state in states
    ]
    selection.refuse_by_hand(rows, "retry")
    if not rows:
        raise NothingMatched(f"retry: no experiment is {state}.")
    # Whoever names an id has mended its input: run it again even if it ended with "bad input".
    limits = Limits(retry=states or (*ENDED_BADLY, "preempted"), with_bad_input=bool(ids))
    with json_alone(as_json):
        results = again(Again(BaseFolder(savedir_base.absolute()), BackendCache(), limits), rows)
    selection.show(results, as_json)
    selection.fail_if_any(results)


@report_errors
def reset_command(ids: Ids, savedir_base: Base, yes: Yes = False, as_json: Json = False) -> None:
    """Move the folders of experiments to deleted/, so that they can start over. Nothing is
    overwritten.
    """
    rows = selection.select_rows(savedir_base, ids, None)
    if not yes:
        raise ConfigError(
            f"reset: this moves {len(rows)} run folder(s) away, checkpoints and all. Say --yes."
        )
    selection.refuse_live(rows)
    results = [
        reset(BaseFolder(savedir_base.absolute()), row.exp_id, BackendCache()) for row in rows
    ]
    selection.show(results, as_json)


@report_errors
def reconcile_command(
    savedir_base: Base,
    every: Annotated[
        str | None, typer.Option("--every", help="Repeat for ever, at this interval: 30s, 5m.")
    ] = None,
    resend_after: ResendAfter = RESEND_S,
    as_json: Json = False,
) -> None:
    """Find submissions that got no answer, run preempted experiments again, and submit those that
    waited for their turn.

    With --every, --json prints one JSON document per round, each in one line.
    """
    pause_s = selection.seconds(every) if every is not None else None
    cache = BackendCache()
    while True:
        with json_alone(as_json):
            results = reconcile(
                Again(BaseFolder(savedir_base.absolute()), cache, resend_s=resend_after)
            )
        selection.show(results, as_json, is_line=pause_s is not None)
        if pause_s is None:
            break
        time.sleep(pause_s)
    selection.fail_if_any(results)


@report_errors
def gc_command(
    savedir_base: Base,
    older_than_days: Annotated[
        int, typer.Option("--older-than", min=0, help="Days since a run was deleted.")
    ] = 30,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """List code snapshots that no run refers to, and old deleted runs; with --yes remove them."""
    from jobs.code import gc

    garbage = gc.plan_gc(BaseFolder(savedir_base.absolute()), older_than_days=older_than_days)
    lines = [{"path": str(item.path), "bytes": item.bytes, "why": item.why} for item in garbage]
    if as_json:
        typer.echo(json.dumps(lines, indent=1))
    for item in [] if as_json else garbage:
        typer.echo(f"{item.bytes / 2**20:10.1f} MiB  {item.path}  ({item.why})")
    if yes:
        typer.echo(f"removed {gc.collect(garbage)} of {len(garbage)}", err=True)
