"""Training rows that are encoded while they are trained on: the same rows in the same order as of a
whole store, whatever the files, and told what is wrong.
"""

from __future__ import annotations

import csv
import gzip
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.wording import refused
from trainer.config.block import validate
from trainer.config.formats.layouts import TEXTS, Layout
from trainer.config.own_rows import OwnRows, Splits
from trainer.data import left_out
from trainer.data.epochs import Epochs
from trainer.data.order import Sharding, Sizes, sizes_of, window_rows
from trainer.data.readers.questions import text_rows
from trainer.data.stream import layout as stream_layout
from trainer.data.stream.chunk import Chunk, ChunkFacts
from trainer.data.stream.lines import line_of
from trainer.data.stream.row_index import open_index
from trainer.data.stream.store import StreamStore
from trainer.data.token_store import TokenStore, store_of
from trainer.errors import DataError
from trainer.protocol.task import Encoded, Row
from trainer.statistics.met_rows import MetRows
from trainer.tasks.fid.config import Data as FidData
from trainer.tasks.retriever.config import Data as RetrieverData

SEED, BATCH = 7, 4


class Data(OwnRows):
    def layout(self) -> Layout | None:
        return TEXTS


class Letters:
    """A task whose tokens are the letters of a text; pieces: of a text longer than `limit`."""

    encodes = 0

    def __init__(self, folder: Path, *, limit: int = 1000, **data: Any) -> None:
        own = Data(stream=True, **data)
        self.cfg = SimpleNamespace(data=own, task="letters")
        self.places = SimpleNamespace(data_path=folder, cache_dir=folder / "cache")
        self.limit = limit

    def rows(self, split: str) -> Iterator[Row]:
        for row in text_rows(self.places.data_path, split, ("text",), self.cfg.data, layout=TEXTS):
            if row["text"] == "drop":
                left_out.note("somewhere", "texts that say drop (left out)")
                continue
            for start in range(0, len(row["text"]), self.limit):
                yield {"text": row["text"][start : start + self.limit]}

    def encode(self, row: Row) -> Encoded:
        if row["text"].startswith("bad"):
            raise DataError(f"{row['text']} cannot be encoded. Mend it.", place="train, line 9")
        if row["text"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return Encoded({"ids": [ord(letter) for letter in row["text"]], "one": [1]})

    def encoding_id(self) -> str:
        return f"letters {self.limit}"

    def length(self, encoded: Mapping[str, Any]) -> int:
        return len(encoded["ids"])


def texts(count: int) -> list[str]:
    return [f"text {number} " + "x" * (number * 7 % 13) for number in range(count)]


def write(folder: Path, values: Sequence[str], name: str = "train.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": value}) + "\n" for value in values)
    (folder / name).write_text(lines)
    return folder


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_layout, "_ROWS", 16)


def streamed(
    task: Any, *, step: int = 0, seed: int | None = SEED, processes: int = 2
) -> StreamStore:
    store = StreamStore(task, open_index(task, task.places.cache_dir), task.places.cache_dir)
    epochs = Epochs(len(store), BATCH, seed)
    place = {"epoch": epochs.epoch(step), "place": epochs.place(step)}
    store.begin(seed=seed, **place, processes=processes)
    return store


def plain(row: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: [int(value) for value in values] for name, values in row.items()}


def every_row(store: TokenStore) -> list[dict[str, list[int]]]:
    return [plain(store[number]) for number in range(len(store))]


def whole(task: Any) -> TokenStore:
    return store_of(task, "train", task.places.cache_dir, num_proc=1)


def test_rows_windows_and_sizes_are_those_of_a_whole_store(tmp_path: Path) -> None:
    task: Any = Letters(write(tmp_path, texts(103)))
    stored, store = whole(task), streamed(task)
    try:
        assert len(store) == len(stored) == 103
        for bucket_steps in (1, 3):
            sharding = Sharding(BATCH, 2, 1, 0, bucket_steps=bucket_steps)
            for step in range(60):  # more than two epochs
                rows = [
                    window_rows(step, lengths=sizes_of(one, task), sharding=sharding, seed=SEED)
                    for one in (stored, store)
                ]
                assert np.array_equal(*rows)
                for number in np.concatenate(rows[1]).tolist():
                    assert plain(store[number]) == plain(stored[number])
        with pytest.raises(IndexError):
            store[103]
    finally:
        store.close()


def test_rows_of_several_axes_and_kinds_are_asked_for_by_number(tmp_path: Path) -> None:
    task: Any = Letters(write(tmp_path, texts(40)))
    store = streamed(task)
    try:
        sizes = Sizes(store.axes(["ids", "one"]), store.numbers("one"))
        rows = np.array([[3, 39], [0, 3]])
        assert sizes.axes_NA[rows][..., 0].tolist() == [
            [len(texts(40)[row]) for row in pair] for pair in rows.tolist()
        ]
        assert sizes.axes_NA[rows].shape == (2, 2, 2)
        assert sizes.kinds_N[rows].tolist() == [[1, 1], [1, 1]]
        assert store.numbers("none")[rows].tolist() == [[0, 0], [0, 0]]
        assert (len(sizes), store.sizes("ids")[rows[0]].tolist()) == (
            40,
            [len(texts(40)[3]), len(texts(40)[39])],
        )
    finally:
        store.close()


def test_what_training_asks_for_first_is_encoded_first(tmp_path: Path) -> None:
    task: Any = Letters(write(tmp_path, texts(400)))
    store = streamed(task, step=40, processes=1)
    try:
        assert store.start_chunk == 10
        store[int(Epochs(400, BATCH, SEED).rows(40)[0])]
        before = store.layout.path(9)
        made = time.monotonic()
        while not before.exists() and time.monotonic() - made < 60:
            time.sleep(0.01)
        assert store.layout.path(10).stat().st_mtime_ns < before.stat().st_mtime_ns
    finally:
        store.close()


def csv_file(folder: Path, values: Sequence[str]) -> None:
    with (folder / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([value] for value in values)])


def parquet_file(folder: Path, values: Sequence[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table({"text": list(values)})
    pa.parquet.write_table(table, folder / "train.parquet", row_group_size=11)  # type: ignore[attr-defined]


def json_list(folder: Path, values: Sequence[str]) -> None:
    (folder / "train.json").write_text(json.dumps([{"text": value} for value in values]))


def packed_file(folder: Path, values: Sequence[str]) -> None:
    lines = "".join(json.dumps({"text": value}) + "\n\n" for value in values)
    (folder / "train.jsonl.gz").write_bytes(gzip.compress(lines.encode()))


def lines_file(folder: Path, values: Sequence[str]) -> None:
    lines = [json.dumps({"text": value}) for value in values]
    lines[3], lines[5] = f"  {lines[3]}", f"\n \r\n{lines[5]}"
    (folder / "train.jsonl").write_text("\ufeff" + "\n".join(lines))


def shards(folder: Path, values: Sequence[str]) -> None:
    (folder / "shards").mkdir()
    write(folder / "shards", values[:30], "b.jsonl")
    for name, part in (("a", values[30:50]), ("c", values[50:])):
        parquet_file(folder / "shards", part)
        (folder / "shards" / "train.parquet").rename(folder / "shards" / f"{name}.parquet")


@pytest.mark.parametrize(
    ("make", "files"),
    [
        (csv_file, None),
        (parquet_file, None),
        (json_list, None),
        (packed_file, None),
        (lines_file, None),
        (lines_file, "train.jsonl[10:50]"),
        (shards, "shards"),
    ],
)
def test_any_kind_of_file_gives_the_rows_of_a_whole_store(
    make: Callable[[Path, Sequence[str]], None], files: str | None, tmp_path: Path
) -> None:
    make(tmp_path, texts(70))
    task: Any = Letters(tmp_path, files=Splits(train=files))
    stored, store = whole(task), streamed(task)
    try:
        assert len(store) == len(stored)
        for number in range(len(stored)):
            assert plain(store[number]) == plain(stored[number])
    finally:
        store.close()


def test_shards_of_a_folder_of_the_hub_are_read_where_they_are(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "set" / "data"
    folder.mkdir(parents=True)
    for number, part in enumerate((texts(60)[:40], texts(60)[40:])):
        parquet_file(folder, part)
        (folder / "train.parquet").rename(folder / f"train-0000{number}-of-00002.parquet")
    task: Any = Letters(tmp_path, dataset="set")
    store = streamed(task)
    try:
        found = [bytes(store[number]["ids"].tolist()).decode() for number in range(60)]
        assert found == texts(60)
    finally:
        store.close()
    with refused("stream_of_hub_id", dataset="somebody/else"):
        open_index(Letters(tmp_path, dataset="somebody/else"), tmp_path / "cache")  # type: ignore[arg-type]


def test_a_killed_start_is_gone_on_with_and_nothing_is_encoded_twice(tmp_path: Path) -> None:
    task: Any = Letters(write(tmp_path, texts(300)))
    store = streamed(task, processes=1)
    assert store._encoder is not None
    (process,) = store._encoder._processes
    store[int(Epochs(300, BATCH, SEED).rows(0)[0])]
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    with refused("stream_worker_killed", code=-9):
        for number in range(300):
            store[number]
    times = {path: path.stat().st_mtime_ns for path in store.folder.glob("*/*.rows")}
    assert times
    again = streamed(task)
    try:
        stored = whole(task)
        for number in range(300):
            assert plain(again[number]) == plain(stored[number])
        assert times == {path: path.stat().st_mtime_ns for path in times}
    finally:
        again.close()


def test_a_chunk_that_somebody_has_removed_is_encoded_again(tmp_path: Path) -> None:
    task: Any = Letters(write(tmp_path, texts(100)))
    store = streamed(task, seed=None, processes=1)
    try:
        assert store._encoder is not None
        for process in store._encoder._processes:
            process.join()
        store.layout.path(3).unlink()
        stored = whole(task)
        assert plain(store[3 * 16]) == plain(stored[3 * 16])
    finally:
        store.close()


def test_a_bad_row_stops_the_run_with_its_own_message_whenever_it_comes(tmp_path: Path) -> None:
    task: Any = Letters(write(tmp_path, [*texts(200), "bad row"]))
    store = streamed(task, seed=None, processes=1)
    with pytest.raises(DataError) as error:
        every_row(store)
    store.close()
    assert str(error.value) == "bad row cannot be encoded. Mend it."
    assert error.value.place == "train, line 9"
    write(tmp_path, texts(201))  # mended
    mended = streamed(task, seed=None)
    try:
        assert plain(mended[200])["ids"] == [ord(letter) for letter in texts(201)[200]]
    finally:
        mended.close()


def test_a_bad_row_that_a_process_has_found_stops_the_run_soon(tmp_path: Path) -> None:
    task: Any = Letters(write(tmp_path, [*texts(200), "bad row"]))
    store = streamed(task, seed=None, processes=1)
    assert plain(store[0])["one"] == [1]
    began = time.monotonic()
    while not (store.folder / "failed.json").exists() and time.monotonic() - began < 60:
        time.sleep(0.01)
    assert store.layout.path(5).exists()
    with pytest.raises(DataError) as error:
        store[5 * 16]
    store.close()
    assert str(error.value) == "bad row cannot be encoded. Mend it."


def judged(task: Any, folder: Path, *, most: float = 0.5, is_strict: bool = False) -> StreamStore:
    write(folder, ["valid", texts(60)[20]], "valid.jsonl")
    valid = store_of(task, "valid", task.places.cache_dir, num_proc=1)
    store = streamed(task)
    store.judge(MetRows(folder, valid, {}, most, is_strict, len(store)))
    return store


def test_what_is_left_out_is_told_when_training_meets_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = texts(60)
    values[5], values[6], values[40] = "drop", "drop", "y" * 25
    task: Any = Letters(write(tmp_path, values), limit=20)
    store = judged(task, tmp_path)
    with caplog.at_level(logging.INFO):
        rows = [bytes(store[number]["ids"].tolist()).decode() for number in range(60)]
        store.close()
    expected = [value[:20] for value in values]
    expected[5] = expected[6] = values[7]  # the next row that can be learnt
    assert rows == expected
    lines = [json.loads(line) for line in (tmp_path / left_out.FILE).read_text().splitlines()]
    said = {line["why"].split(" (")[0] for line in lines}
    assert said == {
        "texts longer than the limit",
        "rows of which nothing can be learnt",
        "texts that say drop",
        "rows that are training rows as well",
    }
    assert "60 of 60 rows met; " in caplog.text
    assert "so far: " in caplog.text


def test_limits_that_cut_too_much_and_strict_stop_the_run(tmp_path: Path) -> None:
    values = ["y" * 40, *texts(20)]
    task: Any = Letters(write(tmp_path / "cut", values), limit=30)
    store = judged(task, tmp_path / "cut", most=0.01)
    with refused("stream_lost_labels", most=0.01):
        for number in range(21):
            store[number]
    store.close()
    task = Letters(write(tmp_path / "strict", ["drop", *texts(20)]))
    store = judged(task, tmp_path / "strict", is_strict=True)
    with refused("strict_refuses", count=1):
        every_row(store)
    store.close()


def test_files_that_changed_have_another_digest_and_are_refused_while_they_are_read(
    tmp_path: Path,
) -> None:
    task: Any = Letters(write(tmp_path, texts(50)))
    index = open_index(task, tmp_path / "cache")
    digest = StreamStore(task, index, tmp_path / "cache").digest
    write(tmp_path, [*texts(50), "one more"])
    with refused("stream_changed", path=tmp_path / "train.jsonl"):
        index.rows([3])
    grown = StreamStore(task, open_index(task, tmp_path / "cache"), tmp_path / "cache")
    assert (len(grown), grown.digest != digest) == (51, True)
    write(tmp_path, texts(50))  # as it was, at another time
    again = StreamStore(task, open_index(task, tmp_path / "cache"), tmp_path / "cache")
    assert (len(again), again.digest) == (50, digest)


class Sorted(Letters):
    """Looks at all rows before it gives the first."""

    def rows(self, split: str) -> Iterator[Row]:
        return iter(sorted(super().rows(split), key=lambda row: row["text"][::-1]))


class Made(Letters):
    """Reads no file."""

    def rows(self, split: str) -> Iterator[Row]:
        return iter([{"text": "made"}])


def test_a_task_that_needs_all_rows_first_is_refused(tmp_path: Path) -> None:
    task: Any = Sorted(write(tmp_path, texts(50)))
    store = StreamStore(task, open_index(task, tmp_path / "cache"), tmp_path / "cache")
    with refused("stream_reads_together", place=f"{tmp_path / 'train.jsonl'}, line 2"):
        store.check_reader()
    fine: Any = Letters(tmp_path)
    StreamStore(fine, open_index(fine, tmp_path / "cache"), tmp_path / "cache").check_reader()
    with refused("stream_of_no_files", task="letters"):
        open_index(Made(tmp_path), tmp_path / "cache")  # type: ignore[arg-type]


def test_facts_of_chunks_add_up(tmp_path: Path) -> None:
    task: Any = Letters(write(tmp_path, texts(40)))
    store = streamed(task)
    try:
        store[0], store[39], store[20]
        total = ChunkFacts()
        for number in range(store.layout.num_chunks):
            store._chunk(number)
            total.add(Chunk(store.layout.path(number)).facts)
        assert (total.rows, total.tokens) == (40, {"ids": sum(map(len, texts(40))), "one": 40})
        assert total.lost_labels == [0, sum(map(len, texts(40)))]
    finally:
        store.close()


def test_blank_lines_are_counted_in_the_numbers_of_lines() -> None:
    # lines: row blank blank row row blank row
    assert [line_of(row, [2, 3, 6]) for row in range(4)] == [1, 4, 5, 7]
    assert [line_of(row, [1]) for row in range(2)] == [2, 3]


def test_keys_that_need_every_row_are_refused_beside_stream() -> None:
    with refused("stream_with_share", share=0.1):
        validate(Data, {"stream": True, "valid_share": 0.1})
    with refused("stream_of_no_rows", source=None):
        validate(OwnRows, {"stream": True})
    with refused("stream_of_no_rows", source="'ranked'"):
        validate(FidData, {"source": "ranked", "contexts": 2, "stream": True})
    with refused("stream_with_keys", keys="corpus"):
        validate(RetrieverData, {"source": "files", "corpus": "corpus.tsv", "stream": True})
