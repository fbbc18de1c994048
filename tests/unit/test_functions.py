"""What `from trainer import ...` gives without training: arguments, tables, pictures, and folders that
are no run.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

import trainer
from exp_configs import EXP_GROUPS
from tests.test_layers import heavy_after
from tests.wording import Fault, fault, refused
from trainer import fine_tune, load, submit
from trainer.api.arguments import run_flags
from trainer.api.table import Table
from trainer.config.flags import RUN_FLAGS, RunFlags

ONE: dict[str, Any] = EXP_GROUPS["causal_lm_tiny"][0]
LINES = [
    {"step": 1, "loss": 5.5, "lr": 1e-4, "proof": "ab", "seal": "cd"},
    {"step": 1, "grad_norm/head.weight": 0.5, "seal": "ce"},
    {"step": 2, "loss": 5.0, "lr": 2e-4, "seal": "cf"},
    {"step": 2, "valid/loss": 5.25, "valid/em": 0.5, "seal": "d0"},
]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run of two steps whose third line is being written."""
    folder = tmp_path / "results" / "a"
    folder.mkdir(parents=True)
    (folder / "exp_dict.json").write_text(json.dumps(ONE))
    (folder / "status.json").write_text(json.dumps({"state": "running", "step": 2, "total": 60}))
    whole = "".join(json.dumps(line) + "\n" for line in LINES)
    (folder / "metrics.jsonl").write_text(whole + '{"step": 3, "lo')
    return folder


def test_the_names_are_there_without_torch_and_no_room_hides_a_function() -> None:
    code = """
from trainer import fine_tune, load, plan, submit
found["names"] = heavy()
from trainer.plan.memory import plan_text
import trainer
assert trainer.plan is plan and callable(plan) and plan_text.page
assert {"fine_tune", "load", "plan", "submit"} <= set(trainer.__all__)
"""
    assert heavy_after(code) == {"names": []}


def test_a_name_that_is_not_there_is_no_attribute() -> None:
    assert not hasattr(trainer, "fine_tuna")


# Arguments


def test_flags_of_the_command_are_arguments_and_data_is_the_folder() -> None:
    flags = run_flags("data", {"log_every": 5, "cache_dir": "cache", "strict": True})
    assert flags == RunFlags(
        data_path=Path("data"), log_every=5, cache_dir=Path("cache"), strict=True
    )
    assert set(vars(flags)) == set(RUN_FLAGS)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"log_evry": 5}, fault("argument_unknown", name="log_evry", nearest="log_every")),
        ({"data_path": "x"}, fault("argument_unknown", name="data_path", nearest="data")),
        ({"log_every": "5"}, fault("argument_kind", name="log_every", value="5", kind="int")),
        ({"log_every": 0}, fault("argument_least", name="log_every", value=0, least=1)),
        ({"strict": 1}, fault("argument_kind", name="strict", value=1, kind="bool")),
        ({"cache_dir": 3}, fault("argument_path", name="cache_dir", value=3)),
    ],
)
def test_an_argument_that_is_no_flag_is_refused_by_its_name(
    flags: dict[str, Any], why: Fault
) -> None:
    with refused(why):
        run_flags(None, flags)


def test_every_wrong_argument_is_told_at_once() -> None:
    with refused("argument_least", name="log_every", value=0, least=1) as caught:
        run_flags(None, {"log_every": 0, "forse": True})
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("values", ["mine.py", [ONE], None])
def test_what_is_no_dictionary_is_refused(values: Any) -> None:
    with refused("experiment_wanted", kind=type(values).__name__):
        fine_tune(values)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, "2", True])
def test_a_number_of_ranks_is_a_count(ranks: Any) -> None:
    with refused("count_wanted", name="ranks", value=ranks):
        fine_tune(ONE, ranks=ranks)


def test_under_a_launcher_and_in_another_thread_nothing_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caught: list[BaseException] = []

    def call() -> None:
        try:
            fine_tune(ONE, savedir_base=tmp_path / "runs")
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    with refused("thread_of_api"):
        raise caught[0]
    monkeypatch.setenv("RANK", "0")
    with refused("launcher_of_api", names="RANK"):
        fine_tune(ONE, savedir_base=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("experiments", [[], ONE, "mine.py"])
def test_a_submission_wants_a_list(experiments: Any) -> None:
    with refused("list_of_experiments"):
        submit(experiments, backend="local")


# A run


def test_a_run_tells_its_numbers_a_row_for_each_step(run_folder: Path) -> None:
    run = load(run_folder)
    assert run.metrics() == [
        {"step": 1, "loss": 5.5, "lr": 1e-4},
        {"step": 2, "loss": 5.0, "lr": 2e-4, "valid/loss": 5.25, "valid/em": 0.5},
    ]
    assert run.values == ONE
    assert repr(run) == f"<Run {run_folder}: causal_lm, running, step 2>"


def test_a_run_is_drawn_with_a_place_for_each_score(run_folder: Path) -> None:
    figure = load(run_folder).plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "valid/em"]
    losses, scores = figure.axes
    assert [line.get_label() for line in losses.get_lines()] == ["loss", "valid/loss"]
    (curve,) = scores.get_lines()
    assert [float(number) for number in curve.get_xydata().ravel()] == [2, 0.5]  # pyright: ignore
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_run_without_a_line_has_nothing_to_draw(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").write_text("")
    run = load(run_folder)
    assert run.metrics() == []
    with refused("nothing_to_draw", at=run_folder / "metrics.jsonl"):
        run.plot()
    (run_folder / "metrics.jsonl").unlink()
    with refused("metrics_absent", folder=run_folder):
        run.metrics()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with refused("run_folder_absent", folder=tmp_path / "absent"):
        load(tmp_path / "absent")
    with refused("model_folder_absent"):
        load(tmp_path)


# A table


def test_a_table_is_a_list_of_dictionaries_that_a_notebook_shows() -> None:
    table = Table([{"step": 1, "loss": 2.5}, {"step": 2, "note": "<b>"}])
    assert table == [{"step": 1, "loss": 2.5}, {"step": 2, "note": "<b>"}]
    assert table.columns == ["step", "loss", "note"]
    assert table._repr_html_() == (
        "<table><thead><tr><th>step</th><th>loss</th><th>note</th></tr></thead><tbody>"
        "<tr><td>1</td><td>2.5000</td><td></td></tr>"
        "<tr><td>2</td><td></td><td>&lt;b&gt;</td></tr></tbody></table>"
    )


def test_of_a_long_table_the_middle_is_not_shown() -> None:
    shown = Table({"step": step} for step in range(1000))._repr_html_()
    assert shown.count("<tr>") == 1 + 20 + 1 + 20
    assert "960 more rows" in shown
    assert "<td>19</td>" in shown
    assert "<td>20</td>" not in shown
    assert "<td>980</td>" in shown
