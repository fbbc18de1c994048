"""A list that stands in a text is the list, in every reader and kind of file; what only looks like
one is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_own_rows import WRITERS, read, statements
from tests.wording import refused
from trainer.config.block import validate
from trainer.config.formats.layouts import QUESTIONS
from trainer.config.own_rows import OwnRows
from trainer.data import left_out
from trainer.data.chat.rows import chats
from trainer.data.formats.lists import as_list
from trainer.data.readers import fields, questions, retrieved
from trainer.data.readers.columns import in_our_names
from trainer.protocol.task import Places
from trainer.tasks.retriever import rows as retriever_rows
from trainer.tasks.retriever.config import Data as RetrieverData
from trainer.tasks.summariser import data as summaries
from trainer.tasks.summariser.config import Data as SummaryData
from trainer.tasks.vera import groups


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('["a", "b"]', ["a", "b"]),
        ("['a', 'b']", ["a", "b"]),
        ("['a' 'b']", ["a", "b"]),  # numpy has no commas
        ("['Paris'\n 'City of Paris']", ["Paris", "City of Paris"]),
        ("[\"it's\" 'b']", ["it's", "b"]),
        (r"['it\'s', 'a\\b', 'c\nd', '\u00e9\xe9']", ["it's", "a\\b", "c\nd", "éé"]),
        ("[u'a', u'b']", ["a", "b"]),
        ("('a', 'b')", ["a", "b"]),
        ("('a',)", ["a"]),
        ("array(['a', 'b'], dtype=object)", ["a", "b"]),
        ("[array(['a'], dtype=object) list(['b'])]", [["a"], ["b"]]),
        (
            "[{'text': 'a', 'n': None}\n {'text': \"b's\"}]",
            [{"text": "a", "n": None}, {"text": "b's"}],
        ),
        ("[np.str_('Paris'), np.str_(\"it's\")]", ["Paris", "it's"]),  # numpy 2
        ("[np.int64(3), numpy.float64(0.5), np.True_]", [3, 0.5, True]),
        ("np.array(['a', 'b'])", ["a", "b"]),
        ("[10 11]", [10, 11]),
        ("[10, 11]", [10, 11]),
        ("[ True False]", [True, False]),
        (" [] ", []),
        ("[\"['a' 'b']\"]", ["['a' 'b']"]),  # one level: what is in a list is no list
    ],
)
def test_a_text_that_is_a_list_is_that_list(text: str, wanted: list[Any]) -> None:
    assert as_list(text, "here", "answers") == wanted


@pytest.mark.parametrize(
    "text",
    [
        *(
            "[citation needed] It was.",
            "[1] see",
            "[sic]",
            "[...] he said",
            "[[Paris]] is",
            "[10-11]",
        ),
        *("['Tis the season] was sung", '["We are] pleased," he said', '["Hello," he said]'),
        *("(1, 2)", "('a')", '("Hello" she said)', "a; b", "a|b", "a, b", "{x} is", "[a, b]"),
        *("np is a name", "the Index (of names)", "dtype: object", "[\u201cI\u201d] said he"),
        *("{}", '{"a": 1}', '{"key"} is a set', '["x"] is how', "['x', 'y']. So it is"),
        *('["yes" or "no"]', "['a' and 'b' and 'c']", "('a') and more", "{'a': 1} is one"),
        "[" * 5000,
    ],
)
def test_any_other_text_is_a_list_of_one(text: str) -> None:
    assert as_list(text, "here", "answers") == [text]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("['a' 'b' ... 'y' 'z']", "items are left out"),
        ("[0 1 2 ... 7 8]", "items are left out"),
        ("['it''s']", "do not close"),
        ("['it's', 'b']", "do not close"),
        ("['a' 'b', 'c']", "do not close"),
        ('["a", "b', "do not close"),
        ("['a'] and ['b']", "do not close"),
        ("[007, 008]", "do not close"),
        ("{'a', 'b'}", "do not close"),
        ("[np.str_('a', np.str_('b')]", "do not close"),
        ("np.str_('a')", "do not close"),
        ("frozenset({'a'})", "do not close"),
        ("deque(['a'])", "do not close"),
        ("Index(['a', 'b'], dtype='object')", "do not close"),
        ("0    a\n1    b\nName: answers, dtype: object", "do not close"),
        ("[\u201cParis\u201d, \u201cLyon\u201d]", "do not close"),
        ("['a'], dtype=object", "do not close"),
        ("['a'ish 'b']", "do not close"),
        ("tensor([10, 11])", "do not close"),
        ("[tensor(10), tensor(11)]", "do not close"),
        ("Array([1, 2], dtype=int32)", "do not close"),
        ("tf.Tensor(['a'], shape=(1,), dtype=string)", "do not close"),
        ("[Decimal('1')]", "do not close"),
        ("[datetime.date(2020, 1, 1)]", "do not close"),
        ("WrappedArray(Paris, Rome)", "do not close"),
        ('c("Paris", "Rome")', "do not close"),
        ('{Paris,"City of Paris"}', "do not close"),
        ("shape: (2,)\nSeries: '' [str]\n[\n\t\"a\"\n]", "do not close"),
        ('<pyarrow.lib.StringArray object at 0x7f>\n[\n  "a"\n]', "do not close"),
        ("<StringArray>\n['a', 'b']", "do not close"),
        ("<tf.Tensor: shape=(1,), numpy=array([1])>", "do not close"),
        ("<map object at 0x7f21>", "do not close"),
        ("odict_keys(['a'])", "do not close"),
        ("[\xaba\xbb, \xabb\xbb]", "do not close"),
        ("\"['a', 'b']\"", "do not close"),
        (r"[\"a\", \"b\"]", "do not close"),
        ("[&quot;a&quot;]", "do not close"),
        ("{'text': ['a', 'b'], 'answer_start': [1, 2]}", "an object of lists"),
        (
            "{'text': array(['a'], dtype=object), 'answer_start': array([1], dtype=int32)}",
            "an object of lists",
        ),
        ('{"text": [], "answer_start": []}', "an object of lists"),
        ('{"aliases": ["A", "B"], "value": "A"}', "an object of lists"),
        ("[{'a': 1, 'a': 2}]", "stands twice"),
        ("[b'a']", "bytes"),
        (r"['\d']", "stands for no character"),
        (r'["\ud83d"]', "half of a surrogate pair"),
        ("[" + "9" * 5000 + "]", "a number of 5000 digits"),
    ],
)
def test_a_text_that_only_looks_like_a_list_is_refused(text: str, problem: str) -> None:
    with refused("table_cell_half_list", at="here", key="answers", problem=problem):
        as_list(text, "here", "answers")


@pytest.mark.parametrize(
    "text",
    [
        *("print('a')", "list('a')", 'c("a")', "f(a, b)", "a tensor([1]) of one", "<b>bold</b>"),
        *(
            "\"['a'] is a list\"",
            "{1, 2}: a set",
            "<Series> a tag",
            '{"a": [1]}',
            '{"a": [1], "b": 2}',
            "[`a`]",
        ),
    ],
)
def test_code_and_quotations_are_texts(text: str) -> None:
    assert as_list(text, "here", "answers") == [text]


@pytest.mark.parametrize("text", ["[Paris, Rome]", " {Paris,Rome} "])
def test_a_list_without_quotes_is_one_text_and_doubted(text: str) -> None:
    raw = [{"question": text, "answers": text}, {"question": "q", "answers": "[sic], he said"}]
    raw.append({"question": "q", "answers": json.dumps([text])})
    placed = [(f"line {number}", row) for number, row in enumerate(raw, start=1)]
    with left_out.reading() as notes:
        rows = [row["answers"] for _, row in in_our_names(placed, {}, QUESTIONS)]
        assert fields.texts(text, "line 9", "bm25") == [text]
    assert rows == [[text], ["[sic], he said"], [text]]
    assert [(note.place, note.field) for note in notes.first] == [
        ("line 1", "answers"),
        ("line 9", "bm25"),
    ]
    assert all("lack quotes" in why for why in notes.counts)


def test_a_missing_value_that_became_a_text_is_doubted_by_its_field(tmp_path: Path) -> None:
    cells = [("q", "nan"), ("None", "a"), ("q", "\\N"), ("nan?", "None of them"), ("q", '["nan"]')]
    rows = [{"question": one, "answers": other, "contexts": "c"} for one, other in cells]
    WRITERS[".csv"](tmp_path / "train.csv", rows)
    with left_out.reading() as notes:
        assert len(read(tmp_path, columns={})) == len(rows)
    assert [(note.place.rpartition(", ")[2], note.field) for note in notes.first] == [
        ("row 1", "answers"),
        ("row 2", "question"),
        ("row 3", "answers"),
    ]
    assert all("missing value" in why for why in notes.counts)


def test_summaries_of_other_columns_are_doubted_once(tmp_path: Path) -> None:
    rows = [{"document": "d", "target": "nan"}, {"document": "d", "target": "[a, b]"}]
    WRITERS[".csv"](tmp_path / "train.csv", rows)
    data = validate(SummaryData, {"source": "files", "summaries": ["target"]})
    with left_out.reading() as notes:
        found = list(summaries.rows(data, Places(tmp_path, tmp_path, tmp_path), "train"))
    assert [row["summaries"] for row in found] == [["nan"], ["[a, b]"]]
    assert [*notes.counts.values()] == [1, 1]
    assert {note.field for note in notes.first} == {"target"}


def test_an_object_of_lists_is_led_into_by_its_column() -> None:
    cell = "{'text': array(['a', 'b'], dtype=object), 'answer_start': array([1, 9])}"
    raw = {"question": "q", "answers": cell}
    ((_, row),) = in_our_names([("line 1", raw)], {"answers": "answers.text"}, QUESTIONS)
    assert row["answers"] == ["a", "b"]


@pytest.mark.parametrize("missing", [None, "", float("nan")])
def test_a_missing_value_is_no_list(missing: Any) -> None:
    assert as_list(missing, "here", "answers") is None


# The same row out of every kind of file
# --------------------------------------------------------------------------------------------------

CELLS = {"list": ["a", "b"], "json": '["a", "b"]', "python": "['a', 'b']", "numpy": "['a' 'b']"}


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("cell", CELLS)
def test_every_task_reads_the_same_list_out_of_every_kind_of_file(
    cell: str, suffix: str, tmp_path: Path
) -> None:
    row = {"question": "q", "answers": CELLS[cell], "contexts": CELLS[cell]}
    WRITERS[suffix](tmp_path / f"train{suffix}", [row])
    wanted = {"question": "q", "answers": ["a", "b"], "contexts": ["a", "b"]}
    assert read(tmp_path, columns={}) == [wanted]
    how: dict[str, Any] = {"source": "files", "contexts": 9, "sort_by_score": False}
    (reader,) = retrieved.rows(tmp_path, "train", **how)
    assert reader["answers"] == ["a", "b"]
    assert reader["ctxs"] == [{"text": "a"}, {"text": "b"}]
    renamed = {"document": "contexts", "summary": "answers"}
    data = validate(SummaryData, {"source": "files", "columns": renamed})
    (summary,) = summaries.rows(data, Places(tmp_path, tmp_path, tmp_path), "train")
    assert (summary["document"], summary["summaries"]) == ("a b", ["a", "b"])
    sides = {"golds": "question", "distractors": "answers"}
    (group,) = groups.rows(statements(columns=sides), "train", tmp_path)
    assert (group["golds"], group["distractors"]) == (["q"], ["a", "b"])


@pytest.mark.parametrize(
    "text", ['{"a": 1}', "{}", "('a', 'b')", "['it's', 'b']", "[1, 2]", "[sic] so", '["x"] is how']
)
def test_a_document_that_is_no_list_in_brackets_is_its_own_text(text: str, tmp_path: Path) -> None:
    WRITERS[".jsonl"](tmp_path / "train.jsonl", [{"document": text, "summary": "s"}])
    data = validate(SummaryData, {"source": "files"})
    (row,) = summaries.rows(data, Places(tmp_path, tmp_path, tmp_path), "train")
    assert row["document"] == text


def test_a_list_in_a_text_is_one_as_soon_as_its_column_has_our_name() -> None:
    raw = {"question": "q", "reply": "['a', 'b']"}
    ((_, row),) = in_our_names([("line 1", raw)], {"answers": "reply"}, QUESTIONS)
    assert row["answers"] == ["a", "b"]


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_single_text_is_a_list_of_one_in_every_kind_of_file(suffix: str, tmp_path: Path) -> None:
    WRITERS[suffix](
        tmp_path / f"train{suffix}", [{"question": "q", "answers": "a", "contexts": "c"}]
    )
    assert read(tmp_path, columns={}) == [{"question": "q", "answers": ["a"], "contexts": ["c"]}]


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("cell", [["10", "11"], "[10 11]", "['10' '11']", '["10", 11]'])
def test_ids_of_passages_are_a_list_in_every_kind_of_file(
    cell: Any, suffix: str, tmp_path: Path
) -> None:
    ids = ("10", "11", "1011")
    corpus = "".join(json.dumps({"docid": one, "text": f"text {one}"}) + "\n" for one in ids)
    (tmp_path / "corpus.jsonl").write_text(corpus)
    row = {"query": "q", "positive_docids": cell, "negative_docids": "1011"}
    WRITERS[suffix](tmp_path / f"train{suffix}", [row])
    files = {"train": f"train{suffix}"}
    data = validate(RetrieverData, {"source": "tevatron", "corpus": "corpus.jsonl", "files": files})
    (found,) = retriever_rows.rows(data, "train", tmp_path)
    assert [one["id"] for one in found["positives"]] == ["10", "11"]
    assert [one["id"] for one in found["negatives"]] == ["1011"]


def test_objects_that_numpy_printed_are_passages_and_conversations(tmp_path: Path) -> None:
    ctxs = "[{'title': 'T', 'text': 'a'}\n {'title': 'U', 'text': \"b's\"}]"
    row = {"question": "q", "answers": "x", "ctxs": ctxs}
    WRITERS[".csv"](tmp_path / "train.csv", [row])
    (found,) = read(tmp_path, columns={})
    assert (found["contexts"], found["titles"]) == (["a", "b's"], ["T", "U"])
    turns = "[{'role': 'user', 'content': 'a'} {'role': 'assistant', 'content': 'b'}]"
    WRITERS[".jsonl"](tmp_path / "valid.jsonl", [{"messages": turns, "tools": ""}])
    (chat,) = chats(tmp_path, "valid", OwnRows())
    assert [message["content"] for message in chat["messages"]] == ["a", "b"]
    assert "tools" not in chat


def test_an_object_in_a_cell_of_passages_is_one_passage() -> None:
    (passage,) = fields.passages('{"title": "T", "text": "a"}', "here", "ctxs")
    assert passage == {"title": "T", "text": "a"}


@pytest.mark.parametrize("marks", [[0, 1], "[0 1]", "[False  True]", ["0", "1"]])
def test_marks_of_contexts_are_the_same_in_every_form(marks: Any) -> None:
    assert fields.useful_contexts({"useful_contexts": marks}, "here", 2) == [0, 1]


@pytest.mark.parametrize("marks", [[[0], [1]], [0], "[0 2]", {"a": 1}])
def test_other_marks_are_refused_by_their_place(marks: Any) -> None:
    with refused("flags_wanted", at="here", key="useful_contexts"):
        fields.useful_contexts({"useful_contexts": marks}, "here", 2)


def test_questions_of_every_other_reader_hold_lists_as_text(tmp_path: Path) -> None:
    line = {"split": "dev", "question": "q", "answers": "['a' 'b']", "gold": 7, "bm25": "[8 9]"}
    (tmp_path / "queries.jsonl").write_text(json.dumps(line) + "\n")
    corpus = "".join(f"{number}\ttext {number}\tT\n" for number in (7, 8, 9, 89))
    (tmp_path / "corpus.tsv").write_text("id\ttext\ttitle\n" + corpus)
    (row,) = questions.nq_rows(tmp_path, "valid")
    assert row["answers"] == ["a", "b"]
    (found,) = retriever_rows.rows(validate(RetrieverData, {"source": "nq"}), "valid", tmp_path)
    assert [one["id"] for one in found["negatives"]] == ["8", "9"]
    (query,) = questions.queries(tmp_path / "queries.jsonl")
    assert (query.answers, query.positives) == (["a", "b"], ["7"])
    (reader,) = retrieved.rows(tmp_path, "valid", source="nq", contexts=9, sort_by_score=False)
    assert [one["id"] for one in reader["ctxs"]] == ["8", "9"]


def test_groups_of_one_json_file_hold_lists_as_text(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    group = {"golds": "['a']", "distractors": "['b' 'c']"}
    (tmp_path / "mine" / "dev.json").write_text(json.dumps([group]))
    (found,) = groups.rows(statements(source="groups"), "valid", tmp_path)
    assert (found["golds"], found["distractors"]) == (["a"], ["b", "c"])
