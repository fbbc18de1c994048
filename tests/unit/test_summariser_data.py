"""Rows of a summariser: from JSONL, CSV, TSV and Parquet files, Hugging Face data sets, and the
embedded corpus.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.wording import Fault, fault, refused
from trainer.config.block import validate
from trainer.data import left_out
from trainer.protocol.task import Places
from trainer.tasks.summariser import data
from trainer.tasks.summariser.config import Config, Data

ROWS = [
    {"id": "a", "text": 'One, "two"\nthree.', "short": "One."},
    {"id": "b", "text": "Vier fünf.", "short": "Fünf."},
]
WANTED = [
    {"id": "a", "document": 'One, "two"\nthree.', "summaries": ["One."]},
    {"id": "b", "document": "Vier fünf.", "summaries": ["Fünf."]},
]


def write_jsonl(folder: Path) -> None:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_separated(folder: Path, suffix: str, separator: str) -> None:
    quoted = [['"' + value.replace('"', '""') + '"' for value in row.values()] for row in ROWS]
    lines = [separator.join(["id", "text", "short"]), *(separator.join(row) for row in quoted)]
    (folder / f"train{suffix}").write_text("\n".join(lines) + "\n")


def write_parquet(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(ROWS), folder / "train.parquet")


WRITERS: dict[str, Callable[[Path], None]] = {
    ".jsonl": write_jsonl,
    ".csv": lambda folder: write_separated(folder, ".csv", ","),
    ".tsv": lambda folder: write_separated(folder, ".tsv", "\t"),
    ".parquet": write_parquet,
}


def of(folder: Path | None, split: str = "train", **values: Any) -> list[dict[str, Any]]:
    columns = {"document": "text", "summaries": ["short"]}
    cfg = validate(Data, {"source": "files", **columns, **values})
    return list(data.rows(cfg, Places(folder, Path(folder or ".") / "cache", Path("runs")), split))


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(suffix: str, tmp_path: Path) -> None:
    WRITERS[suffix](tmp_path)
    assert of(tmp_path) == WANTED
    (tmp_path / f"train{suffix}").rename(tmp_path / f"dev{suffix}")
    assert of(tmp_path, "valid") == WANTED
    (tmp_path / f"dev{suffix}").rename(tmp_path / f"mine{suffix}")
    assert of(tmp_path, "test", files={"test": f"mine{suffix}"}) == WANTED


def test_lists_of_sentences_are_joined_and_lists_of_summaries_are_references(
    tmp_path: Path,
) -> None:
    row = {"source": ["One.", " Two.\n"], "target": ["a", "", "b"], "other": "c"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = of(tmp_path, document="source", summaries=["target", "other"])
    assert found == {"id": "1", "document": "One. Two.", "summaries": ["a", "b", "c"]}


def test_a_row_without_a_summary_stays_without_one(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(
        '{"text": null, "short": null}\n{"text": "x", "short": " "}\n'
    )
    assert [(row["document"], row["summaries"]) for row in of(tmp_path)] == [("", []), ("x", [])]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            '{"txt": "x", "short": "y"}\n',
            fault("column_absent_in_line", at="train.jsonl, line 1", column="text", nearest="txt"),
        ),
        (
            '{"text": "x", "short": "y"}\n\n{"text": 3, "short": "y"}\n',
            fault("text_or_texts_wanted", at="line 3", key="text", value=3),
        ),
        ("", fault("file_empty")),
    ],
)
def test_a_bad_line_is_named(content: str, said: Fault, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(content)
    with refused(said):
        of(tmp_path)


def test_bad_tables_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,short\na,b\nc\n")
    with refused("table_row_fields", at="row 2", columns=2):
        of(tmp_path)
    (tmp_path / "train.csv").write_text("text,short\na,b,c\n")
    with refused("table_row_fields", at="row 1"):
        of(tmp_path)
    (tmp_path / "train.csv").write_text("text,short\n")
    with refused("table_empty"):
        of(tmp_path)


def test_a_document_longer_than_csvs_old_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(f"text,short\n{'x' * 200_000},y\n")
    assert len(of(tmp_path)[0]["document"]) == 200_000


def test_a_split_that_is_nowhere_or_twice_is_refused(tmp_path: Path) -> None:
    with refused("split_file_absent", split="train"):
        of(tmp_path)
    write_jsonl(tmp_path)
    write_separated(tmp_path, ".csv", ",")
    with refused("split_in_two_files", files="train.jsonl and train.csv"):
        of(tmp_path)
    with refused("file_unreadable", at="nowhere.csv", reason="No such file or directory"):
        of(tmp_path, files={"train": "nowhere.csv"})
    with refused("data_path_missing"):
        of(None)


@pytest.mark.parametrize("kind", ["saved", "files"])
def test_a_data_set_of_hugging_face_is_read_from_a_folder(kind: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    if kind == "saved":
        of_split = datasets.Dataset.from_list(ROWS)
        datasets.DatasetDict({"train": of_split, "validation": of_split.select([1])}).save_to_disk(
            tmp_path / "set"
        )
    else:
        (tmp_path / "set").mkdir()
        write_jsonl(tmp_path / "set")
        (tmp_path / "set" / "validation.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    assert of(tmp_path, source="datasets", dataset="set") == WANTED
    assert of(tmp_path, "valid", source="datasets", dataset="set") == WANTED[1:]
    assert (
        of(tmp_path, "test", source="datasets", dataset="set", splits={"test": "validation"})
        == WANTED[1:]
    )
    said = {
        "saved": fault("set_has_no_split", split="test", key="data.splits"),
        "files": fault("set_unreadable", dataset="set", split="test", key="data.splits"),
    }
    with refused(said[kind]):
        of(tmp_path, "test", source="datasets", dataset="set")


def test_the_embedded_corpus_gives_bodies_with_their_first_lines() -> None:
    train, valid = of(None, source="stdlib_docs"), of(None, "valid", source="stdlib_docs")
    assert len(train) > 1000
    assert not {row["id"] for row in train} & {row["id"] for row in valid}
    assert all(row["document"] and row["summaries"][0] for row in train)
    (found,) = [row for row in train + valid if row["id"] == "textwrap.dedent"]
    assert found["summaries"] == ["Remove any common leading whitespace from every line in `text`."]
    assert found["document"].startswith("This can be used to make triple-quoted strings line up")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"source": "datasets"}, fault("dataset_unnamed", source="datasets")),
        (
            {"source": "files", "dataset": "x"},
            fault("dataset_beside_files", source="files", dataset="x"),
        ),
        (
            {"source": "files", "subset": "x"},
            fault("keys_of_a_set", keys="subset, revision and splits"),
        ),
        (
            {"source": "stdlib_docs", "files": {"train": "x.csv"}},
            fault("source_names_no_files", source="stdlib_docs"),
        ),
        ({"source": "files", "summaries": []}, fault("tuple_empty", key="summaries")),
    ],
)
def test_a_source_that_contradicts_itself_is_refused(values: dict[str, Any], said: Fault) -> None:
    with refused(said):
        validate(Data, values)


def test_fp16_is_refused_with_the_reason_and_bf16_offered() -> None:
    from exp_configs import EXP_GROUPS, vary

    values = vary(EXP_GROUPS["summarise_t5_base"][0], train={"precision": "fp16"})
    with refused("fp16_of_t5"):
        validate(Config, values)


def test_summaries_in_a_script_that_rouge_cannot_read_are_noted(tmp_path: Path) -> None:
    russian = {"text": "Собака 1 спит.", "short": "Собака спит."}
    numbered = {**russian, "short": "Собака спит с 2020 года."}  # ROUGE would score the year
    latin = {"text": "Der Hund schläft.", "short": "Größe 7"}
    lines = [json.dumps(row) + "\n" for row in (russian, latin, numbered)]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    with left_out.reading() as notes:
        assert len(of(tmp_path)) == 3
    assert notes.counts == {data.OTHER_SCRIPT: 2}
    assert notes.first[0].place.endswith("train.jsonl, line 1")
