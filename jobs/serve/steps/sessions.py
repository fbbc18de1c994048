"""Sessions, their training runs and samplers, and what was saved: small files, each written once.

<savedir_base>/_service/steps/<session id>/
    session.json            who began it, when, and what the client said of it
    finished.json           how its client ended it
    alive                   touched by its heartbeats
    train-<n>.json          the n-th training run: its job, and what it trains; -deleted beside it
    sample-<n>.json         the n-th sampler: which weights it samples from
    sample-<n>/             its requests and their results (sampling/)
    saved-<n>-<seq>.json    weights that operation <seq> of run n saves; -ttl and -deleted beside it
    load-<n>-<seq>.json     saved weights that operation <seq> of run n loads
    copies/<n>/             weights that were copied here from another run

A file that is there says that the request was acknowledged. A repeated request finds it, so that
nothing is made twice however often a client asks and wherever a server was killed.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field

from jobs.record.paths import is_there
from jobs.record.times import now
from jobs.serve.job_view import seconds
from jobs.serve.requests import Refusal
from jobs.serve.steps.names import SESSION, ClientId, WeightsKind, WeightsPath, absent, client_id
from jobs.serve.tickets import Time, is_id, read_model
from trainer.config.block import Strict
from trainer.files.atomic import create_json, refusals, sync, write_json

if TYPE_CHECKING:
    from jobs.serve.access import Client

MOST_SESSIONS = 10_000  # of one token: every list reads them
ALIVE_S = 120.0  # without a heartbeat for so long a session is not active


class SessionFacts(Strict):
    """A session as its client began it."""

    id: str
    created_at: Time
    owner: str
    sdk_version: str
    tags: list[str] = Field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


class FinishFacts(Strict):
    """How the client of a session ended it."""

    at: Time
    type: Literal["success", "errored", "interrupted"]
    detail: str | None = None


class RunFacts(Strict):
    """A training run of a session."""

    session: str
    number: int
    created_at: Time
    owner: str
    base_model: str  # the offer
    job: str | None = None  # the ticket; None: a copy, which is not trained
    exp_id: str | None = None
    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    user_metadata: dict[str, Any] | None = None
    request_digest: str  # of the request that made it, to tell a repeat from another one
    # what is added to a client's numbers of operations to get those of the log: a run that begins
    # with saved weights has an operation for them, of which the client does not know
    shift: int = 0
    begins_with: str | None = None  # the tinker path of these weights
    with_optimizer: bool = False

    @property
    def id(self) -> ClientId:
        return ClientId(self.session, "train", self.number)


class SamplerFacts(Strict):
    """A sampler of a session: what it samples from. exp_id and folder: None of a base."""

    session: str
    number: int
    created_at: Time
    owner: str
    base_model: str
    model_path: str | None = None
    exp_id: str | None = None
    folder: str | None = None  # below the run folder
    of_run: str | None = None  # the training run that saves the folder
    of_operation: int | None = None  # the operation that does so

    @property
    def id(self) -> ClientId:
        return ClientId(self.session, "sample", self.number)


class SavedFacts(Strict):
    """Weights that an operation of a run saves, or that were copied. folder: below the run folder,
    or the whole path of a copy.
    """

    run: str
    seq: int  # of the log
    sampler: str | None = None  # the sampling session that alone uses it
    kind: WeightsKind
    name: str
    folder: str
    created_at: Time
    overwrite: bool = False
    expires_at: Time | None = None
    user_metadata: dict[str, Any] | None = None


class LoadFacts(Strict):
    """What an operation of a run loads, as it was when it was sent. path: as its client named it;
    fields: of the operation.
    """

    run: str
    seq: int  # of the log
    path: str
    with_optimizer: bool
    fields: dict[str, Any]


class ExpiryFacts(Strict):
    """When saved weights expire, as it was set later."""

    expires_at: Time | None = None


R = TypeVar("R", bound=Strict)
log = logging.getLogger(__name__)


@lru_cache(maxsize=20_000)
def _constant(path: Path, kind: type[R]) -> R:
    """What a file holds that never changes. FileNotFoundError."""
    value = read_model(path, kind)
    if value is None:
        raise FileNotFoundError(path)
    return value


def _read(path: Path, kind: type[R]) -> R | None:
    try:
        return _constant(path, kind)
    except FileNotFoundError:
        return None


def _readable(path: Path, kind: type[R]) -> R | None:
    """What a file of a list holds; None for one that cannot be read: it hides no other."""
    try:
        return _read(path, kind)
    except Exception as error:  # of any kind
        warn_once(path, str(error))
        return None


@lru_cache(maxsize=1000)
def warn_once(path: Path, text: str) -> None:
    """Tell of a file or a folder that is passed over: lists meet it again and again."""
    log.warning("%s is passed over: %s", path, text)


@dataclass(frozen=True)
class Sessions:
    """All sessions of a service. root: the folder that holds them."""

    root: Path

    def folder(self, session: str) -> Path:
        """The folder of a session. Refusal (404) for a malformed id."""
        if not is_id(session, SESSION):
            raise absent("session", session)
        return self.root / session

    def create(self, facts: SessionFacts) -> SessionFacts:
        """Write a session durably; the one that is there, where a request was repeated. Refusal
        (403) when its owner has MOST_SESSIONS.
        """
        folder = self.root / facts.id
        if not is_there(folder / "session.json"):
            self._refuse_many(facts.owner)
        with refusals(folder):
            folder.mkdir(parents=True, exist_ok=True)
        create_json(folder / "session.json", facts.model_dump(mode="json"))
        with refusals(folder):
            sync(self.root)
        self.beat(facts.id)
        session = self.session(facts.id)
        assert session is not None, "it was written a moment ago"
        return session

    def _refuse_many(self, owner: str) -> None:
        if len(self.ids_of(owner)) >= MOST_SESSIONS:
            text = (
                f"{owner} has {MOST_SESSIONS} sessions, as many as a token may have. Delete runs "
                "that have ended (DELETE /lathe/v1/runs/ID): a session without runs goes by itself "
                "a week after its last heartbeat."
            )
            raise Refusal(403, text, code="insufficient_quota")

    def silent_s(self, session: str) -> float:
        """Seconds since its client was last heard of. OSError for a session without a heartbeat."""
        return time.time() - (self.folder(session) / "alive").stat().st_mtime

    def has_runs(self, session: str) -> bool:
        """Whether a session has a training run, readable or not, that was not deleted."""
        names = set(self._names(session))
        runs = {name.removesuffix(".json") for name in names if name.startswith("train-")}
        return any(f"{run}.json" in names and f"{run}-deleted" not in names for run in runs)

    def remove(self, session: str) -> None:
        """Remove a session with all that it has."""
        shutil.rmtree(self.folder(session))
        _constant.cache_clear()

    def session(self, session: str) -> SessionFacts | None:
        """A session; None when there is none of this id."""
        return _read(self.folder(session) / "session.json", SessionFacts)

    def beat(self, session: str) -> None:
        """Note that the client of a session lives."""
        path = self.folder(session) / "alive"
        with refusals(path):
            path.touch()

    def is_alive(self, session: str) -> bool:
        """Whether its client was heard of a moment ago."""
        try:
            return self.silent_s(session) < ALIVE_S
        except OSError:
            return False

    def finish(self, session: str, facts: FinishFacts) -> None:
        """Write how a session ended; the first end counts."""
        create_json(self.folder(session) / "finished.json", facts.model_dump(mode="json"))

    def finished(self, session: str) -> FinishFacts | None:
        """How a session ended; None while it goes on."""
        return _read(self.folder(session) / "finished.json", FinishFacts)

    def sampler_folder(self, facts: SamplerFacts) -> Path:
        """The folder of a sampler's requests and answers."""
        return self.folder(facts.session) / f"sample-{facts.number}"

    def all_visible(self, client: Client) -> list[SessionFacts]:
        """The sessions that a client sees, in no order; without those that cannot be read, so that
        one odd folder hides no other.
        """
        every = (_readable(self.folder(name) / "session.json", SessionFacts) for name in self.ids())
        return [one for one in every if one is not None and client.sees(one.owner)]

    def ids_of(self, owner: str) -> list[str]:
        """Of the sessions of an owner that can be read, in no order."""
        every = (_readable(self.folder(name) / "session.json", SessionFacts) for name in self.ids())
        return [one.id for one in every if one is not None and one.owner == owner]

    def ids(self) -> list[str]:
        """Of all sessions, in no order."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        return [name for name in names if is_id(name, SESSION)]

    # Runs and samplers

    def add_run(self, facts: RunFacts) -> RunFacts:
        """Write a run durably; the one that is there, where a request was repeated. Refusal (409)
        for one that was deleted.
        """
        path = self._client(facts.id)
        if is_there(self._deleted(facts.id)):
            text = f"{facts.id} was deleted. Use the next model_seq_id."
            raise Refusal(409, text, code="run_deleted")
        create_json(path, facts.model_dump(mode="json"))
        run = _read(path, RunFacts)
        assert run is not None, "it was written a moment ago"
        return run

    def run(self, name: ClientId) -> RunFacts | None:
        """A training run; None when there is none, or it was deleted."""
        if is_there(self._deleted(name)):
            return None
        return _read(self._client(name), RunFacts)

    def mark_run_deleted(self, name: ClientId) -> None:
        """Note durably that a training run was deleted: from now on it is absent."""
        path = self._deleted(name)
        with refusals(path):
            path.touch()
            sync(path.parent)

    def _deleted(self, name: ClientId) -> Path:
        path = self._client(name)
        return path.with_name(f"{path.stem}-deleted")

    def add_sampler(self, facts: SamplerFacts) -> SamplerFacts:
        """Write a sampler durably; the one that is there, where a request was repeated."""
        path = self._client(facts.id)
        create_json(path, facts.model_dump(mode="json"))
        sampler = _read(path, SamplerFacts)
        assert sampler is not None, "it was written a moment ago"
        return sampler

    def sampler(self, name: ClientId) -> SamplerFacts | None:
        """A sampler; None when there is none."""
        return _read(self._client(name), SamplerFacts)

    def runs(self, session: str) -> list[RunFacts]:
        """The training runs of a session, in order."""
        every = self._all(session, "train", RunFacts)
        return [run for run in every if not is_there(self._deleted(run.id))]

    def samplers(self, session: str) -> list[SamplerFacts]:
        """The samplers of a session, in order."""
        return self._all(session, "sample", SamplerFacts)

    def _client(self, name: ClientId) -> Path:
        return self.folder(name.session) / f"{name.kind}-{name.number}.json"

    def _all(self, session: str, kind: str, of: type[R]) -> list[R]:
        numbers: list[int] = []
        for name in self._names(session):
            number = name.removeprefix(f"{kind}-").removesuffix(".json")
            if name == f"{kind}-{number}.json" and number.isdecimal():
                numbers.append(int(number))
        paths = [self.folder(session) / f"{kind}-{number}.json" for number in sorted(numbers)]
        return [one for path in paths if (one := _readable(path, of)) is not None]

    def _names(self, session: str) -> list[str]:
        folder = self.folder(session)
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []
        except OSError as error:  # nobody's folder: it hides no other
            warn_once(folder, str(error))
            return []

    # Saved weights

    def add_saved(self, run: ClientId, facts: SavedFacts) -> None:
        """Write durably what an operation is about to save, in the place of what was to be saved by
        one that never came.
        """
        if self.saved_by(run, facts.seq) != facts:
            write_json(self._saved(run, facts.seq), facts.model_dump(mode="json"))
            _constant.cache_clear()

    def add_load(self, run: ClientId, facts: LoadFacts) -> None:
        """Write durably what an operation is about to load, in the place of what was to be loaded
        by one that never came.
        """
        write_json(self._load(run, facts.seq), facts.model_dump(mode="json"))

    def loaded_by(self, run: ClientId, seq: int) -> LoadFacts | None:
        """What an operation was to load; None for one that loads nothing."""
        return read_model(self._load(run, seq), LoadFacts)

    def _load(self, run: ClientId, seq: int) -> Path:
        return self.folder(run.session) / f"load-{run.number}-{seq}.json"

    def saved_by(self, run: ClientId, seq: int) -> SavedFacts | None:
        """What an operation was to save, whatever became of it; None for one that saves nothing."""
        return _read(self._saved(run, seq), SavedFacts)

    def all_saved(
        self,
        run: ClientId,
        counts: Callable[[SavedFacts], bool],
        *,
        has_expired: bool = False,
    ) -> Iterator[SavedFacts]:
        """What operations of a run save, by their numbers, without what was deleted, has expired,
        or was saved again by the same name. counts: whether an operation has done so.
        has_expired: what has expired counts as well.
        """
        prefix = f"saved-{run.number}-"
        names = {name for name in self._names(run.session) if name.startswith(prefix)}
        numbers = [name.removeprefix(prefix).removesuffix(".json") for name in names]
        newest: dict[tuple[str, str], SavedFacts] = {}
        for number in sorted(int(one) for one in numbers if one.isdecimal()):
            facts = _readable(self._saved(run, number), SavedFacts)
            if facts is None or facts.sampler is not None:
                continue
            if not counts(facts):
                continue
            newest.pop((facts.kind, facts.name), None)  # it was overwritten
            if f"{prefix}{number}-deleted" not in names:
                newest[facts.kind, facts.name] = facts
        for facts in newest.values():
            expires_at = self.expires_at(run, facts)
            if has_expired or expires_at is None or seconds(expires_at) > time.time():
                yield facts

    def saved(self, path: WeightsPath, counts: Callable[[SavedFacts], bool]) -> SavedFacts | None:
        """What a path names; None when nothing has this name, or has it no more."""
        every = self.all_saved(path.run, counts)
        return next((one for one in every if (one.kind, one.name) == (path.kind, path.name)), None)

    def expires_at(self, run: ClientId, facts: SavedFacts) -> str | None:
        """When saved weights expire; None: never."""
        later = read_model(self._saved(run, facts.seq, "-ttl"), ExpiryFacts)
        return facts.expires_at if later is None else later.expires_at

    def set_expiry(self, run: ClientId, facts: SavedFacts, expires_at: str | None) -> None:
        """Set when saved weights expire."""
        values = ExpiryFacts(expires_at=expires_at).model_dump(mode="json")
        write_json(self._saved(run, facts.seq, "-ttl"), values)

    def mark_deleted(self, run: ClientId, facts: SavedFacts) -> None:
        """Note durably that saved weights were deleted."""
        path = self._saved(run, facts.seq, "-deleted", ending="")
        with refusals(path):
            path.touch()
            sync(path.parent)

    def _saved(self, run: ClientId, seq: int, more: str = "", *, ending: str = ".json") -> Path:
        return self.folder(run.session) / f"saved-{run.number}-{seq}{more}{ending}"

    def run_by_name(self, text: str) -> RunFacts | None:
        """The training run of an id that was checked before."""
        return self.run(client_id(text, "train"))


def later(ttl_s: int | None) -> str | None:
    """The time in so many seconds, as our files have it; None for None."""
    if ttl_s is None:
        return None
    return (datetime.fromisoformat(now()) + timedelta(seconds=ttl_s)).isoformat()


def refuse_finished(sessions: Sessions, session: str) -> None:
    """Return if a session goes on; else Refusal (400)."""
    end = sessions.finished(session)
    if end is not None:
        text = f"The session {session} was ended by its client ({end.type}). Begin another one."
        raise Refusal(400, text, code="session_finished")
