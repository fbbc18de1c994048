"""Text that no program could use is one DataError with file and place, in every reader."""

from __future__ import annotations

import gzip
import io
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.wording import Fault, fault, refused, says
from trainer.config.block import validate
from trainer.config.own_rows import OwnRows
from trainer.data.chat.rows import chats
from trainer.data.formats import conversation, packed
from trainer.data.formats.json_stream import json_items
from trainer.data.formats.json_text import BadJson, is_too_deep, json_value
from trainer.data.formats.normal_form import is_blank
from trainer.data.formats.packed import open_file
from trainer.data.readers import fields, jsonl, passages, questions, retrieved, row_files
from trainer.errors import DataError
from trainer.protocol.task import Places
from trainer.recipes.cross_attention.files import records
from trainer.recipes.vera.adapters.adapter import whole_json
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
DEEP = fault("json_too_deep", depth=100)
ODD = {
    "half of a pair": (r'{"text": "half \ud83d"}', fault("json_half_pair", escape=r"\ud83d")),
    "the other half": (r'{"text": ["a", "\ude00 b"]}', fault("json_half_pair", escape=r"\ude00")),
    "half in a key": (r'{"\ud83d": 1}', fault("json_half_pair", escape=r"\ud83d")),
    "nested": ('{"a": ' + "[" * 980 + "]" * 980 + "}", DEEP),
    "nested beyond Python": ('{"a":' * 9999 + "1" + "}" * 9999, DEEP),
    "nested and broken": ('{"a": ' + '[1,{"b":' * 150_000, DEEP),
    "a long number": ('{"a": ' + "9" * 5000 + "}", fault("json_long_number")),
    "beyond 64 bits": ('{"a": [18446744073709551615]}', fault("json_long_number")),
    "beyond floats": ('{"a": -1e999}', fault("json_infinite")),
    "infinite": ('{"a": [1, -Infinity]}', fault("json_infinite")),
    "a key twice": ('{"text": "a", "text": "b"}', fault("json_key_twice", key="text")),
    "a key twice inside": ('{"a": [{"b": 1, "b": 2}]}', fault("json_key_twice", key="b")),
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


TABS, NO_HEADER = (
    fault("table_one_column", separator="\t", wanted=","),
    fault("table_without_header"),
)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize(("text", "said"), ODD.values(), ids=ODD)
@pytest.mark.parametrize("kind", ["lines", "list"])
def test_every_task_refuses_it_with_its_place(
    kind: str, text: str, said: Fault, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    rows = [json.dumps(GOOD), json.dumps(GOOD), text]
    (name, content) = (
        ("train.jsonl", "\n".join(rows))
        if kind == "lines"
        else ("train.json", "[" + ",\n".join(rows) + "]")
    )
    (tmp_path / name).write_text(content)
    place = r"train\.jsonl, line 3: " if kind == "lines" else r"train\.json, item [123]: "
    with refused(said, DataError) as caught:
        list(read(tmp_path))
    assert re.search(place, str(caught.value))


@pytest.mark.parametrize(("text", "said"), ODD.values(), ids=ODD)
def test_corpora_questions_and_published_files_refuse_it_with_their_line(
    text: str, said: Fault, tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(GOOD) + "\n" + text)
    for read in (passages.passages, questions.queries):
        with refused(said, DataError) as caught:
            list(read(tmp_path / "train.jsonl"))
        assert "train.jsonl, line 2: " in str(caught.value)
    with refused(said, DataError) as caught:
        list(records(tmp_path, "train"))
    assert "train.jsonl, line 2: " in str(caught.value)
    (tmp_path / "train.jsonl").rename(tmp_path / "train.old")
    (tmp_path / "train.json").write_text(f"[{text}]")
    with refused(said, DataError) as caught:
        list(records(tmp_path, "train"))
    assert "train.json" in str(caught.value)
    with refused(said, DataError) as caught:
        whole_json(tmp_path / "train.json")
    assert "train.json" in str(caught.value)


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
    with refused("json_half_pair", BadJson, escape=r"\ud83d in line 2"):
        list(items(rf'[{{"a": "{pad}\ud83d\ude00",' + "\n" + rf'"b": "{pad}\ud83d"}}]'))


def test_brackets_in_texts_are_no_nesting_and_cannot_hide_one() -> None:
    rows = [{"text": "[" * 10 + '\\" {'} for _ in range(2000)]
    assert list(json_items(io.BufferedReader(io.BytesIO(json.dumps(rows).encode())))) == rows  # pyright: ignore[reportArgumentType]
    hidden = json.dumps("]" * 80_000)
    deep = f'[{{"text": {hidden}}}, {"[" * 80_000}{"]" * 80_000}]'
    began = time.process_time()
    with refused("json_too_deep", BadJson, depth=100):
        list(json_items(io.BufferedReader(io.BytesIO(deep.encode()))))  # pyright: ignore[reportArgumentType]
    assert time.process_time() - began < 5


class Counted(io.BytesIO):
    """A file that notes how much each reading gives."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.readings: list[int] = []

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(size)
        self.readings.append(len(content))
        return content

    def peek(self, size: int = 0) -> bytes:
        return b""


@pytest.mark.parametrize("text", ["abc é ", r"\"\\ " * 2])
def test_a_long_text_of_a_list_is_read_in_pieces_that_grow_with_it(text: str) -> None:
    """ijson looks at all of it again for each piece."""
    rows = [{"a": text * (1 << 17)}, *({"b": text} for _ in range(60_000)), {"a": text * 10}]
    file = Counted(json.dumps(rows, ensure_ascii=False).encode())
    assert list(json_items(file)) == rows  # pyright: ignore[reportArgumentType]
    length = len(json.dumps(rows[0], ensure_ascii=False).encode())
    of_long: list[int] = []
    while sum(of_long) < length:
        of_long.append(file.readings[len(of_long)])
    looked_at = sum(sum(of_long[: number + 1]) for number in range(len(of_long)))
    assert looked_at < 4 * length
    assert max(file.readings) < length
    # what is read of short texts, behind the reading in which the long one ends
    assert max(file.readings[len(of_long) + 1 :]) <= 1 << 16


@pytest.mark.parametrize("size", [1, 7, 64, 65536])
def test_not_a_number_is_a_missing_value_in_every_file(size: int, tmp_path: Path) -> None:
    class Slow(io.BytesIO):
        def read(self, _: int | None = -1) -> bytes:
            return super().read(size if _ else 0)

        def peek(self, size: int = 0) -> bytes:
            return b""

    row = '{"a": NaN, "b": ["NaN \\\\", NaN,1.25], "c": "\\"NaN", "d": -9223372036854775807}'
    wanted = {"a": None, "b": ["NaN \\", None, 1.25], "c": '"NaN', "d": 1 - 2**63}
    assert json_value(row) == wanted
    items = json_items(Slow(f"[{row}, {row}]".encode()))  # pyright: ignore[reportArgumentType]
    assert list(items) == [wanted, wanted]


def test_an_infinite_number_of_a_list_is_named_by_its_item(tmp_path: Path) -> None:
    rows = ", ".join('{"a": "Infinity"}' for _ in range(5))
    (tmp_path / "train.json").write_text(f'[{rows}, {{"a": Infinity}}]')
    with refused("json_infinite", at="train.json, item 6"):
        list(jsonl.objects(tmp_path / "train.json"))


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
    with refused("file_torn"):
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
    with refused("file_endless", at=name):
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
    with refused("line_endless", at="a.jsonl, line 2", most="1,000"):
        list(jsonl.read_jsonl(tmp_path / "a.jsonl"))


# Tables
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "test.csv",
            "who sings x\t['A', 'B']\nwhere is y\t['C']\n",
            (TABS, NO_HEADER),
        ),
        ("test.csv", "who sings x\t['A']\n", (TABS, NO_HEADER)),
        ("test.csv", "question\tanswers, all\nq\ta\n", (TABS,)),
        ("test.tsv", 'who sings x\t["A", "B"]\n', (fault("table_row_for_header"),)),
    ],
)
def test_a_table_of_dpr_says_tabs_and_no_header(
    name: str, content: str, said: tuple[Fault, ...], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with refused(said[0]) as caught:
        list(questions.qa_rows(tmp_path, "test"))
    assert f"{name}: its " in str(caught.value)
    for one in said[1:]:
        says(one, caught.value)


@pytest.mark.parametrize("text", ["", " \n", "\u200b", "\ufeff\u200d \u00ad", "\u2060"])
def test_a_text_of_which_nothing_can_be_seen_is_blank(text: str) -> None:
    assert is_blank(text)
    assert not is_blank(f"{text}.")
    with refused("text_blank", at="here", key="question"):
        fields.text(text, "here", "question")
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    with refused("turn_empty", at="here", turn=1):
        conversation.learnable({"messages": turns}, "here")
