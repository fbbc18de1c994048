"""The columns and keys of rows that nothing reads are named in the opening line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.facts import experiment, write_facts
from tests.unit.test_own_rows import write_parquet, write_table
from trainer import tasks
from trainer.data import left_out
from trainer.data.content import content_of
from trainer.data.token_store import store_of
from trainer.protocol.task import Places
from trainer.statistics.opening import opening_line

PASSAGE = {"docid": "1", "title": "t", "text": "x"}
OTHER = {"docid": "2", "title": "t", "text": "y"}
ASKED = {"id": "a", "question": "q", "answers": ["a"]}
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
DPR = {"question": "q", "answers": ["x"], "positive_ctxs": [PASSAGE], "negative_ctxs": []}
NAMED = "{% for m in messages %}{{ m.role ~ m.name ~ m.content ~ eos_token }}{% endfor %}"
NO_FILES = {"train": None, "valid": None}

# (task, changes of its data, a row, its keys that nothing reads besides "url")
ROWS: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    ("causal_lm", {"source": "files"}, {"text": "x", "title": "t"}, ["title"]),
    (
        "causal_lm",
        {"source": "files", "loss_on": "answer"},
        {"prompt": "p", "input": "i", "completion": "c", "text": "t"},
        ["text"],
    ),
    (
        "causal_lm",
        {"source": "chat", "chat_template": "chatml"},
        {"messages": TURNS, "system": "s", "tools": [], "prompt": "p"},
        ["prompt"],
    ),
    (
        "causal_lm",
        {"source": "chat", "chat_template": "chatml"},
        {"messages": [TURNS[0] | {"name": "n", "id": "1"}, TURNS[1] | {"name": "m", "label": 0}]},
        ["messages[].name", "messages[].label"],
    ),
    (
        "causal_lm",
        {"source": "chat", "chat_template": "named.jinja"},
        {"messages": [TURNS[0] | {"name": "n"}, TURNS[1] | {"hidden": True, "weight": 1}]},
        ["messages[].hidden"],
    ),
    (
        "causal_lm",
        {"source": "chat", "chat_template": "chatml", "columns": {"messages": "conversations"}},
        {"conversations": TURNS, "messages": TURNS},
        ["messages (replaced by data.columns)"],
    ),
    (
        "cross_attention",
        {"source": "files"},
        {**ASKED, "contexts": ["c"], "titles": ["t"], "title": "t", "dataset": "d"},
        ["title"],
    ),
    ("fid", {"source": "files"}, {**ASKED, "ctxs": [PASSAGE], "answer": "a"}, ["answer"]),
    ("fid", {"source": "fid"}, {**ASKED, "target": "a", "contexts": ["c"], "titles": ["t"]}, []),
    ("fid", {"source": "files"}, DPR | {"hard_negative_ctxs": [], "ctx": 1}, ["ctx"]),
    (
        "fid",
        {"source": "files"},
        {**ASKED, "ctxs": [{"heading": "t", "text": "x", "hasanswer": True}] * 2},
        ["ctxs[].heading"],
    ),
    (
        "summariser",
        {"document": "document", "summaries": ["summary"], "columns": {"document": "article"}},
        {"id": "1", "article": "d", "summary": "s", "highlights": "h"},
        ["highlights"],
    ),
    (
        "vera",
        {"source": "files", "train_tasks": ["judged"], "valid_tasks": ["judged"]},
        {"statement": "s", "label": 1, "golds": ["g"]},
        ["golds"],
    ),
    (
        "retriever",
        {"source": "tevatron", "files": NO_FILES},
        {
            "query_id": "1",
            "query": "q",
            "positive_passages": [PASSAGE],
            "negative_passages": [OTHER],
        }
        | {"text": "t"},
        ["text"],
    ),
    (
        "retriever",
        {"source": "files", "files": NO_FILES, "passages": 1},
        {**ASKED, "contexts": ["a b", "c"], "useful_contexts": [1, 0]},
        ["answers"],
    ),
    ("retriever", {"source": "dpr", "files": NO_FILES, "passages": 1}, DPR, ["answers"]),
    (
        "retriever",
        {"source": "pretokenised", "files": NO_FILES, "passages": 1},
        {"query_id": "1", "query": [1], "positives": [[2]], "negatives": [[3]], "scores": [1]},
        ["scores"],
    ),
]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=4, valid=2)


def task_of(name: str, data: dict[str, Any], facts: Path, folder: Path) -> Any:
    cfg = tasks.parse(experiment(name, facts, data=data))
    return tasks.load(cfg, Places(folder, folder / "cache", folder))


def unread(task: Any, folder: Path) -> dict[str, int]:
    with left_out.gathering():
        content_of(task, "train", folder / "cache")
        return left_out.of_split("train").keys.unread()


@pytest.mark.parametrize(("name", "data", "row", "others"), ROWS)
def test_every_key_that_no_part_of_the_task_reads_is_named_with_its_count(
    name: str,
    data: dict[str, Any],
    row: dict[str, Any],
    others: list[str],
    facts: Path,
    tmp_path: Path,
) -> None:
    rows = [row, {**row, "url": "u", "date": None}, {**row, "url": ""}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (tmp_path / "named.jinja").write_text(NAMED)
    task = task_of(name, data, facts, tmp_path)
    expected = dict.fromkeys(others, 3) | {"url": 1}
    for _ in range(2):  # read, then remembered
        assert unread(task, tmp_path) == expected


def test_groups_of_statements_name_them_too(facts: Path, tmp_path: Path) -> None:
    (tmp_path / "judged").mkdir()
    groups = [{"golds": ["s"], "distractors": [], "source": "x"}] * 2
    (tmp_path / "judged" / "train.json").write_text(json.dumps(groups))
    task = task_of("vera", {"train_tasks": ["judged"], "valid_tasks": ["judged"]}, facts, tmp_path)
    assert unread(task, tmp_path) == {"source": 2}


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
def test_tables_name_them_too(kind: str, facts: Path, tmp_path: Path) -> None:
    rows = [{"text": "a", "lang": "en"}, {"text": "b", "lang": "en"}]
    if kind == "parquet":
        write_parquet(tmp_path / "train.parquet", rows)
    else:
        write_table(tmp_path / f"train.{kind}", rows, "," if kind == "csv" else "\t")
    task = task_of("causal_lm", {"source": "files"}, facts, tmp_path)
    assert unread(task, tmp_path) == {"lang": 2}


def test_a_share_names_only_the_rows_of_its_side(facts: Path, tmp_path: Path) -> None:
    rows = [{"text": f"text {number}", "lang": "en"} for number in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    task = task_of("causal_lm", {"source": "files", "valid_share": 0.3}, facts, tmp_path)
    count = len(list(task.rows("train")))
    assert 0 < count < 40
    assert unread(task, tmp_path) == {"lang": count}


def test_the_opening_line_names_them_and_strict_lets_them_pass(facts: Path, tmp_path: Path) -> None:
    rows = [{"text": "a", **{f"k{number}": 1 for number in range(14)}}] * 1200
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    task = task_of("causal_lm", {"source": "files"}, facts, tmp_path)
    with left_out.settling(tmp_path, strict=True):
        line = opening_line(store_of(task, "train", tmp_path), left_out.of_split("train"))
    named = ", ".join(f"'k{number}' (1,200 rows)" for number in range(12))
    assert line.endswith(f"; nothing reads {named} and 2 more keys")
    assert not (tmp_path / left_out.FILE).exists()
