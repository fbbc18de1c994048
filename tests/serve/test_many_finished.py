"""What has ended costs a server nothing: reads are counted, and changes are seen all the same."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jobs.job_state import ACTIVE
from jobs.record import events
from jobs.record.paths import RunFolder
from jobs.serve import offers
from jobs.serve.app import make_keeper
from jobs.serve.index import RunPage
from jobs.serve.keeper import Keeper, Send
from jobs.serve.tickets import TicketFolder
from jobs.serve.turn.watched import LOOKS, FolderNames, Watched
from tests.jobs.conftest import queue  # noqa: F401
from trainer.config.identity import exp_id
from trainer.run_changes import FILE, MOST_BYTES, ChangeLog, note_change
from trainer.telemetry.run_record import RunRecord

MANY = 3 * LOOKS
_counts: Counter[str] | None = None


def _count(event: str, arguments: tuple[Any, ...]) -> None:
    if _counts is not None and event in ("open", "os.scandir", "os.listdir"):
        _counts[event] += 1


sys.addaudithook(_count)


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts the files that are opened, folders that are listed, and files that are looked at."""
    global _counts
    look = Path.stat

    def counted(path: Path, **more: Any) -> os.stat_result:
        counts["stat"] += 1
        return look(path, **more)

    with monkeypatch.context() as patch:
        counts = _counts = Counter[str]()
        patch.setattr(Path, "stat", counted)
        try:
            yield counts
        finally:
            _counts = None


def finished(base: Path, seed: int) -> Path:
    """A run that was started by hand and has succeeded."""
    values = {"task": "causal_lm", "train": {"steps": 4, "seed": seed}}
    folder = base / exp_id(values)
    folder.mkdir()
    (folder / "exp_dict.json").write_text(json.dumps(values))
    (folder / "metrics.jsonl").write_text('{"step": 4, "loss": 1.5}\n')
    write_state(folder, "succeeded")
    return folder


def write_state(folder: Path, state: str) -> None:
    (folder / "status.json").write_text(json.dumps({"state": state, "step": 4, "total": 4}))


def server(base: Path) -> Keeper:
    """A server over `base` that has taken its first turns, of folders that changed long ago."""
    keeper = make_keeper(base, offers.read(None), Send("local"), every_s=1)
    long_ago = time.time() - 3600
    for folder in (base, keeper.folder.tickets, keeper.folder.uploads, keeper.folder.batches):
        os.utime(folder, (long_ago, long_ago))
    keeper.turn()
    keeper.turn()
    return keeper


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    return tmp_path / "base"


def states(keeper: Keeper) -> Counter[str]:
    return Counter(json.loads(text)["state"] for _, text in keeper.index.runs(None))


def test_an_idle_turn_reads_as_much_whatever_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: dict[int, Counter[str]] = {}
    for number in (LOOKS, MANY):
        folder = tmp_path / str(number)
        folder.mkdir()
        for seed in range(number):
            finished(folder, seed)
        keeper = server(folder)
        assert states(keeper) == {"succeeded": number}
        with reads(monkeypatch) as counts[number]:
            keeper.turn()
    assert counts[MANY] == counts[LOOKS]
    assert 0 < counts[MANY]["stat"] <= 4 * LOOKS
    assert counts[MANY]["os.scandir"] == 0


def test_a_run_that_starts_again_is_seen_in_the_next_turn(base: Path) -> None:
    runs = [finished(base, seed) for seed in range(MANY)]
    keeper = server(base)
    last = max(runs, key=lambda run: run.name)
    keeper.reader._runs._place = 0  # its turn is far away  # pyright: ignore[reportPrivateUsage]
    record = RunRecord(last, total=4)
    record.status("running")
    keeper.turn()
    assert keeper.index.live_runs(ACTIVE) == {last.name}
    record.status("failed", error="no memory")  # a live run is looked at in every turn
    keeper.turn()
    assert states(keeper) == {"succeeded": MANY - 1, "failed": 1}
    record.close()


def test_a_record_that_another_process_writes_is_seen_in_the_next_turn(base: Path) -> None:
    runs = [finished(base, seed) for seed in range(MANY)]
    keeper = server(base)
    last = max(runs, key=lambda run: run.name)
    keeper.reader._runs._place = 0  # pyright: ignore[reportPrivateUsage]
    events.create(RunFolder(last), exp_id=last.name, digest="d", group="swept")
    keeper.turn()
    assert [name for name, _ in keeper.index.runs(None, group="swept")] == [last.name]


def test_a_file_edited_by_hand_is_seen_when_its_turn_comes(base: Path) -> None:
    runs = [finished(base, seed) for seed in range(MANY)]
    keeper = server(base)
    for run in runs[:5]:
        write_state(run, "cancelled")
    for _ in range(-(-MANY // LOOKS)):
        keeper.turn()
    assert states(keeper) == {"succeeded": MANY - 5, "cancelled": 5}


def test_a_run_that_was_killed_while_it_wrote_is_seen_when_its_turn_comes(base: Path) -> None:
    runs = [finished(base, seed) for seed in range(MANY)]
    keeper = server(base)
    write_state(runs[7], "running")  # and the process died before it told the log of changes
    for _ in range(-(-MANY // LOOKS)):
        keeper.turn()
    assert states(keeper)["succeeded"] == MANY - 1


def test_runs_that_are_deleted_moved_or_replaced_are_seen_in_the_next_turn(base: Path) -> None:
    runs = sorted(finished(base, seed) for seed in range(MANY))
    keeper = server(base)
    keeper.reader._runs._place = 0  # pyright: ignore[reportPrivateUsage]
    shutil.rmtree(runs[-1])
    runs[-2].rename(base / "deleted-by-hand")
    shutil.copytree(runs[-3], base / "copy")
    write_state(base / "copy", "cancelled")
    shutil.rmtree(runs[-3])
    (base / "copy").rename(runs[-3])
    keeper.turn()
    assert states(keeper) == {"succeeded": MANY - 3, "cancelled": 1}


def test_an_index_that_is_deleted_is_filled_again_in_one_turn(base: Path) -> None:
    for seed in range(MANY):
        finished(base, seed)
    keeper = server(base)
    for name in ("", "-wal", "-shm"):
        path = keeper.folder.index
        path.with_name(path.name + name).unlink(missing_ok=True)
    keeper.turn()
    assert states(keeper) == {"succeeded": MANY}


def test_what_could_not_be_written_to_the_index_is_written_in_the_next_turn(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [finished(base, seed) for seed in range(MANY)]
    keeper = server(base)
    last = max(runs, key=lambda run: run.name)
    keeper.reader._runs._place = 0  # pyright: ignore[reportPrivateUsage]
    write_state(last, "cancelled")
    note_change(base, last.name)
    with monkeypatch.context() as patch:
        patch.setattr(type(keeper.index), "write_runs", _full)
        keeper.turn()
    assert states(keeper) == {"succeeded": MANY}
    assert "the runs" in keeper.reader.failing
    keeper.turn()
    assert states(keeper) == {"succeeded": MANY - 1, "cancelled": 1}


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_two_servers_see_each_others_wishes_about_finished_jobs(base: Path) -> None:
    log = ChangeLog(base)
    assert log.new() is None
    ticket = base / "_service" / "tickets" / f"ftjob-{'a' * 24}"
    ticket.mkdir(parents=True)
    TicketFolder(ticket).add_wish("delete", "anna")
    assert log.new() == {ticket.name}


def test_the_log_tells_each_reader_what_is_new(tmp_path: Path) -> None:
    one, other = ChangeLog(tmp_path), ChangeLog(tmp_path)
    names = [f"{number:032x}" for number in range(3)]
    assert one.new() is None
    assert one.new() == set()
    note_change(tmp_path, names[0])
    assert one.new() == {names[0]}
    assert other.new() is None
    note_change(tmp_path, names[1])
    note_change(tmp_path, names[2])
    note_change(tmp_path, "best")  # the folder of no run
    assert one.new() == other.new() == set(names[1:])
    assert one.new() == set()
    with (tmp_path / FILE).open("a") as file:
        file.write("abc")  # its writer was killed
    assert one.new() == set()
    note_change(tmp_path, names[0])
    assert one.new() == {names[0]}
    (tmp_path / FILE).unlink()
    assert one.new() is None
    assert one.new() == set()


def test_a_full_log_begins_again_and_its_readers_look_at_everything(tmp_path: Path) -> None:
    log = ChangeLog(tmp_path)
    name = "0" * 32
    for _ in range(MOST_BYTES // 33):
        note_change(tmp_path, name)
    log.new()
    note_change(tmp_path, name)
    assert (tmp_path / FILE).stat().st_size == 0
    assert log.new() is None
    note_change(tmp_path, name)
    assert log.new() == {name}
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE]


def test_a_folder_that_may_still_change_within_one_tick_is_listed_again(tmp_path: Path) -> None:
    folder = FolderNames(tmp_path, lambda name: name.startswith("a"))
    (tmp_path / "a1").mkdir()
    assert folder.read()
    (tmp_path / "a2").mkdir()
    (tmp_path / "b1").mkdir()
    now = os.stat(tmp_path)  # as if it had been so in the same tick, before the two were made
    folder._facts = (now.st_dev, now.st_ino, now.st_mtime_ns, now.st_ctime_ns)  # pyright: ignore[reportPrivateUsage]
    assert folder.read()
    assert sorted(folder.inodes) == ["a1", "a2"]
    assert not folder.read()
    shutil.rmtree(tmp_path)
    assert folder.read()
    assert not folder.inodes


def test_every_name_has_its_turn(tmp_path: Path) -> None:
    names = {f"{number:04}" for number in range(2 * LOOKS + 10)}
    for name in names:
        (tmp_path / name).mkdir()
    watched = Watched(FolderNames(tmp_path, str.isdigit))
    assert watched.look((), "first").due == names
    watched.done(watched.look((), "first"))
    met = set[str]()
    for _ in range(3):
        look = watched.look((), "first")
        assert len(look.due) == LOOKS
        met |= look.due
        watched.done(look)
    assert met == names
    assert watched.look((), "second").due == names


def test_a_page_of_runs_is_the_newest_of_a_state(base: Path) -> None:
    runs = [finished(base, seed) for seed in range(5)]
    for day, run in enumerate(runs, 1):
        at = {"updated_at": f"2026-01-0{day}T00:00:00+00:00"}
        facts = json.loads((run / "status.json").read_text())
        (run / "status.json").write_text(json.dumps(facts | at))
    write_state(runs[4], "cancelled")
    keeper = server(base)
    first = keeper.index.runs(None, state="succeeded", cut=RunPage(3))
    assert [name for name, _ in first] == [runs[3].name, runs[2].name, runs[1].name]
    second = keeper.index.runs(None, state="succeeded", cut=RunPage(3, first[-1][0]))
    assert [name for name, _ in second] == [runs[0].name]
    with pytest.raises(KeyError):
        keeper.index.runs(None, cut=RunPage(3, "f" * 32))
