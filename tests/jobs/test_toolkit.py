"""jobs/backends/toolkit/backend.py against the stand-in: real processes, lost replies, outages,
rotated tokens, preemption.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jobs.backends.toolkit.backend import Toolkit
from jobs.backends.toolkit.eai import EaiJob, ToolkitReply, parse_jobs
from jobs.errors import Refused, Unreachable
from jobs.job_state import Observed
from jobs.protocol import Rendered
from tests.jobs.toolkit_standin import Standin, standin
from tests.jobs.toolkit_standin.specs import TOKEN, UNKNOWN_ID, spec
from tests.wording import refused


@pytest.fixture
def service() -> Iterator[Standin]:
    with standin(kill_after_s=0.3) as running:
        yield running


@pytest.fixture
def backend(service: Standin) -> Toolkit:
    return Toolkit(retry_s=2)


def sent(backend: Toolkit, tmp_path: Path, *command: str, **keys: Any) -> str:
    return backend.submit(backend.render(spec(tmp_path, *command, **keys)))


def until(backend: Toolkit, job_id: str, wanted: Callable[[Observed], bool]) -> Observed:
    end = time.monotonic() + 120
    while not wanted(seen := backend.query([job_id])[job_id]):
        assert time.monotonic() < end, seen
        time.sleep(0.02)
    return seen


def in_state(state: str) -> Callable[[Observed], bool]:
    return lambda seen: seen.state == state


# submit, find


def test_a_job_runs_where_and_how_it_was_sent(
    service: Standin, backend: Toolkit, tmp_path: Path
) -> None:
    code = (
        "import os, sys; open('seen', 'w').write(repr((sys.argv[1:], os.environ['A'], "
        "'EAI_STANDIN' in os.environ)))"
    )
    words = [
        "a b",
        "; touch injected",
        "$(touch injected)",
        "`touch injected`",
        "-x",
        "--",
        "'",
        '"',
        "\n",
        "é",
    ]
    job_id = sent(
        backend,
        tmp_path,
        sys.executable,
        "-c",
        code,
        *words,
        environment={"A": "$HOME; touch injected"},
    )
    assert until(backend, job_id, in_state("succeeded")).exit_code == 0
    assert (tmp_path / "seen").read_text() == repr((words, "$HOME; touch injected", False))
    assert not (tmp_path / "injected").exists()


def test_a_group_with_strange_letters_is_still_a_tag(
    service: Standin, backend: Toolkit, tmp_path: Path
) -> None:
    assert sent(backend, tmp_path, "true", group="--evil name\n=;$(x)")
    assert backend.list_jobs("--tag", "group=--evil_name_____x_")


def test_a_lost_reply_is_no_refusal_and_the_job_is_found_by_its_name(
    service: Standin, backend: Toolkit, tmp_path: Path
) -> None:
    service.lose_next_create()
    with refused("submission_unknown", reason=re.compile(".*EOF")):
        sent(backend, tmp_path, "true")
    (found,) = backend.find(TOKEN)
    assert backend.query([found])


def test_a_submission_is_tried_once(service: Standin, backend: Toolkit, tmp_path: Path) -> None:
    service.fail_next(1)
    with refused("submission_unknown", reason=re.compile(".*502.*")):
        sent(backend, tmp_path, "true")
    assert service.stats()["created"] == 0
    assert backend.find(TOKEN) == []
    assert sent(backend, tmp_path, "true")


def test_the_same_job_sent_twice_is_one_job(
    service: Standin, backend: Toolkit, tmp_path: Path
) -> None:
    rendered = backend.render(spec(tmp_path, "true"))
    first = backend.submit(rendered)
    until(backend, first, in_state("succeeded"))
    assert backend.submit(rendered) == first  # the name of a dead job is still taken
    assert service.stats() | {"clashes": 0} == service.stats() | {
        "created": 1,
        "starts": {TOKEN: 1},
        "clashes": 0,
    }


def test_submitters_at_once_make_one_job(
    service: Standin, backend: Toolkit, tmp_path: Path
) -> None:
    rendered = backend.render(spec(tmp_path, "sleep", "60"))
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(lambda _: backend.submit(rendered), range(4)))
    assert len(set(ids)) == 1
    assert service.stats()["created"] == 1


def test_nothing_is_lost_or_doubled_when_half_of_the_replies_are(
    service: Standin, backend: Toolkit, tmp_path: Path
) -> None:
    service.lose_fraction(0.5, seed=1)
    renderings = [backend.render(spec(tmp_path, "true", token=f"ft_{n}")) for n in range(8)]

    def settled(rendered: Rendered) -> str:
        while True:
            if found := backend.find(rendered.token):
                return found[0]
            try:
                return backend.submit(rendered)
            except Unreachable:
                continue

    ids = [settled(rendered) for rendered in renderings]
    for job_id in ids:
        until(backend, job_id, in_state("succeeded"))
    stats = service.stats()
    assert (stats["created"], set(stats["starts"].values())) == (8, {1})
    assert stats["lost"] > 0


def test_a_job_is_found_by_its_whole_name_only(
    service: Standin, backend: Toolkit, tmp_path: Path
) -> None:
    """-N lists every name that holds the text."""
    first = sent(backend, tmp_path, "true", token="ft_a_1")
    sent(backend, tmp_path, "true", token="ft_a_11")
    assert backend.find("ft_a_1") == [first]
    assert backend.find("ft_a") == []


def test_what_the_service_refuses_is_refused_in_its_words(
    service: Standin, backend: Toolkit, tmp_path: Path
) -> None:
    with refused("scheduler_says", Refused, words="at most 8 GPUs"):
        sent(backend, tmp_path, "true", resources={"gpu": 9})


def test_an_option_that_eai_does_not_know_is_refused_or_unknown_but_never_sent(
    service: Standin, backend: Toolkit, tmp_path: Path
) -> None:
    rendered = backend.render(spec(tmp_path, "true"))
    bad = Rendered(
        rendered.token,
        rendered.file,
        rendered.text,
        (*rendered.argv[:3], "--no-such", *rendered.argv[3:]),
    )
    with refused("scheduler_says", words="no-such"):
        backend.submit(bad)
    assert service.stats()["created"] == 0


def test_without_eai_nothing_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    backend = Toolkit(retry_s=0)
    with refused("eai_not_run", Refused):
        sent(backend, tmp_path, "true")
    with refused("eai_not_run", Unreachable):
        backend.find(TOKEN)
    (finding,) = backend.check()
    assert not finding.is_good


# query


def test_a_failure_tells_its_exit_code(service: Standin, backend: Toolkit, tmp_path: Path) -> None:
    seen = until(backend, sent(backend, tmp_path, "sh", "-c", "exit 3"), in_state("failed"))
    assert (seen.exit_code, seen.reason) == (3, "FAILED")


def test_a_job_waits_then_runs(service: Standin, backend: Toolkit, tmp_path: Path) -> None:
    service.queue_delay(60)
    job_id = sent(backend, tmp_path, "sleep", "60")
    assert backend.query([job_id])[job_id].state == "queued"
    service.queue_delay(0)
    until(backend, job_id, in_state("running"))


def test_many_jobs_are_asked_for_at_once(
    service: Standin, backend: Toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [sent(backend, tmp_path, "true", token=f"ft_{n}") for n in range(5)]
    read = backend._read

    def read_no_single_job(*words: str) -> ToolkitReply:
        assert words[:2] != ("job", "get")
        return read(*words)

    monkeypatch.setattr(backend, "_read", read_no_single_job)
    assert set(backend.query(ids)) == set(ids)


@pytest.mark.parametrize("others", [0, 5])
def test_an_id_that_the_service_does_not_know_is_left_out(
    service: Standin, backend: Toolkit, tmp_path: Path, others: int
) -> None:
    ids = [sent(backend, tmp_path, "true", token=f"ft_{n}") for n in range(others)]
    assert set(backend.query([*ids, UNKNOWN_ID])) == set(ids)


def test_a_restartable_job_that_is_preempted_runs_again_under_the_same_id(
    service: Standin, backend: Toolkit, tmp_path: Path
) -> None:
    script = "echo $EAI_RUN_INDEX; test -e again && exit 0; touch again; exec sleep 60"
    job_id = sent(backend, tmp_path, "sh", "-c", script, restartable=True)
    until(backend, job_id, in_state("running"))
    wait_for(tmp_path / "again")
    service.preempt(job_id)
    seen = until(backend, job_id, in_state("succeeded"))
    assert seen.restarts == 1
    assert list(backend.logs(job_id, follow=False)) == ["0", "1"]


def test_a_job_that_is_preempted_for_good_asks_to_be_sent_again(
    service: Standin, backend: Toolkit, tmp_path: Path
) -> None:
    job_id = sent(backend, tmp_path, "sleep", "60", preemptable=True)
    until(backend, job_id, in_state("running"))
    service.preempt(job_id)
    seen = until(backend, job_id, in_state("preempted"))
    assert (seen.will_rerun, seen.reason) == (False, "INTERRUPTED")


@pytest.mark.parametrize(
    ("shown", "state", "will_rerun"),
    [
        ({"state": "INTERRUPTED", "restartable": True}, "preempted", True),
        ({"state": "INTERRUPTED", "tags": ["a=b", "restartable=yes"]}, "preempted", True),
        ({"state": "INTERRUPTED", "tags": {"restartable": "yes"}}, "preempted", True),
        ({"state": "INTERRUPTED"}, "preempted", False),
        ({"state": "CANCELLING"}, "running", False),
        ({"state": "UNKNOWN"}, "queued", False),
        ({"state": "UNKNOWN", "runs": [{}]}, "running", False),
        ({"state": "A_NEW_ONE", "runs": [{"exitCode": 1}]}, "running", False),
        ({}, "queued", False),
    ],
)
def test_a_state_that_says_nothing_is_never_a_failure(
    shown: dict[str, Any], state: str, will_rerun: bool
) -> None:
    seen = EaiJob.of({"id": UNKNOWN_ID, **shown}).observe()
    assert (seen.state, seen.will_rerun, seen.exit_code) == (state, will_rerun, None)


@pytest.mark.parametrize("text", ["[1]", "{}", "id state", '{"id": "x"}\nrubbish'])
def test_an_answer_that_is_not_understood_says_nothing(text: str) -> None:
    with refused("toolkit_answer"):
        parse_jobs(text, "eai job ls")


def test_an_answer_may_be_lines_or_one_array_of_objects() -> None:
    for text in (
        '{"id": "a"}\n{"id": "b"}\n',
        '[\n {"id": "a"},\n {"id": "b"}\n]',
        '[{"id": "a"}, {"id": "b"}]',
    ):
        assert [item.id for item in parse_jobs(text, "")] == ["a", "b"]


# The control plane


def test_reading_outlives_an_outage(service: Standin, backend: Toolkit, tmp_path: Path) -> None:
    job_id = sent(backend, tmp_path, "true")
    service.fail_next(2)
    assert backend.query([job_id])
    assert service.stats()["failed"] == 2


def test_reading_outlives_a_rotated_token(service: Standin, tmp_path: Path) -> None:
    backend = Toolkit(retry_s=10)
    job_id = sent(backend, tmp_path, "true")
    service.rotate_token(window_s=0.8)
    assert backend.query([job_id])
    assert service.stats()["unauthorised"] > 0


def test_sending_with_a_rotated_token_leaves_it_open(
    service: Standin, backend: Toolkit, tmp_path: Path
) -> None:
    service.rotate_token(window_s=60)
    with refused("scheduler_says", Unreachable, words="token is invalid"):
        sent(backend, tmp_path, "true")


def test_an_outage_that_lasts_makes_no_statement_about_a_job(
    service: Standin, tmp_path: Path
) -> None:
    backend = Toolkit(retry_s=0.2)
    service.fail_next(1000)
    for look in (
        lambda: backend.query([UNKNOWN_ID]),
        lambda: backend.find(TOKEN),
        lambda: backend.cancel(UNKNOWN_ID),
    ):
        with refused("toolkit_tried", reason=re.compile(".*502.*")):
            look()


def test_a_server_that_is_gone_is_unreachable(tmp_path: Path) -> None:
    with standin() as service, pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAI_STANDIN", "http://127.0.0.1:9")
        with refused("toolkit_tried", reason=re.compile(".*dial tcp.*")):
            Toolkit(retry_s=0.1).find(TOKEN)
        assert service.stats()["created"] == 0


def test_how_long_to_retry_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATHE_EAI_RETRY_S", "7")
    assert (Toolkit().retry_s, Toolkit(retry_s=1).retry_s) == (7, 1)


# cancel, logs, check


BEATS = "trap '' TERM; (trap '' TERM; while :; do date +%s%N > beat; sleep 0.05; done) & wait"


def wait_for(path: Path) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)


def is_still(path: Path) -> bool:
    before = path.read_text()
    time.sleep(0.3)
    return path.read_text() == before


def test_a_running_job_is_cancelled_with_all_its_processes(
    service: Standin, backend: Toolkit, tmp_path: Path
) -> None:
    job_id = sent(backend, tmp_path, "sh", "-c", BEATS)
    wait_for(tmp_path / "beat")
    backend.cancel(job_id)
    until(backend, job_id, in_state("cancelled"))
    assert is_still(tmp_path / "beat")


def test_a_job_that_is_about_to_end_is_not_cancelled_yet(tmp_path: Path) -> None:
    with standin(kill_after_s=60):
        backend = Toolkit(retry_s=2)
        job_id = sent(backend, tmp_path, "sh", "-c", BEATS)
        wait_for(tmp_path / "beat")
        backend.cancel(job_id)
        assert backend.query([job_id])[job_id] == Observed("running", "CANCELLING")
        backend.cancel(job_id)  # once more is fine


def test_to_cancel_a_job_that_has_ended_or_never_was_is_fine(
    service: Standin, backend: Toolkit, tmp_path: Path
) -> None:
    job_id = sent(backend, tmp_path, "true")
    until(backend, job_id, in_state("succeeded"))
    backend.cancel(job_id)
    backend.cancel(UNKNOWN_ID)
    assert backend.query([job_id])[job_id].state == "succeeded"


def test_logs_can_be_followed_to_the_end(
    service: Standin, backend: Toolkit, tmp_path: Path
) -> None:
    job_id = sent(backend, tmp_path, "sh", "-c", "echo one; sleep 0.2; echo two >&2")
    assert list(backend.logs(job_id, follow=True)) == ["one", "two"]
    assert list(backend.logs(job_id, follow=False)) == ["one", "two"]


def test_following_may_be_broken_off(service: Standin, backend: Toolkit, tmp_path: Path) -> None:
    lines = backend.logs(sent(backend, tmp_path, "sh", "-c", "echo one; sleep 60"), follow=True)
    assert next(lines) == "one"
    lines.close()  # type: ignore[attr-defined]


def test_an_unknown_job_has_no_logs(service: Standin, backend: Toolkit) -> None:
    assert [list(backend.logs(UNKNOWN_ID, follow=follow)) for follow in (False, True)] == [[], []]


def test_the_doctor_looks_at_command_login_and_account_and_shows_no_token(
    service: Standin, backend: Toolkit
) -> None:
    findings = backend.check()
    assert [(found.name, found.is_good) for found in findings] == [
        ("eai", True),
        ("login", True),
        ("account", True),
    ]
    assert "lathe.tests" in findings[2].text
    assert "Bearer" not in "".join(found.text for found in findings)


def test_the_doctor_says_what_an_outage_said(service: Standin, backend: Toolkit) -> None:
    service.fail_next(1)
    assert backend.check()[2].text.startswith("error: http: 502")


# The stand-in itself


def test_the_stand_in_as_a_process_of_its_own_ends_with_its_jobs(tmp_path: Path) -> None:
    with standin(own_process=True, gpus=1) as service:
        sent(Toolkit(retry_s=1), tmp_path, "sh", "-c", BEATS, resources={"gpu": 1})
        wait_for(tmp_path / "beat")
        assert service.stats()["created"] == 1
    assert is_still(tmp_path / "beat")


def test_a_higher_bid_starts_first_on_the_only_gpu(tmp_path: Path) -> None:
    with standin(gpus=1):
        backend = Toolkit(retry_s=1)
        for token, bid in (("first", 0), ("low", 1), ("high", 2)):
            script = f"echo {token} >> order; until test -e go; do sleep 0.05; done; touch {token}"
            sent(backend, tmp_path, "sh", "-c", script, token=token, bid=bid, resources={"gpu": 1})
        (tmp_path / "go").touch()
        wait_for(tmp_path / "low")
    assert (tmp_path / "order").read_text().split() == ["first", "high", "low"]
