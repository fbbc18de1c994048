"""Predicted seconds: what an operator, a step and its sending cost, by rates that are easy to
reckon with.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks.plan_time import first_choices, kendall, quickest
from tests.ranks import run_on_ranks
from tests.unit.test_memory_parts import measured, zero
from tests.wording import Fault, fault, refused
from trainer.devices import data_sheet
from trainer.launch import late
from trainer.plan.memory.measure import Measured, Moment
from trainer.plan.operators import Operator
from trainer.plan.time import calibration, rates, stopwatch
from trainer.plan.time.calibration import operators_of
from trainer.plan.time.fastest import Way, some_again, why
from trainer.plan.time.rates import Link, Rates
from trainer.plan.time.step_time import (
    IN_A_STEP,
    Cluster,
    StepTime,
    Work,
    between,
    computing,
    hide_launches,
    step_time,
)
from trainer.plan.time.target import Target, target_of
from trainer.runtime import distributed
from trainer.telemetry import meter as meter_module
from trainer.telemetry.meter import Meter

PLAIN = Rates(
    name="plain",
    is_measured=True,
    matmul={"float32": [[1e3, 1e6], [1e9, 1e9]]},
    attention={"forward": [[1.0, 1e9]], "backward": [[1.0, 5e8]]},
    operators={"": [[1.0, 1e6]], "exp": [[1.0, 1e5], [1e4, 1e3]]},
    launch_s=0.001,
    plain_launch_s=0.0005,
    overlaps_launches=False,
    update_s=1e-6,
    within=Link(1e6, 0.01),
    between=Link(1e5, 0.1),
)


def seconds(*operators: Operator, by: Rates = PLAIN) -> StepTime:
    return computing(Work([(operator, 2.0) for operator in operators], tracked=2.0), by)


# Operators
# --------------------------------------------------------------------------------------------------


def test_a_product_counts_two_flops_for_each_pair_and_every_byte_once() -> None:
    (product,) = operators_of(lambda: torch.ones(3, 5) @ torch.ones(5, 7))[-1:]
    assert (product.name, product.flops, product.sides) == ("mm", 2.0 * 3 * 5 * 7, (1, 3, 7, 5))
    assert product.nbytes == 4 * (3 * 5 + 5 * 7 + 3 * 7)


def test_a_table_is_read_where_it_is_looked_up_only() -> None:
    table, ids = torch.ones(1000, 8), torch.tensor([1, 2])
    (looked_up,) = operators_of(lambda: torch.nn.functional.embedding(ids, table))
    assert looked_up.nbytes == 2 * 2 * 8 * 4


def test_views_and_empty_memory_are_no_work() -> None:
    whole = torch.ones(4, 4)
    assert operators_of(lambda: (whole.view(16), whole.t(), torch.empty(8))) == []


def test_a_product_runs_at_the_rate_of_its_size_or_waits_for_memory() -> None:
    found = seconds(Operator("mm", 1e9, 8, (1, 1, 1, 1), "float32"))
    assert found == StepTime(matmul=2.0 * IN_A_STEP, launches=0.002)
    slow = seconds(Operator("mm", 1e9, int(3e6), (1, 1, 1, 1), "float32"))
    assert slow.matmul == pytest.approx(6.0 * IN_A_STEP)


def test_between_two_sizes_the_rate_is_between_theirs() -> None:
    assert PLAIN.product_s(1e6, count=1, dtype="float32") == pytest.approx(1e6 / 10**7.5)
    assert PLAIN.product_s(1.0, count=3, dtype="bfloat16") == pytest.approx(3e-6)


def test_an_operator_that_was_measured_has_its_own_rate() -> None:
    measured_s, other_s = (seconds(Operator(name, 0.0, 100)).memory for name in ("exp_", "other"))
    assert measured_s == pytest.approx(2 * 100 / 1e4 * IN_A_STEP)
    assert other_s == pytest.approx(2e-4 * IN_A_STEP)


def test_operators_of_a_processor_take_longer_in_a_step_than_by_themselves() -> None:
    product = Operator("mm", 1e9, 8, (1, 1, 1, 1), "float32")
    gpu = replace(PLAIN, overlaps_launches=True)
    assert seconds(product).matmul == pytest.approx(IN_A_STEP * seconds(product, by=gpu).matmul)


def test_a_gpu_hides_launches_behind_computing() -> None:
    gpu = replace(PLAIN, overlaps_launches=True)
    assert hide_launches(StepTime(matmul=1.0, launches=3.0), gpu).launches == 2.0
    assert hide_launches(StepTime(matmul=4.0, launches=3.0), gpu).launches == 0.0
    assert hide_launches(StepTime(matmul=4.0, launches=3.0), PLAIN).launches == 3.0
    assert hide_launches(StepTime(matmul=1.0, optimizer=1.5, launches=3.0), gpu).launches == 0.5


def test_other_numbers_of_rows_follow_from_two() -> None:
    few, some = StepTime(matmul=1.0, launches=1.0), StepTime(matmul=2.0, launches=1.0)
    assert between((2, few), (4, some), 8) == StepTime(matmul=4.0, launches=1.0)


# Steps
# --------------------------------------------------------------------------------------------------


def model() -> Measured:
    """Of two weights, one of which stage 3 leaves whole."""
    sizes, calls = [[1_000_000, 1], [1_000, 1]], {"visits": 6, "runs": 1}
    return replace(measured([Moment(0, 0, 0)]), sizes=sizes, calls=calls)


def sent(
    stage: int,
    world: int,
    *,
    nodes: int = 1,
    batches: float = 1.0,
    passes: float = 1.0,
    **changes: object,
) -> float:
    """Seconds of communication of a step that computes nothing."""
    ds = replace(zero(stage, **changes), world=world)
    step, cluster = model(), Cluster(world, nodes)
    step = replace(step, calls={**step.calls, "runs": passes})
    return step_time([(StepTime(), batches)], step, ds, PLAIN, cluster).communication


def test_one_rank_sends_nothing() -> None:
    assert [sent(stage, 1) for stage in (0, 1, 2, 3)] == [0.0] * 4


def test_stages_2_and_3_send_for_every_micro_batch() -> None:
    assert [sent(stage, 2, batches=4) > 1.5 * sent(stage, 2) for stage in range(4)] == (
        [False, False, True, True]
    )


def test_stages_1_and_2_reduce_as_stage_0_does_and_gather_what_was_updated() -> None:
    assert sent(2, 2) == sent(1, 2) > sent(0, 2) > 0


def test_stage_3_gathers_again_in_backward_what_is_not_soon_used_again() -> None:
    once, half, twice = (sent(3, 2, max_reuse=numbers) for numbers in (10**7, 10**6, 0))
    assert once < half < twice
    assert half - once == pytest.approx(twice - half)
    assert sent(3, 2, passes=2) == once  # a forward without gradients leaves its weights there
    assert sent(3, 2, max_reuse=0, passes=2) - twice == pytest.approx(twice - once)
    assert sent(3, 2, persisted=10**7) < once  # what stays whole is never gathered


def test_stage_3_gathers_every_weight_that_stays_whole_by_itself() -> None:
    def sent_with(kept: int, batches: float) -> float:
        step = replace(model(), sizes=[[1_000_000, 1], [10, kept]])
        ds = replace(zero(3), world=2)
        return step_time([(StepTime(), batches)], step, ds, PLAIN, Cluster(2)).communication

    for batches in (1.0, 4.0):  # once a step, behind the update
        assert sent_with(70, batches) - sent_with(20, batches) == pytest.approx(50 * 0.01)


def test_stage_3_costs_the_host_something_for_every_visit_of_a_module() -> None:
    def host(visits: int) -> float:
        step = replace(model(), calls={"visits": visits})
        return step_time([(StepTime(), 2.0)], step, zero(3), PLAIN, Cluster(1)).launches

    assert host(110) - host(10) == pytest.approx(2 * (host(60) - host(10)))
    assert host(110) > host(10)


def test_a_last_micro_batch_that_runs_fewer_modules_costs_the_host_less() -> None:
    """GradCache: every micro-batch but the last runs forward twice."""

    def host(batches: float, **calls_of_last: int) -> float:
        step = replace(model(), calls={"visits": 90}, calls_of_last=calls_of_last)
        return step_time([(StepTime(), batches)], step, zero(0), PLAIN, Cluster(1)).launches

    saved = host(1.0) - host(1.0, visits=60)
    assert saved > 0
    assert host(4.0) - host(4.0, visits=60) == pytest.approx(saved)


# What the host's clock said of narrow models on an H200, in which the device has nothing to do
# (benchmarks/gpu_host.py): calls of a micro-batch, of the last one, weights, stage, micro-batches.
_BERT = {"tracked": 1663, "plain": 4514, "visits": 1275}
_BERT_LAST = {"tracked": 1648, "plain": 2915, "visits": 850}
_T5 = {"tracked": 1050, "plain": 3762, "visits": 744}


@pytest.mark.parametrize(
    ("calls", "last", "weights", "stage", "batches", "measured_s"),
    [
        (_BERT, _BERT_LAST, 197, 2, 2, 0.188),
        (_BERT, _BERT_LAST, 197, 2, 4, 0.309),
        (_BERT, _BERT_LAST, 197, 0, 2, 0.195),
        (_BERT, _BERT_LAST, 197, 3, 2, 0.844),
        (_T5, _T5, 257, 2, 2, 0.233),
        (_T5, _T5, 257, 2, 4, 0.379),
        (_T5, _T5, 257, 0, 2, 0.212),
        (_T5, _T5, 257, 3, 2, 0.754),
    ],
)
def test_the_host_of_an_h200_takes_what_was_measured_within_thirty_percent(
    calls: dict[str, int],
    last: dict[str, int],
    weights: int,
    stage: int,
    batches: int,
    measured_s: float,
) -> None:
    step = replace(model(), sizes=[[1, weights]], calls=calls, calls_of_last=last)
    rates = target_of("h200", world=1).rates
    assert rates is not None
    times = [
        StepTime(launches=one["tracked"] * rates.launch_s + one["plain"] * rates.plain_launch_s)
        for one in (calls, last)
    ]
    of_batches = [(times[0], batches - 1.0), (times[1], 1.0)]
    found = step_time(of_batches, step, zero(stage), rates, Cluster(1)).total
    assert found == pytest.approx(measured_s, rel=0.3)


def test_gradients_are_copied_where_they_are_reduced() -> None:
    def copied(stage: int, world: int, batches: float) -> float:
        ds = replace(zero(stage), world=world)
        return step_time([(StepTime(), batches)], model(), ds, PLAIN, Cluster(world)).memory

    assert copied(0, 1, 1) == 0 < copied(2, 1, 1) < copied(2, 2, 1)
    assert [copied(stage, 2, 4) > 3 * copied(stage, 2, 1) for stage in range(4)] == (
        [False, False, True, True]
    )
    assert copied(0, 1, 4) == pytest.approx(3 * copied(0, 1, 2))  # a sum of one is none
    assert copied(0, 1, 2) > 0


def test_the_slowest_link_decides_between_nodes() -> None:
    assert sent(2, 16, nodes=2) > 5 * sent(2, 16)


def test_every_device_of_a_data_sheet_has_an_adapter_of_its_own() -> None:
    sheet = replace(PLAIN, is_measured=False)
    assert Cluster(16, 2).link(sheet).bytes_per_s == 8e5
    assert Cluster(32, 2).link(sheet).bytes_per_s == 1e6  # not more than within a node
    assert Cluster(16, 2).link(PLAIN).bytes_per_s == 1e5


def test_ranks_share_the_optimizer_from_stage_1_on() -> None:
    costs = [
        step_time(
            [(StepTime(), 1.0)], model(), replace(zero(s), world=4), PLAIN, Cluster(4)
        ).optimizer
        for s in (0, 1)
    ]
    assert costs[1] < costs[0]


@pytest.mark.parametrize("is_gpu", [True, False])
def test_computing_hides_what_a_gpu_sends_meanwhile(is_gpu: bool) -> None:
    ds, cluster = replace(zero(3), world=2), Cluster(2)
    rated = replace(PLAIN, overlaps_launches=is_gpu)
    busy = step_time([(StepTime(matmul=1e3), 1.0)], model(), ds, rated, cluster)
    assert (0 < busy.communication < 0.5 * sent(3, 2)) == is_gpu
    assert is_gpu or busy.communication == sent(3, 2)


def test_a_collective_that_was_measured_by_itself_has_its_own_rate() -> None:
    def ratio(**links: Any) -> float:
        ds, rated = replace(zero(3), world=2), replace(PLAIN, **links)
        step = step_time([(StepTime(), 1.0)], model(), ds, rated, Cluster(2))
        return step.communication / sent(3, 2)

    assert ratio(gathering=Link(1e3, 0.01)) > 50
    assert ratio(scattering=Link(1e3, 0.01)) > 25
    assert ratio(fresh_bytes_per_s=1e4) > 25


# Devices
# --------------------------------------------------------------------------------------------------


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    file.write_text(json.dumps(rates.plain(PLAIN)))
    assert rates.read(file) == PLAIN
    assert target_of(str(file), world=2).rates == PLAIN


def calibrate(folder: str) -> dict[str, Any]:
    """A whole calibration, but for its patience."""
    torch.set_num_threads(1)
    distributed.init()
    stopwatch._TURN_S, calibration._PASSES, calibration._LONG_S = 1e-5, 2, 1e-3
    for name in ("_SENT_NUMBERS", "_FRESH_NUMBERS", "_DISK_BYTES"):
        setattr(calibration, name, 1 << 20)
    calibration._CPU_NUMBERS = (1 << 12,)
    return rates.plain(calibration.calibrate(Path(folder)))


def test_what_was_quickest_in_any_pass_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def run(took: float) -> None:
        nonlocal now
        now += took

    monkeypatch.setattr(stopwatch.time, "process_time", lambda: now)
    monkeypatch.setattr(stopwatch.torch, "get_num_threads", lambda: 1)
    watch = stopwatch.Stopwatch(torch.device("cpu"))
    # one call is too short for a turn of 20 ms; the next passes make as many calls
    passes = [watch.seconds("sum", partial(run, took)) for took in (0.004, 0.003, 9.0)]
    assert passes == pytest.approx([0.004, 0.003, 0.003])
    assert watch.seconds("product", partial(run, 9.0)) == pytest.approx(9.0)


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_calibrate_their_device_and_their_links(world: int, tmp_path: Path) -> None:
    found = run_on_ranks(world, calibrate, str(tmp_path))
    file = tmp_path / "device.json"
    file.write_text(json.dumps(found[0]))
    read = rates.read(file)
    assert read.machine["ranks"] == world
    links = [read.within, read.gathering, read.scattering]
    assert [link is not None for link in links] == [True, world > 1, world > 1]
    known = [link for link in links if link is not None]
    assert all(link.bytes_per_s > 1e6 and 0 < link.latency_s < 1 for link in known)
    assert 0 < read.plain_launch_s < 1e-3
    assert 0 < read.launch_s < 1e-3
    assert 1e6 < (read.fresh_bytes_per_s or 0) < 1e12


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", fault("calibration_unreadable")),
        ("{}", fault("calibration_unreadable")),
        ('{"version": 9}', fault("calibration_version", version=9, wanted=3)),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(
    content: str, words: Fault, tmp_path: Path
) -> None:
    file = tmp_path / "device.json"
    file.write_text(content)
    with refused(words):
        target_of(str(file), world=1)


@pytest.mark.parametrize(
    ("text", "world", "nodes", "words"),
    [
        ("h100-81", None, 1, fault("device_unknown", device="h100-81", nearest="h100-80")),
        ("8xh100-80", 4, 1, fault("device_counts", devices=8, world=4)),
        ("h100,a100-80", None, 1, fault("device_kinds")),
        ("h100+a100-80", None, 1, fault("device_kinds")),
        ("0xh100", None, 1, fault("device_none")),
        ("h100", 3, 2, fault("devices_over_nodes")),
    ],
)
def test_a_device_that_cannot_be_meant_is_refused(
    text: str, world: int | None, nodes: int, words: Fault
) -> None:
    with refused(words):
        target_of(text, world=world, nodes=nodes)


@pytest.mark.parametrize("key", ["device", "processor"])
def test_a_calibration_of_another_machine_is_refused(key: str) -> None:
    there = calibration.machine() | {key: "Quantum 9000"}
    target = Target(None, replace(PLAIN, machine=there), Cluster(1))
    with refused("calibration_of_other_machine", key=key, value="Quantum 9000"):
        late.predict_time(cast(Any, None), target)


@pytest.mark.parametrize(
    ("name", "bytes_per_s"),
    [
        ("NVIDIA L4", 3e11),
        ("NVIDIA L40", None),
        ("NVIDIA L40S", 8.64e11),
        ("NVIDIA A10G", 6e11),
        ("NVIDIA A100-SXM4-80GB", 2e12),
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H100 PCIe", 2e12),
        ("NVIDIA GH200 480GB", 4e12),
        ("h200", 4.8e12),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_a_card_is_told_by_its_whole_name(name: str, bytes_per_s: float | None) -> None:
    sheet = data_sheet(name)
    assert (sheet and sheet.bytes_per_s) == bytes_per_s


def test_devices_are_counted_over_nodes_and_rated_by_their_data_sheet() -> None:
    target = target_of("8xh100-80", world=None, nodes=2)
    assert (target.cluster.world, target.cluster.nodes) == (16, 2)
    assert target.rates is not None
    assert not target.rates.is_measured
    assert 0.5 * 989e12 < target.rates.matmul["bfloat16"][-1][1] < 989e12


def test_a_size_in_gib_says_nothing_of_time() -> None:
    assert target_of("24GiB", world=1).rates is None
    assert "calibrate-device" in target_of("24GiB", world=1).no_time


def test_the_first_way_says_what_the_next_kind_loses() -> None:
    best = Way("zero2", 4, False, 1, StepTime(matmul=1.0), 1, 0)
    other = Way("zero3", 4, False, 1, StepTime(matmul=1.0, communication=0.5), 1, 0)
    assert why(best, [other]) == (
        "zero3, micro-batch 4 x 1 takes 50.0% longer, most of it in communication"
    )


# In the run
# --------------------------------------------------------------------------------------------------


def prediction(**step: float) -> dict[str, Any]:
    time = StepTime(**step)
    return {"step": late.asdict(time), "step_s": time.total}


def meter(steps: int, predicted: dict[str, Any], **parts: float) -> Meter:
    made = Meter()
    made.timed_steps, made.prediction = steps, predicted
    made.parts.update(cast(Any, parts))
    return made


def test_a_late_run_names_the_part_that_is_late() -> None:
    found = late.compare_time(
        meter(2, prediction(matmul=1.0, optimizer=0.5), update=4.0, input=0.2)
    )
    assert found is not None
    assert (found.late_part, found.measured_s) == ("update", 2.1)
    assert "+40%); late is update: 2 s, 500 ms predicted" in found.text


def test_a_run_within_its_time_blames_nothing() -> None:
    found = late.compare_time(meter(1, prediction(matmul=1.0), input=1.1))
    assert found is not None
    assert found.late_part is None
    assert late.compare_time(meter(0, prediction(matmul=1.0))) is None


def test_a_step_is_told_apart_into_input_computing_and_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(meter_module.time, "monotonic", lambda: now[0])
    made = Meter()
    for _ in range(3):
        now[0] += 1.0
        with made.stepping():
            now[0] += 10.0
            with made.updating():
                now[0] += 100.0
        with made.pause():
            now[0] += 1000.0
    assert made.timed_steps == 2  # the first one warms up
    assert made.parts == {"input": 2.0, "forward and backward": 20.0, "update": 200.0}


# The benchmark's own sums
# --------------------------------------------------------------------------------------------------


def test_kendall_counts_pairs_in_the_right_order() -> None:
    lines = [{"measured": m, "predicted": p} for m, p in ((1, 1), (2, 3), (3, 2))]
    assert kendall(lines) == pytest.approx(1 / 3)


def test_a_first_choice_is_held_against_the_best_of_its_subject() -> None:
    lines = [
        {"subject": "a", "measured": 2.0, "predicted": 1.0},
        {"subject": "a", "measured": 1.0, "predicted": 3.0},
        {"subject": "b", "measured": 1.0, "predicted": 1.0},
    ]
    assert first_choices(lines) == {"a": 1.0, "b": 0.0}


def test_of_every_step_the_quickest_round_counts_and_the_slowest_tells_the_spread() -> None:
    rounds = (("a", [3.0, 2.0, 9.0]), ("b", [1.0, 1.0, 1.0]), ("a", [2.0, 4.0, 3.0]))
    found = quickest([{"name": name, "subject": name, "steps": steps} for name, steps in rounds])
    assert [found[name]["measured"] for name in "ab"] == [2.0, 1.0]
    assert [found[name]["spread"] for name in "ab"] == [0.5, 0.0]


def test_a_block_that_is_computed_again_costs_the_host_its_own_calls_only() -> None:
    none = replace(measured([Moment(0, 80, 0)]), calls={"visits": 100, "runs": 1})
    all_ = replace(measured([Moment(0, 20, 0)]), calls={"visits": 180, "runs": 1, "plain": 40})
    found = some_again(none, all_, 1, 4)
    assert found.calls == {"visits": 120, "runs": 1, "plain": 10}
    assert found.moments == [Moment(0, 65, 0)]
