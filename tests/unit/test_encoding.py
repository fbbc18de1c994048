"""Rows encoded by several processes: the same bytes, the same errors, and nothing left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.wording import refused
from trainer.data import encoding
from trainer.data.token_store import TokenStore, open_store
from trainer.errors import DataError
from trainer.protocol.task import Encoded, Row

NUM_ROWS = 2500  # more chunks than may wait for two processes
HERE = os.getpid()


def rows() -> Iterator[Row]:
    return ({"number": number, "text": "x" * (number % 7)} for number in range(NUM_ROWS))


def encode(row: Row) -> Encoded:
    ids = [ord(letter) for letter in row["text"]]
    is_long = len(ids) > 4
    fields = {"ids": ids, "number": [row["number"]]}
    return Encoded(fields, is_truncated=is_long, lost_labels=(int(is_long), len(ids)))


def store(folder: Path, num_proc: int | None, encode: Any = encode) -> TokenStore:
    how: dict[str, Any] = {"encoding_id": "e", "split": "train", "cache_dir": folder}
    return open_store(rows, encode, **how, length=lambda row: len(row["ids"]), num_proc=num_proc)


def test_a_store_has_the_same_bytes_however_many_processes_encode(tmp_path: Path) -> None:
    stores = [store(tmp_path / str(num_proc), num_proc) for num_proc in (1, 2, 3)]
    contents = [{file.name: file.read_bytes() for file in made.folder.iterdir()} for made in stores]
    assert contents[0] == contents[1] == contents[2]
    assert stores[2].meta["truncated_rows"] == sum(number % 7 > 4 for number in range(NUM_ROWS))


def test_other_processes_encode_but_the_first_row(tmp_path: Path) -> None:
    made = store(tmp_path, 2, lambda row: Encoded({"ids": [os.getpid()]}))
    pids = {int(made[number]["ids"][0]) for number in range(1, NUM_ROWS)}
    assert int(made[0]["ids"][0]) == HERE
    assert HERE not in pids
    assert 1 <= len(pids) <= 2


def refusing(row: Row) -> Encoded:
    if row["number"] >= 700:
        raise DataError(f"row {row['number']} is bad. Mend it.")
    return encode(row)


@pytest.mark.parametrize("num_proc", [1, 2])
def test_an_error_of_a_row_is_the_same_one_message(num_proc: int, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        store(tmp_path, num_proc, refusing)
    assert str(error.value) == "row 700 is bad. Mend it."
    assert not list((tmp_path / "tokens").glob("train-*v1"))


def killed(row: Row) -> Encoded:
    if row["number"] == 700:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(row)


def test_a_process_that_is_killed_is_told_and_nothing_hangs(tmp_path: Path) -> None:
    with refused("worker_killed", count=2, fix="--num_proc 1"):
        store(tmp_path, 2, killed)


def test_few_rows_take_one_process_and_many_the_cores_that_ranks_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert encoding.usable_processes(encoding.SMALL - 1) == 1
    assert encoding.usable_processes(encoding.SMALL) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert encoding.usable_processes(encoding.SMALL) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert encoding.usable_processes(encoding.SMALL) == 1


@pytest.mark.parametrize("num_proc", [1, 2])
def test_rows_that_are_encoded_many_at_once_give_the_same_store(
    tmp_path: Path, num_proc: int
) -> None:
    sizes: list[int] = []

    def encode_rows(rows: Sequence[Row]) -> list[Encoded]:
        sizes.append(len(rows))
        return [encode(row) for row in rows]

    how: dict[str, Any] = {"encoding_id": "e", "split": "train", "length": lambda _: 1}
    made = [
        open_store(
            rows,
            encode,
            **how,
            cache_dir=tmp_path / str(many is None),
            num_proc=num_proc,
            encode_rows=many,
        )
        for many in (None, encode_rows)
    ]
    assert made[0].digest == made[1].digest
    contents = [{file.name: file.read_bytes() for file in one.folder.iterdir()} for one in made]
    assert contents[0] == contents[1]
    assert num_proc == 2 or max(sizes) == 64
