"""The requests of a sampler: each once, and again where the server failed."""

from __future__ import annotations

from pathlib import Path

from jobs.serve.steps.sampling.sample_log import SampleLog


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
