"""The requests of a sampler: each once, and again where the server failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.serve.steps.sampling.sample_log import SampleLog
from trainer.errors import StorageError
from trainer.operations.records import RecordPlace, RecordWriter


def test_what_failed_by_a_fault_of_the_server_is_answered_when_it_is_sent_again(
    tmp_path: Path,
) -> None:
    """A loop that is started again sends its requests again; it would end at the old error."""
    log = SampleLog(tmp_path)
    for seq, category in ((0, "server"), (1, "user")):
        assert log.add(seq, {"prompt": seq}, seed=7)
        log.write(seq, {"error": "it is stuck", "category": category}, b"")
        assert log.add(seq, {"prompt": seq}, seed=9)
    assert [*log.answers] == [1]
    log.write(0, {}, b"tokens")
    assert log.add(0, {"prompt": 0}, seed=9)
    log.close()
    again = SampleLog(tmp_path)
    assert again.answer(0) == ({}, b"tokens")
    assert again.answer(1) == ({"error": "it is stuck", "category": "user"}, b"")
    again.close()


def test_a_log_that_the_disk_refused_to_open_is_opened_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was opened of it is let go, or this server would take itself for another one."""
    whole = RecordWriter.begin

    def refuse(writer: RecordWriter, end: RecordPlace) -> None:
        if writer.files.stem == "answers":
            raise StorageError("no space left")
        whole(writer, end)

    with monkeypatch.context() as patch:
        patch.setattr(RecordWriter, "begin", refuse)
        with pytest.raises(StorageError) as refusal:
            SampleLog(tmp_path)
    log = SampleLog(tmp_path)
    assert log.add(0, {"prompt": 0}, seed=7)
    log.close()
    assert refusal.traceback  # which holds what was opened, as that of a server's log does


def test_an_answer_that_is_asked_for_again_is_not_there(tmp_path: Path) -> None:
    log = SampleLog(tmp_path)
    log.add(0, {"prompt": 0}, seed=7)
    log.write(0, {"error": "it is stuck", "category": "server"}, b"")
    log.add(0, {"prompt": 0}, seed=7)  # while somebody reads the answer
    assert log.answer(0) is None
    log.close()
