"""trainer/config/deepspeed_config/: what is refused, what is settled, and what the engine
gets.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.wording import Fault, fault, refused, says
from trainer.config import deepspeed_config as dc
from trainer.config.deepspeed_config.keys import REFUSED
from trainer.config.schema import Optim, Train
from trainer.errors import ConfigError

PRESETS = sorted(file.stem for file in dc.PRESETS.glob("*.json"))
OPTIM = Optim(lr=5e-4, betas=(0.9, 0.95), eps=1e-6, weight_decay=1e-3, clip=0.5)


def train(**changes: Any) -> Train:
    return Train(
        **{"steps": 10, "global_batch": 256, "micro_batch": 4, "precision": "bf16", **changes}
    )


def build(
    preset: dict[str, Any], *, world: int = 8, hidden_size: int | None = None, **changes: Any
) -> dict[str, Any]:
    return dc.build(
        preset,
        train=train(**changes),
        optim=OPTIM,
        world=world,
        source="mine.json",
        hidden_size=hidden_size,
    )


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def refusal(preset: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(preset, **changes)
    return str(caught.value)


def autos(value: Any, path: str = "") -> list[str]:
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in autos(item, f"{path}.{key}")]
    return [path] if value == "auto" else []


def preset(name: str, tmp_path: Path) -> dict[str, Any]:
    """A shipped file; the NVMe one with a folder that exists here."""
    return json.loads(json.dumps(dc.read(name)).replace("/local_nvme", str(tmp_path)))


# Reading


def test_a_name_is_a_file_of_ds_configs() -> None:
    assert dc.read("zero2")["zero_optimization"]["stage"] == 2


def test_a_path_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text('{"zero_optimization": {"stage": 1}}')
    assert dc.read(str(tmp_path / "own.json")) == zero(1)


def test_an_unknown_name_lists_the_legal_ones() -> None:
    with refused(
        "deepspeed_file_unknown",
        name="zero2_ofload",
        nearest="zero2_offload",
        choices=re.compile("zero0, zero1, zero2, "),
    ):
        dc.read("zero2_ofload")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", fault("deepspeed_file_unreadable", reason="Expecting property name")),
        ("[1]", fault("deepspeed_file_kind", kind="list")),
        (
            '{"bf16": {"enabled": true, "enabled": false}}',
            fault("deepspeed_file_unreadable", reason="stated twice in one block: enabled"),
        ),
        (
            '{"gradient_clipping": NaN}',
            fault("deepspeed_file_unreadable", reason="NaN is not a number"),
        ),
    ],
)
def test_a_broken_file_is_named_with_its_fault(tmp_path: Path, text: str, complaint: Fault) -> None:
    (tmp_path / "own.json").write_text(text)
    with refused(complaint, at="own.json") as caught:
        dc.read(str(tmp_path / "own.json"))
    assert "own.json" in str(caught.value)


# Names and types


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (
            {"gradient_acumulation_steps": 8},
            fault(
                "deepspeed_key_unknown",
                key="gradient_acumulation_steps",
                nearest="gradient_accumulation_steps",
            ),
        ),
        (
            {"zero_optimisation": {"stage": 3}},
            fault("deepspeed_key_unknown", key="zero_optimisation", nearest="zero_optimization"),
        ),
        (
            zero(2, stge=2),
            fault("deepspeed_key_unknown", key="zero_optimization.stge", nearest="stage"),
        ),
        (
            zero(3, offload_param={"devise": "cpu"}),
            fault("deepspeed_key_unknown", key="offload_param.devise", nearest="device"),
        ),
        (
            {"bf16": {"enable": True}},
            fault("deepspeed_key_unknown", key="bf16.enable", nearest="enabled"),
        ),
        (
            {"fp16": {"los_scale": 0}},
            fault("deepspeed_key_unknown", key="fp16.los_scale", nearest="loss_scale"),
        ),
        (
            {"optimizer": {"type": "AdamW", "param": {}}},
            fault("deepspeed_key_unknown", key="optimizer.param", nearest="params"),
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}},
            fault("deepspeed_key_unknown", key="optimizer.params.learning_rate"),
        ),
        (
            {"scheduler": {"type": "WarmupLR", "parms": {}}},
            fault("deepspeed_key_unknown", key="scheduler.parms", nearest="params"),
        ),
        (
            {"activation_checkpointing": {"profil": True}},
            fault(
                "deepspeed_key_unknown", key="activation_checkpointing.profil", nearest="profile"
            ),
        ),
        (
            {"checkpoint": {"tag_validaton": "Fail"}},
            fault(
                "deepspeed_key_unknown", key="checkpoint.tag_validaton", nearest="tag_validation"
            ),
        ),
        (
            {"data_types": {"grad_acum_dtype": "fp32"}},
            fault(
                "deepspeed_key_unknown",
                key="data_types.grad_acum_dtype",
                nearest="grad_accum_dtype",
            ),
        ),
        (
            {"comms_logger": {"enabld": True}},
            fault("deepspeed_key_unknown", key="comms_logger.enabld", nearest="enabled"),
        ),
        (
            {"flops_profiler": {"profile_stp": 1}},
            fault(
                "deepspeed_key_unknown", key="flops_profiler.profile_stp", nearest="profile_step"
            ),
        ),
        ({"csv_monitor": {"job": "x"}}, fault("deepspeed_key_unknown", key="csv_monitor.job")),
        ({"aio": {"thread_count": 1}}, fault("deepspeed_key_unknown", key="aio.thread_count")),
        (
            {"timers": {"throughput": {"sync": True}}},
            fault("deepspeed_key_unknown", key="timers.throughput.sync"),
        ),
        ({"stage": 3}, fault("deepspeed_key_place", place="into 'zero_optimization'")),
        (zero(2, gradient_clipping=1.0), fault("deepspeed_key_place", place="to the top level")),
        (
            zero(3, prefetch_bucket_size=1),
            fault(
                "deepspeed_key_unknown",
                key="prefetch_bucket_size",
                nearest="stage3_prefetch_bucket_size",
            ),
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_legal_one(
    wrong: dict[str, Any], complaint: Fault
) -> None:
    with refused(complaint):
        build(wrong)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_removed_or_unsupported_key_is_refused_with_the_reason(name: str) -> None:
    wrong: Any = {"enabled": True}
    for key in reversed(name.split(".")):
        wrong = {key: wrong}
    assert f"{name}: {REFUSED[name]}" in refusal(wrong)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (
            {"gradient_clipping": "1.0"},
            fault("deepspeed_value", key="gradient_clipping", value='"1.0"', wanted="a number"),
        ),
        (
            {"gradient_clipping": -1},
            fault(
                "deepspeed_value",
                key="gradient_clipping",
                value="-1",
                wanted="a number that is not negative",
            ),
        ),
        (
            {"gradient_clipping": True},
            fault("deepspeed_value", key="gradient_clipping", value="true", wanted="a number"),
        ),
        (
            {"gradient_accumulation_steps": 1.5},
            fault(
                "deepspeed_value",
                key="gradient_accumulation_steps",
                value="1.5",
                wanted="an integer",
            ),
        ),
        (
            {"gradient_accumulation_steps": 0},
            fault(
                "deepspeed_value",
                key="gradient_accumulation_steps",
                value="0",
                wanted="an integer above 0",
            ),
        ),
        (
            {"train_batch_size": 256.0},
            fault(
                "deepspeed_value",
                key="train_batch_size",
                value="256.0",
                wanted="an integer above 0",
            ),
        ),
        (
            {"zero_optimization": True},
            fault("deepspeed_value", key="zero_optimization", value="true", wanted="an object"),
        ),
        ({"zero_optimization": {}}, fault("key_required", key="zero_optimization.stage")),
        (
            zero(4),
            fault(
                "deepspeed_value", key="zero_optimization.stage", value="4", wanted="0, 1, 2 or 3"
            ),
        ),
        (
            {"zero_optimization": {"stage": "2"}},
            fault(
                "deepspeed_value", key="zero_optimization.stage", value='"2"', wanted="an integer"
            ),
        ),
        ({"bf16": True}, fault("deepspeed_value", key="bf16", value="true", wanted="an object")),
        (
            {"bf16": {"enabled": "yes"}},
            fault("deepspeed_value", key="bf16.enabled", value='"yes"', wanted="true or false"),
        ),
        (
            zero(2, reduce_bucket_size=0.5),
            fault("deepspeed_value", key="reduce_bucket_size", value="0.5", wanted="an integer"),
        ),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused(
    wrong: dict[str, Any], complaint: Fault
) -> None:
    says(complaint, refusal(wrong))


def test_an_integer_may_be_written_as_5e8() -> None:
    assert build(zero(2, reduce_bucket_size=5e8))["zero_optimization"]["reduce_bucket_size"] == 5e8


def test_every_mistake_is_named_at_once_with_the_file() -> None:
    text = refusal(
        {"amp": {}, "gradient_cliping": 1, "zero_optimization": {"stage": "auto", "stge": 1}}
    )
    says("mistakes", text, at="mine.json", count=4)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (
            {"managed_gradient_accumulation": True},
            fault("deepspeed_window", key="managed_gradient_accumulation"),
        ),
        ({"gradient_allreduce_op": "sum"}, fault("deepspeed_mean")),
        (zero(2, compute_grad_norm=False), fault("deepspeed_norm_watched")),
        (zero(1, legacy_stage1=True), fault("deepspeed_key_gone")),
        ({"compile": {"deepcompile": True}}, fault("deepspeed_window_of_compile")),
        ({"wandb": {"enabled": True}}, fault("deepspeed_wandb")),
    ],
)
def test_a_value_that_the_loop_cannot_live_with_is_refused(
    wrong: dict[str, Any], complaint: Fault
) -> None:
    says(complaint, refusal(wrong))


# "auto" and disagreement


def test_an_empty_file_becomes_a_complete_dictionary() -> None:
    assert build({}) == {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": 0},
    }


def test_the_published_file_of_the_cross_attention_runs_is_accepted() -> None:
    """ServiceNow/xc-cache, scripts/config/deepspeed_zero.json."""
    published = dc.read("zero2") | {"steps_per_print": 2000, "wall_clock_breakdown": False}
    assert build(published, precision="fp16")["fp16"]["hysteresis"] == 2


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_auto_is_left_in_a_shipped_file(name: str, precision: str, tmp_path: Path) -> None:
    if (name, precision) == ("zero0", "fp16"):
        text = refusal(preset(name, tmp_path), precision=precision)
        says("stage_of_fp16", text, stage=0)
        return
    config = build(preset(name, tmp_path), precision=precision)
    assert autos(config) == []
    assert dc.precision(config) == precision


def test_the_file_handed_in_is_not_changed() -> None:
    before = dc.read("zero2")
    after = copy.deepcopy(before)
    build(after)
    assert after == before


def test_optimizer_parameters_come_from_the_experiment() -> None:
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    config = build({"optimizer": {"type": "AdamW", "params": params}})
    assert config["optimizer"]["params"] == {
        "lr": 5e-4,
        "betas": [0.9, 0.95],
        "eps": 1e-6,
        "weight_decay": 1e-3,
    }


def test_bucket_sizes_follow_the_hidden_size() -> None:
    keys = (
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    )
    config = build(zero(3, **dict.fromkeys(keys, "auto")), hidden_size=1000)
    assert [config["zero_optimization"][key] for key in keys] == [1_000_000, 900_000, 10_000]


def test_an_auto_bucket_size_without_a_hidden_size_is_refused() -> None:
    text = refusal(zero(3, reduce_bucket_size="auto"))
    says("deepspeed_auto_of_hidden_size", text, key="zero_optimization.reduce_bucket_size")


def test_an_auto_of_stage_3_is_dropped_below_it() -> None:
    assert build(zero(2, stage3_prefetch_bucket_size="auto"))["zero_optimization"] == {"stage": 2}


def test_any_other_auto_is_refused_by_name() -> None:
    text = refusal(zero(2, overlap_comm="auto") | {"wall_clock_breakdown": "auto"})
    says("deepspeed_auto", text, key="zero_optimization.overlap_comm")
    assert 'wall_clock_breakdown="auto"' in text


def test_the_auto_of_deepspeed_itself_is_kept() -> None:
    kept = {"data_types": {"keep_in_fp32_modules": "auto"}}
    assert build(kept)["data_types"] == kept["data_types"]


@pytest.mark.parametrize(
    ("file", "theirs", "ours"),
    [
        ({"train_batch_size": 512}, "train_batch_size=512", "train.global_batch=256"),
        (
            {"train_micro_batch_size_per_gpu": 2},
            "train_micro_batch_size_per_gpu=2",
            "train.micro_batch=4",
        ),
        (
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps=2",
            "256 / (micro_batch=4 x world=8) = 8",
        ),
        ({"gradient_clipping": 1.0}, "gradient_clipping=1.0", "optim.clip=0.5"),
        ({"fp16": {"enabled": True}}, "fp16.enabled=true", "train.precision='bf16'"),
        ({"bf16": {"enabled": False}}, "bf16.enabled=false", "train.precision='bf16'"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}},
            "optimizer.params.lr=1.0",
            "optim.lr=0.0005",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.9]}}},
            "betas=[0.9, 0.9]",
            "optim.betas=[0.9, 0.95]",
        ),
    ],
)
def test_a_number_that_differs_is_refused_with_both_sources(
    file: dict[str, Any], theirs: str, ours: str
) -> None:
    says("deepspeed_differs", refusal(file), theirs=theirs, ours=re.compile(f".*{re.escape(ours)}"))


def test_both_half_precisions_at_once_are_refused() -> None:
    text = refusal({"bf16": {"enabled": True}, "fp16": {"enabled": True}})
    says("deepspeed_both_precisions", text, key="bf16.enabled", other="fp16.enabled")


@pytest.mark.parametrize(
    ("batch", "micro", "world", "fix"),
    [
        (30, 4, 8, "32 or 64, or another number of devices"),
        (40, 4, 8, "32 or 64, or micro_batch=1"),
        (48, 4, 8, "32 or 64, or micro_batch=3"),
        (100, 8, 2, "96 or 112, or micro_batch=5"),
    ],
)
def test_a_batch_that_does_not_divide_says_what_does(
    batch: int, micro: int, world: int, fix: str
) -> None:
    sizes = {"global_batch": batch, "micro_batch": micro, "world": world}
    says("batch_not_dealt", refusal({}, **sizes), rows=micro * world, fix=fix, **sizes)


# Optimizer, scheduler, offload


@pytest.mark.parametrize("name", ["Muon", "Lamb", "OneBitAdam", "Lion", "SGD", None])
def test_another_optimizer_is_refused(name: str | None) -> None:
    text = refusal({"optimizer": {} if name is None else {"type": name}})
    says("deepspeed_optimizer", text, value=json.dumps(name))


def test_adam_is_adamw_unless_it_says_otherwise() -> None:
    assert build({"optimizer": {"type": "Adam", "params": {"adam_w_mode": True}}})
    text = refusal({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}})
    says("deepspeed_l2_decay", text)


def test_a_scheduler_of_autos_is_dropped() -> None:
    params = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
    assert "scheduler" not in build({"scheduler": {"type": "WarmupLR", "params": params}})


@pytest.mark.parametrize("params", [{"warmup_num_steps": 100, "warmup_max_lr": "auto"}, {}])
def test_a_scheduler_that_states_something_is_refused(params: dict[str, Any]) -> None:
    says("deepspeed_schedule", refusal({"scheduler": {"type": "WarmupLR", "params": params}}))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (
            zero(2, offload_param={"device": "cpu"}),
            fault("deepspeed_stage", key="offload_param", wanted=3, stage=2),
        ),
        (
            zero(0, offload_optimizer={"device": "cpu"}),
            fault("deepspeed_stage", key="offload_optimizer", wanted=1, stage=0),
        ),
        (
            zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
            fault("deepspeed_stage_3", key="offload_optimizer.ratio=0.5", stage=2),
        ),
        (zero(2, offload_optimizer={"device": "disk"}), fault("offload_device", device="disk")),
        (
            zero(3, offload_param={"device": "nvme"}),
            fault("nvme_path_absent", key="offload_param", path=None),
        ),
        (
            zero(3, offload_optimizer={"device": "nvme", "nvme_path": "/no/such"}),
            fault("nvme_path_absent", key="offload_optimizer", path="/no/such"),
        ),
        (zero(1, overlap_comm=True), fault("stage_of_overlap", stage=1)),
    ],
)
def test_what_the_stage_cannot_do_is_refused(wrong: dict[str, Any], complaint: Fault) -> None:
    says(complaint, refusal(wrong))


def test_an_offload_to_none_is_legal_at_every_stage() -> None:
    off = {"device": "none"}
    assert build(zero(0, offload_param=off, offload_optimizer=off))


def test_gradients_of_another_dtype_are_refused_at_stage_0() -> None:
    wanted = {"data_types": {"grad_accum_dtype": "fp32"}}
    says("stage_of_gradient_dtype", refusal(wanted), dtype="fp32")
    assert build(wanted | zero(1))


# For the engine


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_engine_takes_one_step_per_window(stage: int) -> None:
    engine = dc.for_engine(
        build(zero(stage) | {"steps_per_print": 2000, "optimizer": {"type": "AdamW"}})
    )
    assert engine["managed_gradient_accumulation"] is False
    assert (engine["train_batch_size"], engine["gradient_accumulation_steps"]) == (32, 1)
    assert engine["zero_allow_untested_optimizer"] is True
    assert not {"steps_per_print", "optimizer", "scheduler"} & engine.keys()


def test_overlap_is_off_below_stage_2_and_untouched_from_there() -> None:
    assert [
        dc.for_engine(build(zero(s)))["zero_optimization"].get("overlap_comm") for s in range(4)
    ] == [
        False,
        False,
        None,
        None,
    ]
    assert (
        dc.for_engine(build(zero(2, overlap_comm=True)))["zero_optimization"]["overlap_comm"]
        is True
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_copies_no_gradients_into_buckets_that_it_would_send_to_nobody(stage: int) -> None:
    stated = zero(
        stage, contiguous_gradients=True, **({"overlap_comm": True} if stage == 2 else {})
    )
    alone = dc.for_engine(build(stated, world=1))["zero_optimization"]
    assert (alone["overlap_comm"], alone["contiguous_gradients"]) == (False, False)
    assert dc.for_engine(build(stated))["zero_optimization"]["contiguous_gradients"] is True
    offloaded = build(
        zero(stage, contiguous_gradients=True, offload_optimizer={"device": "cpu"}), world=1
    )
    assert dc.for_engine(offloaded)["zero_optimization"]["contiguous_gradients"] is True


@pytest.mark.parametrize(("stage", "dtype"), [(0, None), (1, "fp32"), (2, "fp32"), (3, "fp32")])
def test_bf16_gradients_accumulate_in_fp32_where_deepspeed_can(
    stage: int, dtype: str | None
) -> None:
    assert dc.for_engine(build(zero(stage))).get("data_types", {}).get("grad_accum_dtype") == dtype
    assert "data_types" not in dc.for_engine(build(zero(stage), precision="fp32"))


def test_a_stated_accumulation_dtype_is_kept() -> None:
    stated = zero(2) | {"data_types": {"grad_accum_dtype": "bf16"}}
    assert dc.for_engine(build(stated))["data_types"]["grad_accum_dtype"] == "bf16"


@pytest.mark.parametrize(
    ("stage", "precision", "clip"), [(0, "fp32", 0.0), (0, "bf16", 0.5), (1, "fp32", 0.5)]
)
def test_deepspeed_clips_except_in_fp32_at_stage_0(stage: int, precision: str, clip: float) -> None:
    assert dc.for_engine(build(zero(stage), precision=precision))["gradient_clipping"] == clip


def test_the_rewrite_leaves_the_built_dictionary_alone() -> None:
    built = build(dc.read("zero0"))
    before = copy.deepcopy(built)
    dc.for_engine(built)
    assert built == before


def test_the_summary_shows_the_batch_arithmetic_and_the_offload() -> None:
    lines = dict(dc.summary(build(dc.read("zero3_offload"))))
    assert lines["batch"] == "256 = 4 micro x 8 accumulation x 8 devices"
    assert lines["offload"] == "param to cpu, optimizer to cpu"
    assert lines["precision"] == "bf16"
    assert lines["ZeRO stage"].startswith("3 ")
    assert lines["clipping"] == "gradient norm at 0.5"


def test_a_secondary_partition_is_of_the_ranks_of_a_node() -> None:
    assert build(dc.read("zero3_hpz"))["zero_optimization"]["zero_hpz_partition_size"] == 8
    said = refusal(zero(3, zero_hpz_partition_size=3))
    says("hpz_of_ranks", said, key="zero_hpz_partition_size=3", world=8)
    said = refusal(zero(2, zero_hpz_partition_size=2))
    says("deepspeed_stage_3", said, key="zero_hpz_partition_size=2", stage=2)
