"""No file, row, column or question vanishes or is parted in silence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_own_rows import (
    packed,
    read,
    statements,
    write_lines,
    write_parquet,
    write_table,
)
from tests.wording import refused
from trainer.config.block import validate
from trainer.config.own_rows import OwnRows
from trainer.data import left_out
from trainer.data.chat.rows import chats
from trainer.data.readers import folders, row_files
from trainer.data.readers.passages import passages
from trainer.protocol.task import Places
from trainer.tasks.summariser import data as summaries
from trainer.tasks.summariser.config import Data as SummaryData
from trainer.tasks.vera import groups


def test_every_entry_of_a_folder_is_read_or_named(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    for name in ("a.jsonl", "B.JSONL", "c.ndjson", "d.Csv"):
        writer = (
            write_lines if "sv" not in name else lambda path, rows: write_table(path, rows, ",")
        )
        writer(folder / name, [{"question": name, "answers": "a", "contexts": "c"}])
    packed(folder / "c.ndjson")
    for name in ("_SUCCESS", ".a.jsonl.crc", "README.md", "LICENSE"):
        (folder / name).write_text("x")
    assert [row["question"] for row in read(tmp_path, columns={})] == [
        *("B.JSONL", "a.jsonl", "c.ndjson", "d.Csv")
    ]
    (folder / "f.jsonl").symlink_to(tmp_path / "gone")
    (folder / "sub").mkdir()
    for name in ("b.jsonl.bz2", "g.jsonl.zst", "h.xz", "i.txt"):
        (folder / name).write_bytes(b"x")
    with refused("folder_of_others") as error:
        read(tmp_path, columns={})
    for said in (
        "b.jsonl.bz2",
        "f.jsonl (a link to nothing)",
        "sub (a folder)",
        "g.jsonl.zst",
        "h.xz",
        "i.txt",
    ):
        assert said in str(error.value)


def test_a_split_is_found_in_whatever_case_and_none_hides_behind_another(tmp_path: Path) -> None:
    row = {"question": "q", "answers": "a", "contexts": "c"}
    write_lines(tmp_path / "Train.NDJSON", [row])
    assert [one["question"] for one in read(tmp_path, columns={})] == ["q"]
    write_table(tmp_path / "test.csv", [row], ",")
    write_table(tmp_path / "TEST.tsv", [row], "\t")
    with refused("split_in_two_files", files="test.csv and TEST.tsv"):
        read(tmp_path, "test", columns={})
    (tmp_path / "one").mkdir()
    write_lines(tmp_path / "one" / "a.jsonl", [row])
    (tmp_path / "one" / "b.jsonl.bz2").write_bytes(b"x")
    with refused("share_of_two_files", files="a.jsonl and b.jsonl.bz2"):
        read(tmp_path / "one", columns={}, valid_share=0.5)


def test_a_file_beside_the_one_that_is_read_is_named_and_a_second_of_its_kind_refused(
    tmp_path: Path,
) -> None:
    row = {"question": "q", "answers": "a", "contexts": "c"}
    write_lines(tmp_path / "train.jsonl", [row])
    write_table(tmp_path / "train.csv", [row], ",")
    for name in ("train.jsonl.bz2", "train.parquet.gz", "train.txt", "test.csv"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "train").mkdir()
    with left_out.reading() as notes:
        assert len(read(tmp_path, columns={})) == 1
    assert notes.counts == {folders.OTHERS: 4}
    assert [Path(one.place).name for one in notes.first] == [
        *("train", "train.csv", "train.jsonl.bz2", "train.parquet.gz")
    ]
    with left_out.reading() as notes:
        assert len(read(tmp_path, columns={}, files={"train": "train.csv"})) == 1
    assert not notes
    for name in ("valid.jsonl", "dev.jsonl"):
        write_lines(tmp_path / name, [row])
    with refused("split_in_two_files", files="valid.jsonl and dev.jsonl"):
        read(tmp_path, "valid", columns={})


def test_parts_and_copies_beside_the_file_that_is_read_are_named(tmp_path: Path) -> None:
    row = {"question": "q", "answers": "a", "contexts": "c"}
    parts = (
        *("train (1).jsonl", "train copy.jsonl", "train-00001-of-00002.jsonl", "train.1.jsonl"),
        *("train2.csv", "train_part2.jsonl.gz"),
    )
    others = ("train-small.jsonl", "train_qrels.tsv", "training.jsonl", "train.1.txt", "test2.csv")
    for name in (*parts, *others, "train.jsonl"):
        write_lines(tmp_path / name, [row])
    with left_out.reading() as notes:
        assert len(read(tmp_path, columns={})) == 1
    assert notes.counts == {folders.OTHERS: len(parts)}
    assert sorted(Path(one.place).name for one in notes.first) == list(parts)


def test_a_file_is_no_part_of_its_folder_twice(tmp_path: Path) -> None:
    row = {"question": "q", "answers": "a", "contexts": "c"}
    folder = tmp_path / "train"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        write_lines(folder / name, [row])
    (folder / "c.jsonl").symlink_to(folder / "a.jsonl")
    (folder / "b.jsonl.gz").write_bytes(b"x")
    with refused("folder_of_twins", twins="b.jsonl.gz (as b.jsonl), c.jsonl (as a.jsonl)"):
        read(tmp_path, columns={})


@pytest.mark.parametrize("name", ["test.jsonl", "Test-1.jsonl", "Valid.csv", "dev_2.jsonl"])
def test_a_share_is_not_taken_from_the_file_of_another_split(name: str, tmp_path: Path) -> None:
    row = {"question": "q", "answers": "a", "contexts": "c"}
    write_lines(tmp_path / name, [row])
    with refused("share_of_two_files", files=name):
        read(tmp_path, columns={}, valid_share=0.5)


@pytest.mark.parametrize("name", ["values.jsonl", "testimonials.jsonl"])
def test_a_share_is_taken_from_a_file_of_any_other_name(name: str, tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "answers": "a", "contexts": "c"} for n in range(40)]
    write_lines(tmp_path / name, rows)
    assert 0 < len(read(tmp_path, columns={}, valid_share=0.5)) < len(rows)


@pytest.mark.parametrize(("suffix", "separator"), [(".csv", ","), (".tsv", "\t")])
def test_a_header_in_the_middle_of_a_table_is_no_row(
    suffix: str, separator: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a{suffix}"
    table = f"id{separator}text\n1{separator}a\n"
    path.write_text(table + table)
    with refused("table_header_again", at=f"a{suffix}, row 2"):
        list(row_files.placed_rows(path))
    for other in ("\ufeff" + table, table.replace("text", " Text")):
        path.write_text(table + other)
        with refused("table_header_again", at=f"a{suffix}, row 2"):
            list(row_files.placed_rows(path))
    path.write_text("text\ntext\n")  # of one column it may be a text
    assert [row for _, row in row_files.placed_rows(path)] == [{"text": "text"}]


def test_a_header_in_the_middle_of_a_corpus_is_no_passage(tmp_path: Path) -> None:
    corpus = "id\ttext\ttitle\n1\ta\tT\n"
    (tmp_path / "corpus.tsv").write_text(corpus + "\ufeff" + corpus)
    with refused("table_header_again", at="corpus.tsv, line 3"):
        list(passages(tmp_path / "corpus.tsv"))


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (
            '1\t"To be\n2\tor not"\n3\t"Heroes"\n',
            [("1", '"To be'), ("2", 'or not"'), ("3", '"Heroes"')],
        ),
        ('1\t"a ""b"""\n2\t"c"\n', [("1", 'a "b"'), ("2", "c")]),
        ('1\t"two\nlines"\n2\t"c"\n', [("1", "two\nlines"), ("2", "c")]),
        ('1\t"two\n\nlines"\n', [("1", "two\n\nlines")]),
        ('1\t"a\ttab"\n', [("1", "a\ttab")]),
        ('1\t["a", "b"]\n2\t"\n', [("1", '["a", "b"]'), ("2", '"')]),
        ("1\ta\n\n2\t\n", [("1", "a"), ("2", None)]),
    ],
)
def test_quotes_of_a_tsv_are_plain_unless_it_is_quoted_as_csv(
    content: str, wanted: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    (tmp_path / "a.tsv").write_text("id\ttext\n" + content)
    rows = [row for _, row in row_files.placed_rows(tmp_path / "a.tsv")]
    assert [(row["id"], row["text"]) for row in rows] == wanted


def test_one_column_whose_quote_stays_open_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('text\n"To be\nor not"\n')
    with refused("table_quote_open", at="a.tsv, line 2"):
        list(row_files.placed_rows(tmp_path / "a.tsv"))


ALIKE = ["Who is {}?", "who is {}?", " Who  is {}? ", "WHO IS {}\uff1f"]


def test_questions_that_are_alike_are_on_one_side(tmp_path: Path) -> None:
    asked = [form.format(f"Zo\u00eb {n}") for n in range(200) for form in ALIKE]
    asked += [form.format(f"Zoe\u0308 {n}") for n in range(200) for form in ALIKE[:1]]
    write_lines(
        tmp_path / "all.jsonl", [{"question": q, "answers": "a", "context": "c"} for q in asked]
    )
    sides = {
        split: [
            re.findall(r"\d+", row["question"])[0]
            for row in read(tmp_path, split, columns={}, valid_share=0.2)
        ]
        for split in ("train", "valid")
    }
    assert len(sides["train"]) + len(sides["valid"]) == 1000
    assert not set(sides["train"]) & set(sides["valid"])
    assert 100 < len(sides["valid"]) < 300


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    "form",
    [
        lambda q, n: {"messages": [turn("user", q), turn("assistant", f"a {n}")]},
        lambda q, n: {
            "messages": [turn("system", f"s {n}"), turn("user", q), turn("assistant", "a")]
        },
        lambda q, n: {
            "messages": [turn("assistant", "Hi!"), turn("user", q), turn("assistant", str(n))]
        },
        lambda q, n: {
            "messages": [{"from": "human", "value": q}, {"from": "gpt", "value": str(n)}]
        },
        lambda q, n: {"messages": json.dumps([turn("user", q), turn("assistant", str(n))])},
        lambda q, n: {"prompt": q, "completion": f"a {n}"},
        lambda q, n: {"prompt": "Translate:", "input": q, "completion": f"a {n}"},
        lambda q, n: {
            "messages": [turn("ChatGPT", f"Hi {n}"), turn("Human", q), turn("ai", str(n))]
        },
        lambda q, n: {"messages": [turn("bing", str(n)), turn("user", q), turn("model", "a")]},
        lambda q, n: {"prompt": [turn("user", q)], "completion": [turn("assistant", str(n))]},
        lambda q, n: {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": q}] if n % 2 else q},
                turn("assistant", str(n)),
            ]
        },
    ],
)
def test_conversations_are_parted_by_what_is_asked(
    form: Callable[[str, int], dict[str, Any]], tmp_path: Path
) -> None:
    rows = [form(f"Question {n % 100}?", n) for n in range(400)]
    write_lines(tmp_path / "all.jsonl", rows)
    own = OwnRows(valid_share=0.2)
    sides = {
        split: [
            next(one["content"] for one in row["messages"] if one["role"] == "user").split("\n")[-1]
            for row in chats(tmp_path, split, own)
        ]
        for split in ("train", "valid")
    }
    assert len(sides["train"]) + len(sides["valid"]) == 400
    assert not set(sides["train"]) & set(sides["valid"])
    assert 20 < len(sides["valid"]) < 180


def test_a_summarisers_documents_and_false_statements_are_parted_by_themselves(
    tmp_path: Path,
) -> None:
    rows = [{"source": f"d {n % 50}", "target": f"t {n}", "id": n} for n in range(200)]
    write_lines(tmp_path / "all.jsonl", rows)
    own = {"source": "files", "document": "source", "summaries": ["target"], "valid_share": 0.3}
    data = validate(SummaryData, own)
    places = Places(tmp_path, tmp_path, tmp_path)
    sides = [
        {row["document"] for row in summaries.rows(data, places, s)} for s in ("train", "valid")
    ]
    assert not sides[0] & sides[1]
    assert len(sides[0]) + len(sides[1]) == 50
    (tmp_path / "all.jsonl").unlink()
    wrong = [{"golds": [], "distractors": [f"false {n}"]} for n in range(100)]
    write_lines(tmp_path / "all.jsonl", wrong)
    data = statements(boolean=["mine"], valid_share=0.3)
    counts = [len(groups.rows(data, split, tmp_path)) for split in ("train", "valid")]
    assert min(counts) > 10


@pytest.mark.parametrize("name", ["question", "answers", "context"])
def test_a_binary_column_is_refused_by_name(name: str, tmp_path: Path) -> None:
    row: dict[str, Any] = {"question": "q", "answers": "a", "context": "c", "picture": b"\x89PNG"}
    write_parquet(tmp_path / "train.parquet", [row])
    assert len(read(tmp_path, columns={})) == 1  # nobody asks for the picture
    write_parquet(tmp_path / "train.parquet", [{**row, name: b"bytes"}])
    with refused("column_binary", at="train.parquet, row 1", key=name, value=b"bytes"):
        read(tmp_path, columns={})


def test_a_parquet_file_that_names_a_column_twice_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    parquet.write_table(table, tmp_path / "train.parquet")
    with refused("table_column_twice", at="train.parquet", column="text"):
        list(row_files.placed_rows(tmp_path / "train.parquet"))
