"""A group of experiments on one base (--together): each is what it is alone, whatever becomes of the
others.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.facts import LLAMA, experiment, write_facts
from tests.ranks import run_on_ranks
from trainer.config.identity import exp_id
from trainer.errors import EXIT_OK, EXIT_PREEMPTED, DataError, DivergedError
from trainer.files.atomic import read_json

Values = dict[str, Any]
PARTS = (["attention"], ["attention", "mlp", "output"], ["mlp"])
TOKENS = 150  # of a pack: those of about five rows
_OF_TIME = ("at", "tokens_per_s", "step_s", "peak_gib", "goodput", "seal")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=40, valid=6)


def values_of(facts: Path, number: int, **train: Any) -> Values:
    """The dictionary of experiment `number` of a group."""
    own = {"seed": number, "global_batch": 4, "micro_batch": 1 + number % 2, "eval_every": 7}
    lora = {"r": 2 + number, "alpha": 8 + number, "dropout": 0.0, "parts": PARTS[number % 3]}
    return experiment(
        "causal_lm",
        facts,
        base=LLAMA,
        lora=lora,
        data={"max_tokens": (64, 24, 48)[number % 3]},
        train={"save_every": 4, **own, **train},
        optim={"lr": 0.01 * (1 + number), "eps": 1e-3},
    )


def train(
    every: Sequence[Values],
    facts: Path,
    savedir: Path,
    stage: int = 0,
    kill: tuple[int, int, int] | None = None,
) -> int:
    """Train a group together; its exit code. kill: (n, k, s), this rank sends itself the signal s
    as the k-th experiment begins its step n, of those that do this step.
    """
    from trainer.launch.together.run_together import run_together
    from trainer.training import loop

    step, begun = loop.train_step, Counter[int]()

    def dying(session: Any, window: Any, **how: Any) -> Any:
        begun[window.step] += 1
        if kill is not None and (window.step, begun[window.step]) == kill[:2]:
            os.kill(os.getpid(), kill[2])
        return step(session, window, **how)

    loop.train_step = dying
    plans, options = _plans(every, facts, savedir, stage)
    return run_together(plans, options, most_tokens=TOKENS)


def train_alone(every: Sequence[Values], facts: Path, savedir: Path, stage: int = 0) -> int:
    from trainer.launch.group import run_group

    return run_group(*_plans(every, facts, savedir, stage))


def _plans(every: Sequence[Values], facts: Path, savedir: Path, stage: int) -> tuple[Any, Any]:
    from trainer.runtime import distributed
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    options = Options(savedir, data_path=facts, cache_dir=facts / "cache", deepspeed=f"zero{stage}")
    world, rank = distributed.world(), distributed.rank()
    return [plan(values, options, world=world, rank=rank) for values in every], options


def weights(values: Values, savedir: Path) -> dict[str, torch.Tensor]:
    return load_file(savedir / exp_id(values) / "final" / "adapter_model.safetensors")


def status(values: Values, savedir: Path) -> Values:
    told = read_json(savedir / exp_id(values) / "status.json")
    assert told is not None
    return told


def lines(values: Values, savedir: Path) -> list[Values]:
    """metrics.jsonl, without what depends on the time."""
    text = (savedir / exp_id(values) / "metrics.jsonl").read_text()
    return [
        {key: value for key, value in json.loads(line).items() if key not in _OF_TIME}
        for line in text.splitlines()
    ]


def assert_as_alone(every: Sequence[Values], together: Path, alone: Path) -> None:
    for values in every:
        got, want = weights(values, together), weights(values, alone)
        assert got.keys() == want.keys() != set()
        for name, tensor in got.items():
            torch.testing.assert_close(tensor, want[name], rtol=0, atol=1e-5)
        assert status(values, together)["state"] == "succeeded"
        logged, expected = lines(values, together), lines(values, alone)
        assert [line.keys() for line in logged] == [line.keys() for line in expected]
        for line, other in zip(logged, expected, strict=True):
            for one in (line, other):
                one.pop("proof", None)  # of its bits
            assert line == pytest.approx(other, rel=1e-4, abs=1e-5)


def assert_same_bits(every: Sequence[Values], one: Path, other: Path) -> None:
    for values in every:
        got, want = weights(values, one), weights(values, other)
        assert got.keys() == want.keys() != set()
        assert all(torch.equal(tensor, want[name]) for name, tensor in got.items())
        assert lines(values, one) == lines(values, other)


def test_two_experiments_train_at_once_as_they_do_alone(facts: Path, tmp_path: Path) -> None:
    every = [values_of(facts, 0, steps=5), values_of(facts, 1, steps=3)]
    codes = run_on_ranks(1, train, every, facts, tmp_path / "together")
    assert codes == [EXIT_OK] == run_on_ranks(1, train_alone, every, facts, tmp_path / "alone")
    assert_as_alone(every, tmp_path / "together", tmp_path / "alone")
    noted = read_json(tmp_path / "together" / exp_id(every[0]) / "together.json")
    assert noted == {"group": [exp_id(values) for values in every], "tokens": TOKENS}


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_a_group_that_is_killed_goes_on_to_the_same_bits(
    world: int, facts: Path, tmp_path: Path
) -> None:
    """Also steps that others are past, or have ended before: the first saves too rarely."""
    every = [values_of(facts, number, steps=8 - 3 * number) for number in range(3)]
    every[0]["train"]["save_every"] = 7
    for values in every:
        values["lora"]["dropout"] = 0.2
    run_on_ranks(world, train, every, facts, tmp_path / "whole", 1)
    # before any has saved; when the third one has finished; when the second one has, too
    for place in ((1, 2), (4, 2), (6, 1)):
        with pytest.raises(AssertionError):  # a rank died
            run_on_ranks(
                world, train, every, facts, tmp_path / "killed", 1, (*place, signal.SIGKILL)
            )
    assert status(every[0], tmp_path / "killed")["state"] == "running"
    for values in every[1:]:
        assert status(values, tmp_path / "killed")["state"] == "succeeded"
    codes = run_on_ranks(world, train, every, facts, tmp_path / "killed", 1)
    assert codes == [EXIT_OK] * world
    assert_same_bits(every, tmp_path / "killed", tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_what_goes_wrong_in_one_experiment_ends_that_one_alone(
    world: int, facts: Path, tmp_path: Path
) -> None:
    every = [values_of(facts, number, steps=5) for number in range(4)]
    every[1]["optim"]["lr"] = 1e30  # its weights are infinite after a step
    every[2]["data"]["files"] = {"train": "broken.jsonl", "valid": "valid.jsonl"}
    (facts / "broken.jsonl").write_text('{"text": "a row"}\n{"text": 3}\n')
    codes = run_on_ranks(world, train, every, facts, tmp_path / "together", 1)
    assert codes == [DivergedError.exit_code] * world
    diverged, broken = (status(every[number], tmp_path / "together") for number in (1, 2))
    assert [diverged["state"], broken["state"]] == ["failed", "failed"]
    assert "DivergedError: " in diverged["error"]  # another rank may have told it
    assert broken["error"].startswith("DataError")
    assert DataError.exit_code == 2
    sound = [every[0], every[3]]
    run_on_ranks(world, train_alone, sound, facts, tmp_path / "alone", 1)
    assert_as_alone(sound, tmp_path / "together", tmp_path / "alone")


@pytest.mark.long
def test_a_group_that_is_asked_to_stop_saves_all_and_goes_on(facts: Path, tmp_path: Path) -> None:
    every = [values_of(facts, number, steps=6) for number in range(2)]
    run_on_ranks(2, train, every, facts, tmp_path / "whole", 2)
    stop = (2, 2, signal.SIGTERM)
    codes = run_on_ranks(2, train, every, facts, tmp_path / "stopped", 2, stop)
    assert codes == [EXIT_PREEMPTED] * 2
    for values in every:
        assert status(values, tmp_path / "stopped")["state"] == "preempted"
    assert run_on_ranks(2, train, every, facts, tmp_path / "stopped", 2) == [EXIT_OK] * 2
    assert_same_bits(every, tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize(("world", "stage"), [(1, 1), (1, 2), (2, 0), (2, 1), (2, 2)])
def test_a_group_trains_as_its_experiments_do_alone_at_every_stage(
    world: int, stage: int, facts: Path, tmp_path: Path
) -> None:
    every = [values_of(facts, number, steps=20 - 4 * number) for number in range(3)]
    every[2]["train"] |= {"label_smoothing": 0.1, "z_loss": 1e-4, "order": "as_given"}
    codes = run_on_ranks(world, train, every, facts, tmp_path / "together", stage)
    assert codes == [EXIT_OK] * world
    run_on_ranks(world, train_alone, every, facts, tmp_path / "alone", stage)
    assert_as_alone(every, tmp_path / "together", tmp_path / "alone")
