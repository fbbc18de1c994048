"""A run that goes on with a finished one: a new experiment with the bits of one long run."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.contract.runs import lines_of, train, untimed
from tests.facts import experiment, with_dropout, write_facts
from tests.ranks import run_on_ranks
from tests.wording import fault, refused, says
from trainer import tasks
from trainer.config.identity import base_id, exp_id
from trainer.config.origin.continues import continued
from trainer.errors import ConfigError
from trainer.launch.origin import going_on
from trainer.runtime import distributed

FIRST, ALL = 4, 8
TRAIN: dict[str, Any] = {"steps": FIRST, "global_batch": 6, "micro_batch": 1, "log_every": 1}
TRAIN |= {"save_every": 2, "eval_every": 4, "keep_last": 9}
CONSTANT = {"shape": "constant", "warmup_steps": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=13, valid=4)


def values_of(
    folder: Path, *, schedule: dict[str, Any] = CONSTANT, **changes: Any
) -> dict[str, Any]:
    values = with_dropout(experiment("causal_lm", folder))
    return {**values, "train": {**values["train"], **TRAIN, **changes}, "schedule": schedule}


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder, by its sha256."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def weights_of(run: Path, step: int) -> dict[str, str]:
    found = contents(run / "checkpoints" / f"step-{step}")
    names = ("weights-", "optimizer-", "rng-")
    return {
        Path(path).name: sha for path, sha in found.items() if Path(path).name.startswith(names)
    }


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines_of(run) if "loss" in line}


def first_then_more(
    folder: Path, savedir: Path, first: dict[str, Any], at: str, stage: int
) -> tuple[str, str]:
    """The folders of the first run, and of the one that goes on with it. A collective."""
    before, _ = train(first, folder, savedir, stage)
    distributed.barrier()  # rank 0 says last that the run is finished
    values = continued(savedir, before.name, at=at, steps=ALL)
    return str(before), str(train(values, folder, savedir, stage)[0])


@pytest.mark.parametrize(
    ("at", "world", "stage"),
    [
        ("final", 1, 0),
        *(
            pytest.param(at, world, stage, marks=pytest.mark.long)
            for at in ("final", "2", "best")
            for world in (1, 2, 3)
            for stage in (0, 1, 2, 3)
        ),
    ],
)
def test_a_run_that_goes_on_has_the_bits_of_one_long_run(
    at: str, world: int, stage: int, folder: Path, tmp_path: Path
) -> None:
    long, _ = run_on_ranks(
        world, train, values_of(folder, steps=ALL), folder, tmp_path / "long", stage
    )[0]
    first = values_of(folder)
    before, more = map(
        Path, run_on_ranks(world, first_then_more, folder, tmp_path / "two", first, at, stage)[0]
    )
    assert before.name == exp_id(first) != more.name
    start = {"final": FIRST, "2": 2, "best": FIRST}[at]
    expected = {step: loss for step, loss in losses(Path(long)).items() if step > start}
    assert losses(more) == expected
    assert weights_of(more, ALL) == weights_of(Path(long), ALL)
    for name in ("adapter_model.safetensors", "model.safetensors"):
        if (Path(long) / "final" / name).exists():
            one, two = ((run / "final" / name).read_bytes() for run in (Path(long), more))
            assert one == two


def trained_twice(folder: Path, savedir: Path, first: dict[str, Any]) -> Any:
    before, _ = train(first, folder, savedir)
    untouched = contents(before)
    values = continued(savedir, before.name, steps=ALL)
    more, _ = train(values, folder, savedir)
    assert contents(before) == untouched, "the run before is not touched"
    again = continued(savedir, before.name, steps=ALL)
    assert again == values, "the same words, the same experiment"
    longest = continued(savedir, more.name, steps=ALL + 2)
    last, _ = train(longest, folder, savedir)
    return str(before), str(more), str(last)


def test_it_is_a_new_experiment_whose_dictionary_says_where_it_comes_from(
    folder: Path, tmp_path: Path
) -> None:
    before, more, last = map(
        Path, run_on_ranks(1, trained_twice, folder, tmp_path, values_of(folder))[0]
    )
    values = json.loads((more / "exp_dict.json").read_text())
    assert exp_id(values) == more.name
    assert base_id(values) == before.name
    manifest = (before / "checkpoints" / f"step-{FIRST}" / "manifest.json").read_bytes()
    assert values["continues"] == {
        "experiment": json.loads((before / "exp_dict.json").read_text()),
        "step": FIRST,
        "manifest": hashlib.sha256(manifest).hexdigest(),
    }
    assert base_id(json.loads((last / "exp_dict.json").read_text())) == more.name
    steps = {line["step"] for line in untimed(last / "metrics.jsonl") if "loss" in line}
    assert steps == {ALL + 1, ALL + 2}
    assert (more / "best").is_dir()
    assert (more / "final").is_dir()


def test_it_refuses_another_experiment_by_its_keys(folder: Path) -> None:
    before = values_of(folder)
    more = {**before, "continues": {"experiment": before, "step": FIRST}}
    free = {**more["train"], "steps": ALL, "micro_batch": 2, "eval_every": 1}
    tasks.parse({**more, "label": "more", "optim": {"lr": 1e-4}, "train": free})
    other = {**more["train"], "steps": ALL, "seed": 7}
    with refused("goes_on_with_other", id=exp_id(before)) as error:
        tasks.parse({**more, "train": other, "data": {**more["data"], "max_tokens": 17}})
    assert "train.seed (was" in str(error.value)
    assert "data.max_tokens (was" in str(error.value)
    assert "train.steps" not in str(error.value)
    with refused("nothing_left_to_train", step=FIRST):
        tasks.parse({**more, "train": {**more["train"], "steps": FIRST}})
    for key, value in (
        ("freeze", [{"match": "*.h.0.*", "until": 6}]),
        ("label_smoothing", 0.1),
        ("z_loss", 1e-4),
        ("neftune_alpha", 5.0),
        ("ema", 0.9),  # no saved step of that run has an average
    ):
        with refused("goes_on_with_other", id=exp_id(before)) as error:
            tasks.parse({**more, "train": {**free, key: value}})
        assert f"train.{key} (was" in str(error.value)
    averaged = {**before, "train": {**before["train"], "ema": 0.9}}
    tasks.parse({**more, "continues": {"experiment": averaged, "step": FIRST}, "train": free})
    in_epochs = {key: value for key, value in other.items() if key not in ("steps", "seed")}
    with refused("goes_on_with_other", id=exp_id(before)):
        tasks.parse({**more, "train": {**in_epochs, "epochs": 9}})


def on_other_rows(folder: Path, other: Path, savedir: Path, first: dict[str, Any]) -> str:
    before, _ = train(first, folder, savedir)
    values = continued(savedir, before.name, steps=ALL)
    try:
        train(values, other, savedir)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def test_it_refuses_other_rows_and_names_the_split(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    rows = (other / "train.jsonl").read_text().splitlines(keepends=True)
    (other / "train.jsonl").write_text("".join(rows[:-1] + rows[:1]))
    said = run_on_ranks(1, on_other_rows, folder, other, tmp_path / "runs", values_of(folder))[0]
    assert said.startswith("ResumeError: continues: run ")
    assert "train (was '" in said
    assert "valid (was" not in said
    assert [path.name for path in (tmp_path / "runs").glob("[!.]*")] == [exp_id(values_of(folder))]


def command(folder: Path, savedir: Path, *flags: str) -> Any:
    where = ["--data_path", str(folder), "--cache_dir", str(folder / "cache")]
    return forked.run(*forked.TRAINVAL, "-sb", str(savedir), *where, *flags)


def test_the_command_goes_on_and_says_whether_the_bits_are_those_of_one_run(
    folder: Path, tmp_path: Path
) -> None:
    groups = tmp_path / "groups.json"
    linear = values_of(folder, schedule={"shape": "linear"})
    groups.write_text(json.dumps({"one": [values_of(folder)], "two": [linear]}))
    runs = tmp_path / "runs"
    for group in ("one", "two"):
        done = command(folder, runs, "-e", group, "--exp_configs", str(groups))
        assert done.returncode == 0, done.stdout + done.stderr
    one, two = exp_id(values_of(folder)), exp_id(linear)

    before = contents(runs)
    for flags, said in (
        (("--continue", "f" * 32, "--steps", "9"), fault("continue_absent")),
        (("--continue", one), fault("continue_length")),
        (("--continue", one, "--epochs", "2"), fault("continue_length")),
        (("--continue", one, "--steps", "4"), fault("continue_done", more=FIRST + 4)),
        (("--continue", one, "--steps", "9", "--from", "3"), fault("continue_step", saved="2, 4")),
        (("--continue", one, "--steps", "9", "--from", "x"), fault("continue_from", saved="2, 4")),
        (("--continue", one, "--steps", "9", "-e", "causal_lm_tiny"), fault("continue_alone")),
        (("--from", "2", "-e", "causal_lm_tiny"), fault("from_alone")),
    ):
        wrong = command(folder, runs, *flags)
        assert wrong.returncode == ConfigError.exit_code, (flags, wrong.stdout, wrong.stderr)
        says(said, wrong.stderr)
    assert contents(runs) == before, "nothing has changed on the disk"

    dry = command(folder, runs, "--continue", one, "--steps", str(ALL), "--dry_run")
    assert dry.returncode == 0, dry.stdout + dry.stderr
    done = command(folder, runs, "--continue", one, "--steps", str(ALL))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Its bits are those of one run of {ALL} steps" in " ".join(done.stdout.split())
    done = command(folder, runs, "--continue", two, "--steps", str(ALL), "--from", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "It is not what one run of 8 steps would be: at step 2 the" in " ".join(
        done.stdout.split()
    )

    torn = runs / one / "checkpoints" / "step-2" / "manifest.json"
    again = continued(runs, one, at="2", steps=ALL)
    torn.write_text(torn.read_text() + "\n")
    groups.write_text(json.dumps({"more": [again]}))
    wrong = command(folder, runs, "-e", "more", "--exp_configs", str(groups))
    assert wrong.returncode == ConfigError.exit_code
    says("continues_changed", wrong.stderr)
    assert not (runs / exp_id(again)).exists()


def test_it_is_told_by_the_rates_of_all_runs_before(folder: Path, tmp_path: Path) -> None:
    linear = values_of(folder, schedule={"shape": "linear"})
    more = continuing(values_of(folder, steps=ALL, schedule={"shape": "linear"}), linear, 2)
    again = continuing(values_of(folder, steps=ALL + 4), more, 6)
    for values, said in (
        (again, "at step 1 the learning rate was 0.01, and would have been 0"),
        (continuing(values_of(folder, steps=ALL), values_of(folder), 2), "Its bits are those of"),
        (
            continuing(values_of(folder, steps=ALL, compile=True), values_of(folder), 2),
            "with another train.compile than before",
        ),
        (
            continuing(
                {**values_of(folder, steps=ALL), "optim": {"lr": 0.01}}, values_of(folder), 2
            ),
            "with another optim.weight_decay than before",
        ),
        (
            continuing(values_of(folder, steps=ALL, micro_batch=2), values_of(folder), 2),
            "with another train.micro_batch than before",
        ),
    ):
        cfg = tasks.parse(values)
        assert said in going_on.told(cfg, going_on.history(cfg, tmp_path))


def continuing(values: dict[str, Any], before: dict[str, Any], step: int) -> dict[str, Any]:
    return {**values, "continues": {"experiment": before, "step": step}}


def test_a_run_in_epochs_goes_on_in_epochs(folder: Path, tmp_path: Path) -> None:
    in_epochs = values_of(folder, eval_every="1 epoch")
    del in_epochs["train"]["steps"]
    in_epochs["train"]["epochs"] = 1
    before, more, long = run_on_ranks(1, epochs_twice, folder, tmp_path, in_epochs)[0]
    assert losses(Path(more)) == {s: loss for s, loss in losses(Path(long)).items() if s > 3}
    with refused("continue_length"):
        continued(tmp_path, Path(before).name, steps=9)
    with refused("continue_epochs_done"):
        continued(tmp_path, Path(before).name, epochs=1)


def epochs_twice(folder: Path, savedir: Path, first: dict[str, Any]) -> tuple[str, str, str]:
    before, _ = train(first, folder, savedir)
    more, _ = train(continued(savedir, before.name, epochs=2), folder, savedir)
    long, _ = train({**first, "train": {**first["train"], "epochs": 2}}, folder, savedir)
    return str(before), str(more), str(long)
