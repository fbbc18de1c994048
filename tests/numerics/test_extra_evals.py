"""Answers by generation during training: the same on any ranks and stages, and nothing else
changes.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.facts import experiment, facts, with_dropout, write_facts
from tests.ranks import run_on_ranks
from tests.wording import refused
from trainer import tasks
from trainer.metrics.mergeable import answer_scores
from trainer.protocol.task import Places
from trainer.telemetry.run_record import RunRecord
from trainer.telemetry.wandb_run import WandbSettings
from trainer.training.scoring import first_questions

MEASURES = ("em", "f1", "precision", "recall", "recall_em")
# of 22 rows, in batches of 8: three, so that of two ranks one repeats a batch that must not count
ANSWERED = 17


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def learning(folder: Path) -> dict[str, Any]:
    """An experiment after which some answers begin right and others do not."""
    return experiment(
        "cross_attention",
        folder,
        train={"steps": 4, "eval_every": 4, "save_every": 4, "micro_batch": 4, "eval_batch": 8},
        data={"loss_on": "answer", "answer_tokens": 4, "shuffled_context": False},
        optim={"lr": 0.03},
        schedule={"shape": "constant", "warmup_steps": 0},
    )


def loaded(folder: Path, task: str = "cross_attention", **changes: Any) -> Any:
    cfg = tasks.parse(experiment(task, folder, **changes))
    return tasks.load(cfg, Places(folder, folder / "cache", folder / "runs"))


def trained(
    values: dict[str, Any], folder: Path, savedir: Path, stage: int, extra_evals: int
) -> Path:
    """Run an experiment to its end on the ranks of this process group; its folder."""
    from trainer.launch.run import run
    from trainer.runtime import distributed
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    options = Options(
        savedir,
        data_path=folder,
        cache_dir=folder / "cache",
        deepspeed=f"zero{stage}",
        do_extra_evals=extra_evals > 0,
        generation_eval_max_sample_size=max(extra_evals, 1),
    )
    planned = plan(values, options, world=distributed.world(), rank=distributed.rank())
    assert run(planned, options, Preemption()) == 0
    return planned.folder


def lines(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def table(run_folder: Path, step: int) -> list[dict[str, Any]]:
    text = (run_folder / "answers" / f"step-{step}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def evaluations(run_folder: Path) -> dict[int, dict[str, float]]:
    found = [line for line in lines(run_folder) if "valid/em" in line]
    return {line["step"]: {name: line[f"valid/{name}"] for name in MEASURES} for line in found}


def at_stages_0_and_3(values: dict[str, Any], folder: Path, root: Path) -> list[Path]:
    return [trained(values, folder, root / f"zero{stage}", stage, ANSWERED) for stage in (0, 3)]


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of one experiment, answered at each evaluation, by world size and stage."""
    found: dict[str, Path] = {}
    for world in (1, 2):
        root = tmp_path_factory.mktemp(f"world{world}")
        zero0, zero3 = run_on_ranks(world, at_stages_0_and_3, learning(folder), folder, root)[0]
        found |= {f"{world} rank(s), ZeRO 0": zero0, f"{world} rank(s), ZeRO 3": zero3}
    return found


def test_answers_and_their_scores_are_the_same_on_any_ranks_and_stages(
    runs: dict[str, Path],
) -> None:
    alone, *others = runs
    wanted = evaluations(runs[alone])
    assert list(wanted) == [4]
    assert 0 < wanted[4]["f1"] < 1
    assert len({row["prediction"] for row in table(runs[alone], 4)}) > 1, (
        "equal answers would hide a wrong count"
    )
    for other in others:
        assert evaluations(runs[other]) == {
            step: pytest.approx(each, abs=1e-12) for step, each in wanted.items()
        }, other
        assert table(runs[other], 4) == table(runs[alone], 4), other


def test_the_scores_are_those_of_the_written_answers_each_counted_once(
    runs: dict[str, Path],
) -> None:
    for name, run_folder in runs.items():
        for step, found in evaluations(run_folder).items():
            rows = table(run_folder, step)
            wanted = answer_scores(
                [row["prediction"] for row in rows], [row["references"] for row in rows]
            )
            assert found == pytest.approx(
                {key: ratio.value() for key, ratio in wanted.items()}, abs=1e-12
            ), name


def test_the_written_answers_are_of_the_first_validation_rows_in_their_order(
    runs: dict[str, Path],
) -> None:
    first = facts(64, 64 + ANSWERED)  # tests.facts: the validation rows follow the 64 of training
    for run_folder in runs.values():
        rows = table(run_folder, 4)
        assert [row["question"] for row in rows] == [row["question"] for row in first]
        assert [row["references"] for row in rows] == [[row["answer"]] for row in first]


def test_scores_of_answers_stand_on_the_line_of_the_evaluation(runs: dict[str, Path]) -> None:
    for run_folder in runs.values():
        assert [
            line["step"]
            for line in lines(run_folder)
            if "valid/loss" in line and "valid/f1" in line
        ] == [4]
        scores = json.loads((run_folder / "score_list.json").read_text())
        assert all("valid/recall_em" in entry for entry in scores)


def with_and_without(values: dict[str, Any], folder: Path, root: Path, stage: int) -> list[Path]:
    return [trained(values, folder, root / f"{count}", stage, count) for count in (0, 22)]


@pytest.mark.parametrize(("world", "stage"), [(1, 0), pytest.param(2, 3, marks=pytest.mark.long)])
def test_answering_changes_no_training_loss_by_a_single_bit_with_dropout(
    world: int, stage: int, folder: Path, tmp_path: Path
) -> None:
    train = {"steps": 2, "eval_every": 1, "save_every": 2, "micro_batch": 4, "eval_batch": 8}
    values = experiment(
        "cross_attention", folder, train=train, data={"answer_tokens": 2, "shuffled_context": False}
    )
    without, answered = run_on_ranks(
        world, with_and_without, with_dropout(values), folder, tmp_path, stage
    )[0]
    losses = [
        [line["loss"] for line in lines(each) if "loss" in line] for each in (without, answered)
    ]
    assert losses[0] == losses[1]
    assert (without / "final/model.safetensors").read_bytes() == (
        answered / "final/model.safetensors"
    ).read_bytes()
    assert not evaluations(without)
    assert not (without / "answers").exists()
    assert len(table(answered, 2)) == 20  # of 22: the table is a sample


def test_an_answer_depends_on_neither_its_batch_nor_its_reference(folder: Path) -> None:
    task = loaded(folder)
    model, raw = task.model().eval(), list(task.rows("valid"))
    rows = [task.encode(row) for row in raw]
    together = task.answers(model, rows, raw).predictions
    assert len(set(together)) > 1
    assert [
        task.answers(model, [row], [text]).predictions[0]
        for row, text in zip(rows, raw, strict=True)
    ] == together
    other = [task.encode({**row, "answers": ["somewhere else"]}) for row in raw]
    assert task.answers(model, other, raw).predictions == together


def test_a_prompt_that_leaves_no_room_for_the_answer_loses_its_beginning(folder: Path) -> None:
    task = loaded(folder, data={"answer_tokens": 120})  # the base has 128 positions
    raw = list(task.rows("valid"))[:2]
    answered = task.answers(task.model().eval(), [task.encode(row) for row in raw], raw)
    assert len(answered.predictions) == 2


def test_more_answer_tokens_than_positions_are_refused(folder: Path) -> None:
    task = loaded(folder, data={"answer_tokens": 128})
    raw = list(task.rows("valid"))[:1]
    with refused("evals_above_positions", most=127, key="data.answer_tokens"):
        task.answers(task.model().eval(), [task.encode(raw[0])], raw)


def test_the_number_of_answer_tokens_leaves_encoded_rows_valid(folder: Path) -> None:
    assert loaded(folder, data={"answer_tokens": 7}).encoding_id() == loaded(folder).encoding_id()


def test_a_task_that_cannot_answer_refuses_extra_evals_and_only_them(folder: Path) -> None:
    task = loaded(folder, "causal_lm")
    with refused("evals_without_generation", task="causal_lm"):
        first_questions(task, 5)
    assert first_questions(task, 0) == []


def test_no_more_questions_than_rows_are_asked(folder: Path) -> None:
    task = loaded(folder)
    assert len(first_questions(task, 1000)) == 22
    assert first_questions(task, 2)[0] == {
        "question": facts(64, 65)[0]["question"],
        "answers": [facts(64, 65)[0]["answer"]],
    }


# What is written of them
# ------------------------------------------------------------------------------------------

ROWS = [{"question": "Où?", "prediction": "là", "references": ["là", "ici"]}]


def test_a_resumed_run_drops_the_answers_past_its_checkpoint(tmp_path: Path) -> None:
    live = RunRecord(tmp_path, total=20, console=Console(file=io.StringIO()))
    for step in (5, 10, 15):
        live.answers(step, ROWS)
    live.resume(10)
    assert sorted(path.name for path in (tmp_path / "answers").iterdir()) == [
        "step-10.jsonl",
        "step-5.jsonl",
    ]
    assert table(tmp_path, 10) == ROWS


@pytest.mark.long
def test_wandb_gets_the_answers_as_a_table_with_the_next_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = WandbSettings(entity="e", project="p", name="n", id="i", config={})
    live = RunRecord(tmp_path, total=20, wandb=settings, console=Console(file=io.StringIO()))
    live.answers(5, ROWS)
    live.log(5, loss=1.0)
    live.close()
    (written,) = tmp_path.glob("wandb/offline-run-*/files/media/table/answers_*.table.json")
    assert json.loads(written.read_text()) == {
        "columns": ["step", "question", "prediction", "references"],
        "data": [[5, "Où?", "là", ["là", "ici"]]],
    }
    wandb.teardown()
