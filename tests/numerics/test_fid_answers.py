"""A reader's answers in training and afterwards: the same on any ranks and stages, every question
once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exp_configs import EXP_GROUPS, vary
from tests.facts import experiment, write_facts
from tests.ranks import run_on_ranks
from tests.tolerance import assert_close, depth_of
from tests.wording import Fault, fault, refused
from trainer import tasks
from trainer.protocol.abilities import Search
from trainer.protocol.task import Places

NQ = Path(__file__).resolve().parents[3] / "shared" / "data" / "nq"

# Margins, as tests/tolerance.py means them. An optimizer passes rounding on: it divides a gradient
# that is nothing but rounding by its own size. The toy's rate is a tenth of the other's.
LOSSES = {"what": "losses", "margin": 0.6}
FIRST_LOSSES = {"what": "losses of three steps", "margin": 0.008}
TOY_LOSSES = {"what": "losses of the toy", "margin": 0.008}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_facts(tmp_path_factory.mktemp("facts"))
    lines = [json.loads(line) for line in (folder / "valid.jsonl").read_text().splitlines()]
    for number in (3, 20):
        del lines[number]["answer"]
        lines[number]["answers"] = []  # legal where nothing is learnt from it
    lines[5]["ctxs"] = []
    (folder / "valid.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def learning(folder: Path) -> dict[str, Any]:
    """An experiment after which some answers are right and others are not; its best is by exact
    match.
    """
    return experiment(
        "fid",
        folder,
        train={
            "steps": 40,
            "eval_every": 20,
            "save_every": 40,
            "micro_batch": 4,
            "eval_batch": 5,
            "answers": "all",
            "best": "valid/em",
            "best_is": "max",
        },
        optim={"lr": 0.01},
        schedule={"shape": "constant", "warmup_steps": 5},
        data={"answer_tokens": 8},
    )


def depth(values: dict[str, Any], folder: Path, cache: Path) -> int:
    """Operations on the way to the last loss: those of the model, there and back at every step."""
    model: Any = tasks.load(tasks.parse(values), Places(folder, cache, cache)).model()
    return values["train"]["steps"] * 2 * depth_of(model)


def options(folder: Path, savedir: Path, stage: int = 0) -> Any:
    from trainer.training.options import Options

    return Options(savedir, data_path=folder, cache_dir=folder / "cache", deepspeed=f"zero{stage}")


def trained(values: dict[str, Any], folder: Path, savedir: Path, stage: int = 0) -> Path:
    from trainer.launch.run import run
    from trainer.runtime import distributed
    from trainer.runtime.preemption import Preemption
    from trainer.training.run_plan import plan

    chosen = options(folder, savedir, stage)
    planned = plan(values, chosen, world=distributed.world(), rank=distributed.rank())
    assert run(planned, chosen, Preemption()) == 0
    return planned.folder


def evaluations(run_folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: line[name] for name in ("valid/em", "valid/f1", "valid/loss")}
        for line in lines
        if "valid/em" in line
    ]


def at_stages(
    values: dict[str, Any], folder: Path, root: Path, stages: tuple[int, ...]
) -> list[Path]:
    return [trained(values, folder, root / f"zero{stage}", stage) for stage in stages]


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same experiment on one rank, and on two at ZeRO 3."""
    root = tmp_path_factory.mktemp("runs")
    alone = run_on_ranks(1, at_stages, learning(folder), folder, root / "one", (0,))[0]
    return alone + run_on_ranks(2, at_stages, learning(folder), folder, root / "two", (3,))[0]


@pytest.mark.long
def test_two_ranks_and_one_give_the_same_exact_match_and_losses(
    runs: list[Path], folder: Path
) -> None:
    how = {"depth": depth(learning(folder), folder, folder / "cache"), **LOSSES}
    alone, *others = (evaluations(run_folder) for run_folder in runs)
    assert 0 < alone[-1]["valid/f1"] < 1, "equal answers would hide a wrong count"
    for other in others:
        for one, two in zip(alone, other, strict=True):
            assert two["valid/em"] == pytest.approx(one["valid/em"], abs=1e-12)
            assert_close(two["valid/loss"], one["valid/loss"], **how)


def evaluated(
    values: dict[str, Any], folder: Path, savedir: Path, out: Path, model: str, beams: int
) -> Any:
    from trainer.evaluation.run import Question, run

    asked = Question(
        values,
        model=model,
        search=Search(beams, 2 if beams > 1 else 1),
        predictions=out / "predictions.jsonl",
        passage_scores=out / "scores.json",
        batch=3,
    )
    return run(asked, options(folder, savedir))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("world", [1, 2])
def test_evaluating_afterwards_repeats_what_the_run_said_and_writes_every_question_once(
    world: int, runs: list[Path], folder: Path, tmp_path: Path
) -> None:
    for scores in run_on_ranks(
        world,
        evaluated,
        learning(folder),
        folder,
        runs[0].parent,
        tmp_path,
        str(runs[0] / "final"),
        1,
    ):
        assert scores["em"] == pytest.approx(evaluations(runs[0])[-1]["valid/em"], abs=1e-12)
    given = read_lines(folder / "valid.jsonl")
    written = read_lines(tmp_path / "predictions.jsonl")
    assert [row["question"] for row in written] == [row["question"] for row in given]
    scored = [row for row in written if row["scores"]]
    assert len(scored) == 20
    assert sum(row["scores"]["em"] for row in scored) / 20 == scores["em"]
    assert written[3]["scores"] == {}
    summary = json.loads((tmp_path / "predictions.summary.json").read_text())
    assert summary["exact"] == [round(scores["em"] * 20), 20]
    assert 0 < summary["seconds"] < 600
    ctxs = [row["ctxs"] for row in json.loads((tmp_path / "scores.json").read_text())]
    assert [[ctx["text"] for ctx in of_row] for of_row in ctxs] == [
        [c["text"] for c in row["ctxs"]] for row in given
    ]
    assert all(isinstance(ctx["score"], float) for of_row in ctxs for ctx in of_row)
    assert len({ctx["score"] for of_row in ctxs for ctx in of_row}) > 10


def test_scoring_passages_changes_no_answer_and_a_file_of_scores_is_read_again(
    runs: list[Path], folder: Path, tmp_path: Path
) -> None:
    (out := tmp_path / "out").mkdir()
    arguments = (learning(folder), folder, runs[0].parent, out, "final", 1)
    (first,) = run_on_ranks(1, evaluated, *arguments)
    again = tmp_path / "again"
    write_facts(again)
    (again / "valid.jsonl").unlink()
    (again / "valid.json").write_text((out / "scores.json").read_text())
    values = vary(learning(folder), data={"sort_by_score": True})
    task = tasks.load(tasks.parse(values), Places(again, again / "cache", again))
    for row in task.rows("valid"):
        found = [ctx["score"] for ctx in row["ctxs"]]
        assert found == sorted(found, reverse=True)
    assert first["em"] == pytest.approx(evaluations(runs[0])[-1]["valid/em"], abs=1e-12)


def test_beams_give_the_n_best_answers_and_greedy_ones_one(
    runs: list[Path], folder: Path, tmp_path: Path
) -> None:
    run_on_ranks(1, evaluated, learning(folder), folder, runs[0].parent, tmp_path, "final", 3)
    for row in read_lines(tmp_path / "predictions.jsonl"):
        assert len(row["n_best"]) == 2
        assert row["n_best"][0] == row["prediction"]
        assert row["n_best"][0] != row["n_best"][1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "final/nowhere"}, fault("model_folder_unknown")),
        ({"search": Search(1, 2)}, fault("answers_above_beams", fix=2)),
        ({"predictions": Path("nowhere/out.jsonl")}, fault("out_folder_absent")),
        ({"model": "best"}, fault("not_trained_yet")),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    change: dict[str, Any], words: Fault, folder: Path, tmp_path: Path
) -> None:
    from trainer.evaluation.run import Question, run

    with refused(words):
        run(Question(learning(folder), **change), options(folder, tmp_path))


def test_a_task_that_reads_no_passages_does_not_score_them(folder: Path, tmp_path: Path) -> None:
    from trainer.evaluation.run import Question, run

    asked = Question(experiment("causal_lm", folder), passage_scores=tmp_path / "scores.json")
    with refused("scores_without_passages", task="causal_lm"):
        run(asked, options(folder, tmp_path))


def _toy(world_folder: Path, cache: Path) -> list[dict[str, float]]:
    from trainer.launch.run import run
    from trainer.runtime import distributed
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    (values,) = EXP_GROUPS["fid_toy"]
    chosen = Options(world_folder, data_path=NQ, cache_dir=cache)
    planned = plan(values, chosen, world=distributed.world(), rank=distributed.rank())
    assert run(planned, chosen, Preemption()) == 0
    return evaluations(planned.folder)


@pytest.mark.long
@pytest.mark.skipif(not NQ.is_dir(), reason=f"{NQ} is absent")
def test_the_toy_run_of_min_fid_answers_three_of_three_on_one_rank_and_on_two(
    tmp_path: Path,
) -> None:
    found = [
        run_on_ranks(world, _toy, tmp_path / f"{world}", tmp_path / "cache")[0] for world in (1, 2)
    ]
    assert [each[-1]["valid/em"] for each in found] == [1.0, 1.0]
    how = {"depth": depth(EXP_GROUPS["fid_toy"][0], NQ, tmp_path / "cache"), **TOY_LOSSES}
    for one, two in zip(*found, strict=True):
        assert two["valid/em"] == one["valid/em"]
        assert_close(two["valid/loss"], one["valid/loss"], **how)


# T5 v1.1
# --------------------------------------------------------------------------------------------------


def _exported_v11(values: dict[str, Any], folder: Path, savedir: Path) -> Path:
    return trained(values, folder, savedir)


def test_a_trained_t5_v11_is_exported_with_its_unscaled_output(
    folder: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import T5ForConditionalGeneration

    values = learning(folder)
    config = values["base"]["config"] | {
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    }
    values = vary(
        values,
        base={"config": config, "seed": 1},
        train={"steps": 2, "eval_every": 2, "save_every": 2},
        schedule={"warmup_steps": 1},
    )
    (run_folder,) = run_on_ranks(1, _exported_v11, values, folder, tmp_path)
    task = tasks.load(tasks.parse(values), Places(folder, folder / "cache", tmp_path))
    ours = task.load_export(run_folder / "final").eval()
    stock = T5ForConditionalGeneration.from_pretrained(run_folder / "final").eval()
    ids, labels = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[9, 10, 0]])
    wanted = stock(input_ids=ids, labels=labels).logits
    assert torch.equal(ours.t5(input_ids=ids, labels=labels).logits, wanted)
    assert not stock.config.scale_decoder_outputs
    said = json.loads((run_folder / "final" / "config.json").read_text())
    assert said["tie_word_embeddings"] is False
    assert said["architectures"] == ["T5ForConditionalGeneration"]


def _two_stages(values: dict[str, Any], folder: Path, root: Path) -> list[list[float]]:
    found = []
    for stage in (0, 3):
        run_folder = trained(values, folder, root / f"zero{stage}", stage)
        lines = [
            json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()
        ]
        found.append([line["loss"] for line in lines if "loss" in line])
    return found


def test_an_output_layer_of_its_own_survives_zero3(folder: Path, tmp_path: Path) -> None:
    import torch

    from trainer.config.schema import RandomBase
    from trainer.models import base_model
    from trainer.models.weights import model_folder

    values = learning(folder)
    config = values["base"]["config"] | {
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    }
    places = Places(folder, folder / "cache", tmp_path)
    t5: Any = base_model.load(
        RandomBase(config=config, seed=1), places, precision="fp32", kind="seq2seq_lm"
    )
    t5.lm_head.weight = torch.nn.Parameter(torch.randn_like(t5.lm_head.weight) * 0.1)
    weights = dict(t5.named_parameters())
    model_folder.write(
        tmp_path / "base", t5.config, tasks.load(tasks.parse(values), places).tokenizer, weights
    )
    values = vary(
        values,
        base=str(tmp_path / "base"),
        train={"steps": 3, "log_every": 1, "answers": None, "best": None},
        schedule={"warmup_steps": 3},
    )
    zero0, zero3 = run_on_ranks(2, _two_stages, values, folder, tmp_path / "runs")[0]
    assert len(zero0) == 3
    assert_close(zero3, zero0, depth=depth(values, folder, tmp_path), **FIRST_LOSSES)
    for stage in (0, 3):
        (final,) = (tmp_path / "runs" / f"zero{stage}").glob("*/final/model.safetensors")
        from safetensors.torch import load_file

        tensors = load_file(final)
        assert "lm_head.weight" in tensors
        assert not torch.equal(tensors["lm_head.weight"], tensors["shared.weight"])
