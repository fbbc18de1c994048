"""Named validation sets: which rows they are, and who refuses them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.facts import experiment, facts, write_facts
from tests.unit.test_own_rows import write_lines
from tests.wording import refused
from trainer import tasks
from trainer.config.own_rows import OwnRows, Splits
from trainer.data.content import content_of, rows_of, valid_splits
from trainer.data.token_store import store_of
from trainer.protocol.task import Places


def test_a_set_is_read_as_the_validation_split_is(tmp_path: Path) -> None:
    folder = write_facts(tmp_path / "data", train=8, valid=4)
    write_lines(folder / "hard.jsonl", facts(12, 15))
    sets = {"hard": "hard.jsonl", "few": "valid.jsonl[:2]"}
    cfg = tasks.parse(dict(experiment("fid", folder, data={"valid_sets": sets})))
    places = Places(folder, tmp_path / "cache", tmp_path)
    task = tasks.load(cfg, places)
    assert valid_splits(cfg) == ["valid", "valid_hard", "valid_few"]
    asked = {
        split: [row["question"] for row in rows_of(task, split)()] for split in valid_splits(cfg)
    }
    assert asked["valid_hard"] == [row["question"] for row in facts(12, 15)]
    assert asked["valid_few"] == asked["valid"][:2]
    stores = {split: store_of(task, split, places.cache_dir) for split in valid_splits(cfg)}
    assert [len(store) for store in stores.values()] == [4, 3, 2]
    assert stores["valid_hard"].digest == content_of(task, "valid_hard", places.cache_dir)[0]
    write_lines(folder / "hard.jsonl", facts(12, 16))
    again = content_of(task, "valid_hard", places.cache_dir)
    assert again[0] != stores["valid_hard"].digest
    assert again[1] == 4


def test_a_set_of_a_data_set_is_one_of_its_splits() -> None:
    own = OwnRows(dataset="some/set", splits=Splits(train="t"), valid_sets={"b": "test[:9]"})
    assert own.of_set("b").splits == Splits(train="t", valid="test[:9]")
    files = OwnRows(valid_share=0.1, valid_sets={"b": "b.jsonl"}).of_set("b")
    assert (files.files.valid, files.valid_share) == ("b.jsonl", 0.0)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "../a", "_a", "a_b"])
def test_the_name_of_a_set_is_one_word(name: str) -> None:
    with pytest.raises(ValidationError):
        OwnRows(valid_sets={name: "b.jsonl"})


def test_a_source_without_files_has_no_sets(tmp_path: Path) -> None:
    values = dict(experiment("causal_lm", tmp_path))
    values["data"] = {"source": "stdlib_docs", "valid_sets": {"b": "b.jsonl"}}
    with refused("sets_of_no_files", source="stdlib_docs"):
        tasks.parse(values)
