"""Metrics of statements: each against a slow, obvious twin, and the cases where the published
definitions are odd.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve

from tests.wording import refused
from trainer.tasks.vera.calibration import scores_of
from trainer.tasks.vera.metrics import Kind, Part, best_rows, statement_metrics

ROOT = Path(__file__).resolve().parents[2]
TASKS = ["copa", "creak", "swag", "codah"]
KINDS: dict[str, Kind] = {
    "copa": "multiple_choice",
    "creak": "boolean",
    "swag": "multiple_choice",
    "codah": "multiple_choice",
}
PARTS: dict[str, Part] = {"copa": "unseen1", "creak": "unseen2", "swag": "seen", "codah": "seen"}
MEMBERS = {
    "mean": TASKS,
    "all": TASKS,
    "seen": ["swag", "codah"],
    "unseen": ["copa", "creak"],
    "unseen1": ["copa"],
    "unseen2": ["creak"],
    **{task: [task] for task in TASKS},
}
few = settings(max_examples=12, deadline=None)  # a table takes a tenth of a second
Table = list[tuple[int, int, int, float, int]]

logits = st.one_of(
    st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0]), st.floats(-20, 20, width=32)
)
problems = st.tuples(st.integers(0, 3), st.lists(logits, min_size=1, max_size=4), st.booleans())


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Problems of four tasks in any order of rows; the true option of multiple choice comes
    first.
    """
    rows: Table = []
    for group, (task, values, is_true) in enumerate(
        draw(st.lists(problems, min_size=1, max_size=12))
    ):
        if KINDS[TASKS[task]] == "boolean":
            rows.append((task, group, 0, values[0], int(is_true)))
        else:
            rows += [
                (task, group, column, value, int(column == 0))
                for column, value in enumerate(values)
            ]
    return draw(st.permutations(rows))


def metrics(table: Table) -> dict[str, float]:
    return statement_metrics(np.array(table, dtype=np.float64), TASKS, KINDS, PARTS)


def of_metric(found: Mapping[str, float], metric: str) -> dict[str, float]:
    return {
        name.partition("/")[2]: value
        for name, value in found.items()
        if name.startswith(f"{metric}/")
    }


def weighted(table: Table, name: str) -> list[tuple[float, float, int]]:
    """(weight, logit, label) of each statement of a set."""
    sizes = Counter(task for task, *_ in table)
    return [
        (1 / sizes[task], logit, label)
        for task, _, _, logit, label in table
        if TASKS[task] in MEMBERS[name]
    ]


def weighted_sets(table: Table) -> dict[str, list[tuple[float, float, int]]]:
    rows = {name: weighted(table, name) for name in MEMBERS if name != "mean"}
    return {name: own for name, own in rows.items() if own}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# Multiple choice
# --------------------------------------------------------------------------------------------------


def accuracy_of_task(table: Table, task: int) -> float | None:
    """Share of problems in which no later statement is above the first."""
    if KINDS[TASKS[task]] == "boolean":
        return None
    by_problem: dict[int, dict[int, float]] = {}
    for own, group, column, logit, _ in table:
        if own == task:
            by_problem.setdefault(group, {})[column] = logit
    right = [
        float(all(logits[0] >= logit for logit in logits.values()))
        for logits in by_problem.values()
    ]
    return mean(right) if right else None


@few
@given(tables())
def test_accuracy_is_the_share_of_problems_whose_true_statement_is_best_and_parts_are_means_of_tasks(
    table: Table,
) -> None:
    of_tasks = {task: accuracy_of_task(table, number) for number, task in enumerate(TASKS)}
    known = {task: value for task, value in of_tasks.items() if value is not None}
    wanted = {
        name: [known[task] for task in own if task in known]
        for name, own in MEMBERS.items()
        if name != "all"
    }
    found = of_metric(metrics(table), "accuracy")
    assert found == pytest.approx({name: mean(values) for name, values in wanted.items() if values})


def test_the_lowest_column_wins_a_tie_and_the_tie_is_told() -> None:
    table: Table = [
        (0, 0, 1, 1.0, 0),
        (0, 0, 0, 1.0, 1),
        (0, 1, 0, 2.0, 0),
        (0, 1, 1, 2.0, 1),
        (0, 2, 0, 3.0, 1),
    ]
    found = metrics(table)
    assert found["accuracy/copa"] == pytest.approx(2 / 3)
    assert found["tied/copa"] == pytest.approx(2 / 3)
    assert best_rows(np.array(table)).tolist() == [1, 2, 4]


def test_only_a_tie_for_the_best_place_is_a_tie() -> None:
    table: Table = [
        (0, 0, 0, 3.0, 1),
        (0, 0, 1, 1.0, 0),
        (0, 0, 2, 1.0, 0),
        (0, 1, 0, 1.0, 1),
        (0, 1, 1, 0.0, 0),
    ]
    assert metrics(table)["tied/copa"] == 0.0


def test_problems_of_two_tasks_may_share_a_number() -> None:
    table: Table = [(0, 0, 0, 1.0, 1), (0, 0, 1, 0.0, 0), (2, 0, 0, 0.0, 1), (2, 0, 1, 1.0, 0)]
    found = of_metric(metrics(table), "accuracy")
    assert (found["copa"], found["swag"], found["mean"]) == (1.0, 0.0, 0.5)
    assert best_rows(np.array(table)).tolist() == [0, 3]


# Statements
# --------------------------------------------------------------------------------------------------


@few
@given(tables())
def test_weighted_accuracy_lets_every_task_weigh_the_same(table: Table) -> None:
    wanted = {}
    for name, own in weighted_sets(table).items():
        right = sum(weight for weight, logit, label in own if (logit > 0) == (label == 1))
        wanted[name] = right / sum(weight for weight, _, _ in own)
    assert of_metric(metrics(table), "weighted_accuracy") == pytest.approx(wanted)


@few
@given(tables())
def test_auroc_is_the_weighted_share_of_pairs_in_order(table: Table) -> None:
    wanted = {}
    for name, own in weighted_sets(table).items():
        pairs = [(w * v, x - y) for w, x, label in own if label for v, y, other in own if not other]
        if pairs:
            above = sum(
                weight * (1.0 if gap > 0 else 0.5 if gap == 0 else 0.0) for weight, gap in pairs
            )
            wanted[name] = above / sum(weight for weight, _ in pairs)
    assert of_metric(metrics(table), "auroc") == pytest.approx(wanted)


def average_precision(own: list[tuple[float, float, int]]) -> float:
    """Over the distinct logits, the highest first: precision so far times the recall that the logit
    adds.
    """
    total, found = sum(weight for weight, _, label in own if label), 0.0
    for threshold in {logit for _, logit, _ in own}:
        taken = [(weight, label) for weight, logit, label in own if logit >= threshold]
        precision = sum(weight for weight, label in taken if label) / sum(
            weight for weight, _ in taken
        )
        found += (
            precision
            * sum(weight for weight, logit, label in own if label and logit == threshold)
            / total
        )
    return found


@few
@given(tables())
def test_average_precision_adds_precision_times_the_recall_gained(table: Table) -> None:
    found = metrics(table)
    for sign, name in ((1, "true"), (-1, "false")):
        own_class = 1 if name == "true" else 0
        wanted = {}
        for part, own in weighted_sets(table).items():
            turned = [
                (weight, sign * logit, int(label == own_class)) for weight, logit, label in own
            ]
            if any(label for _, _, label in turned):
                wanted[part] = average_precision(turned)
        assert of_metric(found, f"ap_{name}") == pytest.approx(wanted)


def read_off(own: list[tuple[float, float, int]]) -> dict[str, float]:
    """Precision, recall and F1 of logits above 0, where logits lie on both sides of it; else what
    was published.
    """
    taken = [(weight, label) for weight, logit, label in own if logit > 0]
    if not taken or len(taken) == len(own):
        return {"precision": 1.0, "recall": 0.0, "f1": 0.0}
    hit = sum(weight for weight, label in taken if label)
    precision = hit / sum(weight for weight, _ in taken)
    recall = hit / sum(weight for weight, _, label in own if label)
    return {
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / (precision + recall) if hit else 0.0,
    }


@few
@given(tables())
def test_precision_recall_and_f1_are_those_of_logits_beyond_0(table: Table) -> None:
    found = metrics(table)
    for sign, name in ((1, "true"), (-1, "false")):
        own_class = 1 if name == "true" else 0
        wanted: dict[str, dict[str, float]] = {"precision": {}, "recall": {}, "f1": {}}
        for part, own in weighted_sets(table).items():
            turned = [
                (weight, sign * logit, int(label == own_class)) for weight, logit, label in own
            ]
            if any(label for _, _, label in turned):
                for metric, value in read_off(turned).items():
                    wanted[metric][part] = value
        for metric, values in wanted.items():
            assert of_metric(found, f"{metric}_{name}") == pytest.approx(values)


def test_when_all_logits_are_positive_both_classes_read_1_and_0_as_published() -> None:
    found = metrics([(1, 0, 0, 1.0, 1), (1, 1, 0, 2.0, 0), (1, 2, 0, 3.0, 1)])
    for name in ("true", "false"):
        assert (
            found[f"precision_{name}/creak"],
            found[f"recall_{name}/creak"],
            found[f"f1_{name}/creak"],
        ) == (1, 0, 0)


def test_f1_is_0_rather_than_nothing_when_no_prediction_of_a_class_is_right() -> None:
    found = metrics([(1, 0, 0, -1.0, 1), (1, 1, 0, 2.0, 0)])
    assert (found["precision_true/creak"], found["recall_true/creak"], found["f1_true/creak"]) == (
        0,
        0,
        0,
    )


@few
@given(tables())
def test_ece_is_that_of_the_reference_library_over_statements_of_whatever_task(
    table: Table,
) -> None:
    wanted = {}
    for name, own in weighted_sets(table).items():
        scores = scores_of([logit for _, logit, _ in own])
        labels = [label for _, _, label in own]
        share, score = calibration_curve(
            labels, scores, n_bins=10, strategy="quantile", pos_label=1
        )
        wanted[name] = float(np.mean(np.abs(share - score)))
    assert of_metric(metrics(table), "ece") == pytest.approx(wanted)


# What does not exist
# --------------------------------------------------------------------------------------------------


@few
@given(tables())
def test_every_metric_is_a_finite_number_between_0_and_1(table: Table) -> None:
    assert all(
        math.isfinite(value) and -1e-12 <= value <= 1 + 1e-12 for value in metrics(table).values()
    )


@few
@given(tables())
def test_the_order_of_rows_changes_nothing(table: Table) -> None:
    assert metrics(sorted(table)) == pytest.approx(metrics(table), abs=1e-12)


def test_booleans_have_no_accuracy() -> None:
    found = metrics([(1, 0, 0, 1.0, 1), (1, 1, 0, -2.0, 0)])
    assert not of_metric(found, "accuracy")
    assert not of_metric(found, "tied")
    assert found["weighted_accuracy/all"] == 1.0


def test_one_class_alone_has_neither_auroc_nor_metrics_of_the_other() -> None:
    found = metrics([(1, 0, 0, 1.0, 1), (1, 1, 0, -2.0, 1)])
    assert not of_metric(found, "auroc")
    assert not [name for name in found if "_false/" in name]
    assert found["recall_true/creak"] == 0.5
    assert "ece/creak" in found


def test_sets_without_a_task_are_not_named() -> None:
    names = {name.partition("/")[2] for name in metrics([(1, 0, 0, 1.0, 1)])}
    assert names == {"all", "unseen", "unseen2", "creak"}


def test_an_empty_table_has_no_metrics() -> None:
    assert statement_metrics(torch.empty(0, 5, dtype=torch.float64), TASKS, KINDS, PARTS) == {}


def test_a_tensor_reads_as_an_array() -> None:
    table: Table = [(1, 0, 0, 1.0, 1), (0, 1, 0, -2.0, 1), (0, 1, 1, -1.0, 0)]
    tensor = torch.tensor(table, dtype=torch.float64)
    assert statement_metrics(tensor, TASKS, KINDS, PARTS) == metrics(table)


def test_a_logit_that_is_not_finite_is_told_with_its_place() -> None:
    with refused(
        "verifier_logits_not_finite", bad=1, count=2, value="nan", task="creak", problem=7, column=0
    ):
        metrics([(1, 3, 0, 1.0, 1), (1, 7, 0, float("nan"), 0)])


def test_importing_the_metrics_imports_neither_scikit_learn_nor_matplotlib() -> None:
    code = (
        "import sys, trainer.tasks.vera.metrics, trainer.tasks.vera.pictures\n"
        "print(sorted({'sklearn', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
