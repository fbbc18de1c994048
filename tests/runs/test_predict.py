"""`python -m trainer predict`: rows without answers, in their order, on any number of ranks, gone on
with after a kill, by a model that has left the house it was trained in.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests import exported, forked
from tests.facts import LLAMA, TINY_T5, experiment, facts, write_facts
from tests.numerics.tiny_cross_attention import counted_calls
from tests.ranks import run_on_ranks
from tests.wording import fault, says
from trainer.data.chat.templates.built_in import BUILT_IN
from trainer.protocol.abilities import Search
from trainer.tasks.cross_attention.reader import Reader

SHORT = {"steps": 2, "eval_every": 2, "save_every": 2, "best": None, "eval_batch": 2}
QUESTIONS = {"question": "asked", "contexts": "read"}
ROWS = 37  # three pieces of 16 rows, the last one not full


def values_of(name: str, folder: Path) -> dict[str, Any]:
    own: dict[str, Any] = {"train": SHORT, "optim": {"lr": 1e-3}}
    if name == "cross_attention":
        own |= {"data": {"answer_tokens": 5}}
    if name == "fid":
        own |= {"base": {**TINY_T5, "seed": 3}}
    if name == "causal_lm":
        chat = {"source": "chat", "chat_template": "own.jinja", "files": {"train": "chat.jsonl"}}
        own |= {"base": LLAMA, "data": chat | {"valid_share": 0.3}}
    return experiment(name, folder, **own)


TASKS = ("cross_attention", "causal_lm", "summariser", "fid", "retriever", "vera")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_facts(tmp_path_factory.mktemp("facts"))
    chats = [{"prompt": row["question"], "completion": row["answer"]} for row in facts(0, 40)]
    (made / "own.jinja").write_text(BUILT_IN["plain"])
    (made / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    return made


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By task: the folder of a run whose facts, tokenizer and all, are gone by now."""
    values = {name: values_of(name, folder) for name in TASKS}
    (made,) = run_on_ranks(1, exported.trained, values, folder, tmp_path_factory.mktemp("runs"))
    folder.rename(folder.with_name("gone"))
    return {name: run for name, (run, _) in made.items()}


def row_of(task: str, number: int) -> dict[str, Any]:
    fact = facts(number, number + 1)[0]
    if task in ("vera", "summariser"):
        name = "statement" if task == "vera" else "context"
        return {"id": f"q{number}", name: fact["context"]}
    if task == "causal_lm":
        return {"id": f"q{number}", "messages": [{"role": "user", "content": fact["question"]}]}
    return {"question": fact["question"], "contexts": [fact["context"], "The attic is empty."]}


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(model: Path, rows: Path, out: Path, *more: str) -> list[str]:
    said = ["predict", str(model), "--data_path", str(rows), "--out", str(out)]
    return [*forked.TRAINER, *said, "--cache_dir", str(rows.parent / "cache"), *more]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("task", TASKS)
def test_rows_without_answers_are_predicted_by_every_task(
    task: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    rows = written(tmp_path / "rows.jsonl", [row_of(task, n) for n in range(5)])
    done = forked.run(*arguments(runs[task], rows, tmp_path / "out.jsonl", "--max_tokens", "6"))
    assert done.returncode == 0, done.stderr
    said = lines(tmp_path / "out.jsonl")
    named = task in ("vera", "summariser", "causal_lm")
    assert [line["id"] for line in said] == [f"q{n}" if named else n for n in range(5)]
    name = {"retriever": "scores", "vera": "score"}.get(task, "prediction")
    assert all(set(line) - {"cut_tokens"} == {"id", name} for line in said)
    assert not list(tmp_path.glob(".*.parts"))
    again = forked.run(*arguments(runs[task], rows, tmp_path / "out.jsonl"))
    assert again.returncode == 2
    says("path_exists", again.stderr)


@pytest.mark.parametrize("task", ["causal_lm", "fid", "retriever"])
def test_weights_that_are_no_finite_numbers_are_told_before_anything_is_predicted(
    task: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(runs[task] / "final", tmp_path / "poisoned"))
    [file] = model.glob("*.safetensors")
    weights = load_file(file)
    name = min(one for one in weights if weights[one].is_floating_point())
    weights[name].view(-1)[0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    rows = written(tmp_path / "rows.jsonl", [row_of(task, n) for n in range(2)])
    done = forked.run(*arguments(model, rows, tmp_path / "out.jsonl"))
    assert done.returncode == 2
    says("weights_not_finite", done.stderr, happened="What the model computes is not finite")
    says("weight_not_finite", done.stderr, at=file, name=name)
    assert not (tmp_path / "out.jsonl").exists()


def test_what_is_predicted_does_not_depend_on_what_stands_beside_it(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    """Foreign names, one row or many, a table or lines, an export at another place: the same."""
    model = Path(shutil.copytree(runs["cross_attention"] / "final", tmp_path / "moved"))
    record = json.loads((model / "lathe.json").read_text())
    record["experiment"]["data"]["columns"] = QUESTIONS
    (model / "lathe.json").write_text(json.dumps(record))
    facts_of = [row_of("cross_attention", n) for n in range(ROWS)]
    ours = written(tmp_path / "ours.jsonl", facts_of)
    theirs = written(
        tmp_path / "theirs.jsonl",
        [{"asked": row["question"], "read": row["contexts"]} for row in facts_of],
    )
    told: list[list[dict[str, Any]]] = []
    for place, rows in ((runs["cross_attention"], ours), (model, theirs)):
        out = tmp_path / f"{rows.stem}.out"
        done = forked.run(*arguments(place, rows, out))
        assert done.returncode == 0, done.stderr
        told.append(lines(out))
    assert told[0] == told[1]
    assert [line["id"] for line in told[0]] == list(range(ROWS))
    assert len({line["prediction"] for line in told[0]}) > 1
    reader = Reader(model, cache_dir=tmp_path / "cache", savedir_base=tmp_path)
    alone = [reader.answer(row["question"], row["contexts"]) for row in facts_of]
    assert [line["prediction"] for line in told[0]] == alone


def test_two_ranks_and_a_kill_leave_the_bytes_of_one(runs: dict[str, Path], tmp_path: Path) -> None:
    model = runs["cross_attention"]
    rows = written(tmp_path / "r.jsonl", [row_of("cross_attention", n) for n in range(ROWS)])
    whole = forked.run(*arguments(model, rows, tmp_path / "one"))
    ranks = forked.run_ranks(2, *arguments(model, rows, tmp_path / "two"))
    assert [one.returncode for one in [whole, *ranks]] == [0, 0, 0], ranks[0].stderr
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    killed = forked.start(*arguments(model, rows, tmp_path / "three"))
    parts = tmp_path / ".three.parts"
    _wait_for(lambda: (parts / "0000000.jsonl").exists())
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.finish().returncode == -9
    assert not (tmp_path / "three").exists()
    kept, one = (parts / "0000000.jsonl").read_bytes(), (tmp_path / "one").read_bytes()
    assert one.startswith(kept)
    marked = b'{"kept": true}\n'  # is gone when the piece is made again
    (parts / "0000000.jsonl").write_bytes(marked)
    other = forked.run(*arguments(model, rows, tmp_path / "three", "--num_beams", "2"))
    assert other.returncode == 2
    says("pieces_of_others", other.stderr, changed="search")
    again = forked.run_ranks(2, *arguments(model, rows, tmp_path / "three"))
    assert [one.returncode for one in again] == [0, 0]
    assert (tmp_path / "three").read_bytes() == marked + one[len(kept) :]


def _wait_for(is_there: Any) -> None:
    deadline = time.monotonic() + 120
    while not is_there():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_what_is_no_model_or_no_row_is_told(runs: dict[str, Path], tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", [{"id": 1, "text": " "}])
    for arguments_, told in (
        ((tmp_path, rows, tmp_path / "out"), fault("model_folder_absent")),
        ((runs["vera"], rows, tmp_path / "no" / "out"), fault("out_folder_absent")),
        (
            (runs["vera"], rows, tmp_path / "out"),
            fault("field_missing", at="rows.jsonl, line 1", key="statement"),
        ),
    ):
        done = forked.run(*arguments(*arguments_))
        assert done.returncode == 2, done.stdout
        says(told, done.stderr)
        assert not (tmp_path / "out").exists()


# What a reader has read
# --------------------------------------------------------------------------------------------------


def asked_of(model: Path, folder: Path) -> tuple[Any, list[str], list[str]]:
    """A reader, questions, and texts."""
    rows = facts(0, 12)
    questions, contexts = ([row[name] for row in rows] for name in ("question", "context"))
    return Reader(model / "final", cache_dir=folder / "cache"), questions, contexts


DOUBTED = "It ends <|endoftext|> here."


@pytest.mark.parametrize(
    ("task", "row", "field"),
    [
        ("summariser", {"context": DOUBTED}, "document"),
        ("causal_lm", {"messages": [{"role": "user", "content": DOUBTED}]}, "messages.content"),
        ("causal_lm", {"prompt": DOUBTED}, "prompt"),
    ],
)
def test_predict_under_strict_refuses_what_is_doubted_and_writes_nothing(
    task: str, row: dict[str, Any], field: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    rows = written(tmp_path / "rows.jsonl", [row])
    words = arguments(runs[task], rows, tmp_path / "out.jsonl", "--strict")
    refused = forked.run(*words)
    assert refused.returncode == 2, refused.stderr
    why = f"rows with the control token '<|endoftext|>' in {field!r}"
    says("strict_refuses", refused.stderr, count=1, why=why, places=f"{rows}, line 1")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_prompt_that_is_cut_is_told_and_refused_under_strict(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    """128 positions, of which the text gets 6."""
    of_one = {"prompt": "a?", "persona": "a pirate"}  # no model is told of it
    rows = written(tmp_path / "rows.jsonl", [of_one, {"prompt": "a" * 300}])
    words = ["--max_tokens", "6"]
    done = forked.run(*arguments(runs["causal_lm"], rows, tmp_path / "out", *words))
    assert done.returncode == 0, done.stderr
    whole, cut = lines(tmp_path / "out")
    assert "cut_tokens" not in whole
    assert cut["cut_tokens"] > 300 - 122
    assert f"{rows}: 2 rows; 1 rows lose {cut['cut_tokens']} tokens; 1 of 2 prompts" in done.stdout
    assert "; nothing reads 'persona' (1 rows)" in done.stdout
    strict = forked.run(*arguments(runs["causal_lm"], rows, tmp_path / "no", *words, "--strict"))
    assert strict.returncode == 2
    why = "prompts of more than 127 tokens (the beginning is cut)"
    says("strict_refuses", strict.stderr, count=1, why=why, places=f"{rows}, line 2")
    assert not (tmp_path / "no").exists()


def test_a_context_is_read_once_and_asked_often(runs: dict[str, Path], tmp_path: Path) -> None:
    model = runs["cross_attention"]
    reader, questions, contexts = asked_of(model, tmp_path)
    want = [[reader.answer(asked, context) for asked in questions] for context in contexts[:2]]
    assert len(set(want[0])) > 1
    readings = [reader.read(context) for context in contexts[:2]]
    with counted_calls(reader.model) as calls:
        assert [[one.answer(asked) for asked in questions] for one in readings] == want
        assert [["".join(one.stream(asked)) for asked in questions] for one in readings] == want
    assert calls, "it is counted"
    assert not [name for name in calls if name.endswith((".k_attn", ".v_attn"))]
    beams = Search(num_beams=3)
    once = readings[1].answer(questions[0], search=beams)
    assert once == reader.answer(questions[0], contexts[1], search=beams)
    (tmp_path / "context.txt").write_text(contexts[1])
    words = [*forked.TRAINER, "read", str(model), "--context", str(tmp_path / "context.txt")]
    words += [word for question in questions for word in ("--question", question)]
    done = forked.run(*words, "--cache_dir", str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (0, "".join(f"{text}\n" for text in want[1]))
    wrong = forked.run(*forked.TRAINER, "read", str(runs["vera"]), "--context", __file__)
    assert wrong.returncode == 2
    says("task_without", wrong.stderr, task="vera", what="read texts with")


def test_a_question_that_stands_before_the_context_is_read_with_it(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    reader, questions, contexts = asked_of(runs["cross_attention"], tmp_path)
    changed = {"question_on_context": True}
    reader.prompts.data = reader.prompts.data.model_copy(update=changed)
    reading = reader.read(contexts[0])
    for question in questions[:3]:
        assert reading.answer(question) == reader.answer(question, contexts[0])
