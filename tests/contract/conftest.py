"""What the tests of the contract share: the facts, and the table of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.runs import Runs
from tests.facts import write_facts


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The facts that every task of the contract learns."""
    return write_facts(tmp_path_factory.mktemp("facts"))


@pytest.fixture(scope="session")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The table of this session."""
    return Runs(folder, tmp_path_factory.mktemp("runs"))
