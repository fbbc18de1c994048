"""A verifier's loss is one mean over everything: ranks and micro-batches change neither it nor its
gradients.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tests.facts import LLAMA, experiment, write_facts
from tests.numerics.test_engine import ds_for
from tests.ranks import run_on_ranks
from tests.tolerance import assert_close, assert_same_step, depth_of
from tests.wording import Fault, fault, refused
from trainer import tasks
from trainer.config.identity import exp_id
from trainer.data.padding import pad_right
from trainer.protocol.task import DRAW, Places
from trainer.tasks.vera import groups, losses
from trainer.tasks.vera.config import Data
from trainer.tasks.vera.task import _represent, _statements

# Margins, as tests/tolerance.py means them.
STEP: dict[str, Any] = {"loss": 0.08, "gradients": 0.9}
# Types 1 and 2 take dot products of about 32 / 0.05 = 640 before the softmax.
STEP_OF_PRODUCTS: dict[str, Any] = {"loss": 1.0, "gradients": 10.0}
STATES = {"what": "states", "margin": 0.25}
LOGITS = {"what": "logits", "margin": 0.4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def loaded(folder: Path, **changes: Any) -> Any:
    return tasks.load(
        tasks.parse(experiment("vera", folder, **changes)), Places(folder, folder / "cache", folder)
    )


def rows_of(task: Any, count: int = 16) -> list[dict[str, Any]]:
    """Multiple-choice and boolean groups in turn, as training rows."""
    found = [task.encode(row) for row in task.rows("train")]
    half = len(found) // 2
    mixed = [row for pair in zip(found[:half], found[half:], strict=True) for row in pair][:count]
    return [{**row, DRAW: np.array([7 * number])} for number, row in enumerate(mixed)]


def stepped(
    folder: Path, changes: dict[str, Any], sizes: list[int]
) -> tuple[float, dict[str, Tensor]]:
    """Loss and full gradients of 16 groups cut into these micro-batches over the ranks."""
    from trainer.config.schema import Optim
    from trainer.runtime import distributed
    from trainer.training import engine

    task = loaded(folder, **changes)
    rows, world = rows_of(task), distributed.world()
    live = engine.Engine(task.model(), ds_for(0, "fp32", world), Optim(lr=0.1, clip=0.0))
    live.train()
    starts = np.cumsum([0, *sizes])
    share = len(sizes) // world
    mine = range(distributed.rank() * share, (distributed.rank() + 1) * share)
    window = [task.collate(rows[starts[i] : starts[i + 1]]) for i in mine]
    total = torch.zeros((), dtype=torch.float64)
    for summed in task.losses(live.model, window):
        live.backward(summed / len(rows))
        total += (summed / len(rows)).detach()
    found: dict[str, Tensor] = {}
    live.step(
        0.1, watch=lambda named: found.update({name: gradient.clone() for name, gradient in named})
    )
    live.destroy()
    return float(distributed.total(total)), found


def cuts(
    folder: Path, changes: dict[str, Any], all_sizes: list[list[int]]
) -> list[tuple[float, dict[str, Tensor]]]:
    return [stepped(folder, changes, sizes) for sizes in all_sizes]


LOSSES: list[dict[str, Any]] = [
    {},
    {"ce_norm": "mc"},
    {"contrastive": 3},
    {"contrastive": 0, "ce_norm": "mc"},
    {"terms": "margin", "contrastive": 2},
]
CUTS = {1: [[16], [4, 4, 4, 4], [1, 7, 6, 2]], 2: [[3, 13], [4, 4, 4, 4], [3, 5, 1, 7]]}
LLAMA_CUTS = {1: [[16], [1, 7, 6, 2]], 2: [[3, 5, 1, 7]]}
Steps = dict[str, list[tuple[float, dict[str, Tensor]]]]


def _every_step(folder: Path, world: int) -> Steps:
    found = {str(loss): cuts(folder, {"loss": loss}, CUTS[world]) for loss in LOSSES}
    return found | {"llama": cuts(folder, {"base": LLAMA}, LLAMA_CUTS[world])}


@pytest.fixture(scope="module")
def steps(folder: Path) -> Steps:
    """Of every loss and of a Llama: the step on one rank with everything in one batch comes first,
    then other cuts, then those on two ranks.
    """
    alone, together = (run_on_ranks(world, _every_step, folder, world)[0] for world in (1, 2))
    return {name: alone[name] + together[name] for name in alone}


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_one_rank_two_ranks_and_accumulation_have_one_loss_and_one_gradient(
    loss: dict[str, Any], folder: Path, steps: Steps
) -> None:
    wanted, *others = steps[str(loss)]
    assert len(others) == 5
    depth = depth_of(loaded(folder, loss=loss).model())
    margins = STEP_OF_PRODUCTS if loss.get("contrastive") == 2 else STEP
    for found in others:
        assert_same_step(found, wanted, depth=depth, **margins)


def test_a_llama_of_any_cut_and_ranks_has_one_loss_and_one_gradient(
    folder: Path, steps: Steps
) -> None:
    wanted, *others = steps["llama"]
    assert len(others) == 2
    assert "encoder.layers.1.mlp.down_proj.weight" in wanted[1]
    for found in others:
        assert_same_step(found, wanted, depth=depth_of(loaded(folder, base=LLAMA).model()), **STEP)


def test_a_llama_reads_the_state_of_a_statements_end_whatever_stands_beside_it(
    folder: Path,
) -> None:
    task = loaded(folder, base=LLAMA)
    model = task.model().eval()
    statements = [
        task.statement_ids(text)
        for text in ("Ada keeps the key.", "The cellar is empty and far from here.")
    ]
    together = model(**task.read(statements))["logits"]
    for statement, logit in zip(statements, together, strict=True):
        states = model.encoder(input_ids=torch.tensor([statement])).last_hidden_state
        assert_close(logit, model.head(states[0, -1])[0], depth=depth_of(model), **LOGITS)


def test_a_trained_llama_is_exported_as_its_body_and_head_and_read_back(
    folder: Path, tmp_path: Path
) -> None:
    task = loaded(folder, base=LLAMA)
    model = task.model().eval()
    task.export(dict(model.state_dict()), tmp_path / "final")
    again = task.load_export(tmp_path / "final").eval()
    batch = task.read([task.statement_ids("Ada keeps the key.")])
    assert torch.equal(again(**batch)["logits"], model(**batch)["logits"])
    assert json.loads((tmp_path / "final/config.json").read_text())["model_type"] == "llama"


def test_packed_statements_have_the_states_of_padded_ones(folder: Path) -> None:
    task = loaded(folder)
    model = task.model().eval()
    statements = [
        task.statement_ids(text)
        for text in ("A key.", "The cellar is empty.", "far " * 40, "It is.")
    ]
    packed = model(**task.read(statements))
    padded, mask = pad_right(statements, task.pad)
    rectangle = model(input_ids=padded, attention_mask=mask)
    assert_close(packed["hidden"], rectangle["hidden"], depth=depth_of(model), **STATES)
    assert_close(packed["logits"], rectangle["logits"], depth=depth_of(model), **LOGITS)


def test_equal_statements_tie_to_the_last_bit_in_evaluation(folder: Path) -> None:
    task = loaded(folder)
    model = task.model().eval()
    texts = [
        f"Ada keeps the {thing}."
        for thing in ("key", "map", "lamp and the coin", "key", "book", "key")
    ]
    logits = model(**task.read([task.statement_ids(text) for text in texts], once=True))["logits"]
    assert logits[0] == logits[3] == logits[5]
    assert len(set(logits.tolist())) == 4
    apart = model(**task.read([task.statement_ids(text) for text in texts]))["logits"]
    assert_close(logits, apart, depth=depth_of(model), **LOGITS)


def test_the_loss_is_the_sum_of_the_published_terms_means(folder: Path) -> None:
    task = loaded(folder)
    model = task.model().eval()
    batch = task.collate(rows_of(task))
    (summed,) = task.losses(model, [batch])
    statements = _statements(
        {
            key: value.float() if key in ("hidden", "logits") else value
            for key, value in _represent(model, batch).items()
        }
    )
    terms = losses.corrected_sums(
        statements, loss_fn="mce+bce", ce_norm="all_problems", contrastive_type=4, temperature=0.05
    )
    by_hand = losses.cross_entropy(statements).mean() + losses.bce(statements).mean()
    by_hand = by_hand + 0.1 * terms["contrastive"].sum / terms["contrastive"].count
    assert torch.equal(summed / 16, by_hand)


def test_the_original_mode_is_the_published_program_on_its_own_batch(folder: Path) -> None:
    task = loaded(folder, loss={"mode": "original"})
    model = task.model().eval()
    batch = task.collate(rows_of(task))
    (summed,) = task.losses(model, [batch])
    wanted = losses.original(
        _statements(_represent(model, batch)),
        loss_fn="mce+bce",
        contrastive_type=4,
        temperature=0.05,
        coefficient=0.1,
    )
    assert torch.equal(summed / 16, wanted.loss)


def test_the_original_mode_goes_on_where_the_published_loss_is_infinite(folder: Path) -> None:
    task = loaded(folder, loss={"mode": "original"})
    model = task.model().eval()
    batch = task.collate(rows_of(task, 1))
    (summed,) = task.losses(model, [batch])
    statements = _statements(_represent(model, batch))
    how = {"loss_fn": "mce+bce", "contrastive_type": 4, "temperature": 0.05, "coefficient": 0.1}
    published = losses.original(statements, **how)
    assert published.loss.isinf()
    assert summed.isfinite()
    wanted = torch.autograd.grad(published.loss, list(model.parameters()), allow_unused=True)
    found = torch.autograd.grad(summed, list(model.parameters()), allow_unused=True)
    for one, two in zip(wanted, found, strict=True):
        assert (one is None) == (two is None)
        assert one is None or torch.equal(one, two)


def test_a_bf16_head_tells_close_statements_apart(folder: Path) -> None:
    model = loaded(folder).model().to(torch.bfloat16)
    states = torch.randn(4000, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = model.head(states)
    assert logits.dtype == torch.float32
    assert len(logits.unique()) > 3900


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"data": {"unseen1": ["choises"]}},
            fault("task_of_no_set", task="choises", nearest="choices"),
        ),
        (
            {"data": {"valid_tasks": ["choices", "choices"]}},
            fault("task_listed_twice", key="valid_tasks", task="choices"),
        ),
        ({"data": {"order": "legacy"}}, fault("order_legacy")),
        ({"loss": {"mode": "original", "classes": "column"}}, fault("loss_mode")),
    ],
)
def test_a_dictionary_that_would_not_mean_what_it_says_is_refused(
    changes: dict[str, Any], words: Fault, folder: Path
) -> None:
    with refused(words):
        loaded(folder, **changes)


def test_a_folder_without_a_head_is_not_scored_with_a_random_one(
    folder: Path, tmp_path: Path
) -> None:
    task = loaded(folder)
    task.model().encoder.save_pretrained(tmp_path / "t5")
    with refused("head_absent"):
        task.load_export(tmp_path / "t5")


# Data
# --------------------------------------------------------------------------------------------------


def test_training_draws_other_distractors_in_another_epoch_and_evaluation_sees_all(
    folder: Path,
) -> None:
    task = loaded(folder, data={"statements": 2})
    row = max((task.encode(row) for row in task.rows("train")), key=lambda row: len(row["lengths"]))
    assert len(row["lengths"]) == 4
    seen = {tuple(task._choose_statements({**row, DRAW: np.array([draw])})) for draw in range(40)}
    assert seen == {(0, 1), (0, 2), (0, 3)}
    assert task._choose_statements(row) == [0, 1, 2, 3]
    first = loaded(folder, data={"statements": 2, "sample_distractors": False})
    assert first._choose_statements({**row, DRAW: np.array([9])}) == [0, 1]


def test_legacy_order_and_the_cut_of_large_sets_are_pythons_own(tmp_path: Path) -> None:
    recorded = Path(__file__).resolve().parents[3] / "shared" / "parity" / "vera" / "sampling.json"
    if not recorded.is_file():
        pytest.skip(f"{recorded} is absent")
    wanted = json.loads(recorded.read_text())
    for task, split, count in (("mc", "train", 240), ("mc", "dev", 10042)):
        (tmp_path / task).mkdir(exist_ok=True)
        made = [{"golds": [str(number)], "distractors": ["x"]} for number in range(count)]
        (tmp_path / task / f"{split}.json").write_text(json.dumps(made))
    data = Data(source="groups", train_tasks=["mc"], valid_tasks=["mc"], order="legacy")
    assert [int(row["golds"][0]) for row in groups.rows(data, "train", tmp_path)] == wanted[
        "shuffle_240"
    ]
    cut = [int(row["golds"][0]) for row in groups.rows(data, "valid", tmp_path)]
    assert len(cut) == 2000
    assert cut[:50] == wanted["sample_2000_of_10042_first50"]


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"golds": ["a", "b"], "distractors": []}, fault("group_golds", count=2)),
        (
            {"golds": [], "distractors": ["a", "b"]},
            fault("group_without_gold"),
        ),
        ({"golds": [" "], "distractors": []}, fault("group_gold_blank", key="golds", value=[" "])),
        ({"gold": []}, fault("group_kind_of_json")),
    ],
)
def test_a_bad_group_is_named_with_its_file(
    group: dict[str, Any], words: Fault, tmp_path: Path
) -> None:
    (tmp_path / "mc").mkdir()
    (tmp_path / "mc" / "train.json").write_text(json.dumps([group]))
    data = Data(source="groups", train_tasks=["mc"], valid_tasks=["mc"])
    with refused(words, at="train.json, group 1"):
        groups.rows(data, "train", tmp_path)


def test_a_stage_without_its_data_is_refused_and_told_how_to_make_it(tmp_path: Path) -> None:
    data = Data(source="groups", train_tasks=["atomic2020_3d"], valid_tasks=["copa"])
    with refused("task_data_absent_perhaps"):
        groups.rows(data, "train", tmp_path)
    with refused("task_data_absent", task_again="copa"):
        groups.rows(data, "valid", tmp_path)


# Afterwards
# --------------------------------------------------------------------------------------------------


def trained(values: dict[str, Any], folder: Path, savedir: Path) -> str:
    from trainer.launch.run import run
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    options = Options(savedir, data_path=folder, cache_dir=folder / "cache")
    planned = plan(values, options, world=1, rank=0)
    assert run(planned, options, Preemption()) == 0
    return str(planned.folder)


def test_a_second_stage_begins_with_the_encoder_and_the_head_of_the_first(
    folder: Path, tmp_path: Path
) -> None:
    first = experiment("vera", folder, train={"steps": 2, "best": None})
    run_folder = Path(run_on_ranks(1, trained, first, folder, tmp_path)[0])
    second = {**first, "base": {"experiment": first}}
    task = tasks.load(tasks.parse(second), Places(folder, folder / "cache", tmp_path))
    model = task.model()
    assert all(
        torch.equal(one, two)
        for one, two in zip(
            model.parameters(), task.load_export(run_folder / "final").parameters(), strict=True
        )
    )
    fresh = tasks.load(tasks.parse(first), Places(folder, folder / "cache", tmp_path)).model()
    assert not torch.equal(fresh.head.weight, model.head.weight)


def test_calibrating_stores_a_temperature_with_which_statements_are_scored(
    folder: Path, tmp_path: Path
) -> None:
    from trainer.__main__ import app

    values = experiment("vera", folder, train={"steps": 6, "best": None}, optim={"lr": 0.003})
    run_folder = Path(run_on_ranks(1, trained, values, folder, tmp_path)[0])
    places = ["-sb", str(tmp_path), "--exp_id", exp_id(values), "--data_path", str(folder)]
    places += ["--cache_dir", str(folder / "cache"), "--model", "final"]
    lines = "Ada keeps the red key in the cellar.\n\nEmil keeps the map in the attic.\n".replace(
        "\\\n", "\n"
    )
    before = run_on_ranks(1, _invoked, ["score", *places], lines)[0].splitlines()
    printed = run_on_ranks(1, _invoked, ["calibrate", *places, "--objective", "nll"], "")[0]
    temperature = json.loads((run_folder / "final" / "vera.json").read_text())["temperature"]
    assert f"temperature {temperature:.6f}" in printed
    assert temperature != 1.0
    report = json.loads((run_folder / "calibration-final" / "calibration.json").read_text())
    assert report["nll_after"] <= report["nll_before"]
    assert {path.name for path in (run_folder / "calibration-final").iterdir()} >= {
        "reliability.png",
        "scores.png",
    }
    evaluated = run_on_ranks(1, _invoked, ["evaluate", *places], "")[0]
    assert "valid/ece_calibrated/all" in evaluated
    after = run_on_ranks(1, _invoked, ["score", *places], lines)[0].splitlines()
    assert [line.split("\t")[1] for line in after] == [line for line in lines.splitlines() if line]
    for one, two in zip(before, after, strict=True):
        old, new = (float(line.split("\t")[0]) for line in (one, two))
        logit = np.log(old / (1 - old))
        assert new == pytest.approx(1 / (1 + np.exp(-logit / temperature)), abs=1e-4)
    assert app is not None


def _invoked(arguments: list[str], given: str) -> str:
    """Run the command in a child of its own, which may leave by os._exit elsewhere but not here."""
    from trainer import __main__ as commands
    from trainer.runtime import distributed

    distributed.shutdown = lambda code=0: None  # pyright: ignore[reportAttributeAccessIssue]
    result = CliRunner().invoke(commands.app, arguments, input=given)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_folder_that_is_no_verifier_is_not_calibrated(tmp_path: Path) -> None:
    from trainer.tasks.vera.use import calibrate_model

    with refused("head_absent"):
        calibrate_model(
            tmp_path, torch.zeros(1, 5), split="valid", objective="ece", report=tmp_path
        )
