"""The Tinker dialect of a server: its routes, and its parts joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import BaseRoute

from jobs.serve.answers.workers import Workers
from jobs.serve.steps import creation, futures, operations
from jobs.serve.steps.catalogue import archives, checkpoints, configuration, lists, not_offered
from jobs.serve.steps.context import Steps, token_of_key
from jobs.serve.steps.runs import DrivenRuns
from jobs.serve.steps.sampling import routes as sampling_routes
from jobs.serve.steps.sampling.queues import SampleQueues
from jobs.serve.steps.sessions import Sessions
from jobs.serve.steps.upkeep.usage import TokenUsage

if TYPE_CHECKING:
    from jobs.serve.access import Gate
    from jobs.serve.keeper import Keeper

PREFIX = f"{futures.API}/"
SIGNED = archives.FILES
# These wait for what a run or a model does, as the streams of pages do.
WAITING = (f"{PREFIX}retrieve_future", f"{PREFIX}retrieve_futures")
ROUTES: list[BaseRoute] = [
    *configuration.ROUTES,
    *creation.ROUTES,
    *operations.ROUTES,
    *futures.ROUTES,
    *sampling_routes.ROUTES,
    *not_offered.ROUTES,
    *archives.ROUTES,
    *checkpoints.ROUTES,
    *lists.ROUTES,
]


def authorization(key: str | None) -> str | None:
    """The Authorization header that says the same as the SDK's X-API-Key."""
    return None if key is None else f"Bearer {token_of_key(key)}"


def make(keeper: Keeper, gate: Gate) -> Steps:
    """The dialect of a server."""
    sessions = Sessions(keeper.folder.steps)
    workers = Workers(keeper.folder.cache, keeper.config.sampled_models)
    samples = SampleQueues(workers)
    runs = DrivenRuns(keeper, sessions)
    usage = TokenUsage(keeper.folder.steps)
    steps = samples.steps = Steps(keeper, gate, sessions, runs, samples, usage)
    return steps
