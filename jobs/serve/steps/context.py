"""What the routes of the dialect share: the parts of the service, and what a client may see.

An id that names nothing and one of another token's are answered alike.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import BaseModel
from starlette.requests import Request

from jobs.record.paths import is_there
from jobs.serve.requests import Refusal, client_of, quote, writer_of
from jobs.serve.steps.bodies import AdapterWish
from jobs.serve.steps.experiments import DrivenOffer, driven_experiment, driven_offers
from jobs.serve.steps.names import WeightsPath, absent, client_id
from jobs.serve.steps.sessions import RunFacts, SamplerFacts, SavedFacts, SessionFacts, Sessions
from trainer.config.identity import exp_id
from trainer.errors import nearest
from trainer.files.atomic import create_json, refusals

if TYPE_CHECKING:
    from jobs.serve.access import Client, Gate
    from jobs.serve.keeper import Keeper
    from jobs.serve.steps.runs import DrivenRuns
    from jobs.serve.steps.sampling.queues import SampleQueues
    from jobs.serve.steps.upkeep.usage import TokenUsage
    from trainer.operations.results import OperationResult

B = TypeVar("B", bound=BaseModel)
OWN_PROJECT = "default"  # the one project of a token: there are no others


@dataclass
class Steps:
    """The parts of the dialect of one server."""

    keeper: Keeper
    gate: Gate
    sessions: Sessions
    runs: DrivenRuns
    samples: SampleQueues
    usage: TokenUsage

    async def stop(self) -> None:
        """Let other servers go on with what is open here."""
        await self.samples.stop()
        self.runs.close()

    @property
    def offers(self) -> dict[str, DrivenOffer]:
        """The models that may be driven, by the names that clients of the dialect use."""
        return driven_offers(self.keeper.config)

    def offer(self, name: str) -> DrivenOffer:
        """The offer of a base model. Refusal (400) for one that is not driven here."""
        offers = self.offers
        if name not in offers:
            raise Refusal(400, f"base_model: got {quote(name)}. {nearest(name, sorted(offers))}")
        return offers[name]

    def has_saved(self, facts: SavedFacts, run: RunFacts | None) -> bool:
        """Whether what an operation was to save is there."""
        if run is None:
            return False
        if run.exp_id is None:
            return Path(facts.folder).is_dir()  # a copy
        result = self.runs.of(run).result(facts.seq)
        return result is not None and is_saved_by(facts, result)

    def may_be_saved(self, facts: SavedFacts, run: RunFacts) -> bool:
        """Whether what an operation is to save is there, or may come."""
        if run.exp_id is None:
            return True
        is_over = self.runs.has_ended(run)  # before the results are looked at: none comes later
        result = self.runs.of(run).result(facts.seq)
        return not is_over if result is None else is_saved_by(facts, result)

    def base_folder(self, offer: DrivenOffer) -> Path:
        """A folder with the dictionary of an offer, for the process that samples from its base and
        from the adapters of all its runs.
        """
        values = driven_experiment(offer, AdapterWish(rank=1), "samples", 0)
        folder = self.sessions.root / "bases" / exp_id(values)
        if not is_there(folder / "exp_dict.json"):
            with refusals(folder):
                folder.mkdir(parents=True, exist_ok=True)
            create_json(folder / "exp_dict.json", values)
        return folder

    def folder_of(self, run: RunFacts, facts: SavedFacts) -> Path:
        """The folder of saved weights."""
        return Path(facts.folder) if run.exp_id is None else self.runs.folder(run) / facts.folder


def is_saved_by(facts: SavedFacts, result: OperationResult) -> bool:
    """Whether an operation has saved what its number was to save: where a server was killed before
    that one was written down, its number may be that of another operation.
    """
    folder = str(result.fields.get("folder", ""))
    return result.error is None and f"{folder}/".startswith(f"{facts.folder}/")


def steps_of(request: Request) -> Steps:
    """The dialect of the server that received the request."""
    return cast("Steps", request.app.state.steps)


def visible_session(request: Request, session: str, *, writes: bool = False) -> SessionFacts:
    """A session, if this client sees it. writes: and may change it. Refusal (404)."""
    facts = steps_of(request).sessions.session(session)
    client = writer_of(request) if writes else client_of(request)
    if facts is None or not _may(client, facts.owner, writes=writes):
        raise absent("session", session)
    return facts


def visible_run(request: Request, text: str, *, writes: bool = False) -> RunFacts:
    """A training run, if this client sees it. writes: and may change it. Refusal (404)."""
    facts = steps_of(request).sessions.run(client_id(text, "train"))
    client = writer_of(request) if writes else client_of(request)
    if facts is None or not _may(client, facts.owner, writes=writes):
        raise absent("training run", text)
    return facts


def visible_sampler(request: Request, text: str, *, writes: bool = False) -> SamplerFacts:
    """A sampler, if this client sees it. writes: and may ask it. Refusal (404)."""
    facts = steps_of(request).sessions.sampler(client_id(text, "sample"))
    client = writer_of(request) if writes else client_of(request)
    if facts is None or not _may(client, facts.owner, writes=writes):
        raise absent("sampler", text)
    return facts


def visible_weights(
    request: Request, path: WeightsPath, *, writes: bool = False, as_client: Client | None = None
) -> tuple[RunFacts, SavedFacts]:
    """Saved weights with their run, if this client sees them. as_client: another one whose token a
    request holds: its own weights alone, for who only reads sees no content. Refusal (404).
    """
    steps = steps_of(request)
    client = as_client or (writer_of(request) if writes else client_of(request))
    run = steps.sessions.run(path.run)
    if run is None or not _may(client, run.owner, writes=writes or as_client is not None):
        raise absent("saved weights", str(path))
    facts = steps.sessions.saved(path, lambda one: steps.has_saved(one, run))
    if facts is None:
        raise absent("saved weights", str(path))
    return run, facts


def client_of_token(request: Request, token: str | None) -> Client | None:
    """The client whose token a request holds besides its own; None without one. Refusal (403) for a
    token that is unknown.
    """
    if token is None:
        return None
    client = steps_of(request).gate.client(f"Bearer {token_of_key(token)}")
    if client is None:
        raise Refusal(403, "weights_access_token: this server knows no such token. Leave it out.")
    return client


def token_of_key(key: str) -> str:
    """The token of this server in a key of the SDK, which wants `tml-` in front of every key."""
    return key.removeprefix("tml-")


def digest_of(body: BaseModel) -> str:
    """A digest that is the same for the same request."""
    values = json.dumps(body.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(values.encode()).hexdigest()


def check_project(project: str | None, param: str) -> None:
    """Return if a project is the one that every token has; else Refusal (400)."""
    if project not in (None, OWN_PROJECT):
        text = f"{param}: got {quote(project)}, and there are no projects here: what a token makes "
        raise Refusal(400, f"{text}belongs to it. Leave it out, or give {OWN_PROJECT!r}.")


def metadata_of(values: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a client says of something it makes. Refusal (400) when it is too long."""
    if values is not None and len(json.dumps(values)) > 16 << 10:
        raise Refusal(400, "user_metadata: more than 16 KiB. Say less.", param="user_metadata")
    return values


def _may(client: Client, owner: str, *, writes: bool) -> bool:
    return client.may_change(owner) if writes else client.sees(owner)
