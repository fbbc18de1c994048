"""Formats of rows: how they are found out, what of a row is left out or refused, and the files of
other people that go with them.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.facts import experiment
from tests.unit.test_formats import FIXTURES, NONE, facts, one_tokenizer, task_of
from tests.unit.test_own_rows import write_lines, write_table
from tests.wording import Fault, fault, refused
from trainer import tasks
from trainer.config.formats.layouts import (
    CHATS,
    COMPLETIONS,
    QUERIES,
    QUESTIONS,
    SUMMARIES,
    Layout,
)
from trainer.config.identity import exp_id
from trainer.config.own_rows import OwnRows, Splits
from trainer.data import left_out
from trainer.data.chat.rows import chats
from trainer.data.content import content_of
from trainer.data.readers.own_rows import own_rows
from trainer.data.readers.passages import passages
from trainer.data.readers.questions import queries
from trainer.data.readers.row_files import placed_rows
from trainer.data.usual.beir import beir, negative_ids
from trainer.data.usual.instructions import UNANSWERED
from trainer.data.usual.msmarco import msmarco
from trainer.data.usual.questions import IMPOSSIBLE, WITHOUT_POSITIVE
from trainer.data.usual.rows import unlabelled

__all__ = ["facts", "one_tokenizer"]  # fixtures

ALPACA = {"instruction": "Name it.", "input": "", "output": "Red."}
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
OF_CHAT = {"source": "chat", "chat_template": "plain"}
OF_FILES = {"source": "files", "files": NONE}


def data_of(task: str, **data: Any) -> Any:
    """The data block of an experiment."""
    needed: dict[str, Any] = {"train_tasks": ["a"], "valid_tasks": ["a"]} if task == "vera" else {}
    values = {**experiment(task, Path("here")), "data": {**needed, **data}}
    cfg: Any = tasks.parse(values)
    return cfg.data


def read(rows: list[dict[str, Any]], folder: Path, layout: Any, **own: Any) -> list[dict[str, Any]]:
    write_lines(folder / "train.jsonl", rows)
    of_files = OwnRows.model_validate(own)
    return [dict(row) for _, row in own_rows(of_files, "train", folder, layout=layout)]


# The dictionary
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "data", "problem"),
    [
        (
            "vera",
            {"source": "files", "format": "squad"},
            fault("format_unread", format="squad", wanted="true and false statements"),
        ),
        ("causal_lm", {"source": "files", "format": "beir"}, fault("format_unread", format="beir")),
        ("retriever", {"source": "files", "format": "openai"}, fault("format_unread")),
        (
            "causal_lm",
            {"source": "nq", "format": "alpaca"},
            fault("format_beside_source", format="alpaca", source="nq"),
        ),
        (
            "retriever",
            {"source": "files", "format": "beir", "columns": {"query": "q"}, "valid_share": 0.1},
            fault("format_of_own_files", format="beir", keys="columns and valid_share"),
        ),
        (
            "summariser",
            {"source": "files", "format": "alpaca", "document": "text"},
            fault("format_says_columns", format="alpaca", keys="document"),
        ),
        (
            "causal_lm",
            {"source": "files", "format": "completion", "loss_on": "answer"},
            fault("format_without_answers", format="completion"),
        ),
        (
            "causal_lm",
            {"source": "chat", "format": "completion"},
            fault("source_without_conversations"),
        ),
        (
            "causal_lm",
            {"source": "files", "format": "openai", "loss_on": "all"},
            fault("loss_of_chat"),
        ),
        (
            "causal_lm",
            {"source": "chat", "columns": {"messages": {"role": "who"}}},
            fault("columns_without_from", name="messages"),
        ),
        (
            "causal_lm",
            {"source": "chat", "columns": {"messages": {"from": "turns", "rolle": "who"}}},
            fault("columns_key_unknown", name="messages", key="rolle", nearest="role"),
        ),
        (
            "causal_lm",
            {"source": "chat", "columns": {"prompt": {"from": "turns"}}},
            fault("columns_no_objects", name="prompt", which="only messages is"),
        ),
        (
            "causal_lm",
            {"source": "files", "columns": {"text": {"from": "turns"}}},
            fault("columns_no_objects", name="text", fix='{"text": "turns"}'),
        ),
    ],
)
def test_what_a_dictionary_says_of_a_format_is_right_or_refused_by_name(
    task: str, data: dict[str, Any], problem: Fault
) -> None:
    with refused(problem):
        data_of(task, **data)


def test_a_key_with_a_dot_is_refused_with_the_spelling_without_one() -> None:
    columns = {"messages[].role": "turns[].who"}
    with refused("key_with_dot", key="messages[].role") as caught:
        exp_id({"data": {"columns": columns}})
    assert '{"messages": {"from":' in str(caught.value)
    assert len(exp_id({"data": {"columns": {"messages": {"from": "turns", "role": "who"}}}})) == 32


def test_prompts_of_files_are_learnt_from_their_completions_unless_all_is_said() -> None:
    said = {"source": "files", "format": "alpaca"}
    assert data_of("causal_lm", **said).loss_on == "answer"
    assert data_of("causal_lm", **said, loss_on="all").loss_on == "all"
    assert data_of("causal_lm", source="chat", format="alpaca").loss_on == "all"


# Lists of objects
# --------------------------------------------------------------------------------------------------


def test_a_list_of_objects_is_named_with_its_keys(tmp_path: Path) -> None:
    turns = [
        {"who": "user", "said": "q", "role": "boss", "name": "Ada"},
        {"who": "assistant", "said": "a", "weight": 0},
        {"who": "assistant", "said": {"text": "b"}},
    ]
    columns = {"messages": {"from": "meta.turns", "role": "who", "content": "said"}}
    (row,) = read([{"meta": {"turns": turns}, "messages": "x"}], tmp_path, CHATS, columns=columns)
    assert row["messages"] == [
        {"role": "user", "content": "q", "name": "Ada"},
        {"role": "assistant", "content": "a", "weight": 0},
        {"role": "assistant", "content": {"text": "b"}},
    ]


def test_the_page_example_of_turns_reads_a_conversation(tmp_path: Path) -> None:
    columns = {"messages": {"from": "turns", "role": "who", "content": "said"}}
    rows = [{"turns": [{"who": "User", "said": "q"}, {"who": "bot", "said": "a"}]}]
    write_lines(tmp_path / "train.jsonl", rows)
    own = OwnRows.model_validate({"columns": columns})
    assert list(chats(tmp_path, "train", own)) == [{"messages": TURNS}]


def test_a_key_that_no_object_has_is_told_with_the_nearest(tmp_path: Path) -> None:
    rows = [{"turns": [{"who": "user", "said": "q"}]}]
    columns = {"messages": {"from": "turns", "role": "hwo"}}
    with refused("column_key_absent", name="messages", column="hwo", list="turns", nearest="who"):
        read(rows, tmp_path, CHATS, columns=columns)


# What rows show
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "data", "row", "problem"),
    [
        (
            "causal_lm",
            {},
            {"messages": TURNS},
            fault("rows_of_unsaid_format", format="OpenAI", source="files", wanted="texts"),
        ),
        (
            "causal_lm",
            {},
            ALPACA,
            fault("rows_of_unsaid_format", format="Alpaca", fix='"format": "alpaca"'),
        ),
        (
            "causal_lm",
            OF_CHAT,
            {"anchor": "a", "positive": "b"},
            fault("rows_of_unread_format", format="triple", name="triples"),
        ),
        ("retriever", {}, ALPACA, fault("rows_of_unread_format", format="Alpaca", name="alpaca")),
        (
            "cross_attention",
            {},
            {"conversations": TURNS},
            fault("rows_of_unread_format", format="ShareGPT"),
        ),
    ],
)
def test_rows_of_another_format_than_the_task_reads_are_called_by_their_name(
    task: str,
    data: dict[str, Any],
    row: dict[str, Any],
    problem: Fault,
    facts: Path,
    tmp_path: Path,
) -> None:
    write_lines(tmp_path / "train.jsonl", [row] * 2)
    with refused(problem, at="train.jsonl, line 1"):
        list(task_of(task, facts, tmp_path, data).rows("train"))


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        ({"conversations": TURNS}, "its format is 'sharegpt'"),
        ({"instruction": "Name it.", "answer": "Red."}, "its keys are instruction, answer"),
    ],
)
def test_a_row_unlike_the_first_ones_is_named(
    odd: dict[str, Any], what: str, tmp_path: Path
) -> None:
    rows = [ALPACA, ALPACA, odd, ALPACA]
    first = re.compile(r"[^,]+train\.jsonl, line 1")
    with refused("rows_mixed", at="line 3", what=what, first=first, format="alpaca"):
        read(rows, tmp_path, CHATS)


def test_a_row_behind_the_first_ones_says_what_it_lacks(tmp_path: Path) -> None:
    rows = [*[ALPACA] * 120, {"instruction": "Name it."}]
    with refused("format_field_missing", at="line 121", key="'output'", keys="instruction"):
        read(rows, tmp_path, CHATS)
    with refused("format_field_missing", at="line 1", key="'anchor' or 'query' or 'question'"):
        read([ALPACA], tmp_path, QUERIES, format="triples")


def test_rows_of_conversations_under_several_of_our_own_names_are_read_as_ever(
    tmp_path: Path,
) -> None:
    rows = [{"messages": TURNS}, {"prompt": "q", "completion": "a"}, {"conversations": TURNS}]
    with left_out.reading() as notes:
        assert len(read(rows, tmp_path, CHATS)) == 3
    assert notes.formats == {}
    write_lines(tmp_path / "train.jsonl", [*rows, ALPACA])
    with refused("messages_missing", at="train.jsonl, line 4"):  # behind what was read until then
        list(chats(tmp_path, "train", OwnRows()))


def test_columns_of_ones_own_are_not_guessed_about_and_those_of_a_format_are_renamed(
    tmp_path: Path,
) -> None:
    own = {"prompt": "instruction", "completion": "output"}
    (row,) = read([ALPACA], tmp_path, COMPLETIONS, columns=own)
    assert (row["prompt"], row["completion"]) == ("Name it.", "Red.")
    (row,) = read(
        [{"instruction": "Name it.", "reply": "Red."}],
        tmp_path,
        SUMMARIES,
        format="alpaca",
        columns={"output": "reply"},
    )
    assert row == {"document": "Name it.", "summary": "Red."}


def test_the_opening_line_is_the_same_when_rows_are_remembered(facts: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [ALPACA] * 3)
    task = task_of("causal_lm", facts, tmp_path, OF_CHAT)
    for _ in range(2):
        with left_out.gathering():
            content_of(task, "train", tmp_path / "cache")
            assert left_out.of_split("train").formats == {"train.jsonl: Alpaca rows": 3}


def test_a_share_of_foreign_rows_leaves_equal_questions_on_one_side(tmp_path: Path) -> None:
    rows = [{**ALPACA, "instruction": f"Name {n % 30}.", "output": str(n)} for n in range(60)]
    write_lines(tmp_path / "train.jsonl", rows)
    own = OwnRows(valid_share=0.3)
    sides: list[set[str]] = []
    for split in ("train", "valid"):
        placed = own_rows(own, split, tmp_path, layout=CHATS)
        sides.append({row["messages"][0]["content"] for _, row in placed})
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 30


# What rows hold
# --------------------------------------------------------------------------------------------------


def test_blank_outputs_are_left_out_and_earlier_turns_are_read(tmp_path: Path) -> None:
    history = [["Who?", "Ada."]]
    rows = [{**ALPACA, "output": ""}, {**ALPACA, "system": "Be brief.", "history": history}]
    with left_out.reading() as notes:
        (row,) = read(rows, tmp_path, CHATS)
    assert notes.counts == {UNANSWERED: 1}
    assert [turn["role"] for turn in row["messages"]] == ["system", *["user", "assistant"] * 2]
    with refused("prompt_without_place", at="line 2", key="system"):
        read(rows, tmp_path, COMPLETIONS)
    with refused("history_wanted", number=0, value=["Who?"]):
        read([{**ALPACA, "history": [["Who?"]]}], tmp_path, CHATS)
    with refused("text_wanted", key="input", value=7):
        read([{**ALPACA, "input": 7}], tmp_path, CHATS, format="alpaca")
    write_table(tmp_path / "valid.csv", [ALPACA, {**ALPACA, "output": ""}], ",")
    assert len(list(own_rows(OwnRows(), "valid", tmp_path, layout=CHATS))) == 1


def test_flat_rows_of_squad_are_read_and_questions_without_an_answer_left_out(
    tmp_path: Path,
) -> None:
    flat = {"id": "1", "title": "Ada", "context": "In the cellar.", "question": "Where?"}
    rows = [
        {**flat, "answers": {"text": ["cellar", "cellar"], "answer_start": [7, 7]}},
        {**flat, "answers": {"text": [], "answer_start": []}},
    ]
    with left_out.reading() as notes:
        (row,) = read(rows, tmp_path, QUESTIONS)
    assert (row["answers"], row["title"]) == (["cellar"], "Ada")
    assert notes.counts == {IMPOSSIBLE: 1}
    with refused("texts_wanted", at="line 1", key="answers", value={"texts": ["a"]}):
        read([{**flat, "answers": {"texts": ["a"]}}], tmp_path, QUESTIONS, format="squad")
    with refused("text_blank", at="line 1", key="answers[0].text", value=7):
        read([{**flat, "answers": 7}], tmp_path, QUESTIONS, format="squad")
    (row,) = read([{**flat, "answers": {"text": "cellar"}}], tmp_path, QUESTIONS)
    assert row["answers"] == ["cellar"]
    write_table(
        tmp_path / "valid.csv",
        [{**flat, "answers": "{'text': array(['cellar'], dtype=object), 'answer_start': [7]}"}],
        ",",
    )
    ((_, row),) = own_rows(OwnRows(), "valid", tmp_path, layout=QUESTIONS)
    assert row["answers"] == ["cellar"]


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        ({"text": "q"}, fault("said_elsewhere", name="messages[0].text", value="q")),
        ({"parts": ["q"]}, fault("said_elsewhere", name="messages[0].parts", value=["q"])),
        (
            {"content": [{"type": "text", "text": "q"}, "more"]},
            fault("part_wanted", name="messages[0].content[1]", value="more"),
        ),
        (
            {"content": [{"type": "image_url", "image_url": {"url": "u"}}]},
            fault("part_unread", name="messages[0].content[0].type", value="image_url"),
        ),
    ],
)
def test_a_content_that_is_not_understood_is_refused_by_its_key(
    turn: dict[str, Any], problem: Fault, tmp_path: Path
) -> None:
    write_lines(tmp_path / "train.jsonl", [{"messages": [{"role": "user", **turn}, TURNS[1]]}])
    with refused(problem, at="train.jsonl, line 1"):
        list(chats(tmp_path, "train", OwnRows()))


def test_a_turn_of_sharegpt_is_named_by_its_own_keys(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": [{"type": "image"}]}, {"from": "gpt", "value": "a"}]
    write_lines(tmp_path / "train.jsonl", [{"conversations": turns}])
    with refused("part_unread", name="conversations[0].value[0].type", value="image"):
        list(chats(tmp_path, "train", OwnRows()))


# Files of their own
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source", "data"),
    [
        ("beir", "beir", {}),
        ("dpr", "dpr", {"passages": 1}),
        ("tevatron", "tevatron", {}),
        ("fid", "fid", {}),
        ("nq", "nq", {}),
        ("pretokenised", "pretokenised", {}),
    ],
)
def test_a_source_of_before_and_the_format_of_its_name_give_the_same_rows(
    name: str, source: str, data: dict[str, Any], facts: Path, tmp_path: Path
) -> None:
    folder = tmp_path / name
    shutil.copytree(FIXTURES / name, folder)
    before = task_of("retriever", facts, folder, {**data, "source": source})
    now = task_of("retriever", facts, folder, {**data, **OF_FILES, "format": name})
    assert list(before.rows("train")) == list(now.rows("train"))
    assert before.encoding_id() == now.encoding_id()


def test_judgements_of_ms_marco_are_read_with_more_negatives(facts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "msmarco"
    shutil.copytree(FIXTURES / "msmarco", folder)
    with (folder / "qrels.dev.small.tsv").open("a") as file:
        file.write("4\t0\t10\t0\n")  # judged, and no answer
    lines = [{"query_id": "4", "negative_docids": ["11", "12"]}]
    write_lines(folder / "negatives.jsonl", lines)
    data = {"format": "msmarco", "negatives": "negatives.jsonl"}
    task = task_of("retriever", facts, folder, data)
    rows = list(task.rows("valid"))
    assert [(row["id"], row["query"]) for row in rows] == [
        ("4", "who keeps the map"),
        ("5", "what is empty"),
    ]
    assert [one["id"] for one in rows[0]["positives"]] == ["12"]
    assert [one["id"] for one in rows[0]["negatives"]] == ["11"]
    (folder / "qrels.dev.tsv").write_text("4\t0\t99\t1\n5\t0\t12\t0\n")
    with refused("split_in_two_files", files="qrels.dev.small.tsv and qrels.dev.tsv"):
        list(task.rows("valid"))
    named = task_of("retriever", facts, folder, {**data, "files": {"valid": "qrels.dev.tsv"}})
    with refused("marco_id_unknown", what="passage", id="99", file="collection.tsv"):
        list(named.rows("valid"))
    with refused("marco_split_absent", split="test"):
        list(task.rows("test"))
    (folder / "collection.tsv").write_text("10\tone\n11\n")
    with refused("tabs_wanted", at="line 2", count=1, wanted="id and passage"):
        list(task.rows("train"))


def test_an_id_of_two_texts_is_refused_in_the_files_of_ms_marco_and_beir(tmp_path: Path) -> None:
    def marco() -> list[Any]:
        _, placed = msmarco(tmp_path, "train", file=None, corpus=None, negatives=None)
        return list(placed)

    (tmp_path / "qrels.train.tsv").write_text("1\t0\t7\t1\n")
    (tmp_path / "queries.train.tsv").write_text("1\twho\n")
    (tmp_path / "queries.dev.tsv").write_text("1\twho\n2\twhat\n")
    (tmp_path / "collection.tsv").write_text("7\ta\n7\ta\n")
    ((_, row),) = marco()
    assert row["positive_passages"] == [{"docid": "7", "text": "a"}]
    (tmp_path / "collection.tsv").write_text("7\ta\n7\tb\n")
    with refused("id_of_two_texts", what="passages", id="7", text="b"):
        marco()
    (tmp_path / "collection.tsv").write_text("7\ta\n")
    (tmp_path / "queries.dev.tsv").write_text("1\tanother\n")
    with refused("id_of_two_texts", what="queries", id="1"):
        marco()
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("1\t0\t7\t1\n")
    for number in "12":
        query = {"_id": "1", "text": f"question {number}"}
        write_lines(tmp_path / f"queries.{number}.jsonl", [query])
    with refused("id_of_two_texts", what="queries", id="1", text="question 2"):
        list(beir(tmp_path, "test", files=Splits(), negatives=None))


def test_negatives_of_a_query_may_stand_on_several_lines(tmp_path: Path) -> None:
    lines = [{"query_id": 4, "negative_docids": ids} for ids in (["1", "2"], ["2", 3])]
    write_lines(tmp_path / "more.jsonl", lines)
    assert negative_ids(tmp_path / "more.jsonl") == {"4": ["1", "2", "3"]}


def test_triples_of_ms_marco_may_be_texts(facts: Path, tmp_path: Path) -> None:
    (tmp_path / "triples.train.small.tsv").write_text('1 what\tyes "so"\t2\nwho\tshe\the\n')
    task = task_of("retriever", facts, tmp_path, {"format": "msmarco"})
    rows = list(task.rows("train"))
    assert rows[0] == {
        "id": "1",
        "query": "1 what",
        "positives": [{"text": 'yes "so"'}],
        "negatives": [{"text": "2"}],
        "item": 0,
    }


def test_pages_of_kilt_are_looked_up_and_missed_by_name(facts: Path, tmp_path: Path) -> None:
    page = {"wikipedia_id": "7", "wikipedia_title": "Ada", "text": {"paragraph": ["Ada", "Hi.\n"]}}
    found = {"wikipedia_id": "7", "start_paragraph_id": 1, "end_paragraph_id": -1}
    row = {"id": "1", "input": "q", "output": [{"answer": "a", "provenance": [found]}]}
    write_lines(tmp_path / "train.jsonl", [row, {**row, "output": [{"answer": "a"}]}])
    task = task_of("retriever", facts, tmp_path, {})
    with refused("kilt_pages_absent", file="kilt_knowledgesource.json"):
        list(task.rows("train"))
    write_lines(tmp_path / "kilt_knowledgesource.jsonl", [page])
    with left_out.reading() as notes:
        (one,) = task.rows("train")
    assert one["positives"] == [{"id": "7:1-1", "title": "Ada", "text": "Hi."}]
    assert notes.counts == {WITHOUT_POSITIVE: 1}
    write_lines(tmp_path / "train.jsonl", [{**row, "output": [{"answer": "a", "provenance": 7}]}])
    with refused("list_of_wanted", key="output[0].provenance", value=7):
        list(task.rows("train"))
    write_lines(tmp_path / "train.jsonl", [row])
    write_lines(tmp_path / "kilt_knowledgesource.jsonl", [{**page, "wikipedia_id": "8"}])
    with refused("kilt_page_unknown", page="7"):
        list(task.rows("train"))


def test_questions_of_dpr_and_of_ms_marco_are_read_by_commands(tmp_path: Path) -> None:
    asked = list(queries(FIXTURES / "dpr" / "nq-test.qa.csv"))
    assert [(one.id, one.answers) for one in asked] == [
        ("0", ["cellar", "the cellar"]),
        ("1", ["attic"]),
        ("2", ["Chidi's friend", "Chidi"]),
    ]
    (query, *_) = queries(FIXTURES / "msmarco" / "queries.dev.tsv")
    assert (query.id, query.text) == ("4", "who keeps the map")
    found = list(passages(FIXTURES / "msmarco" / "collection.tsv"))
    assert found[1] == {"id": "11", "text": 'The "tower" is empty.', "title": ""}
    (tmp_path / "bad.qa.csv").write_text("a\t['b']\nc\n")
    with refused("qa_fields", at="row 2", count=1, line=2):
        list(placed_rows(tmp_path / "bad.qa.csv"))


def test_a_file_of_questions_alone_is_ranked_for_and_refused_by_a_retriever(
    facts: Path, tmp_path: Path
) -> None:
    shutil.copy(FIXTURES / "dpr" / "nq-test.qa.csv", tmp_path)
    (tmp_path / "run.trec").write_text("0\t11\t2.5\n0\t10\t1.5\n1\t12\t1.0\n2\t13\t1.0\n")
    (tmp_path / "corpus.tsv").write_text("id\ttext\ttitle\n10\ta\tt\n")
    data = {"source": "ranked", "format": "dpr", "files": {"train": "nq-test.qa.csv"}}
    data |= {"rankings": {"train": "run.trec"}, "corpus": "corpus.tsv"}
    first = next(iter(task_of("fid", facts, tmp_path, data).rows("train")))
    assert (first["answers"], len(first["ctxs"])) == (["cellar", "the cellar"], 2)
    data = {"format": "dpr", "files": {"train": "nq-test.qa.csv"}}
    with refused("field_missing", at="row 1", key="positive_ctxs", keys="question, answers"):
        list(task_of("retriever", facts, tmp_path, data).rows("train"))


# Rows to predict
# --------------------------------------------------------------------------------------------------


def test_rows_to_predict_need_not_hold_what_is_learnt(tmp_path: Path) -> None:
    asked = {"instruction": "Name it.", "input": ""}
    turns = [{"from": "human", "value": "q"}]

    def of(rows: list[dict[str, Any]], layout: Any, **own: Any) -> list[dict[str, Any]]:
        placed = [(f"row {number}", row) for number, row in enumerate(rows)]
        of_files = OwnRows.model_validate(own)
        return [dict(row) for _, row in unlabelled(placed, of_files, layout, tmp_path)]

    for own in ({}, {"format": "alpaca"}):
        (row,) = of([asked], CHATS, **own)
        assert row == {"messages": [{"role": "user", "content": "Name it."}]}
    assert of([{"messages": TURNS}], CHATS, format="alpaca") == [{"messages": TURNS}]
    (row,) = of([{"conversations": turns}], CHATS, format="sharegpt")
    assert row["messages"] == turns
    (row,) = of([asked], COMPLETIONS, format="alpaca")
    assert row["prompt"].endswith("Name it.\n\n### Response:\n")
    assert of([{"prompt": "x"}, {"messages": TURNS}], CHATS) == [
        {"prompt": "x"},
        {"messages": TURNS},
    ]
    assert of([{"question": "q", "context": "c"}], QUESTIONS, format="dpr")[0]["context"] == "c"
    columns = {"question": "anchor", "contexts": "positive"}
    (row,) = of([{"anchor": "q"}], QUESTIONS, columns=columns)
    assert row["question"] == "q"
    (row,) = of([{"question": "q", "ctxs": []}], QUESTIONS, columns=columns)
    assert row["question"] == "q"
    with refused("column_absent", key="question", column="anchor"):
        of([{"text": "q"}], QUESTIONS, columns=columns)


def test_json_that_is_one_object_over_several_lines_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps({"text": "a", "more": [1]}, indent=2))
    assert [row for _, row in placed_rows(tmp_path / "one.json")] == [{"text": "a", "more": [1]}]
    (tmp_path / "torn.json").write_text('{"text": "a",\n"more": [1]\n')
    with refused("json_malformed", at="line 1"):
        list(placed_rows(tmp_path / "torn.json"))


def test_rows_to_predict_are_read_where_the_task_trained_on_made_up_ones(tmp_path: Path) -> None:
    row = {"prompt": "Where does Bal Kor live?"}
    found = unlabelled([("row 1", row)], OwnRows(), Layout(()), tmp_path)
    assert [dict(one) for _, one in found] == [row]
