"""Every golden file says with what it was made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import golden_files
from tests.golden_files import GOLDEN, MADE_WITH, made_with, write_if_told

FILES = sorted(GOLDEN.glob("*.json"))


def test_there_are_golden_files() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_golden_file_says_versions_processor_threads_and_reason(path: Path) -> None:
    said = json.loads(path.read_text()).get("made_with", {})
    assert set(MADE_WITH) <= said.keys(), "`unknown` stands for what is not known"
    assert all(said[name] not in ("", None) for name in MADE_WITH)


def test_what_writes_golden_files_says_it_too() -> None:
    said = made_with("a reason")
    assert tuple(said) == MADE_WITH
    assert said["reason"] == "a reason"
    assert made_with("1")["reason"] == "unknown"


def test_a_golden_file_is_written_with_what_it_was_made_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden_files, "GOLDEN", tmp_path)
    monkeypatch.delenv(golden_files.WRITES, raising=False)
    write_if_told("t", losses=[1.0])
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(golden_files.WRITES, "a new task")
    write_if_told("t", trainable=["a"])
    write_if_told("t", losses=[1.0])
    written = json.loads((tmp_path / "t.json").read_text())
    assert written == {"made_with": made_with("a new task"), "trainable": ["a"], "losses": [1.0]}
