"""What the experiments of a loop of rounds are, and what is refused before anything is computed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from exp_configs import vary
from tests.facts import TINY_BERT, experiment
from tests.wording import Fault, fault, refused, says
from trainer import tasks
from trainer.__main__ import app
from trainer.config.identity import exp_id
from trainer.files.held_lock import HeldLock
from trainer.retrieval.negatives import RankRange
from trainer.rounds.dictionaries import all_rounds, checked, refuse_no_teacher
from trainer.rounds.leaks import Guard
from trainer.rounds.loop import run_rounds
from trainer.rounds.plan import Loop, Mining
from trainer.rounds.sources import LoopFiles, QuestionFile
from trainer.training.options import Options


def retriever(folder: Path, **changes: Any) -> dict[str, Any]:
    return experiment("retriever", folder, base="some/model", **changes)


def test_each_round_begins_with_the_model_of_the_round_before(tmp_path: Path) -> None:
    values = retriever(tmp_path, data={"valid_share": 0.1, "corpus": "c.jsonl"})
    first, second, third = all_rounds(values, 3, digest="a" * 64)
    assert first["base"] == "some/model"
    assert second["base"] == {"experiment": first}
    assert third["base"] == {"experiment": second}
    assert len({exp_id(one) for one in (first, second, third)}) == 3
    assert first["tokenizer"] == values["tokenizer"]
    assert "tokenizer" not in second
    for number, one in enumerate((first, second, third), start=1):
        assert one["data"]["files"]["train"] == f"round-{number}/rows.jsonl"
        assert one["data"]["files"]["valid"] == "valid.jsonl"
        assert one["data"]["passage_tokens"] == 48
        assert not {"valid_share", "corpus"} & one["data"].keys()
        tasks.parse(one)
    # a longer loop has the same first rounds
    assert all_rounds(values, 2, digest="a" * 64) == [first, second]
    # a loop of another plan trains on other rows of the same name: other experiments
    other = all_rounds(values, 1, digest="b" * 64)[0]
    assert exp_id(other) != exp_id(first)
    assert {**other, "label": None} == {**first, "label": None}


def test_a_prefix_stays_and_a_tokenizer_below_the_data_is_found_again(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    values = retriever(tmp_path, data={"query_prefix": "query: "})
    values["tokenizer"] = "words"
    own = checked(values, tmp_path)
    assert own["tokenizer"] == str((tmp_path / "words").resolve())
    assert all_rounds(own, 1, digest="a" * 64)[0]["data"]["query_prefix"] == "query: "
    assert checked(values, None) == values


def test_the_model_of_topics_is_found_again_below_the_data(tmp_path: Path) -> None:
    batches = {"topics": {"by": "model", "model": "old/best"}}
    values = retriever(tmp_path, data={"batches": batches})
    own = checked(values, tmp_path)
    assert own["data"]["batches"]["topics"]["model"] == str((tmp_path / "old/best").resolve())
    assert values["data"]["batches"] == batches


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"base": TINY_BERT}, fault("rounds_random")),
        ({"init_from": "x"}, fault("rounds_keys", keys="init_from")),
        (
            {"data": {"batches": {"topics": {"by": "field"}}}},
            fault("rounds_keys", keys='data.batches.topics.by="field"'),
        ),
        ({"data": {"valid_sets": {"a": "b.jsonl"}}}, fault("rounds_keys", keys="data.valid_sets")),
        (
            {"encoder": {"learn_temperature": True}},
            fault("rounds_keys", keys="encoder.learn_temperature"),
        ),
    ],
)
def test_what_rounds_cannot_train_is_refused_by_name(
    changes: dict[str, Any], wanted: Fault, tmp_path: Path
) -> None:
    with refused(wanted):
        checked(vary(retriever(tmp_path), **changes), None)


def test_only_a_retriever_of_vectors_is_trained_in_rounds(tmp_path: Path) -> None:
    with refused("rounds_task", task="fid", form=""):
        checked(experiment("fid", tmp_path), None)
    with refused("rounds_task", task="retriever", form=', form="cross"'):
        checked(experiment("retriever, cross", tmp_path), None)


def test_a_student_needs_a_judge_whose_scores_it_learns(tmp_path: Path) -> None:
    values = retriever(tmp_path, loss={"distillation": {"kind": "kl"}})
    refuse_no_teacher(values, has_judge=True)
    refuse_no_teacher(retriever(tmp_path), has_judge=False)
    with refused("rounds_teacher"):
        refuse_no_teacher(values, has_judge=False)


def test_limits_of_a_judge_want_a_judge(tmp_path: Path) -> None:
    groups = tmp_path / "groups.py"
    groups.write_text(f"EXP_GROUPS = {{'one': [{retriever(tmp_path)!r}]}}\n")
    texts = ["--queries", "q.jsonl", "--passages", "p.jsonl", "--valid_share", "0.1"]
    words = ["-e", "one", "--exp_configs", str(groups), "-sb", "results", *texts, "--out", "loop"]
    result = CliRunner().invoke(app, ["rounds", *words, "--judge_margin", "0.5"])
    assert result.exit_code == 2
    says("judge_absent", " ".join(result.output.split()))


def test_an_unknown_way_to_mine_is_refused() -> None:
    by: Any = "hand"
    with refused("mining_by", value="hand"):
        Mining(RankRange(3), by)
    with refused("flag_choice", flag="--precision fp8"):
        Loop({}, 1, Path("out"), Mining(RankRange(3)), Guard(), by.replace("hand", "fp8"))


def test_a_search_by_words_wants_its_package_before_anything_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    Mining(RankRange(3))
    for by in ("bm25", "both"):
        with refused("extra_not_installed", name="bm25s", extra="bm25"):
            Mining(RankRange(3), by)


def files(folder: Path, **changes: Any) -> LoopFiles:
    rows = [
        {"query_id": f"q{n}", "query": f"{n} {'abcdefghij'[n % 10] * 9}?", "gold": "p0"}
        for n in range(40)
    ]
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "corpus.jsonl").write_text('{"docid": "p0", "text": "t"}\n')
    train = QuestionFile(folder / "queries.jsonl")
    return LoopFiles(folder / "corpus.jsonl", train, **changes)


def test_a_share_of_the_training_questions_is_held_out_and_no_question_is_in_both(
    tmp_path: Path,
) -> None:
    sources = files(tmp_path, valid_share=0.25).read(Guard(1.0))
    train, valid = ({query.id for query in part.queries} for part in (sources.train, sources.valid))
    assert len(train | valid) == 40
    assert not train & valid
    assert 3 <= len(valid) <= 20
    # a larger share only adds questions
    more = files(tmp_path, valid_share=0.5).read(Guard(1.0))
    assert valid < {query.id for query in more.valid.queries}
    assert sources.digests["passages"] == more.digests["passages"]
    assert sources.digests["train"] != more.digests["train"]


def test_validation_questions_are_wanted_once(tmp_path: Path) -> None:
    with refused("valid_or_share", got="none of them"):
        files(tmp_path)
    with refused("valid_or_share", got="both"):
        files(tmp_path, valid=QuestionFile(tmp_path / "v.jsonl"), valid_share=0.1)
    with refused("valid_share", value=1.0):
        files(tmp_path, valid_share=1.0)


def test_a_share_that_holds_all_questions_out_is_refused(tmp_path: Path) -> None:
    with refused("share_leaves_none", share=0.9999, count=40):
        files(tmp_path, valid_share=0.9999).read(Guard(1.0))


def test_training_questions_without_a_relevant_passage_are_refused(tmp_path: Path) -> None:
    own = files(tmp_path, valid=QuestionFile(tmp_path / "queries.jsonl"))
    (tmp_path / "train.jsonl").write_text('{"query_id": "t", "query": "without an answer"}\n')
    with refused("no_train_positive", count=1):
        replace(own, train=QuestionFile(tmp_path / "train.jsonl")).read(Guard(1.0))


def test_passages_that_are_absent_or_named_twice_are_refused_before_the_first_encoding(
    tmp_path: Path,
) -> None:
    sources = files(tmp_path, valid_share=0.25)
    read = sources.read(Guard(1.0))
    read.refuse_bad_ids()
    corpus = sources.passages
    corpus.write_text(corpus.read_text() + '{"docid": "p0", "text": "t"}\n')  # the same again
    with refused("id_of_two_texts", what="passages", id="p0", text="t"):
        read.refuse_bad_ids()
    corpus.write_text('{"docid": "p1", "text": "t"}\n')
    with refused("passage_missing", passage="p0", missing=1, count=1):
        read.refuse_bad_ids()


def test_a_loop_of_another_process_is_refused(tmp_path: Path) -> None:
    loop = Loop({}, 1, tmp_path / "loop", Mining(RankRange(3)))
    other = HeldLock(tmp_path / ".loop.lock", what="the loop")
    other.acquire()
    with refused("rounds_held", folder=tmp_path / "loop"):
        run_rounds(loop, files(tmp_path, valid_share=0.25), Options(tmp_path))
    other.release()
    # the lock file is no lock once it is removed by hand: the folder is locked besides
    other.hold(tmp_path / "loop")
    with refused("rounds_held", folder=tmp_path / "loop"):
        run_rounds(loop, files(tmp_path, valid_share=0.25), Options(tmp_path))
    other.release()


def test_validation_questions_without_a_relevant_passage_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "valid.jsonl"
    path.write_text('{"query_id": "v", "query": "not answered"}\n')
    with refused("no_valid_positive", count=1):
        files(tmp_path, valid=QuestionFile(path)).read(Guard(1.0))
