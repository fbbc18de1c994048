"""Logged operations are run again to the same bits after a kill."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.driven_runs import (
    Kill,
    Step,
    create,
    drive,
    driven_values,
    folder_of,
    passed,
    results_of,
    rows_of_seed,
    step,
    tensors_sha,
    write_log,
)
from tests.facts import write_facts
from tests.ranks import run_on_ranks


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=13, valid=4)


@pytest.mark.long
def test_ten_operations_are_run_again_to_the_same_bits(facts: Path, tmp_path: Path) -> None:
    values = driven_values(facts, lora={"dropout": 0.2})
    passes = [passed(rows_of_seed(number)) for number in range(6)]
    steps = [create(values), passes[0], passes[1], step(), passes[2], passes[3], step()]
    clipped = step(grad_clip_norm=0.1, weight_decay=0.1)
    steps += [passes[4], clipped, passed(rows_of_seed(9), "forward")]
    steps += [passes[5], step(learning_rate=0.001), ("end", {}, b"")]
    runs = [folder_of(values, tmp_path / name) for name in ("quiet", "killed")]
    for run in runs:
        write_log(run, steps)
    run_on_ranks(1, drive, values, facts, tmp_path / "quiet", 2)
    with pytest.raises(AssertionError, match="ended without a result"):
        run_on_ranks(1, drive, values, facts, tmp_path / "killed", 2, Kill("done", 9))
    run_on_ranks(1, drive, values, facts, tmp_path / "killed", 2)
    quiet, killed = map(results_of, runs)
    assert [one.error for one in quiet] == [None] * len(steps)
    assert [one.digest for one in killed] == [one.digest for one in quiet]
    assert [one.work["kind"] for one in killed] == [kind for kind, _, _ in steps]
    assert all(one.work["sent"] <= one.work["began"] <= one.time for one in killed)
    assert tensors_sha(runs[1] / "final") == tensors_sha(runs[0] / "final")
    assert tensors_sha(runs[0] / "final")


def loop_of(values: dict[str, Any], count: int) -> list[Step]:
    """A loop of `count` steps with forwards, policies of two passes, saves and loads."""
    steps = [create(values)]
    for number in range(count):
        steps.append(passed(rows_of_seed(3 * number, 1 + number % 4)))
        if number % 5 == 0:
            steps.append(passed(rows_of_seed(number), "forward"))  # a gradient is pending
        if number % 3 == 1:
            steps.append(passed(rows_of_seed(3 * number + 1)))
        steps.append(step(grad_clip_norm=number % 2 * 0.5, learning_rate=0.01 / (1 + number)))
        if number % 4 == 2:
            steps.append(passed(rows_of_seed(3 * number + 2), "forward"))
            steps.append(("save_state", {"name": f"s{number}"}, b""))
            steps.append(("save_for_sampler", {"name": f"s{number}"}, b""))
        if number % 8 == 7:
            folder = f"saved/s{number - 1}"
            steps.append(("load_state", {"folder": folder, "with_optimizer": True}, b""))
    return [*steps, ("end", {}, b"")]


@pytest.mark.long
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (1, 2), (2, 2), (2, 3)])
def test_a_run_killed_anywhere_has_the_bits_of_a_quiet_one(
    world: int, stage: int, facts: Path, tmp_path: Path
) -> None:
    values = driven_values(facts, world=world, lora={"dropout": 0.1}, train={"save_every": 3})
    steps = loop_of(values, 16)
    quiet, killed = (folder_of(values, tmp_path / name) for name in ("quiet", "killed"))
    for run in (quiet, killed):
        write_log(run, steps)
    run_on_ranks(world, drive, values, facts, tmp_path / "quiet", stage)
    drawn, count = random.Random(world * 10 + stage), 0
    while count < 12:
        place = drawn.choice(["done", "done", "torn", "written", "saving", "saved"])
        rank = drawn.randrange(world) if place == "done" else 0
        kill = Kill(place, drawn.randint(1, 3 if place.startswith("sav") else 9), rank)
        try:
            run_on_ranks(world, drive, values, facts, tmp_path / "killed", stage, kill)
            break  # it came to its end before
        except AssertionError:  # a rank died, and the other one lost it
            count += 1
    assert count > 3
    run_on_ranks(world, drive, values, facts, tmp_path / "killed", stage)
    results = results_of(killed)
    assert [one.seq for one in results] == list(range(len(steps)))
    assert [one.error for one in results] == [None] * len(steps)
    assert [one.digest for one in results] == [one.digest for one in results_of(quiet)]
    for name in ("final", "sampler", "saved"):
        of_quiet, of_killed = (
            {path: sha for path, sha in tensors_sha(run / name).items() if "rng-" not in path}
            for run in (quiet, killed)
        )
        assert of_quiet == of_killed != {}, name
