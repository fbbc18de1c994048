"""Runs every parity test on every recorded case of its kind; without the recordings, the tests skip
and say why.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.recorded import ROOT, recorded_cases

KINDS = ("forward", "generation", "training")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for kind in KINDS:
        if f"{kind}_case" in metafunc.fixturenames:
            metafunc.parametrize(f"{kind}_case", _cases(kind), scope="module")
    if "base_folder" in metafunc.fixturenames:
        folders = [path.parent for path in sorted(ROOT.glob("base_*/base_io.safetensors"))]
        found = [pytest.param(folder, id=folder.name) for folder in folders]
        metafunc.parametrize("base_folder", found or [_absent("base_*/base_io.safetensors")])


def _cases(kind: str) -> list[Any]:
    found: list[Any] = []
    for case in recorded_cases():
        if case.kind == kind:
            found.append(pytest.param(case, id=case.folder.name))
    return found or [_absent(f"recorded {kind} case")]


def _absent(what: str) -> Any:
    reason = f"no {what} in $LATHE_PARITY/cross_attention (default ../shared/parity)"
    return pytest.param(None, id="absent", marks=pytest.mark.skip(reason=reason))
