"""Logs: which lines are shown, and that none of them can drive a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import Unreachable
from jobs.job_state import Observed
from jobs.record import events as record
from jobs.record.paths import Attempt, BaseFolder, RunFolder
from jobs.report import logs
from jobs.report.logs import last_lines, show
from jobs.report.text import COLOUR, CONTROL, visible
from tests.wording import refused

EXP_ID = "a" * 32
EXIT = '{"at": "2026-01-01T00:00:00+00:00", "code": 0}'


class Scheduler:
    """Answers from memory; `states` are given one after the other, the last one for ever."""

    def __init__(
        self, *states: Observed | None, own: Sequence[str] = (), is_reachable: bool = True
    ) -> None:
        self.states, self.own, self.is_reachable = list(states or (None,)), own, is_reachable

    def query(self, ids: Sequence[str]) -> dict[str, Observed]:
        if not self.is_reachable:
            raise Unreachable("the controller does not answer")
        found = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return {} if found is None else {ids[0]: found}

    def logs(self, job_id: str, *, follow: bool) -> Iterator[str]:
        yield from (f"{line}\n" for line in self.own)


def stand_in(*states: Observed | None, **options: Any) -> Any:
    return Scheduler(*states, **options)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = BaseFolder(tmp_path).run(EXP_ID)
    folder.path.mkdir()
    record.create(folder, exp_id=EXP_ID, digest="d", group="g")
    return folder


@pytest.fixture
def attempt(run: RunFolder) -> Attempt:
    return sent(run, 1)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0.01)
    monkeypatch.setattr(logs, "ASK_S", 0.03)


def sent(run: RunFolder, number: int) -> Attempt:
    record.append(
        run, record.intent(number, f"token{number}", name="n", index=None, backend="slurm")
    )
    record.append(
        run, {"event": "submitted", "attempt": number, "id": str(number), "adopted": False}
    )
    attempt = run.attempt(number)
    attempt.folder.mkdir(parents=True)
    return attempt


def later(*steps: Any) -> threading.Thread:
    """Do one thing after the other, 30 ms apart, beside the test."""

    def work() -> None:
        for step in steps:
            time.sleep(0.03)
            step()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


# ---------------------------------------------------------------- what is shown


def test_the_last_attempt_is_shown_unless_another_is_asked_for(
    run: RunFolder, attempt: Attempt
) -> None:
    attempt.logs.write_text("one\n")
    sent(run, 2).logs.write_text("two\n")
    assert list(show(run, None)) == ["two"]
    assert list(show(run, None, attempt=1)) == ["one"]


def test_stderr_is_its_own_file(run: RunFolder, attempt: Attempt) -> None:
    attempt.logs.write_text("out\n")
    attempt.err.write_text("err\n")
    assert list(show(run, None, err=True)) == ["err"]


def test_an_attempt_that_is_not_there_is_an_error_that_names_those_that_are(
    run: RunFolder, attempt: Attempt
) -> None:
    with refused("attempt_unknown", attempt=3, has=1):
        show(run, None, attempt=3)


def test_what_was_never_submitted_has_no_log(run: RunFolder, tmp_path: Path) -> None:
    for folder in (run, RunFolder(tmp_path / ("b" * 32))):
        with refused("never_submitted"):
            show(folder, None)


def test_without_a_file_the_schedulers_own_log_is_shown(run: RunFolder, attempt: Attempt) -> None:
    backend = stand_in(own=["a", "b\x1b[2J", "c"])
    assert list(show(run, backend)) == ["a", "b␛[2J", "c"]
    assert list(show(run, backend, tail=1)) == ["c"]
    assert list(show(run, None)) == []


@pytest.mark.parametrize("tail", [0, 1, 2, 3, 999, 1000, 1001, 5000])
@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_the_tail_is_as_many_lines_as_asked_for(
    run: RunFolder, attempt: Attempt, tail: int, ending: str
) -> None:
    lines = [f"line {number} " + "x" * (number % 97) for number in range(1000)]
    attempt.logs.write_bytes(((ending or "\n").join(lines) + ending).encode())
    assert list(show(run, None, tail=tail)) == lines[max(1000 - tail, 0) :]


def test_the_tail_of_a_long_file_is_read_from_its_end(run: RunFolder, attempt: Attempt) -> None:
    attempt.logs.write_bytes(
        b"x" * 40 + b"\n" + b"y" * 199 + b"\n" * 1 + b"z" * (3 * logs.BLOCK) + b"\nlast\n"
    )
    shown = list(show(run, None, tail=2))
    assert shown[-1] == "last"
    assert len(shown) == 2
    assert list(show(run, None, tail=1)) == ["last"]


def test_a_line_without_end_comes_in_pieces_and_whole(run: RunFolder, attempt: Attempt) -> None:
    attempt.logs.write_bytes(b"z" * (5 * logs.LONGEST_LINE + 7))
    pieces = list(show(run, None))
    assert len(pieces) > 1
    assert "".join(pieces) == "z" * (5 * logs.LONGEST_LINE + 7)


def test_a_progress_bar_is_one_line_for_each_of_its_states(
    run: RunFolder, attempt: Attempt
) -> None:
    attempt.logs.write_bytes(b"\r 10%\r 20%\r\nend\r\n")
    assert list(show(run, None)) == ["", " 10%", " 20%", "end"]


@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_line_ends_that_fall_between_two_reads_are_line_ends(
    run: RunFolder, attempt: Attempt, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(logs, "BLOCK", block)
    attempt.logs.write_text("a\r\nbé\n\rcc\r\n\nd", newline="")
    assert list(show(run, None)) == ["a", "bé", "", "cc", "", "d"]


def test_the_last_lines_for_a_report_are_few_and_without_colours(tmp_path: Path) -> None:
    path = tmp_path / "err.txt"
    assert last_lines(path, 3) == []
    path.write_bytes(b"")
    assert last_lines(path, 3) == []
    path.write_bytes(b"x" * 100 + b"\n" + b"a\n\x1b[31mb\x1b[0m\nc\n\n")
    assert last_lines(path, 3) == ["a", "b", "c"]
    assert last_lines(path, 9, most=8) == ["c"]


# ---------------------------------------------------------------- following


def test_following_ends_with_the_exit_file_and_misses_nothing(
    run: RunFolder, attempt: Attempt
) -> None:
    attempt.logs.write_text("one\ntw")
    thread = later(
        lambda: add(attempt.logs, "o\nthr"),
        lambda: add(attempt.logs, "ee"),
        lambda: attempt.exit.write_text(EXIT),
    )
    assert list(show(run, stand_in(Observed("running")), follow=True)) == ["one", "two", "three"]
    thread.join()


def test_following_shows_the_tail_first(run: RunFolder, attempt: Attempt) -> None:
    attempt.logs.write_text("one\ntwo\nthree\n")
    thread = later(lambda: add(attempt.logs, "four\n"), lambda: attempt.exit.write_text(EXIT))
    assert list(show(run, stand_in(Observed("running")), follow=True, tail=1)) == ["three", "four"]
    thread.join()


def test_a_log_that_appears_later_is_waited_for(run: RunFolder, attempt: Attempt) -> None:
    thread = later(
        lambda: None,
        lambda: attempt.logs.write_text("late\n"),
        lambda: attempt.exit.write_text(EXIT),
    )
    assert list(show(run, stand_in(Observed("queued")), follow=True)) == ["late"]
    thread.join()


def test_a_log_that_is_cut_is_read_again_from_its_start(run: RunFolder, attempt: Attempt) -> None:
    attempt.logs.write_text("a long first line\n")
    thread = later(
        lambda: None,
        lambda: attempt.logs.write_text("new\n"),
        lambda: attempt.exit.write_text(EXIT),
    )
    assert list(show(run, stand_in(Observed("running")), follow=True)) == [
        "a long first line",
        "new",
    ]
    thread.join()


def test_a_log_that_is_replaced_is_read_anew(run: RunFolder, attempt: Attempt) -> None:
    attempt.logs.write_text("old\n")
    other = attempt.folder / "other"
    other.write_text("new and longer than before\n")
    thread = later(
        lambda: None, lambda: other.rename(attempt.logs), lambda: attempt.exit.write_text(EXIT)
    )
    assert list(show(run, stand_in(Observed("running")), follow=True)) == [
        "old",
        "new and longer than before",
    ]
    thread.join()


def test_following_ends_when_the_scheduler_says_that_it_is_over(
    run: RunFolder, attempt: Attempt
) -> None:
    attempt.logs.write_text("one\n")
    states = Observed("running"), Observed("failed", "NODE_FAIL")
    assert list(show(run, stand_in(*states), follow=True)) == ["one"]


def test_following_goes_on_while_the_scheduler_cannot_be_seen(
    run: RunFolder, attempt: Attempt
) -> None:
    attempt.logs.write_text("one\n")
    steps = [lambda: None] * 4
    thread = later(
        *steps, lambda: add(attempt.logs, "two\n"), lambda: attempt.exit.write_text(EXIT)
    )
    assert list(show(run, stand_in(is_reachable=False), follow=True)) == ["one", "two"]
    thread.join()


def test_a_job_on_another_file_system_is_followed_through_its_scheduler(
    run: RunFolder, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "ELSEWHERE_S", 0.02)
    assert list(show(run, stand_in(Observed("running"), own=["from afar"]), follow=True)) == [
        "from afar"
    ]


def test_an_earlier_attempt_is_not_waited_for(run: RunFolder, attempt: Attempt) -> None:
    attempt.logs.write_text("one\n")
    sent(run, 2)
    assert list(show(run, stand_in(Observed("running")), attempt=1, follow=True)) == ["one"]


# ---------------------------------------------------------------- harmless text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext é 日本 🎉", "plain\ttext é 日本 🎉"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("\x1b[2J\x1b[H", "␛[2J␛[H"),
        ("\x9b31m", "\\x9b31m"),
        ("a\x08b\x7f\0", "a␈b␡␀"),
        ("user\u202etxt.exe", "user\\u202etxt.exe"),
        ("\ud83d", "\\ud83d"),
        ("\x1b[8mhidden\x1b[0;08m", "␛[8mhidden␛[0;08m"),
        ("two\nlines\r", "two␊lines␍"),
        ("\x1b[31mred\x1b[0m", "red"),
    ],
)
def test_control_characters_are_made_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_colours_are_kept_where_wanted_and_end_with_the_line() -> None:
    assert visible("\x1b[1;31mred\x1b[2J", keep_colours=True) == "\x1b[1;31mred␛[2J\x1b[0m"


@given(
    text=st.text(
        alphabet=st.one_of(st.sampled_from("\x1b[]0123456789;:mJ\x9b\x07\\"), st.characters())
    )
)
def test_no_text_sends_more_than_colours(text: str) -> None:
    assert not CONTROL.search(visible(text))
    assert not CONTROL.search(COLOUR.sub("", visible(text, keep_colours=True)))
    visible(text).encode()


def test_bytes_that_are_no_text_are_shown_as_what_they_are(
    run: RunFolder, attempt: Attempt
) -> None:
    attempt.logs.write_bytes(b"\xff\xfe\n\x00\n")
    assert list(show(run, None)) == ["\\xff\\xfe", "␀"]
