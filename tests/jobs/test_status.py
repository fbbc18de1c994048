"""The survey: what status says of experiments, what it writes down, and what it never does."""

from __future__ import annotations

import cProfile
import io
import json
import os
import pstats
import socket
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jobs.errors import Unreachable
from jobs.job_state import STATES, JobState, Observed
from jobs.record import events as record
from jobs.record.by_hand import training_now
from jobs.record.metrics import last_metrics
from jobs.record.paths import BaseFolder, RunFolder
from jobs.record.row import Row
from jobs.record.state_table import DEFAULT_REASONS
from jobs.record.status import record_state, survey
from jobs.record.verdict import AttemptFiles
from jobs.report import table
from jobs.report.html import report
from jobs.report.scores import gather, refused_lines
from jobs.report.text import duration
from jobs.serve.live.cards import run_card
from tests.facts import EVENT
from trainer.files import survival_events as events
from trainer.runtime import process

IDS = [f"{number:032x}" for number in range(1, 8)]


class Scheduler:
    """Answers `query` from memory, and counts what it was asked."""

    def __init__(
        self, known: dict[str, Observed] | None = None, *, is_reachable: bool = True
    ) -> None:
        self.known, self.is_reachable = known or {}, is_reachable
        self.questions: list[list[str]] = []

    def query(self, ids: Sequence[str]) -> dict[str, Observed]:
        self.questions.append(list(ids))
        if not self.is_reachable:
            raise Unreachable("the controller does not answer")
        return {each: self.known[each] for each in ids if each in self.known}

    def __call__(self, name: str) -> Any:
        return self


def at(hours_ago: float) -> str:
    return (datetime.now(timezone.utc) - timedelta(hours=hours_ago)).isoformat(
        timespec="milliseconds"
    )


def submitted(
    base: BaseFolder, exp_id: str, job_id: str, *, attempt: int = 1, group: str = "g"
) -> RunFolder:
    folder = base.run(exp_id)
    folder.path.mkdir(parents=True, exist_ok=True)
    if not folder.record.exists():
        record.create(folder, exp_id=exp_id, digest="d" * 64, group=group)
    token = f"ft_{exp_id[:12]}_abcdef_{attempt}"
    record.append(folder, record.intent(attempt, token, name=token, index=None, backend="slurm"))
    record.append(
        folder, {"event": "submitted", "attempt": attempt, "id": job_id, "adopted": False}
    )
    return folder


def write(path: Path, values: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def started(
    folder: RunFolder, hours_ago: float, *, attempt: int = 1, start: int = 1, gpus: int = 2
) -> None:
    files = folder.attempt(attempt)
    write(files.spec, {"job": {"nodes": 2, "resources": {"gpu": gpus}}})
    write(
        files.start_file(start),
        {"at": at(hours_ago), "host": f"node-{start}", "id": "7", "restarts": start - 1},
    )
    write(files.heartbeat, {"at": at(0), "step": 1})


def ended(
    folder: RunFolder,
    hours_ago: float,
    code: int,
    *,
    attempt: int = 1,
    start: int = 1,
    name: str = "exit",
) -> None:
    facts = {
        "at": at(hours_ago),
        "code": code,
        "kind": "failed",
        "reason": f"exit code {code}",
        "start": start,
    }
    write(folder.attempt(attempt).folder / f"{name}.json", facts)


def trained(
    folder: RunFolder, lines: Sequence[dict[str, Any]], *, step: int, total: int = 100
) -> None:
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write(
        folder.status,
        {"state": "running", "step": step, "total": total, "host": "n", "updated_at": at(0)},
    )


@pytest.fixture
def base(tmp_path: Path) -> BaseFolder:
    return BaseFolder(tmp_path / "results")


def only_row(base: BaseFolder, scheduler: Scheduler, **options: Any) -> Row:
    (row,) = survey(base, backend_of=scheduler, **options)
    return row


# ---------------------------------------------------------------- the survey


def test_a_base_folder_that_does_not_exist_has_no_experiments(base: BaseFolder) -> None:
    assert survey(base, backend_of=Scheduler(), include_unsubmitted=True) == []


def test_one_question_is_asked_about_all_jobs_of_a_backend(base: BaseFolder) -> None:
    for number, exp_id in enumerate(IDS):
        submitted(base, exp_id, str(number))
    scheduler = Scheduler(
        {str(number): Observed("queued", "Priority") for number in range(len(IDS))}
    )
    rows = survey(base, backend_of=scheduler)
    assert [(row.state, row.reason) for row in rows] == [("queued", "Priority")] * len(IDS)
    assert [sorted(asked) for asked in scheduler.questions] == [
        [str(number) for number in range(len(IDS))]
    ]


def test_an_experiment_that_has_ended_is_not_asked_about(base: BaseFolder) -> None:
    folder = submitted(base, IDS[0], "7")
    started(folder, 1)
    ended(folder, 0.5, 0)
    scheduler = Scheduler()
    assert only_row(base, scheduler).state == "succeeded"
    assert scheduler.questions == []


def test_a_job_whose_id_was_lost_and_that_has_ended_says_it_itself(base: BaseFolder) -> None:
    folder = base.run(IDS[0])
    folder.path.mkdir(parents=True)
    record.create(folder, exp_id=IDS[0], digest="d", group="g")
    record.append(folder, record.intent(1, "token", name="n", index=None, backend="fake"))
    started(folder, 1)
    ended(folder, 0.5, 0)
    path = folder.attempt(1).exit
    write(path, json.loads(path.read_text()) | {"id": "71"})
    row = only_row(base, Scheduler())
    assert (row.state, row.job_id) == ("succeeded", "71")


def test_a_failure_is_asked_about_until_its_cause_is_on_record(base: BaseFolder) -> None:
    folder = submitted(base, IDS[0], "7")
    started(folder, 1)
    ended(folder, 0.5, 1)
    scheduler = Scheduler({"7": Observed("oom", "killed by the kernel: raise resources.mem")})
    assert [only_row(base, scheduler).state for _ in range(3)] == ["oom"] * 3
    assert len(scheduler.questions) == 1


def test_only_the_wanted_experiments_are_looked_at(base: BaseFolder) -> None:
    for number, exp_id in enumerate(IDS):
        submitted(base, exp_id, str(number))
    scheduler = Scheduler()
    rows = survey(base, only=[IDS[3], "f" * 32], backend_of=scheduler)
    assert [row.exp_id for row in rows] == [IDS[3]]
    assert scheduler.questions == [["3"]]


def test_a_changed_state_is_recorded_once(base: BaseFolder) -> None:
    folder = submitted(base, IDS[0], "7")
    scheduler = Scheduler({"7": Observed("running", host="node-3")})
    for _ in range(3):
        survey(base, backend_of=scheduler)
    events = [json.loads(line) for line in folder.record.read_text().splitlines()]
    assert [event["state"] for event in events if event["event"] == "observed"] == ["running"]
    job = record.read(folder)
    assert job is not None
    assert (job.state, job.last and job.last.host) == ("running", "node-3")


def test_a_look_without_record_changes_nothing_on_the_disk(base: BaseFolder) -> None:
    folder = submitted(base, IDS[0], "7")
    before = folder.record.read_bytes()
    assert (
        only_row(base, Scheduler({"7": Observed("running")}), record_changes=False).state
        == "running"
    )
    assert folder.record.read_bytes() == before


def test_a_folder_that_another_process_decides_about_is_shown_but_not_written(
    base: BaseFolder,
) -> None:
    folder = submitted(base, IDS[0], "7")
    before = folder.record.read_bytes()
    with record.lock(folder, wait_s=0):
        assert only_row(base, Scheduler({"7": Observed("running")})).state == "running"
    assert folder.record.read_bytes() == before


def test_a_record_that_has_moved_on_meanwhile_is_not_written(base: BaseFolder) -> None:
    folder = submitted(base, IDS[0], "7")

    class Slow(Scheduler):
        def query(self, ids: Sequence[str]) -> dict[str, Observed]:
            submitted(
                base, IDS[0], "8", attempt=2
            )  # another process submits while the scheduler thinks
            return {"7": Observed("failed")}

    survey(base, backend_of=Slow())
    job = record.read(folder)
    assert job is not None
    assert [sent.state for sent in job.attempts] == ["submitted", "submitted"]


def test_a_scheduler_that_cannot_be_seen_changes_no_state(base: BaseFolder) -> None:
    folder = submitted(base, IDS[0], "7")
    assert only_row(base, Scheduler({"7": Observed("held")})).state == "held"
    rows = [only_row(base, Scheduler(is_reachable=False)) for _ in range(2)]
    assert [row.state for row in rows] == ["held", "held"]
    assert rows[1].unseen_reason == "the controller does not answer"
    job = record.read(folder)
    assert job is not None
    assert rows[1].unseen_since == job.unseen_since is not None
    assert only_row(base, Scheduler({"7": Observed("held")})).unseen_since is None
    kinds = [json.loads(line)["event"] for line in folder.record.read_text().splitlines()]
    assert kinds == ["created", "intent", "submitted", "observed", "unseen", "seen"]


def test_a_job_that_still_waits_is_seen_anew_each_time_and_not_written_down(
    base: BaseFolder,
) -> None:
    folder = submitted(base, IDS[0], "7")
    before = folder.record.read_bytes()
    assert only_row(base, Scheduler({"7": Observed("queued")})).state == "queued"
    assert folder.record.read_bytes() == before


def test_a_preempted_start_is_not_called_ended_while_its_scheduler_cannot_be_seen(
    base: BaseFolder,
) -> None:
    folder = submitted(base, IDS[0], "7")
    started(folder, 1)
    assert only_row(base, Scheduler({"7": Observed("running")})).state == "running"
    ended(folder, 0.5, 75)
    assert only_row(base, Scheduler(is_reachable=False)).state == "running"
    assert only_row(base, Scheduler()).state == "preempted"


def test_one_folder_that_cannot_be_read_does_not_hide_the_others(base: BaseFolder) -> None:
    submitted(base, IDS[0], "7")
    base.run(IDS[1]).record.mkdir(parents=True)  # a record that is no file
    submitted(base, IDS[2], "8").record.write_text(
        '{"event": "created"}\n'
    )  # and one that lacks its facts
    rows = {
        row.exp_id: row for row in survey(base, backend_of=Scheduler({"7": Observed("queued")}))
    }
    assert rows[IDS[0]].state == "queued"
    assert [rows[each].state for each in IDS[1:3]] == ["held", "held"]
    assert "cannot be read" in (rows[IDS[1]].reason or "")


def test_a_run_that_lost_ranks_says_so_in_every_view(base: BaseFolder) -> None:
    folder = base.run(IDS[0])
    write(folder.exp_dict, {"task": "t"})
    trained(folder, [{"step": 10, "loss": 2.5}], step=5)
    for _ in range(2):
        events.add(folder.path, EVENT)
    row = only_row(base, Scheduler(), include_unsubmitted=True)
    assert table.as_json([row])[0]["recoveries"] == (EVENT, EVENT)
    assert "2 recoveries" in printed([row], 120)
    html = report(base, [row], gather(base))
    assert html.count("rank 1 ended by SIGKILL, at step 6: on from step 5 (memory)") == 2
    assert run_card(row, {}, {})["recoveries"] == 2


def test_what_was_run_by_hand_appears_when_asked_for(base: BaseFolder) -> None:
    folder = base.run(IDS[0])
    write(folder.exp_dict, {"task": "t"})
    trained(folder, [{"step": 10, "loss": 2.5, "step_s": 2.0}], step=5)
    assert survey(base, backend_of=Scheduler()) == []
    row = only_row(base, Scheduler(), include_unsubmitted=True)
    assert (row.state, row.step, row.metrics["loss"], row.eta_s) == ("running", 10, 2.5, 180.0)
    write(folder.status, {"state": "running", "step": 5, "total": 100, "updated_at": at(1)})
    assert (
        only_row(base, Scheduler(), include_unsubmitted=True).reason == "no sign of life for 60 min"
    )


def test_what_haven_alone_has_sent_is_known_by_its_id_until_it_trains(base: BaseFolder) -> None:
    folder = base.run(IDS[0])
    write(folder.exp_dict, {"task": "t"})
    write(folder.job_dict, {"job_id": 77, "command": "python launch.py"})
    row = only_row(base, Scheduler(), include_unsubmitted=True)
    assert (row.state, row.job_id, row.by_hand) == ("submitted", "77", True)
    trained(folder, [{"step": 10, "loss": 2.5}], step=5)
    assert only_row(base, Scheduler(), include_unsubmitted=True).state == "running"


@pytest.mark.parametrize(
    ("changes", "hours_ago", "expected"),
    [
        ({}, 0, ("running", None)),
        (
            {},
            1,
            ("running", f"its process, {os.getpid()} on {socket.gethostname()}, lives; no sign"),
        ),
        ({"birth": "x"}, 0, ("lost", "was started anew since")),
        ({"birth": f"{process.birth(1)}0"}, 0, ("lost", "is gone, and it left no outcome")),
        ({"host": "elsewhere"}, 0, ("running", None)),
        ({"host": "elsewhere"}, 1, ("running", "no sign of life for 60 min")),
        ({"namespace": "pid:[1]"}, 1, ("running", "no sign of life for 60 min")),
    ],
)
def test_what_was_run_by_hand_is_lost_when_its_process_is_known_to_be_gone(
    base: BaseFolder, changes: dict[str, str], hours_ago: float, expected: tuple[str, str | None]
) -> None:
    folder = base.run(IDS[0])
    write(folder.exp_dict, {"task": "t"})
    facts = {**process.facts(), **changes}
    write(folder.status, {"state": "running", "updated_at": at(hours_ago), "process": facts})
    row = only_row(base, Scheduler(), include_unsubmitted=True)
    assert (row.state, row.by_hand, row.history) == (expected[0], True, ())
    assert (row.reason is None) if expected[1] is None else (expected[1] in str(row.reason))


@pytest.mark.parametrize(
    ("changes", "hours_ago", "by_hand", "after_a_job"),
    [
        ({}, 0, True, True),
        ({}, 1, True, True),
        ({"birth": f"{process.birth(1)}0"}, 0, False, False),
        ({"birth": "x"}, 0, False, False),
        ({"host": "elsewhere"}, 0, True, False),  # a job that was killed leaves the same behind
        ({"host": "elsewhere"}, 1, False, False),
    ],
)
def test_a_training_that_may_run_now_is_not_joined_by_another(
    base: BaseFolder,
    changes: dict[str, str],
    hours_ago: float,
    by_hand: bool,
    after_a_job: bool,
) -> None:
    folder = base.run(IDS[0])
    facts = {**process.facts(), **changes}
    write(folder.status, {"state": "running", "updated_at": at(hours_ago), "process": facts})
    told = [training_now(folder, was_sent=was_sent) is not None for was_sent in (False, True)]
    assert told == [by_hand, after_a_job]


def test_gpu_hours_count_every_start_of_every_attempt(base: BaseFolder) -> None:
    folder = submitted(base, IDS[0], "7")
    started(folder, 10, start=1)
    ended(folder, 9, 75, start=1, name="exit-1")  # 1 h
    started(folder, 8, start=2)
    ended(folder, 6, 75, start=2)  # 2 h, then a new attempt
    submitted(base, IDS[0], "8", attempt=2)
    started(folder, 0.5, attempt=2)  # runs since half an hour
    row = only_row(base, Scheduler({"8": Observed("running")}))
    assert row.gpu_hours == pytest.approx((1 + 2 + 0.5) * 4, abs=0.01)  # two nodes of two GPUs
    assert (row.attempts, row.attempt, row.job_id, row.started_at) == (
        2,
        2,
        "8",
        row.starts[-1].began_at,
    )
    assert [start.code for start in row.starts] == [75, 75, None]


def test_reruns_by_the_scheduler_and_preempted_attempts_are_counted(base: BaseFolder) -> None:
    folder = submitted(base, IDS[0], "7")
    started(folder, 3, start=1)
    ended(folder, 2, 75, start=1, name="exit-1")
    started(folder, 1, start=2)
    ended(folder, 0.5, 75, start=2)
    assert only_row(base, Scheduler()).preemptions == 2


def test_a_job_that_starts_while_it_is_looked_at_is_plain_json(
    base: BaseFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = submitted(base, IDS[0], "7")

    def before_it_starts(of: RunFolder, sent: record.Sent) -> AttemptFiles:
        found = look(of, sent)
        started(folder, 0.0)
        return found

    look = AttemptFiles.of
    monkeypatch.setattr(AttemptFiles, "of", before_it_starts)
    row = only_row(base, Scheduler({"7": Observed("running")}))
    assert len(row.starts) == 1
    assert row.heartbeat_age_s is None


def test_a_start_that_died_without_a_word_ends_with_its_last_heartbeat(base: BaseFolder) -> None:
    folder = submitted(base, IDS[0], "7")
    started(folder, 10)
    write(folder.attempt(1).heartbeat, {"at": at(9), "step": 3})
    row = only_row(base, Scheduler({"7": Observed("failed", "NODE_FAIL")}))
    assert row.gpu_hours == pytest.approx(4.0, abs=0.01)


def test_the_time_that_is_left_follows_from_the_speed(base: BaseFolder) -> None:
    folder = submitted(base, IDS[0], "7")
    started(folder, 1)
    trained(
        folder, [{"step": 40, "loss": 1.0, "step_s": 3.0}, {"step": 40, "valid/loss": 1.5}], step=30
    )
    row = only_row(base, Scheduler({"7": Observed("running", host="node-9")}))
    assert (row.step, row.total, row.eta_s, row.host) == (40, 100, 180.0, "node-9")
    assert row.metrics == {"loss": 1.0, "step_s": 3.0, "valid/loss": 1.5}


def test_offline_runs_of_wandb_come_with_the_command_that_uploads_them(base: BaseFolder) -> None:
    folder = submitted(base, IDS[0], "7")
    started(folder, 1)
    ended(folder, 0.5, 0)
    run = folder.path / "wandb" / "offline-run-1-x"
    run.mkdir(parents=True)
    (run / "run-x.wandb").touch()
    assert only_row(base, Scheduler()).sync_hint == f"wandb sync {run}"
    (run / "run-x.wandb.synced").touch()
    assert only_row(base, Scheduler()).sync_hint is None


def test_a_survey_calls_as_many_functions_for_each_experiment_however_many_there_are(
    base: BaseFolder,
) -> None:
    """A thousand take half a second of a processor: counted, for seconds depend on what else runs."""
    lines = submitted(base, IDS[0], "7").record.read_text()

    def calls_of_survey(count: int) -> int:
        for number in range(1, count):
            folder = base.run(f"{number:032x}")
            folder.path.mkdir(exist_ok=True)
            folder.record.write_text(lines.replace(IDS[0], folder.path.name))
        profile = cProfile.Profile()
        rows = profile.runcall(survey, base, backend_of=Scheduler({"7": Observed("submitted")}))
        assert len(rows) == count - 1
        return pstats.Stats(profile).total_calls

    few, many = calls_of_survey(100), calls_of_survey(1000)
    assert many < 1.05 * 10 * few
    assert many / 1000 < 750


# ---------------------------------------------------------------- the end of metrics.jsonl


def test_the_last_value_of_each_metric_is_found_without_reading_the_whole_file(
    base: BaseFolder,
) -> None:
    folder = base.run(IDS[0])
    folder.path.mkdir(parents=True)
    lines = [{"step": step, "loss": step / 1000, "lr": 1e-4} for step in range(2000)]
    trained(
        folder, [{"step": 5, "valid/loss": 9.0}, *lines, {"step": 1999, "valid/em": 0.5}], step=1999
    )
    with folder.metrics.open("a") as file:
        file.write('{"step": 2000, "loss": 99')  # being written
    assert last_metrics(folder) == {"step": 1999, "loss": 1.999, "lr": 1e-4, "valid/em": 0.5}


def test_evaluations_out_of_reach_come_from_the_score_list(base: BaseFolder) -> None:
    folder = base.run(IDS[0])
    folder.path.mkdir(parents=True)
    trained(folder, [{"step": step, "loss": 1.0} for step in range(2000)], step=1999)
    write(
        folder.path / "score_list.json",
        [{"step": 1, "valid/loss": 3.0}, {"step": 2, "valid/loss": 2.0}],
    )
    assert last_metrics(folder) == {"step": 1999, "loss": 1.0, "valid/loss": 2.0}


def test_a_line_of_gradient_norms_longer_than_the_tail_does_not_hide_the_loss(
    base: BaseFolder,
) -> None:
    folder = base.run(IDS[0])
    folder.path.mkdir(parents=True)
    norms = {f"grad_norm/layer.{number}.weight": 1.0 for number in range(1000)}
    trained(folder, [{"step": 1, "loss": 4.0}, {"step": 1, **norms}], step=1)
    assert last_metrics(folder) == {"step": 1, "loss": 4.0}


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"\xff\xfe\n", b"[1]\n", b'{"step": NaN, "loss": 1e999}\n', b"7\n"]
)
def test_damaged_metrics_are_no_metrics(base: BaseFolder, content: bytes) -> None:
    folder = base.run(IDS[0])
    folder.path.mkdir(parents=True)
    folder.metrics.write_bytes(content)
    assert last_metrics(folder) == {}


# ---------------------------------------------------------------- the screens


def rows_of(*states: str, **facts: Any) -> list[Row]:
    facts = {"reason": None, **facts}
    return [Row(f"{n:032x}", "g", state, "/f", **facts) for n, state in enumerate(states)]  # type: ignore[arg-type]


def printed(rows: Sequence[Row], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    table.show(rows, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_summary_counts_states_and_names_what_cannot_be_reached() -> None:
    rows = [
        *rows_of("succeeded", "succeeded", "running"),
        *rows_of("queued", backend="slurm", unseen_since=at(1)),
    ]
    assert (
        table.summary(rows)
        == "2 succeeded, 1 running, 1 queued; slurm cannot be reached: 1 may have moved on"
    )
    assert table.summary([]) == "no experiments"


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_table_fits_the_terminal(width: int) -> None:
    facts: dict[str, Any] = {
        "step": 1200,
        "total": 20000,
        "metrics": {"loss": 1.23456, "valid/loss": 2.0},
    }
    rows = rows_of(
        "succeeded", "running", "submitting", reason="x" * 300, host="h" * 90, attempts=12, **facts
    )
    lines = printed([*rows, *rows_of("failed", reason="a long reason " * 20)], width).splitlines()
    assert max(map(len, lines)) <= width
    assert all(row.exp_id[:8] in "\n".join(lines) for row in rows)
    assert "1.235" in lines[1]


def test_what_is_wrong_is_said_in_full_once_for_all_that_it_befell() -> None:
    text = printed(
        rows_of(
            "failed", "failed", "failed", "failed", reason="DataError: train.jsonl:7: no label"
        ),
        80,
    )
    assert "00000000, 00000000, 00000000 and 1 more: DataError: train.jsonl:7: no label" in text


def test_text_from_files_can_neither_drive_the_terminal_nor_style_it() -> None:
    text = printed(
        rows_of(
            "failed", reason="[bold]x[/bold] \x1b]0;title\x07 \x1b[2J [/nothing]", host="\x9b2J"
        ),
        120,
    )
    assert not {"\x1b", "\x07", "\x9b"} & set(text)
    assert "[bold]x[/bold]" in text


def test_the_watch_prints_plain_tables_and_ends_when_all_is_decided() -> None:
    console = Console(file=io.StringIO(), width=80)
    looks = iter([rows_of("running"), rows_of("running"), rows_of("succeeded")])
    table.watch(lambda: next(looks), 0.001, console=console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert (text.count("1 running"), text.count("1 succeeded")) == (
        1,
        1,
    )  # again only after a change
    assert "\x1b" not in text


def test_ctrl_c_leaves_the_live_view_and_gives_the_cursor_back() -> None:
    console = Console(file=io.StringIO(), width=80, height=12, force_terminal=True)
    looks = 0

    def look() -> list[Row]:
        nonlocal looks
        looks += 1
        if looks > 2:
            raise KeyboardInterrupt
        return rows_of(*["succeeded"] * 40, "running")

    table.watch(look, 0.001, console=console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "more are not shown" in text
    assert text.index("running") < text.index("succeeded")  # what matters first
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_rows_become_json() -> None:
    values = json.loads(json.dumps(table.as_json(rows_of("running", metrics={"loss": 1.0}))))
    assert values[0]["state"] == "running"
    assert values[0]["metrics"] == {"loss": 1.0}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(45, "45 s"), (59.9, "1 min"), (720, "12 min"), (11100, "3 h 05"), (187200, "2 d 4 h")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("state", sorted(set(STATES) - {"running", "succeeded"}))
def test_every_state_that_is_no_progress_has_a_reason_even_where_nobody_gives_one(
    base: BaseFolder, state: JobState
) -> None:
    folder = submitted(base, IDS[0], "8")
    wish = {"event": "cancel", "attempt": 1, "why": ""} if state == "paused" else {"event": "seen"}
    record.append(folder, wish, {"event": "observed", "attempt": 1, "state": state})
    before = record.read(folder)
    away = Scheduler(is_reachable=False)
    row = only_row(base, away, record_changes=False)
    assert (row.state, row.reason) == (state, DEFAULT_REASONS[state].format(exp_id=IDS[0]))
    assert before is not None
    # the text is for people: the record holds what was seen
    written = folder.record.read_bytes()
    assert record_state(folder, before, row) == before
    assert folder.record.read_bytes() == written
    assert table.as_json([row])[0]["reason"] == run_card(row, {}, {})["reason"] == row.reason
    assert row.reason in report(base, [row], gather(base))
    assert row.reason[:20] in printed([replace(row, unseen_since=None)], 200)


@pytest.mark.parametrize("state", sorted(set(STATES) - {"running", "succeeded"}))
def test_a_run_by_hand_has_a_reason_in_every_state_that_is_no_progress(
    base: BaseFolder, state: JobState
) -> None:
    folder = base.run(IDS[0])
    write(folder.exp_dict, {"task": "t"})
    write(folder.status, {"state": state, "updated_at": at(1)})
    assert only_row(base, Scheduler(), include_unsubmitted=True).reason


def test_what_makes_progress_needs_no_reason(base: BaseFolder) -> None:
    assert set(DEFAULT_REASONS) == set(STATES) - {"running", "succeeded"}
    submitted(base, IDS[0], "8")
    assert only_row(base, Scheduler({"8": Observed("running")})).reason is None


def test_the_last_wish_for_its_end_makes_a_job_paused_or_cancelled(base: BaseFolder) -> None:
    folder = submitted(base, IDS[0], "8")
    scheduler = Scheduler({"8": Observed("cancelled", "CANCELLED by 0")})
    record.append(folder, {"event": "cancel", "attempt": 1, "why": "paused by anna"})
    row = only_row(base, scheduler)
    assert (row.state, row.reason) == ("paused", "paused by anna")
    assert (row.history[-1].state, row.ended_at) == ("paused", None)
    job = record.read(folder)
    assert job is not None
    assert job.state == "paused"
    assert only_row(base, scheduler) == row
    record.append(folder, {"event": "cancel", "attempt": 1})
    row = only_row(base, scheduler)
    assert (row.state, row.reason) == ("cancelled", "CANCELLED by 0")


def test_a_record_that_calls_a_paused_job_cancelled_is_read_as_paused(base: BaseFolder) -> None:
    folder = submitted(base, IDS[0], "8")
    record.append(folder, {"event": "cancel", "attempt": 1, "why": "paused by anna"})
    record.append(folder, {"event": "observed", "attempt": 1, "state": "cancelled", "reason": "C"})
    row = only_row(base, Scheduler(is_reachable=False))
    assert (row.state, row.reason) == ("paused", "paused by anna")


def test_a_run_whose_gate_refused_the_model_says_so_in_status_and_results(base: BaseFolder) -> None:
    folder = base.run(IDS[0])
    write(folder.exp_dict, {"task": "causal_lm"})
    write(folder.status, {"state": "succeeded", "step": 4, "total": 4, "updated_at": at(0)})
    refusals = ["em: the gain is 0.01 and may be -0.2, at least 0 is asked for"]
    write(folder.path / "gate.json", {"model": "best", "weights": "w", "refusals": refusals})
    (row,) = survey(base, backend_of=Scheduler(), include_unsubmitted=True)
    assert row.state == "succeeded"
    assert refusals[0] in str(row.reason)
    results = gather(base)
    assert refused_lines(results).startswith(IDS[0][:8])
    assert refusals[0] in refused_lines(results)
    write(folder.path / "gate.json", {"model": "best", "weights": "w", "refusals": []})
    assert survey(base, backend_of=Scheduler(), include_unsubmitted=True)[0].reason is None
    assert refused_lines(gather(base)) == ""
