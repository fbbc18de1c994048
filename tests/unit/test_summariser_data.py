"""Rows of a summariser: from JSONL, CSV, TSV and Parquet files, Hugging Face data sets, and the
embedded corpus.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.config.block import validate
from trainer.errors import ConfigError, DataError
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
            r"train\.jsonl, line 1: no such column. 'text': Did you mean 'txt'",
        ),
        (
            '{"text": "x", "short": "y"}\n\n{"text": 3, "short": "y"}\n',
            "line 3: 'text' is 3, want a text",
        ),
        ("", "is empty"),
    ],
)
def test_a_bad_line_is_named(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(DataError, match=said):
        of(tmp_path)


def test_bad_tables_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,short\na,b\nc\n")
    with pytest.raises(DataError, match="row 2: not as many fields as the 2 columns"):
        of(tmp_path)
    (tmp_path / "train.csv").write_text("text,short\na,b,c\n")
    with pytest.raises(DataError, match="row 1: not as many fields"):
        of(tmp_path)
    (tmp_path / "train.csv").write_text("text,short\n")
    with pytest.raises(DataError, match="holds no row"):
        of(tmp_path)


def test_a_document_longer_than_csvs_old_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(f"text,short\n{'x' * 200_000},y\n")
    assert len(of(tmp_path)[0]["document"]) == 200_000


def test_a_split_that_is_nowhere_or_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no train split"):
        of(tmp_path)
    write_jsonl(tmp_path)
    write_separated(tmp_path, ".csv", ",")
    with pytest.raises(DataError, match=r"holds train\.jsonl and train\.csv"):
        of(tmp_path)
    with pytest.raises(DataError, match=r"nowhere\.csv cannot be read: No such file"):
        of(tmp_path, files={"train": "nowhere.csv"})
    with pytest.raises(DataError, match="none was given"):
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
    with pytest.raises(DataError, match=r"data\.splits"):
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
        ({"source": "datasets"}, "say which"),
        ({"source": "files", "dataset": "x"}, "leave it out"),
        ({"source": "files", "subset": "x"}, "subset, revision and splits are of a data set"),
        ({"source": "stdlib_docs", "files": {"train": "x.csv"}}, "names no files"),
        ({"source": "files", "summaries": []}, "summaries"),
    ],
)
def test_a_source_that_contradicts_itself_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(Data, values)


def test_fp16_is_refused_with_the_reason_and_bf16_offered() -> None:
    from exp_configs import EXP_GROUPS, vary

    values = vary(EXP_GROUPS["summarise_t5_base"][0], train={"precision": "fp16"})
    with pytest.raises(ConfigError, match=r"65,504.*become NaN.*Use 'bf16'"):
        validate(Config, values)
