"""job.jsonl survives whoever writes it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.errors import Busy
from jobs.protocol import array_token, token_of
from jobs.record import events as record
from jobs.record.paths import RunFolder
from tests.wording import refused

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / ("a" * 32))
    made.path.mkdir()
    record.create(made, exp_id="a" * 32, digest="d", group="g")
    return made


def sent(folder: RunFolder, number: int = 1) -> None:
    record.append(
        folder, record.intent(number, f"t{number}", name=f"t{number}", index=None, backend="local")
    )


def test_an_empty_folder_has_no_record(tmp_path: Path) -> None:
    assert record.read(RunFolder(tmp_path)) is None


def test_events_add_up_to_attempts(folder: RunFolder) -> None:
    sent(folder)
    record.append(folder, {"event": "submitted", "attempt": 1, "id": "8", "adopted": False})
    record.append(
        folder,
        {"event": "observed", "attempt": 1, "state": "preempted", "reason": "r", "host": "n1"},
    )
    sent(folder, 2)
    job = record.read(folder)
    assert job is not None
    assert [(each.number, each.state, each.id) for each in job.attempts] == [
        (1, "preempted", "8"),
        (2, "submitting", None),
    ]
    assert job.state == "submitting"


def test_a_torn_last_line_is_ignored_and_the_next_event_starts_on_a_line_of_its_own(
    folder: RunFolder,
) -> None:
    sent(folder)
    whole = folder.record.read_bytes()
    for length in range(1, 60):  # a writer killed after so many bytes of its line
        folder.record.write_bytes(
            whole + b'{"at": "x", "event": "submitted", "attempt": 1, "id": "9", "ad'[:length]
        )
        record.append(folder, {"event": "submitted", "attempt": 1, "id": "8", "adopted": False})
        job = record.read(folder)
        assert job is not None
        assert job.attempts[0].id == "8"


def test_every_event_is_one_line_whatever_its_text_holds(folder: RunFolder) -> None:
    nasty = 'a\nb\r\n\u2028"; rm -rf x $(touch y) \0 \ud800'
    record.append(folder, {"event": "unseen", "reason": nasty})
    job = record.read(folder)
    assert job is not None
    assert job.unseen_reason == nasty


def test_unseen_keeps_its_first_time_until_seen(folder: RunFolder) -> None:
    record.append(folder, {"event": "unseen", "reason": "one"})
    first = record.read(folder)
    record.append(folder, {"event": "unseen", "reason": "two"})
    second = record.read(folder)
    assert first is not None
    assert second is not None
    assert (first.unseen_since, "two") == (second.unseen_since, second.unseen_reason)
    record.append(folder, {"event": "seen"})
    third = record.read(folder)
    assert third is not None
    assert third.unseen_since is None


def test_tokens_are_deterministic_unique_to_the_record_and_made_of_letters_that_all_schedulers_allow() -> (
    None
):
    token = token_of("abcdef0123456789" * 2, "00ff00", 3)
    assert token == "ft_abcdef012345_00ff00_3"
    assert array_token(["a", "b"]) == array_token(["a", "b"]) != array_token(["b", "a"])
    assert all(
        letter.islower() or letter.isdigit() or letter == "_"
        for letter in token + array_token(["a"])
    )


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_on_a_file_system_without_flock_one_holds_the_lock(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with record.lock(folder, wait_s=0.1), pytest.raises(Busy), record.lock(folder, wait_s=0.1):
        pass
    with record.lock(folder, wait_s=0.1):  # it is free again
        pass


def test_a_lock_whose_holder_was_killed_is_free(folder: RunFolder) -> None:
    code = f"""
import time
from pathlib import Path
from jobs.record import events as record
from jobs.record.paths import RunFolder
with record.lock(RunFolder(Path({str(folder.path)!r})), wait_s=1):
    print("held", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with refused("lock_busy"), record.lock(folder, wait_s=0.1):
            pass
        os.kill(holder.pid, signal.SIGKILL)
    with record.lock(folder, wait_s=0):
        pass


def test_processes_that_append_at_once_lose_no_event(folder: RunFolder) -> None:
    code = f"""
import sys
from pathlib import Path
from jobs.record import events as record
from jobs.record.paths import RunFolder
folder = RunFolder(Path({str(folder.path)!r}))
for number in range(20):
    with record.lock(folder, wait_s=30):
        record.append(folder, {{"event": "unseen", "reason": sys.argv[1] * 50}})
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, name], cwd=ROOT) for name in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    events = [json.loads(line) for line in folder.record.read_text().splitlines()]
    assert len(events) == 61
