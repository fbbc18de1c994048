"""What clients see is a function of what lies on the disk: statuses, events, rows, quotas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.record.events import Sent
from jobs.record.paths import RunFolder
from jobs.record.row import Row
from jobs.serve import offers
from jobs.serve.index import MetricsPlace
from jobs.serve.job_view import Facts, job_object, seconds, standing, state_events
from jobs.serve.rows import checks as rows
from jobs.serve.tickets import JOB, Checked, Ticket, Wish, id_of_key
from jobs.serve.turn.reader import new_metric_events
from tests.facts import EVENT
from tests.wording import refused, says
from trainer.config.own_rows import OwnRows
from trainer.data.chat.rows import chats
from trainer.errors import DataError

OFFER = offers.read(None).models["tiny-chat"]
DONE = Checked(at="2026-01-01T00:00:01+00:00")


def at(second: int) -> str:
    return f"2026-01-01T00:00:{second:02d}+00:00"


def ticket() -> Ticket:
    asked = offers.TuningRequest(num_rows=100, kind="chat", seed=1, label="x")
    return Ticket(
        id=JOB + "0" * 24,
        created_at=at(0),
        owner="anna",
        model="tiny-chat",
        exp_id="0" * 32,
        experiment=offers.fill(OFFER, asked).experiment,
        request_digest="",
        kind="chat",
        num_rows=100,
        seed=1,
        epochs=3,
        batch=8,
        lr_factor=1.0,
        training_file="file-" + "0" * 24,
    )


def row(state: Any, *, sent: int = 5, ended: int | None = None) -> Row:
    attempt = Sent(1, "t", "t", None, "local", at=at(sent), id="i", state=state)
    end = None if ended is None else at(ended)
    return Row("0" * 32, "service", state, "/x", history=(attempt,), attempts=1, ended_at=end)


def wishes(**asked: int) -> list[Wish]:
    return [Wish(at=at(second), wish=kind, by="anna") for kind, second in asked.items()]  # type: ignore[arg-type]


CASES: list[tuple[str, Checked | None, list[Wish], Row | None, str]] = [
    ("files are being checked", None, [], None, "validating_files"),
    ("a check that found mistakes", Checked(at=at(1), message="bad"), [], None, "failed"),
    ("nothing was sent", DONE, [], None, "queued"),
    ("an intent without an answer", DONE, [], row("submitting"), "queued"),
    ("it waits for a person", DONE, [], row("held"), "queued"),
    ("it runs", DONE, [], row("running"), "running"),
    ("preempted, to be run again", DONE, [], row("preempted", ended=9), "queued"),
    ("it has ended well", DONE, [], row("succeeded", ended=9), "succeeded"),
    ("lost", DONE, [], row("lost", ended=9), "failed"),
    ("out of memory", DONE, [], row("oom", ended=9), "failed"),
    ("refused by its scheduler", DONE, [], row("pending"), "failed"),
    ("cancelled while it was checked", None, wishes(cancel=2), None, "cancelled"),
    ("cancelled, and still saving", DONE, wishes(cancel=7), row("running"), "cancelled"),
    ("cancelled after its end", DONE, wishes(cancel=9), row("succeeded", ended=8), "succeeded"),
    ("it ended well when it was cancelled", DONE, wishes(cancel=7), row("succeeded", ended=8), "cancelled"),
    ("cancelled by `lathe-jobs cancel`", DONE, [], row("cancelled", ended=9), "cancelled"),
    ("paused, still saving", DONE, wishes(pause=7), row("running"), "running"),
    ("paused", DONE, wishes(pause=7), row("paused", ended=8), "queued"),
    ("to be resumed", DONE, wishes(pause=7, resume=9), row("paused", ended=8), "queued"),
    ("paused, says an old record", DONE, wishes(pause=7), row("cancelled", ended=8), "queued"),
    ("to be resumed, says an old record", DONE, wishes(pause=7, resume=9), row("cancelled", ended=8), "queued"),
    ("resumed, and cancelled by hand", DONE, wishes(pause=2, resume=3), row("cancelled", ended=8), "cancelled"),
    ("paused, then cancelled", DONE, wishes(pause=7, cancel=9), row("cancelled", ended=8), "cancelled"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_job_stands_as_its_files_say(case: Any) -> None:
    _, checked, wished, found, wanted = case
    now = standing(Facts(ticket(), checked, wished, found))
    assert now.status == wanted
    assert (now.error is not None) == (wanted == "failed")
    assert (now.finished_at is not None) == (wanted in ("succeeded", "failed", "cancelled"))


def test_a_job_whose_gate_keeps_its_model_back_has_failed_with_the_reason() -> None:
    done = Facts(ticket(), DONE, [], row("succeeded", ended=9), refusals=("em fell by 3 points",))
    now = standing(done)
    assert (now.status, now.finished_at) == ("failed", at(9))
    assert now.error is not None
    assert now.error["code"] == "gate_refused"
    says("gate_refused_job", now.error["message"], reasons="em fell by 3 points")
    body = job_object(done, "lathe")
    assert (body["fine_tuned_model"], body["result_files"]) == (None, [])


def test_a_rank_that_was_lost_is_an_event_of_its_job() -> None:
    lost = replace(row("running"), recoveries=({**EVENT, "at": at(7)},))
    told = state_events(Facts(ticket(), DONE, [], lost), "lathe")[-1]
    assert (told.level, told.at) == ("warn", seconds(at(7)))
    assert told.message.startswith("rank 1 ended by SIGKILL, at step 6: on from step 5")


def test_metrics_that_were_cut_back_and_written_again_are_told_once(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)

    def write(*steps: int, lr: float = 0.1) -> None:
        lines = [json.dumps({"step": step, "loss": 1 / step, "lr": lr}) + "\n" for step in steps]
        run.metrics.write_text("".join(lines))

    def tell(place: MetricsPlace) -> tuple[list[str], MetricsPlace]:
        events, place = new_metric_events(ticket(), run, place)
        return [event.id.rpartition("-")[2] for event in events], place

    assert tell(MetricsPlace()) == ([], MetricsPlace())
    write(1, 2, 3)
    steps, place = tell(MetricsPlace())
    assert steps == ["1", "2", "3"]
    assert tell(place) == ([], place)
    write(1, 2, 3, 4)
    assert tell(place)[0] == ["4"]
    write(1, 2)  # cut back to a checkpoint
    steps, place = tell(place)
    assert steps == ["1", "2"]  # their ids are known: the index leaves them as they are
    write(1, 2, 3, 4, lr=0.2)  # longer than before, with other bytes where it was read to
    assert tell(place)[0] == ["1", "2", "3", "4"]
    with run.metrics.open("a") as file:
        file.write('{"step": 5, "lo')
    assert "5" not in tell(place)[0]


def test_an_event_says_all_steps_however_early_the_job_was_looked_at(tmp_path: Path) -> None:
    """A job that was looked at before its training began has lines by the time they are read."""
    run = RunFolder(tmp_path)
    run.status.write_text('{"state": "running", "step": 0, "total": 4}')
    run.metrics.write_text('{"step": 1, "loss": 8.0}\n')
    (event,), _ = new_metric_events(ticket(), run, MetricsPlace())
    assert event.message == "Step 1/4: training loss=8.0000"


def test_a_step_with_two_evaluations_has_two_events(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.metrics.write_text('{"step": 1, "valid/loss": 1}\n{"step": 1, "valid/em": 0.5}\n')
    events, _ = new_metric_events(ticket(), run, MetricsPlace())
    assert len({event.id for event in events}) == 2


def test_a_key_of_another_token_is_another_job() -> None:
    assert id_of_key("anna", "1") != id_of_key("ben", "1")
    assert id_of_key("anna", "1") == id_of_key("anna", "1")


def test_a_request_fills_its_places_and_nothing_else() -> None:
    def filled(**asked: Any) -> dict[str, Any]:
        common = {"num_rows": 100, "kind": "text", "seed": 5, "label": "me"}
        return offers.fill(OFFER, offers.TuningRequest(**{**common, **asked})).experiment

    made = filled(epochs=2, batch=12, lr_factor=0.5)
    train = made["train"]
    assert (train["epochs"], train["global_batch"], train["micro_batch"]) == (2, 12, 6)
    assert "steps" not in train
    assert (train["seed"], made["label"], made["data"]["loss_on"]) == (5, "me", "all")
    assert made["optim"]["lr"] == OFFER.experiment["optim"]["lr"] / 2
    assert (train["eval_every"], train["save_every"]) == (5, 5)
    kept = {name: made[name] for name in ("base", "tokenizer", "task", "deepspeed")}
    assert kept == {name: OFFER.experiment[name] for name in kept}
    assert filled(num_rows=3)["train"]["global_batch"] == 3  # no batch of more rows than there are
    wide = OFFER.model_copy(update={"job": {"resources": {"gpu": 4}}})
    with refused("batch_of_devices", devices=4, fix=12):
        offers.fill(wide, offers.TuningRequest(num_rows=9, kind="text", seed=1, label="", batch=9))
    with refused("batch_above_file", batch=101, rows=100, most=100):
        filled(batch=101)
    with refused("steps_too_many", most=1000000):
        filled(num_rows=10**9)


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
KINDS = {
    "chat": {"messages": CHAT},
    "completion": {"prompt": "a", "completion": "b"},
    "text": {"text": "a"},
    "preference": {
        "input": {"messages": CHAT[:1], "tools": [], "parallel_tool_calls": True},
        "preferred_output": CHAT[1:],
        "non_preferred_output": [{"role": "assistant", "content": "c"}],
    },
    "triple": {"query": "a", "positive": ["b"], "negative": "c"},
    "question": {"question": "a", "contexts": ["b"], "answers": "c"},
    "document": {"document": "a", "summary": "b"},
    "statement": {"statement": "a", "label": False},
    "group": {"golds": "a", "distractors": ["b", "c"]},
}


QUESTION = {"question": "q", "contexts": ["a", "b"], "answers": ["c"]}


@pytest.mark.parametrize("kind", rows.KINDS)
def test_rows_of_every_kind_are_known_and_written_as_their_tasks_read_them(
    kind: str, tmp_path: Path
) -> None:
    source, target = tmp_path / "upload", tmp_path / "train.jsonl"
    source.write_text(json.dumps(KINDS[kind]) + "\n\n" + json.dumps(KINDS[kind]) + "\n")
    report = rows.check(source)
    assert (report.kind, report.num_rows, report.mistakes) == (kind, 2, [])
    assert rows.write_split(source, target, kind, keep=lambda place: True) == 2
    assert report.places.total() == 2
    assert len(report.places) == 1  # they ask the same
    _, line = target.read_text().splitlines()
    wanted = {
        "triple": {
            "query_id": "1",
            "query": "a",
            "positive_passages": [{"docid": "1-positive-0", "text": "b"}],
            "negative_passages": [{"docid": "1-negative-0", "text": "c"}],
        },
        "question": {
            "id": "1",
            "question": "a",
            "answers": ["c"],
            "contexts": ["b"],
            "ctxs": [{"title": "", "text": "b"}],
        },
        "preference": {
            "prompt": CHAT[:1],
            "chosen": CHAT[1:],
            "rejected": [{"role": "assistant", "content": "c"}],
        },
        "statement": {"statement": "a", "label": "false"},
        "group": {"golds": ["a"], "distractors": ["b", "c"]},
    }
    assert json.loads(line) == wanted.get(kind, KINDS[kind])


@pytest.mark.parametrize(
    ("row", "is_good"),
    [
        ({"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, True),
        ({"messages": [*CHAT, {"role": "assistant", "tool_calls": [CALL]}]}, True),
        ({"messages": [*CHAT, {"role": "user", "content": "c"}]}, True),
        ({"messages": CHAT, "tools": ""}, True),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0}]}, False),
        ({"messages": [CHAT[0], {**CHAT[1], "mask": 1}]}, False),
        ({"messages": [CHAT[0], {"role": "assistent", "content": "b"}]}, False),
        ({"messages": CHAT, "tools": 5}, False),
        ({"messages": json.dumps(CHAT)}, True),
    ],
)
def test_an_upload_of_conversations_is_read_as_training_reads_it(
    row: dict[str, Any], is_good: bool, tmp_path: Path
) -> None:
    source = tmp_path / "train.jsonl"
    source.write_text(json.dumps(row) + "\n")
    report = rows.check(source)
    assert (not report.mistakes) == is_good
    if is_good:
        assert len(list(chats(tmp_path, "train", OwnRows()))) == 1
        return
    with pytest.raises(DataError) as error:
        list(chats(tmp_path, "train", OwnRows()))
    assert str(error.value).endswith(f"want {report.mistakes[0].want}.")


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (
            {"golds": "['a']", "distractors": "['b' 'c']"},
            {"golds": ["a"], "distractors": ["b", "c"]},
        ),
        ({"golds": "a", "distractors": "['it's', 'b']"}, None),
        (
            {"question": "q", "contexts": '["a", "b"]', "answers": "['c' 'd']"},
            {"contexts": ["a", "b"], "answers": ["c", "d"]},
        ),
        (
            {**QUESTION, "titles": ["T", "U"], "target": "c"},
            {
                "ctxs": [{"title": "T", "text": "a"}, {"title": "U", "text": "b"}],
                "target": "c",
            },
        ),
        ({**QUESTION, "titles": ["T"]}, None),
        # as in the triples of the trainings, the text of a passage is no list
        (
            {"query": "q", "positive": "['a', 'b']", "negative": "c"},
            {"positive_passages": [{"docid": "0-positive-0", "text": "['a', 'b']"}]},
        ),
    ],
)
def test_lists_and_titles_of_an_upload_are_those_of_the_trainings(
    row: dict[str, Any], wanted: dict[str, Any] | None, tmp_path: Path
) -> None:
    source, target = tmp_path / "upload", tmp_path / "train.jsonl"
    source.write_text(json.dumps(row) + "\n")
    report = rows.check(source)
    if wanted is None:
        assert report.num_mistakes == 1
        return
    assert report.mistakes == []
    assert rows.write_split(source, target, str(report.kind), keep=lambda place: True) == 1
    written = json.loads(target.read_text())
    assert {name: written[name] for name in wanted} == wanted


def test_a_mistake_is_found_in_every_kind_of_row(tmp_path: Path) -> None:
    for name, good in KINDS.items():
        for key in good:
            path = tmp_path / f"{name}-{key}"
            path.write_text(json.dumps({**good, key: [5]}) + "\n")
            (first, *_) = rows.check(path, [name]).mistakes
            assert first.line == 1
            assert key in first.got
