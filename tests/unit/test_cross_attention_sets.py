"""Every published form of the five reading-comprehension sets gives the same rows, under the
published rules.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.wording import refused
from trainer.data.readers import questions
from trainer.protocol.task import Row
from trainer.recipes.cross_attention.sets import PublishedSource, has_test, rows, sources_in


def read(folder: Path, split: str = "train", **options: Any) -> list[Row]:
    return list(rows(sources_in(folder, {}), split, **options))


def put(path: Path, content: Any, *, is_lines: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(json.dumps(row) for row in content) if is_lines else json.dumps(content)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def save(folder: Path, **splits: list[dict[str, Any]]) -> None:
    datasets = pytest.importorskip("datasets")
    found = {name: datasets.Dataset.from_list(content) for name, content in splits.items()}
    datasets.DatasetDict(found).save_to_disk(str(folder))


# NaturalQuestions

DOCUMENT = "<P> The first Nobel Prize in Physics went to Wilhelm Conrad R\u00f6ntgen in 1901 . </P>"
TOKENS = DOCUMENT.split(" ")
QUESTION = "who got the first nobel prize in physics"


def annotation(
    shorts: Iterable[tuple[int, int]] = (), verdict: str = "NONE", *, has_long: bool = True
) -> dict[str, Any]:
    span = {"start_token": 0, "end_token": 15, "candidate_index": 0}
    return {
        "long_answer": span
        if has_long
        else {"start_token": -1, "end_token": -1, "candidate_index": -1},
        "short_answers": [{"start_token": start, "end_token": end} for start, end in shorts],
        "yes_no_answer": verdict,
    }


def simplified(*annotations: dict[str, Any], question: str = QUESTION) -> dict[str, Any]:
    return {
        "question_text": question,
        "document_text": DOCUMENT,
        "document_url": "https://en.wikipedia.org//w/index.php?title=Nobel_Prize_in_Physics&amp;oldid=1",
        "annotations": list(annotations),
    }


NQ_ROW: Row = {
    "question": QUESTION,
    "answers": ["Wilhelm Conrad R\u00f6ntgen", "R\u00f6ntgen"],
    "contexts": ["The first Nobel Prize in Physics went to Wilhelm Conrad R\u00f6ntgen in 1901 ."],
    "titles": ["Nobel Prize in Physics"],
    "useful_contexts": [1],
    "dataset": "nq",
}


def test_simplified_nq_gives_the_long_answer_without_mark_up_and_its_short_answers(
    tmp_path: Path,
) -> None:
    content = [simplified(annotation([(9, 12), (11, 12)]))]
    put(tmp_path / "nq/v1.0-simplified_simplified-nq-train.jsonl.gz", content, is_lines=True)
    assert read(tmp_path) == [NQ_ROW]


def test_original_nq_takes_the_first_annotation_with_a_long_answer_and_all_references(
    tmp_path: Path,
) -> None:
    original = simplified(annotation([(9, 12)], has_long=False), annotation([(11, 12)]))
    del original["document_text"], original["document_url"]
    original["document_tokens"] = [{"token": token, "html_token": "<" in token} for token in TOKENS]
    original["document_title"] = "Nobel Prize in Physics"
    put(tmp_path / "nq/nq-dev-00.jsonl.gz", [original], is_lines=True)
    assert read(tmp_path, "valid") == [NQ_ROW]


def test_the_hubs_natural_questions_give_the_same_row(tmp_path: Path) -> None:
    annotations = {
        "long_answer": [{"start_token": 0, "end_token": 15, "candidate_index": 0}],
        "short_answers": [{"start_token": [9, 11], "end_token": [12, 12], "text": ["", ""]}],
        "yes_no_answer": [-1],
    }
    tokens = {"token": TOKENS, "is_html": ["<" in token for token in TOKENS]}
    document = {"title": "Nobel Prize in Physics", "tokens": tokens}
    save(
        tmp_path / "nq",
        train=[{"document": document, "question": {"text": QUESTION}, "annotations": annotations}],
    )
    assert read(tmp_path) == [NQ_ROW]


def test_long_nq_gives_the_same_row(tmp_path: Path) -> None:
    flat = {
        "question_text": QUESTION,
        "document_title": NQ_ROW["titles"][0],
        "long_answer_clean": NQ_ROW["contexts"][0],
    }
    save(
        tmp_path / "nq",
        train=[{**flat, "short_answers_text": NQ_ROW["answers"], "yes_no_answer": "NONE"}],
    )
    assert read(tmp_path) == [NQ_ROW]


@pytest.mark.parametrize(
    ("annotated", "answers"),
    [
        (annotation(verdict="YES"), ["Yes"]),
        (annotation(verdict="NO"), ["No"]),
        (annotation(), ["UNANSWERABLE"]),
        (annotation([(9, 12)], verdict="YES"), ["Wilhelm Conrad R\u00f6ntgen"]),
    ],
)
def test_without_short_answers_nq_says_yes_no_or_unanswerable(
    tmp_path: Path, annotated: dict[str, Any], answers: list[str]
) -> None:
    put(tmp_path / "nq/nq-train.jsonl", [simplified(annotated)], is_lines=True)
    assert [row["answers"] for row in read(tmp_path)] == [answers]


def test_nq_without_a_long_answer_is_left_out(tmp_path: Path) -> None:
    put(tmp_path / "nq/nq-train.jsonl", [simplified(annotation(has_long=False))], is_lines=True)
    assert read(tmp_path) == []


def test_where_nq_open_is_given_only_its_questions_are_kept(tmp_path: Path) -> None:
    kept = simplified(annotation([(11, 12)]), question="Who got it -- first?")
    put(tmp_path / "nq/nq-train.jsonl", [simplified(annotation([(11, 12)])), kept], is_lines=True)
    put(
        tmp_path / "nq_open/NQ-open.train.jsonl",
        [{"question": "who got it first", "answer": ["x"]}],
        is_lines=True,
    )
    put(
        tmp_path / "nq_open/NQ-open.dev.jsonl",
        [{"question": "another one", "answer": ["x"]}],
        is_lines=True,
    )
    assert [row["question"] for row in read(tmp_path)] == ["Who got it -- first?"]


# SQuAD


def test_squad_gives_every_question_of_a_paragraph_and_impossible_ones_as_unanswerable(
    tmp_path: Path,
) -> None:
    asked = [
        {
            "id": "1",
            "question": "Who?",
            "answers": [{"text": "Ann", "answer_start": 0}],
            "is_impossible": False,
        },
        {"id": "2", "question": "Why?", "answers": [], "is_impossible": True},
    ]
    article = {"title": "Ann_Lee", "paragraphs": [{"context": "Ann wrote it.", "qas": asked}]}
    put(tmp_path / "squad_v2/train-v2.0.json", {"version": "v2.0", "data": [article]})
    put(tmp_path / "squad_v2/dev-v2.0.json", {"data": [article], "version": "v2.0"})
    found = read(tmp_path)
    assert [(row["question"], row["answers"]) for row in found] == [
        ("Who?", ["Ann"]),
        ("Why?", ["UNANSWERABLE"]),
    ]
    assert found[0]["contexts"] == ["Ann wrote it."]
    assert found[0]["titles"] == ["Ann Lee"]
    assert read(tmp_path, "valid") == found
    assert read(tmp_path, "test") == []


def test_squad_of_the_hub_gives_the_same_rows(tmp_path: Path) -> None:
    raw = {"id": "1", "title": "Ann_Lee", "context": "Ann wrote it.", "question": "Who?"}
    save(tmp_path / "squad_v2", train=[{**raw, "answers": {"text": ["Ann"], "answer_start": [0]}}])
    (row,) = read(tmp_path)
    assert row == {
        "question": "Who?",
        "answers": ["Ann"],
        "contexts": ["Ann wrote it."],
        "titles": ["Ann Lee"],
        "useful_contexts": [1],
        "dataset": "squad_v2",
    }


# MS MARCO

PASSAGES = [
    {"is_selected": 0, "passage_text": "No.", "url": "u"},
    {"is_selected": 1, "passage_text": "Ten.", "url": "u"},
]
COLUMNS = {
    "answers": {"0": ["10", ""], "1": ["No Answer Present."], "2": [], "3": [""]},
    "passages": dict.fromkeys("0123", PASSAGES),
    "query": {"0": "how many", "1": "why", "2": "who", "3": "what"},
    "query_id": {"0": 5, "1": 6, "2": 7, "3": 8},
    "wellFormedAnswers": {"0": "[]", "1": "[]", "2": "[]", "3": "[]"},
}
MARCO_ROWS = [
    {
        "question": question,
        "answers": [answer],
        "contexts": ["No.", "Ten."],
        "useful_contexts": [0, 1],
        "dataset": "msmarco",
    }
    for question, answer in (("how many", "10"), ("why", "UNANSWERABLE"))
]


@pytest.mark.parametrize("name", ["train_v2.1.json", "train_v2.1.json.gz"])
def test_ms_marco_in_columns_keeps_all_passages_and_drops_empty_answers(
    tmp_path: Path, name: str
) -> None:
    put(tmp_path / "msmarco" / name, COLUMNS)
    put(tmp_path / "msmarco/eval_v2.1_public.json", {"passages": {}, "query": {}})
    assert read(tmp_path) == MARCO_ROWS


def test_ms_marco_in_lines_and_of_the_hub_gives_the_same_rows(tmp_path: Path) -> None:
    flat = [
        {
            "query": COLUMNS["query"][number],
            "answers": COLUMNS["answers"][number],
            "passages": PASSAGES,
        }
        for number in "0123"
    ]
    put(tmp_path / "lines/msmarco/train.jsonl", flat, is_lines=True)
    assert read(tmp_path / "lines") == MARCO_ROWS
    lists = {name: [passage[name] for passage in PASSAGES] for name in PASSAGES[0]}
    save(tmp_path / "hub/msmarco", train=[{**row, "passages": lists} for row in flat])
    assert read(tmp_path / "hub") == MARCO_ROWS


def test_columns_that_list_other_records_are_refused(tmp_path: Path) -> None:
    put(
        tmp_path / "msmarco/train.json",
        {**COLUMNS, "query": dict(reversed(COLUMNS["query"].items()))},
    )
    with refused("set_columns", at="train.json", columns="query, answers, passages"):
        read(tmp_path)


# HotpotQA


def hotpot(number: int) -> dict[str, Any]:
    return {
        "_id": f"h{number}",
        "question": f"Which {number}?",
        "answer": "yes",
        "supporting_facts": [["B", 0], ["D", 1]],
        "context": [[title, [f"{title} one.", " Two."]] for title in "ABCDE"],
    }


def put_hotpot(folder: Path) -> None:
    put(folder / "hotpotqa/hotpot_train_v1.1.json", [hotpot(number) for number in range(20)])
    put(
        folder / "hotpotqa/hotpot_dev_distractor_v1.json",
        [hotpot(100 + number) for number in range(4)],
    )
    put(folder / "hotpotqa/hotpot_dev_fullwiki_v1.json", [hotpot(999)])


def test_hotpotqa_marks_the_passages_with_supporting_sentences(tmp_path: Path) -> None:
    put_hotpot(tmp_path)
    first = read(tmp_path, "test")[0]
    assert first["question"] == "Which 100?"
    assert first["contexts"][1] == "B one. Two."
    assert (first["titles"], first["useful_contexts"]) == (list("ABCDE"), [0, 1, 0, 1, 0])


def test_hotpotqa_keeps_as_many_questions_of_train_for_valid_as_dev_has(tmp_path: Path) -> None:
    put_hotpot(tmp_path)
    asked = {
        split: {row["question"] for row in read(tmp_path, split)}
        for split in ("train", "valid", "test")
    }
    assert [len(questions) for questions in asked.values()] == [16, 4, 4]
    assert not asked["train"] & asked["valid"]
    assert asked["valid"] != {f"Which {number}?" for number in range(16, 20)}  # drawn, not the last


def test_hotpotqa_gives_every_training_question_in_several_orders_that_never_change(
    tmp_path: Path,
) -> None:
    put_hotpot(tmp_path)
    found = read(tmp_path)
    assert len(found) == 3 * 16
    orders = [tuple(row["titles"]) for row in found]
    assert len(set(orders[:3])) == 3
    for row in found:
        useful = {
            title for title, mark in zip(row["titles"], row["useful_contexts"], strict=True) if mark
        }
        assert useful == {"B", "D"}
        assert [text[0] for text in row["contexts"]] == row["titles"]
    assert read(tmp_path) == found
    assert len(read(tmp_path, hotpotqa_shuffles=1)) == 16
    assert len(read(tmp_path, "valid")) == 4


def test_hotpotqa_of_the_hub_gives_the_same_rows(tmp_path: Path) -> None:
    put_hotpot(tmp_path / "files")

    def of_hub(raw: dict[str, Any]) -> dict[str, Any]:
        facts = {"title": ["B", "D"], "sent_id": [0, 1]}
        context = {
            "title": list("ABCDE"),
            "sentences": [sentences for _, sentences in raw["context"]],
        }
        return {
            "id": raw["_id"],
            "question": raw["question"],
            "answer": "yes",
            "supporting_facts": facts,
            "context": context,
        }

    parts = {"train": range(20), "validation": range(100, 104)}
    save(
        tmp_path / "hub/hotpotqa",
        **{name: [of_hub(hotpot(number)) for number in part] for name, part in parts.items()},
    )
    for split in ("train", "valid", "test"):
        assert read(tmp_path / "hub", split) == read(tmp_path / "files", split)


# TopiOCQA


def turn(conversation: int, number: int) -> dict[str, Any]:
    return {
        "Conversation_no": conversation,
        "Turn_no": number,
        "Question": f"q{number}",
        "Answer": "UNANSWERABLE" if number == 2 else "a1",
        "Context": ["q1", "a1"][: 2 * number - 2],
        "Additional_answers": [{"Answer": "b"}, {"Answer": "a1"}] if number == 1 else [],
        "Gold_passage": {"id": "7", "title": f"T{conversation}", "text": "Gold."},
    }


def put_topiocqa(folder: Path) -> None:
    put(folder / "topiocqa/topiocqa_train.json", [turn(c, n) for c in range(5) for n in (1, 2)])
    put(folder / "topiocqa/topiocqa_dev.json", [turn(c, n) for c in (50, 51) for n in (1, 2)])


def test_topiocqa_gives_each_turn_its_history_its_gold_passage_and_all_answers(
    tmp_path: Path,
) -> None:
    put_topiocqa(tmp_path)
    first, second = read(tmp_path, "test")[:2]
    assert (first["question"], first["answers"]) == ("q1", ["a1", "b"])
    assert (second["question"], second["answers"]) == ("q1 [SEP] a1 [SEP] q2", ["UNANSWERABLE"])
    assert (first["contexts"], first["titles"], first["useful_contexts"]) == (
        ["Gold."],
        ["T50"],
        [1],
    )


def test_the_last_conversations_of_topiocqa_are_the_valid_split(tmp_path: Path) -> None:
    put_topiocqa(tmp_path)
    titles = {
        split: {row["titles"][0] for row in read(tmp_path, split)}
        for split in ("train", "valid", "test")
    }
    assert titles == {"train": {"T0", "T1", "T2"}, "valid": {"T3", "T4"}, "test": {"T50", "T51"}}


@pytest.mark.parametrize(
    "record",
    [
        {
            "positive_ctxs": [{"title": "T", "text": "Gold."}, {"title": "U", "text": "x"}],
            "answers": ["a"],
        },
        {"title": "T", "context": "Gold.", "short_answers": ["a"]},
    ],
    ids=["retriever", "gold passages"],
)
def test_the_other_files_of_topiocqas_publisher_are_understood(
    tmp_path: Path, record: dict[str, Any]
) -> None:
    content = [{"conv_id": 1, "turn_id": n, "question": "q", **record} for n in (1, 2)]
    put(tmp_path / "topiocqa/x_train.json", content)
    put(tmp_path / "topiocqa/x_dev.json", {"data": content})
    for row in read(tmp_path, "test"):
        assert (row["question"], row["answers"], row["contexts"], row["titles"]) == (
            "q",
            ["a"],
            ["Gold."],
            ["T"],
        )


# All of them


def test_sets_are_read_one_after_another_and_rows_are_what_the_task_reads(tmp_path: Path) -> None:
    put_hotpot(tmp_path)
    put_topiocqa(tmp_path)
    put(tmp_path / "msmarco/train.json", COLUMNS)
    put(tmp_path / "nq/nq-train.jsonl", [simplified(annotation([(9, 12)]))], is_lines=True)
    found = read(tmp_path)
    assert list(dict.fromkeys(row["dataset"] for row in found)) == [
        "nq",
        "hotpotqa",
        "msmarco",
        "topiocqa",
    ]
    put(tmp_path / "prepared/train.jsonl", found, is_lines=True)
    assert list(questions.qa_rows(tmp_path / "prepared", "train")) == found
    assert has_test(sources_in(tmp_path, {}))
    assert not has_test([PublishedSource("msmarco", tmp_path)])


def test_a_set_may_be_given_by_name_and_place(tmp_path: Path) -> None:
    put_hotpot(tmp_path / "elsewhere")
    found = sources_in(
        None, {"hotpotqa": str(tmp_path / "elsewhere/hotpotqa"), "squad_v2": "rajpurkar/squad_v2"}
    )
    assert found == [
        PublishedSource("hotpotqa", tmp_path / "elsewhere/hotpotqa"),
        PublishedSource("squad_v2", "rajpurkar/squad_v2"),
    ]


def test_a_misspelt_set_is_refused_with_the_nearest_name() -> None:
    with refused("set_unknown", name="hotpot_qa", nearest="hotpotqa"):
        sources_in(None, {"hotpot_qa": "x"})


def test_a_folder_without_any_set_says_what_is_wanted(tmp_path: Path) -> None:
    with refused("set_folders", names="nq, hotpotqa, squad_v2, msmarco, topiocqa"):
        sources_in(tmp_path, {})


def test_a_set_without_the_file_of_a_part_says_what_is_wanted(tmp_path: Path) -> None:
    put(tmp_path / "squad_v2/train-v2.0.json", {"data": []})
    with refused("set_split_absent", at="squad_v2", words="dev or val", has="train-v2.0"):
        read(tmp_path, "valid")


def test_a_record_of_another_form_is_named_by_file_and_line(tmp_path: Path) -> None:
    put(
        tmp_path / "nq/nq-train.jsonl",
        [simplified(annotation()), {"question_text": "q"}],
        is_lines=True,
    )
    with refused(
        "set_record_form", at="nq-train.jsonl, line 2", has="question_text", wanted="document_text"
    ):
        read(tmp_path)
    put(tmp_path / "msmarco/train.json", {**COLUMNS, "answers": dict.fromkeys("0123", 7)})
    with refused("set_record_kind", at="train.json, record 0", reason="TypeError"):
        list(rows(sources_in(None, {"msmarco": str(tmp_path / "msmarco")}), "train"))


def test_a_torn_download_is_named(tmp_path: Path) -> None:
    put(tmp_path / "msmarco/train.json.gz", COLUMNS)
    path = tmp_path / "msmarco/train.json.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with refused("set_torn", at="train.json.gz"):
        read(tmp_path)


def test_a_hub_id_that_cannot_be_reached_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    found = sources_in(None, {"squad_v2": "nobody/nowhere_at_all"})
    with refused("set_place", place="nobody/nowhere_at_all"):
        list(rows(found, "train"))
