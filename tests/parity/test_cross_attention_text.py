"""Recorded texts and token lists of the published system.

Its scores are compared in tests/unit/test_mergeable.py, its prompt strings in
tests/unit/test_templates.py.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.parity.cross_attention_recordings import SYSTEM
from tests.parity.recordings import files
from trainer.metrics.mergeable import cut_at
from trainer.tasks.cross_attention.text.fim import Sentinels, fill_in_the_middle

MARKS = {"postproc_X": ["</s>"], "postproc_tulu2": ["<|system|>", "<|user|>", "<|assistant|>"]}


def recorded(name: str) -> list[dict[str, Any]]:
    places = files(SYSTEM, f"text/{name}.json")
    if not places:
        pytest.skip(f"no text/{name}.json is recorded")
    return [case for path in places for case in json.loads(path.read_text(encoding="utf-8"))]


def test_every_recorded_answer_is_cut_where_it_was() -> None:
    for case in recorded("postproc"):
        for name, marks in MARKS.items():
            assert cut_at(case["raw"], marks) == case[name], case["raw"]


def test_every_recorded_text_has_its_parts_reordered_as_it_had() -> None:
    for case in recorded("fim"):
        sentinels = Sentinels(prefix=case["prefix"], middle=case["middle"], suffix=case["suffix"])
        random = np.random.RandomState(case["seed"])
        got = fill_in_the_middle(
            case["tokens"], sentinels, max_tokens=case["max_length"], random=random
        )
        assert got == case["out"], f"seed {case['seed']}"
