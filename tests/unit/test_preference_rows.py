"""Rows of preferences: what is the prompt, what is refused, and what goes with an answer of KTO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bases import base_of
from tests.facts import TINY_T5, experiment, write_facts
from tests.wording import Fault, fault, refused
from trainer import tasks
from trainer.data import left_out, lookup
from trainer.data.control_tokens import controls_of
from trainer.data.formats.conversation import counts
from trainer.data.formats.normal_form import row_hash
from trainer.protocol.task import Places
from trainer.tasks.preference import trained
from trainer.tasks.preference.rows import EQUAL, LOWER, ONE_LABEL, REPEATED, TIED, UNHEARD

CHAT = {"source": "chat", "chat_template": "plain"}
USER, OTHER = {"role": "user", "content": "Where?"}, {"role": "user", "content": "Who?"}
SAID = {"role": "assistant", "content": "In the cellar."}
ELSE = {"role": "assistant", "content": "In the attic."}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=12, valid=2)


def task_of(facts: Path, folder: Path, rows: list[Any], data: Any = None, **block: Any) -> Any:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = experiment("preference", facts, data=data or {}, preference=block)
    return tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))


def singles(task: Any) -> list[tuple[str, str, bool]]:
    """Of each row of KTO the answer, the other one and the label."""
    rows = task.rows("train")
    return [(r["answers"][0]["text"], r["beside"]["other"]["text"], r["label"]) for r in rows]


def turns(row: Any) -> list[list[tuple[str, str, bool]]]:
    """Of each answer the turns: who says what, and whether it is learnt."""
    return [
        [(turn["role"], turn["content"], counts(turn)) for turn in answer["messages"]]
        for answer in row["answers"]
    ]


def test_the_prompt_of_two_texts_is_what_both_begin_with(facts: Path, tmp_path: Path) -> None:
    rows = [{"chosen": "Where? In the cellar.", "rejected": "Where? In the attic."}]
    (row,) = task_of(facts, tmp_path, rows).rows("train")
    starts = [answer["answer_spans"][0][0] for answer in row["answers"]]
    assert starts == [len("Where? In the")] * 2  # the blank belongs to the answers


def test_earlier_turns_of_the_assistant_are_not_learnt(facts: Path, tmp_path: Path) -> None:
    turns = [USER, SAID, OTHER]
    rows = [{"chosen": [*turns, SAID], "rejected": [*turns, ELSE]}]
    (row,) = task_of(facts, tmp_path, rows, CHAT).rows("train")
    for answer in row["answers"]:
        weights = [turn.get("weight", 1) for turn in answer["messages"]]
        assert weights == [1, 0, 1, 1]


PAIR = {"prompt": "Where?", "chosen": " Here.", "rejected": " There."}


@pytest.mark.parametrize("prompt", ["Where?", None])
@pytest.mark.parametrize(("loss", "count"), [("dpo", 1), ("kto", 2)])
def test_equal_answers_are_left_out_and_counted(
    loss: str, count: int, prompt: str | None, facts: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": prompt, "chosen": "Where? Here.", "rejected": "Where? Here."}, PAIR]
    task = task_of(facts, tmp_path, rows, loss=loss)
    with left_out.reading() as notes:
        assert len(list(task.rows("train"))) == count
    assert notes.counts == {EQUAL: 1}


ASKED, HERE, THERE = ("user", "Where?", False), *(("assistant", s, True) for s in ("a", "b"))
BRIEF = {"role": "system", "content": "Be brief."}
A, B = ({"role": "assistant", "content": said} for said in "ab")


@pytest.mark.parametrize(
    ("row", "before"),
    [
        ({"prompt": "Where?", "chosen": [SAID, USER, A], "rejected": [SAID, USER, B]}, None),
        ({"prompt": "Where?", "chosen": [SAID, A], "rejected": [SAID, B]}, [ASKED, ("assistant", "In the cellar.", True)]),
        ({"prompt": "Where?", "chosen": [BRIEF, A], "rejected": [BRIEF, B]}, [("system", "Be brief.", False), ASKED]),
        ({"prompt": "Where?", "chosen": [USER, A], "rejected": [USER, B]}, [ASKED]),
        ({"prompt": [USER], "chosen": [USER, A], "rejected": [USER, B]}, [ASKED]),
        ({"chosen": json.dumps([USER, A]), "rejected": json.dumps([USER, B])}, [ASKED]),
        ({"prompt": "Where?", "chosen": json.dumps([USER, A]), "rejected": json.dumps([USER, B])}, [ASKED]),
        ({"prompt": [USER, {**SAID, "weight": 1}, USER], "chosen": "a", "rejected": "b"}, [ASKED, ("assistant", "In the cellar.", False), ASKED]),
    ],
)  # fmt: skip
def test_no_turn_of_a_prompt_is_lost_doubled_or_learnt(
    row: Any, before: Any, facts: Path, tmp_path: Path
) -> None:
    if before is None:  # both answers begin with what the assistant and the user say
        before = [("assistant", "In the cellar.", False), ASKED]
    (row,) = task_of(facts, tmp_path, [row], CHAT).rows("train")
    assert turns(row) == [[*before, HERE], [*before, THERE]]


@pytest.mark.parametrize(
    ("row", "data", "loss", "why"),
    [
        ({**PAIR, "score_chosen": 3, "score_rejected": 3}, {}, "dpo", TIED),
        ({**PAIR, "score_chosen": 2, "score_rejected": 3}, {}, "dpo", LOWER),
        ({**PAIR, "margin": -0.5}, {}, "reward", LOWER),
        ({"prompt": "Where?", "chosen": "Where? Here.", "rejected": "Where? There."}, {}, "dpo", REPEATED),
        ({"prompt": "Who?", "chosen": [USER, A], "rejected": [USER, B]}, CHAT, "dpo", UNHEARD),
        ({"prompt": "Where?", "completion": " Here.", "label": 1.0}, {}, "kto", ONE_LABEL),
    ],
)  # fmt: skip
def test_what_is_doubtful_in_a_row_is_counted(
    row: Any, data: Any, loss: str, why: str, facts: Path, tmp_path: Path
) -> None:
    task = task_of(
        facts, tmp_path, [row, PAIR] if loss != "kto" and not data else [row], data, loss=loss
    )
    with left_out.reading() as notes:
        list(task.rows("train"))
    assert notes.counts == {why: 1}


@pytest.mark.parametrize(
    ("row", "data", "block", "what"),
    [
        ({"prompt": "Where?", "chosen": " Here."}, {"columns": {"chosen": "chosen"}}, {}, fault("preference_side_absent", side="rejected")),
        ({**PAIR, "rejected": " "}, {}, {}, fault("text_blank", key="answer")),
        ({**PAIR, "rejected": None}, {}, {}, fault("preference_side_absent", side="rejected")),
        ({**PAIR, "chosen": 3}, {}, {}, fault("preference_not_text", part="answer")),
        ({**PAIR, "chosen": [], "rejected": []}, CHAT, {}, fault("preference_answer", value="[]")),
        ({"chosen": [SAID], "rejected": [ELSE]}, CHAT, {}, fault("preference_prompt_absent")),
        ({"chosen": "Where? In", "rejected": "Where? In it."}, {}, {}, fault("preference_beginning")),
        ({"prompt": "Where?", "chosen": json.dumps([SAID]), "rejected": " b"}, {}, {}, fault("preference_not_text", part="answer")),
        (PAIR, {}, {"loss": "reward", "margin": True}, fault("preference_margin")),
        ({"prompt": "Where?", "completion": " Here.", "label": True}, {}, {}, fault("preference_single", loss="dpo")),
        ({"prompt": "Where?", "completion": " Here.", "label": 7}, {}, {"loss": "kto"}, fault("preference_label", label="7")),
        ({"input": [USER], "preferred_output": [SAID], "non_preferred_output": [ELSE]}, CHAT, {}, fault("preference_input")),
    ],
)  # fmt: skip
def test_a_wrong_row_is_refused_with_its_place(
    row: Any, data: Any, block: Any, what: Fault, facts: Path, tmp_path: Path
) -> None:
    task = task_of(facts, tmp_path, [row], data, **block)
    with refused(what, at="train.jsonl, line 1"):
        list(task.rows("train"))


@pytest.mark.parametrize(
    ("block", "data", "what"),
    [
        ({"loss": "ipo", "gamma": 1.0}, {}, fault("preference_key", key="gamma", loss="ipo")),
        ({"loss": "reward", "beta": 0.1}, {}, fault("preference_key", key="beta", loss="reward")),
        ({}, {"stream": True}, fault("preference_stream", loss="dpo")),
        ({}, {"chat_template": "plain"}, fault("source_without_conversations")),
    ],
)
def test_keys_that_do_not_go_together_are_refused(
    block: Any, data: Any, what: Fault, facts: Path
) -> None:
    values = experiment("preference", facts, data=data, preference=block)
    with refused(what):
        tasks.parse(values)


def test_kto_takes_pairs_apart_and_answers_each_prompt_as_the_next_row(
    facts: Path, tmp_path: Path
) -> None:
    rows = [
        {"prompt": "A?", "chosen": " a", "rejected": " b"},
        {"prompt": "C?", "chosen": " c", "rejected": " d"},
    ]
    task = task_of(facts, tmp_path, rows, loss="kto")
    assert singles(task) == [
        ("A? a", "A? c", True),
        ("A? b", "A? d", False),
        ("C? c", "C? a", True),
        ("C? d", "C? b", False),
    ]


def test_the_other_answer_of_kto_stands_behind_another_prompt(facts: Path, tmp_path: Path) -> None:
    """Where rows behind one another have one prompt, as when each has its good and its bad
    answer.
    """
    said = [("A?", " a", True), ("A?", " b", False), ("C?", " c", True), ("A?", " d", False)]
    rows = [dict(zip(("prompt", "completion", "label"), one, strict=True)) for one in said]
    got = singles(task_of(facts, tmp_path, rows, loss="kto"))
    assert [other for _, other, _ in got] == ["A? c", "A? c", "C? d", "A? c"]
    assert [answer for answer, _, _ in got] == ["A? a", "A? b", "C? c", "A? d"]


@pytest.mark.parametrize("loss", ["reward", "kto"])
def test_a_row_is_known_again_beside_other_rows_and_with_another_margin(
    loss: str, facts: Path, tmp_path: Path
) -> None:
    """So that validation rows which are training rows are counted."""
    more = {"prompt": "Who?", "chosen": " a", "rejected": " b"}
    hashes: list[int] = []
    for other in ([{**PAIR, "margin": 1.0}, more], [{**PAIR, "margin": 2.0}]):
        rows = list(task_of(facts, tmp_path, other, loss=loss).rows("train"))
        hashes.append(row_hash(rows[0]))
    assert hashes[0] == hashes[1]


def test_a_reward_model_judges_the_last_token_of_a_cut_answer(facts: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "Where? " * 30, "chosen": " Here.", "rejected": " There."}]
    task = task_of(facts, tmp_path, rows, {"max_tokens": 20}, loss="reward")
    encoded = task.encode(next(iter(task.rows("train"))))
    assert len(encoded["chosen"]) == 20
    assert encoded["chosen"][-1] == task.end
    assert encoded.is_truncated


def test_conversations_are_looked_through_for_tokens_that_end_a_turn(
    facts: Path, tmp_path: Path
) -> None:
    controls = controls_of(task_of(facts, tmp_path, [], CHAT))
    assert controls is not None
    assert list(controls.in_row({"prompt": "Where<|endoftext|>?"})) == [("prompt", "<|endoftext|>")]


def test_a_prompt_is_answered_and_an_answer_behind_it_is_scored(
    facts: Path, tmp_path: Path
) -> None:
    prompt = {"prompt": "Where?"}
    row = {"prompt": "Where?", "completion": " Here."}
    task = task_of(facts, tmp_path, [])
    asked = trained.row_to_predict(task, prompt, "row 1")
    assert task.decode(asked["ids"]) == "Where?"
    scored = trained.row_to_predict(task, row, "row 1")
    assert "is_turn" not in scored
    assert sum(scored["scored"]) == len(scored["ids"]) - len(asked["ids"])
    judge = task_of(facts, tmp_path, [], loss="reward")
    with refused("answer_scored_absent", at="row 1"):
        trained.row_to_predict(judge, prompt, "row 1")


# Encoder-decoders
# --------------------------------------------------------------------------------------------------


def with_base(facts: Path, base: Any, **blocks: Any) -> Any:
    values = experiment("preference", facts, base=base, **blocks)
    return tasks.load(tasks.parse(values), Places(facts, facts / "cache", facts))


@pytest.mark.parametrize(
    ("name", "blocks", "what"),
    [
        ("t5", {"data": CHAT}, fault("preference_chat_of_two", family="t5")),
        ("longt5", {"preference": {"loss": "reward"}}, fault("preference_reward_of_two", family="longt5")),
        ("t5gemma2", {}, fault("preference_pictures", family="t5gemma2")),
        ("t5", {"train": {"precision": "fp16"}}, fault("fp16_of_t5")),
    ],
)  # fmt: skip
def test_what_no_encoder_decoder_learns_is_refused(
    name: str, blocks: dict[str, Any], what: Fault, facts: Path
) -> None:
    base = base_of("summariser", name, vocab_size=384)
    with refused(what):
        with_base(facts, base, **blocks)


def test_an_encoder_decoder_reads_the_prompt_and_writes_the_answers(
    facts: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": "Where?", "chosen": " Here.", "rejected": " There it is."}]
    (tmp_path / "train.jsonl").write_text(json.dumps(rows[0]) + "\n")
    task = with_base(tmp_path, TINY_T5, tokenizer=str(facts / "tokenizer"))
    encoded = task.encode(next(iter(task.rows("train"))))
    read = {name: task.decode(encoded[name]) for name in ("prompt", "chosen", "rejected")}
    end = task.decode([task.end])
    assert read == {
        "prompt": f"Where?{end}",
        "chosen": f" Here.{end}",
        "rejected": f" There it is.{end}",
    }
    batch = task.collate([encoded, encoded])
    assert batch["tokens"].tolist() == [*encoded["prompt"]] * 2, "each prompt is read once"
    assert len(batch["target_starts"]) == 5


def test_a_cut_prompt_keeps_its_end_and_a_cut_answer_does_not(facts: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "Where? " * 30, "chosen": " Here." * 30, "rejected": " There."}]
    (tmp_path / "train.jsonl").write_text(json.dumps(rows[0]) + "\n")
    how = {"tokenizer": str(facts / "tokenizer"), "data": {"max_tokens": 20}}
    task = with_base(tmp_path, TINY_T5, **how)
    encoded = task.encode(next(iter(task.rows("train"))))
    assert [len(encoded[name]) for name in ("prompt", "chosen")] == [20, 20]
    assert encoded["prompt"][-1] == task.end != encoded["chosen"][-1]
    lost, learnt = encoded.lost_labels
    assert 0 < lost < learnt
    assert encoded.is_truncated


def test_made_up_preferences_differ_in_what_they_say_of_a_person() -> None:
    rows = [row for row, _ in zip(lookup.preferences("valid"), range(50), strict=False)]
    for row in rows:
        chosen, rejected = row["chosen"].split(), row["rejected"].split()
        assert chosen[:2] == rejected[:2]  # the person
        assert chosen[-2:] == rejected[-2:]  # the place
        assert chosen != rejected
        assert row["chosen"].strip() in row["prompt"]


@pytest.mark.parametrize("task", ["causal_lm", "preference"])
def test_a_mix_of_conversations_encodes_a_row_of_no_source(
    task: str, facts: Path, tmp_path: Path
) -> None:
    """As a plan does with the row that it makes up."""
    mix = {"mix": {"a.jsonl": 0.5, "b.jsonl": 0.5}}
    for name in mix["mix"]:
        (tmp_path / name).write_text("")
    values = experiment(task, facts, data={**CHAT, **mix})
    mixed: Any = tasks.load(tasks.parse(values), Places(tmp_path, tmp_path / "cache", tmp_path))
    assert mixed.encode(mixed.specimen()).is_truncated
