"""What is said of a split when a run begins, and that every task counts what its limits cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.facts import experiment, write_facts
from trainer import tasks
from trainer.data.token_store import TokenStore, open_store, store_of
from trainer.protocol.task import Cut, Encoded, Places
from trainer.statistics.opening import opening_line


def store(folder: Path, rows: list[Encoded]) -> TokenStore:
    how: dict[str, Any] = {"encoding_id": "e", "split": "train", "cache_dir": folder}
    numbers = [{"number": number} for number in range(len(rows))]
    return open_store(
        lambda: numbers, lambda row: rows[row["number"]], **how, length=lambda row: len(row["ids"])
    )


def row(*lengths: int) -> Encoded:
    cut = Cut("data.context_tokens", 256, lengths)
    ids = [1] * sum(min(length, 256) for length in lengths)
    return Encoded({"ids": ids, "ids_lengths": list(lengths)}, cuts={"contexts": cut})


def test_the_line_names_what_was_cut_and_by_which_limit(tmp_path: Path) -> None:
    made = store(tmp_path, [row(256, 300), row(1000), row(10)])
    assert opening_line(made) == (
        "train: 3 rows, 778 tokens; 2 of 4 contexts cut, 50.3% of their tokens: "
        "data.context_tokens 256; `stats` shows more"
    )
    assert made.cuts()["contexts"]["tokens_cut"] == 44 + 744


def test_nothing_cut_is_said_and_an_old_store_tells_rows_and_tokens(tmp_path: Path) -> None:
    made = store(tmp_path, [row(5), row(6, 7)])
    assert opening_line(made) == "train: 2 rows, 18 tokens, nothing cut"
    meta = made.folder / "meta.json"
    old = {name: value for name, value in json.loads(meta.read_text()).items() if name != "cuts"}
    meta.write_text(json.dumps(old))
    assert opening_line(TokenStore(made.folder)) == "train: 2 rows, 18 tokens"


@pytest.mark.parametrize("task", ["cross_attention", "fid", "retriever", "summariser", "vera"])
def test_every_task_counts_its_texts_as_its_ledger_does(task: str, tmp_path: Path) -> None:
    write_facts(tmp_path)
    loaded = tasks.load(
        tasks.parse(experiment(task, tmp_path)), Places(tmp_path, tmp_path / "c", tmp_path)
    )
    made = store_of(loaded, "valid", tmp_path / "c")
    whole: dict[str, list[int]] = {}
    for raw in loaded.rows("valid"):
        for uncut in loaded.uncut_fields(raw).values():
            whole.setdefault(uncut.setting, []).extend(len(text) for text in uncut.texts)
    assert made.cuts()
    for counts in made.cuts().values():
        lengths = whole[counts["setting"]]
        assert counts["texts"] == len(lengths)
        assert counts["tokens"] == sum(lengths)
        assert counts["tokens_cut"] == sum(max(0, n - counts["limit"]) for n in lengths)
