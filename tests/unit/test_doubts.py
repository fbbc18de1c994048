"""What is doubted at the start of a run, a prediction or a preparation, and refused under --strict."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.facts import experiment, write_facts
from tests.unit.test_own_rows import write_lines
from tests.wording import refused, says
from trainer import tasks
from trainer.config.mistakes import late_changes, odd_rate
from trainer.config.own_rows import OwnRows
from trainer.data import left_out
from trainer.data.chat.rows import chats
from trainer.data.content import content_of
from trainer.data.control_tokens import reason
from trainer.data.readers.questions import completions
from trainer.data.readers.row_files import placed_rows
from trainer.evaluation.predict import OpenExport, judge_rows
from trainer.launch import preflight
from trainer.launch.run_folder import tell_changed_data
from trainer.protocol.abilities import Prediction
from trainer.protocol.task import Places
from trainer.recipes.cross_attention import preparation
from trainer.tasks.retriever import rows as retriever_rows
from trainer.tasks.summariser import data as summaries
from trainer.tasks.vera import groups
from trainer.training.options import Options
from trainer.training.run_plan import plan

END = "<|endoftext|>"


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=4, valid=2)


def task_of(name: str, facts: Path, folder: Path, **changes: Any) -> Any:
    cfg = tasks.parse(experiment(name, facts, **changes))
    return tasks.load(cfg, Places(folder, folder / "cache", folder))


# The learning rate


@pytest.mark.parametrize(
    ("optim", "is_odd"),
    [
        ({"lr": 100.0}, True),
        ({"lr": 0.11}, True),
        ({"lr": 0.1}, False),
        ({"lr": 5e-7}, False),
        ({"lr": 1e-9}, False),
        ({"lr": 1e-12}, True),
        ({"name": "adafactor", "lr": 0.3}, False),  # Lester et al. 2021
        ({"name": "adafactor", "lr": 3.0}, True),
    ],
)
def test_a_rate_that_moves_weights_by_more_than_their_size_or_not_at_all_is_doubted(
    optim: dict[str, Any], is_odd: bool, facts: Path
) -> None:
    values = {**experiment("causal_lm", facts), "optim": optim}
    assert bool(list(odd_rate(tasks.parse(values)))) is is_odd


def test_an_odd_rate_is_told_at_the_start_and_refused_under_strict(
    facts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for is_strict in (False, True):
        options = Options(tmp_path, data_path=facts, cache_dir=tmp_path, strict=is_strict)
        run = plan(experiment("causal_lm", facts, optim={"lr": 100.0}), options, world=1, rank=0)
        task = tasks.load(run.cfg, options.places)
        findings = preflight.look(run, options)
        assert len(findings.problems if is_strict else findings.warnings) == 1
        if not is_strict:
            with caplog.at_level(logging.WARNING):
                preflight.refuse_early(run, options, task)
            says("rate_odd", f"--strict: {caplog.messages[0]}", lr=100, name="adamw")
            continue
        with refused("rate_odd", lr=100, how="by more than its size", highest="0.1"):
            preflight.refuse_early(run, options, task)


@pytest.mark.parametrize(("after", "is_late"), [(3, False), (5, False), (6, True), (99, True)])
def test_weights_of_a_mix_behind_the_last_step_are_doubted(
    after: int, is_late: bool, facts: Path
) -> None:
    even, other = {"a.jsonl": 0.5, "b.jsonl": 0.5}, {"a.jsonl": 0.9, "b.jsonl": 0.1}
    mixing = {"changes": [{"after": after, "weights": other}]}
    data = {"source": "files", "mix": even, "mixing": mixing}
    values = experiment("causal_lm", facts, data=data)
    found = list(late_changes(tasks.parse(values)))
    assert len(found) == is_late
    if is_late:
        says("mix_change_late", found[0], after=after, steps=6)


# Rows


def test_missing_keys_are_named_before_the_split_is_blamed(tmp_path: Path) -> None:
    rows = [{"task": f"do {n}", "hint": "", "reply": str(n)} for n in range(40)]
    write_lines(tmp_path / "train.jsonl", rows)
    for split in ("train", "valid"):
        with refused("messages_missing", at="line 1", keys="task, hint, reply"):
            list(chats(tmp_path, split, own=OwnRows(valid_share=0.2)))


def test_rows_to_score_without_an_answer_are_counted(facts: Path, tmp_path: Path) -> None:
    rows = [{"question": "q", "ctxs": [], "answers": answers} for answers in (["a"], [], None, "")]
    for name in ("valid", "test"):
        write_lines(tmp_path / f"{name}.jsonl", rows)
        task = task_of("fid", facts, tmp_path)
        with left_out.gathering():
            content_of(task, name, tmp_path / "cache")
            notes = left_out.of_split(name)
        assert list(notes.counts.values()) == [3]
        assert [note.place for note in notes.first] == [
            f"row {number + 1}, question '{number}'" for number in (1, 2, 3)
        ]
    write_lines(tmp_path / "train.jsonl", [{"question": "q", "ctxs": [], "target": "t"}])
    with left_out.gathering():
        content_of(task_of("fid", facts, tmp_path), "train", tmp_path / "cache")
        assert not left_out.of_split("train")


def test_documents_without_a_summary_are_counted(facts: Path, tmp_path: Path) -> None:
    rows = [{"context": "d", "answer": answer} for answer in ("s", None, [], "")]
    write_lines(tmp_path / "valid.jsonl", rows)
    with left_out.gathering():
        content_of(task_of("summariser", facts, tmp_path), "valid", tmp_path / "cache")
        counts = left_out.of_split("valid").counts
    assert counts[summaries.UNSUMMARISED] == 3


def test_a_statement_that_is_true_and_false_is_counted(facts: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{"golds": ["g"], "distractors": ["g", "h"]}])
    data = {
        "source": "files",
        "train_tasks": ["choices"],
        "valid_tasks": ["choices"],
        "boolean": [],
    }
    task = task_of("vera", facts, tmp_path, data=data)
    with left_out.gathering():
        content_of(task, "train", tmp_path / "cache")
        assert left_out.of_split("train").counts == {groups.BOTH: 1}


def test_blank_passages_are_counted(facts: Path, tmp_path: Path) -> None:
    passages = [{"text": " "}, {"title": "t", "text": ""}, {"text": "x"}]
    row = {"query": "q", "positive_passages": passages[1:], "negative_passages": passages[:1]}
    write_lines(tmp_path / "train.jsonl", [row])
    data = {"files": {"train": None, "valid": None}}
    task = task_of("retriever", facts, tmp_path, data=data)
    with left_out.gathering():
        content_of(task, "train", tmp_path / "cache")
        notes = left_out.of_split("train")
    assert notes.counts == {retriever_rows.BLANK: 1}
    assert notes.first[0].field == "negatives"


@pytest.mark.parametrize("value", [5, ["x"], {"a": "b"}])
def test_an_input_that_is_no_text_is_refused(value: Any, tmp_path: Path) -> None:
    row = {"prompt": "p", "completion": "c", "input": value}
    write_lines(tmp_path / "train.jsonl", [row])
    for reader in (chats, completions):
        with refused("text_wanted", at="train.jsonl, line 1", key="input", value=value):
            list(reader(tmp_path, "train", own=OwnRows()))
    write_lines(tmp_path / "train.jsonl", [{**row, "input": one} for one in (None, "", " ")])
    assert len(list(chats(tmp_path, "train", own=OwnRows()))) == 3


# Commands


def test_predict_tells_control_tokens_before_a_row_is_predicted_and_refuses_them(
    facts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = task_of("fid", facts, tmp_path)
    write_lines(tmp_path / "rows.jsonl", [{"question": f"q {END}", "ctxs": []}])
    opened_model = OpenExport(task, nn.Module(), tmp_path)
    for is_strict in (False, True):
        placed = placed_rows(tmp_path / "rows.jsonl")
        judge = functools.partial(
            judge_rows, opened_model, placed, Prediction(), what="rows", strict=is_strict
        )
        if not is_strict:
            judge()
            assert reason(("question", END)) in caplog.text
            continue
        place = f"{tmp_path / 'rows.jsonl'}, line 1"
        with refused("strict_refuses", count=1, why=reason(("question", END)), places=place):
            judge()


def test_prepare_refuses_what_is_left_out_and_leaves_no_file(facts: Path, tmp_path: Path) -> None:
    rows = [{"question": "q", "answers": "a", "context": "c"}]
    for split in ("train", "valid"):
        (tmp_path / "data" / split).mkdir(parents=True)
        write_lines(tmp_path / "data" / split / "a.jsonl", rows)
    write_lines(tmp_path / "data" / "train" / "_b.jsonl", rows)
    places = Places(tmp_path / "data", tmp_path / "cache", tmp_path)
    cfg: Any = tasks.parse(experiment("cross_attention", facts))
    request = preparation.Preparation(tmp_path / "out", {}, strict=True)
    with refused("strict_refuses", count=1, places=tmp_path / "data" / "train" / "_b.jsonl"):
        preparation.write_rows(cfg, places, request)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["prepared.json"]
    preparation.write_rows(cfg, places, preparation.Preparation(tmp_path / "out", {}))
    assert (tmp_path / "out" / "train.jsonl").is_file()


def test_changed_rows_of_a_finished_run_are_told_and_refused_under_strict(
    facts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = experiment("causal_lm", facts)
    for split in ("train", "valid"):
        write_lines(tmp_path / f"{split}.jsonl", [{"text": split}])
    task = task_of("causal_lm", facts, tmp_path)
    identity = {
        split: content_of(task, split, tmp_path / "cache")[0] for split in ("train", "valid")
    }
    (tmp_path / "data.json").write_text(json.dumps({"identity": {"base": "b", **identity}}))
    finished: Any = SimpleNamespace(folder=tmp_path, values=values, cfg=task.cfg)

    def tell(*, strict: bool) -> list[str]:
        cache = tmp_path / "cache"
        options = Options(tmp_path, data_path=tmp_path, cache_dir=cache, strict=strict)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            tell_changed_data(finished, options)
        return [one.getMessage() for one in caplog.records if "run_folder" in one.name]

    assert tell(strict=True) == []
    write_lines(tmp_path / "valid.jsonl", [{"text": "valid too"}])
    (told,) = tell(strict=False)
    says("data_changed_since", told, folder=tmp_path, splits="valid")
    with refused("data_changed_since", splits="valid"):
        tell(strict=True)
    (tmp_path / "valid.jsonl").unlink()
    (told,) = tell(strict=True)
    assert "not compared" in told
