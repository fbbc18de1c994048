"""The parts of the memory plan that need no fake device."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from exp_configs import EXP_GROUPS
from tests.wording import refused
from trainer import tasks
from trainer.config.block import validate
from trainer.config.schema import Train
from trainer.data.mixed.mixture import Mix
from trainer.data.order import Sharding, Sizes, window_rows
from trainer.devices import GIB, device_of
from trainer.launch import choose
from trainer.launch.prepare import PreparedRun
from trainer.plan.memory import measure, plan_text
from trainer.plan.memory.advice import (
    Advice,
    Fix,
    Stage,
    fewer_evaluated,
    largest_divisor,
    largest_fitting,
)
from trainer.plan.memory.deepspeed_terms import (
    Breakdown,
    Zero,
    host,
    host_to_read,
    inference,
    training,
)
from trainer.plan.memory.measure import (
    ROOT,
    Measured,
    Moment,
    SteppedTogether,
    scale_to_rows,
    with_value,
)
from trainer.plan.memory.plan import MemoryPlan, Phase
from trainer.plan.memory.planned_rows import MOST_STEPS, heaviest
from trainer.plan.memory.subject import published_shape
from trainer.plan.memory.tracker import BLOCK, Tracker
from trainer.runtime.batch import batch_of, name_batch_when_out_of_memory
from trainer.training.run_plan import RunPlan

P = 1_000_000


def measured(
    moments: list[Moment], *, width: int = 2, largest: int = 1000, frozen: int = 0
) -> Measured:
    return Measured(
        weights=width * (P + frozen),
        buffers=0,
        trainable=P,
        frozen=frozen,
        largest=largest,
        states=2 * P,
        moments=moments,
        scratch=0,
        shapes={},
        tensors=[],
        seconds=0.0,
        groups=[SteppedTogether(P, largest)],
    )


def zero(stage: int, **changes: object) -> Zero:
    return Zero(
        **{"stage": stage, "world": 1, "width": 2, "accumulates": False, "reduce_bucket": 1000}
        | changes
    )


# Devices
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gib"), [("24GiB", 24), ("h200", 139.8), ("1536MiB", 1.5), ("A100-80", 79.1)]
)
def test_a_device_is_named_or_given_by_its_size(text: str, gib: float) -> None:
    assert device_of(text).nbytes == int(gib * GIB)


def test_a_gigabyte_is_not_a_gibibyte() -> None:
    assert device_of("24GB").nbytes == 24 * 10**9


def test_an_unknown_device_is_refused_with_the_nearest_name() -> None:
    with refused("device_unknown", nearest="a100-80"):
        device_of("a100-8")


def test_several_ranks_leave_less_for_tensors() -> None:
    assert device_of("24GiB").usable(2) < device_of("24GiB").usable(1) < 24 * GIB


# The closed form
# --------------------------------------------------------------------------------------------------


def test_two_numbers_of_rows_give_every_other_one_at_the_same_gradients() -> None:
    few = measured([Moment(8, 0, 0), Moment(0, 10, 1)])
    some = measured([Moment(8, 0, 0), Moment(4, 19, 2), Moment(0, 20, 2)])
    grown = scale_to_rows((2, few), (4, some), 8)
    assert grown.moments == [Moment(8, 0, 0), Moment(4, 57, 6), Moment(0, 40, 4)]
    assert scale_to_rows((2, few), (4, some), 4).moments == some.moments


def test_the_largest_that_fits_is_exact() -> None:
    found = [largest_fitting(lambda rows: 10 * rows, nbytes) for nbytes in (100, 99, 9)]
    assert found == [10, 9, 0]


@pytest.mark.parametrize(("most", "found"), [(5, 4), (32, 32), (31, 16), (0, 0)])
def test_a_micro_batch_divides_the_rows_of_a_rank(most: int, found: int) -> None:
    assert largest_divisor(32, most) == found


# DeepSpeed's terms
# ------------------------------------------------------------------------------------------------


def test_adamw_in_bf16_at_stage_0_holds_twenty_bytes_a_weight_while_it_steps() -> None:
    found = training(measured([Moment(2 * P, 0, 0)]), zero(0), cublas=0)
    assert (found.weights, found.gradients, found.optimizer, found.workspace) == (
        2 * P,
        2 * P,
        12 * P,
        4 * P,
    )


def test_the_highest_moment_may_come_before_any_gradient() -> None:
    moments = [Moment(2 * P, 0, 0), Moment(0, 30 * P, P)]
    found = training(measured(moments), zero(0), cublas=0)
    assert (found.gradients, found.activations, found.logits) == (0, 30 * P, P)


def test_gradients_of_earlier_micro_batches_lie_below_the_peak_of_the_next() -> None:
    moments = [Moment(2 * P, 0, 0), Moment(0, 30 * P, 0)]
    found = training(measured(moments), zero(0, accumulates=True), cublas=0)
    assert (found.gradients, found.activations) == (2 * P, 30 * P)


@pytest.mark.parametrize("stage", [0, 2])
def test_there_is_no_gradient_before_a_steps_first_micro_batch(stage: int) -> None:
    step = measured([Moment(2 * P, 0, 0), Moment(0, 90 * P, 0)])
    how = zero(stage, world=2, accumulates=True)
    first, later = (training(step, how, cublas=0, is_first=is_first) for is_first in (True, False))
    assert later.total - first.total == 2 * P  # of stage 2 a half, in fp32
    waiting = replace(step, operators_of_last=[["of another micro-batch"]])
    assert training(waiting, how, cublas=0, is_first=True) == later


def test_a_frozen_base_that_is_kept_lies_whole_beside_a_ranks_part_of_it() -> None:
    step = measured([Moment(2 * P, 0, 0)], frozen=10 * P)
    shared, kept = (
        training(step, zero(3, world=4, max_live=P, prefetch_bucket=0, keeps_frozen=kept), cublas=0)
        for kept in (False, True)
    )
    part = 2 * 11 * P // 4
    assert (shared.weights, kept.weights) == (part + 2 * P, part + 2 * 10 * P + 2 * P)


@pytest.mark.parametrize(("gib", "how"), [(20, "replicate"), (23, "shard")])
def test_frozen_weights_are_kept_where_the_plan_says_that_they_fit(
    gib: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tasks.parse(EXP_GROUPS["crossattn_tiny"][0])
    asked: list[str] = []

    def made(subject: Any, *, cublas: int) -> Any:
        asked.append(subject)
        return SimpleNamespace(plan=plan_of(gib))

    monkeypatch.setattr(choose, "make", made)
    monkeypatch.setattr(PreparedRun, "subject", lambda self: self.plan.cfg.train.frozen)
    sharding, ds = Sharding(4, 1, 2, 0), {"zero_optimization": {"stage": 3}}
    plan = RunPlan({}, cfg, "", Path(), ds, sharding)
    nothing: Any = None
    run = PreparedRun(plan, nothing, {}, nothing)
    assert choose.frozen(run, name="24GiB") == how
    assert asked == ["replicate"]
    assert choose.frozen(run, name=None) == "shard", "there is no device here"


def test_a_group_is_freed_before_the_optimizer_makes_copies_of_it() -> None:
    """Stages 1 and 2: its copies come beside the gradients of the groups behind it alone."""
    table = SteppedTogether(P // 4, P // 4)
    hidden = SteppedTogether(3 * P // 4, 1000, of_number=4, of_weight=8000)
    lion = SteppedTogether(P, 1000, of_number=4, at_once=500)
    copies = {}
    for name, groups in {"muon": [table, hidden], "lion": [lion]}.items():
        step = replace(measured([Moment(0, 0, 0)], width=4), groups=groups)
        for stage in (1, 2):
            found = training(step, zero(stage, width=4, is_bf16=False), cublas=0)
            copies[name, stage] = found.gradients + found.workspace
    flat = {1: 4 * P + 4 * P // 4, 2: 4 * P + 4 * P // 4}
    stepped = (4 + 4) * 3 * P // 4 + 8000
    assert copies["muon", 1] == max(flat[1], 3 * P + 3 * P, stepped)
    assert copies["lion", 1] == copies["lion", 2] == 8 * P


def test_more_ranks_divide_the_optimizer_from_stage_1_on() -> None:
    one, two = (
        training(measured([Moment(2 * P, 0, 0)]), zero(2, world=w), cublas=0).optimizer
        for w in (1, 2)
    )
    assert two * 2 == one == 12 * P


def test_buckets_are_allocated_in_full_however_small_the_model() -> None:
    found = training(
        measured([Moment(2 * P, 0, 0)]),
        zero(2, world=2, overlaps=True, reduce_bucket=5 * P),
        cublas=0,
    )
    assert found.buffers == 2 * 5 * P * 2


@pytest.mark.parametrize(("bucket", "copies"), [(1000, 1), (999, 2)])
def test_gradients_wait_beside_a_bucket_only_if_a_weight_is_larger(
    bucket: int, copies: int
) -> None:
    step = measured([Moment(2 * P, 0, 0), Moment(2000, 30 * P, 0)])
    how = zero(2, world=2, accumulates=True, reduce_bucket=bucket)
    found = training(step, how, cublas=0)
    assert found.gradients == 4 * P // 2 + (copies - 1) * 2000


def test_stage_3_holds_twice_what_it_gathered_until_the_last_weight_is_asked_for() -> None:
    sizes = [[150_000, 6], [100_000, 1]]  # the last one is left whole on every rank
    step = measured([Moment(2 * P, 0, 0), Moment(0, 40 * P, 0)])
    step = replace(step, sizes=sizes, reading=Moment(0, 39 * P, 0))
    alone, shared, ahead = (
        training(step, zero(3, **how), cublas=0)
        for how in ({}, {"world": 2}, {"world": 2, "prefetch_bucket": 400_000})
    )
    assert alone.activations == 40 * P
    buckets = shared.buffers - 2 * 900_000
    assert (shared.activations, ahead.buffers) == (39 * P, buckets)
    assert ahead.activations == 40 * P


@pytest.mark.parametrize(("width", "world", "copies"), [(2, 2, 4), (2, 4, 4), (4, 2, 8)])
def test_stage_3_reduces_gradients_when_its_weights_are_parts_again(
    width: int, world: int, copies: int
) -> None:
    """copies: bytes of each gradient; one behind the other, and once more or this rank's in fp32."""
    sizes = [[150_000, 6], [100_000, 1]]  # the last one is left whole on every rank
    step = replace(measured([Moment(width * P, 0, 0)], width=width, largest=150_000), sizes=sizes)
    how = zero(3, width=width, world=world, reduce_bucket=P)
    found = training(step, how, cublas=0)
    assert found.workspace == copies * P
    assert found.weights == width * P // world + width * (100_000 + 150_000)
    less = training(step, replace(how, max_live=100_000, prefetch_bucket=0), cublas=0)
    assert less.weights == width * P // world + width * 100_000


def test_an_offloaded_optimizer_is_in_host_memory() -> None:
    offloaded = zero(2, offloads_optimizer=True)
    assert training(measured([Moment(2 * P, 0, 0)]), offloaded, cublas=0).optimizer == 0
    assert host(measured([]), offloaded) == 18 * P + 2 * 1000
    assert host(measured([]), zero(3, world=2, offloads_optimizer=True)) == 20 * P // 2
    assert host(measured([]), zero(3, offloads_weights=True)) == 2 * P
    assert host(measured([]), zero(2)) == 0


@pytest.mark.parametrize(
    ("stage", "offloads_weights", "is_random", "num_bytes"),
    [
        (0, False, False, 2 * P),
        (2, False, False, 2 * P),
        (3, False, False, 2 * 1000),
        (3, True, False, 2 * P // 8 + 2 * 1000),
        (3, False, True, 2 * P),
    ],
)
def test_eight_ranks_read_a_base_whole_below_stage_3_and_by_shares_there(
    stage: int, offloads_weights: bool, is_random: bool, num_bytes: int
) -> None:
    asked = zero(stage, world=8, offloads_weights=offloads_weights)
    assert host_to_read(measured([]), asked, is_random=is_random) == num_bytes


def test_an_evaluation_holds_the_optimizer_besides_its_own_activations_and_logits() -> None:
    peak = inference(measured([Moment(0, 30 * P, P)]), zero(0), cublas=7)
    assert (peak.weights, peak.optimizer, peak.workspace) == (2 * P, 12 * P, 7)
    assert (peak.gradients, peak.activations, peak.logits) == (0, 30 * P, P)


def test_stage_3_divides_frozen_weights_too() -> None:
    found = inference(
        measured([Moment(0, 0, 0)], frozen=3 * P),
        zero(3, world=4, max_live=0, prefetch_bucket=0),
        cublas=0,
    )
    assert found.weights == 2 * P


# Rows
# --------------------------------------------------------------------------------------------------


class Lengths:
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = self.sizes = np.array(lengths)

    def encoded_rows(self, *_: object, **__: object) -> list[dict[str, list[int]]]:
        raise AssertionError("not asked for")

    raw = encoded_rows


def test_the_heaviest_micro_batch_is_one_that_the_run_makes() -> None:
    rng = np.random.default_rng(0)
    rows = Lengths(rng.integers(1, 100, 64).tolist())
    sharding = Sharding(global_batch=8, micro_batch=4, world=1, rank=0)
    found = {batch.is_first: batch.numbers for batch in heaviest(rows, sharding, seed=3, steps=16)}
    steps = [
        window_rows(step, lengths=rows.lengths, sharding=sharding, seed=3) for step in range(16)
    ]
    for is_first, numbers in found.items():
        batches = [batch for first, *rest in steps for batch in ([first] if is_first else rest)]
        assert any(np.array_equal(numbers, batch) for batch in batches)
        assert rows.lengths[numbers].max() == max(rows.lengths[b].max() for b in batches)
    assert rows.lengths[found[True]].max() == rows.lengths.max()


def test_a_source_that_begins_behind_many_steps_is_planned_for() -> None:
    lengths = np.array([10] * 100 + [90] * 100)
    sizes = Sizes(lengths[:, None], np.zeros(200, np.int32), sources=(100, 100))
    rows: Any = SimpleNamespace(lengths=lengths, sizes=sizes)
    one, zero_ = Fraction(1), Fraction(0)
    late = 2 * MOST_STEPS
    mix = Mix(("a", "b"), ((0, (one, zero_)), (late, (zero_, one))), labels=("a", "b"))
    sharding = Sharding(global_batch=8, micro_batch=4, world=1, rank=0, mix=mix)
    longest = [
        max(lengths[batch.numbers].max() for batch in heaviest(rows, sharding, seed=3, steps=steps))
        for steps in (late, late + 1)
    ]
    assert longest == [10, 90]


@pytest.mark.parametrize(
    ("lengths", "sharding", "wanted"),
    [
        # the longest row is the first rank's, the most tokens are the second one's
        ([50, 30, 30, 20, 15, 1], Sharding(6, 3, 2, 0), [[50, 20, 1], [30, 30, 15]]),
        (
            [50, 25, 25, 10, 2, 2, 2, 1],
            Sharding(8, 4, 2, 0, micro_tokens=60),
            [[50], [25, 25, 10], [2, 2]],
        ),
    ],
    ids=["as many rows", "as many tokens"],
)
def test_the_heaviest_micro_batch_may_be_that_of_any_rank(
    lengths: list[int], sharding: Sharding, wanted: list[list[int]]
) -> None:
    rows: Any = Lengths(lengths)
    rows.sizes = Sizes(rows.lengths[:, None], np.zeros(len(lengths), np.int32), is_packed=True)
    found = heaviest(rows, sharding, seed=None, steps=1)
    assert sorted(rows.lengths[one.numbers].tolist() for one in found) == sorted(wanted)


def test_rows_of_one_length_need_most_behind_others() -> None:
    rows = Lengths([10] * 64)
    sharding = Sharding(global_batch=8, micro_batch=4, world=1, rank=0)
    (found,) = heaviest(rows, sharding, seed=3, steps=16)
    assert not found.is_first
    (alone,) = heaviest(rows, Sharding(8, 8, 1, 0), seed=3, steps=16)
    assert alone.is_first


def test_many_short_rows_may_need_more_than_few_long_ones() -> None:
    rows = Lengths([100] + [10] * 63)
    sharding = Sharding(global_batch=64, micro_batch=64, world=1, rank=0, micro_tokens=150)
    found = heaviest(rows, sharding, seed=None, steps=1)
    assert sorted(len(batch.numbers) for batch in found)[-1] == 15


# Shapes, changes, pages
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "width"),
    [("google-t5/t5-large", 1024), ("t5-base", 768), ("google/flan-t5-xxl", 4096)],
)
def test_published_shapes_are_known_by_hub_id(name: str, width: int) -> None:
    shape = published_shape(name)
    assert shape is not None
    assert shape["d_model"] == width


def test_other_bases_have_no_shape_here() -> None:
    assert published_shape("bigcode/starcoderbase-1b") is None


def test_a_change_leaves_the_experiment_as_it_was() -> None:
    values = {"data": {"source_tokens": 512}}
    assert with_value(values, "data.source_tokens", 64) == {"data": {"source_tokens": 64}}
    assert values == {"data": {"source_tokens": 512}}


def plan_of(gib: float) -> MemoryPlan:
    peak = Breakdown(weights=GIB, activations=int((gib - 1) * GIB))
    phase = Phase(
        "training step",
        peak,
        4,
        512,
        {"input_ids": [4, 512]},
        [("softmax 4x8x512x512 float32", GIB)],
    )
    return MemoryPlan([phase], 0, 0, 0, [0], [0], 0.0, [])


def test_a_plan_survives_json() -> None:
    assert MemoryPlan.of(plan_of(3).plain()) == plan_of(3)


def test_a_refusal_names_the_need_the_device_and_what_would_fit() -> None:
    advice = Advice(
        [Stage("zero2", Breakdown(), 0)],
        [Fix("max_length: data.source_tokens 4096 -> 512", 2 * GIB, 28 * GIB)],
    )
    text = plan_text.refusal(plan_of(30), advice, device_of("24GiB"), world=1)
    assert "30.00 GiB" in text
    assert "4096 -> 512: 2.00 GiB (saves 28.00, fits)" in text
    assert "--force" in text


def test_where_generation_needs_most_the_fix_is_the_largest_evaluation_batch_that_fits() -> None:
    grown = Phase("generation", Breakdown(weights=GIB, activations=32 * GIB), 32, 512, {}, [])
    plan = replace(plan_of(3), phases=[plan_of(3).phases[0], grown])
    (fix,) = fewer_evaluated(plan, 10 * GIB + 1)
    assert (fix.what, fix.total, fix.saving) == ("train.eval_batch 32 -> 9", 10 * GIB, 23 * GIB)
    assert fewer_evaluated(plan, GIB) == [], "not even one row fits"
    assert fewer_evaluated(plan_of(3), 10 * GIB) == [], "training needs most"
    text = plan_text.refusal(
        plan,
        Advice([], [fix, Fix("train.micro_batch 8 -> 4", GIB, GIB)]),
        device_of("24GiB"),
        world=1,
    )
    assert "32 -> 9: 10.00 GiB in the generation (saves 23.00, fits)" in text
    assert "8 -> 4: 1.00 GiB in the training step" in text


def test_the_page_of_an_out_of_memory_error_sets_planned_against_actual() -> None:
    came = {"weights": GIB, "rest": 5 * GIB}
    text = plan_text.out_of_memory(plan_of(3), came, {"input_ids": [8, 512]}, "CUDA out of memory.")
    assert "weights             1.00      1.00" in text
    assert "rest                2.00      5.00" in text
    assert "the batch: input_ids 8x512" in text
    assert "planned for: input_ids 4x512" in text
    assert "softmax 4x8x512x512" in text


def test_an_out_of_memory_error_names_the_largest_batch_that_was_being_run() -> None:
    small, large = (
        {"input_ids": torch.zeros(rows, 512), "labels": torch.zeros(rows, 64)} for rows in (1, 4)
    )
    with (
        pytest.raises(torch.OutOfMemoryError) as caught,
        name_batch_when_out_of_memory([small, large]),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert batch_of(caught.value) == {"input_ids": [4, 512], "labels": [4, 64]}


def test_planned_and_measured_are_compared_in_percent() -> None:
    assert (
        plan_text.comparison(int(21.9 * GIB), int(22.4 * GIB))
        == "memory: planned 21.90, measured 22.40 GiB (-2.2%)"
    )


# The key "auto"
# --------------------------------------------------------------------------------------------------


def test_a_micro_batch_may_be_left_to_the_plan_but_not_be_nothing() -> None:
    block = {"steps": 1, "global_batch": 8}
    assert (
        validate(Train, block | {"micro_batch": "auto"}).micro_batch == 0
    )  # until a run has chosen
    with refused("value_wanted", key="micro_batch", wanted=re.compile("greater than 0.*"), value=0):
        validate(Train, block | {"micro_batch": 0})


# The tracker
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("build", "has_logits"), [("BertModel", False), ("BertLMHeadModel", True)])
def test_only_what_a_head_gives_over_a_vocabulary_is_called_logits(
    build: str, has_logits: bool
) -> None:
    """There are as many positions as the inner layer is wide."""
    config = transformers.BertConfig(
        vocab_size=99,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        is_decoder=has_logits,
    )
    tracker, model = Tracker("cpu"), getattr(transformers, build)(config)
    tracker.watch(model)
    inner = torch.zeros(2, 8, config.intermediate_size)
    logits = torch.zeros(2, 8, config.vocab_size)
    tracker.see([inner], torch.ops.aten.relu.default, [inner])
    assert tracker.live["logits"] == 0
    tracker.see([logits], torch.ops.aten.relu.default, [logits])
    assert tracker.live["logits"] == (BLOCK * -(-logits.nbytes // BLOCK) if has_logits else 0)


@pytest.mark.long  # it imports every model
def test_a_plan_imports_models_without_scipy_and_leaves_transformers_as_it_was() -> None:
    code = """
import sys
from pathlib import Path
from transformers import utils
from trainer.commands.plan import _import_models_without_scipy
before = utils.is_scipy_available
_import_models_without_scipy()
assert "transformers.loss.loss_for_object_detection" in sys.modules
assert "scipy.optimize" not in sys.modules
assert utils.is_scipy_available is before
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_step_is_measured_again_where_any_file_of_the_program_has_changed() -> None:
    names = {str(file.relative_to(measure.ROOT)) for file in measure.files_of_program()}
    assert {"trainer/plan/memory/measure.py", "trainer/models/head.py"} <= names
