"""Many driven runs in one worker: each is what it is alone, and none disturbs another."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

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
from tests.wording import says
from trainer.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_PAUSED
from trainer.files.atomic import read_json
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


@pytest.mark.long
def test_runs_of_a_group_begin_and_train_in_bf16_as_they_do_alone(
    facts: Path, tmp_path: Path
) -> None:
    """The adapters that they begin with are equal to the last bit, what they learn to bf16's."""
    first = ("save_for_sampler", {"name": "first"}, b"")
    short: list[list[Step]] = []
    folders: list[list[Path]] = []
    for together in (8, 1):
        every = [values_of(facts, number, together=together) for number in range(2)]
        for values in every:
            values["train"]["precision"] = "bf16"
        logs = [steps_of(values, number, 3) for number, values in enumerate(every)]
        short = [[steps[0], first, *steps[1:], LAST, ("end", {}, b"")] for steps in logs]
        if together > 1:
            short[0].pop()
            runs = group_of(every, short, tmp_path / "together")
            run_on_ranks(1, drive, every[0], facts, tmp_path / "together", 2)
        else:
            runs = [folder_of(values, tmp_path / "alone") for values in every]
            for run, values, steps in zip(runs, every, short, strict=True):
                write_log(run, steps)
                run_on_ranks(1, drive, values, facts, tmp_path / "alone", 2)
        folders.append(runs)
    for run, alone in zip(*folders, strict=True):
        begun = [tensors_sha(one / "sampler" / "first") for one in (run, alone)]
        assert begun[0] == begun[1] != {}
        for one, other in zip(results_of(run), results_of(alone), strict=False):
            assert one.error is None
            for name, value in one.fields.get("metrics", {}).items():
                assert value == pytest.approx(other.fields["metrics"][name], rel=2e-2)


def _num_shared(layout: Any) -> int:
    """In how many packs of a pass rows of other runs stood, too."""
    packs = [pack for packs in (layout or {"rounds": []})["rounds"] for pack in packs]
    return sum(0 < len(pack["rows"]) < len(pack["lengths"]) for pack in packs)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_runs_of_a_group_killed_anywhere_have_the_bits_that_were_told(
    world: int, facts: Path, tmp_path: Path
) -> None:
    every = [values_of(facts, number, world=world) for number in range(3)]
    for values in every:
        values["lora"]["dropout"] = 0.2
    logs = [steps_of(values, number, 10) for number, values in enumerate(every)]
    logs = [[*logs[0], LAST], *([*steps, LAST, ("end", {}, b"")] for steps in logs[1:])]
    runs = group_of(every, logs, tmp_path)
    seen: list[dict[int, str]] = [{} for _ in runs]  # results that a client has seen, by number
    drawn, count = random.Random(world), 0
    while count < 8:
        place = drawn.choice(["booked", "booked", "torn", "written", "saved"])
        kill = Kill(place, drawn.randint(1, 3 if place == "saved" else 14), 0)
        try:
            run_on_ranks(world, drive, every[0], facts, tmp_path, 2, kill)
            break  # it came to its end before
        except AssertionError:  # a rank died, and the other one lost it
            count += 1
        for run, digests in zip(runs, seen, strict=True):
            digests.update({one.seq: one.digest for one in results_of(run)})
    assert count > 3
    run_on_ranks(world, drive, every[0], facts, tmp_path, 2)
    for run, steps, digests in zip(runs, logs, seen, strict=True):
        results = results_of(run)
        assert [one.seq for one in results] == list(range(len(steps)))
        assert [one.error for one in results] == [None] * len(steps)
        now = {one.seq: one.digest for one in results}
        assert {seq: now[seq] for seq in digests} == digests != {}


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_moves_computes_the_bits_of_its_group(
    world: int, facts: Path, tmp_path: Path
) -> None:
    every = [values_of(facts, number, world=world) for number in range(3)]
    every[1]["lora"]["dropout"] = 0.3
    every[1]["train"]["save_every"] = 1000  # everything is computed again
    for values in every:
        values["data"]["put_aside_s"] = 0.3
    logs = [steps_of(values, number, 6) for number, values in enumerate(every)]
    logs = [[*steps, LAST] for steps in logs]
    runs = group_of(every, logs, tmp_path)
    run_on_ranks(world, drive, every[0], facts, tmp_path, 1)
    assert Guests.of(runs[0]).stay(f"token_{runs[1].name}").code == EXIT_PAUSED
    assert sum(_num_shared(one.layout) for one in results_of(runs[1])) > 0
    shutil.rmtree(runs[1] / "checkpoints")
    write_log(runs[1], [("save_for_sampler", {"name": "again"}, b"")], after=len(logs[1]) - 1)
    run_on_ranks(world, drive, every[1], facts, tmp_path, 1)  # a host of its own
    assert [one.error for one in results_of(runs[1])] == [None] * (len(logs[1]) + 1)
    then, now = (tensors_sha(runs[1] / "sampler" / name) for name in ("last", "again"))
    assert now == then != {}


@pytest.mark.long
def test_what_goes_wrong_in_one_run_leaves_the_others_alone(facts: Path, tmp_path: Path) -> None:
    every = [values_of(facts, number) for number in range(5)]
    logs = [steps_of(values, number, 6) for number, values in enumerate(every)]
    nan = [passed(rows_of_seed(5), loss_fn="gspo"), step(learning_rate=float("nan"))]
    logs[1] = [*logs[1][:5], *nan, *logs[1][5:]]
    logs = [[*logs[0], LAST], *([*steps, LAST, ("end", {}, b"")] for steps in logs[1:])]
    runs = group_of(every, logs, tmp_path)
    log = runs[2] / "operations" / "log-000001.bin"
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1  # in the middle: what follows cannot be read
    log.write_bytes(content)
    (runs[2] / "operations" / "log-000002.bin").write_bytes(b"")
    values = {**every[3], "train": {**every[3]["train"], "precision": "bf16"}}
    (runs[3] / "exp_dict.json").write_text(json.dumps(values))  # of another precision
    Guests.of(runs[0]).ask("token_of_none", "0" * 32)
    run_on_ranks(1, drive, every[0], facts, tmp_path, 2)
    guests = Guests.of(runs[0])
    stays = [guests.stay(f"token_{run.name}") for run in runs[1:]]
    assert [one.code for one in stays] == [EXIT_OK, 1, EXIT_BAD_INPUT, EXIT_OK]
    host, stranger = runs[0].name, runs[3].name
    said = stays[2].error or ""
    says("shared_differing", said, guest=stranger, host=host, keys="train.precision")
    assert guests.stay("token_of_none").code == EXIT_BAD_INPUT
    status = read_json(runs[2] / "status.json")
    assert status is not None
    assert status["state"] == "failed"
    for run, steps in ((runs[0], logs[0]), (runs[4], logs[4])):
        assert [one.error for one in results_of(run)] == [None] * len(steps)
    refused = [one.seq for one in results_of(runs[1]) if one.error is not None]
    assert refused == [5, 6]
