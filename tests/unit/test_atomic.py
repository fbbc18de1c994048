"""Files that are never half written: what is fsynced before it gets its name, and who of several
writers wins.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import run_alone
from tests.wording import refused, says
from trainer.errors import HeldError
from trainer.files import atomic
from trainer.files.atomic import size_of
from trainer.files.build_once import build_once
from trainer.files.held_lock import HeldLock


@pytest.fixture
def durable(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What each file held when it was fsynced; folders are left out."""
    contents: list[bytes] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_file():
            contents.append(path.read_bytes())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    return contents


def written_aside(path: Path) -> None:
    with atomic.aside(path) as temporary:
        temporary.write_bytes(b'"new"\n')


WRITERS: dict[str, Callable[[Path], object]] = {
    "replace_file": lambda path: atomic.replace_file(path, b'"new"\n'),
    "write_json": lambda path: atomic.write_json(path, "new"),
    "create_json": lambda path: atomic.create_json(path, "new"),
    "aside": written_aside,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_file_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    durable: list[bytes],
    write: Callable[[Path], object],
) -> None:
    named_when: list[list[bytes]] = []
    replace, link = os.replace, os.link
    monkeypatch.setattr(
        os, "replace", lambda *paths: (named_when.append(list(durable)), replace(*paths))
    )
    monkeypatch.setattr(os, "link", lambda *paths: (named_when.append(list(durable)), link(*paths)))
    write(tmp_path / "file.json")
    assert named_when == [[b'"new"\n']]
    assert os.listdir(tmp_path) == ["file.json"]
    assert (tmp_path / "file.json").read_bytes() == b'"new"\n'


def test_what_can_be_made_again_is_not_fsynced(tmp_path: Path, durable: list[bytes]) -> None:
    atomic.write_json(tmp_path / "file.json", "new", is_durable=False)
    assert (json.loads((tmp_path / "file.json").read_text()), durable) == ("new", [])


@pytest.mark.parametrize("write", [WRITERS[name] for name in WRITERS if name != "create_json"])
def test_a_disk_that_is_full_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], object]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file.json"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with refused("disk_full", at="file.json"):
        write(path)
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["file.json"])


def test_only_the_first_creates_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    assert [atomic.create_json(path, number) for number in range(3)] == [True, False, False]
    assert (json.loads(path.read_text()), os.listdir(tmp_path)) == (0, ["file.json"])


def test_one_that_is_there_at_the_last_moment_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync = tmp_path / "file.json", os.fsync

    def overtaken(descriptor: int) -> None:
        fsync(descriptor)
        path.write_text("first")

    monkeypatch.setattr(os, "fsync", overtaken)
    assert atomic.create_json(path, "second") is False
    assert (path.read_text(), os.listdir(tmp_path)) == ("first", ["file.json"])


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    with atomic.aside(path) as one, atomic.aside(path) as other:
        one.write_text("one")
        other.write_text("other")
    assert (path.read_text(), os.listdir(tmp_path)) == ("one", ["file.json"])


def test_a_folder_is_fsynced_too_and_one_that_cannot_be_is_let_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    (tmp_path / "file").touch()
    atomic.sync(tmp_path)
    monkeypatch.setattr(os, "fsync", unable)
    atomic.sync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        atomic.sync(tmp_path / "file")


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 3_000_000)
    # printf 'abc%.0s' {1..3000000} | sha256sum
    assert (
        atomic.sha256_of(path) == "a889aaea4dd43c3ef1b6f125177026b6445c8374d9cd585dd0c52bb020bb8cc5"
    )


RUST = "No space left on device (os error 28)"  # as safetensors and tokenizers say it


def test_a_full_disk_is_named_with_its_path_whichever_library_writes(tmp_path: Path) -> None:
    with (
        refused("disk_full", at=tmp_path),
        atomic.refusals(tmp_path),
    ):
        raise Exception(RUST)
    with pytest.raises(ZeroDivisionError), atomic.refusals(tmp_path):
        raise ZeroDivisionError

    def build(folder: Path) -> None:
        (folder / "part").touch()
        raise Exception(RUST)

    cache = tmp_path / "cache"
    with refused("cache_unwritable", at=cache, reason="No space left on device"):
        build_once(cache, build, is_whole=Path.is_dir)
    assert [path.name for path in tmp_path.iterdir()] == ["cache.lock"]


def test_a_lock_whose_file_was_removed_is_lost_to_whoever_holds_it(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    first, second, third = (HeldLock(path, what="results/1") for _ in range(3))
    first.acquire()
    first.check()
    with refused("lock_held"):
        second.acquire()
    path.unlink()
    with refused("lock_removed"):
        first.check()
    second.acquire()
    second.check()
    with refused("lock_removed"):
        first.check()
    first.release()
    with refused("lock_held"):
        third.acquire()
    second.release()
    third.acquire()
    third.check()


def _locks(path: Path, folder: Path) -> str:
    lock = HeldLock(path, what="results/1")
    lock.acquire()
    try:
        lock.hold(folder)
    except HeldError as error:
        return str(error)
    return "held"


def test_a_held_folder_keeps_another_process_out_though_the_lock_file_was_removed(
    tmp_path: Path,
) -> None:
    path, folder = tmp_path / ".lock", tmp_path / "run"
    folder.mkdir()
    lock = HeldLock(path, what="results/1")
    lock.acquire()
    lock.hold(folder)
    path.unlink()
    said = run_alone(_locks, path, folder)
    says("lock_held", said)
    lock.release()
    assert run_alone(_locks, path, folder) == "held"


def test_sizes_are_told_in_a_unit_that_shows_them() -> None:
    assert [size_of(n) for n in (0, 3_000, 5 << 20, 3 << 29)] == [
        "0.0 KiB",
        "2.9 KiB",
        "5.0 MiB",
        "1.50 GiB",
    ]
