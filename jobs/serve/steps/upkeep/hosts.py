"""Which worker computes a driven run: its own, or that of another run on the same base."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs.job_state import ACTIVE
from jobs.record import events as record
from jobs.record.paths import is_there
from trainer import tasks
from trainer.operations.guests import Guests
from trainer.operations.sharing import differences, kernels_differ

if TYPE_CHECKING:
    from jobs.serve.keeper import Keeper
    from jobs.serve.tickets import Ticket


def is_shared(ticket: Ticket) -> bool:
    """Whether a job may be computed with others by one worker."""
    return ticket.driven_by is not None and _most_runs(ticket) > 1


def host_for(keeper: Keeper, ticket: Ticket) -> str | None:
    """The run whose worker has room for a job, and can compute it: of those with the most runs the
    oldest. None: the job gets a worker of its own.
    """
    own = tasks.parse(ticket.experiment, source=ticket.id)
    hosts: list[tuple[int, str, str]] = []
    for name in keeper.reader.open_ids:
        folder = keeper.folder.ticket(name)
        other = None if folder is None else folder.read()
        if other is None or other.exp_id == ticket.exp_id or not is_shared(other):
            continue
        if other.model != ticket.model or not _computes(keeper, other):
            continue
        if differences(tasks.parse(other.experiment, source=name), own):
            continue
        host, guest = (keeper.folder.base.run(one.exp_id).path for one in (other, ticket))
        if kernels_differ(host, guest):
            continue
        num_runs = 1 + Guests.of(host).num_staying()
        if num_runs < _most_runs(other):
            hosts.append((-num_runs, other.created_at, other.exp_id))
    return min(hosts)[2] if hosts else None


def _computes(keeper: Keeper, ticket: Ticket) -> bool:
    """Whether the job of a ticket has a worker of its own, or will soon."""
    folder = keeper.folder.base.run(ticket.exp_id)
    job = record.read(folder)
    last = None if job is None else job.last
    if last is None or last.is_cancelled or last.state not in ACTIVE:
        return False
    has_own = not keeper.backend_of(last.backend).traits.needs_host
    return has_own and not is_there(folder.attempt(last.number).exit)


def _most_runs(ticket: Ticket) -> int:
    data: Any = ticket.experiment.get("data", {})
    return int(data.get("together", 1))
