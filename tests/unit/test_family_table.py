"""The table of families holds what transformers and the documents call them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from tests.bases import OF_TASK
from trainer.models.families import FAMILIES, SUMMARISERS, Family

PAGE = Path(__file__).resolve().parents[2] / "docs" / "bases.md"
every_row = pytest.mark.parametrize("row", FAMILIES.values(), ids=FAMILIES)


@every_row
def test_every_class_and_key_of_a_row_is_in_transformers(row: Family) -> None:
    config = CONFIG_MAPPING[row.model_type]()
    package = type(config).__module__.rpartition(".")[0]
    modeling = import_module(f"{package}.modeling_{package.rpartition('.')[2]}")
    rotation = "apply_rotary_pos_emb" if row.turns_halves else None
    for name in (row.rms_norm, row.upcast_norm, row.feed_forward, row.gated, rotation):
        assert name is None or hasattr(modeling, name)
    assert row.scale_key is None or hasattr(config, row.scale_key)


@every_row
def test_every_row_is_tried_on_a_tiny_base_and_named_in_the_documents(row: Family) -> None:
    families = {model_type for bases in OF_TASK.values() for model_type, _ in bases.values()}
    assert row.model_type in families, "add it to tests/bases.py"
    assert row.name in PAGE.read_text(), "name it in docs/bases.md"


def test_summariser_is_tried_on_every_family_that_it_takes() -> None:
    assert {model_type for model_type, _ in OF_TASK["summariser"].values()} == set(SUMMARISERS)
