"""Averages of weights as a user meets them: a run with train.ema, its evaluations and exports, and
`lathe average` of saved steps and of trained models.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner, Result

from exp_configs import vary
from tests.contract.runs import train, untimed
from tests.contract.test_task_contract import _die_then_resume
from tests.facts import LLAMA, experiment, write_facts
from tests.ranks import run_on_ranks
from tests.wording import Fault, fault, says
from trainer.__main__ import app
from trainer.exports import record
from trainer.training import checkpoint

DECAY, STEPS = 0.6, 4
FROZEN = "base.model.layers.0.mlp."  # the weights that one of the runs never trains
SMALL = {"steps": STEPS, "eval_every": 2, "save_every": 1, "keep_last": 3, "eval_batch": 11}


def values_of(folder: Path, name: str) -> dict[str, Any]:
    values: Any = experiment("causal_lm", folder, base=LLAMA, train=SMALL)
    if name == "adapters":
        return vary(values, lora={"r": 4, "alpha": 8})
    still = [{"match": f"{FROZEN}*"}]
    return vary(values, train={"ema": DECAY, "precision": "bf16", "freeze": still})


def _trained(folder: Path, root: Path) -> dict[str, tuple[Path, list[dict[str, Any]], float]]:
    """The folder of each run, its lines, and the validation loss of its final/."""
    from trainer import tasks
    from trainer.data.token_store import store_of
    from trainer.protocol.task import Places
    from trainer.training.scoring import Frozen, evaluate

    found: dict[str, Any] = {}
    for name in ("ema", "adapters"):
        values = values_of(folder, name)
        run, lines = train(values, folder, root / name, stage=2)
        places = Places(folder, folder / "cache", root)
        task = tasks.load(tasks.parse(values), places)
        model = Frozen(task.load_export(run / "final").to(torch.float32))
        valid = store_of(task, "valid", places.cache_dir)
        found[name] = (run, lines, evaluate(model, task, valid, batch=11)["loss"])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_on_ranks(1, _trained, folder, tmp_path_factory.mktemp("runs"))[0]


def average(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["average", *map(str, words)])


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the safetensors of a folder."""
    return {k: t for path in folder.glob("*.safetensors") for k, t in load_file(path).items()}


def mean(many: list[dict[str, Tensor]], shares: list[float]) -> dict[str, Tensor]:
    return {
        name: sum(
            (s * one[name].double() for s, one in zip(shares, many, strict=True)),
            start=torch.zeros((), dtype=torch.float64),
        )
        for name in many[0]
    }


# train.ema
# --------------------------------------------------------------------------------------------------


def test_a_run_evaluates_and_exports_its_average(runs: dict[str, Any]) -> None:
    run, lines, loss_of_final = runs["ema"]
    newest = checkpoint.newest_good(run / "checkpoints")
    assert newest is not None
    saved = checkpoint.Checkpoint(newest)
    averages, weights = saved.average({}), saved.weights({})
    final = {f"base.{name}": tensor for name, tensor in tensors(run / "final").items()}
    for name in averages:
        assert averages[name].dtype == torch.float32
        assert torch.equal(final[name], averages[name].bfloat16()), name
        assert not torch.equal(final[name], weights[name]), name
    valid = [line["valid/loss"] for line in lines if "valid/loss" in line]
    assert valid[-1] == pytest.approx(loss_of_final, abs=0.02), "in bf16, and in fp32"
    made = record.read(run / "final")
    assert made is not None
    assert made.average == {"ema": DECAY}
    assert f"a share of {DECAY} at every step" in (run / "final" / "README.md").read_text()


def test_an_export_of_one_steps_weights_says_nothing_of_an_average(runs: dict[str, Any]) -> None:
    run, _, _ = runs["adapters"]
    assert "average" not in json.loads((run / "final" / "lathe.json").read_text())
    assert "## Average" not in (run / "final" / "README.md").read_text()


@pytest.mark.parametrize(
    ("world", "stage"),
    [(1, 2), *(pytest.param(2, stage, marks=pytest.mark.long) for stage in (0, 1, 2, 3))],
)
def test_a_killed_run_goes_on_with_its_average_bit_for_bit(
    world: int, stage: int, folder: Path, tmp_path: Path
) -> None:
    values: Any = experiment(
        "causal_lm", folder, train={"ema": DECAY, "steps": 4, "eval_every": 2, "save_every": 2}
    )
    straight = run_on_ranks(world, _straight, values, folder, tmp_path / "straight", stage)[0]
    outcome, killed = run_on_ranks(
        world, _die_then_resume, values, folder, tmp_path / "killed", stage
    )[0]
    assert outcome == "killed"
    assert untimed(killed / "metrics.jsonl") == untimed(straight / "metrics.jsonl")
    for name in ("best", "final"):
        one, two = tensors(straight / name), tensors(killed / name)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)


def _straight(values: dict[str, Any], folder: Path, savedir: Path, stage: int) -> Path:
    return train(values, folder, savedir, stage)[0]


# lathe average
# --------------------------------------------------------------------------------------------------


def test_the_last_steps_of_a_run_are_averaged(runs: dict[str, Any], tmp_path: Path) -> None:
    run, out = runs["ema"][0], tmp_path / "mean"
    done = average(run, "--last", "3", "--out", out)
    assert done.exit_code == 0, done.output
    masters = []
    for step in (2, 3, 4):
        saved = checkpoint.read_tensors(run / "checkpoints" / f"step-{step}", "optimizer")
        masters.append({k[:-7]: saved[k] for k in saved if k.endswith("|master")})
    wanted = mean(masters, [1 / 3] * 3)
    got = {f"base.{name}": tensor for name, tensor in tensors(out).items()}
    final = {f"base.{name}": tensor for name, tensor in tensors(run / "final").items()}
    frozen = {name for name in final if name.startswith(FROZEN)}
    assert frozen
    assert got.keys() == wanted.keys() | frozen
    assert all(torch.equal(got[name], final[name]) for name in frozen)
    for name, tensor in wanted.items():
        assert got[name].dtype == torch.bfloat16
        assert torch.allclose(got[name].double(), tensor, rtol=2**-8, atol=1e-8), name
    made = record.read(out)
    assert made is not None
    assert made.average == {"of": [{"step": n, "weight": 1 / 3} for n in (2, 3, 4)]}
    assert made.scores == {}
    assert "| step 3 | 0.333333 |" in (out / "README.md").read_text()
    assert record.digests(out) == made.files


def test_steps_may_weigh_differently(runs: dict[str, Any], tmp_path: Path) -> None:
    run, out = runs["adapters"][0], tmp_path / "mean"
    done = average(run, "--last", "2", "--weights", "0.25,0.75", "--out", out)
    assert done.exit_code == 0, done.output
    saved = [
        checkpoint.read_tensors(run / "checkpoints" / f"step-{step}", "weights") for step in (3, 4)
    ]
    wanted = mean([dict(one) for one in saved], [0.25, 0.75])
    got = tensors(out)
    assert len(got) == len(wanted)
    for name, tensor in wanted.items():
        place = "base_model.model." + name.removeprefix("base.").replace(".default", "")
        assert torch.allclose(got[place].double(), tensor, rtol=1e-6, atol=1e-9), name


def test_steps_that_were_not_kept_are_told_with_what_keeps_them(
    runs: dict[str, Any], tmp_path: Path
) -> None:
    run = runs["ema"][0]
    done = average(run, "--last", "5", "--out", tmp_path / "mean")
    assert done.exit_code == 2
    says("average_steps_gone", done.stderr, last=5, run=run, kept=3, fewer=3, more=5)
    assert not list(tmp_path.iterdir())


def _twin(source: Path, target: Path, change: Any) -> Path:
    """A copy of an export whose tensors were changed."""
    shutil.copytree(source, target)
    for path in target.glob("*.safetensors"):
        save_file({k: change(k, t) for k, t in load_file(path).items()}, path, {"format": "pt"})
    return target


def test_trained_models_are_averaged_by_their_weights(runs: dict[str, Any], tmp_path: Path) -> None:
    final, out = runs["ema"][0] / "final", tmp_path / "mean"
    other = _twin(final, tmp_path / "other", lambda _, t: t * 2 + 0.5)
    done = average(final, other, "--weights", "0.75,0.25", "--out", out)
    assert done.exit_code == 0, done.output
    wanted = mean([tensors(final), tensors(other)], [0.75, 0.25])
    for name, tensor in tensors(out).items():
        assert tensor.dtype == torch.bfloat16
        assert torch.allclose(tensor.double(), wanted[name], rtol=2**-8, atol=1e-8), name
    made = record.read(out)
    assert made is not None
    assert made.average is not None
    assert [one["weight"] for one in made.average["of"]] == [0.75, 0.25]
    assert made.average["of"][0]["average"] == {"ema": DECAY}
    assert made.files == record.digests(out)
    assert (out / "config.json").read_bytes() == (final / "config.json").read_bytes()


def test_adapters_are_averaged_matrix_by_matrix(runs: dict[str, Any], tmp_path: Path) -> None:
    run, out = runs["adapters"][0], tmp_path / "mean"
    other = _twin(run / "final", tmp_path / "other", lambda _, t: -t + 1)
    done = average(run / "final", other, "--out", out)
    assert done.exit_code == 0, done.output
    assert all(torch.allclose(t, torch.full_like(t, 0.5)) for t in tensors(out).values())
    assert (out / "adapter_base.json").is_file()


def test_what_does_not_belong_together_is_named(runs: dict[str, Any], tmp_path: Path) -> None:
    final, adapters = runs["ema"][0] / "final", runs["adapters"][0] / "final"
    name = "model.norm.weight"
    longer = _twin(final, tmp_path / "a", lambda k, t: torch.cat([t, t]) if k == name else t)
    config = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    done = average(final, longer, "--out", tmp_path / "mean")
    assert done.exit_code == 2
    says("average_shape", done.stderr, name=name, got="(64,)", want="(32,)")
    says("average_config", done.stderr, key="rms_norm_eps", got=0.5)
    other = _twin(adapters, tmp_path / "b", lambda _, t: t)
    about = json.loads((other / "adapter_config.json").read_text())
    scales = {"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 2}}
    tokens = {"trainable_token_indices": {"model.embed_tokens": [7]}}
    (other / "adapter_config.json").write_text(json.dumps(about | scales | tokens))
    done = average(adapters, other, "--out", tmp_path / "mean")
    assert done.exit_code == 2
    says("average_adapters", done.stderr, key="alpha_pattern")
    says("average_adapters", done.stderr, key="trainable_token_indices")
    (other / "adapter_config.json").write_text(json.dumps(about))
    made = json.loads((other / "lathe.json").read_text())
    (other / "lathe.json").write_text(json.dumps(made | {"base_fingerprint": "another"}))
    done = average(adapters, other, "--out", tmp_path / "mean")
    assert done.exit_code == 2
    says("average_base", done.stderr, base="another")
    done = average(final, adapters, "--out", tmp_path / "mean")
    assert done.exit_code == 2
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--weights", "0.5,0.6"], fault("average_sum")),
        (["--weights", "0.5"], fault("average_count")),
        (["--weights", "1.5,-0.5"], fault("average_negative")),
        (["--weights", "a,b"], fault("average_words")),
        (["--last", "2"], fault("average_last_of_many")),
    ],
)
def test_flags_that_mean_nothing_are_refused(
    words: list[str], wanted: Fault, runs: dict[str, Any], tmp_path: Path
) -> None:
    final = runs["ema"][0] / "final"
    done = average(final, final, *words, "--out", tmp_path / "mean")
    assert done.exit_code == 2
    says(wanted, done.stderr)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_not_overwritten(runs: dict[str, Any], tmp_path: Path) -> None:
    run = runs["ema"][0]
    (tmp_path / "mine").write_text("kept")
    done = average(run, "--last", "2", "--out", tmp_path / "mine")
    assert done.exit_code == 2
    says("merge_exists", done.stderr, out=tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "kept"
    done = average(run, "--out", tmp_path / "mean")
    assert done.exit_code == 2
    says("average_of_one", done.stderr)
