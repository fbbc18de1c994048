"""Text that no program could use is one DataError with file and place, in every reader."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.config.block import validate
from trainer.config.own_rows import OwnRows
from trainer.data.formats import packed
from trainer.data.formats.json_stream import json_items
from trainer.data.formats.json_text import BadJson, is_too_deep, json_value
from trainer.data.formats.packed import open_file
from trainer.data.readers import jsonl, passages, questions, retrieved, row_files
from trainer.errors import DataError
from trainer.protocol.task import Places
from trainer.recipes.cross_attention.files import records
from trainer.recipes.vera.adapters.adapter import whole_json
from trainer.tasks.causal_lm.chat_rows import chats
from trainer.tasks.retriever import rows as retriever_rows
from trainer.tasks.retriever.config import Data as RetrieverData
from trainer.tasks.summariser import data as summaries
from trainer.tasks.summariser.config import Data as SummaryData
from trainer.tasks.vera import groups
from trainer.tasks.vera.config import Data as StatementData

GOOD = {
    **{"question": "q", "query": "q", "answers": ["a"], "contexts": ["c"], "text": "t", "docid": 1},
    **{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}]},
    **{"document": "d", "summary": "s", "statement": "x", "label": "1"},
}
ODD = {
    "half of a pair": (r'{"text": "half \ud83d"}', r"\\ud83d.* half of a surrogate pair"),
    "the other half": (r'{"text": ["a", "\ude00 b"]}', r"\\ude00.* half of a surrogate pair"),
    "half in a key": (r'{"\ud83d": 1}', r"\\ud83d.* half of a surrogate pair"),
    "nested": ('{"a": ' + "[" * 980 + "]" * 980 + "}", "nested deeper than 100 levels"),
    "nested beyond Python": ('{"a":' * 9999 + "1" + "}" * 9999, "nested deeper than 100 levels"),
    "nested and broken": ('{"a": ' + '[1,{"b":' * 150_000, "nested deeper|malformed JSON"),
    "a long number": (
        '{"a": ' + "9" * 5000 + "}",
        "number of thousands of digits|integer overflow",
    ),
    "a key twice": ('{"text": "a", "text": "b"}', "the key 'text' stands twice"),
    "a key twice inside": ('{"a": [{"b": 1, "b": 2}]}', "the key 'b' stands twice"),
}
STATEMENTS = validate(
    StatementData,
    {"source": "files", "train_tasks": ["m"], "valid_tasks": ["m"], "boolean": ["m"]},
)
READERS: dict[str, Callable[[Path], Any]] = {
    "texts": lambda folder: questions.texts(folder, "train", "files"),
    "questions": lambda folder: questions.qa_rows(folder, "train"),
    "chats": lambda folder: chats(folder, "train", OwnRows()),
    "reader": lambda folder: retrieved.rows(
        folder, "train", source="files", contexts=1, sort_by_score=False
    ),
    "retriever": lambda folder: retriever_rows.rows(
        validate(RetrieverData, {"source": "files"}), "train", folder
    ),
    "summaries": lambda folder: summaries.rows(
        validate(SummaryData, {"source": "files"}), Places(folder, folder, folder), "train"
    ),
    "statements": lambda folder: groups.rows(STATEMENTS, "train", folder),
    "predictions": lambda folder: row_files.placed_rows(next(folder.iterdir())),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize(("text", "said"), ODD.values(), ids=ODD)
@pytest.mark.parametrize("kind", ["lines", "list"])
def test_every_task_refuses_it_with_its_place(
    kind: str, text: str, said: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    rows = [json.dumps(GOOD), json.dumps(GOOD), text]
    (name, content) = (
        ("train.jsonl", "\n".join(rows))
        if kind == "lines"
        else ("train.json", "[" + ",\n".join(rows) + "]")
    )
    (tmp_path / name).write_text(content)
    place = r"train\.jsonl, line 3" if kind == "lines" else r"train\.json, item [123]"
    with pytest.raises(DataError, match=rf"{place}: .*({said})"):
        list(read(tmp_path))


@pytest.mark.parametrize(("text", "said"), ODD.values(), ids=ODD)
def test_corpora_questions_and_published_files_refuse_it_with_their_line(
    text: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(GOOD) + "\n" + text)
    for read in (passages.passages, questions.queries):
        with pytest.raises(DataError, match=rf"train\.jsonl, line 2: .*({said})"):
            list(read(tmp_path / "train.jsonl"))
    with pytest.raises(DataError, match=rf"train\.jsonl, line 2: .*({said})"):
        list(records(tmp_path, "train"))
    (tmp_path / "train.jsonl").rename(tmp_path / "train.old")
    (tmp_path / "train.json").write_text(f"[{text}]")
    with pytest.raises(DataError, match=rf"train\.json.*({said})"):
        list(records(tmp_path, "train"))
    with pytest.raises(DataError, match=rf"train\.json.*({said})"):
        whole_json(tmp_path / "train.json")


def test_a_pair_is_one_character_and_an_escaped_backslash_is_none(tmp_path: Path) -> None:
    text = json.dumps({"text": "\U0001f600", "path": "C:\\ud800\\ude00", "é": "\\\\ud83d"})
    assert json_value(text) == json.loads(text)
    (tmp_path / "train.json").write_text(f"[{text}]")
    assert [row for _, row in jsonl.objects(tmp_path / "train.json")] == [json.loads(text)]


@pytest.mark.parametrize("before", range(0, 40, 3))
def test_an_escape_is_seen_whole_wherever_a_reading_ends(before: int) -> None:
    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(7 if size else 0)

        def peek(self, size: int = 0) -> bytes:
            return b""

    def items(text: str) -> Iterator[Any]:
        return json_items(Slow(text.encode()))  # pyright: ignore[reportArgumentType]

    pad = "x" * before
    pair = rf'[{{"a": "{pad}\\\\\ud83d\ude00\ud83d\ude00\\"}}]'
    assert list(items(pair)) == json.loads(pair)
    with pytest.raises(BadJson, match="ud83d in line 2 is half"):
        list(items(rf'[{{"a": "{pad}\ud83d\ude00",' + "\n" + rf'"b": "{pad}\ud83d"}}]'))


def test_nesting_counts_the_deepest_place() -> None:
    value: Any = 1
    for _ in range(100):
        value = [value, {}]
    assert not is_too_deep(value)
    assert is_too_deep([value])


# Packed files
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["train.jsonl.gz", "train.json.gz", "train.csv.gz", "train.tsv.gz"]
)
def test_a_torn_file_is_refused(name: str, tmp_path: Path) -> None:
    rows = [{"text": str(number) * 50} for number in range(3000)]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    if name == "train.json.gz":
        content = json.dumps(rows)
    if name in ("train.csv.gz", "train.tsv.gz"):
        content = "text\n" + "".join(row["text"] + "\n" for row in rows)
    (tmp_path / name).write_bytes(gzip.compress(content.encode())[:-300])
    with pytest.raises(DataError, match=r"cannot be read behind .* \d+.*Fetch it again"):
        list(row_files.placed_rows(tmp_path / name))


@pytest.mark.parametrize(
    "name", ["train.jsonl.gz", "train.json.gz", "train.csv.gz", "train.tsv.gz"]
)
@pytest.mark.parametrize("filling", [b" ", b'{"text": "a"}\n'], ids=["one line", "many lines"])
def test_what_unpacks_without_end_is_stopped(
    filling: bytes, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "FREE_BYTES", 1 << 18)
    start = b'[{"text": "a"},' if ".json." in name else b"text\n" if "sv" in name else b""
    filling = filling.replace(b"\n", b",") if ".json." in name else filling
    (tmp_path / name).write_bytes(gzip.compress(start + filling * ((2 << 20) // len(filling))))
    with pytest.raises(DataError, match=rf"{name}: its first [\d,]+ bytes unpack to more than"):
        list(row_files.placed_rows(tmp_path / name))


def test_a_large_packed_file_of_texts_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "FREE_BYTES", 1 << 16)
    line = b"The same sentence stands in every row, behind its number, as in logs."
    content = b"".join(b"%d %s\n" % (number, line) for number in range(20_000))
    (tmp_path / "a.gz").write_bytes(gzip.compress(content))
    assert len(content) > 15 * (tmp_path / "a.gz").stat().st_size
    with open_file(tmp_path / "a.gz") as file:
        assert file.read() == content


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE", 1000)
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' + " " * 1000 + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: longer than 1,000 bytes"):
        list(jsonl.read_jsonl(tmp_path / "a.jsonl"))


# Tables
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "test.csv",
            "who sings x\t['A', 'B']\nwhere is y\t['C']\n",
            r"separated by '\\t', want ','.* no header",
        ),
        ("test.csv", "who sings x\t['A']\n", r"separated by '\\t', want ','.* no header"),
        ("test.csv", "question\tanswers, all\nq\ta\n", r"separated by '\\t', want ','"),
        ("test.tsv", 'who sings x\t["A", "B"]\n', r"holds a list, so it is a row and no header"),
    ],
)
def test_a_table_of_dpr_says_tabs_and_no_header(
    name: str, content: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"{name}: its .*{said}"):
        list(questions.qa_rows(tmp_path, "test"))
