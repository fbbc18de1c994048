"""Metrics of a user's own: found, tried, kept with the run, and never its end."""

from __future__ import annotations

import hashlib
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.wording import refused
from trainer.config.schema import Experiment
from trainer.errors import ConfigError
from trainer.metrics import own

ROWS: list[dict[str, Any]] = [
    {"question": "a", "answers": ["b", "c"], "dataset": "nq"},
    {"question": "d", "answers": []},
]
GOOD = """
def style(predictions, references, rows):
    rows[0]["answers"].clear()
    references.clear()
    return {"rows": len(rows), "letters": sum(map(len, predictions))}

def other(predictions, references, rows):
    return {"rows": 1}
"""


def loaded(folder: Path, text: str, name: str = "style") -> list[own.OwnMetric]:
    (folder / "mine.py").write_text(text)
    return own.load([f"{folder}/mine.py:{name}"], None)


def test_a_metric_gets_every_row_and_copies_of_them(tmp_path: Path) -> None:
    metrics = own.try_out(loaded(tmp_path, GOOD), ROWS)
    assert metrics[0].names == ("style/rows", "style/letters")
    assert own.scores(metrics, ["xy", "z"], ROWS) == {"style/rows": 2.0, "style/letters": 3.0}
    assert ROWS[0]["answers"] == ["b", "c"]


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        ("'text'", "returned 'text'"),
        ("{'a': 'text'}", "returned 'a': 'text'"),
        ("{'a': float('nan')}", "returned 'a': nan"),
        ("{'a': float('inf')}", "returned 'a': inf"),
        ("{'a': True}", "returned 'a': True"),
        ("{1: 2.0}", "returned 1: 2.0"),
        ("{}", "returned no number"),
        ("None", "returned None"),
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
        ("exit(3)", "raised SystemExit: 3"),
    ],
)
def test_what_is_no_number_is_refused_when_tried_and_told_later(
    returned: str, what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = loaded(
        tmp_path, f"def style(predictions, references, rows):\n    return {returned}\n"
    )
    with refused("own_metric_fails", spec=metrics[0].spec, what=what):
        own.try_out(metrics, ROWS)
    known = [own.OwnMetric(metrics[0].spec, metrics[0].function, ("style/a",))]
    with caplog.at_level(logging.WARNING):
        found = own.scores(known, ["x", "y"], ROWS)
    assert math.isnan(found["style/a"])
    assert metrics[0].spec in caplog.text
    assert what in caplog.text


def test_a_file_or_a_function_that_is_not_there_is_named(tmp_path: Path) -> None:
    with refused("own_metric_absent", path=tmp_path / "none.py"):
        own.load([f"{tmp_path}/none.py:style"], None)
    with refused("own_metric_undefined", name="styl", nearest="style"):
        loaded(tmp_path, GOOD, "styl")
    with refused("own_metric_unreadable", path=tmp_path / "mine.py", line=1):
        loaded(tmp_path, "def style(:\n")
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, "import no_such_module\nstyle = no_such_module.style\n")
    assert "mine.py:1: ModuleNotFoundError" in str(caught.value)


def test_a_run_goes_on_with_its_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, path = tmp_path / "run", tmp_path / "mine.py"
    path.write_text(GOOD)
    specs = [f"{path}:style", f"{path}:other"]
    own.keep(specs, run)
    own.keep(specs, run)
    assert not caplog.messages
    digest = hashlib.sha256(GOOD.encode()).hexdigest()
    assert own.digests(specs, run) == {"mine.py": digest}
    path.write_text("def style(predictions, references, rows):\n    return {'new': 1}\n")
    own.keep(specs[:1], run)
    assert f"{path} has changed since the run began" in caplog.text
    assert own.digests(specs, run) == {"mine.py": digest}
    assert own.try_out(own.load(specs, run), ROWS)[0].names == ("style/rows", "style/letters")
    path.unlink()
    assert not list(own.problems(specs, run)), "a job may run where the file is not"


@pytest.mark.parametrize(
    ("metrics", "is_good"),
    [
        ("mine.py:style", True),
        (["mine.py:a", "mine.py:b", "other.py:c"], True),
        ("mine.py", False),
        ("mine.txt:style", False),
        ([], False),
        (3, False),
        (["mine.py:a", "other.py:a"], False),
        (["one/mine.py:a", "two/mine.py:b"], False),
    ],
)
def test_the_dictionary_names_files_and_functions(metrics: Any, is_good: bool) -> None:
    values: dict[str, Any] = {
        "task": "t",
        "base": "b",
        "train": {"steps": 1, "global_batch": 1, "micro_batch": 1},
        "optim": {"lr": 1e-3},
        "metrics": metrics,
    }
    if is_good:
        assert len(Experiment.model_validate(values).own_metrics) in (1, 3)
    else:
        with pytest.raises(ValidationError):
            Experiment.model_validate(values)
