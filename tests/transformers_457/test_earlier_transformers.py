"""Exports of every family and task compute in transformers 4.57 what they compute in today's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.facts import write_facts
from tests.transformers_457 import exports

BOUND = 1e-5  # of the largest number, or of 1; fp32


@pytest.mark.long
@pytest.mark.timeout(2400)  # 75 runs of two steps, and an environment to be made
def test_every_export_computes_in_transformers_457_what_it_computes_here(tmp_path: Path) -> None:
    folder = write_facts(tmp_path / "facts")
    values = exports.experiments(folder)
    found: dict[str, tuple[float, str]] = {
        name: exports.difference(today, earlier)
        for name, (today, earlier) in exports.sides(values, folder, tmp_path / "runs").items()
    }
    for name, (largest, of) in found.items():
        print(f"{name:45} {largest:.1e} {of}")
    far: dict[str, Any] = {name: one for name, one in found.items() if not one[0] <= BOUND}
    assert not far
    assert len(found) == len(values)
    largest, name = max((one[0], name) for name, one in found.items())
    print(
        f"SHOW {len(found)} exports in transformers 4.57: largest difference {largest:.1e} ({name})"
    )
