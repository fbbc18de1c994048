"""trainer/config/schema.py and trainer/tasks/__init__.py: identity, strictness, and messages that
name everything at once.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wording import Fault, fault, refused, says
from trainer import tasks
from trainer.config.block import validate
from trainer.config.identity import digest, exp_id
from trainer.config.schema import Optim, Schedule, Train
from trainer.errors import ConfigError, nearest

EXPERIMENT: dict[str, Any] = {
    "task": "causal_lm",
    "base": "gpt2",
    "train": {"steps": 1, "global_batch": 1, "micro_batch": 1},
    "optim": {"lr": 1e-3},
    "data": {"source": "jsonl"},
}


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        tasks.parse({**EXPERIMENT, **changes})
    return str(caught.value)


# Identity


def md5(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("values", "hashed"),
    [
        ({"b": 2, "a": "x"}, "a/xb/2"),
        ({"a": {"c": 1.5}, "b": None}, f"a/{md5('c/1.5')}b/None"),
        ({"a": [1, "x", [2]]}, "a/[1, 'x', [2]]"),
        ({"a": [{"x": 1}, {"y": True}]}, f"a/{md5('x/1')}{md5('y/True')}"),
        ({"a": [], "b": {}}, f"a/[]b/{md5('')}"),
    ],
)
def test_an_id_is_the_md5_of_keys_and_values_as_haven_joins_them(
    values: dict[str, Any], hashed: str
) -> None:
    assert exp_id(values) == md5(hashed)


def test_an_id_does_not_depend_on_the_order_of_keys() -> None:
    assert exp_id({"a": 1, "b": {"c": 2, "d": 3}}) == exp_id({"b": {"d": 3, "c": 2}, "a": 1})


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner.filter(lambda item: not isinstance(item, dict)), max_size=3)
        | st.dictionaries(st.text(alphabet="abc_", min_size=1, max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(alphabet="abc_", min_size=1, max_size=4), JSON_VALUES, max_size=4))
def test_an_id_survives_a_json_round_trip(values: dict[str, Any]) -> None:
    assert exp_id(json.loads(json.dumps(values))) == exp_id(values)


def test_a_numpy_number_in_a_list_has_the_id_of_the_number() -> None:
    assert exp_id({"betas": [np.float64(0.1)]}) == exp_id({"betas": [0.1]})


def test_an_id_is_the_same_in_another_process() -> None:
    code = f"from trainer.config.identity import exp_id; print(exp_id({EXPERIMENT!r}))"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == exp_id(EXPERIMENT)


class Odd(str, enum.Enum):
    TASK = "fid"


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"a": (1, 2)}, fault("value_not_json", key="a", kind="tuple", value=(1, 2), fix="a list")),
        (
            {"b": {"a": [{1: 2}]}},
            fault("key_not_text", key=1, place="b.a[0]", kind="int", text="1"),
        ),
        ({"a": [float("nan")]}, fault("value_not_finite", key="a[0]", value="nan")),
        ({"a": {1, 2}}, fault("value_not_json", key="a", kind="set", value={1, 2}, fix="a list")),
        (
            {"a": Path("x")},
            fault(
                "value_not_json",
                key="a",
                kind="PosixPath",
                value="PosixPath('x')",
                fix="its text: 'x'.",
            ),
        ),
        ({"a": (1,), "b": {2: 3}}, fault("mistakes", count=2)),
        ({"a": {"b.c": 1}}, fault("key_with_dot", key="b.c")),
        ({"a": [{"b": 1}, 2]}, fault("list_mixed", key="a")),
    ],
)
def test_what_json_or_haven_cannot_hold_has_no_id(values: dict[str, Any], complaint: Fault) -> None:
    with refused(complaint):
        exp_id(values)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"a": Odd.TASK}, fault("value_enum", key="a", plain="fid")),
        ({"a": {Odd.TASK: 1}}, fault("key_enum", place="a", plain="fid")),
        ({"a": [Number.ONE]}, fault("value_enum", key="a[0]", plain=1)),
        ({"a": ["x\ud800"]}, fault("value_half_pair", key="a[0]", value="x\ud800")),
        ({"a": {"\udc00": 1}}, fault("key_half_pair", key="\udc00", place="a")),
    ],
)
def test_odd_text_has_no_id(values: dict[str, Any], complaint: Fault) -> None:
    with refused(complaint):
        exp_id(values)


def test_the_digest_tells_apart_what_the_id_confuses() -> None:
    one, other = {"a": "1b/2"}, {"a": "1", "b": "2"}
    assert exp_id(one) == exp_id(other)
    assert digest(one) != digest(other)


# Strictness


def test_a_minimal_experiment_gets_its_defaults() -> None:
    cfg = tasks.parse(EXPERIMENT)
    assert (cfg.optim.betas, cfg.optim.clip, cfg.train.seed, cfg.deepspeed) == (
        (0.9, 0.999),
        1.0,
        42,
        "zero2",
    )
    assert cfg.tokenizer is None


@pytest.mark.parametrize(("is_on", "wanted"), [(True, 2), (False, False)])
def test_an_older_key_of_fid_says_which_blocks_are_computed_again(
    *, is_on: bool, wanted: bool | int
) -> None:
    train = {**EXPERIMENT["train"], "gradient_checkpointing": is_on}
    values = {
        **EXPERIMENT,
        "task": "fid",
        "train": train,
        "data": {"source": "lookup", "contexts": 1},
    }
    cfg = tasks.parse({**values, "reader": {"checkpoint_every": 2}})
    assert cfg.train.gradient_checkpointing == wanted


def test_an_experiment_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        tasks.parse(EXPERIMENT).train.steps = 2


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        (
            {"steps": "1"},
            fault("value_wanted", key="train.steps", wanted="a valid integer", value="1"),
        ),
        (
            {"steps": 1.5},
            fault("value_wanted", key="train.steps", wanted="a valid integer", value=1.5),
        ),
        (
            {"steps": True},
            fault("value_wanted", key="train.steps", wanted="a valid integer", value=True),
        ),
        ({"steps": 0}, fault("value_wanted", key="train.steps", wanted="greater than 0", value=0)),
        (
            {"precision": "int8"},
            fault(
                "value_wanted",
                key="train.precision",
                wanted="'fp32', 'bf16' or 'fp16'",
                value="int8",
            ),
        ),
        (
            {"gradient_checkpointing": 0},
            fault(
                "value_wanted",
                key="train.gradient_checkpointing",
                wanted='true, false, "auto" or an integer above 0',
                value=0,
            ),
        ),
    ],
)
def test_values_are_not_coerced(block: dict[str, Any], complaint: Fault) -> None:
    says(complaint, refusal(train={**EXPERIMENT["train"], **block}))


def test_a_whole_number_is_a_fine_learning_rate() -> None:
    assert validate(Optim, {"lr": 1}).lr == 1.0


@pytest.mark.parametrize("lr", [0, -1e-3, float("nan"), float("inf")])
def test_a_learning_rate_is_a_finite_number_above_zero(lr: float) -> None:
    says("value_wanted", refusal(optim={"lr": lr}), key="optim.lr", value=lr)


def test_a_seed_is_one_that_torch_takes() -> None:
    train = {**EXPERIMENT["train"], "seed": 2**63}
    says("value_wanted", refusal(train=train), key="train.seed", value=2**63)


def test_two_warm_ups_are_refused_with_both_values() -> None:
    with refused("both_set", key="warmup_steps", value=10, other="warmup_ratio", other_value=0.1):
        validate(Schedule, {"warmup_steps": 10, "warmup_ratio": 0.1})


@pytest.mark.parametrize(
    "base", ["gpt2", {"config": {"model_type": "gpt2"}}, {"experiment": {"task": "causal_lm"}}]
)
def test_a_base_is_a_name_or_random_weights_or_another_experiment(base: Any) -> None:
    assert tasks.parse({**EXPERIMENT, "base": base}).model_dump(mode="json")["base"] == (
        {**base, "seed": 0}
        if "config" in base
        else {**base, "adapted": None, "model": "final", "sha256": None}
        if "experiment" in base
        else base
    )


# Messages


def test_a_misspelt_key_gets_the_nearest_legal_one() -> None:
    text = refusal(train={**EXPERIMENT["train"], "micro_batc": 2})
    says("key_unknown", text, key="train.micro_batc", nearest="micro_batch")


def test_a_misspelt_key_at_the_top_level_gets_the_nearest_legal_one() -> None:
    says("key_unknown", refusal(deepsped="zero3"), key="deepsped", nearest="deepspeed")


def test_a_misspelt_key_inside_a_union_gets_the_nearest_legal_one() -> None:
    text = refusal(tokenizer={"vocabsize": 500})
    says("key_unknown", text, key="tokenizer.vocabsize", nearest="vocab_size")


@pytest.mark.parametrize(
    ("value", "near"),
    [("bfloat16", "bf16"), ("torch.bfloat16", "bf16"), ("float16", "fp16"), ("FP32", "fp32")],
)
def test_a_misspelt_value_gets_the_nearest_legal_one(value: str, near: str) -> None:
    text = refusal(train={**EXPERIMENT["train"], "precision": value})
    says("value_near", text, key="train.precision", value=value, near=near)


def test_a_key_like_no_other_gets_the_legal_ones() -> None:
    legal = re.compile("chat_template, columns, dataset, facts, files, format, loss_on, .*")
    says("key_unknown", refusal(data={"source": "nq", "zzz": 1}), key="data.zzz", legal=legal)


def test_a_missing_key_is_named() -> None:
    says("key_required", refusal(optim={}), key="optim.lr")


def test_every_mistake_is_named_at_once_with_its_source() -> None:
    wrong = {**EXPERIMENT, "optim": {"lr": "x", "beta": 1}, "train": {"steps": 0}}
    with pytest.raises(ConfigError) as caught:
        tasks.parse(wrong, source="group mine")
    lines = str(caught.value).splitlines()
    says("mistakes", lines[0], at="group mine", count=5)
    assert sorted(line.split(":")[0].strip() for line in lines[1:]) == [
        "optim.beta",
        "optim.lr",
        "train.global_batch",
        "train.micro_batch",
        "train.steps",
    ]


def test_a_value_that_json_cannot_hold_is_refused() -> None:
    says("value_not_serializable", refusal(optim={"lr": {1, 2}}))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("sead", "Did you mean 'seed'?"), ("qqq", "Legal: seed, steps."), ("", "Legal: seed, steps.")],
)
def test_nearest_suggests_one_spelling_or_lists_all(name: str, sentence: str) -> None:
    assert nearest(name, ["seed", "steps"]) == sentence


def test_of_very_many_legal_names_the_first_are_listed() -> None:
    sentence = nearest("zzz", [f"name{number}" for number in range(600)])
    assert sentence.startswith("Legal: name0, name1, ")
    assert sentence.endswith("name59 and 540 more.")


# Tasks


def test_a_task_is_a_folder_with_a_config() -> None:
    folder = Path(tasks.__file__).parent
    assert tasks.names() == sorted(config.parent.name for config in folder.glob("*/config.py"))


def test_an_unknown_task_gets_the_nearest_name() -> None:
    says("task_unknown", refusal(task="causal_ln"), task="causal_ln", nearest="causal_lm")


@pytest.mark.parametrize("name", [None, 3, ["causal_lm"], "../causal_lm"])
def test_a_task_that_is_no_name_is_refused(name: Any) -> None:
    says("task_unknown", refusal(task=name), task=name)


def test_a_missing_task_is_refused() -> None:
    with refused("task_unknown", task=None):
        tasks.parse({})


def test_train_has_no_key_for_the_number_of_devices() -> None:
    """The world size changes accumulation only: it must never enter an id."""
    assert not {"world", "devices", "accumulation", "gpus"} & Train.model_fields.keys()
