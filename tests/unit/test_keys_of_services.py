"""A key of a service in the wrong place is refused, and no message shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exp_configs import EXP_GROUPS
from tests.wording import refused
from trainer import tasks
from trainer.config.groups import vary
from trainer.training.options import Options

(TINY,) = EXP_GROUPS["causal_lm_tiny"]
# Assembled, so that no scanner takes them for keys that were lost here.
KEYS = [
    "hf" + "_" + "aB3" * 12,
    "sk" + "-proj-" + "aB3_" * 10,
    "wandb" + "_v1_" + "aB3" * 12,
    "gh" + "p_" + "aB3" * 12,
    "AK" + "IA" + "AB34" * 4,
]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("place", ["base", "data.files.train"])
def test_a_key_among_the_values_is_refused_by_its_place(place: str, key: str) -> None:
    values = vary(TINY, base=key)
    if place != "base":
        values = vary(TINY, data={"files": {"train": f"{key}/train.jsonl"}})
    with refused("secret_in_dictionary", place=place) as caught:
        tasks.parse(values)
    assert key not in str(caught.value)


@pytest.mark.parametrize("name", ["api_key", "WANDB_API_KEY", "openai_apikey", "password"])
def test_a_name_that_a_key_has_is_told_where_it_belongs(name: str) -> None:
    with refused("secret_name", name=name) as caught:
        tasks.parse({**TINY, name: "0123456789abcdef"})
    assert "0123456789abcdef" not in str(caught.value)


@pytest.mark.parametrize(
    "value", ["sk-learn-model-of-a-long-name-without-end", "hf_models/t5", "a" * 40]
)
def test_a_name_that_only_begins_like_a_key_is_a_name(value: str) -> None:
    assert tasks.parse({**TINY, "base": value, "tokenizer": None}).task == "causal_lm"


@pytest.mark.parametrize("flag", ["entity", "project"])
@pytest.mark.parametrize("key", ["0123456789abcdef" * 2 + "5ec2e7ed", KEYS[2]])
def test_a_key_for_a_name_of_wandb_is_refused(flag: str, key: str, tmp_path: Path) -> None:
    flags: dict[str, Any] = {f"wandb_{flag}_name": key}
    with refused("wandb_key_for_name", flag=flag) as caught:
        Options(tmp_path, **flags)
    assert key not in str(caught.value)
