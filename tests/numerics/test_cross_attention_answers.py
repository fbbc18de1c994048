"""A trained model answers a split, and is taken elsewhere: `evaluate`, `export`, and the script of
docs/tasks/cross_attention.md.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.facts import experiment, facts, write_facts
from tests.ranks import run_on_ranks
from tests.wording import Fault, fault, refused
from trainer.__main__ import app
from trainer.config.identity import exp_id
from trainer.metrics.mergeable import answer_scores
from trainer.protocol.abilities import Search
from trainer.tasks.cross_attention.reader import Reader
from trainer.tasks.cross_attention.text.questions import with_another_context

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS = 17  # on two ranks in batches of 4: uneven
MEASURES = ("em", "f1", "precision", "recall", "recall_em")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Facts; the validation rows name a data set, all but one "nq", and the second asks what the
    first does.
    """
    made = write_facts(tmp_path_factory.mktemp("facts"))
    rows = [
        {**row, "dataset": "squad" if n == 5 else "nq"}
        for n, row in enumerate(facts(64, 64 + NUM_ROWS))
    ]
    rows[1] = {**rows[0], "answer": "of"}
    for split in ("valid", "test"):
        (made / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.fixture(scope="module")
def values(folder: Path) -> dict[str, Any]:
    return experiment(
        "cross_attention",
        folder,
        train={"steps": 4, "eval_every": 4, "save_every": 4, "micro_batch": 4},
        data={"loss_on": "answer", "answer_tokens": 4, "shuffled_context": False},
        optim={"lr": 0.03},
        schedule={"shape": "constant", "warmup_steps": 0},
    )


def train(values: dict[str, Any], folder: Path, savedir: Path) -> None:
    from trainer.launch.run import run
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    options = Options(savedir, data_path=folder, cache_dir=folder / "cache")
    assert run(plan(values, options, world=1, rank=0), options, Preemption()) == 0


@pytest.fixture(scope="module")
def savedir(values: dict[str, Any], folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    run_on_ranks(1, train, values, folder, made)
    return made


def evaluated(
    values: dict[str, Any], folder: Path, savedir: Path, pred: Path, changes: dict[str, Any]
) -> Any:
    from trainer.evaluation.run import Question, run
    from trainer.training.options import Options

    options = Options(savedir, data_path=folder, cache_dir=folder / "cache")
    flags = {name: changes[name] for name in changes if name.startswith("wandb")}
    asked = replace(
        Question(values, split="test", batch=4, predictions=pred),
        **{name: changes[name] for name in changes if name not in flags},
    )
    return run(asked, replace(options, **flags))


def rows_of(pred: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in pred.read_text().splitlines()]


def scores_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    found = answer_scores([row["prediction"] for row in rows], [row["answers"] for row in rows])
    return {name: score.value() for name, score in found.items()}


def test_every_data_set_has_scores_of_its_own_that_are_the_same_on_uneven_ranks(
    values: dict[str, Any], folder: Path, savedir: Path, tmp_path: Path
) -> None:
    """A rank whose rows hold no "squad" must not wait for one whose rows do."""
    alone = evaluated(values, folder, savedir, tmp_path / "one.jsonl", {})
    together = run_on_ranks(2, evaluated, values, folder, savedir, tmp_path / "two.jsonl", {})
    rows = rows_of(tmp_path / "one.jsonl")
    wanted = scores_of(rows)
    for dataset in ("nq", "squad"):
        own = scores_of([row for row in rows if row["dataset"] == dataset])
        wanted |= {f"{name}_{dataset}": value for name, value in own.items()}
    assert alone == pytest.approx(wanted, abs=1e-12)
    assert together == [pytest.approx(wanted, abs=1e-12)] * 2
    assert rows_of(tmp_path / "two.jsonl") == rows
    assert len({row["prediction"] for row in rows}) > 1


def test_answers_under_another_context_are_those_of_rows_that_have_it(
    values: dict[str, Any], folder: Path, savedir: Path, tmp_path: Path
) -> None:
    values = {**values, "data": {**values["data"], "shuffled_context": True}}
    model = next((path for path in savedir.glob("*/final")), None)
    own, other = ({"model": str(model), "another_context": another} for another in (False, True))
    evaluated(values, folder, savedir, tmp_path / "own.jsonl", own)
    evaluated(values, folder, savedir, tmp_path / "other.jsonl", other)
    swapped = tmp_path / "swapped"
    shutil.copytree(folder, swapped)
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    mixed = [
        {**row, "context": found["other"][0]}
        for row, found in zip(rows, with_another_context(rows), strict=True)
    ]
    (swapped / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    evaluated(
        {**values, "tokenizer": str(folder / "tokenizer")},
        swapped,
        savedir,
        tmp_path / "mixed.jsonl",
        own,
    )
    predictions = {
        name: [row["prediction"] for row in rows_of(tmp_path / f"{name}.jsonl")]
        for name in ("own", "other", "mixed")
    }
    assert predictions["other"] == predictions["mixed"] != predictions["own"]


def test_a_task_without_contexts_is_not_evaluated_under_others(
    folder: Path, savedir: Path, tmp_path: Path
) -> None:

    with refused("answers_without_context"):
        evaluated(
            experiment("causal_lm", folder),
            folder,
            savedir,
            tmp_path / "out.jsonl",
            {"another_context": True},
        )


def test_a_row_is_written_for_every_question_and_a_summary_beside_them(
    values: dict[str, Any], folder: Path, savedir: Path, tmp_path: Path
) -> None:
    found = evaluated(values, folder, savedir, tmp_path / "out.jsonl", {})
    rows = rows_of(tmp_path / "out.jsonl")
    assert [row["question"] for row in rows[2:]] == [
        row["question"] for row in facts(66, 64 + NUM_ROWS)
    ]
    assert all(row["scores"].keys() == set(MEASURES) for row in rows)
    summary = json.loads((tmp_path / "out.summary.json").read_text())
    assert summary["scores"] == found
    assert summary["split"] == "test"


def test_best_answer_counts_rows_that_ask_the_same_once_with_the_references_of_all(
    values: dict[str, Any], folder: Path, savedir: Path, tmp_path: Path
) -> None:
    found = evaluated(values, folder, savedir, tmp_path / "out.jsonl", {"best_answer": True})
    rows = rows_of(tmp_path / "out.jsonl")
    assert len(rows) == NUM_ROWS - 1
    assert rows[0]["answers"] == [facts(64, 65)[0]["answer"], "of"]
    assert {name: found[name] for name in MEASURES} == pytest.approx(scores_of(rows), abs=1e-12)


def test_answers_are_cut_before_they_are_scored_and_measured_by_rouge(
    values: dict[str, Any], folder: Path, savedir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("rouge_score")
    found = evaluated(
        values, folder, savedir, tmp_path / "out.jsonl", {"cut_at": [" "], "measures": ["rouge"]}
    )
    rows = rows_of(tmp_path / "out.jsonl")
    assert not any(" " in row["prediction"] for row in rows)
    mean = sum(row["scores"]["rouge1"] for row in rows) / NUM_ROWS
    assert found["rouge1"] == pytest.approx(mean, abs=1e-12)
    assert {name: found[name] for name in MEASURES} == pytest.approx(scores_of(rows), abs=1e-12)


def test_draws_depend_on_their_seed_alone(
    values: dict[str, Any], folder: Path, savedir: Path, tmp_path: Path
) -> None:
    drawn = [Search(temperature=1.5, seed=seed, num_answers=2) for seed in (1, 1, 2)]
    texts = []
    for number, search in enumerate(drawn):
        evaluated(values, folder, savedir, tmp_path / f"{number}.jsonl", {"search": search})
        texts.append([row["n_best"] for row in rows_of(tmp_path / f"{number}.jsonl")])
    assert texts[0] == texts[1] != texts[2]


def test_beams_are_synchronised_over_ranks(
    values: dict[str, Any], folder: Path, savedir: Path, tmp_path: Path
) -> None:
    search = {"search": Search(num_beams=2, num_answers=2)}
    evaluated(values, folder, savedir, tmp_path / "one.jsonl", search)
    run_on_ranks(2, evaluated, values, folder, savedir, tmp_path / "two.jsonl", search)
    assert rows_of(tmp_path / "one.jsonl") == rows_of(tmp_path / "two.jsonl")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"search": Search(top_p=0.5)}, fault("top_p_without_draws", top_p=0.5)),
        (
            {"search": Search(num_beams=2, temperature=1.0)},
            fault("draws_beside_beams", num_beams=2),
        ),
        ({"measures": ["rogue"]}, fault("measure_unknown", measure="rogue", nearest="rouge")),
        ({"cut_at": ["\n", ""]}, fault("cut_at_nothing")),
    ],
)
def test_what_cannot_be_asked_for_is_refused(
    changes: dict[str, Any],
    complaint: Fault,
    values: dict[str, Any],
    folder: Path,
    savedir: Path,
    tmp_path: Path,
) -> None:
    with refused(complaint):
        evaluated(values, folder, savedir, tmp_path / "out.jsonl", changes)


# Elsewhere
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wanted(
    values: dict[str, Any], folder: Path, savedir: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What `evaluate` predicts."""
    pred = tmp_path_factory.mktemp("pred") / "out.jsonl"
    evaluated(values, folder, savedir, pred, {"model": "final"})
    return rows_of(pred)


def asked_of(folder: Path) -> tuple[list[str], list[str]]:
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    return [row["question"] for row in rows], [row["context"] for row in rows]


@pytest.mark.parametrize("flags", [[], ["--merge"]], ids=["referring", "merged"])
def test_an_exported_folder_answers_as_evaluation_does(
    flags: list[str],
    wanted: list[dict[str, Any]],
    values: dict[str, Any],
    folder: Path,
    savedir: Path,
    tmp_path: Path,
) -> None:
    final, out = savedir / exp_id(values) / "final", tmp_path / "out"
    done = CliRunner().invoke(
        app, ["export", "cross_attention", str(final), "--out", str(out), *flags]
    )
    assert (done.exit_code, done.stderr) == (0, "")
    assert (out / "base" / "model.safetensors").is_file() == bool(flags)
    moved = shutil.move(out, tmp_path / "moved")
    reader = Reader(moved, cache_dir=tmp_path / "cache")
    assert reader.answers(*asked_of(folder)) == [row["prediction"] for row in wanted]


def test_a_merged_folder_whose_base_was_changed_is_refused(
    values: dict[str, Any], savedir: Path, tmp_path: Path
) -> None:
    from trainer.tasks.cross_attention.interchange import export_model

    export_model(savedir / exp_id(values) / "final", out=tmp_path / "out", merge=True)
    with (tmp_path / "out/base/config.json").open("a") as file:
        file.write(" ")
    with refused("layers_of_other_base"):
        Reader(tmp_path / "out", cache_dir=tmp_path / "cache")


def test_the_script_of_the_tasks_page_answers(
    values: dict[str, Any],
    savedir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    page = (ROOT / "docs" / "tasks" / "cross_attention.md").read_text()
    (script,) = re.findall(r"```python\n([^`]*Reader\([^`]*)```", page)
    assert len(script.splitlines()) <= 10
    monkeypatch.chdir(tmp_path)
    exec(script.replace("results/ID/final", str(savedir / exp_id(values) / "final")), {})
    context = "Ada keeps the red key in the cellar. The attic is empty."
    reader = Reader(savedir / exp_id(values) / "final", cache_dir=tmp_path / "cache")
    assert (
        capsys.readouterr().out == reader.answer("Where does Ada keep the red key?", context) + "\n"
    )


@pytest.mark.long
def test_an_evaluation_is_told_to_the_run_in_wandb(
    values: dict[str, Any],
    folder: Path,
    savedir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    evaluated(
        values,
        folder,
        savedir,
        tmp_path / "p.jsonl",
        {"wandb_entity_name": "someone", "wandb_project_name": "something"},
    )
    (record,) = (savedir / exp_id(values)).glob("wandb/offline-run-*/*.wandb")
    names = {b"evaluate/test/em", b"evaluate/test/f1_squad", b"evaluate/test/answers"}
    given_up = time.monotonic() + 60  # wandb's own process writes the file, perhaps after the end
    while missing := {name for name in names if name not in record.read_bytes()}:
        assert time.monotonic() < given_up, missing
        time.sleep(0.1)


def test_half_of_where_wandb_is_is_refused_before_anything_is_read(
    values: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    with refused("entity_alone"):
        evaluated(
            values,
            folder,
            tmp_path / "nowhere",
            tmp_path / "p.jsonl",
            {"wandb_entity_name": "someone"},
        )
