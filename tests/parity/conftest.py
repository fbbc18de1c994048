"""Runs every parity test of cross-attention on every recorded case of its kind; without one, the
tests skip and say why.
"""

from __future__ import annotations

import pytest

from tests.parity.cross_attention_recordings import SYSTEM, base_folders, recorded_cases
from tests.parity.recordings import params

KINDS = ("forward", "generation", "training")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for kind in KINDS:
        if f"{kind}_case" in metafunc.fixturenames:
            entries = [entry for entry in recorded_cases() if entry.case.kind == kind]
            cases = params(entries, f"{kind} case", SYSTEM)
            metafunc.parametrize(f"{kind}_case", cases, scope="module")
    if "base_folder" in metafunc.fixturenames:
        bases = params(base_folders(), "base_*/base_io.safetensors", SYSTEM)
        metafunc.parametrize("base_folder", bases)
