"""`--until`: a run that stops at a step, is saved and evaluated there, and goes on with the bits of a
run that never stopped.
"""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.contract.runs import untimed
from tests.facts import experiment, with_dropout, write_facts
from tests.ranks import run_on_ranks
from tests.runs.test_commands import lines, status
from tests.runs.test_features import Launcher
from tests.runs.test_signals import signal_at
from tests.wording import says
from trainer.config.identity import exp_id

STEPS, UNTIL = 8, (2, 5)  # evaluated after steps 4 and 8, saved after 3, 6 and 8


def values_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """Of a run with dropout that keeps its best weights, has little patience, and whose rate follows
    its evaluations: one evaluation more would change it.
    """
    train = {"steps": STEPS, "log_every": 1, "eval_every": 4, "save_every": 3, "patience": 2}
    schedule = {"shape": "reduce_on_plateau", "patience": 0, "warmup_steps": 1}
    values = experiment("causal_lm", folder, train={**train, **changes}, schedule=schedule)
    return with_dropout({**values, "train": {**values["train"], "best": "valid/loss"}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def left(savedir: Path) -> tuple[list[dict[str, Any]], dict[str, str], float]:
    """What a run leaves: its metrics without the evaluations at --until, the digests of its weights,
    and the best score.
    """
    (run,) = savedir.glob("[0-9a-f]*")
    kept = [
        line
        for line in untimed(run / "metrics.jsonl")
        if line["step"] not in UNTIL or "valid/loss" not in line
    ]
    digests = {
        name: hashlib.sha256((run / name / "model.safetensors").read_bytes()).hexdigest()
        for name in ("best", "final")
    }
    return kept, digests, min(line["valid/loss"] for line in kept if "valid/loss" in line)


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The savedir of a run that nothing stopped."""
    launcher = Launcher(folder, tmp_path_factory.mktemp("straight"), mine=[values_of(folder)])
    launcher.run("-e", "mine")
    return launcher.savedir


def test_a_run_that_stops_twice_ends_with_the_bits_of_one_that_never_did(
    folder: Path, tmp_path: Path, straight: Path
) -> None:
    launcher = Launcher(folder, tmp_path, mine=[values_of(folder)])
    first, second = UNTIL
    stopped = launcher.start("-e", "mine", "--until", str(first)).finish()
    assert stopped.returncode == 10, stopped.stdout + stopped.stderr
    told = status(launcher.savedir)
    assert (told["state"], told["step"], told["checkpoint"]) == ("paused", first, first)
    assert told["early"].startswith(f"step {first} of {STEPS} is where --until stops it")
    assert "valid/loss" in lines(launcher.savedir)[-1], "it is evaluated"
    (run,) = launcher.savedir.glob("[0-9a-f]*")
    assert run.name == exp_id(values_of(folder)), "the id is that of the dictionary"
    assert not (run / "final").exists()

    before = (run / "metrics.jsonl").read_bytes()
    again = launcher.start("-e", "mine", "--until", str(first)).finish()
    assert (again.returncode, (run / "metrics.jsonl").read_bytes()) == (10, before)
    assert f"step {first} is done" in again.stdout

    # the evaluation of the second stop is interrupted, and made by the next start
    flags = ["-sb", str(launcher.savedir), *launcher._flags, "-e", "mine"]
    from tests.forked import TRAINVAL, start

    asked = signal_at("evaluation", signal.SIGTERM)
    # train steps 3 to 5: the evaluation of step 4 comes before the stop's
    cut = start(*TRAINVAL, *flags, "--until", str(second), first=asked).finish()
    assert cut.returncode == 75, cut.stdout + cut.stderr
    stopped = launcher.start("-e", "mine", "--until", str(second)).finish()
    assert stopped.returncode == 10, stopped.stdout + stopped.stderr
    assert status(launcher.savedir)["step"] == second
    launcher.run("-e", "mine")
    assert left(launcher.savedir) == left(straight)
    assert "early" not in status(launcher.savedir)
    scored = [one["step"] for one in json.loads((run / "score_list.json").read_text())]
    assert scored == [2, 4, 5, 8]


def test_a_stop_beyond_the_run_or_before_its_step_is_refused_and_nothing_changes(
    folder: Path, tmp_path: Path
) -> None:
    launcher = Launcher(folder, tmp_path, mine=[values_of(folder)])
    done = launcher.start("-e", "mine", "--until", "9").finish()
    assert done.returncode == 2
    says("until_late", done.stderr, until=9, steps=STEPS)
    assert launcher.folders() == []


@pytest.mark.long  # trains four runs
def test_several_experiments_stop_one_after_the_other_and_epochs_are_counted_first(
    folder: Path, tmp_path: Path
) -> None:
    group = [values_of(folder, seed=seed) for seed in (1, 2)]
    launcher = Launcher(folder, tmp_path, mine=group)
    assert launcher.start("-e", "mine", "--until", "2").finish().returncode == 10
    states = [json.loads(path.read_text()) for path in launcher.savedir.glob("*/status.json")]
    assert [(one["state"], one["step"]) for one in states] == [("paused", 2)] * 2
    values = values_of(folder)
    train = {key: value for key, value in values["train"].items() if key != "steps"}
    (tmp_path / "epochs").mkdir()
    counted = Launcher(
        folder, tmp_path / "epochs", mine=[{**values, "train": {**train, "epochs": 1}}]
    )
    done = counted.start("-e", "mine", "--until", "1000").finish()
    assert done.returncode == 2
    says("until_late", done.stderr, until=1000)
    assert counted.start("-e", "mine", "--until", "1").finish().returncode == 10


def stopping_run(values: dict[str, Any], folder: Path, savedir: Path, stage: int) -> list[int]:
    """The exit codes of a run that stops at 2 and at 5 and then goes on to its end, on these
    ranks.
    """
    from trainer.launch.run import run
    from trainer.runtime import distributed
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    codes: list[int] = []
    for until in (*UNTIL, None):
        options = Options(
            savedir,
            data_path=folder,
            cache_dir=folder / "cache",
            deepspeed=f"zero{stage}",
            until=until,
        )
        planned = plan(values, options, world=distributed.world(), rank=distributed.rank())
        codes.append(run(planned, options, Preemption()))
    return codes


def straight_run(values: dict[str, Any], folder: Path, savedir: Path, stage: int) -> None:
    from tests.contract.runs import train

    train(values, folder, savedir, stage)


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_on_any_number_of_ranks_and_at_any_stage_a_stop_changes_no_bit(
    world: int, stage: int, folder: Path, tmp_path: Path
) -> None:
    values = values_of(folder, global_batch=6, micro_batch=1)
    codes = run_on_ranks(world, stopping_run, values, folder, tmp_path / "stops", stage)
    assert codes == [[10, 10, 0]] * world
    run_on_ranks(world, straight_run, values, folder, tmp_path / "straight", stage)
    assert left(tmp_path / "stops") == left(tmp_path / "straight")
