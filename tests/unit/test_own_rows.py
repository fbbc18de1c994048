"""A user's own rows: every kind of file gives the same, foreign columns get our names, and what is
wrong is said with its place.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.wording import Fault, fault, refused, says
from trainer.config.block import validate
from trainer.config.formats.layouts import CHATS, QUESTIONS
from trainer.config.own_rows import OwnRows
from trainer.data.readers import questions, retrieved
from trainer.data.readers.own_rows import own_rows
from trainer.protocol.task import Places
from trainer.tasks.causal_lm.config import Data as TextData
from trainer.tasks.cross_attention.config import Data as ContextData
from trainer.tasks.fid.config import Data as ReaderData
from trainer.tasks.retriever import rows as retriever_rows
from trainer.tasks.retriever.config import Data as RetrieverData
from trainer.tasks.summariser import data as summaries
from trainer.tasks.summariser.config import Data as SummaryData
from trainer.tasks.vera import groups
from trainer.tasks.vera.config import Data as StatementData

# Foreign names, a text with a quote and a line's end, lists, an empty cell.
ROWS: list[dict[str, Any]] = [
    {"query": 'Who said "hi"?', "gold": ["Ann", "Anna"], "docs": ["Ann\nsaid hi.", "No."]},
    {"query": "Where?", "gold": ["Örebro"], "docs": ["In Örebro."], "source": "mine"},
]
COLUMNS = {"question": "query", "answers": "gold", "contexts": "docs", "dataset": "source"}
WANTED = [
    {
        "question": 'Who said "hi"?',
        "answers": ["Ann", "Anna"],
        "contexts": ["Ann\nsaid hi.", "No."],
    },
    {
        "question": "Where?",
        "answers": ["Örebro"],
        "contexts": ["In Örebro."],
        "dataset": "mine",
    },
]


def packed(path: Path) -> None:
    with gzip.open(path.with_name(f"{path.name}.gz"), "wb") as file:
        file.write(path.read_bytes())
    path.unlink()


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_table(path: Path, rows: list[dict[str, Any]], separator: str) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(names)
        for row in rows:
            cells = [row.get(name, "") for name in names]
            writer.writerow([json.dumps(c) if isinstance(c, list) else c for c in cells])


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    ".jsonl": write_lines,
    ".json": lambda path, rows: path.write_text(json.dumps(rows)) and None,
    ".csv": lambda path, rows: write_table(path, rows, ","),
    ".tsv": lambda path, rows: write_table(path, rows, "\t"),
    ".parquet": write_parquet,
}


def read(folder: Path, split: str = "train", **own: Any) -> list[dict[str, Any]]:
    said = {"columns": COLUMNS, **own}
    return list(questions.qa_rows(folder, split, OwnRows.model_validate(said)))


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("suffix", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(
    suffix: str, is_packed: bool, tmp_path: Path
) -> None:
    WRITERS[suffix](tmp_path / f"train{suffix}", [{"source": None, **row} for row in ROWS])
    if is_packed:
        packed(tmp_path / f"train{suffix}")
    assert read(tmp_path) == WANTED


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".parquet", "saved"])
def test_an_object_has_no_keys_of_other_rows(kind: str, tmp_path: Path) -> None:
    """Arrow gives every object of a column the keys of all of them."""

    def row(key: str) -> dict[str, Any]:
        call = {"function": {"name": "f", "arguments": {key: "x"}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        tool = {"function": {"name": "f", "parameters": {"properties": {key: {"type": "string"}}}}}
        return {"messages": [{"role": "user", "content": "q"}, turn], "tools": [tool]}

    rows, own = [row("city"), row("unit")], OwnRows()
    if kind == "saved":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
        own = OwnRows(dataset="saved")
    else:
        WRITERS[kind](tmp_path / f"train{kind}", rows)
    found = [dict(one) for _, one in own_rows(own, "train", tmp_path, layout=CHATS)]
    assert found == rows


def test_a_folder_of_files_is_one_split_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "validation").mkdir()
    write_table(tmp_path / "validation" / "b.csv", ROWS[1:], ",")
    write_table(tmp_path / "validation" / "a.csv", ROWS[:1], ",")
    columns = {name: column for name, column in COLUMNS.items() if name != "dataset"}
    found = read(tmp_path, "valid", columns=columns)
    assert [row["question"] for row in found] == ['Who said "hi"?', "Where?"]
    (tmp_path / "more").mkdir()
    write_lines(tmp_path / "more" / "x.jsonl", ROWS)
    assert read(tmp_path, "test", files={"test": "more"}) == WANTED


@pytest.mark.parametrize("kind", ["saved", "files"])
def test_a_data_set_of_hugging_face_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    if kind == "saved":
        of_split = datasets.Dataset.from_list([{"source": None, **row} for row in ROWS])
        datasets.DatasetDict({"train": of_split}).save_to_disk(tmp_path / "set")
    else:
        (tmp_path / "set").mkdir()
        write_lines(tmp_path / "set" / "train.jsonl", [{"source": None, **row} for row in ROWS])
    assert read(tmp_path, dataset="set") == WANTED
    said = {
        "saved": fault("set_has_no_split", split="validation", key="data.splits"),
        "files": fault("set_unreadable", dataset="set", split="validation", key="data.splits"),
    }
    with refused(said[kind]):
        read(tmp_path, "valid", dataset="set")


# Columns
# --------------------------------------------------------------------------------------------------


def test_nested_columns_are_followed_and_a_name_with_a_dot_is_taken_as_it_is(
    tmp_path: Path,
) -> None:
    ctxs = [{"title": "T", "text": "a"}, {"title": "U", "text": "b"}]
    row = {"meta": {"q": "why?"}, "gold.text": "x", "ctxs": ctxs}
    write_lines(tmp_path / "train.jsonl", [row])
    columns = {
        "question": "meta.q",
        "answers": "gold.text",
        "contexts": "ctxs[].text",
        "titles": "ctxs[].title",
    }
    columns["answer"] = columns.pop("answers")
    assert read(tmp_path, columns=columns) == [
        {"question": "why?", "answers": ["x"], "contexts": ["a", "b"], "titles": ["T", "U"]}
    ]


def test_objects_of_a_list_are_put_together_out_of_columns(tmp_path: Path) -> None:
    said = {"conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]}
    write_lines(tmp_path / "train.jsonl", [said])
    columns = {
        "messages[].role": "conversations[].from",
        "messages[].content": "conversations[].value",
    }
    own = OwnRows(columns=columns)
    ((_, row),) = own_rows(own, "train", tmp_path, layout=CHATS)
    assert row["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


def test_a_mapped_name_replaces_every_other_name_of_the_same(tmp_path: Path) -> None:
    row = {"query": "SELECT 1", "q": "why?", "answer": "x", "answers": ["y"], "contexts": ["c"]}
    write_lines(tmp_path / "train.jsonl", [{**row, "context": "d"}])
    own = OwnRows(columns={"question": "q", "answers": "answers", "contexts": "contexts"})
    assert list(questions.qa_rows(tmp_path, "train", own)) == [
        {"question": "why?", "answers": ["y"], "contexts": ["c"]}
    ]
    (found,) = retrieved.rows(
        tmp_path, "train", source="files", own=own, contexts=9, sort_by_score=True
    )
    assert (found["question"], found["ctxs"]) == ("why?", [{"text": "c"}])


@pytest.mark.parametrize(
    ("cell", "wanted"),
    [
        ('["a", "b"]', ["a", "b"]),
        ("['a', 'b']", ["a", "b"]),  # as pandas writes a list
        ("a, b", ["a, b"]),
        ("[1] a footnote", ["[1] a footnote"]),
        ("[sic]", ["[sic]"]),
        (' ["a"]', ["a"]),
    ],
)
def test_a_cell_holds_a_list_as_json_or_one_text(
    cell: str, wanted: list[str], tmp_path: Path
) -> None:
    write_table(tmp_path / "train.csv", [{"question": "q", "answers": cell, "contexts": "c"}], ",")
    (row,) = read(tmp_path, columns={})
    assert (row["answers"], row["contexts"]) == (wanted, ["c"])


def test_a_cell_that_begins_as_a_list_and_is_none_is_refused(tmp_path: Path) -> None:
    row = {"question": "q", "answers": '["a", "b', "contexts": "c"}
    write_table(tmp_path / "train.csv", [row], ",")
    with refused("table_cell_half_list", at="train.csv, row 1", key="answers"):
        read(tmp_path, columns={})


def test_a_text_of_a_table_is_never_taken_for_a_list(tmp_path: Path) -> None:
    row = {"question": '["q"]', "answers": "a", "context": "[1, 2]"}
    write_table(tmp_path / "train.csv", [row], ",")
    (found,) = read(tmp_path, columns={})
    assert (found["question"], found["context"]) == ('["q"]', "[1, 2]")


def test_a_column_that_is_not_there_is_one_error_with_those_that_are(tmp_path: Path) -> None:
    write_table(tmp_path / "train.csv", ROWS, ",")
    columns = {"question": "qurey", "answers": "label", "contexts": "docs"}
    with refused("column_absent", key="question", column="qurey", nearest="query") as caught:
        read(tmp_path, columns=columns)
    says("column_absent", caught.value, key="answers", column="label")
    says("columns_there", caught.value, columns="query, gold, docs, source")


def test_a_column_that_only_some_rows_have_is_there(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", ROWS)  # "source" is in the second row alone
    assert read(tmp_path) == WANTED


@pytest.mark.parametrize(
    ("schema", "values", "said"),
    [
        (
            ContextData,
            {"columns": {"qestion": "q"}},
            fault(
                "columns_unknown",
                column="qestion",
                nearest="question",
                ours=re.compile(".*contexts.*"),
            ),
        ),
        (
            ContextData,
            {"columns": {"answer": "a", "answers": "b"}},
            fault("columns_of_one_thing", one="answer", other="answers"),
        ),
        (
            ContextData,
            {"source": "nq", "columns": {"question": "q"}},
            fault("source_reads_no_rows", source="nq", keys="columns"),
        ),
        (
            ContextData,
            {"source": "nq", "files": {"train": "x"}},
            fault("source_names_no_files", source="nq"),
        ),
        (ContextData, {"splits": {"train": "x"}}, fault("keys_of_a_set")),
        (ContextData, {"valid_share": 0.1, "files": {"valid": "x"}}, fault("share_beside_split")),
        (ContextData, {"columns": {"question": ""}}, fault("text_empty", key="columns.question")),
        (
            TextData,
            {"columns": {"prompt": "p"}},
            fault("columns_unknown", column="prompt", ours="text"),
        ),
        (TextData, {"source": "chat", "loss_on": "all"}, fault("loss_of_chat")),
        (
            TextData,
            {"source": "files", "chat_template": "chatml"},
            fault("source_without_conversations"),
        ),
        (
            SummaryData,
            {"columns": {"summary": "s"}, "summaries": ["s"]},
            fault("columns_named_twice"),
        ),
        (
            StatementData,
            {"train_tasks": ["a"], "valid_tasks": ["b"]},
            fault("one_task_of_files", tasks="a, b"),
        ),
    ],
)
def test_what_contradicts_itself_is_refused_before_a_file_is_read(
    schema: Any, values: dict[str, Any], said: Fault
) -> None:
    with refused(said):
        validate(schema, {"source": "files", **values})


# Tables
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("question;answer\na;b\n", fault("table_one_column", separator=";", wanted=",")),
        ("a,b,a\n1,2,3\n", fault("table_column_twice", column="a")),
        ("a,b\n1\n", fault("table_row_fields", at="row 1", columns=2, line=2)),
        ("a,b\n", fault("table_empty")),
        ("a,b\n1,2\ncaf\udce9,3\n", fault("not_utf8", at="train.csv, line 3", byte=3)),
        (
            "\udcff\udcfea\0",
            fault("other_kind_of_file", at="train.csv, line 1", byte=0, kind="it is UTF-16"),
        ),
        ("\x1f\udc8b", fault("other_kind_of_file", byte=1, kind="it is packed with gzip")),
        ('a,b\n"1,2\n', fault("table_row_unreadable", at="row 1", reason="unexpected end of data")),
    ],
)
def test_a_bad_table_is_named(content: str, said: Fault, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(content, encoding="utf-8", errors="surrogateescape")
    with refused(said):
        read(tmp_path, columns={})


def test_files_of_another_kind_and_a_data_path_that_is_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.xlsx").write_bytes(b"PK\x03\x04")
    with refused("file_kind", at="train.xlsx", endings=re.compile(r"\.jsonl.*")):
        read(tmp_path, files={"train": "train.xlsx"})
    with refused("data_path_is_file"):
        read(tmp_path / "train.xlsx")
    with refused("split_file_absent", split="train", names="train.jsonl"):
        read(tmp_path)


# One file for both splits
# --------------------------------------------------------------------------------------------------


def test_one_file_is_parted_by_its_questions_alone(tmp_path: Path) -> None:
    rows = [{"q": f"question {n % 200}", "a": str(n), "c": "c"} for n in range(400)]
    write_table(tmp_path / "all.csv", rows, ",")
    columns = {"question": "q", "answers": "a", "context": "c"}
    parts = {
        split: [row["question"] for row in read(tmp_path, split, columns=columns, valid_share=0.2)]
        for split in ("train", "valid")
    }
    assert len(parts["train"]) + len(parts["valid"]) == 400
    assert not set(parts["train"]) & set(parts["valid"])
    assert 0.1 < len(parts["valid"]) / 400 < 0.3
    named = {"files": {"train": "all.csv"}, "columns": columns, "valid_share": 0.2}
    (tmp_path / "other.csv").write_text("x\n1\n")
    assert [row["question"] for row in read(tmp_path, "valid", **named)] == parts["valid"]
    with refused("share_of_two_files", files="all.csv and other.csv", key="data.files.train"):
        read(tmp_path, "valid", columns=columns, valid_share=0.2)


# One question file for three tasks
# --------------------------------------------------------------------------------------------------


def test_the_same_file_and_columns_serve_three_tasks(tmp_path: Path) -> None:
    rows = [
        {"frage": "Who?", "antwort": "Ann", "texte": ["Ann it was.", "Bob it was not."]},
        {"frage": "Where?", "antwort": "Here", "texte": ["There."]},
        {"frage": "When?", "antwort": "Now", "texte": ["Then.", "Later."]},
    ]
    write_table(tmp_path / "train.csv", rows, ",")
    own = {
        "source": "files",
        "columns": {"question": "frage", "answers": "antwort", "contexts": "texte"},
    }
    contexts = validate(ContextData, own)
    reader = validate(ReaderData, {**own, "contexts": 9})
    retriever = validate(RetrieverData, own)
    read_as = {
        "cross_attention": list(questions.qa_rows(tmp_path, "train", contexts)),
        "fid": list(
            retrieved.rows(
                tmp_path, "train", source="files", own=reader, contexts=9, sort_by_score=True
            )
        ),
        "retriever": list(retriever_rows.rows(retriever, "train", tmp_path)),
    }
    for task, name in (("cross_attention", "question"), ("fid", "question")):
        assert [row[name] for row in read_as[task]] == ["Who?", "Where?", "When?"]
    assert [row["contexts"] for row in read_as["cross_attention"]] == [r["texte"] for r in rows]
    texts = [[ctx["text"] for ctx in row["ctxs"]] for row in read_as["fid"]]
    assert texts == [row["texte"] for row in rows]
    # That which holds an answer, then one that stands alone; of the third nothing is known.
    positives = [(row["query"], row["positives"]) for row in read_as["retriever"]]
    assert positives == [("Who?", [{"text": "Ann it was."}]), ("Where?", [{"text": "There."}])]
    assert read_as["retriever"][0]["negatives"] == [{"text": "Bob it was not."}]


def test_useful_contexts_are_a_retrievers_positives_and_a_fid_file_serves_all(
    tmp_path: Path,
) -> None:
    ctxs = [{"title": "T", "text": "a"}, {"title": "U", "text": "b"}]
    row = {"question": "q", "answers": ["z"], "ctxs": ctxs, "useful_contexts": [0, 1]}
    write_lines(tmp_path / "train.jsonl", [row])
    data = validate(RetrieverData, {"source": "files"})
    (found,) = retriever_rows.rows(data, "train", tmp_path)
    assert (found["positives"], found["negatives"]) == ([ctxs[1]], [ctxs[0]])
    (read_row,) = questions.qa_rows(tmp_path, "train")
    assert (read_row["contexts"], read_row["titles"]) == (["a", "b"], ["T", "U"])


# The other tasks
# --------------------------------------------------------------------------------------------------


def test_texts_completions_and_summaries_have_columns(tmp_path: Path) -> None:
    write_table(tmp_path / "train.csv", [{"a": "ask: ", "b": "say", "n": "7"}], ",")
    texts = OwnRows(columns={"text": "b"})
    assert list(questions.texts(tmp_path, "train", "files", texts)) == [{"text": "say"}]
    pairs = OwnRows(columns={"prompt": "a", "completion": "b"})
    (row,) = questions.completions(tmp_path, "train", pairs)
    assert row == {"text": "ask: say", "answer_spans": [(5, 8)]}
    columns = {"document": "a", "summary": "b", "id": "n"}
    data = validate(SummaryData, {"source": "files", "columns": columns})
    places = Places(tmp_path, tmp_path / "cache", tmp_path)
    (summary,) = summaries.rows(data, places, "train")
    assert summary == {"id": "7", "document": "ask:", "summaries": ["say"]}


def statements(**values: Any) -> StatementData:
    tasks = {"train_tasks": ["mine"], "valid_tasks": ["mine"]}
    return validate(StatementData, {"source": "files", **tasks, **values})


def test_statements_come_as_right_and_wrong_ones_or_with_labels(tmp_path: Path) -> None:
    row = {"right": "Water is wet.", "wrong": ["Water is dry.", "Water is square."]}
    write_table(tmp_path / "train.csv", [row], ",")
    columns = {"golds": "right", "distractors": "wrong"}
    (found,) = groups.rows(statements(columns=columns), "train", tmp_path)
    assert (found["golds"], found["distractors"]) == ([row["right"]], row["wrong"])
    labelled = [{"text": "Ice is cold.", "ok": "1"}, {"text": "Ice is hot.", "ok": "False"}]
    write_table(tmp_path / "train.csv", labelled, ",")
    how: dict[str, Any] = {"columns": {"statement": "text", "label": "ok"}}
    both = groups.rows(statements(**how, boolean=["mine"]), "train", tmp_path)
    assert [(row["golds"], row["distractors"]) for row in both] == [
        (["Ice is cold."], []),
        ([], ["Ice is hot."]),
    ]
    with refused("label_says_it_all", at="row 1", task="mine"):
        groups.rows(statements(**how), "train", tmp_path)
    write_table(tmp_path / "train.csv", [{"text": "Ice.", "ok": "maybe"}], ",")
    with refused("label_unknown", key="label", value="maybe", choices=re.compile("1, 0, true.*")):
        groups.rows(statements(**how, boolean=["mine"]), "train", tmp_path)


def test_groups_of_a_task_may_be_a_table_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    write_table(tmp_path / "mine" / "dev.csv", [{"golds": "Yes.", "distractors": "No."}], ",")
    (found,) = groups.rows(statements(source="groups"), "valid", tmp_path)
    assert (found["golds"], found["distractors"]) == (["Yes."], ["No."])


def test_the_layout_of_questions_names_everything_once() -> None:
    names = [name for group in QUESTIONS.groups for name in group]
    assert len(set(names)) == len(names)
