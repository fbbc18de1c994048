"""Control tokens of a tokenizer in the texts of rows are counted, named, and refusable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.facts import experiment, write_facts
from tests.wording import refused
from trainer import tasks
from trainer.data import left_out
from trainer.data.control_tokens import ControlTokens, reason
from trainer.data.token_store import TokenStore, store_of
from trainer.protocol.task import Places

END = "<|endoftext|>"
PASSAGE = {"title": "t", "text": f"x {END} y"}
# the rows of each task, raw, with the field that a control token stands in
ROWS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "causal_lm": ({"text": f"a {END} b", "piece": 0}, ["text"]),
    "fid": (
        {"id": "0", "question": "q", "answers": ["a", f"in {END} b"], "ctxs": [PASSAGE]},
        ["answers", "ctxs.text"],
    ),
    "cross_attention": (
        {"question": f"q{END}", "answers": [f"in {END} b"], "context": f"c {END}"},
        ["answers", "context", "question"],
    ),
    "summariser": (
        {"id": "0", "document": f"d {END}", "summaries": [END]},
        ["document", "summaries"],
    ),
    "vera": (
        {"golds": ["a"], "distractors": [f"{END}b"], "task": "choices", "number": 0},
        ["distractors"],
    ),
    "retriever": (
        {
            "id": "0",
            "query": f"q {END}",
            "positives": [PASSAGE],
            "negatives": [PASSAGE] * 2,
            "item": 0,
        },
        ["negatives.text", "positives.text", "query"],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=4, valid=2)


def task_of(name: str, folder: Path, cache: Path) -> Any:
    cfg = tasks.parse(experiment(name, folder))
    return tasks.load(cfg, Places(folder, cache, cache))


def store(task: Any, rows: list[dict[str, Any]], cache: Path) -> TokenStore:
    task.rows, task.rows_are_of_files = lambda split: rows, False
    return store_of(task, "train", cache)


@pytest.mark.parametrize("name", ROWS)
def test_every_task_counts_rows_with_control_tokens_by_field(
    name: str, folder: Path, tmp_path: Path
) -> None:
    task = task_of(name, folder, tmp_path)
    row, fields = ROWS[name]
    plain = json.loads(json.dumps(row).replace(END, "end"))
    with left_out.gathering():
        store(task, [plain, row, row], tmp_path)
        notes = left_out.of_split("train")
    assert notes.counts == {reason((field, END)): 2 for field in fields} | {
        why: count for why, count in notes.counts.items() if "control token" not in why
    }
    assert {note.place for note in notes.first if END in note.why} == {"row 2", "row 3"}


def test_strict_refuses_control_tokens_and_a_store_that_is_opened_again_still_names_them(
    folder: Path, tmp_path: Path
) -> None:
    task, row = task_of("fid", folder, tmp_path), {**ROWS["fid"][0], "ctxs": []}
    why = reason(("answers", END))
    for _ in range(2):
        with (
            refused("strict_refuses", count=1, why=why, places="row 1"),
            left_out.settling(tmp_path, strict=True),
        ):
            store(task, [row], tmp_path)
    line = json.loads((tmp_path / left_out.FILE).read_text())
    assert line == {"split": "train", "place": "row 1", "field": "answers", "why": why}


def test_a_store_of_an_older_version_has_no_such_notes(folder: Path, tmp_path: Path) -> None:
    task, (row, _) = task_of("fid", folder, tmp_path), ROWS["fid"]
    meta = store(task, [row], tmp_path).folder / "meta.json"
    values = json.loads(meta.read_text())
    del values["notes"]
    meta.write_text(json.dumps(values))
    with left_out.gathering():
        assert len(store(task, [row], tmp_path)) == 1
        assert not left_out.of_split("train")


@pytest.mark.parametrize("name", ["fid", "cross_attention", "summariser"])
def test_a_text_to_write_ends_once(name: str, folder: Path, tmp_path: Path) -> None:
    task, (row, _) = task_of(name, folder, tmp_path), ROWS[name]
    encoded = task.encode(row)
    if name == "cross_attention":
        targets = [encoded["decoder"][encoded["answer_start"][0] :]]
    else:
        lengths = encoded["targets_lengths"]
        targets = [encoded["targets"][sum(lengths[:n]) :][:size] for n, size in enumerate(lengths)]
    texts = row.get("answers") or row["summaries"]
    assert [ids.count(task.end) for ids in targets] == [1] * len(targets)
    for ids, text in zip(targets, texts[-len(targets) :], strict=True):
        assert task.tokenizer.decode(ids[:-1]) == text
        assert ids[-1] == task.end


def test_ids_of_texts_without_control_tokens_stay(folder: Path, tmp_path: Path) -> None:
    tokenizer = task_of("fid", folder, tmp_path).tokenizer
    texts = ["in the attic", "", "<|endoftext>", "<s> & \N{SNOWMAN}"]
    expected = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert ControlTokens(tokenizer).written_out(texts) == expected


def test_only_what_the_tokenizer_makes_a_control_token_counts(folder: Path, tmp_path: Path) -> None:
    tokenizer = task_of("fid", folder, tmp_path).tokenizer
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken("SEP", special=True, single_word=True)]}
    )
    tokenizer.add_tokens(["<think>"])
    controls = ControlTokens(tokenizer)
    assert controls.in_text("<think> SEParate <|endoftext >") == []
    assert controls.in_text(f"SEP {END} SEP") == ["SEP", END]


def test_turns_and_calls_of_a_conversation_are_looked_through_and_ids_are_not(
    folder: Path, tmp_path: Path
) -> None:
    controls = ControlTokens(task_of("fid", folder, tmp_path).tokenizer)
    call = {"function": {"name": "f", "arguments": {"a": [1, END], "id": END}}}
    row = {"id": END, "messages": [{"role": "user", "content": END}, {"tool_calls": [call]}]}
    arguments = [f"messages.tool_calls.function.arguments.{name}" for name in ("a", "id")]
    assert controls.in_row(row) == [(field, END) for field in ("messages.content", *arguments)]
    assert controls.in_row({"text": END, "piece": 1}) == []


def test_the_end_of_a_turn_counts_though_the_tokenizer_does_not_call_it_special(
    folder: Path, tmp_path: Path
) -> None:
    tokenizer = task_of("fid", folder, tmp_path).tokenizer
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    chat = {"source": "chat", "chat_template": "chatml"}
    values = experiment("causal_lm", folder, data=chat) | {"tokenizer": str(tmp_path / "tokenizer")}
    task = tasks.load(tasks.parse(values), Places(folder, tmp_path, tmp_path))
    turns = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "<think>"}]
    with left_out.gathering():
        store(task, [{"messages": turns}], tmp_path)
        assert left_out.of_split("train").counts == {reason(("messages.content", "<|im_end|>")): 1}
