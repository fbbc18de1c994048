"""Questions come with their first passages, whoever wrote the file; what is wrong is said with line
or item.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wording import Fault, fault, refused
from trainer.config.own_rows import OwnRows, Splits
from trainer.data import left_out, stdlib_docs
from trainer.data.readers import jsonl, passages, retrieved
from trainer.protocol.task import Row

_ROOT = Path(__file__).resolve().parents[2]
_NQ = _ROOT / os.environ.get("LATHE_DATA", "../shared/data") / "nq"

_PASSAGE = {"id": "7", "title": "T", "text": "said"}
_GOOD = {"question": "q", "answers": ["a"], "ctxs": [_PASSAGE]}


def _lines(path: Path, *values: Any) -> Path:
    path.write_text(
        "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values), encoding="utf-8"
    )
    return path


def _list(path: Path, *values: Any) -> Path:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")
    return path


def _read(folder: Path | None, split: str = "train", **changes: Any) -> Iterator[Row]:
    options: dict[str, Any] = {"source": "fid", "contexts": 100, "sort_by_score": True, **changes}
    if "file" in options:
        options["own"] = OwnRows(files=Splits(**{split: options.pop("file")}))
    return retrieved.rows(folder, split, **options)


def _ids(rows: Iterator[Row]) -> list[list[str]]:
    return [[ctx["id"] for ctx in row["ctxs"]] for row in rows]


def _questions(folder: Path, *names: str) -> None:
    _lines(
        folder / "train.jsonl",
        *({"qid": name, "question": f"q{name}", "answers": ["a"]} for name in names),
    )


def _ranked(folder: Path, ranking: str, **changes: Any) -> Iterator[Row]:
    (folder / "train.tsv").write_text(ranking, encoding="utf-8")
    return _read(folder, source="ranked", **changes)


@pytest.fixture
def nq() -> Path:
    if not (_NQ / "train3.json").is_file():
        pytest.skip(f"no train3.json at {_NQ}; set LATHE_DATA")
    return _NQ


# FiD's format


@pytest.mark.parametrize("write", [_list, _lines])
def test_a_packed_file_gives_the_rows_of_the_plain_one_and_a_torn_one_is_refused(
    tmp_path: Path, write: Any
) -> None:
    write(tmp_path / "valid.json", *[_GOOD] * 500)
    packed = gzip.compress((tmp_path / "valid.json").read_bytes())
    (tmp_path / "train.json.gz").write_bytes(packed)
    assert list(_read(tmp_path, "train")) == list(_read(tmp_path, "valid"))
    (tmp_path / "train.json.gz").write_bytes(packed[:-12])
    with refused("file_torn", place=re.compile(r"(line|item) \d+")):
        list(_read(tmp_path, "train"))


@pytest.mark.parametrize("write", [_list, _lines])
@pytest.mark.parametrize("name", ["train.json", "train.jsonl"])
def test_a_list_and_lines_give_the_same_rows_whatever_the_file_is_called(
    tmp_path: Path, write: Any, name: str
) -> None:
    write(tmp_path / name, _GOOD, {**_GOOD, "id": 9, "target": "b", "ctxs": [{"text": "é\u2028"}]})
    assert list(_read(tmp_path)) == [
        {"id": "0", "question": "q", "answers": ["a"], "ctxs": [_PASSAGE]},
        {
            "id": "9",
            "question": "q",
            "answers": ["a"],
            "target": "b",
            "ctxs": [{"text": "é\u2028"}],
        },
    ]


def test_a_byte_order_mark_before_a_list_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_bytes(b"\xef\xbb\xbf \n" + json.dumps([_GOOD]).encode())
    assert len(list(_read(tmp_path))) == 1


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(1 - 2**63, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab.é", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    objects=st.lists(
        st.dictionaries(st.text("ab.é", max_size=3), _VALUES, max_size=3), min_size=1, max_size=4
    )
)
def test_a_list_read_item_by_item_is_what_the_whole_file_says(
    tmp_path_factory: pytest.TempPathFactory, objects: list[Row]
) -> None:
    path = tmp_path_factory.mktemp("lists") / "a.json"
    path.write_text(json.dumps(objects), encoding="utf-8")
    read = [raw for _, raw in jsonl.objects(path)]
    assert json.dumps(read) == json.dumps(json.loads(path.read_text()))  # as text: 1 is not 1.0


@pytest.mark.parametrize(
    ("name", "start", "between", "said"),
    [
        ("train.json", "[", ", ", fault("json_list_malformed", at="train.json, item 2")),
        ("train.jsonl", "", "\n", fault("json_malformed", at="train.jsonl, line 2")),
    ],
)
def test_reading_is_lazy(tmp_path: Path, name: str, start: str, between: str, said: Fault) -> None:
    (tmp_path / name).write_text(start + json.dumps(_GOOD) + between + "not json")
    found = _read(tmp_path)
    assert next(found)["question"] == "q"
    with refused(said):
        next(found)


def test_a_large_list_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    item = json.dumps({**_GOOD, "ctxs": [{"text": "x" * 10_000}] * 10})
    (tmp_path / "train.json").write_text(f"[{', '.join([item] * 200)}]")
    tracemalloc.start()
    try:
        assert sum(len(row["ctxs"]) for row in _read(tmp_path)) == 2000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3e6  # the file is 20 MB


@pytest.mark.parametrize(
    ("raw", "ctxs"),
    [
        ({"ctxs": ["7", 8, {"id": 9}]}, [{"id": "7"}, {"id": "8"}, {"id": "9"}]),
        ({"ctxs": [{"id": "7", "title": None, "text": None, "score": None}]}, [{"id": "7"}]),
        ({"ctxs": [{"text": "", "title": ""}]}, [{"title": "", "text": ""}]),
        ({"ctxs": []}, []),
        (
            {
                "ctxs": [
                    {"id": "wiki:7", "title": "T", "text": "x", "score": "80.5", "has_answer": True}
                ]
            },
            [{"id": "wiki:7", "title": "T", "text": "x", "score": 80.5}],
        ),
        (
            {
                "positive_ctxs": [{"title": "T", "text": "p", "passage_id": "1", "title_score": 0}],
                "negative_ctxs": [{"title": "N", "text": "n", "psg_id": 2}],
                "hard_negative_ctxs": [{"title": "H", "text": "h", "passage_id": "3"}],
            },
            [
                {"id": "1", "title": "T", "text": "p"},
                {"id": "3", "title": "H", "text": "h"},
                {"id": "2", "title": "N", "text": "n"},
            ],
        ),
        (
            {
                "positive_passages": [{"docid": "1", "title": "T", "text": "p"}],
                "negative_passages": [{"docid": "2"}],
            },
            [{"id": "1", "title": "T", "text": "p"}, {"id": "2"}],
        ),
    ],
    ids=["ids", "nulls", "blank", "none", "dpr_output", "dpr_training", "tevatron"],
)
def test_passages_are_read_as_every_retriever_writes_them(
    tmp_path: Path, raw: Row, ctxs: list[Row]
) -> None:
    _lines(tmp_path / "train.jsonl", {"question": "q", "answers": ["a"], **raw})
    assert [row["ctxs"] for row in _read(tmp_path)] == [ctxs]


@pytest.mark.parametrize(
    ("raw", "row"),
    [
        (
            {"query_id": 5, "query": "q", "answer": "a"},
            {"id": "5", "question": "q", "answers": ["a"]},
        ),
        (
            {"qid": "x", "question": "q", "answer": ["a", "b"]},
            {"id": "x", "question": "q", "answers": ["a", "b"]},
        ),
        (
            {"question": "q", "answers": ["a"], "answer": "z"},
            {"id": "0", "question": "q", "answers": ["a"]},
        ),
        (
            {"question": "q", "target": "t"},
            {"id": "0", "question": "q", "answers": [], "target": "t"},
        ),
        (
            {"id": 0, "question": "q", "answers": ["a"], "target": None},
            {"id": "0", "question": "q", "answers": ["a"]},
        ),
    ],
)
def test_a_question_is_read_under_its_usual_names(tmp_path: Path, raw: Row, row: Row) -> None:
    _lines(tmp_path / "train.jsonl", {**raw, "ctxs": []})
    assert list(_read(tmp_path)) == [{**row, "ctxs": []}]


@pytest.mark.parametrize("answers", [{}, {"answers": []}, {"answers": None}])
def test_answers_may_be_missing_but_to_train_on(tmp_path: Path, answers: Row) -> None:
    for split in ("train", "valid", "test"):
        _lines(tmp_path / f"{split}.jsonl", _GOOD, {"question": "q", "ctxs": [], **answers})
    assert [row["answers"] for split in ("valid", "test") for row in _read(tmp_path, split)] == [
        ["a"],
        [],
    ] * 2
    with refused("answers_or_target_missing", at="train.jsonl, line 2", keys=re.compile("quest.*")):
        list(_read(tmp_path))


_WRONG = [
    ({"question": ...}, fault("field_missing", key="question", keys="answers, ctxs")),
    ({"question": 3}, fault("text_blank", key="question", value=3)),
    ({"question": " "}, fault("text_blank", key="question", value=" ")),
    ({"id": 1.5}, fault("id_wanted", key="id", value=1.5)),
    ({"id": ""}, fault("id_wanted", key="id", value="")),
    ({"answers": {"a": 1}}, fault("texts_wanted", key="answers", value={"a": 1})),
    ({"answers": ["a", 3]}, fault("text_blank", key="answers[1]", value=3)),
    ({"target": ""}, fault("text_blank", key="target", value="")),
    (
        {"ctxs": ...},
        fault("contexts_missing", key="ctxs", keys="question, answers"),
    ),
    ({"ctxs": {"c": 1}}, fault("passages_wanted", key="ctxs", value={"c": 1})),
    ({"ctxs": ["1", None]}, fault("id_wanted", key="ctxs[1]", value=None)),
    ({"ctxs": ["1", True]}, fault("id_wanted", key="ctxs[1]", value=True)),
    ({"ctxs": [{"title": "T"}]}, fault("neither_text_nor_id", key="ctxs[0]", keys="title")),
    ({"ctxs": [{"text": 3}]}, fault("text_wanted", key="ctxs[0].text", value=3)),
    (
        {"ctxs": [{"text": "x", "title": ["t"]}]},
        fault("text_wanted", key="ctxs[0].title", value=["t"]),
    ),
    (
        {"ctxs": [{"id": "1", "score": "high"}]},
        fault("number_wanted", key="ctxs[0].score", value="high"),
    ),
    (
        {"ctxs": [{"id": "1", "score": "nan"}]},
        fault("number_wanted", key="ctxs[0].score", value="nan"),
    ),
    (
        {"ctxs": ..., "positive_ctxs": [{"title": "T"}]},
        fault("neither_text_nor_id", key="positive_ctxs[0]"),
    ),
]


@pytest.mark.parametrize(("changes", "said"), _WRONG)
@pytest.mark.parametrize(("write", "place"), [(_list, "item"), (_lines, "line")])
def test_a_wrong_question_is_refused_with_its_place(
    tmp_path: Path, changes: Row, said: str, write: Any, place: str
) -> None:
    bad = {key: value for key, value in {**_GOOD, **changes}.items() if value is not ...}
    write(tmp_path / "train.json", _GOOD, bad)
    with refused(said, at=f"train.json, {place} 2"):
        list(_read(tmp_path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b'[{"question": "q", "ctxs": []}, 5]',
            fault("json_no_object", at="test.json, item 2", kind="int"),
        ),
        (
            b'[{"question": "q", "ctxs": []}, {"question": ',
            fault("json_list_malformed", at="test.json, item 2"),
        ),
        (
            b'[{"question": "q", "ctxs": []}] []',
            fault("json_list_malformed", at="test.json, item 2"),
        ),
        (
            b'[{"question": "q", "ctxs": [{"id": "1", "score": Infinity}]}]',
            fault("json_infinite", at="test.json, item 1"),
        ),
        (
            b'[{"id": 18446744073709551615}]',
            fault("json_long_number", at="test.json, item 1"),
        ),
        (b'[{"question": "\xff"}]', fault("json_list_malformed", at="test.json, item 1")),
        (b"[]", fault("list_empty", at="test.json")),
        (b"", fault("file_empty", at="test.json")),
        (b'{"data": [\n}', fault("json_malformed", at="test.json, line 1")),
    ],
)
def test_a_malformed_file_is_refused_by_its_place(
    tmp_path: Path, content: bytes, said: Fault
) -> None:
    (tmp_path / "test.json").write_bytes(content)
    with refused(said):
        list(_read(tmp_path, "test"))


# Which passages


@pytest.mark.parametrize(
    ("scores", "is_sorted", "order"),
    [
        ([0.1, 0.9, 0.5], True, "120"),
        ([0.1, 0.9, 0.5], False, "012"),
        ([0.5, 0.9, 0.5, 0.9], True, "1302"),  # ties keep their order
        (["9.5", "10", 3], True, "102"),  # numbers, whoever wrote them as text
        ([0.1, None, 0.5], True, "012"),  # one has none
        ([-1, 0, -0.5], True, "120"),
    ],
)
def test_passages_are_sorted_where_all_have_a_score(
    tmp_path: Path, scores: list[Any], is_sorted: bool, order: str
) -> None:
    ctxs = [{"id": str(place), "score": score} for place, score in enumerate(scores)]
    _lines(tmp_path / "train.jsonl", {**_GOOD, "ctxs": ctxs})
    assert _ids(_read(tmp_path, sort_by_score=is_sorted)) == [list(order)]
    assert _ids(_read(tmp_path, sort_by_score=is_sorted, contexts=2)) == [list(order[:2])]


def test_questions_may_have_fewer_passages_than_wanted_or_none(tmp_path: Path) -> None:
    _lines(
        tmp_path / "train.jsonl", *({**_GOOD, "ctxs": list(range(count))} for count in (3, 0, 1))
    )
    assert _ids(_read(tmp_path, contexts=2)) == [["0", "1"], [], ["0"]]


# Which file


@pytest.mark.parametrize(
    "name", ["dev.json", "valid.json", "val.json", "dev.jsonl", "valid.jsonl", "val.jsonl"]
)
def test_the_valid_split_has_six_legal_file_names(tmp_path: Path, name: str) -> None:
    _lines(tmp_path / name, _GOOD)
    assert len(list(_read(tmp_path, "valid"))) == 1


def test_a_named_file_is_taken_below_the_data_path(tmp_path: Path) -> None:
    (tmp_path / "retrieved").mkdir()
    _lines(tmp_path / "train.jsonl", {"no": "question"})
    _list(tmp_path / "retrieved" / "nq-train.json", _GOOD)
    assert len(list(_read(tmp_path, file="retrieved/nq-train.json"))) == 1


def test_two_files_for_one_split_are_not_guessed_between(tmp_path: Path) -> None:
    _lines(tmp_path / "dev.jsonl", _GOOD)
    _list(tmp_path / "valid.json", _GOOD)
    with refused("split_in_two_files", files="valid.json and dev.jsonl", key="data.files.valid"):
        list(_read(tmp_path, "valid"))


def test_a_missing_file_says_where_it_should_be(tmp_path: Path) -> None:
    with refused(
        "split_file_absent",
        split="test",
        names="test.json",
        endings=re.compile(r"\.jsonl, .*"),
        key="data.files.test",
    ):
        list(_read(tmp_path, "test"))
    with refused("file_unreadable", at="gone.json", reason="No such file or directory"):
        list(_read(tmp_path, file="gone.json"))
    with refused("data_path_missing", files=re.compile("train.*")):
        list(_read(None))


@pytest.mark.parametrize("source", ["fid", "ranked", "nq"])
def test_an_unknown_split_is_refused(tmp_path: Path, source: str) -> None:
    with refused("split_unknown", split="validation", choices="train, valid, test"):
        list(_read(tmp_path, "validation", source=source))


# Rankings


@pytest.mark.parametrize(
    "ranking",
    [
        # Tevatron, and a question's lines need not be together
        "1\t8\t1.5\n0\t7\t0.5\n1\t9\t2.5\n",
        "1 8 1.5\r\n0 7 5e-1\r\n\r\n1 9 2.5",
        "1 8 1.5\n0 7 0.5\n1 9 2.5\n",
        "1 Q0 8 2 1.5 run\n0 Q0 7 1 .5 run\n1 Q0 9 1 2.5 run\n",
        "1\tQ0\t8\t2\t1.5\trun\n0\tQ0\t7\t1\t0.5\trun\n1\tQ0\t9\t1\t2.5\trun\n",
    ],
    ids=["tevatron", "spaces_crlf", "spaces", "trec", "trec_tabs"],
)
def test_scores_are_read_from_both_kinds_of_ranking(tmp_path: Path, ranking: str) -> None:
    _questions(tmp_path, "0", "1")
    expected = [{"id": "9", "score": 2.5}, {"id": "8", "score": 1.5}]
    assert list(_ranked(tmp_path, ranking)) == [
        {"id": "0", "question": "q0", "answers": ["a"], "ctxs": [{"id": "7", "score": 0.5}]},
        {"id": "1", "question": "q1", "answers": ["a"], "ctxs": expected},
    ]
    assert [row["ctxs"] for row in _ranked(tmp_path, ranking, sort_by_score=False)][1] == expected[
        ::-1
    ]


@pytest.mark.parametrize("first", [0, 1])
def test_three_columns_with_integers_are_ranks(tmp_path: Path, first: int) -> None:
    _questions(tmp_path, "a", "b")
    ranking = f"a\tp9\t{first}\nb\tp9\t{first}\na\tp3\t{first + 1}\na\tp5\t{first + 4}\n"
    found = list(_ranked(tmp_path, ranking))
    assert [row["ctxs"] for row in found] == [
        [{"id": "p9"}, {"id": "p3"}, {"id": "p5"}],
        [{"id": "p9"}],
    ]


def test_a_score_without_a_decimal_point_is_one_behind_scores_that_have_one(tmp_path: Path) -> None:
    _questions(tmp_path, "a")
    assert _ids(_ranked(tmp_path, "a x 7.5\na y 80\n")) == [["y", "x"]]


@pytest.mark.parametrize(
    ("ranking", "said"),
    [
        (
            "a x 12\na y 7\n",
            fault(
                "rank_or_score", at="train.tsv, line 1", value="12", where="first in its question"
            ),
        ),
        (
            "a x 1\na y 0\n",
            fault("rank_or_score", at="train.tsv, line 2", value="0", where="behind 1"),
        ),
        (
            "a x 1\na y 1\n",
            fault("rank_or_score", at="train.tsv, line 2", value="1", where="behind 1"),
        ),
        (
            "a x 1\na y 0.5\n",
            fault("rank_or_score", at="train.tsv, line 2", value="0.5", where="behind 1"),
        ),
        (
            "a x -3\n",
            fault(
                "rank_or_score", at="train.tsv, line 1", value="-3", where="first in its question"
            ),
        ),
        (
            "a x 0.5\na Q0 y 1 0.5 t\n",
            fault("ranking_columns", at="train.tsv, line 2", count=6),
        ),
        ("a x\n", fault("ranking_columns", at="train.tsv, line 1", count=2)),
        (
            "a 0 x 1\n",
            fault("ranking_columns", at="train.tsv, line 1", count=4),
        ),  # relevance judgements
        (
            "a x y 1 0.5 t\na Q0 y 0.5 2 t\n",
            fault("rank_wanted", at="train.tsv, line 2", value="0.5"),
        ),
        ("qid docid score\n", fault("score_wanted", at="train.tsv, line 1", value="score")),
        ("a x 0.5\na y nan\n", fault("score_wanted", at="train.tsv, line 2", value="nan")),
        ("\n", fault("file_empty", at="train.tsv")),
    ],
)
def test_an_ambiguous_or_malformed_ranking_is_refused_by_its_line(
    tmp_path: Path, ranking: str, said: Fault
) -> None:
    _questions(tmp_path, "a")
    with refused(said):
        list(_ranked(tmp_path, ranking))


def test_a_passage_that_stands_twice_for_a_question_is_refused(tmp_path: Path) -> None:
    _questions(tmp_path, "a", "b")
    with refused("passage_twice", at="train.tsv", question="b"):
        list(_ranked(tmp_path, "a x 0.5\nb x 0.5\nb y 0.4\nb x 0.5\n"))


def test_questions_without_a_ranking_have_no_passage_and_are_counted_once(
    tmp_path: Path,
) -> None:
    _questions(tmp_path, "a", "b", "c")
    with left_out.reading() as notes:
        assert _ids(_ranked(tmp_path, "b x 0.5\nz x 0.5\ny x 0.5\nz y 0.4\n")) == [[], ["x"], []]
    assert notes.counts == {
        "ranked questions of no row of the split (left out)": 2,
        "questions that the ranking lacks (no passages)": 2,
    }
    path = tmp_path / "train.tsv"
    assert [one.place for one in notes.first] == [f"{path}, question {q!r}" for q in "zyac"]


def test_a_ranking_of_other_questions_is_refused(tmp_path: Path) -> None:
    _questions(tmp_path, "train0", "train1")
    with refused("ranking_of_others", count=2, ours="0", theirs="train0"):
        list(_ranked(tmp_path, "0 x 0.5\n1 x 0.5\n"))


def test_an_id_that_two_ranked_questions_share_is_refused(tmp_path: Path) -> None:
    _questions(tmp_path, "a", "b", "a")
    with refused("id_twice", at="train.jsonl, line 3", id="a"):
        list(_ranked(tmp_path, "a x 0.5\n"))


def test_a_deep_run_is_cut_while_it_is_read_and_the_best_stay(tmp_path: Path) -> None:
    _questions(tmp_path, "a")
    scores = [
        (place * 7919) % 5003 // 2 + 0.5 for place in range(5000)
    ]  # in no order, most of them twice
    ranking = "".join(f"a p{place} {score}\n" for place, score in enumerate(scores))
    best = sorted(range(5000), key=lambda place: -scores[place])[:20]
    assert _ids(_ranked(tmp_path, ranking, contexts=20)) == [[f"p{place}" for place in best]]
    assert _ids(_ranked(tmp_path, ranking, contexts=3, sort_by_score=False)) == [["p0", "p1", "p2"]]


def test_a_question_without_an_id_is_called_by_its_place_from_0(tmp_path: Path) -> None:
    _list(tmp_path / "dev.json", *({"question": name} for name in "xy"))
    (tmp_path / "dev.trec").write_text("1 Q0 p 1 0.5 t\n0 Q0 r 1 0.5 t\n")
    assert _ids(_read(tmp_path, "valid", source="ranked")) == [["r"], ["p"]]


def test_questions_and_ranking_may_be_named(tmp_path: Path) -> None:
    _lines(
        tmp_path / "q.jsonl", {"id": "a", "question": "q", "answers": ["a"], "ctxs": ["ignored"]}
    )
    (tmp_path / "train.tsv").write_text("not read")
    (tmp_path / "bm25.run").write_text("a x 1\n")
    assert _ids(_read(tmp_path, source="ranked", file="q.jsonl", ranking="bm25.run")) == [["x"]]


def test_a_missing_ranking_says_where_it_should_be(tmp_path: Path) -> None:
    _questions(tmp_path, "a")
    with refused(
        "split_file_absent",
        names="train.trec",
        endings=".tsv, .txt, .run",
        key="data.rankings.train",
    ):
        list(_read(tmp_path, source="ranked"))


# NaturalQuestions


@pytest.mark.parametrize("folder", [".", "nq"])
def test_nq_names_its_passages_in_the_order_of_the_ranking(tmp_path: Path, folder: str) -> None:
    home = tmp_path / folder
    home.mkdir(exist_ok=True)
    (home / "corpus.tsv").write_text("id\ttext\ttitle\n7\tx\tT\n")
    question = {
        "qid": 3,
        "split": "val",
        "question": "q",
        "answers": ["a"],
        "gold": 7,
        "bm25": [7, 1, 4],
    }
    _lines(home / "queries.jsonl", {**question, "split": "train", "bm25": []}, question)
    assert list(_read(tmp_path, "valid", source="nq", contexts=2)) == [
        {"id": "3", "question": "q", "answers": ["a"], "ctxs": [{"id": "7"}, {"id": "1"}]}
    ]
    assert _ids(_read(tmp_path, "train", source="nq")) == [[]]
    with refused("split_has_no_line", at="queries.jsonl", split="test"):
        list(_read(tmp_path, "test", source="nq"))


def test_nq_without_a_ranking_is_refused_by_its_line(tmp_path: Path) -> None:
    _lines(tmp_path / "queries.jsonl", {"split": "train", "question": "q", "answers": ["a"]})
    with refused(
        "field_missing",
        at="queries.jsonl, line 1",
        key="bm25",
        keys=re.compile("split, question.*"),
    ):
        list(_read(tmp_path, source="nq"))


# The embedded corpus


@pytest.mark.parametrize("contexts", [1, 3, 8])
def test_a_documentation_question_has_its_own_passage_at_a_place_that_tells_nothing(
    contexts: int,
) -> None:
    own = stdlib_docs.qa_rows("valid")
    found = list(_read(None, "valid", source="stdlib_docs", contexts=contexts))
    assert [row["question"] for row in found] == [row["question"] for row in own]
    places = []
    for index, row in enumerate(found):
        ids = [ctx["id"] for ctx in row["ctxs"]]
        assert len(set(ids)) == contexts
        passage = row["ctxs"][ids.index(row["id"])]
        assert (passage["text"], passage["title"]) == (own[index]["context"], own[index]["title"])
        assert row["answers"][0] in " ".join(passage["text"].split())
        places.append(ids.index(row["id"]))
    assert (
        max(places.count(place) for place in range(contexts))
        - min(map(places.count, range(contexts)))
        <= 1
    )


def test_documentation_questions_have_no_more_passages_than_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = stdlib_docs.qa_rows("valid")[:3]
    monkeypatch.setattr(stdlib_docs, "qa_rows", lambda split: few)
    assert _ids(_read(None, "valid", source="stdlib_docs", contexts=9)) == [
        ["0", "1", "2"],
        ["2", "1", "0"],
        ["0", "1", "2"],
    ]


# Corpora


def _corpus(folder: Path, content: str, name: str = "corpus.tsv") -> list[Row]:
    (folder / name).write_text(content, encoding="utf-8")
    return list(passages.corpus_passages(folder, name))


_HEADER = "id\ttext\ttitle\n"


@pytest.mark.parametrize(
    ("line", "text", "title"),
    [
        ('1\tsaid "hi"\tT\n', 'said "hi"', "T"),
        ('1\t"Hello" and "bye"\tT\n', '"Hello" and "bye"', "T"),
        (
            '1\t"Hello"\tT\n',
            '"Hello"',
            "T",
        ),  # cannot tell, nor does anything else: a quote is a quote
        ('1\tx\t"T\n', "x", '"T'),
        ('1\t"\tT\n', '"', "T"),
        ('1\t"Hello"\tT\n2\ta "b"\tU\n', '"Hello"', "T"),  # the second passage can tell
        ('1\t"Hello"\tT\n2\t"a ""b"""\tU\n', "Hello", "T"),
        ('1\t"Aaron ( or ; ""Ahärôn"") is"\tAaron\n', 'Aaron ( or ; "Ahärôn") is', "Aaron"),
        ('1\tx\t"""A"" Is for"\n', "x", '"A" Is for'),
        ('1\t"""a"""\t""\n', '"a"', ""),
        (
            '1\t"a\tb ""c"""\tT\n2\t"x"\tU\n',
            'a\tb "c"',
            "T",
        ),  # a tab within: plain, it were a fourth column
    ],
)
def test_quotes_are_taken_as_the_first_field_that_can_tell_has_them(
    tmp_path: Path, line: str, text: str, title: str
) -> None:
    assert _corpus(tmp_path, _HEADER + line)[0] == {"id": "1", "text": text, "title": title}


def test_a_header_in_quotes_says_that_all_fields_are(tmp_path: Path) -> None:
    content = '"id"\t"text"\t"title"\n"1"\t"Hello\tthere"\t"T"\n'
    assert _corpus(tmp_path, content) == [{"id": "1", "text": "Hello\tthere", "title": "T"}]


def test_what_a_csv_writer_wrote_is_read_back(tmp_path: Path) -> None:
    texts = ["plain", 'a "quote" in it', '"all of it"', '"', 'ends with "', "it's", '""', "x, y; z"]
    with (tmp_path / "psgs.tsv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(["id", "text", "title"])
        writer.writerows([index, text, text] for index, text in enumerate(texts))
    assert [
        (row["text"], row["title"]) for row in passages.corpus_passages(tmp_path, "psgs.tsv")
    ] == [(t, t) for t in texts]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (_HEADER + "1\tx\n", fault("corpus_fields", at="corpus.tsv, line 2", count=2)),
        ("1\tx\tT\n", fault("corpus_header", at="corpus.tsv, line 1", header=["1", "x", "T"])),
        (
            "id\ttitle\ttext\n",
            fault("corpus_header", at="corpus.tsv, line 1", header=["id", "title", "text"]),
        ),
        (_HEADER + "1\t \tT\n", fault("corpus_blank", at="corpus.tsv, line 2")),
        (_HEADER, fault("corpus_empty", at="corpus.tsv")),
        (
            _HEADER + '1\t"a ""b"""\tT\n2\t"open\tT\n',
            fault("corpus_quotes", at="corpus.tsv, line 3", reason="unexpected end of data"),
        ),
        (
            _HEADER + '1\t"a ""b"""\tT\n2\t"a" b\tT\n',
            fault(
                "corpus_quotes", at="corpus.tsv, line 3", reason=re.compile(".* expected after .*")
            ),
        ),
    ],
)
def test_a_malformed_corpus_is_refused_by_its_line(
    tmp_path: Path, content: str, said: Fault
) -> None:
    with refused(said):
        _corpus(tmp_path, content)


def test_a_corpus_of_json_lines_is_read_as_tevatron_writes_it(tmp_path: Path) -> None:
    content = '{"docid": "a", "title": "T", "text": "x"}\n{"id": 7, "text": "say \\"y\\""}\n'
    assert _corpus(tmp_path, content, "corpus.jsonl") == [
        {"id": "a", "text": "x", "title": "T"},
        {"id": "7", "text": 'say "y"', "title": ""},
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"docid": "a", "title": " "}', fault("text_and_title_missing", keys="docid, title")),
        ('{"docid": "a", "text": " "}', fault("text_and_title_missing", keys="docid, text")),
        ('{"text": "x"}', fault("id_wanted", key="docid", value=None)),
    ],
)
def test_a_passage_without_id_or_text_is_refused_by_its_line(
    tmp_path: Path, line: str, problem: Fault
) -> None:
    with refused(problem, at="corpus.jsonl, line 2"):
        _corpus(tmp_path, f'{{"docid": "a", "text": "x"}}\n{line}\n', "corpus.jsonl")


def test_a_corpus_is_found_in_the_subfolder_nq(tmp_path: Path) -> None:
    (tmp_path / "nq").mkdir()
    (tmp_path / "nq" / "corpus.tsv").write_text(_HEADER + "1\tx\tT\n")
    assert [row["id"] for row in passages.corpus_passages(tmp_path, "corpus.tsv")] == ["1"]


def test_a_corpus_that_is_not_there_is_said(tmp_path: Path) -> None:
    with refused("file_unreadable", at="psgs.tsv", reason="No such file or directory"):
        list(passages.corpus_passages(tmp_path, "psgs.tsv"))
    with refused("data_path_missing", files=re.compile(r"psgs\.tsv \(passages.*")):
        list(passages.corpus_passages(None, "psgs.tsv"))


# Real files


def test_three_real_questions_have_three_passages_each(nq: Path) -> None:
    found = list(_read(nq, file="train3.json"))
    raw = json.loads((nq / "train3.json").read_text())
    assert found == [{"id": str(index), **question} for index, question in enumerate(raw)]
    assert [len(row["ctxs"]) for row in found] == [3, 3, 3]


def test_the_passages_of_every_real_question_are_in_the_corpus(nq: Path) -> None:
    known = {passage["id"] for passage in passages.corpus_passages(nq.parent, "corpus.tsv")}
    lengths = {}
    for split in ("train", "valid", "test"):
        found = list(_read(nq.parent, split, source="nq", contexts=5))
        assert {ctx["id"] for row in found for ctx in row["ctxs"]} <= known
        assert {len(row["ctxs"]) for row in found} == {5}
        lengths[split] = len(found)
    assert sum(lengths.values()) == len((nq / "queries.jsonl").read_text().splitlines())
    assert min(lengths.values()) > 0


def test_a_real_corpus_that_a_csv_writer_wrote_is_read_as_a_csv_reader_reads_it(nq: Path) -> None:
    with (nq / "corpus.tsv").open(newline="", encoding="utf-8") as file:
        expected = list(csv.DictReader(file, delimiter="\t"))
    found = list(passages.corpus_passages(nq, "corpus.tsv"))
    assert found == expected
    assert any('"' in passage["text"] for passage in found)
    assert not any('""' in passage["text"] for passage in found)


@pytest.mark.parametrize(("is_sorted", "wanted"), [(True, {retrieved.UNSCORED: 1}), (False, {})])
def test_passages_of_which_some_lack_a_score_are_told(
    is_sorted: bool, wanted: dict[str, int], tmp_path: Path
) -> None:
    mixed = [{**_PASSAGE, "score": 1.0}, _PASSAGE]
    _lines(tmp_path / "train.jsonl", {**_GOOD, "ctxs": mixed}, _GOOD)
    with left_out.reading() as notes:
        assert len(list(_read(tmp_path, sort_by_score=is_sorted))) == 2
    assert notes.counts == wanted
