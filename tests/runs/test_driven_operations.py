"""What a driven run refuses, saves and loads."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.driven_runs import (
    VOCABULARY,
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
    write_log,
)
from tests.facts import write_facts
from tests.ranks import run_on_ranks
from tests.wording import Fault, fault, refused, says
from trainer import tasks
from trainer.errors import EXIT_OK, EXIT_PAUSED, EXIT_PREEMPTED, ReplayDiffers
from trainer.launch.driving.shared_worker import shared_loop
from trainer.operations.operation_log import FOLDER, needless_before
from trainer.operations.results import ResultWriter
from trainer.operations.rows import DrivenRow
from trainer.training import checkpoint


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=13, valid=4)


def row_with(**changes: Any) -> DrivenRow:
    (row,) = rows_of_seed(7, 1)
    return DrivenRow(changes.pop("tokens", row.tokens), {**row.inputs, **changes})


def bad_operations() -> list[tuple[Step, Fault]]:
    """Operations with what they are refused for."""
    good = row_with()
    length = len(good.tokens)
    nan = np.full(length, np.nan, np.float32)
    foreign = np.full(length, VOCABULARY, np.int64)
    negative = row_with(tokens=-good.tokens - 1)
    long = DrivenRow(np.full(25, 3, np.int32), {"target_tokens": np.full(25, 3, np.int64)})
    config = fault("driven_loss_config", key="beta", name="cross_entropy")
    other = ("refused", {"error": "loss_fn='x' is not computed here"}, b"")
    return [
        (step(), fault("driven_no_gradient")),
        (passed([good], loss_fn="gspo"), fault("driven_loss_unknown", name="gspo")),
        (passed([good], loss_fn_config={"beta": 1.0}), config),
        (passed([good], loss_fn="ppo"), fault("driven_inputs_foreign", name="ppo")),
        (passed([long]), fault("driven_row_long", count=25, limit=24)),
        (passed([row_with(target_tokens=foreign)]), fault("driven_id_foreign", id=VOCABULARY)),
        (passed([negative]), fault("driven_id_foreign", id=-int(good.tokens[0]) - 1)),
        (passed([row_with(weights=nan)]), fault("driven_not_finite", key="weights")),
        (passed([row_with(weights=nan[:-1] * 0)]), fault("driven_shape", key="weights")),
        (
            passed([row_with(target_tokens=foreign.reshape(length, 1)[:, :0])]),
            fault("payload_no_number", name="in.target_tokens"),
        ),
        (passed([]), fault("driven_no_rows")),
        (("forward", {"loss_fn": "cross_entropy"}, b"torn"), fault("payload_unreadable")),
        (step(beta1=1.0, eps=float("nan")), fault("driven_adam", name="beta1")),
        (("save_state", {"name": "../x"}, b""), fault("driven_name", name="../x")),
        (("load_state", {"folder": "saved/absent"}, b""), fault("driven_state_absent")),
        (("create", {"lora": {"rank": 99}}, b""), fault("driven_create_differs", rank=99)),
        (other, fault("driven_loss_unknown", name="x")),
        (("forget", {}, b""), fault("driven_kind", kind="forget")),
    ]


@pytest.mark.long
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 2), (2, 3)])
def test_what_is_refused_changes_nothing(
    world: int, stage: int, facts: Path, tmp_path: Path
) -> None:
    values = driven_values(facts, world=world)
    bad = bad_operations()
    first, second, looked = (passed(rows_of_seed(n)) for n in (1, 2, 3))
    look = ("forward", *looked[1:])
    early = (step(), fault("driven_not_created"))
    good = [create(values), first, step(), look]
    steps = [early[0], *good[:3], look, *(one for one, _ in bad), look, second, step()]
    late = passed(rows_of_seed(4))
    steps += [("end", {}, b""), late]
    run = folder_of(values, tmp_path)
    write_log(run, steps)
    assert run_on_ranks(world, drive, values, facts, tmp_path, stage) == [EXIT_OK] * world
    results = results_of(run)
    assert len(results) == len(steps)
    wanted = {0: early, **dict(enumerate(bad, start=5))}
    wanted[len(steps) - 1] = (late, fault("driven_has_ended"))
    for number, result in enumerate(results):
        if number not in wanted:
            assert result.error is None, number
            continue
        assert result.fields["category"] == "user"
        says(wanted[number][1], result.error or "")
    assert results[4].payload == results[5 + len(bad)].payload


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loaded_state_has_its_moments_and_its_count(
    precision: str, stage: int, world: int, facts: Path, tmp_path: Path
) -> None:
    values = driven_values(facts, world=world, train={"precision": precision})
    first, second, third = (passed(rows_of_seed(n)) for n in (1, 2, 3))
    look = ("forward", *passed(rows_of_seed(9))[1:])
    load = {"folder": "saved/a", "with_optimizer": True, "path": "its name"}
    steps = [create(values), first, step(), ("save_state", {"name": "a"}, b"")]
    more = [second, step(), third, step(), look]
    steps += [*more, first, ("load_state", load, b""), *more]
    steps += [("load_state", {**load, "with_optimizer": False}, b""), look, *more]
    steps += [("save_state", {"name": "a"}, b""), ("save_for_sampler", {"name": "s"}, b"")]
    steps += [("end", {}, b"")]
    run = folder_of(values, tmp_path)
    write_log(run, steps)
    run_on_ranks(world, drive, values, facts, tmp_path, stage)
    results = results_of(run)
    says("driven_name_there", results[-3].error or "", name="a")
    assert [one.error for one in results[:-3]] == [None] * (len(steps) - 3)
    saved = results[3].fields
    assert saved["folder"] == load["folder"]
    assert len(saved["sha256"]) == 64
    assert results[10].fields == {"path": load["path"]}
    one, same, fresh = (
        [result.payload for result in results[start : start + 5]] for start in (4, 11, 18)
    )
    assert one == same
    assert one[0] == fresh[0]
    assert one[4] != fresh[4]  # without moments Adam takes other steps
    assert (run / "sampler" / "s" / "adapter_model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.parametrize(
    ("precision", "stage"), [("fp32", 0), ("bf16", 0), ("bf16", 1), ("bf16", 2), ("fp32", 3)]
)
def test_a_save_between_gradient_and_step_changes_nothing(
    precision: str, stage: int, facts: Path, tmp_path: Path
) -> None:
    values = driven_values(facts, world=2, train={"precision": precision})
    first, second = passed(rows_of_seed(1)), passed(rows_of_seed(2))
    saves = [("save_state", {"name": name}, b"") for name in ("a", "b")]
    plain = [create(values), first, second, step(), second, first, step(), ("end", {}, b"")]
    saved = [*plain[:2], saves[0], *plain[2:5], saves[1], *plain[5:]]
    payloads: list[list[bytes]] = []
    for name, steps in (("plain", plain), ("saved", saved)):
        run = folder_of(values, tmp_path / name)
        write_log(run, steps)
        run_on_ranks(2, drive, values, facts, tmp_path / name, stage)
        results = results_of(run)
        assert [one.error for one in results] == [None] * len(steps)
        payloads.append([one.payload for one in results if one.payload])
    assert payloads[0] == payloads[1]


@pytest.mark.long
def test_a_replay_that_differs_stops_the_run(facts: Path, tmp_path: Path) -> None:
    values = driven_values(facts, world=2)
    run = folder_of(values, tmp_path)
    write_log(run, [create(values), passed(rows_of_seed(1)), step(), ("end", {}, b"")])
    results = ResultWriter(run / FOLDER)
    results.append(0, {})
    results.append(1, {"metrics": {"loss:sum": 1.0}})
    results.close()
    with pytest.raises(AssertionError, match=ReplayDiffers.__name__):
        run_on_ranks(2, drive, values, facts, tmp_path, 2)
    assert '"failed"' in (run / "status.json").read_text()


@pytest.mark.long
def test_an_idle_run_is_put_aside_and_goes_on(facts: Path, tmp_path: Path) -> None:
    values = driven_values(facts, data={"put_aside_s": 0.5}, train={"save_every": 1})
    run = folder_of(values, tmp_path)
    passes = [passed(rows_of_seed(number)) for number in range(4)]
    steps = [create(values), passes[0], step(), passes[1], step(), passes[2]]
    write_log(run, steps)
    assert run_on_ranks(1, drive, values, facts, tmp_path, 2) == [EXIT_PAUSED]
    assert [step for step, _ in checkpoint.candidates(run / "checkpoints")] == [1, 2]
    assert needless_before(run / FOLDER) == 3
    more = [passes[3], step(), ("end", {}, b"")]
    write_log(run, more, after=len(steps) - 1)
    assert run_on_ranks(1, drive, values, facts, tmp_path, 2) == [EXIT_OK]
    assert [one.error for one in results_of(run)] == [None] * len(steps + more)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [line.count('"loss_sum"') for line in lines] == [1, 1, 1]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_is_asked_to_stop_saves_and_goes_on(
    rank: int, facts: Path, tmp_path: Path
) -> None:
    values = driven_values(facts, world=2)
    run = folder_of(values, tmp_path)
    passes = [passed(rows_of_seed(number)) for number in range(3)]
    steps = [create(values), passes[0], step(), passes[1], step(), passes[2], step()]
    write_log(run, [*steps, ("end", {}, b"")])
    asked = Kill("done", 5, rank, signal.SIGTERM)
    stopped = run_on_ranks(2, drive, values, facts, tmp_path, 2, asked)
    assert stopped == [EXIT_PREEMPTED] * 2
    assert [step for step, _ in checkpoint.candidates(run / "checkpoints")] == [2]
    assert len(results_of(run)) == 5
    assert run_on_ranks(2, drive, values, facts, tmp_path, 2) == [EXIT_OK] * 2
    assert [one.error for one in results_of(run)] == [None] * (len(steps) + 1)


@pytest.mark.parametrize(
    ("block", "own", "expected"),
    [
        ("train", {"epochs": 2.0}, fault("driven_key", key="train.epochs=2.0")),
        ("train", {"precision": "fp16"}, fault("driven_key", key="train.precision='fp16'")),
        ("optim", {"name": "lion"}, fault("driven_key", key="optim.name='lion'")),
        ("data", {"source": "files", "put_aside_s": 1.0}, fault("put_aside_of_files")),
        ("data", {"facts": 3}, fault("driven_reads_files")),
        ("data", {"source": "files", "together": 3}, fault("shared_of_files", source="files")),
    ],
)
def test_a_dictionary_that_needs_rows_is_refused(
    block: str, own: dict[str, Any], expected: Any, tmp_path: Path
) -> None:
    values = driven_values(tmp_path)
    values[block] = {**values[block], **own}
    with refused(expected):
        tasks.parse(values)


@pytest.mark.parametrize("own", [{"dora": True}, {"tokens": [3]}, {"bias": "all"}])
def test_adapters_that_change_the_base_share_none(own: dict[str, Any], tmp_path: Path) -> None:
    values = driven_values(tmp_path, data={"together": 4}, lora=own)
    with refused("shared_changes_base", count=4):
        tasks.parse(values)


def test_a_base_that_is_divided_among_ranks_serves_one_run() -> None:
    run: Any = SimpleNamespace(zero_stage=3)
    nobody: Any = None
    with refused("shared_zero3"):
        shared_loop(run, nobody, nobody, nobody, nobody)


def test_adapters_are_wanted(tmp_path: Path) -> None:
    values = driven_values(tmp_path)
    del values["lora"]
    with refused("driven_without_lora"):
        tasks.parse(values)
