"""A token store gives back what was encoded, is built once, and is whole or invisible."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.wording import refused
from trainer.data.token_store import TokenStore, open_store
from trainer.errors import DataError
from trainer.protocol.task import Encoded, Row


def _rows(count: int = 5) -> list[Row]:
    return [{"text": "x" * index, "n": index} for index in range(count)]


def _encode(row: Row) -> Encoded:
    return Encoded({"ids": [*range(row["n"])], "last": [row["n"] - 2**31]})


def _length(encoded: Mapping[str, Any]) -> int:
    return len(encoded["ids"])


def _open(folder: Path, rows: Iterable[Row] | None = None, **changes: Any) -> TokenStore:
    found = _rows() if rows is None else rows
    arguments = {
        "encoding_id": "e",
        "split": "train",
        "cache_dir": folder,
        "length": _length,
        **changes,
    }
    return open_store(lambda: found, arguments.pop("encode", _encode), **arguments)


def _folders(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "tokens").iterdir() if path.is_dir())


def test_every_row_comes_back_as_it_was_encoded(tmp_path: Path) -> None:
    store = _open(tmp_path)
    assert len(store) == 5
    for index, row in enumerate(_rows()):
        assert {field: ids.tolist() for field, ids in store[index].items()} == _encode(row)
        assert all(ids.dtype == np.int32 for ids in store[index].values())
    assert store.lengths.tolist() == [0, 1, 2, 3, 4]


def test_a_field_that_is_always_empty_is_kept(tmp_path: Path) -> None:
    store = _open(tmp_path, encode=lambda row: Encoded({"ids": [], "one": [1]}))
    assert [store[index]["ids"].tolist() for index in range(len(store))] == [[]] * 5


def test_writing_into_a_row_does_not_change_the_store(tmp_path: Path) -> None:
    store = _open(tmp_path)
    store[3]["ids"][:] = 99
    assert store[3]["ids"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("index", [-1, 5])
def test_a_row_that_is_not_there_is_an_index_error(tmp_path: Path, index: int) -> None:
    with pytest.raises(IndexError, match=f"row {index} of 5"):
        _open(tmp_path)[index]


def test_opening_again_encodes_nothing(tmp_path: Path) -> None:
    def fail(_: Row) -> Encoded:
        raise AssertionError("encoded again")

    first = _open(tmp_path)
    again = _open(tmp_path, encode=fail)
    assert again.digest == first.digest
    assert again[4]["ids"].tolist() == first[4]["ids"].tolist()


def test_the_order_of_a_rows_keys_does_not_matter(tmp_path: Path) -> None:
    turned = [dict(reversed(row.items())) for row in _rows()]
    assert _open(tmp_path, turned).digest == _open(tmp_path).digest


@pytest.mark.parametrize(
    "changes", [{"rows": _rows(4)}, {"rows": _rows()[::-1]}, {"encoding_id": "other"}]
)
def test_other_rows_or_another_encoding_give_another_store(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert _open(tmp_path, **changes).digest != _open(tmp_path).digest
    assert len(_folders(tmp_path)) == 2


def test_truncated_rows_are_counted_and_not_stored(tmp_path: Path) -> None:
    store = _open(tmp_path, encode=lambda row: Encoded({"ids": [1]}, is_truncated=row["n"] > 2))
    assert store.summary()["truncated_rows"] == 2
    assert list(store[0]) == ["ids"]


def test_the_summary_can_be_written_as_json(tmp_path: Path) -> None:
    summary = _open(tmp_path, _rows(101)).summary()
    assert json.loads(json.dumps(summary)) == {
        "rows": 101,
        "tokens": {"ids": 5050, "last": 101},
        "length": {"p50": 50, "p90": 90, "p99": 99, "p100": 100},
        "truncated_rows": 0,
    }


# What is refused


def test_no_rows_are_refused(tmp_path: Path) -> None:
    with refused("split_without_rows", split="train"):
        _open(tmp_path, [])


def test_rows_that_change_while_they_are_read_are_refused(tmp_path: Path) -> None:
    readings = iter([_rows(5), _rows(6)])
    with refused("rows_changed", split="train"):
        open_store(
            lambda: next(readings),
            _encode,
            encoding_id="e",
            split="train",
            cache_dir=tmp_path,
            length=_length,
        )
    assert _folders(tmp_path) == []


@pytest.mark.parametrize(
    "encoded",
    [
        {"ids": [[1]]},
        {"ids": [1.5]},
        {"ids": ["a"]},
        {"ids": 3},
        {"ids": [2**31]},
        {"ids": [[1], [2, 3]]},
    ],
)
def test_an_encoding_that_is_not_flat_ids_is_refused(tmp_path: Path, encoded: Any) -> None:
    with refused("encoded_kind", row=0, field="ids"):
        _open(tmp_path, encode=lambda _: Encoded(encoded), length=lambda _: 0)
    assert _folders(tmp_path) == []


def test_a_row_with_other_fields_than_the_first_is_refused(tmp_path: Path) -> None:
    with refused("encoded_fields", row=1, fields=["b"], first=["a"]):
        _open(tmp_path, encode=lambda row: Encoded({"ab"[row["n"]]: [1]}), length=lambda _: 1)


def test_an_error_while_encoding_leaves_nothing_behind(tmp_path: Path) -> None:
    def encode(row: Row) -> Encoded:
        if row["n"] == 3:
            raise DataError("row 3 is bad")
        return _encode(row)

    with pytest.raises(DataError) as caught:
        _open(tmp_path, encode=encode)
    assert str(caught.value) == "row 3 is bad"
    assert _folders(tmp_path) == []


def test_a_full_disk_is_a_storage_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    rows = _rows(3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1 << 20, before[1])
    )  # a file of 1 MiB is full: EFBIG
    try:
        with refused("cache_unwritable", reason="File too large"):
            _open(tmp_path, rows, encode=lambda _: Encoded({"ids": [1] * (1 << 18)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert _folders(tmp_path) == []
    assert len(_open(tmp_path, rows)) == 3


# Torn folders and several processes


@pytest.mark.parametrize("name", ["meta.json", "ids.ids.npy", "offsets.last.npy", "lengths.npy"])
@pytest.mark.parametrize("tear", [Path.unlink, lambda path: os.truncate(path, 10)])
def test_a_torn_store_is_built_again_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, tear: Any
) -> None:
    tear(_open(tmp_path).folder / name)
    with caplog.at_level(logging.WARNING):
        store = _open(tmp_path)
    assert "is torn" in caplog.text
    assert [store[index]["last"].tolist() for index in range(5)] == [
        _encode(row)["last"] for row in _rows()
    ]


def _open_slowly(cache: Path) -> tuple[int, str, int]:
    calls = 0

    def encode(row: Row) -> Encoded:
        nonlocal calls
        calls += 1
        time.sleep(0.02)
        return _encode(row)

    store = _open(cache, encode=encode)
    return calls, store.digest, store[4]["ids"].tolist()[-1]


def test_processes_that_start_at_once_encode_only_once(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        found = list(pool.map(_open_slowly, [tmp_path] * 4))
    assert sorted(calls for calls, _, _ in found) == [0, 0, 0, 5]
    assert len({(digest, last) for _, digest, last in found}) == 1


def _die_while_encoding(cache: Path) -> None:
    def encode(row: Row) -> Encoded:
        if row["n"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return _encode(row)

    _open(cache, encode=encode)


def test_a_build_that_was_killed_is_invisible_and_does_not_block_the_next(tmp_path: Path) -> None:
    process = get_context("fork").Process(target=_die_while_encoding, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [name[0] for name in _folders(tmp_path)] == ["."]  # only the temporary folder
    assert len(_open(tmp_path)) == 5
    assert [name[0] for name in _folders(tmp_path)] == ["t"]


def test_rows_are_never_all_in_memory(tmp_path: Path) -> None:
    alive = 0

    class Watched(dict[str, Any]):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def rows() -> Iterator[Row]:
        nonlocal alive
        for index in range(50):
            alive += 1
            assert alive <= 3
            yield Watched(text="x", n=index)

    store = open_store(
        rows, _encode, encoding_id="e", split="train", cache_dir=tmp_path, length=_length
    )
    assert len(store) == 50
