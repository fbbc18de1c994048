"""What was read out of files is not read again until one of them changes."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.facts import experiment, write_facts
from tests.wording import refused
from trainer import tasks
from trainer.data.content import content_of
from trainer.data.readers import data_sets
from trainer.files import opened
from trainer.files.remembered import FOLDER, cached_sha256, recall
from trainer.protocol.task import Places


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this very moment count as old."""
    monkeypatch.setattr(opened, "SETTLED_S", -60.0)


class Reader:
    """Reads a file and counts how often."""

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0

    def __call__(self) -> str:
        self.count += 1
        opened = gzip.open if self.path.suffix == ".gz" else open
        with opened(self.path, "rb") as file:
            return file.read().decode()


def read(reader: Reader, cache: Path) -> str:
    return recall(cache, "key", reader)


def put_times_back(path: Path, as_it_was: os.stat_result) -> None:
    os.utime(path, ns=(as_it_was.st_atime_ns, as_it_was.st_mtime_ns))


@pytest.mark.parametrize("suffix", [".txt", ".gz"])
def test_a_value_is_computed_once_while_its_file_stays(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "data" / f"rows{suffix}"
    path.parent.mkdir()
    with (gzip.open if suffix == ".gz" else open)(path, "wb") as file:
        file.write(b"rows")
    reader = Reader(path)
    assert [read(reader, tmp_path / "c") for _ in range(3)] == ["rows"] * 3
    assert reader.count == 1


def test_a_file_of_other_content_is_noticed_though_size_and_time_are_put_back(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data" / "rows"
    path.parent.mkdir()
    path.write_bytes(bytes(4 << 20))
    before, reader = path.stat(), Reader(path)
    read(reader, tmp_path / "c")
    with path.open("r+b") as file:
        file.seek(1 << 20)  # between two blocks of the sample
        file.write(b"x")
    put_times_back(path, before)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert "x" in read(reader, tmp_path / "c")


def test_the_sample_notices_where_a_file_system_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data" / "rows"
    path.parent.mkdir()
    path.write_text("old")
    monkeypatch.setattr(opened, "_facts", lambda path: [os.stat(path).st_size, 1, 1, 1])
    reader = Reader(path)
    assert read(reader, tmp_path / "c") == "old"
    path.write_text("new")
    assert read(reader, tmp_path / "c") == "new"


@pytest.mark.parametrize("place", [0, 1 << 20, (4 << 20) - 1])
def test_the_sample_covers_the_beginning_the_middle_and_the_end(tmp_path: Path, place: int) -> None:
    path, size = tmp_path / "rows", 4 << 20
    path.write_bytes(bytes(size))
    before = opened._sample(str(path), size)
    with path.open("r+b") as file:
        # the second of three is between two blocks: the sample alone cannot see it
        file.seek(place)
        file.write(b"x")
    assert (opened._sample(str(path), size) != before) == (place != 1 << 20)


def test_a_file_that_appears_beside_the_one_that_was_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "data" / "nq" / "rows"
    path.parent.mkdir(parents=True)
    path.write_text("rows")
    reader = Reader(path)
    for new in (None, path.parent / "rows.json", path.parent.parent / "rows.json"):
        if new is not None:
            new.write_text("more")
        read(reader, tmp_path / "c")
        read(reader, tmp_path / "c")
    assert reader.count == 3


def test_a_file_that_changed_a_moment_ago_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "SETTLED_S", 60.0)
    path = tmp_path / "rows"
    path.write_text("rows")
    reader = Reader(path)
    read(reader, tmp_path / "c")
    read(reader, tmp_path / "c")
    assert reader.count == 2


def test_what_was_read_without_a_file_or_without_being_seen_is_not_remembered(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows"
    path.write_text("rows")
    calls: list[str] = []

    def unseen() -> int:
        calls.append(path.read_text())
        with refused("set_unreadable", dataset="nobody/has-this"):
            data_sets.data_set("nobody/has-this", "train")
        return 1

    def fileless() -> int:
        calls.append("")
        return 1

    def outer() -> int:
        path.read_text()
        return recall(tmp_path / "c", "inner", unseen)

    for compute in (unseen, unseen, fileless, fileless, outer, outer):
        assert recall(tmp_path / "c", compute.__name__, compute) == 1
    assert len(calls) == 6


def test_what_an_inner_value_was_read_out_of_counts_for_the_outer_one(tmp_path: Path) -> None:
    path, own = tmp_path / "data" / "inner", tmp_path / "data" / "outer"
    path.parent.mkdir()
    path.write_text("1")
    own.write_text("x")
    cache = tmp_path / "c"

    def outer() -> str:
        return own.read_text() + recall(cache, "inner", path.read_text)

    recall(cache, "inner", path.read_text)
    assert recall(cache, "outer", outer) == "x1"
    path.write_text("2")
    assert recall(cache, "outer", outer) == "x2"


def test_a_record_that_is_torn_and_a_cache_that_cannot_be_written_do_no_harm(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data" / "rows"
    path.parent.mkdir()
    path.write_text("rows")
    reader = Reader(path)
    assert read(reader, tmp_path / "c") == "rows"
    (record,) = (tmp_path / "c" / FOLDER).glob("*.json")
    for torn in ("{", "[]", '{"files": 3}', '{"files": {"/nowhere": []}, "folders": {}}'):
        record.write_text(torn)
        assert read(reader, tmp_path / "c") == "rows"
    assert read(reader, path) == "rows"  # a file, no folder


def test_the_digest_of_weights_is_that_of_their_content_however_often(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    digests = {cached_sha256(path, tmp_path / "c") for _ in range(2)}
    path.write_bytes(b"changed")
    assert len(digests | {cached_sha256(path, tmp_path / "c")}) == 2


@pytest.mark.parametrize("task", ["causal_lm", "cross_attention", "fid", "retriever", "vera"])
def test_a_start_reads_rows_again_only_when_they_changed(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_facts(tmp_path / "data")
    cache = tmp_path / "c"
    values: dict[str, Any] = experiment(task, data)
    rows = type(tasks.load(tasks.parse(values), Places(data, cache, tmp_path))).rows
    counts: list[str] = []

    def counted(self: Any, split: str) -> Any:
        counts.append(split)
        return rows(self, split)

    def content(**changes: Any) -> tuple[str, int]:
        loaded = tasks.load(tasks.parse({**values, **changes}), Places(data, cache, tmp_path))
        monkeypatch.setattr(type(loaded), "rows", counted)
        return content_of(loaded, "train", cache)

    first = content()
    assert content() == first
    assert content(optim={"lr": 0.5}) == first
    assert len(counts) == 1
    for path in data.rglob("train*"):
        text = path.read_text()
        first_row = text.partition("\n")[0]
        path.write_text(json.dumps(json.loads(text)[1:]) if text[0] == "[" else text + first_row)
    assert content() != first
    assert len(counts) == 2
