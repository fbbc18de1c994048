"""jobs/haven/library.py against the real haven-ai 0.7.3: its ids, its groups, its ResultManager."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exp_configs import EXP_GROUPS, cartesian_exp_group
from jobs.haven import library as haven
from tests.wording import refused
from trainer.config.identity import exp_id
from trainer.telemetry.run_record import RunRecord

ROOT = Path(__file__).resolve().parents[2]
HAS_HAVEN = importlib.util.find_spec("haven") is not None
needs_haven = pytest.mark.skipif(
    not HAS_HAVEN, reason="haven is an extra: pip install -e '.[haven]'"
)
EXPERIMENTS = [{"lr": 0.1, "model": {"name": "a"}}, {"lr": 0.2, "model": {"name": "a"}}]


@pytest.fixture(autouse=True)
def screenless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")


def havens(name: str) -> Any:
    """A module of haven itself, connected."""
    haven.connect()
    return importlib.import_module(f"haven.{name}")


def written(base: Path, values: dict[str, Any], *, loss: float) -> Path:
    """A run folder as the trainer leaves it."""
    folder = base / exp_id(values)
    folder.mkdir(parents=True)
    (folder / "exp_dict.json").write_text(json.dumps(values, indent=2, sort_keys=True))
    run = RunRecord(folder, total=20)
    run.score(10, **{"valid/loss": 2 * loss, "valid/accuracy": 0.1})
    run.score(20, **{"valid/loss": loss, "valid/accuracy": 0.2})
    run.close()
    return folder


# The id

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
KEYS = TEXT.filter(lambda key: "." not in key)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
LISTS = st.recursive(
    st.lists(SCALARS, max_size=4), lambda inner: st.lists(inner | SCALARS, max_size=3), max_leaves=8
)
BLOCKS = st.recursive(
    st.dictionaries(KEYS, SCALARS | LISTS, max_size=4),
    lambda inner: st.dictionaries(
        KEYS, inner | st.lists(inner, max_size=3) | SCALARS | LISTS, max_size=4
    ),
    max_leaves=12,
)


@needs_haven
@settings(max_examples=100, deadline=None)
@given(BLOCKS)
def test_our_id_is_havens(values: dict[str, Any]) -> None:
    assert exp_id(values) == haven.hash_dict(values)


@needs_haven
def test_the_id_of_every_group_is_havens() -> None:
    for experiments in EXP_GROUPS.values():
        for values in experiments:
            assert exp_id(values) == haven.hash_dict(values)


# Groups


@needs_haven
@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        TEXT, SCALARS | st.lists(SCALARS | LISTS, min_size=1, max_size=3) | BLOCKS, max_size=4
    )
)
def test_our_product_is_havens(form: dict[str, Any]) -> None:
    theirs = havens("haven_utils").cartesian_exp_group
    assert [list(each.items()) for each in cartesian_exp_group(form)] == [
        list(each.items()) for each in theirs(form)
    ]
    assert cartesian_exp_group(form, remove_none=True) == theirs(form, remove_none=True)


# Import


def test_to_import_our_module_does_not_import_haven() -> None:
    code = (
        "import sys, jobs.haven.library; print([name for name in sys.modules if "
        "name.startswith(('haven', 'pandas'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[]\n", done.stderr


@needs_haven
def test_haven_is_imported_under_this_setuptools_and_leaves_no_stub_behind() -> None:
    assert haven.hash_dict({}) == "d41d8cd98f00b204e9800998ecf8427e"
    assert getattr(sys.modules.get("pkg_resources"), "__file__", "none") is not None


@pytest.mark.long
@needs_haven
@pytest.mark.skipif(
    importlib.util.find_spec("pkg_resources") is None,
    reason="the extra `haven` installs setuptools below 82",
)
def test_haven_is_imported_by_itself_with_what_the_extra_installs() -> None:
    line = "import haven; from haven import haven_wizard; print(haven.__version__)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", line], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "0.7.3\n", done.stderr


def test_without_haven_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "haven", None)
    haven._load.cache_clear()
    with refused("extra_not_installed", name="haven", extra="haven"):
        haven.hash_dict({})


# Results


@needs_haven
def test_the_result_manager_reads_our_folders(tmp_path: Path) -> None:
    for values, loss in zip(EXPERIMENTS, (0.5, 0.25), strict=True):
        written(tmp_path, values, loss=loss)
    (tmp_path / "_jobs").mkdir()
    (tmp_path / "deleted").mkdir()
    table = haven.result_manager(tmp_path, verbose=False).get_score_df()
    assert sorted(
        zip(table["lr"].astype(float), table["valid/loss"].astype(float), strict=True)
    ) == [
        (0.1, 0.5),
        (0.2, 0.25),
    ]


@needs_haven
def test_a_table_of_results_does_not_move_the_time_zone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TZ", raising=False)
    before = time.strftime("%z")
    written(tmp_path, EXPERIMENTS[0], loss=0.5)
    table = haven.result_manager(tmp_path, verbose=False).get_score_df()
    assert "TZ" not in os.environ
    assert time.strftime("%z") == before
    assert time.strptime(table["started_at"].iloc[0], "%I:%M %p (%b %d)")
