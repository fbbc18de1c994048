"""A copy of the facts in all folders, in one SQLite file, so that lists and searches are fast.

It may be deleted at any time and is then filled again. Several servers of one host may share it.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.report.text import plain
from jobs.serve.job_view import FINAL, JobEvent, event_object
from jobs.serve.live.cards import job_card

VERSION = 4  # of the tables; an index of another version is deleted and filled again
WAIT_S = 30.0  # for another server's transaction
CACHE_KIB = 1024  # of each thread
TABLES = """
create table if not exists jobs (
    id text primary key, created real not null, owner text not null, exp_id text not null,
    model text not null, status text not null, is_open integer not null,
    is_deleted integer not null, facts text not null,
    metrics_end integer not null default 0, metrics_mark text not null default '',
    body text not null, tick integer not null, card text not null);
create index if not exists jobs_by_time on jobs (created, id);
create index if not exists jobs_by_model on jobs (model);
create index if not exists jobs_by_run on jobs (exp_id);
create table if not exists events (
    number integer primary key autoincrement, id text not null unique, job text not null,
    body text not null);
create index if not exists events_by_job on events (job, number);
create table if not exists uploads (
    id text primary key, created real not null, owner text not null, purpose text not null,
    bytes integer not null, body text not null);
create table if not exists runs (
    exp_id text primary key, facts text not null, state text not null, body text not null,
    grp text not null, name text not null, experiment text not null, tick integer not null,
    card text not null, created text not null);
create index if not exists jobs_open on jobs (id) where is_open;
create index if not exists jobs_by_tick on jobs (tick);
create index if not exists runs_by_state on runs (state);
create index if not exists runs_by_group on runs (grp);
create index if not exists runs_by_tick on runs (tick);
create index if not exists runs_by_time on runs (created, exp_id);
create table if not exists clock (tick integer not null, epoch text not null);
insert into clock select 0, hex(randomblob(8)) where not exists (select 1 from clock);
"""

TICK = "(select tick from clock)"  # grows with every change that pages show
# A run whose card did not change keeps its tick.
PUT_RUN = f"""
insert into runs values (:exp_id, :facts, :state, :body, :group, :name, :experiment, {TICK}, :card,
    :created)
on conflict (exp_id) do update set facts = :facts, state = :state, body = :body, grp = :group,
    name = :name, experiment = :experiment, created = :created,
    tick = iif(card = :card, tick, {TICK}), card = :card"""
NAME_RUN = f"""
update runs set name = ?1, card = json_set(card, '$.name', ?1), tick = {TICK},
    body = json_set(body, '$.name', ?1) where exp_id = ?2 and name <> ?1"""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Page:
    """One page of a list: objects, and whether there are more."""

    data: list[dict[str, Any]]
    has_more: bool


@dataclass(frozen=True)
class PageRequest:
    """Which page of a list to return. owner: None for everybody's."""

    owner: str | None
    after: str | None = None
    limit: int = 20


@dataclass(frozen=True)
class RunPage:
    """So many runs, the newest first. after: the last one of the page before."""

    limit: int
    after: str | None = None


@dataclass(frozen=True)
class MetricsPlace:
    """How far a job's metrics.jsonl was turned into events. mark: a digest of the bytes before
    `end`.
    """

    end: int = 0
    mark: str = ""


class Index:
    """The tables, usable by any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._own = threading.local()
        with suppress(sqlite3.DatabaseError):
            if self._version() == VERSION:
                return
        for name in ("", "-wal", "-shm"):
            path.with_name(path.name + name).unlink(missing_ok=True)
        self._own = threading.local()
        self._version()

    def _version(self) -> int:
        return int(self.connection.execute("pragma user_version").fetchone()[0])

    @property
    def connection(self) -> sqlite3.Connection:
        """This thread's connection. A file that was deleted is created again."""
        connection: sqlite3.Connection | None = getattr(self._own, "connection", None)
        if connection is not None and self._own.file == _identity(self.path):
            return connection
        connection = sqlite3.connect(self.path, timeout=WAIT_S, isolation_level=None)
        connection.execute("pragma journal_mode=wal")
        connection.execute("pragma synchronous=off")  # a power cut costs the index, and no truth
        connection.execute(f"pragma cache_size=-{CACHE_KIB}")
        if not connection.execute("select 1 from sqlite_master where name = 'jobs'").fetchone():
            connection.executescript(f"{TABLES}\npragma user_version={VERSION};")
        self._own.connection, self._own.file = connection, _identity(self.path)
        return connection

    # Jobs

    def job_marks(self, only: Collection[str] | None = None) -> dict[str, str]:
        """id -> the mark that its files had when they were read (FolderReader._marks), of every job
        or of some.
        """
        return dict(self._chosen("select id, facts from jobs", "id", only))

    def open_jobs(self) -> set[str]:
        """Ids of the jobs that have not ended."""
        return {row[0] for row in self.connection.execute("select id from jobs where is_open")}

    def write_job(
        self,
        body: Mapping[str, Any],
        *,
        created: float,
        model: str,
        is_open: bool,
        is_deleted: bool,
        facts: str,
        place: MetricsPlace,
        events: Sequence[JobEvent],
    ) -> None:
        """Replace the row of a job, and add the events that are new."""
        ours = body["lathe"]
        values = (
            body["id"],
            created,
            ours["owner"],
            ours["exp_id"],
            model,
            body["status"],
            is_open,
            is_deleted,
            facts,
            place.end,
            place.mark,
            json.dumps(plain(body)),
            json.dumps(plain(job_card(body))),
        )
        event_rows = [
            (event.id, body["id"], json.dumps(plain(event_object(event)))) for event in events
        ]
        with self.connection as connection:
            connection.execute("begin immediate")
            connection.execute("update clock set tick = tick + 1")
            connection.execute(
                f"insert or replace into jobs values ({_marks(values[:-1])}, {TICK}, ?)", values
            )
            connection.executemany(
                "insert or ignore into events (id, job, body) values (?, ?, ?)", event_rows
            )

    def metrics_place(self, job_id: str) -> MetricsPlace:
        """How far its metrics were turned into events."""
        query = "select metrics_end, metrics_mark from jobs where id = ?"
        row = self.connection.execute(query, (job_id,)).fetchone()
        return MetricsPlace(*row) if row else MetricsPlace()

    def job(self, job_id: str) -> dict[str, Any] | None:
        """A job as its files were when they were last read."""
        row = self.connection.execute("select body from jobs where id = ?", (job_id,)).fetchone()
        return None if row is None else json.loads(row[0])

    def job_of_model(self, model: str, *, has_ended: bool = True) -> dict[str, Any] | None:
        """The job whose model has this name and was not deleted. has_ended: only a succeeded one,
        for others have no model yet.
        """
        query = "select body from jobs where model = ? and not is_deleted"
        query += " and status = 'succeeded'" if has_ended else ""
        row = self.connection.execute(query, (model,)).fetchone()
        return None if row is None else json.loads(row[0])

    def job_of_run(self, exp_id: str) -> dict[str, Any] | None:
        """The job that has this experiment."""
        row = self.connection.execute("select body from jobs where exp_id = ?", (exp_id,))
        body = row.fetchone()
        return None if body is None else json.loads(body[0])

    def jobs(
        self, cut: PageRequest, metadata: Mapping[str, str] | None, *, has_none: bool = False
    ) -> Page:
        """Jobs, the newest first. metadata: only those with these entries. has_none: only those
        without metadata. KeyError for an unknown `after`.
        """
        where, values = _where_owner(cut.owner)
        for key, value in (metadata or {}).items():
            where.append(
                "exists (select 1 from json_each(body, '$.metadata') as entry "
                "where entry.key = ? and entry.value = ?)"
            )
            values += [key, value]
        if has_none:
            where.append("json_extract(body, '$.metadata') is null")
        return self._page("jobs", cut, where, values)

    def tuned_models(self, owner: str | None) -> list[dict[str, Any]]:
        """Jobs that succeeded and whose model was not deleted, the newest first."""
        where, values = _where_owner(owner)
        where += ["status = 'succeeded'", "not is_deleted"]
        query = f"select body from jobs where {' and '.join(where)} order by created desc, id desc"
        return [json.loads(row[0]) for row in self.connection.execute(query, values)]

    def ended_jobs(self, since: int) -> list[dict[str, Any]]:
        """The jobs that have ended, of those that changed after a tick."""
        query = f"select body from jobs where tick > ? and status in ({_marks(FINAL)})"
        return [json.loads(row[0]) for row in self.connection.execute(query, (since, *FINAL))]

    def live_jobs(self, owner: str) -> int:
        """How many jobs of a token have not ended."""
        query = f"select count(*) from jobs where status not in ({_marks(FINAL)}) and owner = ?"
        return self.connection.execute(query, (*FINAL, owner)).fetchone()[0]

    def gpu_hours(self, owner: str) -> float:
        """The GPU hours that a token has used so far."""
        query = "select sum(json_extract(body, '$.lathe.gpu_hours')) from jobs where owner = ?"
        return self.connection.execute(query, (owner,)).fetchone()[0] or 0.0

    # Events

    def events(self, job_id: str, cut: PageRequest) -> Page:
        """Events of a job, the newest first. KeyError for an unknown `after`."""
        values: list[Any] = [job_id]
        where = "job = ?"
        if cut.after is not None:
            query = "select number from events where id = ? and job = ?"
            row = self.connection.execute(query, (cut.after, job_id)).fetchone()
            if row is None:
                raise KeyError(cut.after)
            where, values = f"{where} and number < ?", [*values, row[0]]
        query = f"select body from events where {where} order by number desc limit ?"
        return _cut(self.connection.execute(query, [*values, cut.limit + 1]), cut.limit)

    # Uploads and runs

    def write_upload(self, body: Mapping[str, Any], *, owner: str, created: float) -> None:
        """Add an uploaded file."""
        values = (body["id"], created, owner, body["purpose"], body["bytes"], json.dumps(body))
        self.connection.execute(f"insert or replace into uploads values ({_marks(values)})", values)

    def upload_sizes(self) -> dict[str, tuple[str, int]]:
        """id -> owner and bytes, of every file in the index."""
        rows = self.connection.execute("select id, owner, bytes from uploads")
        return {file_id: (owner, size) for file_id, owner, size in rows}

    def upload(self, file_id: str) -> dict[str, Any] | None:
        """An uploaded file as it was when it was last read."""
        query = "select body from uploads where id = ?"
        row = self.connection.execute(query, (file_id,)).fetchone()
        return None if row is None else json.loads(row[0])

    def upload_ids(self, only: Collection[str] | None = None) -> set[str]:
        """Ids of the uploaded files in the index, of all or of some."""
        return {row[0] for row in self._chosen("select id from uploads", "id", only)}

    def drop_uploads(self, ids: Iterable[str]) -> None:
        """Remove files that were deleted."""
        self.connection.executemany("delete from uploads where id = ?", [(one,) for one in ids])

    def uploads(self, cut: PageRequest, purpose: str | None, *, is_rising: bool = False) -> Page:
        """Uploaded files, the newest first unless is_rising. KeyError for an unknown `after`."""
        where, values = _where_owner(cut.owner)
        if purpose is not None:
            where.append("purpose = ?")
            values.append(purpose)
        return self._page("uploads", cut, where, values, is_rising=is_rising)

    def run_marks(self, only: Collection[str]) -> dict[str, str]:
        """exp_id -> the mark that its files had when they were read (live.runs.mark), of some."""
        return dict(self._chosen("select exp_id, facts from runs", "exp_id", only))

    def run_ids(self, only: Collection[str] | None = None) -> set[str]:
        """Ids of the runs in the index, of all or of some."""
        return {row[0] for row in self._chosen("select exp_id from runs", "exp_id", only)}

    def live_runs(self, states: Sequence[str]) -> set[str]:
        """Ids of the runs that were in one of these states."""
        query = f"select exp_id from runs where state in ({_marks(states)})"
        return {row[0] for row in self.connection.execute(query, states)}

    def run_ids_of(self, owner: str) -> set[str]:
        """Ids of the runs of the jobs of an owner."""
        query = "select exp_id from jobs where owner = ?"
        return {row[0] for row in self.connection.execute(query, (owner,))}

    def ids_of(self, owner: str) -> set[str]:
        """Ids of the jobs, the files and the runs of an owner."""
        query = (
            "select id from jobs where owner = ?1 union select exp_id from jobs where owner = ?1 "
            "union select id from uploads where owner = ?1"
        )
        return {row[0] for row in self.connection.execute(query, (owner,))}

    def write_runs(self, entries: Iterable[Mapping[str, str]]) -> None:
        """Replace the rows of runs. An entry has exp_id, facts, state, body, group, name,
        experiment, card (JSON) and created.
        """
        self._change(PUT_RUN, list(entries))

    def write_names(self, names: Mapping[str, str]) -> None:
        """Set names. names: exp_id -> what distinguishes a run from the others of its group."""
        self._change(NAME_RUN, [(plain(name), exp_id) for exp_id, name in names.items()])

    def _change(self, query: str, values: Sequence[Any]) -> None:
        """Change runs that pages show, and advance the tick, in one transaction."""
        with self.connection as connection:
            connection.execute("begin immediate")
            connection.execute("update clock set tick = tick + 1")
            connection.executemany(query, values)

    def names(self, only: Collection[str]) -> dict[str, tuple[str, str]]:
        """exp_id -> (group, name), of some runs."""
        rows = self._chosen("select exp_id, grp, name from runs", "exp_id", only)
        return {exp_id: (group, name) for exp_id, group, name in rows}

    def experiments_of(self, group: str) -> dict[str, str]:
        """exp_id -> the JSON of its dictionary, of the runs that were submitted with a group."""
        query = (
            "select exp_id, experiment from runs where grp = ? "
            "and not json_extract(body, '$.by_hand') order by exp_id"
        )
        return dict(self.connection.execute(query, (group,)))

    def experiment(self, exp_id: str) -> dict[str, Any]:
        """A run's dictionary; {} for an unknown run."""
        query = "select experiment from runs where exp_id = ?"
        row = self.connection.execute(query, (exp_id,)).fetchone()
        return {} if row is None else json.loads(row[0])

    def tick(self) -> int:
        """A number that grows with every change that pages show."""
        return self.connection.execute("select tick from clock").fetchone()[0]

    def epoch(self) -> str:
        """A text that is another one after the index was deleted and made again."""
        return self.connection.execute("select epoch from clock").fetchone()[0]

    def board(self, since: int, owner: str | None) -> str:
        """The JSON of what changed after a tick: {"tick", "num_runs", "runs", "jobs"}; the last two
        are lists of cards. owner: None for everybody's.
        """
        whose, values = ("", []) if owner is None else ("where owner = ?", [owner])
        own = f"exp_id in (select exp_id from jobs {whose})" if owner is not None else "1"
        look = self.connection.execute
        tick = self.tick()
        (count,) = look(f"select count(*) from runs where {own}", values).fetchone()
        values_since = [*values, since]
        runs = look(f"select card from runs where {own} and tick > ?", values_since).fetchall()
        where = f"{whose} and" if whose else "where"
        jobs = look(f"select card from jobs {where} tick > ?", values_since).fetchall()
        lists = {"runs": runs, "jobs": jobs}
        parts = [f'"{key}":[{",".join(row[0] for row in rows)}]' for key, rows in lists.items()]
        return f'{{"tick":{tick},"num_runs":{count},{",".join(parts)}}}'

    def drop_runs(self, ids: Iterable[str]) -> None:
        """Remove runs whose folder is gone."""
        values = [(exp_id,) for exp_id in ids]
        if values:
            self._change("delete from runs where exp_id = ?", values)

    def run(self, exp_id: str) -> str | None:
        """The JSON of a run; None for an unknown one."""
        query = "select body from runs where exp_id = ?"
        row = self.connection.execute(query, (exp_id,)).fetchone()
        return None if row is None else row[0]

    def runs(
        self,
        owner: str | None,
        *,
        group: str | None = None,
        state: str | None = None,
        cut: RunPage | None = None,
    ) -> list[tuple[str, str]]:
        """(exp_id, JSON) of the runs of a group in a state, of one owner's jobs or of everybody's:
        all in the order of ids, or one page of them, the newest first. KeyError for an unknown
        `after`.
        """
        where, values = list[str](), list[Any]()
        if owner is not None:
            where.append("exp_id in (select exp_id from jobs where owner = ?)")
            values.append(owner)
        for column, value in (("grp", group), ("state", state)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        order = "exp_id"
        if cut is not None:
            order = "created desc, exp_id desc limit ?"
            if cut.after is not None:
                query = "select created from runs where exp_id = ?"
                row = self.connection.execute(query, (cut.after,)).fetchone()
                if row is None:
                    raise KeyError(cut.after)
                where.append("(created, exp_id) < (?, ?)")
                values += [row[0], cut.after]
            values.append(cut.limit)
        condition = f"where {' and '.join(where)}" if where else ""
        query = f"select exp_id, body from runs {condition} order by {order}"
        return self.connection.execute(query, values).fetchall()

    def _chosen(self, query: str, key: str, only: Collection[str] | None) -> sqlite3.Cursor:
        """The rows of a query, of every key or of those of `only`."""
        if only is None:
            return self.connection.execute(query)
        values = (json.dumps(list(only)),)
        return self.connection.execute(
            f"{query} where {key} in (select value from json_each(?))", values
        )

    def _page(
        self,
        table: str,
        cut: PageRequest,
        where: list[str],
        values: list[Any],
        *,
        is_rising: bool = False,
    ) -> Page:
        if cut.after is not None:
            query = f"select created from {table} where id = ?"
            row = self.connection.execute(query, (cut.after,)).fetchone()
            if row is None:
                raise KeyError(cut.after)
            where.append(f"(created, id) {'>' if is_rising else '<'} (?, ?)")
            values += [row[0], cut.after]
        order = "created, id" if is_rising else "created desc, id desc"
        condition = f"where {' and '.join(where)}" if where else ""
        query = f"select body from {table} {condition} order by {order} limit ?"
        return _cut(self.connection.execute(query, [*values, cut.limit + 1]), cut.limit)


@contextmanager
def may_lag() -> Generator[None]:
    """Inside, an index that cannot be written is a line in the log: the files are written already,
    and the keeper's next turn brings them into the index.
    """
    try:
        yield
    except sqlite3.Error as error:
        log.warning("the index lags behind the files: %s", error)


def _where_owner(owner: str | None) -> tuple[list[str], list[Any]]:
    return ([], []) if owner is None else (["owner = ?"], [owner])


def _marks(values: Sequence[Any]) -> str:
    return ",".join("?" * len(values))


def _cut(rows: Iterable[tuple[str]], limit: int) -> Page:
    objects = [json.loads(row[0]) for row in rows]
    return Page(objects[:limit], len(objects) > limit)


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None when there is none."""
    with suppress(FileNotFoundError):
        facts = path.stat()
        return facts.st_dev, facts.st_ino
    return None
