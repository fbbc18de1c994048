"""Files that are whole or as they were before, whatever happens to the machine while they are
written.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.errors import StorageError
from trainer.files.atomic import replace_file


def inodes_synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inodes of the files that are brought to the disk from now on."""
    inodes: list[int] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        fsync(descriptor)
        inodes.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", noting)
    return inodes


def test_new_content_is_on_the_disk_before_it_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, names, rename = inodes_synced(monkeypatch), [], os.replace

    def renaming(source: Path, target: Path) -> None:
        names.append((source.stat().st_ino in synced, target.name))
        rename(source, target)

    monkeypatch.setattr(os, "replace", renaming)
    replace_file(tmp_path / "status.json", b"new")
    assert names == [(True, "status.json")]
    assert (tmp_path / "status.json").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_what_can_be_made_again_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = inodes_synced(monkeypatch)
    replace_file(tmp_path / "heartbeat.json", b"new", is_durable=False)
    assert not synced
    assert (tmp_path / "heartbeat.json").read_bytes() == b"new"


def test_a_disk_that_refuses_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "status.json"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        StorageError, match=r"status\.json: No space left on device\. Free some space"
    ):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
