"""Many driven runs in one worker: each is what it is alone, and none disturbs another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.driven_runs import (
    Step,
    create,
    drive,
    driven_values,
    folder_of,
    passed,
    results_of,
    rows_of_seed,
    step,
    write_log,
)
from tests.facts import write_facts
from tests.ranks import run_on_ranks
from trainer.operations.guests import Guests

Values = dict[str, Any]
LAST = ("save_for_sampler", {"name": "last"}, b"")
RANKS = (2, 4, 7)
PARTS = (["attention"], ["attention", "mlp", "output"], ["mlp"])


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=13, valid=4)


def values_of(facts: Path, number: int, *, world: int = 1, together: int = 8) -> Values:
    """The dictionary of run `number` of a group; the first, put aside when it is alone, is host."""
    data: Values = {"together": together} if together > 1 else {}
    data |= {"put_aside_s": 0.3} if number == 0 or together == 1 else {}
    lora = {"r": RANKS[number % 3], "alpha": 8 + number, "parts": PARTS[number % 3]}
    train = {"seed": number, "micro_tokens": 40, "save_every": 3}
    return driven_values(facts, world=world, data=data, lora=lora, train=train)


def steps_of(values: Values, number: int, count: int) -> list[Step]:
    """A loop of `count` steps on rows of its own."""
    steps = [create(values)]
    for index in range(count):
        seed = 1000 * number + 7 * index
        steps.append(passed(rows_of_seed(seed, 1 + (index + number) % 4)))
        if index % 4 == number % 4:
            steps.append(passed(rows_of_seed(seed + 1), "forward"))
            steps.append(passed(rows_of_seed(seed + 2)))
        steps.append(step(eps=1e-3, learning_rate=0.01, grad_clip_norm=index % 2 * 1.0))
    return steps


def group_of(every: Sequence[Values], logs: Sequence[Sequence[Step]], savedir: Path) -> list[Path]:
    """The run folders of a group whose first run is the host of the others."""
    runs = [folder_of(values, savedir) for values in every]
    for run, values, steps in zip(runs, every, logs, strict=True):
        write_log(run, steps)
        write_dictionary(run, values)
    for run in runs[1:]:
        Guests.of(runs[0]).ask(f"token_{run.name}", run.name)
    return runs


def write_dictionary(run: Path, values: Values) -> None:
    import json

    (run / "exp_dict.json").write_text(json.dumps(values))


@pytest.mark.long
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)])
def test_every_run_of_a_group_trains_as_it_does_alone(
    world: int, stage: int, facts: Path, tmp_path: Path
) -> None:
    every = [values_of(facts, number, world=world) for number in range(3)]
    logs = [steps_of(values, number, 20) for number, values in enumerate(every)]
    logs = [[*logs[0], LAST], *([*steps, LAST, ("end", {}, b"")] for steps in logs[1:])]
    runs = group_of(every, logs, tmp_path / "together")
    run_on_ranks(world, drive, every[0], facts, tmp_path / "together", stage)
    shared = 0
    for number, (run, steps) in enumerate(zip(runs, logs, strict=True)):
        alone = values_of(facts, number, world=world, together=1)
        folder = folder_of(alone, tmp_path / "alone")
        write_log(folder, steps)
        run_on_ranks(world, drive, alone, facts, tmp_path / "alone", stage)
        got, want = results_of(run), results_of(folder)
        assert [one.error for one in got] == [None] * len(steps)
        for one, other in zip(got, want, strict=True):
            for name, value in one.fields.get("metrics", {}).items():
                assert value == pytest.approx(other.fields["metrics"][name], rel=1e-5, abs=1e-5)
        tensors, others = (
            load_file(one / "sampler" / "last" / "adapter_model.safetensors")
            for one in (run, folder)
        )
        assert tensors.keys() == others.keys() != set()
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, others[name], rtol=0, atol=1e-5)
        shared += sum(_num_shared(one.layout) for one in got)
    assert shared > 20


def _num_shared(layout: Any) -> int:
    """In how many packs of a pass rows of other runs stood, too."""
    packs = [pack for packs in (layout or {"rounds": []})["rounds"] for pack in packs]
    return sum(0 < len(pack["rows"]) < len(pack["lengths"]) for pack in packs)
