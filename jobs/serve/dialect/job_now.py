"""A job as its files are at this moment."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jobs.serve.index import may_lag

if TYPE_CHECKING:
    from jobs.serve.keeper import Keeper


def job_now(keeper: Keeper, job_id: str) -> dict[str, Any] | None:
    """A job as its files are now; None for an unknown id. An index that cannot be written is no
    reason to say that nothing was done.
    """
    job = None
    with may_lag():
        job = keeper.read_job(job_id)
    if job is not None and not keeper.reader.is_behind(job_id):
        return job
    try:
        facts = keeper.reader.facts(job_id, None)
    except Exception:  # of any kind: the job cannot be read, and the index says so
        if job is None:
            raise
        facts = None
    if facts is None:
        return job
    rows = keeper.reader.rows([facts.ticket.exp_id])
    facts = replace(facts, row=rows.get(facts.ticket.exp_id))
    return keeper.reader.job_body(facts)
