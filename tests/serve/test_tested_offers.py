"""Offers whose jobs score a test split: its file is the offer's, and no request brings one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from jobs.serve import offers
from service import TINY_CHAT
from tests.wording import refused


def _offering(folder: Path, test: str | None) -> Path:
    values: dict[str, Any] = copy.deepcopy(TINY_CHAT)
    if test is not None:
        values["data"]["files"] = {"test": test}
    path = folder / "offers.py"
    path.write_text(
        f"SERVICE = {{'models': {{'mine': {{'experiment': {values!r}, 'test': True}}}}}}"
    )
    return path


def test_a_test_split_is_a_file_of_the_offer_that_stays_in_the_dictionary(tmp_path: Path) -> None:
    path = str(tmp_path / "test.jsonl")
    (offer,) = offers.read(_offering(tmp_path, path)).models.values()
    request = offers.TuningRequest(num_rows=20, kind="chat", seed=0, label="x")
    assert offers.fill(offer, request).experiment["data"]["files"] == {"test": path}
    assert offers.read(None).models["tiny-chat"].test is False


@pytest.mark.parametrize("test", [None, "test.jsonl"])
def test_without_a_whole_path_it_is_refused(tmp_path: Path, test: str | None) -> None:
    with refused("test_of_no_file", file=test):
        offers.read(_offering(tmp_path, test))
