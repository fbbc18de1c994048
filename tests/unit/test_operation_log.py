"""The log of operations: whole records or none, in order, once, after every crash."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.wording import refused
from trainer.operations.operation_log import (
    CONTENTS,
    LOG,
    OperationLog,
    OperationReader,
    chain_digest,
    content_digest,
    needless_before,
    note_states,
)
from trainer.operations.records import RecordFiles, RecordPlace, read_record
from trainer.operations.results import OperationResults, ResultWriter
from trainer.operations.rows import DrivenRow, outputs_of, outputs_to_payload, rows_of
from trainer.operations.rows import rows_to_payload as payload_of

PAYLOAD = bytes(range(64))


def filled(folder: Path, count: int, **how: int) -> OperationLog:
    log = OperationLog(folder, **how)
    for seq in range(count):
        log.append("forward_backward", seq, {"loss_fn": "cross_entropy"}, PAYLOAD)
    return log


def test_operations_are_read_as_they_were_written(tmp_path: Path) -> None:
    filled(tmp_path, 3).close()
    log = OperationLog(tmp_path)
    operations = list(log.read())
    assert [one.seq for one in operations] == [0, 1, 2]
    assert {one.payload for one in operations} == {PAYLOAD}
    chain = ""
    for one in operations:
        assert one.content == content_digest(one.seq, one.kind, one.fields, one.payload)
        chain = chain_digest(chain, one.content)
        assert one.chain == chain
    assert (log.chain, log.last_seq) == (chain, 2)
    assert [one.seq for one in log.read(after=1)] == [2]


def test_a_record_torn_at_any_byte_is_not_there_and_is_written_again(tmp_path: Path) -> None:
    filled(tmp_path / "whole", 2).close()
    file = tmp_path / "whole" / "log-000001.bin"
    whole, first_record = file.read_bytes(), read_record(file, RecordPlace(1, 0))
    assert first_record is not None
    start = first_record.end
    folder = tmp_path / "torn"
    folder.mkdir()
    for end in range(start, len(whole)):
        for tail in (b"", b"\0" * (len(whole) - end)):  # a file may be long before its bytes are
            (folder / "log-000001.bin").write_bytes(whole[:end] + tail)
            reader = OperationReader(folder)
            first = reader.next()
            assert first is not None
            assert reader.next() is None
        if end in (start, len(whole) - 1):
            log = OperationLog(folder)
            assert log.last_seq == 0
            log.append("end", 1, {})
            log.close()
            again = reader.next()
            assert again is not None
            assert again.kind == "end"


def test_the_same_operation_again_is_the_first_one(tmp_path: Path) -> None:
    log = filled(tmp_path, 2)
    size = log.size_bytes()
    first = next(log.read())
    assert log.append("forward_backward", 0, {"loss_fn": "cross_entropy"}, PAYLOAD) == first
    assert (log.last_seq, log.size_bytes()) == (1, size)


def test_another_content_and_a_gap_are_refused(tmp_path: Path) -> None:
    log = filled(tmp_path, 2)
    with refused("operation_conflict", seq=1):
        log.append("forward_backward", 1, {"loss_fn": "ppo"}, PAYLOAD)
    with refused("operation_gap", seq=3, last=1):
        log.append("end", 3, {})
    assert log.last_seq == 1


def test_one_process_writes(tmp_path: Path) -> None:
    log = filled(tmp_path, 1)
    with refused("records_held"):
        OperationLog(tmp_path)
    log.close()
    OperationLog(tmp_path).close()


def test_a_reader_follows_over_files(tmp_path: Path) -> None:
    reader = OperationReader(tmp_path)
    assert reader.next() is None
    log = OperationLog(tmp_path, segment_bytes=200)
    for seq in range(5):
        log.append("optim_step", seq, {"learning_rate": 0.1})
        operation = reader.next()
        assert operation is not None
        assert operation.seq == seq
        assert reader.next() is None
    assert len(list(tmp_path.glob("log-*.bin"))) > 2
    late = OperationReader(tmp_path, after=3).next()
    assert late is not None
    assert late.seq == 4


def test_two_readers_see_the_same(tmp_path: Path) -> None:
    log = filled(tmp_path, 4, segment_bytes=400)
    first, second = OperationReader(tmp_path), OperationReader(tmp_path, after=-1)
    assert [first.next() for _ in range(5)] == [second.next() for _ in range(5)]
    log.close()


def test_compaction_drops_whole_files_before_the_second_newest_state(tmp_path: Path) -> None:
    log = filled(tmp_path, 9, segment_bytes=200)  # a record a file
    assert log.compact() == 0
    note_states(tmp_path, [2])
    assert needless_before(tmp_path) == 0
    note_states(tmp_path, [3, 6])
    chain = log.chain
    assert log.compact() > 0
    assert (log.first_seq, log.last_seq) == (4, 8)
    log.close()

    log = OperationLog(tmp_path)
    assert (log.first_seq, log.last_seq, log.chain) == (4, 8, chain)
    assert [one.seq for one in log.read()] == [4, 5, 6, 7, 8]
    assert log.append("forward_backward", 0, {"loss_fn": "cross_entropy"}, PAYLOAD).seq == 0
    with refused("operation_conflict", seq=2):
        log.append("end", 2, {})
    with refused("log_compacted"):
        OperationReader(tmp_path, after=1).next()
    rebuilt, contents = "", (tmp_path / CONTENTS).read_bytes()
    for start in range(0, len(contents), 32):
        rebuilt = chain_digest(rebuilt, contents[start : start + 32].hex())
    for one in log.read():
        rebuilt = chain_digest(rebuilt, one.content)
    assert rebuilt == chain


def test_a_byte_altered_in_the_middle_is_an_error(tmp_path: Path) -> None:
    filled(tmp_path, 4, segment_bytes=200).close()
    path = tmp_path / "log-000002.bin"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    reader = OperationReader(tmp_path)
    assert reader.next()
    with refused("records_altered"):
        reader.next()


def test_a_reader_refuses_a_damaged_record_with_whole_ones_behind_it(tmp_path: Path) -> None:
    filled(tmp_path, 3).close()
    path = tmp_path / "log-000001.bin"
    first = read_record(path, RecordPlace(1, 0))
    assert first is not None
    content = bytearray(path.read_bytes())
    content[first.end + 60] ^= 1
    path.write_bytes(content)
    reader = OperationReader(tmp_path)
    assert reader.next()
    with refused("records_altered"):
        reader.next()


def test_a_file_that_is_dropped_while_a_reader_looks_for_its_place_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, 4, segment_bytes=200).close()  # a record a file
    segments = RecordFiles(tmp_path, LOG).segments()
    (tmp_path / "log-000001.bin").unlink()
    monkeypatch.setattr(RecordFiles, "segments", lambda self: segments)
    operation = OperationReader(tmp_path, after=1).next()
    assert operation is not None
    assert operation.seq == 2


def test_digests_of_dropped_operations_are_whole_where_a_disk_takes_few_bytes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(tmp_path, 5, segment_bytes=200)
    chain, whole = log.chain, os.pwrite
    monkeypatch.setattr("os.pwrite", lambda file, content, offset: whole(file, content[:7], offset))
    assert log.compact(4) > 0
    log.close()
    log = OperationLog(tmp_path)
    assert (log.first_seq, log.chain) == (4, chain)
    assert log.append("forward_backward", 3, {"loss_fn": "cross_entropy"}, PAYLOAD).seq == 3
    log.close()


def test_a_new_file_that_a_disk_refuses_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is durable before an operation in it is acknowledged."""
    log = filled(tmp_path, 1, segment_bytes=200)
    synced: list[Path] = []

    def refuse(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer.operations.records.sync", refuse)
    with refused("disk_full"):
        log.append("end", 1, {})
    monkeypatch.setattr("trainer.operations.records.sync", synced.append)
    log.append("end", 1, {})
    assert synced == [tmp_path]
    assert [one.seq for one in log.read()] == [0, 1]
    log.close()


def test_a_disk_that_refuses_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(tmp_path, 1)

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", refuse)
        with refused("disk_full"):
            log.append("end", 1, {})
    assert (log.last_seq, OperationReader(tmp_path, after=0).next()) == (0, None)
    log.append("end", 1, {})
    assert [one.kind for one in log.read()] == ["forward_backward", "end"]


def test_results_are_followed_and_kept_once(tmp_path: Path) -> None:
    reader = OperationResults(tmp_path)
    assert (reader.follow(), reader.get(0)) == ([], None)
    writer = ResultWriter(tmp_path, segment_bytes=200)
    writer.append(0, {"metrics": {"loss:sum": 0.1}}, PAYLOAD)
    writer.append(1, {"error": "no", "category": "user"})
    assert reader.follow() == [0, 1]
    first, second = reader.get(0), reader.get(1)
    assert first is not None
    assert second is not None
    assert (first.payload, first.fields) == (PAYLOAD, {"metrics": {"loss:sum": 0.1}})
    assert second.error == "no"
    writer.close()

    again = ResultWriter(tmp_path)
    size = again.size_bytes()
    assert again.append(0, {"metrics": {"loss:sum": 0.1}}, PAYLOAD) == first
    assert again.size_bytes() == size
    with refused("replay_differs", seq=0, then=0.1, now=0.2):
        again.append(0, {"metrics": {"loss:sum": 0.2}}, PAYLOAD)
    with refused("result_gap", seq=3):
        again.append(3, {})


def test_rows_come_back_with_their_inputs() -> None:
    rows = [
        DrivenRow(
            np.arange(length, dtype=np.int32),
            {
                "target_tokens": np.arange(2 * length, dtype=np.int64).reshape(length, 2),
                "weights": np.full((length, 2), 0.5, np.float32),
                "advantages": np.ones(length, np.float32),
            },
        )
        for length in (3, 0, 5)
    ]
    payload, inputs = payload_of(rows)
    assert payload == payload_of(rows)[0]
    assert inputs["target_tokens"] == {"trailing": [2]}
    for row, other in zip(rows, rows_of(payload, inputs), strict=True):
        np.testing.assert_array_equal(row.tokens, other.tokens)
        for name, array in row.inputs.items():
            np.testing.assert_array_equal(array, other.inputs[name])
            assert array.dtype == other.inputs[name].dtype
    assert rows_of(*payload_of([])) == []


def test_rows_of_different_kinds_are_refused() -> None:
    one = DrivenRow(np.arange(3), {"weights": np.ones(3, np.float32)})
    with refused("driven_inputs_differ", index=1):
        payload_of([one, DrivenRow(np.arange(3))])
    two = DrivenRow(np.arange(3), {"weights": np.ones((3, 2), np.float32)})
    with refused("driven_axis_differs", index=1, name="weights"):
        payload_of([one, two])
    with refused("payload_unreadable"):
        rows_of(b"no tensors", {})
    none = DrivenRow(np.arange(3), {"target_tokens": np.zeros((3, 0), np.int64)})
    with refused("payload_no_number", name="in.target_tokens"):
        rows_of(*payload_of([none]))


def test_outputs_come_back_by_row() -> None:
    arrays = [np.array([-0.5, -1.0], np.float32), np.zeros(0, np.float32)]
    outputs = outputs_of(outputs_to_payload({"logprobs": arrays}))
    assert [list(row) for row in outputs["logprobs"]] == [[-0.5, -1.0], []]
